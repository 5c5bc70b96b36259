"""How ops move the axes of their inputs, and the sizes that they compute: a rule for each kind of op.

A rule takes an op and what is known of its inputs, and returns what is known of its outputs, or None where it can't tell.
"""
import re

import tensorflow.compat.v1 as tf

from towers.axes import FILTERS
from towers.static_values import static_value
from tf_syncbn.conversion import loop_rules, row_rules
from tf_syncbn.conversion.factors import (Factor, Known, along_first, divide, join, level, multiply, plain, sizes_of,
                                          with_sizes)

__all__ = ["follow", "reduced_axes"]

_SAME = ("Identity", "RefIdentity", "Enter", "RefEnter", "Exit", "RefExit", "NextIteration", "RefNextIteration", "Switch",
         "RefSwitch", "Cast", "StopGradient", "PreventGradient", "CheckNumerics", "TensorListFromTensor")
_BROADCAST = ("Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "FloorDiv", "FloorMod", "Maximum", "Minimum", "Pow",
              "SquaredDifference", "SelectV2", "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd",
              "LogicalOr", "MulNoNan", "Xdivy", "Xlogy")
_REDUCTIONS = ("Mean", "Sum", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm", "ArgMax", "ArgMin")
_NO_EXAMPLES = re.compile("Const|Variable|VarHandleOp|ReadVariableOp|BiasAddGrad|.*BackpropFilter")
_OF_ANY_RANK = _SAME + ("IdentityN",) + tuple(loop_rules.RULES)  # a flow or a handle is a scalar of its own
_DATA = re.compile("Placeholder(V2)?$|Iterator|.*Dequeue|(Eager)?PyFunc|Parse|Decode|Reader|ReadFile")
_RANDOM = re.compile("Random|.*(TruncatedNormal|RandomNormal|RandomUniform|StandardNormal|StatefulUniform)")
_REST = (Factor(-1),)  # of a reshape


def follow(op, inputs):
    """Returns what is known of an op's outputs.

    Args:
      op: operation.
      inputs: list of `Known`, of its inputs.

    Returns:
      A list of `Known`.
    """
    rule = _RULES.get(op.type) or (_random if _RANDOM.match(op.type) and inputs else _alike)
    if _NO_EXAMPLES.match(op.type):
        return [Known(plain(tensor)) for tensor in op.outputs]
    if op.type not in _OF_ANY_RANK:
        inputs = [known if known.axes is None or tensor.shape.rank == len(known.axes) else known._replace(
            axes=None if tensor.shape.rank is None else along_first(tensor)) for tensor, known in zip(op.inputs, inputs)]
    found = None if _DATA.match(op.type) else rule(op, inputs)
    if found is not None:
        return found if op.type in _OF_ANY_RANK else [
            known._replace(axes=with_sizes(known.axes, tensor)) for tensor, known in zip(op.outputs, found)]
    has_examples = not inputs or _DATA.match(op.type) or any(level(axis) for known in inputs for axis in known.axes or ())
    return [Known((along_first if has_examples else plain)(tensor)) for tensor in op.outputs]


def reduced_axes(op):
    """Returns the axes that a reduction takes together, a set; None where they, or the rank, are unknown."""
    rank, axes = op.inputs[0].shape.rank, static_value(op.inputs[1])
    return None if rank is None or axes is None else {int(axis) % rank for axis in axes.reshape([-1])}


def _alike(op, inputs):
    """The axes of inputs of the output's rank stay, else those of others, counted from the left or, to broadcast, the right."""
    outputs = []
    for tensor in op.outputs:
        rank, known = tensor.shape.rank, [axes.axes for axes in inputs if axes.axes]
        if rank is None:
            outputs.append(Known())
            continue
        if op.type not in _BROADCAST and any(level(axis) for axes in known if len(axes) == rank for axis in axes):
            known = [axes for axes in known if len(axes) == rank]
        shifts = [rank - len(axes) if op.type in _BROADCAST else 0 for axes in known]
        axes = join([[axes[i - shift] if 0 <= i - shift < len(axes) else () for i in range(rank)]
                     for axes, shift in zip(known, shifts)], tensor)
        if rank and any(level(axis) for axes in known for axis in axes) and not any(map(level, axes)):
            axes = along_first(tensor)
        outputs.append(Known(axes))
    if op.type == "Mul" and op.outputs[0].shape.rank == 0:
        sizes = [sizes_of(*pair) for pair in zip(op.inputs, inputs)]
        outputs = [outputs[0]._replace(sizes=None if None in sizes else multiply(sum(sizes, ())))]
    return outputs


def _same(op, inputs):
    return [inputs[0]] * len(op.outputs)


def _placeholder_with_default(op, inputs):
    return inputs if any(map(level, inputs[0].axes or ())) else [Known(along_first(op.outputs[0]))]


def _reduction(op, inputs):
    axes, output, reduced = inputs[0].axes, op.outputs[0], reduced_axes(op)
    if axes is None or reduced is None or output.shape.rank is None:
        return None
    keeps = len(axes) == output.shape.rank
    kept = tuple((Factor(1),) if i in reduced else axis for i, axis in enumerate(axes) if keeps or i not in reduced)
    return [Known(kept, multiply(inputs[0].sizes) if op.type == "Prod" and inputs[0].sizes else None)]


def _shape(op, inputs):
    return [Known(plain(output), known.axes) for output, known in zip(op.outputs, inputs)]


def _size(_, inputs):
    return [Known((), inputs[0].axes and multiply(inputs[0].axes))]


def _made_of(output, sizes):
    """Returns the axes of an output of sizes, if examples are known to lie along any; else None."""
    if sizes is None or output.shape.rank != len(sizes) or not any(size and level(size) for size in sizes):
        return None
    return tuple(size if size and level(size) else axis for size, axis in zip(sizes, plain(output)))


def _random(op, inputs):
    axes = _made_of(op.outputs[0], sizes_of(op.inputs[0], inputs[0]))
    return [Known(axes or along_first(op.outputs[0]))]


def _fill(op, inputs):
    return [Known(_made_of(op.outputs[0], sizes_of(op.inputs[0], inputs[0])) or plain(op.outputs[0]))]


def _broadcast_to(op, inputs):
    axes, rank = inputs[0].axes, op.outputs[0].shape.rank
    if axes is None or rank is None:
        return None
    made = _made_of(op.outputs[0], sizes_of(op.inputs[1], inputs[1]))
    return [Known(join([((),) * (rank - len(axes)) + axes] + ([made] if made else []), op.outputs[0]))]


def _tile(op, inputs):
    axes, times = inputs[0].axes, sizes_of(op.inputs[1], inputs[1])
    if axes is None or times is None:
        return None
    # The copies are the outer factor: so a result divides again.
    return [Known(tuple(
        (many or ()) + axis if many is None or level(many) or level(axis) else own
        for many, axis, own in zip(times, axes, plain(op.outputs[0]))))]


def _filtered(op, inputs):
    """The axes of a filter are none of the output's, even where each example has one of its own."""
    of = inputs[2 if "BackpropInput" in op.type else 0]
    return _alike(op, [of] if any(map(level, of.axes or ())) else inputs)


def _transpose(op, inputs):
    order = tf.get_static_value(op.inputs[1])
    return None if inputs[0].axes is None or order is None else [Known(tuple(inputs[0].axes[i] for i in order))]


def _reshape(op, inputs):
    output = op.outputs[0]
    if inputs[0].axes is None or output.shape.rank is None:
        return None
    wanted = [None if size is None else (Factor(size),) for size in output.shape.as_list()]
    given = sizes_of(op.inputs[1], inputs[1]) or ()
    if len(given) == len(wanted):
        wanted = [size if now is None and size != _REST else now for size, now in zip(given, wanted)]
    axes = divide(sum(inputs[0].axes, ()), wanted, output.name)
    # Where all examples fit into the sizes that are given, more of them would go to the rest.
    if _REST in given and not any(size and level(size) for size in given):
        rest, surest = given.index(_REST), max(map(level, axes), default=0)
        if surest and not axes[rest]:
            axes = axes[:rest] + ((Factor((output.name, rest), surest),),) + axes[rest + 1:]
    return [Known(axes, inputs[0].sizes)]


def _expand_dims(op, inputs):
    axes, axis = inputs[0].axes, tf.get_static_value(op.inputs[1])
    if axes is None or axis is None:
        return None
    axis = int(axis) % (len(axes) + 1)
    return [Known(axes[:axis] + ((Factor(1),),) + axes[axis:], inputs[0].sizes)]


def _squeeze(op, inputs):
    axes = inputs[0].axes
    if axes is None or op.inputs[0].shape.rank is None:
        return None
    dropped = {axis % len(axes) for axis in op.get_attr("squeeze_dims")} or {
        i for i, size in enumerate(op.inputs[0].shape.as_list()) if size == 1}
    return [Known(tuple(axis for i, axis in enumerate(axes) if i not in dropped), inputs[0].sizes)]


def _pack(op, inputs):
    rank = op.outputs[0].shape.rank
    if rank is None or any(known.axes is None for known in inputs):
        return None
    axis = op.get_attr("axis") % rank
    axes = join([known.axes for known in inputs], op.inputs[0])
    sizes = [(sizes_of(*pair) or (None,))[0] for pair in zip(op.inputs, inputs)] if rank == 1 else None
    return [Known(axes[:axis] + ((Factor(len(inputs)),),) + axes[axis:], sizes and tuple(sizes))]


def _unpack(op, inputs):
    axes, sizes = inputs[0]
    if axes is None:
        return None
    axis = op.get_attr("axis") % len(axes)
    return [Known(axes[:axis] + axes[axis + 1:], sizes and (sizes[i],)) for i in range(len(op.outputs))]


def _concat(op, inputs):
    sizes = [sizes_of(*pair) for pair in zip(list(op.inputs)[:-1], inputs)] if op.outputs[0].shape.rank == 1 else [None]
    known, = _alike(op, inputs[:-1])
    return [known._replace(sizes=None if None in sizes else sum(sizes, ()))]


def _strided_slice(op, inputs):
    axes, count = inputs[0].axes, tf.dimension_value(op.inputs[1].shape[0])
    if axes is None or count is None:
        return None
    masks = {name: op.get_attr(name + "_mask") for name in ("ellipsis", "new_axis", "shrink_axis")}
    found, rest = [], list(axes)
    for i in range(count):
        is_in = {name for name, mask in masks.items() if mask >> i & 1}
        if "ellipsis" in is_in:
            following = sum(not masks["new_axis"] >> k & 1 for k in range(i + 1, count))
            found, rest = found + rest[:len(rest) - following], rest[len(rest) - following:]
        elif "new_axis" in is_in:
            found.append((Factor(1),))
        else:
            found, rest = found + ([] if "shrink_axis" in is_in else rest[:1]), rest[1:]
    return [Known(tuple(found + rest), _slice_sizes(op, inputs[0]) if len(axes) == count == 1 else None)]


def _slice_sizes(op, known):
    sizes = sizes_of(op.inputs[0], known)
    begin, end, step = (tf.get_static_value(tensor) for tensor in list(op.inputs)[1:])
    if sizes is None or begin is None or end is None or step is None:
        return None
    if op.get_attr("shrink_axis_mask"):
        return sizes[int(begin[0])],
    return sizes[slice(None if op.get_attr("begin_mask") else int(begin[0]),
                       None if op.get_attr("end_mask") else int(end[0]), int(step[0]))]


def _matmul(op, inputs):
    a, b, output = inputs[0].axes, inputs[1].axes, op.outputs[0]
    if a is None or b is None or output.shape.rank is None:
        return None
    transposes = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    rows, columns = a[-1 if op.get_attr(transposes[0]) else -2], b[-2 if op.get_attr(transposes[1]) else -1]
    outer = [((),) * (output.shape.rank - len(axes)) + axes[:-2] + ((), ()) for axes in (a, b)]
    return [Known(join(outer, output)[:-2] + (rows, columns))]


def _einsum(op, inputs):
    terms, result = op.get_attr("equation").decode().replace(" ", "").split("->")
    by_letter = {}
    for term, known in zip(terms.split(","), inputs):
        if known.axes is None or "." in term:
            return None
        for letter, axis in zip(term, known.axes):
            if level(axis) >= level(by_letter.get(letter, ())):
                by_letter[letter] = axis
    return [Known(tuple(by_letter[letter] for letter in result))]


def _one_hot(op, inputs):
    axes, axis = inputs[0].axes, op.get_attr("axis")
    if axes is None:
        return None
    axis = len(axes) if axis == -1 else axis
    return [Known(axes[:axis] + ((Factor((op.name, axis)),),) + axes[axis:])]


def _fused(op, inputs):
    return [inputs[0]] + [Known(plain(tensor)) for tensor in list(op.outputs)[1:]]


_RULES = {
    "PlaceholderWithDefault": _placeholder_with_default, "IdentityN": lambda op, inputs: inputs, "Shape": _shape,
    "ShapeN": _shape, "Size": _size, "Fill": _fill, "BroadcastTo": _broadcast_to, "Tile": _tile, "Transpose": _transpose,
    "Reshape": _reshape, "ExpandDims": _expand_dims, "Squeeze": _squeeze, "Pack": _pack, "Unpack": _unpack,
    "ConcatV2": _concat, "StridedSlice": _strided_slice, "MatMul": _matmul, "BatchMatMul": _matmul, "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul, "Einsum": _einsum, "OneHot": _one_hot,
    "FusedBatchNorm": _fused, "FusedBatchNormV2": _fused, "FusedBatchNormV3": _fused}
_RULES.update(loop_rules.RULES)
_RULES.update(dict.fromkeys(FILTERS, _filtered))
_RULES.update(row_rules.RULES)
_RULES.update(dict.fromkeys(_SAME, _same))
_RULES.update(dict.fromkeys(_REDUCTIONS, _reduction))
