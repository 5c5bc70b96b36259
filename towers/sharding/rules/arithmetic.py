"""Arithmetic of sizes: what is computed of numbers of rows is a number of rows again, or one that has to be computed anew."""
import operator

import numpy as np

from towers.sharding.placements import COMPUTED, Additive

__all__ = ["SIZES", "is_of_size", "of_sizes"]


def of_sizes(kind, arrays):
    """Returns what an op of a type computes of elements of `Size`s.

    Args:
      kind: str, the type.
      arrays: list of arrays of objects, which are broadcast.
    """
    function, arrays = SIZES.get(kind, _computed), np.broadcast_arrays(*arrays)
    found = np.empty(arrays[0].shape, object)
    for index in np.ndindex(found.shape):
        found[index] = function(*[array[index] for array in arrays])
    return found


def is_of_size(element):
    """Tells whether an element of a `Size` depends on sizes of the batch."""
    return isinstance(element, Additive) or element is COMPUTED


def _computed(*elements):
    """Returns what is computed of elements in no special way: it is of a size if one of them is."""
    return COMPUTED if any(map(is_of_size, elements)) else None


def _by(function):
    def of_pair(a, b):
        if is_of_size(a) or is_of_size(b) or a is None or b is None:
            return _computed(a, b)
        return function(a, b)
    return of_pair


def _times(a, b):
    for number, other in ((a, b), (b, a)):
        if isinstance(other, Additive) and not is_of_size(number):
            if number == 0:
                return 0
            is_known = number is not None and other.times is not None and _is_exact(number)
            return other._replace(times=number * other.times if is_known else None)
    return _by(operator.mul)(a, b)


def _is_exact(number):
    """Tells whether sizes are multiplied by a number without rounding: 0.7 * 6 a row, of five rows, is not 0.7 * 30."""
    return isinstance(number, int) or isinstance(number, float) and (number * 1024).is_integer()


def _plus(a, b):
    if isinstance(a, Additive) and isinstance(b, Additive) and a.rows == b.rows and not (a.is_raised or b.is_raised):
        return Additive(None if None in (a.times, b.times) else a.times + b.times, a.rows)
    if isinstance(a, Additive) and isinstance(b, (int, float)) and b == 0:
        return a
    if isinstance(b, Additive) and isinstance(a, (int, float)) and a == 0:
        return b
    return _by(operator.add)(a, b)


def _minus(a, b):
    if isinstance(a, Additive) and isinstance(b, Additive) and a[1:] == b[1:] and None not in (a.times, b.times):
        return 0 if a.times == b.times else COMPUTED if a.times < b.times or a.is_raised else Additive(a.times - b.times, a.rows)
    if isinstance(a, Additive) and isinstance(b, (int, float)) and b == 0:
        return a
    return _by(operator.sub)(a, b)


def _over(a, b):
    if isinstance(a, Additive) and isinstance(b, Additive) and None not in (a.times, b.times) and (
            a.rows == b.rows and a.times % b.times == 0):
        return a.times // b.times
    if isinstance(a, Additive) and isinstance(b, int) and b:
        if b == 1:
            return a
        if a.times is not None and a.times % b == 0:
            return a._replace(times=a.times // b)
    return COMPUTED if is_of_size(a) or is_of_size(b) else _by(operator.floordiv)(a, b) if b else None


def _most(a, b):
    for number, other in ((a, b), (b, a)):
        if isinstance(other, Additive) and other.times and isinstance(number, int) and number <= 1:
            return other._replace(is_raised=other.is_raised or number == 1)  # the whole batch has examples
    return a if _is_same(a, b) else _by(max)(a, b)


def _least(a, b):
    return a if _is_same(a, b) else _by(min)(a, b)


def _is_same(a, b):
    return isinstance(a, Additive) and a == b and a.times is not None


SIZES = {"Mul": _times, "Add": _plus, "AddV2": _plus, "Sub": _minus, "FloorDiv": _over, "Maximum": _most,
         "Minimum": _least,
         "FloorMod": _by(operator.mod), "Neg": lambda a: COMPUTED if is_of_size(a) else None if a is None else -a}
