"""Losses that are no means over a tower's examples, since they compute something of all of these together.

Towers average their losses. A mean over examples, and sums of such means, come to those of the whole batch; a square root of a
mean, a quotient of two sums (dice, or a mask's loss over the mask's size), the k largest losses or distances of each example to
each other do not, and train otherwise in silence. A loss is followed from its end: whatever sum or mean over the examples it
takes otherwise than by additions and products with what all towers have in common is one that mixes them. So is what the model
computes of all examples together and gives back to each: prototypes of classes, or features less their mean.
"""
import warnings

import tensorflow.compat.v1 as tf

from towers.along_examples import PRODUCTS
from towers.axes import EXTREMES, SUMS, product_axes, reduced_axes
from towers.chosen_rows import COUNTS, is_one_hot
from towers.graph_walk import NO_VALUES, SIZES, VARIABLES, writes_of
from towers.mapped import LISTS
from towers.private import is_in_loop
from towers.wording import TowersWarning

__all__ = ["warn_of_mixed"]

# What a loss may be of sums over examples: additions, and what only moves numbers.
_ADDS = frozenset(["AccumulateNV2", "Add", "AddN", "AddV2", "BiasAdd", "BroadcastTo", "Cast", "ConcatV2", "Cumsum", "DiagPart",
                   "ExpandDims", "Gather", "GatherNd", "GatherV2", "Mean", "Merge", "Neg", "Pack", "Pad", "PadV2", "Reshape",
                   "ReverseV2", "ScatterNd", "Slice", "Split", "SplitV", "Squeeze", "StridedSlice", "Sub", "Sum", "Switch",
                   "Tile", "Transpose", "Unpack", "UnsortedSegmentSum"]) | LISTS | {"Enter", "Exit"}
_HANDS_ON = frozenset(["CheckNumerics", "CheckNumericsV2", "Identity", "PreventGradient", "Print", "Snapshot", "StopGradient"])
_PRODUCTS = PRODUCTS | {"Mul"}
_DIVIDES = frozenset(["Div", "DivNoNan", "RealDiv"])
_EXTREMES_OF_CLASSES = frozenset(["UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"])
_COUNT_UNIQUE = frozenset(["UniqueWithCounts", "UniqueWithCountsV2"])
_PAIRWISE = frozenset(["Add", "AddV2", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr",
                       "Maximum", "Minimum", "Mul", "NotEqual", "RealDiv", "SquaredDifference", "Sub"])

_HOW = {"divides": "is divided by what depends on the tower's own examples (%r)",
        "computes": "computes %r of a sum, mean or extreme over all of the tower's examples",
        "pairs": "holds each of the tower's examples against each other one (%r)",
        "chooses": "is of a part of the tower's examples, chosen among all of them (%r)",
        "shares": "gives each of the tower's examples a part of what is computed of all of them (%r)",
        "counts": "is a mean over as many of the tower's examples as its data say (%r)",
        "lengths": "takes a mean along an axis that is as long as the tower's own examples say (%r)",
        "returns": "is of what is computed of all of the tower's examples together and comes back to each of them (%r)"}
_RETURNS = ("returns", None)  # which op it is shows later
_MENDS = {"returns": "Compute that of all towers' examples, by towers.all_reduce or towers.all_gather; a batch norm by "
                     "tf_syncbn.convert_model or tf_syncbn.sync_batch_norm."}
_MEND = ("Where it is a mean over what is counted, a mask say, return that number as \"weight\" beside the \"loss\"; else "
         "compute what takes all examples together by towers.all_reduce or towers.all_gather, or write a loss for each example "
         "and take their mean.")


def warn_of_mixed(losses, towers, examples, stacklevel):
    """Warns, once, if tower 0's loss is no mean over its examples, and returns whether it is.

    Only what is sure is said. What a model function hands out as a "weight" that it counted of its data is taken for what its
    loss is divided by. A batch norm that moves averages is taken for one that is meant to be the tower's own, and of a converted
    model `convert_model` has said what comes back to the examples.

    Args:
      losses: list over towers of scalar tensors.
      towers: list of `Tower`.
      examples: `towers.along_examples.Examples` of the first of them.
      stacklevel: int, as of `warnings.warn`.
    """
    outputs = towers[0].outputs
    weight = outputs.get("weight") if isinstance(outputs, dict) else None
    is_counted = tf.is_tensor(weight) and examples.are_in(weight)
    for kind, op in _mixes(losses[0], examples, _averaged(towers[0], examples) | towers[0].context.examined):
        if is_counted and kind == "returns" and _counts_as(op, weight, examples):
            continue
        if is_counted and kind in ("means", "divides", "counts"):
            if kind == "means" or _is_of_others(op, weight, examples):
                warnings.warn(
                    "The loss of a tower (%r) has a mean over the tower's examples in it (%r), and its \"weight\", by which "
                    "towers average all of the loss, counts something else. Divide by the weight there too, or compute the mean "
                    "of the whole batch by towers.all_reduce." % (losses[0].name, op.name), TowersWarning, stacklevel=stacklevel)
                return True
        elif kind != "means":
            warnings.warn(
                "The loss of a tower (%r) %s, so it is no mean over examples, and the towers' average of it is not the loss of "
                "the whole batch. %s" % (losses[0].name, _HOW[kind] % op.name, _MENDS.get(kind, _MEND)),
                TowersWarning, stacklevel=stacklevel)
            return True
    return False


def _is_of_others(op, weight, examples):
    """Tells whether what an op divides by, or counts, is computed of other tensors of the batch than a "weight" is."""
    number = op.inputs[1 if op.type in _DIVIDES else 0]
    of_number, of_weight = examples.given_to(number), examples.given_to(weight)
    return bool(of_number and of_weight) and of_number.isdisjoint(of_weight)


def _counts_as(op, weight, examples):
    """Tells whether an op adds up what is of no variable, of the same tensors of the batch that a "weight" is of."""
    if op.type != "Sum" or any(made.type in VARIABLES for made in examples.needed_by(op.inputs[0])):
        return False
    return examples.given_to(op.inputs[0]) == examples.given_to(weight)


def _averaged(tower, examples):
    """Returns the ops of what is one for all of a tower's examples and goes into a variable, a moving average say; a set."""
    seen, stack = set(), [tensor for op in writes_of(tower.ops) for tensor in op.inputs]
    while stack:
        tensor = stack.pop()
        if tensor.op not in seen and not examples.lie_in(tensor) and not examples.end_at(tensor):
            seen.add(tensor.op)
            stack.extend(tensor.op.inputs)
    return seen


def _mixes(loss, examples, passed):
    """Yields (kind, op) where a loss takes examples together otherwise than by their sum.

    Args:
      loss: scalar tensor.
      examples: `towers.along_examples.Examples`.
      passed: set of ops behind which nothing is looked for that comes back to examples.
    """
    seen, stack = set(), [(loss, None)]
    while stack:
        tensor, reason = stack.pop()
        op = tensor.op
        if (tensor.name, reason) in seen or examples.end_at(tensor) or not examples.are_in(tensor):
            continue
        if reason is _RETURNS and op in passed:
            continue
        seen.add((tensor.name, reason))
        own = [source for source in examples.made_of(op) if examples.are_in(source)]
        is_reduction = op.type in SUMS or op.type in EXTREMES
        if op.type == "Mean" and not is_in_loop(op) and _is_over_lengths(op, examples):
            yield "lengths", op
        if is_reduction and examples.are_reduced(op):
            reason = reason or (("computes", op) if op.type in EXTREMES else None)
            chosen_by = examples.chooser_of(op.inputs[0], {0, *reduced_axes(op)})
            if reason is None and chosen_by is not None and (op.type == "Mean" or chosen_by.type not in COUNTS):
                reason = ("counts" if chosen_by.type in COUNTS else "chooses", chosen_by)
            if reason is _RETURNS:
                yield "returns", op
            elif reason is not None or op.type == "Mean":
                yield reason or ("means", op)
        elif op.type == "TopKV2" and op.inputs[0].shape.rank and examples.lie_along(op.inputs[0], op.inputs[0].shape.rank - 1):
            yield "chooses", op
        elif (reason is not None or op.type not in _ADDS) and _holds_pairs(op, examples):
            yield "pairs", op
        elif reason is not None and (examples.are_added_up(op) or examples.are_taken_in_turn(op)
                                     or op.type in _COUNT_UNIQUE and tensor.value_index == 2):
            yield reason if reason is not _RETURNS else ("returns", op)
        elif op.type in _EXTREMES_OF_CLASSES and examples.are_in_classes(op):
            yield reason if reason not in (None, _RETURNS) else ("computes", op)
        stack.extend(_sources(tensor, own, reason, examples))
        looked_up = _looked_up(op, own, examples)
        stack.extend((source, ("shares", op)) for source in looked_up)
        if op not in passed and examples.lie_in(tensor):
            stack.extend((source, _RETURNS) for source in own if source.shape.rank and not any(
                source is each for each in looked_up) and not examples.lie_in(source) and not examples.are_spread(source))


def _is_over_lengths(op, examples):
    """Tells whether a mean is taken along an axis, not that of the examples, which is as long as these say."""
    tensor = op.inputs[0]
    return examples.chooser_of(tensor) is None and any(
        examples.tell_length(tensor, axis) and not examples.lie_along(tensor, axis) for axis in reduced_axes(op) or ())


def _sources(tensor, own, reason, examples):
    """Returns the inputs of a tensor's op that hold examples, and for each how the loss takes it, if not by sums alone."""
    op, number = tensor.op, tensor.value_index
    if examples.lie_in(tensor):  # each may be anything of its own example, or of a number that is one for all of them
        own = [source for source in own if source.shape.rank == 0 or examples.lie_in(source) or examples.are_spread(source)]
    if op.type in SIZES or op.type in NO_VALUES or op.type == "Mul" and any(map(_is_zero, op.inputs)):
        return []
    if op.type in _DIVIDES and not (reason is not None and reason[0] == "shares"):
        divisor = [op.inputs[1]] if any(source is op.inputs[1] for source in own) else []
        divided = [op.inputs[0]] if any(source is op.inputs[0] for source in own) else []
        by = _RETURNS if reason is _RETURNS else ("divides", op)
        return [(source, by) for source in divisor] + [(source, reason or (by if divisor else None)) for source in divided]
    if op.type in ("Reciprocal", "Inv"):
        return [(source, reason if reason is not None and reason[0] in ("shares", "returns") else ("divides", op))
                for source in own]
    if op.type in _HANDS_ON or op.type == "IdentityN":
        return [(op.inputs[number], reason)]
    if op.type == "Pow" and tf.get_static_value(op.inputs[1]) == 1:
        return [(op.inputs[0], reason)]
    if op.type in ("Select", "SelectV2") and op.inputs[0].shape.rank == 0:  # what guards against a division by 0, say
        return [(source, reason) for source in own if source is not op.inputs[0]]
    if op.type in _ADDS or op.type in _PRODUCTS and len(own) == 1:
        return [(source, reason) for source in own]
    is_quotient = op.type == "Mul" and any(_is_inverse(source) for source in own)
    return [(source, reason or ("divides" if is_quotient else "computes", op)) for source in own]


def _looked_up(op, own, examples):
    """Returns which inputs hold a number for each class, one of all examples, where each example takes that of its class."""
    if op.type in ("Gather", "GatherNd", "GatherV2"):
        found = list(op.inputs)[:1] if examples.lie_in(op.inputs[1]) else []
    elif op.type in ("MatMul", "Mul"):
        pairs = [tuple(op.inputs)] + ([tuple(op.inputs)[::-1]] if op.type == "Mul" else [])
        found = [other for one, other in pairs if is_one_hot(one) and examples.lie_in(op.outputs[0]) and examples.lie_in(one)]
    else:
        found = []
    own = [source for source in own if any(source is each for each in found)]
    return [source for source in own if source.shape.rank and not examples.lie_in(source)]


def _is_zero(tensor):
    """Tells whether a tensor is a number that is 0, by which a part of a loss is switched off."""
    return tensor.op.type == "Const" and not tf.get_static_value(tensor).any()


def _is_inverse(tensor):
    while tensor.op.type in ("Cast", "Identity", "Mul", "Reshape", "StopGradient") and (
            tensor.op.type != "Mul" or tensor.op.inputs[0].op.type in _DIVIDES):
        tensor = tensor.op.inputs[0]
    return tensor.op.type in ("Reciprocal", "Inv") or (
        tensor.op.type in _DIVIDES and tf.get_static_value(tensor.op.inputs[0]) is not None)


def _holds_pairs(op, examples):
    """Tells whether an op computes something of each two of a tower's examples, which lie along two axes of what it returns."""
    rank = op.outputs[0].shape.rank if op.type in PRODUCTS or op.type in _PAIRWISE else None
    if rank is None or rank < 2 or len(op.inputs) != 2:
        return False
    places = [[] for _ in range(rank)]  # over the axes of the output, the numbers of the inputs whose examples lie there
    for axis in range(rank):
        for number, its in _axes_of(op, rank, axis):
            if examples.lie_along(op.inputs[number], its):
                places[axis].append(number)
    return [0] in places and [1] in places


def _axes_of(op, rank, axis):
    """Returns of which axes of a product's two inputs an axis of it is made, a list of (number of the input, its axis)."""
    if op.type in PRODUCTS:
        *labels, of_output = product_axes(op)
        return [(number, each.index(of_output[axis])) for number, each in enumerate(labels) if of_output[axis] in each]
    ranks = [source.shape.rank for source in op.inputs]
    its = [(number, axis - rank + each) for number, each in enumerate(ranks) if each is not None and axis >= rank - each]
    return [(number, each) for number, each in its if tf.dimension_value(op.inputs[number].shape[each]) != 1]
