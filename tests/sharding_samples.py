"""Samples of the ops that have a rule: how each is called, which the law of rules tries with all placements of its inputs."""
import numpy as np
import tensorflow.compat.v1 as tf

from tests.sharding_inputs import of, op_def

__all__ = ["SAMPLES"]


def _each(names, *samples):
    return {name: list(samples) for name in names.split()}


SAMPLES = {}

# Of one input, by the numbers that it takes.
SAMPLES.update(_each("""Abs Asinh Atan BesselI0e BesselI1e BesselJ0 BesselJ1 Ceil Conj Cos Cosh Dawsn DeepCopy Elu Erf Erfc Exp
    Expm1 Floor FresnelCos FresnelSin Identity Inv IsFinite IsInf IsNan LeakyRelu Neg Ndtri OnesLike Reciprocal Relu Rint Round
    Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Square StopGradient Tan Tanh ZerosLike""", of("ij")))
SAMPLES.update(_each("BesselI0 BesselI1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Digamma Expint Lgamma Log Log1p "
                     "Rsqrt Spence Sqrt", of("ij:pos")))
SAMPLES.update(_each("Acos Asin Atanh Erfinv", of("ij:sym")))
SAMPLES.update(_each("Acosh", of("ij:big")))
SAMPLES.update(_each("Ndtri", of("ij:unit")))
SAMPLES.update(_each("Relu6", of("ij:wide")))
SAMPLES.update(_each("Angle ComplexAbs Imag Real", of("ij:complex", Tout=tf.float64)))
SAMPLES.update(_each("Invert PopulationCount", of("ij:int")))
SAMPLES.update(_each("LogicalNot", of("ij:bool")))
SAMPLES.update(_each("CheckNumerics CheckNumericsV2 PreventGradient", of("ij", message="m")))
SAMPLES["Conj"] = [of("ij:complex")]
SAMPLES["PreventGradient"] = [of("ij", message="m", call=lambda x, message: tf.raw_ops.PreventGradient(
    input=tf.stop_gradient(x), message=message))]
SAMPLES["Neg"] = [of("ij"), of("ij:int"), of("2:num")]
SAMPLES["Bucketize"] = [of("ij", boundaries=[-0.5, 0.3])]
SAMPLES["FakeQuantWithMinMaxArgs"] = [of("ij", min=-1.0, max=1.0, dtype=tf.float32)]
SAMPLES["FakeQuantWithMinMaxArgsGradient"] = [of("ij ij", min=-1.0, max=1.0, dtype=tf.float32)]
SAMPLES["FakeQuantWithMinMaxVars"] = [of("ij ? ?", np.float32(-1), np.float32(1), dtype=tf.float32),
                                      of("ij . ?", np.float32(3), dtype=tf.float32)]
SAMPLES["EnsureShape"] = [of("ij", call=lambda x: tf.ensure_shape(x, x.shape))]
SAMPLES["AsString"] = [of("ij:int", forms=("sharded", "sum"))]
SAMPLES["Cast"] = [of("ij", call=lambda x: tf.cast(x, tf.float32), dtype=tf.float64),
                   of("ij", call=lambda x: tf.cast(4 * x, tf.int32)),
                   of("ij:int", call=lambda x: tf.cast(x, tf.float64)), of("ij", call=lambda x: tf.cast(x, tf.bool)),
                   of("ij:bool", call=lambda x: tf.cast(x, tf.int64)), of("ij:int", call=lambda x: tf.cast(x, tf.uint8)),
                   of("ij:complex", call=lambda x: tf.cast(x, tf.complex64), dtype=tf.float32),
                   of("2:num", call=lambda x: tf.cast(tf.cast(x, tf.float64) / 3.0, tf.int32)),
                   of("2:num", call=lambda x: tf.cast(x, tf.float64))]
SAMPLES["PlaceholderWithDefault"] = [of("ij", call=lambda x: tf.placeholder_with_default(x, x.shape))]
SAMPLES["Print"] = [of("ij", call=lambda x: tf.Print(x, [x], first_n=0))]

# Of two inputs, aligned from the last axis on.
PAIRS = (of("ij ij"), of("ijk k"), of("j ij"), of("i1 1j"), of(". ij"))
SAMPLES.update(_each("Add AddV2 Sub Maximum Minimum SquaredDifference Mul Less GreaterEqual", *PAIRS, of("ij:int j:int"),
                     of("2:num .:num"), of("i:in_i .:num")))
SAMPLES.update(_each("NotEqual Equal LessEqual Greater", of("ij:int ij:int"), of("i1:int 1j:int"), of("ij ij"),
                     of("2:num .:num")))
SAMPLES.update(_each("ApproximateEqual", of("ij ij", tolerance=0.3)))
SAMPLES.update(_each("NextAfter", of("ij ij"), of("j ij")))
SAMPLES.update(_each("Div RealDiv DivNoNan", of("ij ij:pos"), of("ijk k:pos"), of("j ij:pos"), of("ij .:pos"), of("i1 1j:pos")))
SAMPLES["Div"] += [of("ij:int j:nonzero")]
SAMPLES.update(_each("MulNoNan Atan2", of("ij ij:pos"), of("j ij:pos"), of("ij .:pos")))
SAMPLES.update(_each("FloorDiv FloorMod", of("ij ij:pos"), of("ij:signed ij:nonzero"), of("ij:signed .:nonzero"),
                     of("2:num .:num")))
SAMPLES.update(_each("Mod TruncateDiv TruncateMod", of("ij:signed ij:nonzero"), of("ij:signed j:nonzero")))
SAMPLES.update(_each("Pow", of("ij:pos ij"), of("ij:pos ."), of("j:pos ij")))
SAMPLES.update(_each("Xdivy Xlog1py Xlogy", of("ij ij:pos"), of("j ij:pos")))
SAMPLES.update(_each("Igamma Igammac IgammaGradA", of("ij:pos ij:pos"), of("ij:pos j:pos")))
SAMPLES.update(_each("Polygamma", of("ij:nonzero ij:pos", call=lambda n, x: tf.math.polygamma(tf.cast(n, tf.float64), x))))
SAMPLES.update(_each("Zeta", of("ij:big ij:pos")))
SAMPLES.update(_each("Betainc", of("ij:pos ij:pos ij:unit")))
SAMPLES.update(_each("Complex", of("ij ij", Tout=tf.complex128), of("ij j", Tout=tf.complex128)))
SAMPLES.update(_each("BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift", of("ij:int ij:int"), of("ij:int j:int")))
SAMPLES.update(_each("LogicalAnd LogicalOr LogicalXor", of("ij:bool ij:bool"), of("ij:bool j:bool")))
SAMPLES.update(_each("EluGrad LeakyReluGrad ReluGrad SeluGrad SoftplusGrad SoftsignGrad InvGrad ReciprocalGrad SigmoidGrad "
                     "SqrtGrad RsqrtGrad TanhGrad", of("ij ij:unit")))
SAMPLES.update(_each("Relu6Grad", of("ij ij:wide")))
SAMPLES["ClipByValue"] = [of("ij ? ?", -0.4, 0.7), of("ij . ?", 0.7), of("ij ij ?", 3.0)]
SAMPLES["AddN"] = [of("ij"), of("ij ij"), of("ij ij ij")]
SAMPLES["AccumulateNV2"] = [of("ij ij",
                               call=lambda x, y: tf.accumulate_n([x, y], x.shape.merge_with(y.shape)))]
SAMPLES["BiasAdd"] = [of("ijk k"), of("ij j"), of("abcd b", data_format="NCHW"), of("abc b", data_format="NCHW")]
SAMPLES["BiasAddV1"] = [of("ijk k")]
SAMPLES["Select"] = [of("ij:bool ij ij"), of("i:bool ij ij"), of("?  ij ij", True),
                     of("?  ij ij", np.array([True, False, True]), sizes=dict(i=3), forms=("sum", "mean"))]
SAMPLES["SelectV2"] = [of("ij:bool ij ij"), of("i1:bool ij ."), of("j:bool ij i1"), of("? ij j", True)]

# Sums over axes, and what else takes entries together.
for _name in "Sum Mean Prod Max Min EuclideanNorm".split():
    SAMPLES[_name] = [of("ijk ?", axes, keep_dims=keep) for axes, keep in (
        ([0], False), ([1, 2], True), ([-1], False), (1, True), ([0, 1, 2], False))]
for _name in "Sum Prod Max Min".split():
    SAMPLES[_name] += [of("ij:int ?", [0]), of("2:num ?", [0])]
SAMPLES["Mean"] += [of("ij:int ?", [0])]
SAMPLES.update(_each("All Any", of("ij:bool ?", [0]), of("ij:bool ?", [1], keep_dims=True), of("ij:bool ?", [0, 1])))
SAMPLES.update(_each("ArgMax ArgMin", of("ij ?", 0), of("ijk ?", 1), of("ij ?", -1)))
SAMPLES["L2Loss"] = [of("ij"), of("ijk")]
SAMPLES["BiasAddGrad"] = [of("ijk"), of("ij"), of("abcd", data_format="NCHW")]
SAMPLES.update(_each("Softmax LogSoftmax", of("ij")))
SAMPLES.update(_each("Cumsum Cumprod", of("ijk ?", 0), of("ij ?", 1, exclusive=True), of("ij ?", -1, reverse=True)))
SAMPLES["CumulativeLogsumexp"] = [of("ij ?", 0), of("ij ?", 1)]
SAMPLES["ReverseV2"] = [of("ijk ?", [0]), of("ijk ?", [1, 2]), of("ijk ?", [-1])]
SAMPLES["Roll"] = [of("ijk ? ?", 1, 0), of("ijk ? ?", [1, -1], [1, 2]), of("ij .:num ?", 0)]
SAMPLES["TopK"] = [of("ij", k=2)]
SAMPLES["TopKV2"] = [of("ij ?", 2), of("ijk ?", 1), of("i ?", 2)]
SAMPLES["NthElement"] = [of("ij ?", 1)]
SAMPLES.update(_each("Unique UniqueWithCounts", of("i:int")))
SAMPLES.update(_each("UniqueV2 UniqueWithCountsV2", of("i:int ?", np.array([0])), of("ij:int ?", np.array([0])),
                     of("ij:int ?", np.array([1]))))

# Products.
SAMPLES.update(_each("MatMul", of("ik kj"), of("ki kj", transpose_a=True), of("ik jk", transpose_b=True),
                     of("ki jk", transpose_a=True, transpose_b=True)))
SAMPLES["SparseMatMul"] = [of("ik kj", dtype=tf.float32)]
SAMPLES["BatchMatMul"] = [of("aij ajk"), of("aji akj", adj_x=True, adj_y=True)]
SAMPLES.update(_each("BatchMatMulV2", of("aij ajk"), of("aji jk", adj_x=True), of("abij bjk"), of("ij akj", adj_y=True),
                     of("1ij ajk")))
SAMPLES["BatchMatMulV3"] = [of("aij ajk", Tout=tf.float64), of("ij ajk", Tout=tf.float64)]
SAMPLES["Einsum"] = [of("aij ajk", equation="aij,ajk->aik"), of("ij ij", equation="ij,ij->i"), of("ij kj", equation="ij,kj->"),
                     of("aij jk", equation="...ij,jk->...ik"), of("ijk", equation="ijk->kj"), of("i j", equation="i,j->ji"),
                     of("ajk bjk", equation="ajk,bjk->jab")]
SAMPLES["Cross"] = [of("ij3 ij3"), of("i3 i3")]

# Moving values.
SAMPLES["Transpose"] = [of("ijk ?", [2, 0, 1]), of("ij ?", [1, 0])]
SAMPLES["ConjugateTranspose"] = [of("ij:complex ?", [1, 0])]
SAMPLES["ExpandDims"] = [of("ij ?", 0), of("ij ?", -1), of("ij ?", 1), of(".:num ?", 0)]
SAMPLES["Squeeze"] = [of("i1j", axis=[1]), of("1ij1", axis=[0]), of("1i1j")]
SAMPLES["Concat"] = [of("? ij ij", 0), of("? ij ik", 1)]
SAMPLES["ConcatV2"] = [of("ij ij ?", 0), of("ij ik ?", 1), of("ijk ijk ijk ?", -2), of("2:num 2:num ?", 0), of("ij kj ?", 0)]
SAMPLES["Pack"] = [of("ij ij", axis=0), of("ij ij ij", axis=2), of("ij ij", axis=-2), of(". .", axis=0),
                   of(".:num .:num", axis=0)]
SAMPLES["Unpack"] = [of("2ij", num=2, axis=0), of("ij2", num=2, axis=-1), of("2:num", num=2)]
SAMPLES["Split"] = [of("? i2j", 1, num_split=2), of("? 2ij", 0, num_split=2),
                    of("? ij", 0, num_split=2, sizes=dict(i=4), forms=("blocks", "sum", "mean"))]
SAMPLES["SplitV"] = [of("i3j ? ?", [1, 2], 1, num_split=2), of("3i ? ?", [2, 1], 0, num_split=2)]
SAMPLES["Tile"] = [of("ij ?", [2, 1]), of("ij ?", [1, 3]), of("ijk ?", [1, 2, 2]),
                   of("1j ?", lambda x: tf.stack([tf.shape(x)[1], 2]))]
SAMPLES["BroadcastTo"] = [of("j", call=lambda x: tf.broadcast_to(x, tf.concat([[3], tf.shape(x)], 0))),
                          of("j ij", call=lambda x, y: tf.broadcast_to(x, tf.shape(y))),
                          of("1j ij", call=lambda x, y: tf.broadcast_to(x, tf.shape(y))),
                          of("i1 ij", call=lambda x, y: tf.broadcast_to(x, tf.shape(y)))]
SAMPLES["Pad"] = [of("ij ?", [[0, 0], [1, 2]]), of("ij ?", [[1, 0], [0, 0]]), of("ijk ?", [[0, 0], [1, 0], [0, 1]])]
SAMPLES["PadV2"] = [of("ij ? ?", [[0, 0], [1, 2]], np.float64(1.5)), of("ij ? ?", [[1, 0], [0, 1]], np.float64(0)),
                    of("ij ? .", [[0, 0], [1, 2]])]
SAMPLES["MirrorPad"] = [of("ij ?", [[0, 0], [1, 0]], mode="REFLECT"), of("ij ?", [[1, 0], [0, 1]], mode="SYMMETRIC")]
SAMPLES["OneHot"] = [of("i:in_k ? ? ?", 5, 1.0, 0.0, axis=-1), of("ij:in_k ? . ?", 5, np.float64(-0.3), axis=1),
                     of("i:in_k ? ? ?", 5, 1.0, 0.0, axis=0), of("i:in_i .:num ? ?", 1.0, 0.0, axis=-1)]
SAMPLES["Diag"] = [of("i"), of("ij")]
SAMPLES["MatrixDiag"] = [of("ij"), of("j")]
SAMPLES["MatrixDiagV2"] = [of("ij ? ? ? ?", 0, -1, -1, np.float64(0)), of("ij ? ? ? ?", 1, -1, -1, np.float64(0)),
                           of("ij ? ? ? ?", 0, -1, -1, np.float64(1.5))]
SAMPLES["MatrixDiagV3"] = SAMPLES["MatrixDiagV2"]
SAMPLES["DiagPart"] = [of("ii", sizes=dict(i=3)), of("ijij")]
SAMPLES["MatrixDiagPart"] = [of("ijj"), of("ijk"), of("ij")]
SAMPLES["MatrixDiagPartV2"] = [of("ijk ? ?", 0, np.float64(0)), of("ijk ? ?", 1, np.float64(1.5)), of("ij ? ?", 0, np.float64(0))]
if op_def("MatrixDiagPartV3") is None:  # TensorFlow 1.15's gradient is wrong where matrices are not square
    SAMPLES["MatrixDiagPartV2"] = [of("ijj ? ?", 0, np.float64(0))]
SAMPLES["MatrixDiagPartV3"] = SAMPLES["MatrixDiagPartV2"]
SAMPLES["MatrixSetDiag"] = [of("ijj ij"), of("ijk ij", sizes=dict(j=2, k=5), forms=("sum", "mean")), of("jj j")]
SAMPLES["MatrixSetDiagV2"] = [of("ijj ij ?", 0), of("jj j ?", 0)]
SAMPLES["MatrixSetDiagV3"] = SAMPLES["MatrixSetDiagV2"]
SAMPLES["MatrixBandPart"] = [of("ijk ? ?", 1, 0), of("ij ? ?", 0, -1)]


def _reshaped(*parts):
    """Returns a sample that merges and keeps axes: each part becomes one axis; Python knows sizes, or TensorFlow."""
    def call(x, is_python):
        sizes = [size for size in x.shape.as_list()] if is_python else [None] * x.shape.rank
        shape = [size if size is not None else tf.shape(x)[axis] for axis, size in enumerate(sizes)]
        target = []
        for part in parts:
            product = 1
            for axis in part if part != (-1,) else ():
                product = shape[axis] * product
            target.append(-1 if part == (-1,) else product)
        return tf.reshape(x, target)
    return [of("ijk", is_python=is_python, call=call) for is_python in (False, True)]


def _of_last(size):
    def call(x):
        return tf.reshape(tf.transpose(x, [1, 2, 0]), [-1, tf.shape(x)[0] * size])
    return of("ij2", call=call)


SAMPLES["Reshape"] = sum([_reshaped(*parts) for parts in (
    [(0, 1), (2,)], [(0,), (-1,)], [(-1,)], [(0,), (1, 2)], [(-1,), (2,)], [(0, 1, 2)], [(0,), (), (1,), (2,)],
    [(0,), (1,), (2,)],
    [(1,), (0, 2)])], []) + [_of_last(1), _of_last(2)] + [
    of("ijk", call=lambda x: tf.reshape(tf.reshape(x, [-1, tf.shape(x)[2]]), tf.shape(x))),
    of("ijk", call=lambda x: tf.reshape(tf.reshape(x, [-1]), tf.shape(x))),
    of("ij", call=lambda x: tf.reshape(x, [tf.size(x)])), of("i4j", call=lambda x: tf.reshape(x, [-1, 2])),
    of("i4j", call=lambda x: tf.reshape(x, [tf.shape(x)[0], 2, 2, tf.shape(x)[2]])),
    of(".:num", call=lambda x: tf.reshape(x, [1])), of("i:in_i", call=lambda x: tf.reshape(x, [-1, 1]))]
SAMPLES["StridedSlice"] = [of("ijk", call=call) for call in (
    lambda x: x[:, 0], lambda x: x[..., 1:], lambda x: x[:, ::-1], lambda x: x[0], lambda x: x[1:], lambda x: x[:, None, ..., 0],
    lambda x: x[:tf.shape(x)[0], :1], lambda x: x[:, :tf.shape(x)[1]], lambda x: x[:, :, tf.shape(x)[2] - 1], lambda x: x[-1:],
    lambda x: x[:tf.shape(x)[0] // 2], lambda x: x[:, 1:, None])] + [
    of("ij", call=lambda x: tf.concat([x, 2 * x], 0)[:tf.shape(x)[0]]),
    of("ij", call=lambda x: tf.concat([x, x * x], 0)[tf.shape(x)[0]:]),
    of("2:num", call=lambda x: x[1]), of("2:num", call=lambda x: x[::-1])]
SAMPLES["StridedSliceGrad"] = [of("ijk", call=call) for call in (
    lambda x: tf.gradients(tf.reduce_sum(tf.sin(x[:, 0])), [x]), lambda x: tf.gradients(tf.reduce_sum(tf.sin(x[..., 1:])), [x]),
    lambda x: tf.gradients(tf.reduce_sum(tf.sin(x[:, ::-1])), [x]), lambda x: tf.gradients(tf.reduce_sum(tf.sin(x[0])), [x]),
    lambda x: tf.gradients(tf.reduce_sum(tf.sin(x[:tf.shape(x)[0], None, :1])), [x]),
    lambda x: tf.gradients(tf.reduce_sum(tf.sin(x[:tf.shape(x)[0] // 2])), [x]))]
SAMPLES["Slice"] = [of("ijk", call=call) for call in (
    lambda x: tf.slice(x, [0, 1, 0], [-1, 1, -1]), lambda x: tf.slice(x, [0, 0, 0], [tf.shape(x)[0], 1, tf.shape(x)[2]]),
    lambda x: tf.slice(x, [1, 0, 1], [-1, -1, -1]), lambda x: tf.slice(x, [0, 0, 1], tf.stack([-1, tf.shape(x)[1], 2])))] + [
    of("2:num", call=lambda x: tf.slice(x, [1], [1]))]

# Rows by their numbers.
SAMPLES["Gather"] = [of("ijk m:in_i"), of("ij m:in_i"), of("ij i:in_i")]
SAMPLES["GatherV2"] = [of("ijk m:in_i ?", 0), of("ijk m:in_j ?", 1), of("ijk mn:in_k ?", -1), of("ij i:in_i ?", 0),
                       of("ijk im:in_j ?", 1, batch_dims=1), of("aijk aim:in_j ?", 2, batch_dims=2), of("2:num ? ?", [1, 0], 0),
                       of("ij", call=lambda x: tf.gather(x, tf.where(x[:, 0] > 0)[:, 0])),
                       of("ij", call=lambda x: tf.boolean_mask(x, x[:, 0] > 0)),
                       of("i i", call=lambda x, y: tf.boolean_mask(x, y > 0))]
SAMPLES["GatherNd"] = [of("ijk m1:in_i"), of("ij m1:in_i"), of("ijk mn1:in_i"),
                       of("ij", call=lambda x: tf.gather_nd(x, tf.where(x > 0))),
                       of("ijk", call=lambda x: tf.gather_nd(x, tf.where(x[..., 0] > 0))),
                       of("ij i:in_j", call=lambda x, j: tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), j], 1)))]
SAMPLES["Where"] = [of("i:bool"), of("ij:bool"), of("ij", call=lambda x: tf.where(x > 0)), of("i:int")]
SAMPLES["ScatterNd"] = [of("m1:in_i mj", call=lambda i, x: tf.scatter_nd(i, x, [3, tf.shape(x)[1]]), sizes=dict(i=3)),
                        of("m1:in_i m", call=lambda i, x: tf.scatter_nd(i, x, [3])),
                        of("ij", call=lambda x: tf.scatter_nd(
                            tf.where(x[:, 0] > 0), tf.boolean_mask(x, x[:, 0] > 0), tf.shape(x, out_type=tf.int64))),
                        of("ij", call=lambda x: tf.gradients(tf.sin(tf.gather_nd(x, tf.where(x > 0))), [x]))]
SAMPLES.update({name: [of("ij m1:in_i mj"), of("ijk m1:in_i mjk"), of("ijk mn1:in_i mnjk")] for name in (
    "TensorScatterAdd", "TensorScatterSub")})
SAMPLES["TensorScatterUpdate"] = [of("ij ? 1j", np.array([[1]])), of("ij ? 2j", np.array([[1], [0]]))]
SAMPLES.update({name: [of("mj ? 2j", np.array([[1], [0]])), of("ij m1:in_i mj")] for name in (
    "TensorScatterMax", "TensorScatterMin")})
_SEGMENTS = [of("mj m:in_i ?", 3), of("mjk m:in_i .:num"), of("mnj mn:in_i ?", 3), of("m m:in_m ?", 12)]
SAMPLES.update({name: _SEGMENTS for name in (
    "UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")})
SAMPLES["UnsortedSegmentSum"] = _SEGMENTS + [
    of("ij", call=lambda x: tf.convert_to_tensor(
        tf.gradients(tf.sin(tf.gather(x, tf.where(x[:, 0] > 0)[:, 0])), [x])[0]))]
SAMPLES["Bincount"] = [of("m:int ? ?", 5, np.zeros(0)), of("m:int ? m", 5), of("mn:int ? ?", 5, np.zeros(0)),
                       of("mn:int ? mn", 5)]
SAMPLES["DenseBincount"] = [of("m:int ? ?", 5, np.zeros(0)), of("m:int ? m", 5),
                            of("m:int ? ?", 5, np.zeros(0), binary_output=True),
                            of("mn:int ? ?", 5, np.zeros(0)), of("mn:int ? mn", 5)]
SAMPLES["HistogramFixedWidth"] = [of("m ? ?", np.array([-1.0, 1.0]), 4), of("ij ? ?", np.array([-1.0, 1.0]), 4)]
SAMPLES["DynamicPartition"] = [of("ij i:bool", call=lambda x, b: tf.dynamic_partition(x, tf.cast(b, tf.int32), 2)),
                               of("ijk ij:bool", call=lambda x, b: tf.dynamic_partition(x, tf.cast(b, tf.int32), 2))]


def _stitched(x):
    parts = tf.cast(x[:, 0] > 0, tf.int32)
    numbers = tf.dynamic_partition(tf.range(tf.shape(x)[0]), parts, 2)
    return tf.dynamic_stitch(numbers, [f(part) for f, part in zip((tf.sin, tf.square), tf.dynamic_partition(x, parts, 2))])


SAMPLES["DynamicStitch"] = [of("ij", call=_stitched), of("? ? 2j 1j", [2, 0], [1]),
                            of("? ? .:num 2:num", 0, [1, 2])]
SAMPLES["ParallelDynamicStitch"] = [of("? ? 2j 1j", [2, 0], [1])]
SAMPLES["ListDiff"] = [of("i:int m:int"), of("ij", call=lambda x: tf.raw_ops.ListDiff(x=tf.range(tf.rank(x)), y=[0]))]
SAMPLES["InvertPermutation"] = [of("i", call=lambda x: tf.math.invert_permutation(tf.argsort(x)))]
SAMPLES.update({name: [of("ij ik", call=lambda x, y, op=name: getattr(tf.raw_ops, op)(sorted_inputs=tf.sort(x), values=y))]
                for name in ("LowerBound", "UpperBound")})
SAMPLES["InTopK"] = [of("ik i:in_k", k=2, dtype=tf.float32)]
SAMPLES["InTopKV2"] = [of("ik i:in_k ?", 2, dtype=tf.float32)]
SAMPLES["SparseSoftmaxCrossEntropyWithLogits"] = [of("ik i:in_k")]
SAMPLES["SoftmaxCrossEntropyWithLogits"] = [of("ik ik:pos")]
_SPARSE = [of("ij m:in_i m:int", call=lambda x, i, s, op: getattr(tf, op)(x, i, tf.sort(s)), op=op) for op in (
    "sparse_segment_sum", "sparse_segment_mean", "sparse_segment_sqrt_n")]
SAMPLES.update({name: [sample] for name, sample in zip(("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"), _SPARSE)})
SAMPLES.update({name: [of("ij 3:in_i ? ?", np.array([0, 0, 2]), 4)] for name in (
    "SparseSegmentSumWithNumSegments", "SparseSegmentMeanWithNumSegments", "SparseSegmentSqrtNWithNumSegments")})
SAMPLES.update({name: [of("ij ? ? ?", np.array([2, 0, 1]), np.array([0, 0, 2]), 4, sizes=dict(i=3))] for name in (
    "SparseSegmentSumGrad", "SparseSegmentMeanGrad", "SparseSegmentSqrtNGrad")})


def _segments(op):
    def call(x, numbers):
        return getattr(tf, op)(x, numbers)
    return [of("m m:int", call=lambda x, numbers: call(x, tf.sort(numbers))), of("3j ?", np.array([0, 0, 2]), call=call)]


SAMPLES.update({"Segment" + _name: _segments("segment_" + _name.lower()) for _name in ("Sum", "Mean", "Max", "Min", "Prod")})

# Each example by itself.
_IMAGE, _VOLUME = "nhwc", "nhwqc"
_POOL = dict(ksize=[1, 2, 2, 1], strides=[1, 2, 1, 1], padding="SAME")
_POOL3 = dict(ksize=[1, 2, 2, 2, 1], strides=[1, 2, 1, 1, 1], padding="SAME", dtype=tf.float32)
_SIZES = dict(h=4, w=4, c=2, n=2)
_SHARED = dict(forms=("sharded", "blocks", "sum", "mean"))


def _image(*others, **attrs):
    """Returns a sample of images, of which the batch may have any axis but those that an op has to know."""
    return of(_IMAGE + "".join(" " + other for other in others), sizes=_SIZES, **attrs)


SAMPLES["AdjustContrastv2"] = [of("nhw3 .", dtype=tf.float32, sizes=_SIZES)]
SAMPLES.update(_each("AdjustHue AdjustSaturation", of("nhw3:unit ?", np.float32(0.3), dtype=tf.float32, sizes=_SIZES)))
SAMPLES.update(_each("HSVToRGB RGBToHSV", of("nhw3:unit", sizes=_SIZES)))
SAMPLES["AvgPool"] = [_image(**_POOL)]
SAMPLES["AvgPoolGrad"] = [_image(call=lambda x, **attrs: tf.gradients(tf.sin(tf.nn.avg_pool(x, **attrs)), [x])[0], **_POOL)]
SAMPLES["MaxPool"] = [_image(dtype=tf.float32, **_POOL)]
SAMPLES["MaxPoolV2"] = [of("nhwc ? ?", [1, 2, 2, 1], [1, 2, 1, 1], padding="SAME", sizes=_SIZES, dtype=tf.float32)]


def _max_pool_slope(x, **attrs):
    return tf.gradients(tf.sin(tf.nn.max_pool(x, **attrs)), [x])[0]


def _max_pool_second(x, **attrs):
    return tf.gradients(tf.sin(_max_pool_slope(x, **attrs)), [x])[0]


SAMPLES["MaxPoolGrad"] = [_image(call=_max_pool_slope, dtype=tf.float32, **_POOL)]
SAMPLES["MaxPoolGradGrad"] = [_image(call=_max_pool_second, dtype=tf.float32, **_POOL)]
SAMPLES["MaxPoolGradV2"] = [of("nhwc", sizes=_SIZES, dtype=tf.float32, call=lambda x: tf.raw_ops.MaxPoolGradV2(
    orig_input=x, orig_output=tf.raw_ops.MaxPoolV2(input=x, ksize=[1, 2, 2, 1], strides=[1, 1, 1, 1], padding="SAME"),
    grad=tf.sin(x), ksize=[1, 2, 2, 1], strides=[1, 1, 1, 1], padding="SAME"))]
SAMPLES["MaxPoolGradGradV2"] = [of("nhwc", sizes=_SIZES, dtype=tf.float32, call=lambda x: tf.raw_ops.MaxPoolGradGradV2(
    orig_input=x, orig_output=tf.raw_ops.MaxPoolV2(input=x, ksize=[1, 2, 2, 1], strides=[1, 1, 1, 1], padding="SAME"),
    grad=tf.sin(x), ksize=[1, 2, 2, 1], strides=[1, 1, 1, 1], padding="SAME"))]
SAMPLES["AvgPool3D"] = [of(_VOLUME, sizes=_SIZES, **_POOL3)]
SAMPLES["AvgPool3DGrad"] = [of(_VOLUME, sizes=_SIZES, call=lambda x, **attrs: tf.gradients(
    tf.sin(tf.nn.avg_pool3d(x, **attrs)), [x])[0], **_POOL3)]
SAMPLES["MaxPool3D"] = [of(_VOLUME, sizes=_SIZES, **_POOL3)]


def _max_pool3_slope(x, **attrs):
    return tf.gradients(tf.sin(tf.nn.max_pool3d(x, **attrs)), [x])[0]


SAMPLES["MaxPool3DGrad"] = [of(_VOLUME, sizes=_SIZES, call=_max_pool3_slope, **_POOL3)]
SAMPLES["MaxPool3DGradGrad"] = [of(_VOLUME, sizes=_SIZES, **dict(_POOL3, call=lambda x, **attrs: tf.gradients(
    tf.sin(_max_pool3_slope(x, **attrs)), [x])[0]))]
_CONV = dict(strides=[1, 1, 1, 1], padding="SAME")
SAMPLES["Conv2D"] = [of("nhwc 22ck", sizes=_SIZES, **_CONV)]
SAMPLES["DepthwiseConv2dNative"] = [of("nhwc 22ck", sizes=_SIZES, **_CONV)]
_OWN = lambda x: tf.shape(x)  # noqa: E731


def _backward(op, shape_name, k):
    """Returns a function that calls an op of a convolution's gradient, its input k given by its shape."""
    def call(*inputs, **attrs):
        named = dict(zip(("input", "filter", "out_backprop"), inputs))
        name = ("input", "filter")[k]
        named[name + "_sizes"] = tf.shape(named.pop(name))
        return getattr(tf.raw_ops, op)(**named, **attrs)
    return call


for _op, _sample in (("Conv2DBackprop", "nhwc 22ck nhwk"), ("DepthwiseConv2dNativeBackprop", "nhwc 22c1 nhwc")):
    SAMPLES[_op + "Input"] = [of(_sample, sizes=_SIZES, call=_backward(_op + "Input", "input_sizes", 0), **_CONV)]
    SAMPLES[_op + "Filter"] = [of(_sample, sizes=_SIZES, call=_backward(_op + "Filter", "filter_sizes", 1), **_CONV)]
_CONV3 = dict(strides=[1, 1, 1, 1, 1], padding="SAME")
SAMPLES["Conv3D"] = [of("nhwqc 222ck", sizes=_SIZES, **_CONV3)]
SAMPLES["Conv3DBackpropInputV2"] = [of("nhwqc 222ck nhwqk", sizes=_SIZES, call=_backward("Conv3DBackpropInputV2", "", 0),
                                       **_CONV3)]
SAMPLES["Conv3DBackpropFilterV2"] = [of("nhwqc 222ck nhwqk", sizes=_SIZES, call=_backward("Conv3DBackpropFilterV2", "", 1),
                                        **_CONV3)]
_DILATION = dict(strides=[1, 1, 1, 1], rates=[1, 1, 1, 1], padding="SAME", sizes=_SIZES)
SAMPLES["Dilation2D"] = [of("nhwc 22c", **_DILATION)]
SAMPLES.update(_each("Dilation2DBackpropInput Dilation2DBackpropFilter", of("nhwc 22c nhwc", **_DILATION)))
SAMPLES["DepthToSpace"] = [of("nhw4", block_size=2, sizes=_SIZES)]
SAMPLES["SpaceToDepth"] = [of("n44c", block_size=2, sizes=_SIZES)]
# Not held yet: the batch along h or w, of known sizes, where the gradient counts the tower's pixels in Python: a ValueError.
SAMPLES["ExtractImagePatches"] = [of("n44c", ksizes=[1, 2, 2, 1], strides=[1, 1, 1, 1], rates=[1, 1, 1, 1], padding="VALID",
                                     sizes=_SIZES)]
SAMPLES["ExtractVolumePatches"] = [of(_VOLUME, ksizes=[1, 2, 2, 1, 1], strides=[1, 1, 1, 1, 1], padding="VALID", sizes=_SIZES)]
SAMPLES["FractionalAvgPool"] = [of("n44c", pooling_ratio=[1.0, 1.5, 1.5, 1.0], pseudo_random=True, deterministic=True, seed=3,
                                   seed2=4,
                                   dtype=tf.float32)]
_LRN = dict(depth_radius=1, bias=1.1, alpha=0.7, beta=0.6, dtype=tf.float32, sizes=_SIZES)
SAMPLES["LRN"] = [of("nhwc", **_LRN)]
SAMPLES["LRNGrad"] = [of("nhwc nhwc", call=lambda dy, x, **attrs: tf.raw_ops.LRNGrad(
    input_grads=dy, input_image=x, output_image=tf.raw_ops.LRN(input=x, **attrs), **attrs), **_LRN)]
SAMPLES.update(_each("ResizeArea ResizeBicubic ResizeBilinear", of("nhwc ?", [3, 6], sizes=_SIZES, dtype=tf.float32)))
SAMPLES["ResizeNearestNeighbor"] = [of("nhwc ?", [3, 6], sizes=_SIZES)]
SAMPLES["ResizeNearestNeighborGrad"] = [of("nhwc ?", [3, 6], sizes=_SIZES)]
SAMPLES.update(_each("ResizeBicubicGrad ResizeBilinearGrad", of("nhwc n22c", sizes=_SIZES, dtype=tf.float32)))
_TRANSFORM = np.array([[1, 0.1, 0, 0, 1.1, 0, 0, 0]], np.float32)
SAMPLES["ImageProjectiveTransformV2"] = [of("nhwc ? ?", _TRANSFORM, [3, 3], interpolation="BILINEAR", dtype=tf.float32,
                                            sizes=_SIZES),
                                         of("nhwc n8 ?", [3, 3], interpolation="BILINEAR", dtype=tf.float32, sizes=_SIZES)]
SAMPLES["ImageProjectiveTransformV3"] = [of("nhwc ? ? ?", _TRANSFORM, [3, 3], np.float32(0), interpolation="BILINEAR",
                                            dtype=tf.float32, sizes=_SIZES)]


def _matrices(op, make=None, **attrs):
    forms = ("sharded", "sum", "mean")
    if make is None:
        return [of(labels, forms=forms, **attrs) for labels in ("i22", "22", "ai33")]
    return [of(labels, forms=forms, call=lambda x: getattr(tf.raw_ops, op)(input=make(x), **attrs))
            for labels in ("i22", "22", "ai33")]


def _square(x):
    return tf.matmul(x, x, transpose_b=True) + 0.5 * tf.eye(2 if x.shape.as_list()[-1] == 2 else 3, dtype=x.dtype)


SAMPLES.update({name: _matrices(name) for name in ("LogMatrixDeterminant", "MatrixDeterminant", "MatrixInverse",
                                                   "BatchMatrixInverse",
                                                   "MatrixExponential", "Qr", "Lu")})
SAMPLES.update({name: _matrices(name, _square) for name in ("Cholesky", "SelfAdjointEigV2")})
SAMPLES.update({name: _matrices(name, lambda x: tf.cast(_square(x), tf.complex128)) for name in ("MatrixLogarithm",
                                                                                                 "MatrixSquareRoot")})
SAMPLES["Svd"] = [of(labels, forms=("sharded", "sum", "mean"), call=lambda x: tf.linalg.svd(x, compute_uv=False))
                  for labels in ("i22", "22", "ai33")]
SAMPLES["Eig"] = [of(labels, call=lambda x: tf.raw_ops.Eig(input=_square(x), compute_v=False, Tout=tf.complex128)[0])
                  for labels in ("i22", "22")]
SAMPLES["CholeskyGrad"] = [of("i22 i22", call=lambda x, dy: tf.raw_ops.CholeskyGrad(l=tf.linalg.cholesky(_square(x)), grad=dy))]
SAMPLES.update(_each("MatrixSolve MatrixTriangularSolve", of("i22 i2k"), of("22 2k"), of("22 2i")))
SAMPLES["MatrixSolveLs"] = [of("i32 i3k ?", np.float64(0.1), fast=True)]
_COMPLEX = [of("ijk:complex"), of("ij44:complex")]
SAMPLES.update(_each("FFT IFFT", of("ij:complex"), of("ijk:complex")))
SAMPLES.update(_each("FFT2D IFFT2D", of("ijk:complex"), of("ajk:complex")))
SAMPLES.update(_each("FFT3D IFFT3D", of("aijk:complex")))
SAMPLES.update({name: [of("i44", call=lambda x, op=name, length=length: getattr(tf.raw_ops, op)(
    input=tf.cast(x, tf.float32), fft_length=length), dtype=tf.float32)]
                for name, length in (("RFFT", [4]), ("RFFT2D", [4, 4]))})
SAMPLES["RFFT3D"] = [of("i444", call=lambda x: tf.raw_ops.RFFT3D(input=tf.cast(x, tf.float32), fft_length=[4, 4, 4]),
                        dtype=tf.float32)]
SAMPLES.update({name: [of(labels, call=lambda x, op=name, n=length: getattr(tf.raw_ops, op)(
    input=tf.cast(x, tf.complex64), fft_length=n), dtype=tf.float32)]
    for name, labels, length in (("IRFFT", "ij4:complex", [6]), ("IRFFT2D", "i24:complex", [2, 6]),
                                 ("IRFFT3D", "i224:complex", [2, 2, 6]))})
SAMPLES["ReverseSequence"] = [of("i4k i:int", call=lambda x,
                                 n: tf.reverse_sequence(x, tf.minimum(n, 4), seq_axis=1, batch_axis=0)),
                              of("4jk j:int", call=lambda x,
                                 n: tf.reverse_sequence(x, tf.minimum(n, 4), seq_axis=0, batch_axis=1))]
SAMPLES["SpaceToBatchND"] = [of("n44c ? ?", [2, 2], [[0, 0], [0, 0]]), of("n4c ? ?", [2], [[1, 1]])]
SAMPLES["BatchToSpaceND"] = [of("nhwc ? ?", [2, 1], [[0, 0], [0, 0]], sizes=dict(n=4), forms=("blocks", "sum", "mean")),
                             of("n44c", call=lambda x: tf.batch_to_space_nd(tf.sin(tf.space_to_batch_nd(x, [2, 2],
                                                                                                        [[0, 0], [0, 0]])), [
                                 2, 2], [[0, 0], [0, 0]]))]
SAMPLES["SpaceToBatch"] = [of("n44c ?", [[0, 0], [0, 0]], block_size=2)]
SAMPLES["BatchToSpace"] = [of("nhwc ?", [[0, 0], [0, 0]], block_size=2, sizes=dict(n=4), forms=("sum", "mean"))]


def _ctc(op):
    def call(x, lengths):
        labels = dict(labels_indices=np.array([[0, 0], [1, 0], [1, 1]], np.int64), labels_values=np.array([1, 0, 2], np.int32))
        return getattr(tf.raw_ops, op)(inputs=x, sequence_length=tf.minimum(lengths + 3, 5), **labels)
    return [of("524 2:int", call=call, dtype=tf.float32, forms=("sum", "mean"))]


SAMPLES["CTCLoss"] = _ctc("CTCLoss")

# Batch norms.
_NORM = dict(dtype=tf.float32, sizes=dict(_SIZES, c=3))


def _norm(version, **attrs):
    call = lambda x, scale, offset, mean, variance: getattr(tf.raw_ops, "FusedBatchNorm" + version)(  # noqa: E731
        x=x, scale=scale, offset=offset, mean=mean, variance=variance, **attrs)[:3 if attrs.get("is_training", True) else 1]
    if attrs.get("is_training", True):
        return of("nhwc c c", call=lambda x, s, o: call(x, s, o, np.zeros(0, np.float32), np.zeros(0, np.float32)), **_NORM)
    return of("nhwc c c c c:pos", call=call, **_NORM)


def _norm_slope(version, is_training):
    return of("nhwc c c", call=lambda x, s, o: tf.gradients(tf.sin(getattr(tf.raw_ops, "FusedBatchNorm" + version)(
        x=x, scale=s, offset=o, mean=np.zeros(0 if is_training else 3, np.float32),
        variance=np.ones(0 if is_training else 3, np.float32),
        is_training=is_training)[0]), [x, s, o]), **_NORM)


for _version in ("", "V2", "V3"):
    SAMPLES["FusedBatchNorm" + _version] = [_norm(_version), _norm(_version, is_training=False)]
    SAMPLES["FusedBatchNormGrad" + _version] = [_norm_slope(_version, True), _norm_slope(_version, False)]

# Sizes.
SAMPLES["Shape"] = [of("ijk"), of("ij", out_type=tf.int64)]
SAMPLES["ShapeN"] = [of("ijk ij")]
SAMPLES["Size"] = [of("ijk"), of("ij", out_type=tf.int64)]
SAMPLES["Rank"] = [of("ijk")]
SAMPLES["BroadcastArgs"] = [of("i1 1j", call=lambda x, y: tf.raw_ops.BroadcastArgs(s0=tf.shape(x), s1=tf.shape(y)))]
SAMPLES["BroadcastGradientArgs"] = [of("i1 1j", call=lambda x, y: tf.gradients(tf.sin(x * y), [x, y]))]
SAMPLES["Fill"] = [of("ij", call=lambda x: tf.fill(tf.shape(x), np.float64(1.5))),
                   of("ij .", call=lambda x, y: tf.fill([tf.shape(x)[0], 2], y)),
                   of("ij", call=lambda x: tf.fill([2, tf.size(x)], 3)),
                   of("ij .", call=lambda x, y: tf.fill(tf.shape(x)[1:], y))]
SAMPLES["Range"] = [of("ij", call=lambda x: tf.range(tf.shape(x)[0])), of("ij", call=lambda x: tf.range(1, tf.shape(x)[1] + 1)),
                    of("ij", call=lambda x: tf.range(tf.size(x))), of(".:num", call=lambda x: tf.range(0, x, 2)),
                    of("ij", call=lambda x: tf.range(tf.shape(x)[0]) < tf.shape(x)[0] // 2)]
SAMPLES["ConcatOffset"] = [of("ij kj", call=lambda x, y: tf.gradients(tf.sin(tf.concat([x, y], 0)), [x, y])),
                           of("ij ik", call=lambda x, y: tf.gradients(tf.sin(tf.concat([x, y], 1)), [x, y]))]
SAMPLES.update({name: [of("ij", call=lambda x, op=name: getattr(tf.raw_ops, op)(shape=tf.shape(x), seed=[3, 4])),
                       of("ij", call=lambda x, op=name: getattr(tf.raw_ops, op)(shape=[2, 3], seed=tf.stack([3,
                                                                                                             tf.shape(x)[0]])))]
                for name in ("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal")})
SAMPLES["StatelessRandomUniformFullInt"] = [of("ij", call=lambda x: tf.raw_ops.StatelessRandomUniformFullInt(
    shape=tf.shape(x), seed=[3, 4]))]
SAMPLES["StatelessRandomUniformInt"] = [of("ij .:num", call=lambda x, n: tf.raw_ops.StatelessRandomUniformInt(
    shape=tf.shape(x), seed=[3, 4], minval=0, maxval=n + 5))]
_KEY = dict(key=np.array([7], np.uint64), counter=np.array([1, 2], np.uint64), alg=1)
SAMPLES.update({name: [of("ij", call=lambda x, op=name: getattr(tf.raw_ops, op)(shape=tf.shape(x), **_KEY))]
                for name in ("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2")})
SAMPLES["StatelessRandomUniformIntV2"] = [of("ij .:num", call=lambda x, n: tf.raw_ops.StatelessRandomUniformIntV2(
    shape=tf.shape(x), minval=0, maxval=n + 5, **_KEY))]
SAMPLES["StatelessMultinomial"] = [of("ij ? ?", 3, [1, 2])]
