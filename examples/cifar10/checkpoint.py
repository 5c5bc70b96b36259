"""What stands in a training folder, checked before anything is written there."""
import glob
import os

import tensorflow.compat.v1 as tf

from examples.cifar10.report import read_json

__all__ = ["UsageError", "check_checkpoint", "check_settings", "newest_checkpoint", "read_history", "read_settings",
           "restore"]


class UsageError(ValueError):
    """What was asked can't be done; the message is one sentence for the person at the terminal."""


def newest_checkpoint(train_dir):
    """Returns the path of the last checkpoint that was written whole, or None."""
    state = tf.train.get_checkpoint_state(train_dir)
    paths = list(state.all_model_checkpoint_paths) if state else []
    if not paths:  # without its state file, or with a damaged one, a folder still has its checkpoints
        paths = [path[:-len(".index")] for path in glob.glob(os.path.join(glob.escape(train_dir), "model.ckpt-*.index"))]
        paths.sort(key=lambda path: int(path.rsplit("-", 1)[1]))
    for path in reversed(paths):
        # The folder may have been moved since: the names are what counts.
        path = os.path.join(train_dir, os.path.basename(path))
        if tf.train.checkpoint_exists(path):
            return path
    return None


def restore(saver, session, path):
    """Restores a checkpoint.

    Raises:
      UsageError: if it is damaged.
    """
    try:
        saver.restore(session, path)
    except (tf.errors.OpError, ValueError) as error:
        raise UsageError("The checkpoint %s can't be read: it is damaged (%s)." % (path, type(error).__name__)) from error


def read_settings(train_dir):
    """Returns the settings that `train_dir` was trained with, a dict, empty where there are none.

    Raises:
      UsageError: if the file is damaged.
    """
    return _read_json(os.path.join(train_dir, "settings.json"), {})


def read_history(train_dir, step):
    """Returns the records of the epochs up to `step`, a list of dicts.

    Raises:
      UsageError: if the file is damaged.
    """
    return [record for record in _read_json(os.path.join(train_dir, "history.json"), []) if record["step"] <= step]


def _read_json(path, default):
    try:
        return read_json(path, default)
    except ValueError as error:  # of JSON or of its encoding
        raise UsageError("%s is damaged: %s." % (path, error)) from error


def check_settings(settings, data_name):
    """Raises `UsageError` if the training folder is another model's or another data set's."""
    before = read_settings(settings.train_dir)
    for name, now in (("depth", settings.depth), ("data", data_name)):
        if before.get(name, now) != now:
            raise UsageError("%s holds a training with %s %s, and %s was asked for: choose another --train-dir."
                             % (settings.train_dir, name, before[name], now))


def check_checkpoint(path, variables, depth):
    """Raises `UsageError` if a checkpoint can't be read or does not hold these variables in their shapes."""
    try:
        saved = dict(tf.train.list_variables(path))
    except Exception as error:  # a damaged index raises one of several kinds
        raise UsageError("The checkpoint %s can't be read: %s." % (path, str(error).split("\n")[0].rstrip("."))) from error
    for variable in variables:
        shape = saved.get(variable.op.name)
        if shape != variable.shape.as_list():
            raise UsageError(
                "The checkpoint %s is not of a ResNet-%d: %s %s. Choose another --train-dir." % (
                    path, depth, variable.op.name,
                    "is not in it" if shape is None else "has shape %s, not %s" % (shape, variable.shape.as_list())))
    more = sorted(name for name in set(saved) - {v.op.name for v in variables} if name.endswith("kernel"))
    if more:
        raise UsageError("The checkpoint %s is not of a ResNet-%d: it has %s too. Choose another --train-dir."
                         % (path, depth, more[0]))
