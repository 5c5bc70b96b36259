"""Checkpoints' files and variables: which name in a checkpoint a variable takes, and checkpoints with other names.

Names alone are changed, as `tf_syncbn.checkpoints.variable_names` maps them. Values, shapes and layouts, which are alike in all
three dialects, never change, and no file is ever written over.
"""
import os
from typing import Dict, NamedTuple, Optional, Sequence, Union

import tensorflow.compat.v1 as tf

from tf_syncbn.checkpoints.variable_names import invert, lines, move, recognize, rename, spell
from tf_syncbn.checkpoints.whole import FILE_ENDING, refuse_to_overwrite, written_whole
from towers.api.annotations import Variable

__all__ = ["assignment_map", "convert", "read"]

_NAMED = 5  # of variables that an error counts
_LARGEST_STATE = 1 << 20  # bytes, of the file "checkpoint"


class _Checkpoint(NamedTuple):
    prefix: str
    shapes: dict
    dtypes: dict


def assignment_map(checkpoint: Union[str, os.PathLike], variables: Optional[Sequence[Variable]] = None,
                   scopes: Optional[Dict[str, str]] = None, ignore_missing: bool = False) -> Dict[str, Variable]:
    """Returns which name in a checkpoint each variable takes, whatever dialects the two speak.

        tf.train.init_from_checkpoint(path, assignment_map(path))             # initial values, or
        tf.train.Saver(assignment_map(path)).restore(session, path)

    Builds nothing. What the checkpoint has and no variable takes is listed by `tf.logging.info`. contrib's batch norm has no
    `gamma` by default: with `ignore_missing` a layer's own stays at its initial one.

    Args:
      checkpoint: str, a checkpoint's prefix, or a directory, whose latest checkpoint is taken.
      variables: list of variables; None is all global ones, optimizer slots included.
      scopes: dict {regular expression: replacement}, applied in order by `re.sub` to the scope (what is before the last
        name) of each of the checkpoint's names.
      ignore_missing: whether variables that the checkpoint lacks are left out, and listed by `tf.logging.info`.

    Returns:
      A dict from names in the checkpoint to variables.

    Raises:
      ValueError: if there are no variables; naming the first that the checkpoint lacks, with `ignore_missing` if it lacks all;
        for a name of another shape or dtype than its variable; for a variable that may take several names, and a name that
        several may take; for a pattern that matches no scope; for a checkpoint that can't be read.
    """
    held = read(checkpoint)
    variables = tf.global_variables() if variables is None else list(variables)
    if not variables:
        raise ValueError("The graph has no variables yet to take the checkpoint %r: build the model first." % held.prefix)
    found = _match(held, variables, scopes)
    missing = [v.op.name for v in variables if v.op.name not in found]
    left = sorted(set(held.shapes) - set(found.values()))
    if missing and not (ignore_missing and found):
        raise ValueError(
            "The checkpoint %r lacks %d of %d variables:%s\nIn it, no variable takes:%s\nGive `scopes` where layers have other "
            "scopes in it, and `variables` or `ignore_missing=True` where it need not have all of them."
            % (held.prefix, len(missing), len(variables), _first_lines(missing),
               _first_lines(left) or " nothing is left."))
    _check_values(held, variables, found)
    tf.logging.info("Of the checkpoint %r no variable takes:%s", held.prefix, lines(left) or " nothing is left.")
    if missing:
        tf.logging.info("The checkpoint %r lacks, and they keep their initializers:%s", held.prefix, lines(missing))
    return {found[v.op.name]: v for v in variables if v.op.name in found}


def convert(in_path: Union[str, os.PathLike], out_path: Union[str, os.PathLike], to: str,
            scopes: Optional[Dict[str, str]] = None) -> Dict[str, str]:
    """Writes a checkpoint with the names of another dialect and the same values, bit for bit.

    TensorFlow's own ops read and write it, every dtype included, in a folder beside `out_path` that is gone at the end. Killed at
    any moment, this leaves no checkpoint or a whole one, and can be called again. The file `checkpoint` that names a directory's
    latest one is not touched.

    Args:
      in_path: str, a checkpoint's prefix, of either format, or a directory, whose latest checkpoint is taken.
      out_path: str, the new checkpoint's prefix, in an existing directory.
      to: "layers", "slim" or "tensorpack".
      scopes: see `rename`.

    Returns:
      A dict from names to new names.

    Raises:
      ValueError: where `out_path` is `in_path`, exists, is no name for a checkpoint, or is in no directory; for a checkpoint that
        can't be read; and as `rename`.
      tf.errors.OpError: where TensorFlow fails to read or write the values (a truncated file, a full disk).
    """
    checkpoint, out_path = read(in_path), os.fspath(out_path)
    refuse_to_overwrite(checkpoint.prefix, out_path)
    new_names = rename(checkpoint.shapes, to, scopes)
    names = sorted(new_names)
    slices = [""] * len(names)
    with written_whole(out_path) as prefix, tf.Graph().as_default(), tf.device("/cpu:0"):
        values = tf.raw_ops.RestoreV2(prefix=checkpoint.prefix, tensor_names=names, shape_and_slices=slices,
                                      dtypes=[checkpoint.dtypes[name] for name in names])
        write = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=[new_names[name] for name in names],
                                  shape_and_slices=slices, tensors=values)
        with tf.Session(config=tf.ConfigProto(device_count={"GPU": 0})) as session:
            session.run(write)
    return new_names


def _match(checkpoint, variables, scopes):
    """Returns {name of a variable: name in the checkpoint}: the variable's own name if it is there, else one that means it."""
    there = move(recognize(checkpoint.shapes), scopes)
    here = recognize(v.op.name for v in variables + tf.global_variables())
    found = {}
    for to in ("layers", None):  # in one dialect first, then as they are, which outweighs it
        spelled = invert({name: spell(parts, to) for name, parts in there.items()})
        wanted = {v.op.name: spell(here[v.op.name], to) for v in variables}
        found.update((variable, spelled[name]) for variable, name in wanted.items() if name in spelled)
    for variable, names in found.items():
        if len(names) > 1:
            raise ValueError("The variable %r may take several names in the checkpoint %r: %s."
                             % (variable, checkpoint.prefix, ", ".join(names)))
    found = {variable: name for variable, (name,) in found.items()}
    for name, takers in invert(found).items():
        if len(takers) > 1:
            raise ValueError("Several variables may take %r in the checkpoint %r: %s."
                             % (name, checkpoint.prefix, ", ".join(takers)))
    return found


def _first_lines(names):
    more = len(names) - _NAMED
    return lines(names[:_NAMED] + (["and %d more" % more] if more > 0 else []))


def _check_values(checkpoint, variables, found):
    wrong = []
    for variable, name in ((v, found[v.op.name]) for v in variables if v.op.name in found):
        shape, dtype = checkpoint.shapes[name], checkpoint.dtypes[name]
        if not variable.shape.is_compatible_with(shape) or variable.dtype.base_dtype != dtype:
            wrong.append("%s is %s %s, and %s in the checkpoint is %s %s" % (
                variable.op.name, variable.shape.as_list(), variable.dtype.base_dtype.name, name, shape, dtype.name))
    if wrong:
        raise ValueError("%d of %d variables differ from the checkpoint %r:%s\nGive the others as `variables`."
                         % (len(wrong), len(variables), checkpoint.prefix, _first_lines(wrong)))


def read(path):
    """Returns what a checkpoint holds."""
    prefix = os.fspath(path)
    if tf.io.gfile.exists(FILE_ENDING.sub("", prefix) + ".index"):
        prefix = FILE_ENDING.sub("", prefix)
    elif tf.io.gfile.isdir(prefix):
        try:
            _check_state(os.path.join(prefix, "checkpoint"))
            prefix = tf.train.latest_checkpoint(prefix)
        except ValueError:  # it is empty, or no text
            raise ValueError("The file 'checkpoint' in the directory %r is damaged: give a checkpoint's prefix." % path)
        if prefix is None:
            state = tf.train.get_checkpoint_state(path)
            raise ValueError("The directory %r holds no checkpoint that its file 'checkpoint' names%s."
                             % (path, "" if state is None else ", %r" % state.model_checkpoint_path))
    elif not tf.io.gfile.exists(prefix):
        raise ValueError("There is no checkpoint %r." % path)
    for name in (prefix, prefix + ".index", prefix + ".data-00000-of-00001"):  # a pipe would be waited for
        if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
            raise ValueError("%r can't be read as a checkpoint: it is no regular file." % name)
    try:
        reader = tf.train.load_checkpoint(prefix)
    except (tf.errors.OpError, ValueError) as error:
        raise ValueError("%r can't be read as a checkpoint: %s" % (prefix, str(error).split("\n")[0]))
    shapes = reader.get_variable_to_shape_map()
    if any(name.endswith("/.ATTRIBUTES/VARIABLE_VALUE") for name in shapes):
        raise ValueError("%r was saved by tf.train.Checkpoint, whose names are paths of objects. Restore it as it was saved, "
                         "and save the variables by tf.train.Saver." % prefix)
    return _Checkpoint(prefix, shapes, {name: tf.as_dtype(d) for name, d in reader.get_variable_to_dtype_map().items()})


def _check_state(path):
    """Raises `ValueError` for what can't be the file that names a directory's latest checkpoint, and is not to be read."""
    if os.path.exists(path) and not (os.path.isfile(path) and os.path.getsize(path) <= _LARGEST_STATE):
        raise ValueError
