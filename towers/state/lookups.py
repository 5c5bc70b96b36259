"""Rows of a table that are looked up and added up, as `tf.nn.embedding_lookup_sparse` does, in the two forms that it has.

TensorFlow looks each row up once, where the table stands on another device than their numbers, and else adds up at once: of
towers on several devices one has the one form, and others the other.
"""
from towers.graph.op_types import LOOKS_UP, READS
from towers.graph.walk import end_of

__all__ = ["looked_up"]


def looked_up(op):
    """Returns of which table, of which rows of it and by which segments an op adds up, a list of ends; None for any other op."""
    if not op.type.startswith("SparseSegment") or "Grad" in op.type:
        return None
    table, rows, *segments = op.inputs
    found, each = _read(table), rows.op
    if found.op.type in LOOKS_UP and each.type == "Unique" and found.op.inputs[1] is each.outputs[0] and rows is each.outputs[1]:
        table, rows = found.op.inputs[0], each.inputs[0]
    return [end_of(_read(table)), end_of(rows)] + [end_of(tensor) for tensor in segments]


def _read(tensor):
    """Returns what a tensor was read of: a variable, say."""
    while tensor.op.type in READS:
        tensor = tensor.op.inputs[0]
    return tensor
