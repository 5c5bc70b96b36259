"""Cases of the law of rules, few, that together reach all lines of rules which many reach: `tools/choose_cases.py` chose them."""
__all__ = ["CHOSEN"]

# The type of the op, the number of its sample, whether sizes are known, and the placements of inputs.
CHOSEN = """
AddV2 7 unknown: numbers 0, replicated with {'i': 1}
Any 1 unknown: sharded 0, - with {'i': 1}
Any 2 unknown: sharded 1, - with {'j': 1}
ArgMin 2 unknown: sharded 1, - with {'j': 1}
BiasAdd 3 unknown: sharded 2, replicated with {'c': 1}
BiasAddGrad 2 unknown: sharded 1 with {'b': 1}
CheckNumericsV2 0 unknown: sum with {}
Cholesky 2 unknown: sharded 0 with {'a': 1}
ConcatOffset 0 unknown: sharded 1, replicated with {'j': 1}
CumulativeLogsumexp 1 unknown: sharded 1, - with {'j': 1}
DenseBincount 2 unknown: sharded 0, -, - with {'m': 1}
DepthwiseConv2dNativeBackpropInput 0 unknown: replicated, replicated, sharded 0 with {'n': 1}
Dilation2DBackpropFilter 0 unknown: sharded 3, replicated, replicated with {'c': 1}
DynamicPartition 1 unknown: replicated, sharded 0 with {'i': 1}
Einsum 4 unknown: sum with {'k': 2}
FusedBatchNormGradV3 0 unknown: sharded 2, replicated, replicated with {'w': 1}
FusedBatchNormGradV3 0 unknown: sum, replicated, replicated with {'w': 2}
FusedBatchNormV3 1 unknown: replicated, sharded 0, replicated, replicated, replicated with {'c': 1}
FusedBatchNormV3 1 unknown: sharded 0, replicated, replicated, replicated, replicated with {'n': 1}
GatherV2 5 unknown: replicated, sharded 0, - with {'a': 1}
GatherV2 9 unknown: replicated, sharded 0 with {'i': 1}
IFFT2D 1 unknown: sharded 0 with {'a': 1}
MatrixDiagPartV3 1 unknown: sharded 2, -, - with {'k': 1}
MatrixSetDiag 2 unknown: sharded 0, replicated with {'j': 1}
MatrixSetDiagV3 0 unknown: sharded 0, replicated, - with {'i': 1}
MatrixSetDiagV3 1 unknown: sharded 0, replicated, - with {'j': 1}
Max 6 unknown: size, - with {}
Mean 3 unknown: sharded 1, - with {'j': 1}
Mean 5 unknown: sharded 0, - with {'i': 1}
MulNoNan 2 unknown: sum, replicated with {'i': 2}
NthElement 0 unknown: sharded 1, - with {'j': 1}
OneHot 3 unknown: sharded 0, replicated, -, - with {'i': 1}
PadV2 2 unknown: sharded 0, -, replicated with {'i': 1}
Pow 2 unknown: blocks 0, replicated with {'j': 2}
Print 0 unknown: sum with {'j': 2}
Prod 3 unknown: sharded 1, - with {'j': 1}
Prod 3 unknown: sharded 2, - with {'k': 1}
Reshape 17 unknown: sharded 1 with {'j': 1}
Reshape 26 unknown: numbers 0 with {'i': 1}
ScatterNd 3 unknown: sum with {'i': 1}
SegmentProd 1 unknown: sum, - with {}
SegmentSum 1 unknown: sum, - with {}
Slice 4 unknown: sum with {}
SparseMatMul 0 unknown: sum, replicated with {}
SparseSoftmaxCrossEntropyWithLogits 0 unknown: sharded 0, replicated with {'i': 1}
Split 2 unknown: -, blocks 0 with {'i': 2}
Squeeze 2 unknown: sum with {'j': 1}
StatelessMultinomial 0 unknown: sharded 1, -, - with {'j': 1}
StridedSlice 5 unknown: sharded 2 with {'k': 1}
StridedSliceGrad 5 unknown: blocks 0 with {'i': 2}
StridedSliceGrad 5 unknown: sharded 0 with {'i': 1}
TensorScatterSub 2 unknown: replicated, sum, replicated with {'k': 2}
TensorScatterUpdate 1 unknown: sharded 1, -, replicated with {'j': 1}
UniqueWithCountsV2 2 unknown: sharded 1, - with {'j': 1}
Unpack 1 unknown: sharded 1 with {'j': 1}
Unpack 2 unknown: size with {}
UnsortedSegmentSum 2 unknown: sharded 2, replicated, - with {'j': 1}
UnsortedSegmentSum 4 unknown: sharded 0 with {'i': 1}
Where 2 unknown: sharded 1 with {'j': 1}
ArgMin 2 known: sharded 0, - with {'i': 1}
BatchToSpaceND 1 known: sum with {'n': 2}
BiasAddGrad 2 known: sum with {'a': 2}
Cast 7 known: sum with {}
ConcatV2 2 known: sharded 1, replicated, replicated, - with {'j': 1}
Cross 1 known: sharded 0, replicated with {'i': 1}
CumulativeLogsumexp 1 known: sum, - with {'i': 2}
DenseBincount 0 known: sharded 0, -, - with {'m': 1}
DepthwiseConv2dNativeBackpropInput 0 known: replicated, replicated, sharded 0 with {'n': 1}
DiagPart 0 known: sum with {'i': 1}
DynamicStitch 0 known: sharded 0 with {'i': 1}
Eig 0 known: sum with {'i': 1}
Einsum 3 known: replicated, sum with {'k': 1}
Einsum 6 known: mean, replicated with {'b': 1}
FractionalAvgPool 0 known: sharded 3 with {'c': 1}
FusedBatchNormGradV3 0 known: sharded 3, replicated, replicated with {'c': 1}
FusedBatchNormV3 0 known: sharded 0, replicated, replicated with {'n': 1}
GatherNd 5 known: replicated, sharded 0 with {'i': 1}
GatherNd 5 known: sum, replicated with {'i': 2}
GatherV2 5 known: replicated, sum, - with {'m': 2}
GatherV2 5 known: sharded 2, replicated, - with {'j': 1}
HistogramFixedWidth 1 known: sharded 1, -, - with {'j': 1}
IFFT2D 1 known: sum with {'k': 1}
L2Loss 1 known: sharded 2 with {'k': 1}
MatrixBandPart 1 known: sum, -, - with {'j': 1}
MatrixDiagV3 1 known: sharded 1, -, -, -, - with {'j': 1}
MatrixDiagV3 2 known: sum, -, -, -, - with {}
MatrixSetDiagV3 1 known: sharded 1, replicated, - with {'j': 1}
MulNoNan 2 known: replicated, sum with {'i': 1}
PadV2 1 known: sum, -, - with {}
PadV2 2 known: mean, -, replicated with {'j': 1}
ParallelDynamicStitch 0 known: -, -, sharded 1, replicated with {'j': 1}
Pow 2 known: sum, replicated with {'i': 2}
Rank 0 known: sum with {'j': 1}
Reshape 23 known: sharded 2 with {'j': 1}
ReverseSequence 1 known: replicated, sharded 0 with {'j': 1}
ReverseSequence 1 known: sum, replicated with {'k': 2}
Roll 1 known: sum, -, - with {'j': 2}
Roll 2 known: replicated, size, - with {'j': 2}
ScatterNd 2 known: sum with {'i': 1}
ScatterNd 3 known: sharded 0 with {'i': 1}
Size 1 known: sum with {'i': 2}
SpaceToBatch 0 known: sharded 0, - with {'n': 1}
SparseSoftmaxCrossEntropyWithLogits 0 known: blocks 1, replicated with {'k': 2}
SparseSoftmaxCrossEntropyWithLogits 0 known: sharded 1, numbers 0 with {'i': 1, 'k': 1}
SplitV 1 known: sharded 1, -, - with {'i': 1}
SplitV 1 known: sum, -, - with {}
StatelessMultinomial 0 known: sum, -, - with {'j': 2}
StatelessRandomUniform 1 known: sharded 0 with {'i': 1}
StatelessRandomUniformInt 0 known: sum, replicated with {'j': 2}
StridedSlice 13 known: mean with {'j': 2}
Sum 6 known: size, - with {}
TensorScatterUpdate 1 known: sharded 0, -, replicated with {'i': 1}
TensorScatterUpdate 1 known: sum, -, replicated with {'j': 1}
Tile 1 known: mean, - with {'j': 1}
Tile 3 known: sharded 1, - with {'j': 1}
TopKV2 1 known: sharded 0, - with {'i': 1}
UniqueWithCountsV2 0 known: sharded 0, - with {'i': 1}
Unpack 2 known: sum with {}
UnsortedSegmentProd 1 known: replicated, replicated, size with {'j': 1}
UnsortedSegmentProd 3 known: replicated, sum, - with {'m': 1}
UnsortedSegmentSum 3 known: sum, replicated, - with {}
""".strip().split("\n")
