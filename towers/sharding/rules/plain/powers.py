"""What power of the number of its examples a tower's results are of: a sum is of the first, a mean of none.

A loss is a sum of terms. Towers average their losses, and one tower on the whole batch would have N times the examples: a term
that is of any other power than none comes to something else.
"""
import itertools
from typing import FrozenSet, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.op_types import MERGES, OF_SHAPES
from towers.graph.private import forward_op_of
from towers.graph.static_values import static_value
from towers.graph.walk import end_of
from towers.meeting.exchanges import stands_at_exchange
from towers.sharding.placements import (COMPUTED, Additive, Blocks, OneRow, Partial, PartialMean, Replicate, RowSum, Running,
                                        Shard, Size)
from towers.sharding.rules import pointwise
from towers.sharding.rules.plain.weights import SMALL
from towers.sharding.rules.table import MOVES, RULES, SUMS

__all__ = ["Powers", "others_than_means"]

_OF_ROWS = (Shard, Blocks)
_BY_ROW = (OneRow, RowSum)

# Types of ops by what they make of powers; the others keep them where they move values, and know no way back from them elsewhere.
_ADDS = frozenset((pointwise.JOINT + " BiasAdd Merge RefMerge Concat ConcatV2 Pack " + pointwise.CHOICES).split())
_EXTREMES = frozenset(["Maximum", "Minimum"])
_PRODUCTS = frozenset("BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul Mul MulNoNan".split())
_QUOTIENTS = frozenset("Div DivNoNan FloorDiv RealDiv".split())
_POWERS = {"Inv": -1, "L2Loss": 2, "Reciprocal": -1, "Rsqrt": -.5, "Sqrt": .5, "Square": 2}
_LINEAR_IN = {**dict.fromkeys(set(pointwise.QUOTIENTS.split()) - _QUOTIENTS, 0), **dict.fromkeys(pointwise.SLOPES.split(), 1)}
_KEEPS = {name for name, rule in RULES.items() if rule.does == MOVES}.union((
    "Abs Cast CheckNumerics Enter EuclideanNorm Exit Gather GatherNd GatherV2 IdentityN Max Mean "
    "Min NextIteration PlaceholderWithDefault Print Relu Sum Switch " + pointwise.HANDED_ON + " " + pointwise.LINEAR).split())
_COUNTS = _KEEPS.union(["Prod", "Shape", "ShapeN", "Size", "StridedSlice"])

_MOST_TERMS, _MOST_DIMS, _MOST_FACTORS, _MOST_TURNS = 40, 8, 6, 6
_LARGE = 1e4  # what bounds a number and is none of examples
# A number of TensorFlow's own; one that stands within a sum; one that towers exchanged, which is theirs.
_HALF, _WITHIN, _EXCHANGED = "half of ", "within ", "exchanged "


class Term(NamedTuple):
    """A term of a sum.

    Attributes:
      power: float, of the number of the tower's examples; None where that was put through something else than a power.
      factors: tuple of pairs, the names of ops that multiply it by a number that is known, and the number.
      dims: tuple of int, the sizes, other than the number of examples, over which it was summed.
    """
    power: Optional[float] = 0
    factors: Tuple[Tuple[str, float], ...] = ()
    dims: Tuple[int, ...] = ()

    def summed(self, dims=()):
        """Returns the sum over the examples, and over other axes."""
        factors = tuple((_WITHIN + name, number) for name, number in self.factors)
        return Term(None if self.power is None else self.power + 1, factors, _sorted(self.dims + dims))

    def to(self, power):
        """Returns a power of the term."""
        return Term(None if self.power is None else self.power * power, tuple(
            (name, abs(number) ** power) for name, number in self.factors), self.dims)

    def times(self, other):
        """Returns the product with another term."""
        power = None if None in (self.power, other.power) else self.power + other.power
        return Term(power, self.factors + other.factors, _sorted(self.dims + other.dims))

    def by(self, op, number):
        """Returns the term times a number, by an op; whole numbers are multiplied with each other."""
        if op.outputs[0].dtype.base_dtype.is_integer and self.factors:
            return self._replace(factors=((op.name, float(np.prod([each for _, each in self.factors])) * number),))
        return self._replace(factors=self.factors + ((op.name, number),))


_Terms = FrozenSet[Term]
_NOTHING: _Terms = frozenset()
_ONE, _COUNT, _ELSE = frozenset([Term()]), frozenset([Term(1)]), frozenset([Term(None)])


class Powers:
    """Finds the terms that tensors of a plan are sums of.

    Args:
      counts: set of (op, number of its output), what besides sizes is the number of the tower's examples, or stands for it.
      num_rows: int, the tower's examples, or None.
      counts_examples: whether the number of the tower's examples itself counts.
      of_layer: a function of an op, whether it belongs to the gradient of a layer in which towers meet.
      is_even: whether all towers have as many examples, so that such a gradient is linear in what comes in.
    """

    def __init__(self, counts, num_rows, counts_examples, of_layer, is_even):
        self.counts, self.num_rows, self.counts_examples = counts, num_rows, counts_examples
        self._of_layer, self._is_even = of_layer, is_even
        self.outside = {}  # ends of what functions take -> the tensors that they are given

    def of(self, plan, tensors, given=()):
        """Returns the terms of tensors, a list of sets of `Term`.

        Args:
          plan: `towers.sharding.plan.propagation.Plan`.
          tensors: list of tensors of the plan.
          given: dict from (op, number of its output) to the terms of what a function takes.
        """
        found, before = dict(given), None
        found.update(dict.fromkeys(self.counts, _COUNT))
        has_loops = any(op.type in ("NextIteration", "RefNextIteration") for op in plan.order)
        for _ in range(_MOST_TURNS if has_loops else 1):  # what loops hand back is known later
            if found == before:
                break
            before = dict(found)
            for op in plan.order:
                default = _NOTHING if op.type in MERGES else _ONE
                terms = self._terms(op, [found.get(end_of(source), default) for source in op.inputs], plan)
                for number in range(len(op.outputs)):
                    if (op, number) not in self.counts and (op, number) not in given:
                        each = terms[number] if isinstance(terms, list) else terms
                        found[op, number] = each if len(each) <= _MOST_TERMS else _ONE
        return [found.get(end_of(tensor), _ONE) for tensor in tensors]

    def _terms(self, op, of_inputs, plan):
        if self._of_layer(op):
            reached = frozenset(term for terms in of_inputs for term in terms if term.power)
            return _ONE if not reached else reached if self._is_even else _ELSE
        decision = plan.decisions.get(op)
        inners = getattr(decision.instead, "inners", ()) if decision is not None else ()
        if not inners:
            return _Step(op, of_inputs, plan, self).terms()
        for inner in inners:
            self.outside.update(zip(map(end_of, inner.body.inputs), list(op.inputs)[len(op.inputs) - len(inner.body.inputs):]))
        is_loop, taken = op.type in ("While", "StatelessWhile"), of_inputs[len(op.inputs) - len(inners[0].body.inputs):]
        for _ in range(_MOST_TURNS if is_loop else 1):
            of_bodies = [self.of(inner.plan, inner.body.outputs, dict(zip(map(end_of, inner.body.inputs), taken)))
                         for inner in (inners[1:] if is_loop else inners)]
            made = [_NOTHING.union(*each) for each in zip(*of_bodies)]
            if not is_loop or made == taken:
                break
            taken = [one | other for one, other in zip(taken, made)]
        return [frozenset(term.summed() for term in terms) if is_loop and isinstance(
            inners[1].placement(inners[1].body.outputs[k]), Running) else terms for k, terms in enumerate(made)]


class _Step:
    """An op, and the terms of what it takes."""

    def __init__(self, op, of_inputs, plan, powers):
        self.op, self.of_inputs, self.num_rows, self._counts_examples = op, of_inputs, powers.num_rows, powers.counts_examples
        self._outside = powers.outside
        self.placements = [plan.placements.get(end_of(source), Replicate()) for source in op.inputs]
        self.placement = plan.placements.get((op, 0), Replicate())
        self._plan = plan

    def terms(self):
        """Returns the terms of the outputs: a set, or a list of sets over the outputs."""
        op, kind = self.op, self.op.type
        if not op.outputs:
            return _ONE
        if kind == "ZerosLike" or kind == "Const" and op.outputs[0].dtype.base_dtype.is_floating and not np.any(
                tf.get_static_value(op.outputs[0])):
            return _NOTHING
        if self._is_number_of_rows():
            return _COUNT if self._counts_examples else _ELSE
        if self._is_number_of_others():
            return _ELSE
        if kind in _PRODUCTS and len(op.inputs) == 2:
            return self._of_product()
        if kind in _QUOTIENTS:
            return self._of_quotient()
        if kind in _POWERS or kind == "Pow":
            return self._of_power()
        if kind in _EXTREMES:
            return self._of_extreme()
        if isinstance(self.placement, Partial) and any(isinstance(placement, _BY_ROW) for placement in self.placements):
            return self._of_turns()
        if kind.startswith(("TensorArray", "TensorList")):
            return _NOTHING.union(*[terms for terms, source in zip(self.of_inputs, op.inputs)
                                    if source.dtype.is_floating or source.dtype == tf.variant])
        if kind in _ADDS:
            return self._of_addition()
        if isinstance(self.placement, (Partial, PartialMean)):
            found = self._of_sum()
            if found is not None:
                return found
        return self._kept()

    def _is_number_of_rows(self):
        elements = self.placement.elements if isinstance(self.placement, Size) else ()
        return len(elements) == 1 and isinstance(elements[0], Additive) and (self.op.type in _COUNTS or not self.op.inputs)

    def _is_number_of_others(self):
        """Tells whether a number is computed of the tower's examples, and is none of them, nor of a power of them."""
        if not isinstance(self.placement, Size) or COMPUTED not in self.placement.elements:
            return False
        if self.op.type in OF_SHAPES:
            return len(self.placement.elements) == 1
        is_cut = self.op.type == "FloorDiv" or self.op.type == "Cast" and self.op.outputs[0].dtype.is_integer
        return is_cut and any(term.power != 0 for term in self.of_inputs[0])

    def _number(self, k):
        """Returns the number that an input is, a float; None where it is none that is known, or 0."""
        tensor = self.op.inputs[k]
        if not isinstance(self.placements[k], Replicate) or tensor.shape.rank and tensor.shape.num_elements() != 1:
            return None
        while tensor.op.type in ("Cast", "Enter", "Identity") or end_of(tensor) in self._outside:
            tensor = self._outside[end_of(tensor)] if end_of(tensor) in self._outside else tensor.op.inputs[0]
        value = static_value(tensor)
        if value is None or np.size(value) != 1 or np.asarray(value).dtype.kind not in "fiu":
            return None
        value = float(np.ravel(value)[0])
        return value if value and np.isfinite(value) else None

    def _joined(self, numbers=None):
        numbers = range(len(self.of_inputs)) if numbers is None else numbers
        return _NOTHING.union(*[self.of_inputs[k] for k in numbers])

    def _of_product(self):
        terms = frozenset(one.times(other) for one in self.of_inputs[0] for other in self.of_inputs[1])
        for k in (0, 1) if self.op.type == "Mul" else ():
            if stands_at_exchange(self.op.inputs[k].op) and not self.op.inputs[k].shape.rank:
                terms = frozenset(term._replace(factors=term.factors + ((_EXCHANGED + self.op.name, 1.0),))
                                  for term in self.of_inputs[1 - k])
            elif self._number(k) is not None:
                terms = frozenset(term.by(self.op, self._number(k)) for term in self.of_inputs[1 - k])
        rows = [k for k, placement in enumerate(self.placements) if isinstance(placement, _OF_ROWS)]
        is_contracted = isinstance(self.placement, Partial) and rows and not any(
            isinstance(placement, Partial) for placement in self.placements)
        return frozenset(term.summed(self._dims(rows[0])) for term in terms) if is_contracted else terms

    def _of_quotient(self):
        forward, number = forward_op_of(self.op), self._number(1)
        if forward is not None and forward.type == "Mean" and self._plan.placements.get((forward, 0)) == PartialMean():
            return frozenset(term.times(Term(-1)) for term in self.of_inputs[0])  # the gradient of a mean over the examples
        if number is not None:
            return frozenset(term._replace(factors=term.factors + ((self.op.name, 1 / number),)) for term in self.of_inputs[0])
        return frozenset(one.times(other.to(-1)) for one in self.of_inputs[0] for other in self.of_inputs[1])

    def _of_extreme(self):
        """A number that is kept from 0, or from what no number comes to, is itself; others may be either of two."""
        numbers = self._number(0), self._number(1)
        if None not in numbers or numbers == (None, None):
            return self._joined()
        bound = numbers[1] if numbers[0] is None else numbers[0]
        is_guard = bound <= 1 if self.op.type == "Maximum" else bound >= _LARGE
        return self.of_inputs[0 if numbers[0] is None else 1] if is_guard else self._joined()

    def _of_power(self):
        kind, of_first = self.op.type, self.of_inputs[0]
        if kind == "Pow":
            number = self._number(1)
            return _ONE if all(term.power == 0 for term in self._joined()) else _ELSE if number is None else frozenset(
                term.to(number) for term in of_first)
        terms = frozenset(term.to(_POWERS[kind]) for term in of_first)
        if kind != "L2Loss":
            return terms
        terms = frozenset(term._replace(factors=term.factors + ((_HALF + self.op.name, .5),)) for term in terms)
        return frozenset(term.summed(self._dims(0)) for term in terms) if isinstance(self.placements[0], _OF_ROWS) else terms

    def _of_turns(self):
        """The sum over Python's own loop: over the examples, or over parts of the batch, of which there is one number."""
        of = next(placement.of for placement in self.placements if isinstance(placement, _BY_ROW))
        return frozenset(term.summed() for term in self._joined()) if of == self.num_rows else self._joined()

    def _of_addition(self):
        kind, last = self.op.type, len(self.of_inputs) - 1
        taken = [k for k in range(last + 1) if (kind not in pointwise.CHOICES.split() or k) and (kind, k) not in (
            ("Concat", 0), ("ConcatV2", last))]
        large = [k for k in taken if not self._is_small(k)]
        return self._joined(large or taken)

    def _is_small(self, k):
        value = tf.get_static_value(self.op.inputs[k])
        return value is not None and np.asarray(value).dtype.kind in "fiu" and np.all(np.abs(value) <= SMALL)

    def _of_sum(self):
        """Returns the terms of a sum or mean over the examples, or over other axes of one; None where it is none."""
        kind, of = self.op.type, self.placements[0] if self.placements else None
        if kind in ("Sum", "Mean") and isinstance(of, _OF_ROWS):
            return self.of_inputs[0] if kind == "Mean" else frozenset(term.summed(self._dims(0)) for term in self.of_inputs[0])
        if kind == "Sum" and isinstance(of, Partial):
            return frozenset(term._replace(dims=_sorted(term.dims + self._reduced(None))) for term in self.of_inputs[0])
        if isinstance(of, Running):
            return frozenset(term.summed() for term in self.of_inputs[0])
        rows = [k for k, placement in enumerate(self.placements) if isinstance(placement, _OF_ROWS)]
        if isinstance(self.placement, Partial) and rows and not any(isinstance(each, Partial) for each in self.placements):
            return frozenset(term.summed(self._dims(rows[0])) for term in self._joined(rows))
        return None

    def _kept(self):
        op, kind = self.op, self.op.type
        if kind == "IdentityN":
            return self.of_inputs
        if kind in _LINEAR_IN or kind in _KEEPS:
            return self.of_inputs[_LINEAR_IN.get(kind, 1 if kind == "Split" else 0)]
        sums = [k for k, placement in enumerate(self.placements) if isinstance(placement, SUMS)]
        if isinstance(self.placement, SUMS) and len(sums) == 1:  # what makes a sum of a sum is linear in it
            return self.of_inputs[sums[0]]
        is_number = isinstance(self.placement, Size)
        of = [terms for terms, source in zip(self.of_inputs, op.inputs) if (source.dtype.is_floating or is_number) and any(
            term.power != 0 for term in terms)]
        if forward_op_of(op) is not None and len(of) == 1:  # a gradient is linear in the one that comes in
            return of[0]
        return _ELSE if of and (is_number or op.outputs[0].dtype.is_floating and kind != "Sign") else _ONE

    def _reduced(self, axis):
        """Returns the known sizes of the axes that a sum is over, but for one, a tuple."""
        shape, axes = self.op.inputs[0].shape, static_value(self.op.inputs[1])
        if shape.rank is None or axes is None:
            return ()
        return _known(tf.dimension_value(shape[k]) for k in {int(k) % shape.rank for k in np.ravel(axes)} - {axis})

    def _dims(self, k):
        """Returns the sizes over which the examples, in an input, are summed with their number, a tuple."""
        placement, shape = self.placements[k], self.op.inputs[k].shape
        of_rows = _known([placement.times, getattr(placement, "outer", 1)])
        if self.op.type == "Sum":
            return self._reduced(placement.axis) + of_rows
        dims = [] if shape.rank is None else shape.as_list()
        return _known(dims[:placement.axis] + dims[placement.axis + 1:]) + of_rows


def _known(sizes):
    return tuple(size for size in sizes if size and size > 1)


def _sorted(dims):
    return tuple(sorted(dims))[:_MOST_DIMS]


def others_than_means(terms, num_rows, num_towers):
    """Returns the kinds of terms that towers' average does not bring to what one tower has, a set of str.

    Numbers that are known may be that of the examples: one that makes a sum a mean is. What is multiplied or divided by the
    number of towers is meant so.

    Args:
      terms: from `Powers`.
      num_rows: int, the tower's examples, or None.
      num_towers: int.
    """
    terms = [term._replace(factors=_uncancelled(term.factors)) for term in terms]
    counts, of_means, found = set(), set(), set()
    for term in terms:
        counting = _counting(term, num_rows) if term.power == 1 and num_rows else ()
        counts.update(counting)
        if counting or term.power == 0 and term.dims:
            of_means.update(name for name, _ in term.factors)
    for term in terms:
        if term.power is None:
            found.add("number")
            continue
        own = [(name, number) for name, number in term.factors if name not in counts and not name.startswith((_HALF, _WITHIN))]
        apart = [number for name, number in own if name not in of_means]
        is_counted = any(name in counts for name, _ in term.factors)
        power = term.power - is_counted - any(_is(number, num_towers) or name.startswith(_EXCHANGED) for name, number in own)
        if power < 0 and any(_is(number, 1 / num_towers) for number in apart):
            power += 1
        if power < 0 and is_counted and any(_is(number, num_rows) for number in apart):
            power += 1
        if not _is(power, 0) and (is_counted or not _is(term.power, 0)):
            found.add("sum" if _is(power, 1) else "number")
    return found


def _is(number, other):
    return abs(number - other) < 1e-6


def _uncancelled(factors):
    """Returns factors without pairs whose product is 1."""
    left = list(factors)
    for one, other in itertools.combinations(factors, 2):
        if one in left and other in left and _is(one[1] * other[1], 1):
            left.remove(one)
            left.remove(other)
    return tuple(left)


def _counting(term, num_rows):
    """Returns the names of the factors that divide a sum by the number of what it sums up, a list."""
    products = {1.0}
    for size in term.dims:
        products |= {size * each for each in products}
    factors = [factor for factor in term.factors if _HALF not in factor[0]][:_MOST_FACTORS]
    for some in itertools.chain.from_iterable(itertools.combinations(factors, count) for count in range(1, len(factors) + 1)):
        divisor = 1 / np.prod([number for _, number in some])
        if any(abs(abs(divisor) / (num_rows * each) - 1) < 1e-4 for each in products):
            return [name for name, _ in some]
    return []
