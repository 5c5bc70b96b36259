"""What public functions are handed: an argument of another kind is named, with what it has to be, before anything is built."""
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["CONFIG", "DEVICE", "FLAG", "FUNCTION", "INITIALIZER", "Kind", "LIST", "NUMBER", "OPTIMIZER", "SCALAR", "STEP", "TEXT",
           "VARIABLES", "WHOLE", "as_tensor", "check", "optional"]


class Kind(NamedTuple):
    """What an argument has to be.

    Attributes:
      what: str, for messages.
      holds: a function of a value that tells whether it is that.
    """
    what: str
    holds: Callable[[Any], bool]


def _is_number(value):
    is_scalar = isinstance(value, np.ndarray) and not value.ndim
    return is_scalar or isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _is_scalar(value):
    return _is_number(value) or (tf.is_tensor(value) or isinstance(value, tf.Variable)) and value.shape.rank in (0, None)


def _is_initializer(value):
    return callable(value) or tf.is_tensor(value) or _is_number(value) or isinstance(value, (list, tuple, np.ndarray))


CONFIG = Kind("a tf.ConfigProto", lambda value: isinstance(value, tf.ConfigProto))
DEVICE = Kind("the name of a device", lambda value: isinstance(value, str))
FLAG = Kind("True or False", lambda value: isinstance(value, (bool, np.bool_)))
FUNCTION = Kind("a function", callable)
INITIALIZER = Kind("an initializer", _is_initializer)
LIST = Kind("a list", lambda value: isinstance(value, (list, tuple)) or hasattr(value, "__next__"))
NUMBER = Kind("a number", _is_number)
OPTIMIZER = Kind("a tf.train.Optimizer", lambda value: isinstance(value, tf.train.Optimizer))
SCALAR = Kind("a number or a scalar tensor", _is_scalar)
STEP = Kind("an integer variable", lambda value: hasattr(value, "assign_add"))
TEXT = Kind("a str", lambda value: isinstance(value, str))
WHOLE = Kind("an int", lambda value: isinstance(value, (int, np.integer)) and not isinstance(value, bool))
VARIABLES = Kind("a list of variables", lambda value: isinstance(value, (list, tuple)) and bool(value) and all(
    hasattr(each, "dtype") for each in tf.nest.flatten(value)))


def optional(kind):
    """Returns the `Kind` of what may be None too."""
    return Kind(kind.what + ", or None", lambda value: value is None or kind.holds(value))


def check(kind, **values):
    """Raises TypeError for the first of some arguments, by their names, that is not of a `Kind`."""
    for name, value in values.items():
        if not kind.holds(value):
            raise TypeError("%s has to be %s, not %r." % (name, kind.what, value))


def as_tensor(value, name):
    """Returns an argument as a tensor; raises TypeError, by its name, for what can't be made one."""
    try:
        return tf.convert_to_tensor(value)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise TypeError("%s has to be a tensor, or what tf.convert_to_tensor makes one of, not %r." % (name, value)) from error
