"""What a rule sees of an op, and what it decides: placements in, wants and placements out. Nothing here changes a graph."""
import dataclasses
from typing import Any, Callable, Dict, List, Optional

import tensorflow.compat.v1 as tf

from towers.graph.private import is_in_loop
from towers.graph.static_values import static_value
from towers.sharding.placements import Blocks, Placement, Replicate, Shard, elements_of

__all__ = ["AsPartial", "Decision", "Node", "Numbered", "OwnRows", "Refused", "Replicated", "ShapeOf", "TakenByPlace", "Unfit",
           "Value"]


class Refused(ValueError):
    """An op of a model function has no exact form on several towers."""

    def __init__(self, message):
        super().__init__("towers.whole_batch: " + message)


class TakenByPlace(Refused):
    """An op takes one of the tower's examples, or a part of them, by its place."""


class Unfit(Exception):
    """A rule has nothing cheaper for its inputs than to have them whole in every tower."""


@dataclasses.dataclass(frozen=True)
class Replicated:
    """The input is wanted as the whole batch's, in every tower."""


@dataclasses.dataclass(frozen=True)
class AsPartial:
    """A mean's parts, or what is replicated, is wanted as a sum's parts."""


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """What is replicated and has the whole batch along an axis is wanted as the tower's own rows of it.

    Attributes:
      axis: int, of the input.
      like: (tensor, axis) that has as many rows as the tower.
      outer: int, see `Blocks`.
    """
    axis: int
    like: Any
    outer: int = 1


@dataclasses.dataclass(frozen=True)
class Numbered:
    """Numbers of rows are wanted as the whole batch's, the tower's own along their axis."""


@dataclasses.dataclass(frozen=True)
class ShapeOf:
    """A shape is wanted as the tower's in some of its elements, and as the whole batch's in all others.

    Attributes:
      own: tuple of int, elements that stay the tower's.
      unknown: tuple of int, elements that become -1.
    """
    own: tuple = ()
    unknown: tuple = ()


@dataclasses.dataclass
class Decision:
    """What becomes of an op.

    Attributes:
      outputs: list of `Placement`, one an output.
      wants: dict from numbers of inputs to `Replicated`, `AsPartial`, `OwnRows`, `Numbered` or `ShapeOf`; the others stay.
      own: dict from numbers of outputs to `OwnRows`: the op computes what all towers have alike, and the rows go on.
      instead: a function of a `towers.sharding.rewrite.conversions.Conversions`, the op and its inputs, that builds what stands
        for the op's outputs and returns a list of tensors; None in it is the op's own output.
      meets: str, what `instead` meets for, "" where it does not.
    """
    outputs: List[Placement]
    wants: Dict[int, Any] = dataclasses.field(default_factory=dict)
    own: Dict[int, OwnRows] = dataclasses.field(default_factory=dict)
    instead: Optional[Callable[..., Any]] = None
    meets: str = ""


class Value:
    """A tensor as a rule sees it.

    Attributes:
      tensor: the tensor.
      placement: `Placement`; None of an output.
      dims: list of int and None, the tower's own shape; None where the rank is not known.
      whole: list of int and None, the shape in one tower on the whole batch, as far as that is known.
    """

    def __init__(self, tensor, placement, whole, known=None):
        self.tensor, self.placement, self._known = tensor, placement, known
        shape = tensor.shape
        self.dims = None if shape.rank is None else shape.as_list()
        self.whole = self.dims if whole is None else whole
        self._is_made_whole = False

    def make_whole(self):
        """Lets a rule that does not know the placement see what the input is when it is whole in every tower."""
        self.placement, self.dims, self._is_made_whole = Replicate(), self.whole, True

    @property
    def rank(self):
        """int; raises `Unfit` where it is not known."""
        if self.dims is None:
            raise Unfit()
        return len(self.dims)

    @property
    def dtype(self):
        """The base `tf.DType`."""
        return self.tensor.dtype.base_dtype

    def varies(self, axis):
        """Tells whether the size along an axis may be another one in the whole batch."""
        return self.dims[axis] is None or self.dims[axis] != self.whole[axis]

    def const(self):
        """Returns the value where it is known while the graph is built and alike in all towers, an array, else None."""
        if self._is_made_whole or not isinstance(self.placement, Replicate):
            return None
        if self._known is not None:
            return self._known
        return static_value(self.tensor) if self.placement.value is None else self.placement.value

    def elements(self):
        """Returns the elements as `Size` has them, an array of objects; None where there are too many or unknown ones."""
        known = self.const()
        if known is None and isinstance(self.placement, Replicate) and not self._is_made_whole:
            known = tf.get_static_value(self.tensor, partial=True)
        return elements_of(self.placement, self.dims, known)


class Node:
    """An op as a rule sees it.

    Attributes:
      op: the operation.
      type: str.
      inputs, outputs: lists of `Value`.
      context: `towers.sharding.plan.facts.Facts`, what is known of the tower.
      through: a function of the arguments of `Facts.within` that returns the `Plan` of a body that the op calls.
    """

    is_over_rows = False  # of a loop of control flow 2, see `towers.sharding.rules.loops.turns`

    def __init__(self, op, placements, context, through):
        self.op, self.type, self.context, self.through = op, op.type, context, through
        self.inputs = [Value(tensor, placement, context.whole_dims(tensor), context.known(tensor))
                       for tensor, placement in zip(op.inputs, placements)]
        self._outputs = None

    @property
    def outputs(self):
        if self._outputs is None:
            self._outputs = [Value(tensor, None, self.context.whole_dims(tensor)) for tensor in self.op.outputs]
        return self._outputs

    @property
    def name_of_state(self):
        """str, the name of what a loop hands from turn to turn, where it comes together."""
        return self.op.name

    @property
    def is_repeated(self):
        """Tells whether the op stands in the body of a loop or function, where towers can't count what they have."""
        return hasattr(self.op.graph, "captures") or is_in_loop(self.op)

    def attr(self, name):
        """Returns an attribute of the op."""
        return self.op.get_attr(name)

    def of(self, *kinds):
        """Returns the numbers of the inputs whose placements are of some kinds, a list."""
        return [k for k, value in enumerate(self.inputs) if isinstance(value.placement, kinds)]

    def all(self, *kinds):
        """Tells whether all inputs' placements are of some kinds."""
        return all(isinstance(value.placement, kinds) for value in self.inputs)

    def decide(self, placement, wants=None, **others):
        """Returns a `Decision` by which all outputs have one placement, or a list of placements."""
        outputs = placement if isinstance(placement, list) else [placement] * len(self.op.outputs)
        return Decision(outputs, wants or {}, **others)

    def each_row(self, numbers=None):
        """Returns the `Decision` of an op that computes each example by itself, along axis 0 of what it takes and returns.

        Args:
          numbers: list of int, the inputs that hold the examples; None is all that have an axis 0 and some of the batch along it.
        """
        if numbers is None:
            numbers = self.of(Shard, Blocks)
        sharded = [k for k in numbers if isinstance(self.inputs[k].placement, (Shard, Blocks))]
        found = {self.inputs[k].placement for k in sharded}
        if len(found) != 1 or next(iter(found)).axis != 0:
            raise Unfit()
        first = sharded[0]
        like, outer = (self.inputs[first].tensor, 0), getattr(self.inputs[first].placement, "outer", 1)
        wants = self.wanted(k for k in range(len(self.inputs)) if k not in numbers)
        wants.update((k, OwnRows(0, like, outer)) for k in numbers if k not in sharded)
        return self.decide(self.inputs[first].placement, wants)

    def replicated(self):
        """Returns the `Decision` by which all inputs are whole in every tower, and so is what comes of them."""
        return self.decide(Replicate(), self.wanted(range(len(self.inputs))))

    def wanted(self, numbers):
        """Returns wants by which inputs are whole in every tower, a dict."""
        return {k: Replicated() for k in numbers if not isinstance(self.inputs[k].placement, Replicate)}
