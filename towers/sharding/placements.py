"""What a tower's tensor has to do with the whole batch's: its placement.

Let W(t) be what one tower on the whole batch would compute for a tensor t, and t_i what tower i has. A placement says how W(t)
comes of the t_i. The names are the field's: DTensor's Replicate, Shard and Partial. What has not been found out yet is None, and
never one of these.
"""
import dataclasses
from typing import Any, NamedTuple, Optional, Tuple

import numpy as np

__all__ = ["BATCH", "COMPUTED", "Additive", "Blocks", "InTurn", "Listed", "OneRow", "Own", "Partial", "PartialMean", "Placement",
           "Replicate", "RowNumbers", "RowSum", "Rows", "Running", "Shard", "Size", "Turn", "elements_of", "entries_of",
           "moved", "size_of"]


class Rows(NamedTuple):
    """What an axis has an entry for each of: the examples of the batch, or the rows that some op made of them."""
    name: str


BATCH = Rows("the batch")


class Placement:
    """One of the placements below."""


@dataclasses.dataclass(frozen=True)
class Replicate(Placement):
    """W(t) = t_i: the same in every tower, and what one tower would have.

    Attributes:
      value: array, that it is known to be while the graph is built, by what is known of sizes; None where nothing says.
    """
    value: Any = dataclasses.field(default=None, compare=False)

    def is_known_as(self, other):
        """Tells whether as much is known of a value as another `Replicate` knows of its own."""
        are_known = [placement.value is not None for placement in (self, other)]
        return np.array_equal(self.value, other.value) if all(are_known) else not any(are_known)

    def __str__(self):
        return "replicated"


@dataclasses.dataclass(frozen=True)
class Shard(Placement):
    """W(t) is the t_i joined along an axis, in the order of the towers.

    Attributes:
      axis: int, 0 or more.
      rows: `Rows` that the axis counts; where they are BATCH, every example has as many entries.
      times: int, how many entries an example has; None where that is not known.
    """
    axis: int
    rows: Rows
    times: Optional[int] = dataclasses.field(compare=False)

    def __str__(self):
        return "sharded along axis %d" % self.axis


@dataclasses.dataclass(frozen=True)
class Blocks(Placement):
    """The axis is [outer, n] merged: W(t) is the t_i joined along n, as behind `tf.concat([x, x'], 0)`.

    Attributes:
      axis, rows, times: as of `Shard`, of one block.
      outer: int, 2 or more; None where only the graph knows it when it runs: by its size, for there are `times` rows for each
        of the batch in a block then.
    """
    axis: int
    outer: Optional[int]
    rows: Rows
    times: Optional[int]

    def __str__(self):
        return "%s blocks sharded along axis %d" % ("some" if self.outer is None else self.outer, self.axis)


@dataclasses.dataclass(frozen=True)
class RowNumbers(Placement):
    """The t_i joined along an axis, each plus the number of the whole batch's row that is the tower's first.

    Attributes:
      axis, rows, times: as of `Shard`.
      of: `Additive`, the rows that are numbered.
      count: (tensor, axis) whose size is how many these are; (tensor, None) is that number itself.
      column: int, the only entry of the last axis that numbers rows; None where all entries do.
      offset: int, what was added to all of them, so that they are an example's first row no more; None where that is not known.
    """
    axis: int
    rows: Rows
    times: Optional[int] = dataclasses.field(compare=False)
    of: "Additive"
    count: Any = dataclasses.field(compare=False)
    column: Optional[int] = None
    offset: Optional[int] = 0

    @property
    def spacing(self):
        """int, how many rows lie from one number to the next, as far as there are so many for each; 0 where that is not known."""
        is_known = self.rows == self.of.rows and self.times and self.of.times and self.of.times % self.times == 0
        return self.of.times // self.times if is_known else 0

    def __str__(self):
        return "numbers of rows, sharded along axis %d" % self.axis


@dataclasses.dataclass(frozen=True)
class Partial(Placement):
    """W(t) is the sum of the t_i."""

    def __str__(self):
        return "a sum's parts"


@dataclasses.dataclass(frozen=True)
class PartialMean(Placement):
    """W(t) is the sum of t_i times the tower's share of `rows`; a tower without rows counts nothing, whatever its t_i is.

    Attributes:
      rows: `Rows`.
      count: (tensor, axis) whose size the shares are shares of, for other rows than the batch's.
    """
    rows: Rows = BATCH
    count: Any = dataclasses.field(default=None, compare=False)

    def __str__(self):
        return "a mean's parts"


class Additive(NamedTuple):
    """A number of rows: the towers' add up to the whole batch's.

    Attributes:
      times: int, how many for each of `rows`; None where that is not known.
      rows: `Rows`.
      is_raised: whether a tower that has none says 1, as by `tf.maximum(n, 1)`; the whole batch has some.
    """
    times: Optional[int]
    rows: Rows
    is_raised: bool = False


class _Computed:
    """A number computed of sizes, which is the whole batch's where it is computed of the whole batch's sizes."""

    def __repr__(self):
        return "COMPUTED"


COMPUTED = _Computed()


@dataclasses.dataclass(frozen=True)
class Size(Placement):
    """t_i is right as a shape; as a number, W(t) is the same op on the whole batch's sizes.

    Attributes:
      elements: tuple, what each element is: a number, alike in all towers; None, such a number that is not known yet;
        `Additive`; or COMPUTED.
      shape: tuple of int, of the tensor.
    """
    elements: Tuple[Any, ...]
    shape: Tuple[int, ...]

    def array(self):
        """Returns the elements as an array of objects."""
        return _array(self.elements, self.shape)

    def __str__(self):
        return "a size"


@dataclasses.dataclass(frozen=True)
class Listed(Placement):
    """A TensorArray's or TensorList's elements.

    Attributes:
      element: `Placement` of each element; None while nothing is in the list.
      by_row: `Rows` where the list has an element for each of them; None where its elements are no rows.
      of: str, the name of the state in which a loop over these hands it from turn to turn.
    """
    element: Optional[Placement]
    by_row: Optional[Rows] = None
    of: str = ""

    def __str__(self):
        return "a list" if self.by_row is None else "a list of examples"


@dataclasses.dataclass(frozen=True)
class Own(Placement):
    """What only this tower has, and one tower on the whole batch has not: where its rows begin. Nothing is made of it."""

    def __str__(self):
        return "the tower's own"


@dataclasses.dataclass(frozen=True)
class OneRow(Placement):
    """W(t) is what t_i is for each of the tower's examples: one of as many tensors as Python's own loop over them makes.

    Attributes:
      number: int, of the tower's examples.
      of: int, how many it has.
    """
    number: int
    of: int

    def __str__(self):
        return "example %d of %d" % (self.number, self.of)


@dataclasses.dataclass(frozen=True)
class RowSum(Placement):
    """A sum of the tower's first examples, on its way to that of all.

    Attributes:
      count: int, how many are added up.
      of: int, how many the tower has.
    """
    count: int
    of: int

    def __str__(self):
        return "the sum of %d examples of %d" % (self.count, self.of)


@dataclasses.dataclass(frozen=True)
class InTurn(Placement):
    """In turn i of a loop over the tower's examples, W(t) is what t_i is for the example that is the tower's i-th."""

    def __str__(self):
        return "an example's own"


@dataclasses.dataclass(frozen=True)
class Running(Placement):
    """The sum, over the turns of such a loop that were, of what each of them added.

    Attributes:
      of: str, the name of the loop's state.
    """
    of: str = ""

    def __str__(self):
        return "a sum over the examples so far"


@dataclasses.dataclass(frozen=True)
class Turn(Placement):
    """The number of the turn in such a loop, from 0 on: W(t) is t_i plus the number of the tower's first row in the batch."""

    def __str__(self):
        return "the number of a turn"


def _array(elements, shape):
    found = np.empty(len(elements), object)
    found[:] = list(elements) if len(elements) else []
    return found.reshape(shape)


def size_of(array):
    """Returns the placement of a tensor of integers with these elements: `Size`, or `Replicate` where none is of a size."""
    array = np.asarray(array, object) if not isinstance(array, np.ndarray) else array
    flat = [array[index] for index in np.ndindex(array.shape)]
    if not any(isinstance(element, Additive) or element is COMPUTED for element in flat):
        return Replicate(None if None in flat or not flat else np.array(flat).reshape(array.shape))
    return Size(tuple(flat), array.shape)


def elements_of(placement, shape, known):
    """Returns the elements of a tensor of integers as `Size` has them, an array of objects, or None where there are none.

    Args:
      placement: `Replicate` or `Size`.
      shape: list of int, of the tensor; None in it, or for it, is a number that is not known.
      known: array, the tensor's value where it is known while the graph is built, else None.
    """
    if isinstance(placement, Size):
        return placement.array()
    if shape is None or None in shape:
        return None
    if known is None:
        return _array([None] * int(np.prod(shape, dtype=int)), tuple(shape))
    return _array([number if number is None else np.asarray(number).item() for number in np.ravel(known)], tuple(shape))


def entries_of(placement):
    """Returns how many entries an example has along the axis of a `Shard`, `Blocks` or `RowNumbers`; None if not known."""
    factors = placement.times, getattr(placement, "outer", 1)
    return None if None in factors else factors[0] * factors[1]


def moved(placement, axis):
    """Returns a `Shard`, `Blocks` or `RowNumbers` along another axis."""
    return dataclasses.replace(placement, axis=axis)
