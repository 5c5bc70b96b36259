"""Ops that compute each example by itself, along axis 0 of the inputs that are numbered here, and hold none else of the batch."""
from towers.sharding.nodes import OwnRows, Unfit
from towers.sharding.placements import Additive, Blocks, Own, Replicate, RowNumbers, Shard, Size, entries_of
from towers.sharding.rules.movement.axes import in_blocks, shape_wanted
from towers.sharding.rules.table import LAYER, rule

__all__ = []

ROWS = (Shard, Blocks)

# Type of the op -> the inputs whose axis 0 is the batch. All outputs have it too.
EACH_ROW = {
    "AdjustContrastv2": (0,), "AdjustHue": (0,), "AdjustSaturation": (0,),
    "AvgPool": (0,), "AvgPool3D": (0,), "AvgPoolGrad": (1,), "AvgPool3DGrad": (1,),
    "Conv2D": (0,), "Conv2DBackpropInput": (2,), "Conv3D": (0,), "Conv3DBackpropInputV2": (2,),
    "DepthToSpace": (0,), "DepthwiseConv2dNative": (0,), "DepthwiseConv2dNativeBackpropInput": (2,),
    "Dilation2D": (0,), "Dilation2DBackpropInput": (0, 2), "ExtractImagePatches": (0,), "ExtractVolumePatches": (0,),
    "HSVToRGB": (0,), "LRN": (0,), "LRNGrad": (0, 1, 2),
    "MaxPool": (0,), "MaxPool3D": (0,), "MaxPool3DGrad": (0, 1, 2), "MaxPool3DGradGrad": (0, 1, 2), "MaxPoolGrad": (0, 1, 2),
    "MaxPoolGradGrad": (0, 1, 2), "MaxPoolGradGradV2": (0, 1, 2), "MaxPoolGradV2": (0, 1, 2), "MaxPoolV2": (0,), "RGBToHSV": (0,),
    "ResizeArea": (0,), "ResizeBicubic": (0,), "ResizeBicubicGrad": (0, 1), "ResizeBilinear": (0,), "ResizeBilinearGrad": (0, 1),
    "ResizeNearestNeighbor": (0,), "ResizeNearestNeighborGrad": (0,), "SpaceToDepth": (0,), "ImageProjectiveTransformV2": (0,),
    "ImageProjectiveTransformV3": (0,),
}


# Gradients whose input 0 is the shape of what they return, rows and all.
SHAPED = frozenset(["AvgPool3DGrad", "AvgPoolGrad", "Conv2DBackpropInput", "Conv3DBackpropInputV2",
                    "DepthwiseConv2dNativeBackpropInput"])


@rule(" ".join(name for name in EACH_ROW if name not in SHAPED), ROWS, does=LAYER)
def each_row(node):
    return node.each_row(list(EACH_ROW[node.type]))


@rule("FractionalAvgPool", ROWS, does=LAYER)
def fractional_pool(node):
    """Where the pools end is drawn for all examples together."""
    ends = Replicate() if node.attr("deterministic") else Own()
    return node.decide([node.each_row([0]).outputs[0], ends, ends])


@rule(" ".join(sorted(SHAPED)), ROWS + (Size,), does=LAYER)
def each_row_of_shape(node):
    decision = node.each_row(list(EACH_ROW[node.type]))
    placement, elements = decision.outputs[0], node.inputs[0].elements()
    times = entries_of(placement)
    if times is None or elements is None or elements[0] != Additive(times, placement.rows):
        raise Unfit()  # as large as the whole batch
    decision.wants.pop(0, None)
    decision.wants.update(shape_wanted(node, 0, 0))
    return decision


# Of each matrix that the last two axes hold.
@rule("BatchMatrixInverse Cholesky CholeskyGrad Eig LogMatrixDeterminant MatrixDeterminant MatrixExponential MatrixInverse "
      "MatrixLogarithm MatrixSolve MatrixSolveLs MatrixSquareRoot MatrixTriangularSolve Lu Qr SelfAdjointEigV2 Svd", ROWS,
      does=LAYER)
def each_matrix(node):
    sharded = node.of(*ROWS)
    found = {node.inputs[k].placement for k in sharded}
    if len(found) != 1 or len(sharded) < len([v for v in node.inputs if v.rank >= 2]) or len({
            node.inputs[k].rank for k in sharded}) > 1:
        raise Unfit()
    placement = found.pop()
    if placement.axis >= node.inputs[sharded[0]].rank - 2:
        raise Unfit()
    return node.decide(placement, node.wanted(k for k in range(len(node.inputs)) if k not in sharded))


# Along the last axes: type -> how many.
FOURIER = {"FFT": 1, "IFFT": 1, "RFFT": 1, "IRFFT": 1, "FFT2D": 2, "IFFT2D": 2, "RFFT2D": 2, "IRFFT2D": 2, "FFT3D": 3,
           "IFFT3D": 3, "RFFT3D": 3, "IRFFT3D": 3}


@rule(" ".join(FOURIER), ROWS, does=LAYER)
def fourier(node):
    placement = node.inputs[0].placement
    if not isinstance(placement, ROWS) or placement.axis >= node.inputs[0].rank - FOURIER[node.type]:
        raise Unfit()
    return node.decide(placement, node.wanted(range(1, len(node.inputs))))


@rule("ReverseSequence", ROWS, does=LAYER)
def reverse_sequence(node):
    placement, lengths = (value.placement for value in node.inputs)
    if not node.all(*ROWS) or node.attr("batch_dim") != placement.axis:
        raise Unfit()
    outer = getattr(placement, "outer", 1)
    if getattr(lengths, "outer", 1) != outer or outer is None and lengths.times != placement.times:
        raise Unfit()
    return node.decide(placement)


@rule("CTCLoss CTCLossV2", ROWS + (RowNumbers,), does=LAYER)
def ctc(node):
    """Each sequence's loss, [batch], and its gradient, [time, batch, classes], by labels of a SparseTensor, row by row."""
    rows, numbers, labels, lengths = (value.placement for value in node.inputs)
    if type(rows) is not Shard or rows.axis != 1 or not isinstance(numbers, RowNumbers) or not numbers.of.times or (
            (numbers.of, numbers.offset, numbers.column or 0) != (Additive(rows.times, rows.rows), 0, 0)):
        raise Unfit()
    if getattr(labels, "rows", None) != numbers.rows or type(lengths) not in (Shard, Replicate):
        raise Unfit()
    wants = {3: OwnRows(0, (node.inputs[0].tensor, 1))} if isinstance(lengths, Replicate) else {}
    return node.decide([Shard(0, rows.rows, rows.times), rows], wants)


@rule("SpaceToBatchND BatchToSpaceND SpaceToBatch BatchToSpace", ROWS, does=LAYER)
def space_to_batch(node):
    """The batch becomes blocks: [space, n] along axis 0."""
    value = node.inputs[0]
    block = node.inputs[1].const() if node.type.endswith("ND") else None
    if block is None or not isinstance(value.placement, ROWS) or value.placement.axis:
        raise Unfit()
    outer, number = getattr(value.placement, "outer", 1), int(block.prod())
    others = node.wanted(range(1, len(node.inputs)))
    if outer is None:
        raise Unfit()
    if node.type == "SpaceToBatchND":
        return node.decide(in_blocks(value.placement, 0, outer * number, value.placement.times), others)
    if outer % number:
        raise Unfit()
    return node.decide(in_blocks(value.placement, 0, outer // number, value.placement.times), others)
