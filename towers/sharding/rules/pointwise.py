"""Ops that compute each element by itself, their inputs aligned by broadcasting from the last axis on."""
import dataclasses

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.static_values import static_value
from towers.sharding.nodes import AsPartial, Numbered, OwnRows, Refused, Replicated, Unfit
from towers.sharding.placements import (BATCH, COMPUTED, Additive, Blocks, Listed, Partial, PartialMean, Replicate, RowNumbers,
                                        Shard, Size, size_of)
from towers.sharding.rules.arithmetic import is_of_size, of_sizes
from towers.sharding.rules.table import ANY, SUMS, rule

__all__ = ["along_rows", "jointly_linear"]

# What hands its first input on, whatever it is.
HANDED_ON = """DeepCopy EnsureShape Identity PreventGradient RefIdentity Snapshot StopGradient"""
# f(a x) = a f(x), f(x + y) = f(x) + f(y), of the one input.
LINEAR = "Conj Imag Neg Real"
# Linear in all inputs together.
JOINT = "AccumulateNV2 Add AddN AddV2 Sub"
# Linear in the first input, whatever the others are.
QUOTIENTS = "Div DivNoNan EluGrad LeakyReluGrad RealDiv Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad"
# Linear in the second input, whatever the first is.
SLOPES = "InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad"
# Linear in the first input by the other one, and the other way round.
PRODUCTS = "Mul MulNoNan"
CHOICES = "Select SelectV2"
NEITHER = """Abs Acos Acosh Angle ApproximateEqual AsString Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e
BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc BitwiseAnd BitwiseOr BitwiseXor Bucketize
Ceil ClipByValue Complex ComplexAbs Cos Cosh Dawsn Digamma Elu Equal Erf Erfc Erfinv Exp Expint Expm1 FakeQuantWithMinMaxArgs
FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars Floor FloorDiv FloorMod FresnelCos FresnelSin Greater GreaterEqual
Igamma IgammaGradA Igammac Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd
LogicalNot LogicalOr LogicalXor Maximum Minimum Mod Ndtri NextAfter NotEqual Polygamma PopulationCount Reciprocal Relu
Relu6 RightShift Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Spence Sqrt Square SquaredDifference Tan Tanh
TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta"""


def along_rows(node, out_rank=None, positions=None):
    """Returns wants and the output's placement for an op whose inputs' examples lie along one axis of its output.

    Args:
      node: `Node`, with an input that is sharded.
      out_rank: int, of the output; None asks the op's first output.
      positions: dict from numbers of inputs to where their axis 0 lies in the output; None aligns them from the last axis on.
    """
    out_rank = node.outputs[0].rank if out_rank is None else out_rank
    if positions is None:
        positions = {k: out_rank - value.rank for k, value in enumerate(node.inputs)}
    sharded = node.of(Shard, Blocks, RowNumbers)
    places = {k: node.inputs[k].placement.axis + positions[k] for k in sharded}
    axis = min(places.values())
    kept = [k for k in sharded if places[k] == axis]
    outer = {getattr(node.inputs[k].placement, "outer", 1) for k in kept}
    if len(outer) > 1 or None in outer and len({dataclasses.replace(node.inputs[k].placement, axis=0) for k in kept}) > 1:
        raise Unfit()
    first = kept[0]
    source = node.inputs[first].placement
    like, outer, wants = (node.inputs[first].tensor, source.axis), outer.pop(), {}
    for k, value in enumerate(node.inputs):
        if k in kept:
            if isinstance(value.placement, RowNumbers):
                wants[k] = Numbered()
        else:
            at = axis - positions[k]
            if 0 <= at < value.rank and _is_long(value, at):
                wants[k] = OwnRows(at, like, outer)
            elif not isinstance(value.placement, Replicate):
                wants[k] = Replicated()
    rows = sorted({node.inputs[k].placement.rows for k in kept}, key=lambda rows: rows.name)[0]
    times = next((node.inputs[k].placement.times for k in kept if getattr(node.inputs[k].placement, "times", None)), None)
    return wants, Shard(axis, rows, times) if outer == 1 else dataclasses.replace(source, axis=axis, rows=rows, times=times)


def _is_long(value, axis):
    """Tells whether an input may have more than one entry along an axis in one tower on the whole batch."""
    return value.whole[axis] != 1


def jointly_linear(node, numbers):
    """Returns wants and the placement of a sum of inputs of which one at least is a sum's or mean's parts, and none sharded.

    Args:
      node: `Node`.
      numbers: list of int, the inputs that are summed; the others are wanted whole.
    """
    wants = node.wanted(k for k in range(len(node.inputs)) if k not in numbers)
    found = [node.inputs[k].placement for k in numbers]
    is_floating = all(node.inputs[k].dtype.is_floating or node.inputs[k].dtype.is_complex for k in numbers)
    means = {placement.rows: placement for placement in found if isinstance(placement, PartialMean)}
    if not any(isinstance(placement, SUMS) for placement in found):
        raise Unfit()
    if all(isinstance(placement, Partial) for placement in found):
        return wants, Partial()
    if not is_floating:
        raise Unfit()
    wants.update(node.wanted(k for k, placement in zip(numbers, found) if not isinstance(placement, SUMS)))
    if len(means) == 1 and not any(isinstance(placement, Partial) for placement in found):
        return wants, next(iter(means.values()))  # what is replicated is a mean of itself: the shares sum to 1
    wants.update((k, AsPartial()) for k, placement in zip(numbers, found) if not isinstance(placement, Partial))
    return wants, Partial()


@rule(HANDED_ON, ANY)
def handed_on(node):
    return node.decide(node.inputs[0].placement)


@rule("CheckNumerics CheckNumericsV2", ANY)
def checked(node):
    """The mean over no examples is NaN: what a tower without any has is not looked at."""
    placement = node.inputs[0].placement
    if isinstance(placement, PartialMean):
        tensor, axis = placement.count if placement.count is not None else (None, None)
        if axis is None or tensor.shape.rank is None or not tf.dimension_value(tensor.shape[axis]):
            raise Unfit()
    return node.decide(placement)


@rule("Print PlaceholderWithDefault", ANY)
def first_handed_on(node):
    return node.decide(node.inputs[0].placement)


@rule("Cast", ANY)
def cast(node):
    placement, source, target = node.inputs[0].placement, node.inputs[0].dtype, node.outputs[0].dtype
    if isinstance(placement, SUMS):
        keeps = target.is_floating or target.is_complex or target == source or source.is_integer and target.size >= source.size
        if not keeps or target == tf.bool:
            raise Unfit()
    if isinstance(placement, Size) and (target == tf.bool or source.is_floating and not target.is_floating):
        return node.decide(size_of(np.full(placement.shape, COMPUTED, object)))
    if isinstance(placement, RowNumbers) and target == tf.bool:
        return node.decide(*reversed(along_rows(node)))
    return node.decide(placement)


@rule("OnesLike ZerosLike", ANY)
def alike(node):
    placement = node.inputs[0].placement
    if isinstance(placement, RowNumbers):
        return node.decide(Shard(placement.axis, placement.rows, placement.times))
    return node.decide(placement if isinstance(placement, (Shard, Blocks, Listed)) else Replicate())


@rule(LINEAR, (Shard, Blocks, RowNumbers, Size) + SUMS)
def linear(node):
    if node.all(*SUMS):
        return node.decide(node.inputs[0].placement)
    return pointwise(node)


@rule(JOINT + " BiasAdd BiasAddV1", (Shard, Blocks, RowNumbers, Size, Listed) + SUMS)
def add(node):
    if node.of(Listed):
        return _lists_added(node)
    if node.of(*SUMS) and not node.of(Shard, Blocks, RowNumbers):
        wants, placement = jointly_linear(node, list(range(len(node.inputs))))
        return node.decide(placement, wants)
    if node.type in ("BiasAdd", "BiasAddV1"):
        is_first = node.type == "BiasAdd" and node.attr("data_format") in (b"NCHW", "NCHW")
        rank = node.inputs[0].rank
        wants, placement = along_rows(node, rank, {0: 0, 1: (1 if rank < 4 else rank - 3) if is_first else rank - 1})
        return node.decide(placement, wants)
    shifted = _shifted(node) if node.type in ("Add", "AddV2", "Sub") else None
    return pointwise(node) if shifted is None else node.decide(shifted)


def _lists_added(node):
    """Lists of gradients, which are added element by element; what is no such list is zeros."""
    elements = {value.placement.element for value in node.inputs if isinstance(value.placement, Listed)} - {None}
    if len(elements) > 1:
        raise Refused("%r adds up lists whose elements are %s" % (
            node.op.name, " and ".join(sorted(map(str, elements)))))
    return node.decide(Listed(elements.pop() if elements else None))


def _shifted(node):
    """Returns the placement of numbers of rows to which a number is added, and which number rows of the same examples still."""
    numbers = node.of(RowNumbers)
    if len(numbers) != 1 or node.type == "Sub" and numbers[0] == 1:
        return None
    value, other = node.inputs[numbers[0]], node.inputs[1 - numbers[0]]
    placement, added = value.placement, other.const()
    if placement.column is not None or placement.offset is None or added is None or np.ndim(added) or added.dtype.kind != "i":
        return None
    offset = placement.offset + int(-added if node.type == "Sub" else added)
    if added and not 0 <= offset < placement.spacing:
        return None
    return dataclasses.replace(placement, axis=placement.axis + node.outputs[0].rank - value.rank, offset=offset)


@rule(QUOTIENTS, (Shard, Blocks, RowNumbers, Size) + SUMS)
def quotient(node):
    return _linear_in(node, 0)


@rule(SLOPES, (Shard, Blocks, RowNumbers) + SUMS)
def slope(node):
    return _linear_in(node, 1)


def _linear_in(node, kept):
    is_sum = isinstance(node.inputs[kept].placement, SUMS) and _is_real(node)
    if is_sum and not isinstance(node.inputs[1 - kept].placement, (Shard, Blocks, RowNumbers)):
        return with_whole(node, kept)
    return pointwise(node)


@rule(PRODUCTS, (Shard, Blocks, RowNumbers, Size) + SUMS)
def product(node):
    sums = node.of(*SUMS)
    if sums and not node.of(Shard, Blocks, RowNumbers) and (_is_real(node) or node.all(Partial, Replicate)):
        if node.type == "MulNoNan" and 0 not in sums:
            raise Unfit()
        if node.inputs[0].tensor is node.inputs[-1].tensor:
            raise Unfit()
        kept = max(sums, key=lambda k: (_length(node.inputs[k]), -k))  # the smaller one meets
        if node.type == "MulNoNan":
            kept = 0
        return with_whole(node, kept)
    return _multiplied_numbers(node) or pointwise(node)


def _multiplied_numbers(node):
    """Numbers of rows times 1, as `tf.meshgrid` has it, or of the batch's examples times a whole number: each one's first row.

    None for other products.
    """
    k = next(iter(node.of(RowNumbers)), None)
    if k is not None and node.outputs[0].dtype.is_integer and _is_of_ones(node.inputs[1 - k].tensor):
        wants, found = along_rows(node)
        is_kept = wants.pop(k, None) == Numbered()
        return node.decide(dataclasses.replace(node.inputs[k].placement, axis=found.axis, times=found.times), wants) if (
            is_kept) else None
    of, factor = (None, None) if k is None else (node.inputs[k].placement, node.inputs[1 - k].const())
    if factor is None or np.ndim(factor) or not node.outputs[0].dtype.is_integer or factor < 1 or (
            of.column is not None or of.of.rows != BATCH or of.of.times is None):
        return None
    return node.decide(dataclasses.replace(of, of=Additive(of.of.times * int(factor), BATCH), offset=(
        None if of.offset is None else of.offset * int(factor))))


def _is_of_ones(tensor):
    return tensor.op.type == "Fill" and static_value(tensor.op.inputs[1]) == 1


def with_whole(node, kept):
    """Returns the `Decision` of what is linear in an input that is a sum's or mean's parts, where all others are whole.

    The mean over no examples is NaN, which the gradients of the others would take up, so that it becomes a sum's part before.
    """
    others = [k for k in range(len(node.inputs)) if k != kept]
    placement, wants = node.inputs[kept].placement, node.wanted(others)
    if isinstance(placement, PartialMean) and any(node.inputs[k].const() is None for k in others):
        wants[kept], placement = AsPartial(), Partial()
    return node.decide(placement, wants)


def _is_real(node):
    return node.outputs[0].dtype.is_floating or node.outputs[0].dtype.is_complex


def _length(value):
    return float("inf") if value.dims is None or None in value.dims else int(np.prod(value.dims, dtype=int))


@rule(CHOICES, (Shard, Blocks, RowNumbers, Size) + SUMS)
def choice(node):
    if _is_of_more_than_one(node):
        return node.decide(node.inputs[1].placement)
    if node.of(Shard, Blocks, RowNumbers):
        rank, of_condition = node.outputs[0].rank, node.inputs[0].rank
        starts = [rank - value.rank for value in node.inputs]
        if node.type == "Select":  # a vector chooses rows, a scalar all of them
            starts[0] = 0 if of_condition else rank
        wants, placement = along_rows(node, rank, dict(enumerate(starts)))
        return node.decide(placement, wants)
    if _is_real(node):
        wants, placement = jointly_linear(node, [1, 2])
        return node.decide(placement, wants)
    raise Unfit()


@rule("Pow", (Shard, Blocks, RowNumbers, Size) + SUMS)
def power(node):
    """To the power of 1 a sum's part is one."""
    if not isinstance(node.inputs[0].placement, SUMS):
        return pointwise(node)
    exponent = node.inputs[1].const()
    if exponent is None or np.any(exponent != 1):
        raise Unfit()
    return node.decide(node.inputs[0].placement)


def _is_of_more_than_one(node):
    """Tells whether numbers of rows are chosen where there are more than one, and 0 elsewhere, as tf.vectorized_map has it."""
    greater, numbers, other = node.inputs[0].tensor.op, node.inputs[1].placement, node.inputs[2].const()
    return (isinstance(numbers, RowNumbers) and greater.type == "Greater" and other is not None and not np.any(other)
            and static_value(greater.inputs[1]) == 1 and node.context.elements(greater.inputs[0]) == [numbers.of])


@rule(NEITHER, (Shard, Blocks, RowNumbers, Size))
def pointwise(node):
    if node.of(Shard, Blocks, RowNumbers):
        wants, placement = along_rows(node)
        return node.decide(placement, wants)
    if node.all(Size, Replicate) and node.of(Size):
        arrays = [value.elements() for value in node.inputs]
        if any(array is None for array in arrays) or _is_of_data(node):
            raise Unfit()
        found = of_sizes(node.type, arrays)
        flat = [found[index] for index in np.ndindex(found.shape)]
        if node.type == "FloorDiv" and not any(map(is_of_size, flat)) and None in flat and set(flat) != {None}:
            return node.decide(Size(tuple(flat), found.shape))  # a number of rows by itself is 1, and not in a tower of none
        return node.decide(size_of(found))
    raise Unfit()


def _is_of_data(node):
    """Tells whether a size is computed with what is no size and no constant: that is no shape, so the number is wanted."""
    return not node.outputs[0].dtype.is_integer and any(
        isinstance(value.placement, Replicate) and value.const() is None for value in node.inputs)
