"""What of one tower concerns the variables that its model function writes: the writes, and the reads that outputs need."""
import tensorflow.compat.v1 as tf

from towers.graph.draws import drawing
from towers.graph.op_types import READS
from towers.graph.private import control_flow_now, control_flow_of, waiting_for
from towers.graph.walk import ancestors, end_of, is_ref, is_variable, op_of, reads_of

__all__ = ["View"]


class View:
    """What of a tower concerns its writes.

    Attributes:
      ops, made: list and set of the operations that its model function made, without those where towers meet.
      outputs: list of what it returned.
      items: list of what it added to collections, without variables.
      needed, reached: sets of those of `made` that outputs, or these and `items`, depend on.
      writes: dict from those of `reached` that write variables to lists of these.
      of_batch, drawn: sets of those of `made` that take what comes of the tower's own batch, or is drawn at random, as far as a
        quick look goes: short of where towers meet, and of writes that are known to be the same in all towers.
      alike: set of these writes.
    """

    def __init__(self, tower, batch, added, writes, aggregated):
        self.tower = tower
        self.ops = [op for op in tower.ops if op not in aggregated]
        self.made = set(self.ops)
        self.outputs = [leaf for leaf in tf.nest.flatten(tower.outputs, expand_composites=True) if op_of(leaf) is not None]
        self.items = [item for of_key in added.values() for item in of_key if op_of(item) is not None and not is_variable(item)]
        self._ends = set(map(op_of, self.outputs)), set(map(op_of, self.outputs + self.items))
        self.needed = ancestors(self.outputs, within=self.made)
        self.reached = self.needed | ancestors(self.items, within=self.made)
        self.writes = {op: variables for op, variables in writes.items() if op in self.reached and op in self.made}
        self.alike = tower.context.alike_writes
        self.of_batch = self._made_of(op for op in self.ops if any(end_of(tensor) in batch for tensor in op.inputs))

    @property
    def drawn(self):
        return self._made_of(drawing(self.ops))

    def _made_of(self, ops):
        found, stack = set(), list(ops)
        while stack:
            op = stack.pop()
            if op in self.made and op not in found and op not in self.alike:
                found.add(op)
                if op.type != "IdentityN":
                    stack.extend(consumer for tensor in op.outputs for consumer in tensor.consumers())
        return found

    def writes_to(self, variable):
        """Returns the ops that write a variable, in the order in which they were made."""
        return [op for op, variables in self.writes.items() if variable in variables]

    def results(self, op):
        """Returns the op itself, or where it stands in a tf.cond or loop what comes of it outside."""
        outer, found, seen, stack = control_flow_now(op.graph), [], set(), [op]
        while stack:
            op = stack.pop()
            if op in seen:
                continue
            seen.add(op)
            if control_flow_of(op) is outer:
                found.append(op)
            else:
                stack.extend(consumer for tensor in op.outputs for consumer in tensor.consumers())
                stack.extend(waiting_for(op))
        return sorted(found, key=lambda result: result.name)

    def leads_to(self, op, writes, of_items=False):
        """Tells whether an op leads to "outputs" by a way beside `writes`, else to these "writes", or to neither, None.

        With `of_items` what stands in collections counts as outputs too.
        """
        ends, found, seen, stack = self._ends[bool(of_items)], None, set(), [op]
        while stack:
            op = stack.pop()
            if op in writes:
                found = "writes"
            elif op in self.made and op not in seen:
                if op in ends:
                    return "outputs"
                seen.add(op)
                stack.extend(consumer for tensor in op.outputs for consumer in tensor.consumers())
                stack.extend(waiting_for(op))
        return found

    def uses(self, variable, of_items=False):
        """Returns how what the outputs need reads a variable: pairs of an op and the number of an input.

        With `of_items` also how what stands in collections does. Of a resource variable it is the op that reads it, and None.
        What is read of a ref variable may be its own memory, so there it is what takes that.
        """
        found, flow = [], control_flow_now(variable.graph)
        for read in reads_of(variable):
            if not is_ref(variable.outputs[0]):
                found.append((read, None))
            else:
                tensors = list(read.outputs) if read.type in READS else []
                tensors += [op.outputs[0] for tensor in tensors for op in tensor.consumers()
                            if op.type == "Enter" and control_flow_of(op) is flow]  # of a loop around the towers
                found += [(op, i) for tensor in tensors for op in tensor.consumers()
                          for i, taken in enumerate(op.inputs) if taken is tensor]
                found += [(read, i) for i, taken in enumerate(read.inputs) if not tensors and is_ref(taken)]
        needed = self.reached if of_items else self.needed
        return [use for use in found if use[0] in needed and use[0] not in self.writes]
