"""Batch normalization over all towers: N towers normalize with the moments of the whole batch.

    y = tf_syncbn.sync_batch_norm(x, training=True)     # in a model function that towers.TowerBuilder builds
"""
import towers  # noqa: F401  says in one sentence what is wrong where TensorFlow is missing

from tf_syncbn import checkpoints, slim
from tf_syncbn.batch_norm import sync_batch_norm
from tf_syncbn.conversion import ConvertedLayer, convert_model
from tf_syncbn.recalibration import recalibrate

__all__ = ["ConvertedLayer", "checkpoints", "convert_model", "recalibrate", "slim", "sync_batch_norm"]
