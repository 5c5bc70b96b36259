"""Replicas of a model function across devices, trained as one, in TensorFlow graphs.

    builder = towers.TowerBuilder(devices=["/gpu:0", "/gpu:1"])
    replicas = builder.build(model_fn, (images, labels))
    train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
"""
try:
    import tensorflow.compat.v1  # noqa: F401
except ImportError as error:
    raise ImportError("towers needs TensorFlow, 1.15 or 2.x, and it can't be imported here: install the build that fits "
                      "your machine, such as `pip install tensorflow`.") from error

from towers import workers
from towers.api.wording import TowersWarning
from towers.batches.batch import PerTower
from towers.builder import TowerBuilder
from towers.context import TowerContext, current_tower, each_example, may_differ
from towers.devices.placement import find_devices, session_config
from towers.estimators import TowerOptimizer, replicate_model_fn
from towers.meeting.cross_tower import all_gather, all_reduce
from towers.meeting.exchanges import exchange
from towers.meeting.turns import TowerMismatchError
from towers.replicas import Tower, Towers
from towers.sharding import placement_rule, whole_batch
from towers.state.update_ops import collect_update_ops
from towers.training.accumulation import accumulate
from towers.training.gradients import average_gradients, compute_gradients
from towers.training.loop import repeat
from towers.training.loss_scale import scale_loss
from towers.training.losses import softmax_cross_entropy
from towers.training.masking import mask_gradients
from towers.training.minimize import minimize
from towers.training.transforms import check_finite, clip_by_global_norm, clip_by_value
from towers.version import __version__

__all__ = [
    "PerTower",
    "Tower",
    "TowerBuilder",
    "TowerContext",
    "TowerMismatchError",
    "TowerOptimizer",
    "Towers",
    "TowersWarning",
    "__version__",
    "accumulate",
    "all_gather",
    "all_reduce",
    "average_gradients",
    "check_finite",
    "clip_by_global_norm",
    "clip_by_value",
    "collect_update_ops",
    "compute_gradients",
    "current_tower",
    "each_example",
    "exchange",
    "find_devices",
    "mask_gradients",
    "may_differ",
    "minimize",
    "placement_rule",
    "repeat",
    "replicate_model_fn",
    "scale_loss",
    "session_config",
    "softmax_cross_entropy",
    "whole_batch",
    "workers",
]
