"""Checkpoints of tf.layers, slim and tensorpack, each restored into models of any other, in the graph or from files.

    tf.train.init_from_checkpoint(path, tf_syncbn.checkpoints.assignment_map(path))
    python -m tf_syncbn.checkpoints convert IN OUT --to slim
"""
from tf_syncbn.checkpoints.files import assignment_map, convert
from tf_syncbn.checkpoints.variable_names import rename

__all__ = ["assignment_map", "convert", "rename"]
