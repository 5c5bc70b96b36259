"""Who reads and writes a variable before whom: ops moved behind others, and given other inputs."""
import tensorflow.compat.v1 as tf

from towers.graph.gradient_hook import with_gradient
from towers.graph.op_types import CALLS, ENTERS, READS
from towers.graph.private import (control_flow_now, control_flow_of, outer_control_flow, rewire, run_after, wait_only_for,
                                  waiting_for)
from towers.graph.walk import ancestors, descendants, is_ref, variable_of, written_variable

__all__ = ["copy_before_writes", "order_writes", "read_after", "read_written", "run_after_in", "take_instead", "take_twin",
           "takers_of", "value_before_writes"]


def read_after(op, earlier, movable, ops_of_tower):
    """Moves what an op reads of variables, and its own write of one, behind earlier writes.

    Args:
      op: operation.
      earlier: dict from names of variables' ops to lists of ops that wrote them.
      movable: set of operations that are moved themselves, so that what they read stays theirs.
      ops_of_tower: list of the operations of the op's tower.
    """
    for index, tensor in enumerate(op.inputs):
        source = _outside_of_loop(tensor.op)
        if source.name in earlier:
            run_after_in(op, earlier[source.name], ops_of_tower)  # reads or writes the variable itself
        elif source not in movable and source.type in READS:
            variable = _outside_of_loop(source.inputs[0].op)
            if variable.name in earlier:
                # A ref variable has one read op, shared by all: this op gets a read of its own.
                with tf.device(source.device), tf.control_dependencies(list(map(_finished, earlier[variable.name]))):
                    rewire(op, index, _read(source))


def order_writes(writes, ops):
    """Lets writes of a variable that TensorFlow gives no order run one after the other, each upon what the one before wrote.

    What a write takes of the variable is read anew, unless others take it too.

    Args:
      writes: list of operations in the order in which they are to run; what lies in another control flow stays as it is.
      ops: list of the operations that were made along with them.
    """
    of_variable = {}
    for op in writes:
        variable = written_variable(op)
        if variable is not None and control_flow_of(op) is control_flow_now(op.graph):
            of_variable.setdefault(variable, []).append(op)
    for variable, ordered in of_variable.items():
        made = set(ops) if len(ordered) > 1 else ()
        for earlier, op in zip(ordered, ordered[1:]):
            before, before_earlier, others = ancestors([op], within=made), ancestors([earlier], within=made), made - {op}
            if earlier not in before and op not in before_earlier:
                takers = {taker for taker in takers_of(variable) if taker in before and taker not in before_earlier
                          and descendants([taker], within=others) <= before}
                for taker in takers:
                    read_after(taker, {variable.name: [earlier]}, takers, ops)
                run_after(op, [earlier])


def takers_of(variable):
    """Returns the ops that take a variable, or what is read of it, a list; those of a loop of control flow 1 too."""
    found, stack = [], list(variable.outputs)
    while stack:
        consumers = stack.pop().consumers()
        found += consumers
        stack += [op.outputs[0] for op in consumers if op.type in READS or op.type in ENTERS]
    return found


def _outside_of_loop(op):
    """Returns what an op hands into a loop of control flow 1 that ops are being added to, or the op itself."""
    flow, around = control_flow_now(op.graph), set()
    while flow is not None:
        around.add(flow)
        flow = outer_control_flow(flow)
    while op.type in ENTERS and op.get_attr("is_constant") and control_flow_of(op) in around:
        op = op.inputs[0].op
    return op


def _read(source):
    if source.type == "ReadVariableOp":
        return tf.raw_ops.ReadVariableOp(resource=source.inputs[0], dtype=source.outputs[0].dtype)
    return tf.identity(source.inputs[0])


def read_written(write):
    """Returns what a resource variable holds after a write."""
    with tf.control_dependencies([write]):
        return tf.raw_ops.ReadVariableOp(resource=write.inputs[0], dtype=tf.as_dtype(write.get_attr("dtype")))


def copy_before_writes(variable):
    """Returns a copy of what a ref variable holds before anyone writes it: what is read of it may be its own memory."""
    graph = variable.graph
    with graph.colocate_with(None, ignore_existing=True), tf.device(variable.device):
        with tf.name_scope(variable.name + "/before_writes/"):
            return with_gradient("TowersHandOn", lambda: [tf.raw_ops.DeepCopy(x=variable.outputs[0])], "DeepCopy")[0]


def value_before_writes(variable):
    """Returns what a variable holds before anyone writes it, in memory of its own; the writes have to wait for that."""
    if is_ref(variable.outputs[0]):
        return copy_before_writes(variable)
    dtype = tf.as_dtype(variable_of(variable).get_attr("dtype"))
    with tf.device(variable.device):
        return tf.raw_ops.ReadVariableOp(resource=variable.outputs[0], dtype=dtype)


def run_after_in(op, earlier, ops_of_tower):
    """Makes an op of a tower wait for others; one inside a loop by what of the tower enters the loop."""
    flow, outer = control_flow_of(op), control_flow_now(op.graph)
    ops = [op]
    while flow is not None and flow is not outer:
        entries = [each for each in ops_of_tower if each.type in ENTERS and control_flow_of(each) is flow]
        ops, flow = entries or ops, outer_control_flow(flow)
    earlier = list(map(_finished, earlier))
    for each in ops:
        run_after(each, [other for other in earlier if other not in each.control_inputs])


def _finished(op):
    """Returns what has to be waited for until an op has done what it does: of a call of control flow 2, what takes its output.

    TensorFlow leaves out the writes of a call that is only waited for.
    """
    if op.type not in CALLS or not op.outputs:
        return op
    name = op.name + "/finished"
    made = [consumer for consumer in op.outputs[0].consumers() if consumer.name == name]
    if not made:
        with op.graph.colocate_with(None, ignore_existing=True), tf.device(op.device):
            made = [tf.identity(op.outputs[0], name=name + "/").op]
    return made[0]


def take_instead(ops, tensor, other):
    """Lets ops take another tensor wherever they take this one."""
    for op in ops:
        for index, taken in enumerate(op.inputs):
            if taken is tensor:
                rewire(op, index, other)


def take_twin(op, twin):
    """Lets all that takes what an op gives, or waits for it, take and wait for its twin."""
    for tensor, of_twin in zip(op.outputs, twin.outputs):
        take_instead(tensor.consumers(), tensor, of_twin)
    for waiting in waiting_for(op):
        wait_only_for(waiting, [twin if earlier is op else earlier for earlier in waiting.control_inputs])
