"""What tf.map_fn and its like (of control flow 1) make of each row of a tensor, one row in each round of a loop."""
import tensorflow.compat.v1 as tf

from towers.private import control_flow_of, is_in_loop

__all__ = ["LISTS", "axes_in_lists", "carried_along", "made_in_loop", "mapped_from", "reads_apart", "state_of", "written_by"]

_GATHERS, _READS = ("TensorArrayGatherV3", "TensorListStack"), ("TensorArrayReadV3", "TensorListGetItem")
_GATHER_ROWS = ("Gather", "GatherV2")
LISTS = frozenset(_GATHERS + _READS)  # what may hand out such rows, or one of them


def written_by(op):
    """Returns the tensor in a loop that each row of what an op hands out is in its round; None for any other op."""
    write = _write_of(op)
    return None if write is None else write.inputs[2]  # in a TensorArray as in a list


def carried_along(op):
    """Returns the tensors along whose rows a loop goes that makes rows of them and of what it made of earlier ones; a list."""
    reads, is_of_earlier = _read_for(op)
    return [rows for read in reads for rows in _scattered(read)] if is_of_earlier else []


def made_in_loop(op):
    """Returns the tensors that a loop makes what an op hands out of: each row, or the state's first and next value; a list."""
    if op.type == "Exit":
        return state_of(op.inputs[0].op)
    row = written_by(op)
    return [] if row is None else [row]


def state_of(op):
    """Returns a loop's state that an op hands out in each round, its first and its next value; a list, empty for other ops."""
    merge = op.inputs[0].op if op.type == "Switch" else op
    if merge.type != "Merge" or not any(source.op.type == "NextIteration" for source in merge.inputs):
        return []
    return [source.op.inputs[0] for source in merge.inputs if source.op.type in ("Enter", "NextIteration")]


def axes_in_lists(op, axis):
    """Returns what an axis of rows that a loop makes, or of one that it reads, is made of: a list of (tensor, its axis)."""
    if op.type in _READS:
        return [(rows, axis + 1) for rows in _scattered(op)]
    if axis == 0:
        return [(rows, 0) for rows in mapped_from(op)]
    row = written_by(op)
    return [] if row is None else [(row, axis - 1)]


def mapped_from(op):
    """Returns the tensors whose row i, and that row alone of them, a loop reads in the round in which it writes row i of `op`.

    Returns:
      A list, empty where `op` does not hand out such rows.
    """
    return [rows for read in _read_for(op)[0] for rows in _scattered(read)]


def reads_apart(op):
    """Returns the ops that read rows of which `op` hands out those of the same numbers, each made of its own alone: a list."""
    reads, is_of_earlier = _read_for(op)
    return [] if is_of_earlier else reads


def _read_for(op):
    """Returns what `mapped_from` tells of, the ops that read it, and whether numbers of earlier rounds go in too."""
    write = _write_of(op)
    if write is None:
        return [], False
    frame = _frame_of(op)
    found, is_of_earlier, seen, stack = [], False, set(), [write.inputs[2].op]
    while stack:
        op = stack.pop()
        if op in seen or op.type == "Enter" and op.get_attr("frame_name") == frame:
            continue
        seen.add(op)
        if _reads_row(op, write.inputs[1]):
            found.append(op)
        else:
            is_of_earlier = is_of_earlier or (op.type == "NextIteration" and op.outputs[0].dtype.is_floating
                                              and control_flow_of(op) is control_flow_of(write))  # no loop within it
            stack.extend(source.op for source in op.inputs)
    return found, is_of_earlier


def _reads_row(op, number):
    """Tells whether an op reads the row of a number, of a TensorArray, a list, or a tensor from outside of the loop."""
    if op.type in _READS:
        return op.inputs[1] is number
    if op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") & 1:
        first = op.inputs[1].op
        is_row = first.type == "Pack" and first.inputs[0] is number
    else:
        is_row = op.type in _GATHER_ROWS and op.inputs[1] is number and op.inputs[0].dtype != tf.resource and (
            op.type == "Gather" or tf.get_static_value(op.inputs[2]) == 0)
    return is_row and (op.inputs[0].op.type == "Enter" or not is_in_loop(op.inputs[0].op))


def _state_of(op):
    """Returns the Merge of a loop's TensorArray, or list, that an op gathers after the loop; None for other ops."""
    if op.type not in _GATHERS:
        return None
    source = _list_of(op)
    for kind in "Exit", "Switch":
        if source.op.type != kind:
            return None
        source = source.op.inputs[0]
    return source.op if source.op.type == "Merge" else None


def _frame_of(op):
    return _state_of(op).inputs[0].op.get_attr("frame_name")


def _write_of(op):
    """Returns the op that writes into a loop's TensorArray, or list, what an op gathers after the loop, else None."""
    merge = _state_of(op)
    if merge is None or merge.inputs[1].op.type != "NextIteration":
        return None
    write = merge.inputs[1].op.inputs[0].op
    is_state = write.type == "TensorListSetItem" or write.type == "TensorArrayWriteV3" and write.inputs[0].op.type == "Enter"
    return write if is_state else None


def _list_of(op):
    """Returns what stands for the values of the TensorArray, its flow, or the list, that an op reads."""
    return op.inputs[0 if op.type.startswith("TensorList") else 2]


def _scattered(read):
    """Returns whose row is read: what a TensorArray was made of before the loop, a list; of stacked tensors nothing is sure."""
    if read.type not in _READS:
        return [read.inputs[0].op.inputs[0] if read.inputs[0].op.type == "Enter" else read.inputs[0]]
    op = _list_of(read).op
    if op.type == "Switch" and op.inputs[0].op.type == "Merge":  # a loop of control flow 2 hands on what it does not change
        first, following = (source.op for source in op.inputs[0].op.inputs)
        op = first if following.type == "NextIteration" and following.inputs[0].op is op else op
    op = op.inputs[0].op if op.type == "Enter" else op
    if op.type not in ("TensorArrayScatterV3", "TensorListFromTensor"):
        return []
    rows = op.inputs[2 if op.type == "TensorArrayScatterV3" else 0]
    return [] if rows.op.type == "Pack" else [rows]
