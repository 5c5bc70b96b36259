"""Towers without examples, where TensorFlow's kernels make something of none: the last short batch of an epoch may leave some.

oneDNN's convolutions give an empty batch the shape of their input, and the gradient of its pooling ends the process. Without it
the gradient of a depthwise convolution by its kernel is whatever its memory held. So an op of these whose batch has an unknown
size is given one example of zeros where it would get none, and that is cut off what comes out. No value changes and no
gradient, and a batch that has examples is handed on without a copy. Where the size is known to be 0, TensorFlow's own gradients
count on it, and such an op is refused. A list of the examples, as `tf.map_fn` makes one, is told their shape.
"""
import tensorflow.compat.v1 as tf

from towers.graph.ordering import take_instead
from towers.graph.private import control_flow_now, control_flow_of, forward_op_of, rewire, runs_onednn, set_shape_attribute
from towers.graph.walk import tensors_of

__all__ = ["survive_empty_batches", "tell_shapes"]

# Types of ops -> which of their inputs hold the batch along axis 0.
_BATCHES = {"Conv2D": (0,), "DepthwiseConv2dNative": (0,), "Conv3D": (0,), "MaxPool": (0,), "MaxPoolV2": (0,), "MaxPool3D": (0,),
            "AvgPool3D": (0,), "Conv2DBackpropInput": (2,), "Conv3DBackpropInputV2": (2,),
            "DepthwiseConv2dNativeBackpropInput": (2,), "MaxPoolGrad": (0, 1, 2), "MaxPool3DGrad": (0, 1, 2)}


def survive_empty_batches(outputs, batch, context, ops):
    """Lets the `ops` of a tower run where its `batch` turns out to be empty; returns its outputs, or what stands for them now.

    Raises:
      ValueError: where the batch is known to be empty, and goes into an op that makes something of none.
    """
    leaves = tensors_of(batch)
    may_be_empty = any(leaf.shape.rank is None or leaf.shape.rank and (  # in this tower, or in one that has to be like it
        not _size(leaf) or 0 in (context.sizes_of(leaf) or ())) for leaf in leaves)
    if context.num_towers == 1 or not may_be_empty:
        return outputs
    tell_shapes(ops)
    on_onednn = "CPU" in context.device.upper() and runs_onednn()
    stands_for = {}  # name of a tensor -> what is left of it when the example of zeros is cut off
    for op in ops:
        batches = _BATCHES.get(op.type) if on_onednn or op.type == "DepthwiseConv2dNative" else None
        if batches and _size(op.inputs[batches[0]]) == 0:
            raise ValueError("The batch of tower %d is known to be empty, and TensorFlow's kernel of %r, a %s, makes something "
                             "of an empty batch. Give it batches whose size is not known while the graph is built, such as "
                             "tf.placeholder_with_default(x, [None, ...])." % (context.index, op.name, op.type))
        if batches and _size(op.inputs[batches[0]]) is None and control_flow_of(op) is control_flow_now(op.graph):
            stands_for[op.outputs[0].name] = left = _fill(op, batches, context.handed_on)
            if (op, 0) in context.placements:
                context.placements[left.op, left.value_index] = context.placements[op, 0]

    def now(item):
        return stands_for.get(item.name, item) if isinstance(item, tf.Tensor) else item

    if stands_for:
        graph = tf.get_default_graph()
        for key in graph.collections:
            items = graph.get_collection_ref(key)
            items[:] = [now(item) for item in items]
    return tf.nest.map_structure(now, outputs)


def tell_shapes(ops):
    """Lets gradients of what took examples apart, by control flow 1, be of none: TensorFlow needs the shape of one."""
    for op in ops:
        apart = forward_op_of(op) if op.type == "TensorArrayGatherV3" else None
        if apart is None or apart.type != "TensorArrayScatterV3":
            continue
        shape = apart.inputs[2].shape[1:]
        if shape.is_fully_defined():
            set_shape_attribute(op, "element_shape", shape)
        elif control_flow_of(op) is control_flow_now(op.graph):
            _take_zeros(op, apart.inputs[2])


def _take_zeros(op, like):
    """Lets an op that takes all of a list not run where the examples `like` are none; what takes its output takes zeros there."""
    output, consumers = op.outputs[0], op.outputs[0].consumers()
    with op.graph.colocate_with(None, ignore_existing=True), tf.device(op.device), tf.name_scope(op.name + "/empty_batch/"):
        is_empty = tf.equal(tf.shape(like)[0], 0)
        numbers, _ = tf.raw_ops.Switch(data=op.inputs[1], pred=is_empty)
        _, none = tf.raw_ops.Switch(data=like, pred=is_empty)
        found, _ = tf.raw_ops.Merge(inputs=[output, tf.raw_ops.ZerosLike(x=none)])
    rewire(op, 1, numbers)
    take_instead(consumers, output, found)


def _size(tensor):
    return None if tensor.shape.rank is None else tf.dimension_value(tensor.shape[0])


def _fill(op, batches, handed_on):
    """Gives an op an example of zeros where it would get none; returns its output without that.

    What hands on a tensor where there are examples is added to `handed_on`, see `TowerContext`.
    """
    output, consumers = op.outputs[0], op.outputs[0].consumers()
    rank = output.shape.rank
    with op.graph.colocate_with(None, ignore_existing=True), tf.device(op.device), tf.name_scope(op.name + "/empty_batch/"):
        taken = [op.inputs[index] for index in batches]
        missing = tf.cast(tf.equal(tf.shape(taken[0])[0], 0), tf.int32)
        along_first = tf.constant([1] + [0] * (rank - 1))
        if "BackpropInput" in op.type:
            shape = op.inputs[0] + along_first * missing
            handed_on[shape.op] = op.inputs[0]
            rewire(op, 0, shape)
        paddings = tf.constant([[1, 0]] + [[0, 0]] * (rank - 1)) * missing
        for index, tensor in zip(batches, taken):
            # Not Pad, which oneDNN merges with a convolution, along the other axes alone.
            filled = tf.raw_ops.PadV2(input=tensor, paddings=paddings, constant_values=tf.zeros([], tensor.dtype))
            filled.set_shape(tensor.shape)
            handed_on[filled.op] = tensor
            rewire(op, index, filled)
        left = tf.slice(output, along_first * missing, [-1] * rank)
        left.set_shape(output.shape)
        handed_on[left.op] = output
    take_instead(consumers, output, left)
    return left
