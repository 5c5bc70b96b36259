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
from towers.accumulation import accumulate
from towers.batch import PerTower
from towers.builder import TowerBuilder
from towers.context import TowerContext, current_tower, each_example, may_differ
from towers.cross_tower import all_gather, all_reduce
from towers.estimators import TowerOptimizer, replicate_model_fn
from towers.exchanges import exchange
from towers.gradients import average_gradients, compute_gradients
from towers.loop import repeat
from towers.loss_scale import scale_loss
from towers.losses import softmax_cross_entropy
from towers.masking import mask_gradients
from towers.placement import find_devices, session_config
from towers.replicas import Tower, Towers
from towers.sharding import placement_rule, whole_batch
from towers.training import minimize
from towers.transforms import check_finite, clip_by_global_norm, clip_by_value
from towers.turns import TowerMismatchError
from towers.update_ops import collect_update_ops
from towers.version import __version__
from towers.wording import TowersWarning

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
