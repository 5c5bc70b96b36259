"""Sizes, what is made of a shape, and what draws at random."""
import numpy as np

from towers.sharding.nodes import OwnRows, Refused, Unfit
from towers.sharding.placements import BATCH, COMPUTED, Additive, Blocks, Replicate, RowNumbers, Shard, Size, entries_of, size_of
from towers.sharding.rules.arithmetic import SIZES, is_of_size
from towers.sharding.rules.loops.turns import is_within_turn
from towers.sharding.rules.movement.axes import first_additive, shape_wanted
from towers.sharding.rules.table import ANY, SUMS, rule

__all__ = ["SAMPLERS"]


@rule("Shape ShapeN", (Shard, Blocks, RowNumbers) + SUMS)
def shape(node):
    return node.decide([_shape_of(value) for value in node.inputs])


def _shape_of(value):
    placement = value.placement
    if not isinstance(placement, (Shard, Blocks, RowNumbers)):
        return Replicate()  # what is added up has one shape in all towers
    found = np.empty(value.rank, object)
    found[:] = value.whole
    found[placement.axis] = Additive(entries_of(placement), placement.rows)
    return size_of(found)


@rule("Size", (Shard, Blocks, RowNumbers) + SUMS)
def size(node):
    value = node.inputs[0]
    elements = _shape_of(value)
    if not isinstance(elements, Size):
        return node.decide(Replicate())
    along = elements.elements[value.placement.axis]
    others = [element for axis, element in enumerate(elements.elements) if axis != value.placement.axis]
    times = None if along.times is None or None in others else along.times * int(np.prod(others, dtype=np.int64))
    found = np.empty((), object)
    found[()] = Additive(times, along.rows)
    return node.decide(size_of(found))


@rule("Rank", ANY)
def rank(node):
    return node.decide(Replicate())


@rule("ConcatOffset", (Size,))
def starts(node):
    """Where each of the tensors that are joined begins along the axis: the sum of the sizes before it."""
    axis, shapes = node.inputs[0].const(), [value.elements() for value in node.inputs[1:]]
    if axis is None or any(shape is None for shape in shapes):
        raise Unfit()
    others = [sizes for i, sizes in enumerate(zip(*shapes)) if i != int(axis) % len(shapes[0])]
    if any(len(set(map(is_of_size, sizes))) > 1 for sizes in others):
        raise Unfit()  # its kernel wants the same sizes of all, and here a tower's own stand beside the whole batch's
    found, begin = [], 0
    for shape in shapes:
        start = np.zeros(len(shape), object)
        start[int(axis)] = begin
        found.append(size_of(start))
        begin = SIZES["Add"](begin, shape[int(axis)])
    return node.decide(found)


@rule("BroadcastGradientArgs BroadcastArgs", ())
def broadcast(node):
    return node.replicated()


@rule("Fill", (Size,))
def fill(node):
    dims = node.inputs[0].elements()
    axis = first_additive(dims)
    if axis is None:
        raise Unfit()
    return node.decide(Shard(axis, dims[axis].rows, dims[axis].times), {**node.wanted([1]), **shape_wanted(node, 0, axis)})


@rule("Empty", (Size,), always=True)
def empty(node):
    raise Refused("%r leaves memory as it is, for others to write into, which towers can't follow. Make it by tf.zeros, or take "
                  "another op, as tf.nn.ctc_loss for tf.nn.ctc_loss_v2" % node.op.name)


@rule("Range", (Size,))
def range_(node):
    start, limit, delta = node.inputs
    element = limit.elements()
    of, step = element[()] if isinstance(limit.placement, Size) else None, delta.const()
    # In an example's turn, where towers can't meet about their numbers, whoever counts means a row of all.
    is_step = step is not None and step.dtype.kind == "i" and step > 0
    if isinstance(of, Additive) and of.times and is_step and of.times % step == 0 and start.const() == 0 and (
            not of.is_raised and not is_within_turn(node.context, node.op)):
        return node.decide(RowNumbers(0, of.rows, of.times // int(step), of, (limit.tensor, None)))
    raise Unfit()


# Draws: the number of the input that is their shape.
DRAWS = dict.fromkeys("RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal ParameterizedTruncatedNormal".split(),
                      0)
DRAWS.update(StatefulUniform=2, StatefulStandardNormalV2=2, StatefulTruncatedNormal=2, StatefulUniformFullInt=2,
             StatefulUniformInt=2)


@rule(" ".join(DRAWS), (Size,), always=True)
def draw(node):
    k = DRAWS[node.type]
    elements = node.inputs[k].elements()
    wants = node.wanted(j for j in range(len(node.inputs)) if j != k)
    if isinstance(node.inputs[k].placement, Size) and not any(element is COMPUTED for element in elements):
        axis = first_additive(elements)
        return node.decide(Shard(axis, elements[axis].rows, elements[axis].times), {**wants, **shape_wanted(node, k, axis)})
    return node.decide(Replicate(), {**wants, **node.wanted([k])}, instead=of_first_tower, meets="first")


def of_first_tower(conversions, op, inputs):
    """Builds what the first tower drew, for all."""
    return [conversions.of_first(output) for output in conversions.made(op, inputs)]


SAMPLERS = ("AllCandidateSampler FixedUnigramCandidateSampler LearnedUnigramCandidateSampler LogUniformCandidateSampler "
            "ThreadUnsafeUnigramCandidateSampler UniformCandidateSampler")


@rule(SAMPLERS, (Shard,), always=True)
def draw_of_classes(node):
    """Classes are drawn once for all examples, with how often each example's own would be: it goes on by the examples' rows."""
    classes, decision = node.inputs[0], node.replicated()
    decision.instead, decision.meets = of_first_tower, "first"
    if isinstance(classes.placement, Shard) and classes.placement.axis == 0:
        decision.outputs = [Replicate(), classes.placement, Replicate()]
        decision.own = {1: OwnRows(0, (classes.tensor, 0))}
    return decision


@rule("Multinomial RandomPoisson RandomPoissonV2 RandomGamma StatelessMultinomial", (Shard, Size), always=True)
def draw_of_each(node):
    k = {"RandomPoisson": 1, "RandomPoissonV2": 1, "RandomGamma": 1}.get(node.type, 0)
    value, stateful = node.inputs[k], node.op.op_def.is_stateful
    if isinstance(value.placement, Shard):
        first = node.inputs[0].whole[0] if k else 0
        if k and first is None or not stateful:
            raise Unfit()
        others = node.wanted(j for j in range(len(node.inputs)) if j != k)
        return node.decide(Shard(value.placement.axis + (first if k else 0), value.placement.rows, value.placement.times), others)
    decision = node.replicated() if node.all(Replicate, Shard) else None
    elements = node.inputs[0].elements() if k else None
    if decision is None and k and value.rank == 0:
        axis = first_additive(elements)
        if axis is not None:
            return node.decide(Shard(axis, elements[axis].rows, elements[axis].times), {
                **node.wanted(range(1, len(node.inputs))), **shape_wanted(node, 0, axis)})
    decision = node.replicated()
    if stateful:
        decision.instead, decision.meets = of_first_tower, "first"
    return decision


@rule("""StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomUniform StatelessRandomUniformFullInt
StatelessRandomUniformFullIntV2 StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2
StatelessTruncatedNormal StatelessTruncatedNormalV2""", (Size,))
def stateless_draw(node):
    elements = node.inputs[0].elements()
    if elements is None or any(element is COMPUTED for element in elements):
        raise Unfit()
    axis = first_additive(elements)
    if axis is None or elements[axis].rows != BATCH or elements[axis].times is None:
        raise Unfit()
    decision = node.replicated()
    decision.outputs = [Shard(axis, BATCH, elements[axis].times)]
    decision.own = {0: OwnRows(axis, elements[axis])}
    return decision
