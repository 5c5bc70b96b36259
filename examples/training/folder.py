"""What stands in a training folder, checked before anything is written there."""
import glob
import os
import re

import numpy as np
import tensorflow.compat.v1 as tf

from examples.training.files import check_file
from examples.training.report import WriteError, read_json, reason, write_json

__all__ = ["UsageError", "changed_settings", "check_checkpoint", "check_folder", "check_settings", "make_saver", "read_history",
           "read_settings", "read_sums", "remove_leftovers", "restore", "save", "saved_checkpoints"]

_INDEX = re.compile(r"model\.ckpt-(\d+)\.index$")
_KEPT = 3
_LARGEST_STATE = 1 << 20  # bytes, of the file "checkpoint"
# What TensorFlow writes before it gives a file its name, and a killed process leaves behind under a random one.
_LEFTOVERS = re.compile(r"model\.ckpt-\d+\.\S+\.tempstate\d+$|checkpoint\.tmp[0-9a-f]*$")
_FILES = ("checkpoint", "settings.json", "history.json", "sums.json", "results.json", "curve.png")
# What a training does not follow: where its files and data are, and how many towers share its batches.
_NOT_FOLLOWED = ("train_dir", "data", "data_dir", "data_name", "download", "save_every", "evaluate_every", "num_towers",
                 "num_workers")
_WITHOUT_IT = "Delete its files to go on from the one before it, or choose another --train-dir."
_OF_A_RECORD = ("step", "epoch", "train_loss", "train_accuracy")


class UsageError(ValueError):
    """What was asked can't be done; the message is one sentence for the person at the terminal."""


def saved_checkpoints(train_dir):
    """Returns the paths of the checkpoints in a folder, the newest last.

    They are those that its state file names; without that file, with a damaged one, or where one of those is gone, all that are
    whole.

    Raises:
      UsageError: if there are checkpoints and none is known to be whole, or the folder can't be read.
    """
    # The folder may have been moved since: the names are what counts.
    named = [os.path.join(train_dir, os.path.basename(path)) for path in _state(train_dir)]
    if named and all(os.path.lexists(path + ".index") for path in named):
        return named
    try:
        names = os.listdir(train_dir) if os.path.isdir(train_dir) else []
    except OSError as error:
        raise UsageError("The folder %s can't be read: %s." % (train_dir, error.strerror)) from error
    numbers = [_INDEX.match(name) for name in names]
    found = [os.path.join(train_dir, "model.ckpt-%d" % number) for number in sorted(int(m.group(1)) for m in numbers if m)]
    whole = [path for path in found if _is_whole(path)]
    if found and not whole:
        raise UsageError("None of the checkpoints in %s can be read; the newest is %s. Choose another --train-dir."
                         % (train_dir, os.path.basename(found[-1])))
    return whole


def _state(train_dir):
    """Returns the paths in the state file, the newest last; none where it is damaged."""
    try:
        check_file(os.path.join(train_dir, "checkpoint"), _LARGEST_STATE)
        state = tf.train.get_checkpoint_state(train_dir)
    except (OSError, ValueError):  # it is empty, or no text; TensorFlow returns None for other text
        state = None
    paths = list(state.all_model_checkpoint_paths) if state else []
    return paths if paths[-1:] == [state and state.model_checkpoint_path] else []  # the newest is said twice


def _check_files(path):
    for name in glob.glob(glob.escape(path) + ".*"):
        check_file(name)


def _is_whole(path):
    try:
        _check_files(path)
        reader = tf.train.load_checkpoint(path)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except Exception:  # a damaged one raises one of several kinds
        return False
    return True


def restore(saver, session, path):
    """Restores a checkpoint.

    Raises:
      UsageError: if it is damaged.
    """
    try:
        saver.restore(session, path)
    except (tf.errors.OpError, ValueError) as error:
        raise UsageError("The checkpoint %s can't be read: it is damaged (%s). %s"
                         % (path, type(error).__name__, _WITHOUT_IT)) from error


def make_saver():
    """Returns the `tf.train.Saver` of a training, which keeps its last checkpoints."""
    return tf.train.Saver(max_to_keep=_KEPT)


def save(saver, session, train_dir, step, sums):
    """Saves a checkpoint, and what the epoch's steps before it came to.

    Args:
      saver: what `make_saver` returned.
      session: `tf.Session`.
      train_dir: str.
      step: int, the number of steps done.
      sums: float64 [3], the sums of loss and accuracy over the epoch's steps so far, and how many these are.

    Raises:
      WriteError: if it can't be written; the earlier ones are there still.
    """
    path = os.path.join(train_dir, "sums.json")
    before = [(number, of_it) for number, of_it in _read_json(path, {}).items() if number.isdigit() and int(number) < step]
    write_json(path, dict(before[-_KEPT:] + [(str(step), list(sums))]))
    try:
        saver.save(session, os.path.join(train_dir, "model.ckpt"), global_step=step, write_meta_graph=False)
    except (tf.errors.OpError, ValueError) as error:
        raise WriteError("The checkpoint of step %d can't be written to %s: %s. The earlier ones are as they were."
                         % (step, train_dir, reason(error))) from error


def remove_leftovers(train_dir):
    """Removes what processes that were killed while they saved have left half written.

    Raises:
      WriteError: if it can't be removed.
    """
    try:
        for name in os.listdir(train_dir):
            if _LEFTOVERS.match(name):
                os.remove(os.path.join(train_dir, name))
    except OSError as error:
        raise WriteError("%s can't be removed: %s." % (error.filename, error.strerror)) from error


def read_sums(train_dir, step, steps):
    """Returns the `sums` that `save` was given at a step, zeros where they are not of `steps` steps.

    Raises:
      UsageError: if the file is damaged.
    """
    path = os.path.join(train_dir, "sums.json")
    sums = _read_json(path, {}).get(str(step), [0, 0, 0])
    if not isinstance(sums, list) or len(sums) != 3 or not all(isinstance(value, (int, float)) for value in sums):
        raise UsageError("%s is damaged: it has %r for step %d. Delete it to go on without." % (path, sums, step))
    return np.array(sums, np.float64) if sums[2] == steps else np.zeros(3)


def check_folder(train_dir):
    """Makes the folder, and raises `UsageError` if a training can't write its files there."""
    try:
        os.makedirs(train_dir, exist_ok=True)
    except OSError as error:
        raise UsageError("The folder %s can't be made: %s. Choose another --train-dir." % (train_dir, error.strerror)) from error
    for path in (os.path.join(train_dir, name) for name in _FILES):
        if os.path.lexists(path) and not os.path.isfile(path):
            raise UsageError("%s is %s where a file should be: move it away, or choose another --train-dir."
                             % (path, "a folder" if os.path.isdir(path) else "something else"))


def read_settings(train_dir):
    """Returns the settings that `train_dir` was trained with, a dict, empty where there are none.

    Raises:
      UsageError: if the file is damaged.
    """
    return _read_json(os.path.join(train_dir, "settings.json"), {})


def read_history(train_dir, step, measures):
    """Returns the records of the evaluations up to `step`, a list of dicts with the names of `measures` among their keys.

    Raises:
      UsageError: if the file is damaged.
    """
    path, names = os.path.join(train_dir, "history.json"), _OF_A_RECORD + tuple(measure.name for measure in measures)
    history = _read_json(path, [])
    if not all(isinstance(record, dict) and all(isinstance(record.get(name), (int, float)) for name in names)
               for record in history):
        raise UsageError("%s is damaged: not all of its records have numbers for %s." % (path, ", ".join(names)))
    return [record for record in history if record["step"] <= step]


def _read_json(path, default):
    try:
        content = read_json(path, default)
    except ValueError as error:  # of JSON or of its encoding
        raise UsageError("%s is damaged: %s." % (path, error)) from error
    except OSError as error:
        raise UsageError("%s can't be read: %s." % (path, error.strerror)) from error
    if not isinstance(content, type(default)):
        raise UsageError("%s is damaged: it holds a %s where a %s was expected."
                         % (path, type(content).__name__, type(default).__name__))
    return content


def check_settings(train_dir, identity):
    """Raises `UsageError` if the training folder is another model's or another data set's, as the dict `identity` tells."""
    before = read_settings(train_dir)
    for name, now in identity.items():
        if before.get(name, now) != now:
            raise UsageError("%s holds a training with %s %s, and %s was asked for: choose another --train-dir."
                             % (train_dir, name, before[name], now))


def changed_settings(settings):
    """Returns which of the settings that a training follows are others than those that its folder was left with.

    Args:
      settings: of the command line.

    Returns:
      A list of (name, value now, value before).
    """
    before = read_settings(settings.train_dir)
    return [(name, now, before[name]) for name, now in vars(settings).items()
            if name in before and name not in _NOT_FOLLOWED and before[name] != now]


def check_checkpoint(path, variables, model_name):
    """Raises `UsageError` if a checkpoint can't be read or does not hold these variables in their shapes."""
    try:
        _check_files(path)
        saved = dict(tf.train.list_variables(path))
    except OSError as error:
        raise UsageError("The checkpoint %s can't be read: %s: %s. %s"
                         % (path, os.path.basename(error.filename), error.strerror, _WITHOUT_IT)) from error
    except Exception as error:  # a damaged index raises one of several kinds
        raise UsageError("The checkpoint %s can't be read: %s. %s"
                         % (path, str(error).split("\n")[0].rstrip("."), _WITHOUT_IT)) from error
    missing = [v.op.name for v in variables if v.op.name not in saved]
    if missing:
        raise UsageError("The checkpoint %s is not of a %s: %s is not in it, one of %d of %d variables. Choose another "
                         "--train-dir." % (path, model_name, missing[0], len(missing), len(variables)))
    for variable in variables:
        name, shape = variable.op.name, variable.shape.as_list()
        if saved[name] != shape:
            raise UsageError("The checkpoint %s is not of a %s: %s has shape %s, not %s. Choose another --train-dir."
                             % (path, model_name, name, saved[name], shape))
    more = sorted(name for name in set(saved) - {v.op.name for v in variables} if name.endswith("kernel"))
    if more:
        raise UsageError("The checkpoint %s is not of a %s: it has %s too. Choose another --train-dir."
                         % (path, model_name, more[0]))
