"""How loops, and the arrays and lists that they fill, pass on the axes of what goes around: a rule for each kind of op.

Rules are as in `axis_rules`. TensorArrays of control flow 1 hold their elements' axes in the flow, lists of tensors of control
flow 2 in the handle, after an axis for the elements.
"""
import tensorflow.compat.v1 as tf

from tf_syncbn.conversion.factors import Factor, Known, along_first, level, plain, union

__all__ = ["RULES"]


def _merge(op, inputs):
    axes = None
    for known in inputs:
        axes = union(axes, known.axes)
    return [Known(axes)] + [Known(()) for _ in list(op.outputs)[1:]]


def _while(op, inputs):
    """What comes around a loop of control flow 2 is like what went in; lists that it fills are like those that it reads."""
    lists = [known for tensor, known in zip(op.inputs, inputs) if tensor.dtype == tf.variant and known.axes]
    has_examples = any(level(axis) for known in inputs for axis in known.axes or ())
    outputs = []
    for tensor, known in zip(op.outputs, inputs):
        if tensor.dtype == tf.variant:
            outputs.append(known if known.axes or not lists else lists[0])
        else:
            is_lost = has_examples and not any(map(level, known.axes or ()))
            outputs.append(Known(along_first(tensor)) if is_lost else known)
    return outputs


def _stack(op, inputs):
    axes = plain(op.outputs[0])
    if inputs[0].axes is None and axes is not None and len(axes) > 1:  # the results of steps, most likely
        return [Known(axes[:1] + ((axes[1][0]._replace(of_examples=1),),) + axes[2:])]
    return [Known(inputs[0].axes)]


def _write(stacked, item):
    """A rule of an op that puts an element, its input `item`, into what its input `stacked` stands for."""
    def rule(op, inputs):
        axes = inputs[item].axes
        return [Known(union(inputs[stacked].axes, axes if axes is None else ((Factor((op.name, 0)),),) + axes))]
    return rule


def _read(stacked):
    return lambda op, inputs: [Known(inputs[stacked].axes and inputs[stacked].axes[1:])]


def _no_elements(op, _):
    return [Known()] * len(op.outputs)


RULES = {
    "Merge": _merge, "RefMerge": _merge, "While": _while, "StatelessWhile": _while,
    "TensorArrayV3": _no_elements, "TensorListReserve": _no_elements, "EmptyTensorList": _no_elements,
    "TensorArrayScatterV3": lambda op, inputs: [Known(union(inputs[3].axes, inputs[2].axes))],
    "TensorArrayWriteV3": _write(3, 2), "TensorArrayReadV3": _read(2),
    "TensorArrayGatherV3": lambda op, inputs: [inputs[2]], "TensorListStack": _stack, "TensorListSetItem": _write(0, 2),
    "TensorListPushBack": _write(0, 1), "TensorListGetItem": _read(0)}
