"""A plan carried out in a tower's graph: inputs rewired, and ops made anew whose shapes become others.

Where an op's input is replaced by one of the same static shape, the op stays and is rewired, so that whoever holds its outputs
(gradient functions of the model's own, say) holds what is now right. Where shapes change, TensorFlow could not follow: the op is
made anew with its new inputs, and so are those behind it.
"""
import tensorflow.compat.v1 as tf

from towers.context import may_differ
from towers.graph.op_types import ENTERS, EXITS, LOOPS_BACK, MERGES, READS, SWITCHES
from towers.graph.private import (choose_by, chooses_by, control_flow_now, control_flow_of, is_loop, outer_control_flow,
                                  put_in_flow, rewire, take_into_flow, wait_only_for, waits_for_branch_alone, within_control_flow)
from towers.graph.walk import end_of, is_ref
from towers.sharding.nodes import Refused
from towers.sharding.placements import InTurn, Partial, PartialMean, Replicate, Shard
from towers.sharding.rewrite.carrying import carry_out
from towers.sharding.rewrite.conversions import Conversions

__all__ = ["Rewriting"]

_WAYS_IN = ENTERS | SWITCHES


class Rewriting:
    """Carries out the plan of one tower.

    Args:
      tower: `TowerContext`.
      plan: `towers.sharding.plan.propagation.Plan`.
      whole: `towers.sharding.plan.twin.Twin` or None.
      batch, own, first: see `Conversions`.
    """

    def __init__(self, tower, plan, whole, batch, own, first):
        self._tower, self._plan, self._whole = tower, plan, whole
        self._stands = {}  # (op, number) -> the tensor that stands for it
        self._outside = {}  # (op, number) of what a branch or loop computes -> the same, computed outside
        self._ops = {}  # op -> what was made in its place
        self._branches = {control_flow_of(op) for op in plan.order} - {None}  # of control flow 1, and its loops
        self._flow = control_flow_now(tf.get_default_graph())
        self.conversions = Conversions(
            tower, plan, self._outside_of_flow, self.now, self._inputs, self._copied, self._created, whole, batch, own, first)
        self.conversions.carry_by(carry_out)

    def now(self, tensor):
        """Returns what stands for a tensor."""
        return self._stands.get(end_of(tensor), tensor)

    def carry_out(self):
        """Changes the graph."""
        for op in self._plan.order:
            # TensorFlow makes lists under no device. What is made for one would stand on the first CPU, apart from its loop, and
            # nested loops over two devices wait for ever in TensorFlow 1.15.
            device = op.device or self._tower.device
            with op.graph.colocate_with(None, ignore_existing=True), tf.device(device), tf.control_dependencies(None):
                self._visit(op)
        self._wait_for_copies()

    def _inputs(self, op, converted):
        """Returns the inputs of an op by now, some of which are replaced by others, where the op takes them."""
        flows = [control_flow_of(tensor.op if op.type in MERGES else op) for tensor in op.inputs]  # of the branches that it joins
        return [self._brought_in(converted[k], op, flows[k]) if k in converted else self.now(tensor)
                for k, tensor in enumerate(op.inputs)]

    def _visit(self, op):
        decision, flow = self._plan.decisions.get(op), control_flow_of(op)
        wants = {} if decision is None else decision.wants
        inputs = self._inputs(op, {k: self.conversions.converted(op.inputs[k], want, op) for k, want in wants.items()})
        if op.type.endswith("Switch") and inputs[1] is not op.inputs[1]:
            for branch in self._branches:  # of which TensorFlow asks it for what is made there, gradients among that
                if chooses_by(branch, op):
                    choose_by(branch, inputs[1])
        if decision is not None and decision.instead is not None:
            # A constant made in a loop would wait for the loop's turn, which may wait for it; and towers meet before a branch.
            place = self._flow if flow is None or op.type == "Const" or decision.meets else flow
            if place is not flow:
                inputs = [self._outside_of_flow(self.conversions.converted(tensor, wants[k]) if k in wants else tensor)
                          for k, tensor in enumerate(op.inputs)]
            with tf.name_scope(op.name + "/whole_batch/"), within_control_flow(place):
                found = decision.instead(self.conversions, op, inputs)
            if place is not flow:
                found = [made if made is None else self._brought_in(made, op, flow) for made in found]
            self._ops.update(self.conversions.in_place_of)
            outputs = [output if made is None else made for output, made in zip(op.outputs, found)]
        elif all(new is old for new, old in zip(inputs, op.inputs)):
            outputs = list(op.outputs)
        else:
            outputs = self._copied(op, inputs, flow)
        for number, rows in (decision.own.items() if decision is not None else ()):
            with tf.name_scope(op.name + "/whole_batch/"):
                outputs[number] = self.conversions.own_rows(outputs[number], rows)
        for number, (old, new) in enumerate(zip(op.outputs, outputs)):
            end = op, number
            if new is old and op.type.startswith("TensorArray") and self._is_of_own_size(op, number):
                new = self._of_whole_size(op, number, inputs, flow)
            if end in self._plan.at_source:
                new = self._brought_in(self._met(old, new), op, flow)
            if new is not old:
                self._stands[end] = new

    def _is_of_own_size(self, op, number):
        """Tells whether TensorFlow takes what comes out of a list for as large as in the tower, and it is the whole batch's."""
        tensor, placement = op.outputs[number], self._plan.placements[op, number]
        dims = None if self._whole is None else self._whole.dims(tensor)
        if dims is None or tensor.shape.rank is None or not isinstance(placement, (InTurn, Replicate, Shard)):
            return False
        own = placement.axis if isinstance(placement, Shard) else None
        return any(None not in pair and pair[0] != pair[1] for axis, pair in enumerate(zip(dims, tensor.shape.as_list()))
                   if axis != own)

    def _of_whole_size(self, op, number, inputs, flow):
        try:
            return self._created(op, inputs, flow).outputs[number]
        except ValueError as error:
            raise Refused("%r is of the tower's size, and what is in the list is the whole batch's. Hand the batch "
                          "in with an unknown size, tf.placeholder_with_default(x, [None, ...])."
                          % op.outputs[number].name) from error

    def _met(self, old, new):
        """Returns sums' parts met where they are made."""
        self._stands[end_of(old)] = new
        return self.conversions.met_at_source(old, self._plan.at_source[end_of(old)])

    def _brought_in(self, tensor, op, flow):
        """Returns a tensor that was made outside of all control flow where an op takes it."""
        if flow is not None and _is_way_in(op, flow):
            flow = outer_control_flow(flow)
        if flow is None or flow is self._flow or control_flow_of(tensor.op) is flow:
            return tensor
        with within_control_flow(self._flow):
            return take_into_flow(tensor, flow)

    def _outside_of_flow(self, tensor):
        """Returns what stands for a tensor, computed outside of the branch or loop that computes it where that is so."""
        now = self.now(tensor)
        flow = control_flow_of(now.op)
        if flow is None or flow is self._flow:
            return now
        end = end_of(now)
        if end not in self._outside:
            op = now.op
            if _is_way_in(op, flow):
                found = self._outside_of_flow(op.inputs[0])
            elif not _is_read(op) and (op.type in MERGES | LOOPS_BACK | EXITS or op.op_def is None
                                       or op.op_def.is_stateful or any(map(is_ref, op.inputs))):
                raise Refused("towers would have to meet about %r within a tf.cond or tf.while_loop, by what is "
                              "known only there (%s)" % (tensor.name, op.type))
            else:
                inputs = [self._outside_of_flow(source) for source in op.inputs]
                found = self._created(op, inputs, self._flow).outputs[now.value_index]
            self._outside[end] = found
        return self._outside[end]

    def _copied(self, op, inputs, flow=False):
        """Returns the outputs of an op that takes these inputs: its own, or where shapes change those of one made anew."""
        changed = [k for k, (old, new) in enumerate(zip(op.inputs, inputs)) if new is not old]
        if flow is False:
            flow = control_flow_of(op)
        if not changed:
            return list(op.outputs)
        if op in self._ops:
            return list(self._created(op, inputs, flow).outputs)
        if _keeps_its_shapes(op):
            with within_control_flow(self._flow if flow is None else flow):
                for k in changed:
                    rewire(op, k, _fitting(inputs[k], op.inputs[k]))
            return list(op.outputs)
        if all(_fits(inputs[k].shape, op.inputs[k].shape) and (_is_state(op) or not _may_be_shape(op.inputs[k]))
               for k in changed):
            for k in changed:
                rewire(op, k, inputs[k])
            return list(op.outputs)
        made = self._created(op, inputs, flow)
        self._ops[op] = made
        return list(made.outputs)

    def _created(self, op, inputs, flow):
        """Makes an op anew, with other inputs, in a tf.cond or tf.while_loop or in none."""
        attributes = {key: value for key, value in op.node_def.attr.items() if key not in ("_class", "_output_shapes")}
        if flow is not self._flow and _is_state(op):
            raise Refused("the state of a tf.while_loop, %r, has another size for the whole batch than for a tower's. Hand the "
                          "batch in with an unknown size, tf.placeholder_with_default(x, [None, ...])." % op.name)
        attributes.update(_shapes_of_whole(op, inputs))
        is_way_in = flow is not None and _is_way_in(op, flow)
        place = outer_control_flow(flow) if is_way_in else self._flow if flow is None else flow
        waits = [self._ops.get(earlier, earlier) for earlier in op.control_inputs] if control_flow_of(op) is flow else []
        with within_control_flow(place), tf.control_dependencies(waits if not is_way_in else []), tf.name_scope(None):
            try:
                made = op.graph.create_op(
                    op.type, inputs, [output.dtype for output in op.outputs], attrs=attributes, op_def=op.op_def,
                    input_types=[tensor.dtype for tensor in op.inputs], name=op.name + "/whole_batch/" + op.type)
            except ValueError as error:
                raise Refused("%r can't be made anew of the whole batch's sizes: %s Hand the batch in with an unknown size, "
                              "tf.placeholder_with_default(x, [None, ...])." % (op.name, error)) from error
        if is_way_in:
            put_in_flow(made, flow)
        self._tell_shapes(op, made)
        return made

    def _tell_shapes(self, op, made):
        """Tells an op that was made anew what is known of its shapes, and TensorFlow does not find by itself."""
        decision = self._plan.decisions.get(op)
        for number, (old, new) in enumerate(zip(op.outputs, made.outputs)):
            if new.shape.is_fully_defined() or old.shape.rank is None:
                continue
            dims = old.shape.as_list() if self._whole is None else self._whole.dims(old)
            placement = self._plan.placements.get((op, number))
            if dims is None or not isinstance(placement, (Replicate, Shard, Partial, PartialMean)):
                continue
            if isinstance(placement, Shard) and not (decision is not None and number in decision.own):
                dims = dims[:placement.axis] + [None] + dims[placement.axis + 1:]
            new.set_shape(dims)

    def _wait_for_copies(self):
        for op in self._plan.order:
            op = self._ops.get(op, op)
            if any(earlier in self._ops for earlier in op.control_inputs):
                wait_only_for(op, [self._ops.get(earlier, earlier) for earlier in op.control_inputs])


def _is_way_in(op, flow):
    """Tells whether an op of a tf.cond or tf.while_loop takes something from outside of it."""
    return op.type in _WAYS_IN and not (op.type.endswith("Switch") and is_loop(flow))


def _is_read(op):
    """Tells whether an op of a tf.cond reads a variable as it was before."""
    return op.type in READS and not is_loop(control_flow_of(op)) and waits_for_branch_alone(op)


def _is_state(op):
    """Tells whether an op hands a loop's state on, from turn to turn, and in and out of the loop."""
    flow = control_flow_of(op)
    if op.type in EXITS | LOOPS_BACK:
        return True
    if op.type in MERGES or op.type.endswith("Switch"):
        return flow is not None and is_loop(flow)
    return op.type in ENTERS and not op.get_attr("is_constant")


def _fits(new, old):
    """Tells whether a static shape is the other one, or says more."""
    if old.rank is None:
        return True
    return new.rank == old.rank and all(theirs is None or mine == theirs for mine, theirs in zip(new.as_list(), old.as_list()))


def _shapes_of_whole(op, inputs):
    """Returns those attributes of an op that are shapes as they have to be for other inputs, a dict."""
    names = [] if op.op_def is None else [attribute.name for attribute in op.op_def.attr if attribute.type == "shape"]
    shapes = {name: tf.TensorShape(None) for name in names if name.startswith("element_shape")}
    if "shape" in names and op.inputs:
        old, new = op.inputs[0].shape, inputs[0].shape
        if old.is_compatible_with(op.outputs[0].shape) and not new.is_compatible_with(op.outputs[0].shape):
            shapes["shape"] = new
    return {name: tf.AttrValue(shape=shape.as_proto()) for name, shape in shapes.items()}


def _may_be_shape(tensor):
    """Tells whether shapes may follow a tensor's value, which TensorFlow may have looked at while the graph was built."""
    return tensor.dtype == tf.variant or tensor.dtype.base_dtype in (tf.int32, tf.int64) and tensor.shape.rank in (0, 1, 2)


def _keeps_its_shapes(op):
    """Tells whether an op's outputs, as of a write, are none whose shapes depend on its inputs'."""
    return all(is_ref(output) or output.dtype in (tf.resource, tf.string) or op.type.startswith("TensorArray") and (
        output.dtype == tf.float32 and output.shape.rank == 0) for output in op.outputs)


def _fitting(tensor, old):
    """Returns a tensor that TensorFlow lets take another one's place, whatever their shapes."""
    if _fits(tensor.shape, old.shape) or is_ref(tensor):
        return tensor
    with may_differ():  # another tower's may fit
        return tf.placeholder_with_default(tensor, None)
