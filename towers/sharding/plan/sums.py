"""Where the parts of a sum meet: at its source, where several tensors are computed of it, or what only hands it on."""
import numpy as np

from towers.graph.op_types import SAME_NUMBERS
from towers.graph.private import loop_of
from towers.graph.walk import end_of
from towers.sharding.nodes import Replicated
from towers.sharding.placements import Partial, PartialMean
from towers.sharding.rules.pointwise import LINEAR

__all__ = ["met_at_source"]

# Of one input, each as large as it: where a sum's parts meet, they meet in front of these, once for all readers.
_HANDING_ON = SAME_NUMBERS.union(LINEAR.split()) | {"Transpose"}


def met_at_source(plan):
    """Returns the sums' parts that meet behind ops that hand them on, or at several places, a set of (op, number)."""
    found, meeting = set(), {}
    for op, decision in plan.decisions.items():
        for k, want in decision.wants.items():
            tensor = op.inputs[k]
            placement = plan.placements.get(end_of(tensor))
            if not isinstance(want, Replicated) or not isinstance(placement, (Partial, PartialMean)):
                continue
            meeting[end_of(tensor)] = tensor
            source = tensor
            while source.op.type in _HANDING_ON and source.op not in plan.decisions and (
                    source.dtype.is_complex == source.op.inputs[0].dtype.is_complex) and isinstance(
                        plan.placements.get(end_of(source.op.inputs[0])), (Partial, PartialMean)):
                source = source.op.inputs[0]
            if source is not tensor and loop_of(source.op) is None:
                found.add(end_of(source))
    return found | _met_several_times(plan, meeting)


def _met_several_times(plan, meeting):
    """Returns the sums' parts of which several tensors are computed that meet, and are together no smaller, a set."""
    if len(meeting) < 2:
        return set()
    sources, readers = {}, {}  # of the parts of sums: the one that they are computed of, None for several; the tensors that meet
    for op in plan.order:
        for number in range(len(op.outputs)):
            if isinstance(plan.placements.get((op, number)), (Partial, PartialMean)):
                of_inputs = {sources[end] for end in map(end_of, op.inputs) if end in sources}
                sources[op, number] = (op, number) if not of_inputs else of_inputs.pop() if len(of_inputs) == 1 else None
    for end, tensor in meeting.items():
        readers.setdefault(sources.get(end), []).append(tensor)
    readers.pop(None, None)
    return {(op, number) for (op, number), tensors in readers.items() if len(tensors) > 1 and loop_of(op) is None
            and _size(op.outputs[number]) <= sum(map(_size, tensors))}


def _size(tensor):
    """Returns how many elements a tensor has, those along axes of unknown size counted once."""
    dims = [] if tensor.shape.rank is None else tensor.shape.as_list()
    return int(np.prod([1 if size is None else size for size in dims], dtype=np.int64))
