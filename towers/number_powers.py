"""Losses that the number of a tower's own examples stays in, where one tower would have that of the whole batch.

A sum over the examples is divided by it once, and a mean not at all. Divided twice, or multiplied, a loss is of another power of
that number, and so is no mean over towers of what one tower has.
"""
import warnings
from typing import Any, NamedTuple, Optional, Tuple

import tensorflow.compat.v1 as tf

from towers.first_axis import sizes_of_examples
from towers.axes import SUMS, reduced_axes
from towers.divisors import DIVIDES, PASSES, RESHAPES, is_given, number_of, size_of
from towers.graph_walk import VARIABLES, ancestors
from towers.own_data import takes_own_data
from towers.wording import TowersWarning

__all__ = ["warn_of_powers"]

_SAME = RESHAPES | frozenset(["Cast", "Enter", "Identity", "Neg", "StopGradient", "Switch"])
_POWERS = {"Inv": -1.0, "Reciprocal": -1.0, "Rsqrt": -0.5, "Sqrt": 0.5, "Square": 2.0}
_QUOTIENTS = DIVIDES | frozenset(["FloorDiv", "TruncateDiv"])
_CHOICES = frozenset(["Maximum", "Select", "SelectV2"])  # of the number, and of what stands for it where that is 0
_ADDS = frozenset(["Add", "AddV2", "Sub"])
_ANOTHER = 1000.0  # a power that no other undoes: of the number less one, say
_LEAST_ADDED = 0.01  # to the number, which changes it: less keeps a quotient finite
_DEPTH = 12
# What the number may come back through: whose inputs, if they are of a power of it, undo another.
_ELEMENTWISE = PASSES | _SAME | _QUOTIENTS | _CHOICES | SUMS | frozenset(
    ["Exp", "L2Loss", "Log", "Minimum", "Mul", "Pow", *_POWERS])


class _Part(NamedTuple):
    """A part of a loss on the way to what it is computed of.

    Attributes:
      tensor: what the loss is so many times.
      power: float, of the number of the tower's examples, by which the part is multiplied.
      numbers: tuple of float, other numbers by which it is multiplied or divided.
      is_met: whether there was a power of the number of the tower's examples.
      over: op that takes the mean, or sum, over the examples; None if that is not met yet.
      is_end: bool, whether it is not looked into.
    """
    tensor: Any
    power: float = 0.0
    numbers: Tuple[float, ...] = ()
    is_met: bool = False
    over: Optional[tf.Operation] = None
    is_end: bool = False


def warn_of_powers(losses, towers, examples, stacklevel):
    """Warns, once, if tower 0's loss is of another power of the number of its examples than 0.

    Only what is sure is said: where the number is a tensor that counts them, or one of `tf.shape` that is known, and a sum, a
    mean or what is of variables alone is all that it multiplies or divides. What is multiplied by the number of towers is meant.

    Args:
      losses: list over towers of scalar tensors.
      towers: list of `Tower`.
      examples: `towers.along_examples.Examples` of the first of them.
      stacklevel: int, as of `warnings.warn`.
    """
    num_towers, powers = towers[0].context.num_towers, _Powers(towers)
    for part in _parts_of(losses[0], powers, examples):
        is_undone = any(abs(number - num_towers) < 1e-6 for number in part.numbers)
        if abs(part.power) > 1e-6 and not is_undone and not powers.stand_behind(part.tensor):
            what = "what is of variables alone" if part.over is None else "a %s over them" % (
                "mean" if part.over.type == "Mean" else "sum")
            warnings.warn(
                "The loss of a tower (%r) keeps the number of the tower's own examples: %s (%r) is multiplied or divided by it, "
                "and comes to no mean over the examples by that. Each tower has a number of its own there, and one tower would "
                "have that of the whole batch. Divide a sum over the examples by their number once, and a mean not at all; or "
                "take the number of all towers' examples, towers.all_reduce(tf.shape(x)[0])."
                % (losses[0].name, what, (part.over or part.tensor.op).name), TowersWarning, stacklevel=stacklevel)
            return


class _Powers:
    """Which scalars are powers of the number of a tower's examples."""

    def __init__(self, towers):
        self.context, self._sizes, self._known = towers[0].context, sizes_of_examples(towers), {}
        self._of_variables = {tuple(v.shape.as_list()) for v in tf.global_variables() if v.shape.is_fully_defined()}

    def of(self, tensor, depth=_DEPTH):
        """Returns the power of the number of the tower's examples that a scalar is a multiple of, 0 of a number; else None."""
        if tensor.name not in self._known:
            self._known[tensor.name] = self._of(tensor, depth) if depth and _is_scalar(tensor) else None
        return self._known[tensor.name]

    def _of(self, tensor, depth):
        op = tensor.op
        if op.type in ("Size", "StridedSlice", "Sum"):
            return self._of_counts(tensor)
        if op.type in _SAME:
            return self.of(op.inputs[0], depth - 1)
        if op.type in _CHOICES | _ADDS | _QUOTIENTS | {"Mul", "Pow"}:
            return self._of_two(op, [self.of(source, depth - 1) for source in list(op.inputs)[-2:]])
        if op.type in _POWERS:
            power = self.of(op.inputs[0], depth - 1)
            return None if power is None else _POWERS[op.type] * power
        return None if number_of(tensor) is None else 0.0

    def _of_two(self, op, powers):
        if None in powers:
            return None
        one, other = powers
        if op.type == "Mul" or op.type in _QUOTIENTS:
            return one + other if op.type == "Mul" else one - other
        if op.type == "Pow":
            exponent = number_of(op.inputs[1])
            return None if other or exponent is None else one * exponent
        if one == other or op.type in _CHOICES and 0 in powers:
            return one or other
        added = number_of(op.inputs[0] if one == 0 else op.inputs[1])
        return one or other if 0 in powers and added is not None and abs(added) < _LEAST_ADDED else _ANOTHER

    def _of_counts(self, tensor):
        size = size_of(tensor, self.context)
        if tf.is_tensor(size):  # a sum of what is learned is a loss, not a number
            is_learned = tensor.op.type == "Sum" and any(op.type in VARIABLES for op in ancestors([tensor]))
            return None if is_learned else 1.0
        if size is not None:  # of a shape that is known: of examples, where it is as long as they are and no variable's
            shape = tf.get_static_value(tensor.op.inputs[0])
            return 1.0 if size > 1 and size in self._sizes and tuple(shape) not in self._of_variables else 0.0
        return None if number_of(tensor) is None else 0.0

    def go_into(self, tensor):
        """Tells whether a scalar is such a power, or a product or quotient of some, which may undo each other."""
        return bool(self.of(tensor)) or tensor.op.type in _QUOTIENTS | {"Mul"} and any(map(self.of, tensor.op.inputs))

    def stand_behind(self, tensor):
        """Tells whether what a tensor is made of, element by element, is multiplied or divided by such a power in its turn."""
        seen, stack = set(), [tensor]
        while stack:
            op = stack.pop().op
            if op not in seen and op.type in _ELEMENTWISE:
                seen.add(op)
                if any(self.of(source) for source in op.inputs):
                    return True
                stack.extend(op.inputs)
        return False


def _is_scalar(tensor):
    return tensor.shape.is_fully_defined() and tensor.shape.num_elements() == 1


def _parts_of(loss, powers, examples):
    """Yields the parts of a loss in which a power of the number of the tower's examples was met, each a `_Part`."""
    seen, stack = set(), [_Part(loss)]
    while stack:
        part = stack.pop()
        if part._replace(tensor=part.tensor.name) in seen:
            continue
        seen.add(part._replace(tensor=part.tensor.name))
        following = _follow(part, powers, examples)
        stack.extend(following or ())
        is_of_own = part.over is not None or not takes_own_data([part.tensor], powers.context)
        if following is None and part.is_met and is_of_own and number_of(part.tensor) != 0:
            yield part


def _follow(part, powers, examples):
    """Returns what a part is made of, a list of `_Part`; None where it is not looked into."""
    op = part.tensor.op
    inputs = list(op.inputs)
    if part.is_end:
        return None
    if part.tensor.name in examples.rows.found:
        return []
    if op.type in PASSES | {"StopGradient"}:
        return [part._replace(tensor=source) for source in inputs]
    if op.type in RESHAPES:
        return [part._replace(tensor=inputs[0])]
    if op.type == "Mul":
        return _follow_product(part, [(source, powers.of(source)) for source in inputs], powers)
    if op.type in DIVIDES:
        power = powers.of(inputs[1])
        if power is None and not is_given(inputs[1]):
            return None
        return [_times(part._replace(tensor=inputs[0]), [(inputs[1], -(power or 0.0))], powers)]
    if op.type in ("Select", "SelectV2") and _is_scalar(inputs[0]):
        return [part._replace(tensor=source) for source in inputs[1:] if number_of(source) is None]
    if op.type in SUMS or op.type == "L2Loss":
        return _follow_reduction(part, examples)
    return None


def _follow_product(part, factors, powers):
    others = [source for source, power in factors if power is None]
    if len(others) > 1:
        others = [source for source in others if not is_given(source)]
    if len(others) != 1:
        return None if others else []
    return [_times(part._replace(tensor=others[0]), [factor for factor in factors if factor[1] is not None], powers)]


def _times(part, factors, powers):
    numbers = tuple(abs(number) for number in (number_of(source) for source, power in factors if not power) if number)
    return part._replace(power=part.power + sum(power for _, power in factors), numbers=part.numbers + numbers,
                         is_met=part.is_met or any(powers.go_into(source) for source, _ in factors))


def _follow_reduction(part, examples):
    op = part.tensor.op
    source, axes = op.inputs[0], range(op.inputs[0].shape.rank or 1) if op.type == "L2Loss" else reduced_axes(op)
    if axes is None:
        return None
    part = part._replace(tensor=source, is_end=op.type == "L2Loss")  # which squares what it is of
    if not any(examples.lie_along(source, axis) if axis else examples.are_rows_of(source) for axis in axes):
        return [part]
    return None if part.over is not None else [part._replace(over=op, power=part.power + (op.type != "Mean"))]
