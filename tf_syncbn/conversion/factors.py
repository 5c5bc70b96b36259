"""Axes as products of factors, so that it can be told which axis the examples lie along after any number of reshapes.

A tensor's axes are a tuple of tuples of `Factor`, the outermost first. A reshape joins all factors and divides them among
its axes anew; an axis of examples that is divided leaves examples along both parts.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

__all__ = ["Factor", "Known", "along_first", "divide", "join", "level", "multiply", "plain", "sizes_of", "union",
           "with_sizes"]


class Factor(NamedTuple):
    """A factor of the size of an axis.

    Attributes:
      size: int, or what stands for an unknown one wherever it occurs: a pair (name of a tensor, axis).
      of_examples: 2 if examples are known to lie along it, 1 if that is presumed, 0 if not.
    """
    size: Any
    of_examples: int = 0


class Known(NamedTuple):
    """What is known of a tensor.

    Attributes:
      axes: tuple of tuples of `Factor`; None where the rank is unknown. Of a TensorArray's flow, or a list of tensors: those
        of all elements, stacked.
      sizes: what a scalar or a vector of sizes holds, a tuple with the factors of each, or None for an unknown one; None for
        other tensors.
    """
    axes: Any = None
    sizes: Any = None


def level(factors):
    """Returns how sure it is that examples lie along a product of factors, see `Factor.of_examples`."""
    return max((factor.of_examples for factor in factors), default=0)


def plain(tensor):
    """Returns the axes of a tensor without examples, None where its rank is unknown."""
    if tensor.shape.rank is None:
        return None
    return tuple((Factor((tensor.name, i) if size is None else size),) for i, size in enumerate(tensor.shape.as_list()))


def with_sizes(axes, tensor):
    """Returns a tensor's axes, where they have no examples with the sizes that are known."""
    if axes is None or tensor.shape.rank != len(axes):
        return axes
    return tuple(axis if level(axis) or not isinstance(own[0].size, int) else own for axis, own in zip(axes, plain(tensor)))


def along_first(tensor, of_examples=1):
    """Returns the axes of a tensor with examples along axis 0."""
    axes = plain(tensor)
    return axes and ((axes[0][0]._replace(of_examples=of_examples),),) + axes[1:]


def multiply(sizes):
    """Returns the one size that all multiply to, as `Known.sizes` has it."""
    return (None if None in sizes else sum(sizes, ()),)


def sizes_of(tensor, known):
    """Returns the sizes that a scalar or vector holds, see `Known`, constants among them."""
    if known.sizes is None and tensor.dtype.base_dtype.is_integer and tensor.shape.rank in (0, 1):
        value = tf.get_static_value(tensor)
        if value is not None:
            return tuple((Factor(int(number)),) for number in value.reshape([-1]))
    return known.sizes


def join(several, tensor):
    """Returns the axes of a tensor that is like several others, whose axes are () where they lack one.

    What is known of examples counts, else what is presumed; sizes are the tensor's own.
    """
    surest = max((level(factors) for axes in several for factors in axes), default=0)
    joined = []
    for i, (own,) in enumerate(plain(tensor)):
        there = [axes[i] for axes in several if axes[i]]
        of_examples = [factors for factors in there if surest and level(factors) == surest]
        unknown = [] if isinstance(own.size, int) else [f for f in there if not all(isinstance(x.size, int) for x in f)]
        joined.append((of_examples or unknown or [(own,)])[0])
    return tuple(joined)


def union(a, b):
    """Returns the axes of what has now axes `a` and now `b`: those of the higher rank, with the examples of both."""
    if a is None or b is None or len(a) != len(b):
        return max(a, b, key=lambda axes: -1 if axes is None else len(axes))
    return tuple(of_b if level(of_b) > level(of_a) else of_a for of_a, of_b in zip(a, b))


def divide(factors, sizes, name):
    """Divides factors among axes.

    Args:
      factors: tuple of `Factor`.
      sizes: list of tuples of factors, the sizes of the axes, or None for unknown ones.
      name: str, names what stays unknown.

    Returns:
      A tuple of axes. They are taken off both ends as far as sizes are known, and what remains is divided by guess.
    """
    left, factors = _take_all(factors, sizes)
    right, factors = _take_all(factors[::-1], sizes[:len(left) - 1 if left else None:-1])
    factors, missing = factors[::-1], len(sizes) - len(left) - len(right)
    if missing == len(factors):
        middle = [(factor,) for factor in factors]
    elif missing == 1:
        middle = [factors]
    else:  # the outermost of several factors is in the outermost axis; others may be in any
        is_outermost = len(factors) > 1 and level(factors[:1]) > level(factors[1:])
        middle = [(Factor((name, i), 0 if i and is_outermost else level(factors)),) for i in range(missing)]
    return tuple(left + middle + [axis[::-1] for axis in right[::-1]])


def _take_all(factors, sizes):
    """Takes factors from the left as long as sizes allow it; returns a list of axes, and the rest of the factors."""
    axes = []
    for size, following in zip(sizes, list(sizes[1:]) + [None]):
        taken = None if size is None else _take(factors, size)
        if taken is None:
            break
        axis, factors = taken
        # One example is an axis of size 1, and belongs where more of them would.
        if axis and factors and factors[0].size == 1 and following != (Factor(1),):
            axis, factors = axis + factors[:1], factors[1:]
        axes.append(axis)
    return axes, factors


def _take(factors, size):
    """Takes factors of a size from the left: returns them and the rest, or None where it can't be told which they are."""
    unknown, number, taken = [factor.size for factor in size if not isinstance(factor.size, int)], 1, ()
    for factor in size:
        number *= factor.size if isinstance(factor.size, int) else 1
    if not unknown and number == 1:
        return (factors[:1], factors[1:]) if factors and factors[0].size == 1 else ((), factors)
    while unknown or number != 1:
        if not factors:
            return None
        factor, factors = factors[0], factors[1:]
        if factor.size in unknown:
            unknown.remove(factor.size)
        elif not isinstance(factor.size, int) or not factor.size:
            return None
        elif number % factor.size == 0:
            number //= factor.size
        elif number not in (0, 1) and factor.size % number == 0:  # by 1, what is left is all unknown
            factors = (factor._replace(size=factor.size // number),) + factors
            factor, number = factor._replace(size=number), 1
        else:
            return None
        taken += (factor,)
    return taken, factors
