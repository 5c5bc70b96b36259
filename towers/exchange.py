"""Where towers meet, without waiting for one another.

A tower that comes to an exchange leaves its contribution and takes a stand-in: a tensor with the dtype and shape of the
result that fails when it is run. When the last tower has come, the aggregate of all contributions is built on the
aggregation device and becomes the input of every stand-in. What ties towers together are data edges alone: there is no
rendezvous by name, so nothing can hang, and each model function stays plain sequential code.

Gradients do not pass a stand-in: it takes the aggregate's bits as integers, so that `tf.gradients` of one tower's loss does
not even walk through the other towers' ops behind it. Functions that want a gradient (`towers.cross_tower`) hang it on an
op of their own by `pass_with_gradient`, and meet again from its gradient function at `gradient_place`. A backward meeting is
known by its forward exchange and the number of the gradient call, never by a global order, so towers may be differentiated
in any order, more than once, and within the model function.

This is the only file of the project that calls private TensorFlow functions; `tests/test_canaries.py` watches them.
"""
import contextlib
import re
from typing import NamedTuple

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import ops, test_util

from towers.context import current_tower, differentiate, is_differentiating

try:
    from tensorflow.python.eager import record
except ImportError:  # before TensorFlow 2.11
    from tensorflow.python.eager import tape as record

__all__ = ["TowerMismatchError", "exchange"]

# Attribute of a graph, a dict: name of an op -> (its _Place, detail, {gradient label: calls so far}).
_ORIGINS = "_towers_exchange_places"


class TowerMismatchError(ValueError):
    """Towers that have to be alike differ: in their exchanges, variables, outputs or gradients."""


class _Place(NamedTuple):
    """A point of one tower where it meets the others; the same `key` in every tower."""
    meetings: "Meetings"
    tower: int
    key: tuple


class _Exchange(NamedTuple):
    """What a tower came to a forward exchange with, for later towers to be held against."""
    name: str
    kind: str
    dtypes: tuple
    shapes: tuple
    arguments: dict

    def __str__(self):
        contributions = ["%s%s" % (dtype.name, shape) for dtype, shape in zip(self.dtypes, self.shapes)]
        return "%s %r of %s" % (self.kind, self.name, ", ".join(contributions))

    def is_like(self, other):
        """Tells whether two towers' contributions can be aggregated as one exchange."""
        return (self.kind, self.dtypes) == (other.kind, other.dtypes) and all(
            shape.is_compatible_with(of_other) for shape, of_other in zip(self.shapes, other.shapes))

    def differing_argument(self, other):
        """Returns the name of an argument that two layers have other values of, or None."""
        names = [*self.arguments, *(name for name in other.arguments if name not in self.arguments)]
        return next((name for name in names if self.arguments.get(name) != other.arguments.get(name)), None)


class Meetings:
    """All exchanges of the towers of one build, forward and backward.

    Args:
      devices: list of str, the towers' devices.
      aggregation_device: str, where aggregates are computed.
    """

    def __init__(self, devices, aggregation_device):
        self.graph = tf.get_default_graph()
        self.num_towers = len(devices)
        self.aggregation_device = aggregation_device
        self._control_flow = control_flow_now(self.graph)
        self._forward = []  # the exchanges of tower 0, in its order
        self._left = [0] * self.num_towers  # how many exchanges each tower has left so far
        self._arrivals = {}  # key -> {tower: (stand-ins, contributions)}, until the last tower comes
        self.contributions = {}  # key -> {tower: what it left}
        self.stand_ins = {}  # op of a stand-in -> (key, number of the result)
        self._aggregated = []  # positions in the graph of the first and behind the last op of each aggregate
        self._flow_at = {}  # key -> the graph and control flow that its first tower came in
        self._gradient_label = None
        self._left_in_pass = []  # the ops whose results towers left in the gradient pass under way, in order
        self._num_gradient_passes = 0
        self.gradient_checks = []  # functions of the list of ops that a gradient pass made

    @property
    def num_exchanges(self):
        """How many exchanges each tower makes in its forward pass."""
        return len(self._forward)

    def aggregated(self):
        """Returns the ops of all aggregates, a set: they were made within the last tower, and belong to none."""
        ops = self.graph.get_operations()
        return {op for first, last in self._aggregated for op in ops[first:last]}

    def turn(self, tower):
        """Returns the number of a tower's next exchange."""
        return self._left[tower]

    def forward_place(self, tower, name, kind, dtypes, shapes, arguments):
        """Returns the `_Place` of a tower's next exchange; raises where it is not tower 0's exchange of that turn."""
        graph = tf.get_default_graph()
        if graph is not self.graph or control_flow_now(graph) is not self._control_flow:
            raise ValueError(
                "%s %r stands inside a tf.cond, a tf.while_loop, a tf.function or another graph. Towers can meet only "
                "where every tower comes each step: move it out, or choose between its results with tf.where."
                % (kind, name))
        came = _Exchange(name, kind, tuple(dtypes), tuple(shapes), arguments)
        turn = self._left[tower]
        if tower == 0:
            self._forward.append(came)
        elif turn == len(self._forward):
            raise TowerMismatchError("Tower %d has an exchange that tower 0 has not: %s, its number %d. %s"
                                     % (tower, came, turn, _ALIKE))
        else:
            self._check_alike(tower, turn, came)
        self._left[tower] += 1
        return _Place(self, tower, (turn,))

    def _check_alike(self, tower, turn, came):
        expected = self._forward[turn]
        # Keras numbers its layers through the graph ('dense_3' in tower 1 where tower 0 has 'dense'). Such a name counts
        # as the same only if tower 0 has no exchange of that very name, which would mean another order.
        elsewhere = any(came.name == other.name for other in self._forward)
        same_name = came.name == expected.name or (
            not elsewhere and without_numbers(came.name) == without_numbers(expected.name))
        if not (came.is_like(expected) and same_name):
            raise TowerMismatchError("Towers differ at exchange %d: tower 0 has %s, tower %d has %s. %s"
                                     % (turn, expected, tower, came, _ALIKE))
        argument = expected.differing_argument(came)
        if argument is not None:
            raise TowerMismatchError(
                "Towers differ at exchange %d, %s %r: %s is %s in tower 0 and %s in tower %d. %s"
                % (turn, came.kind, came.name, argument, expected.arguments.get(argument), came.arguments.get(argument), tower,
                   _ALIKE))

    def check_complete(self, tower):
        """Raises `TowerMismatchError` if a tower whose model function returned left fewer exchanges than tower 0."""
        if self._left[tower] < len(self._forward):
            raise TowerMismatchError(
                "Tower %d has %d exchanges and tower 0 has %d; the first that tower %d lacks is %s. %s"
                % (tower, self._left[tower], len(self._forward), tower, self._forward[self._left[tower]], _ALIKE))

    def name_of(self, place):
        """Returns the name of the layer that a place belongs to, relative to its tower."""
        return self._forward[place.key[0]].name

    @contextlib.contextmanager
    def gradient_pass(self):
        """Holds the gradient calls of one pass over all towers apart from the caller's others, and checks them.

        Yields a list that fills with the ops whose results towers leave at their meetings, in the order of each tower.

        Raises `TowerMismatchError` at the end if a gradient passed through an exchange in some towers and not in others.
        """
        outer = self._gradient_label, self._left_in_pass
        label, left = self._gradient_label, self._left_in_pass = "pass %d" % self._num_gradient_passes, []
        self._num_gradient_passes += 1
        first_op = len(self.graph.get_operations())
        try:
            with differentiate():
                yield left
        finally:
            self._gradient_label, self._left_in_pass = outer
        for check in self.gradient_checks:
            check(self.graph.get_operations()[first_op:])
        for key, arrivals in self._arrivals.items():
            if isinstance(key[-1], tuple) and key[-1][0] == label:
                missing = [i for i in range(self.num_towers) if i not in arrivals]
                raise TowerMismatchError(
                    "The gradient passes through %s in tower %d and not in tower %d, so the towers' losses do not depend "
                    "on it alike. %s" % (self._forward[key[0]], min(arrivals), missing[0], _ALIKE))

    def label_gradient(self):
        """Returns what tells apart the gradient calls of model functions, of passes over all towers, and all others."""
        return self._gradient_label or ("model" if current_tower() is not None else "call")

    def meet(self, place, contributions, aggregate, results, name):
        """Takes a tower's contributions and returns its stand-ins; see `meet_at`."""
        graph = tf.get_default_graph()  # a body of control flow 2 is a graph of its own
        flow = graph, control_flow_now(graph)
        if self._flow_at.setdefault(place.key, flow) != flow:
            raise TowerMismatchError(
                "Towers meet at %r, and tower %d's part lies in another loop or branch than the earlier towers'. Build "
                "the towers and take all their gradients inside the same one. tf.hessians makes a loop each time: call it once, "
                "outside of the model function, of replicas.loss or of a list of all towers' losses." % (name, place.tower))
        stand_ins = []
        for dtype, shape in results:
            # Running a stand-in that no aggregate was wired to fails by the placeholder's name, which says layer and tower.
            dtype = tf.as_dtype(dtype)
            unmet = tf.placeholder(_BITS.get(dtype, dtype), shape, name="unmet_exchange")
            stand_ins.append(_from_bits(unmet, dtype))
            self.stand_ins[stand_ins[-1].op] = place.key, len(stand_ins) - 1
        if self._gradient_label is not None:
            self._left_in_pass.extend(contribution.op for contribution in contributions)
        arrivals = self._arrivals.setdefault(place.key, {})
        arrivals[place.tower] = stand_ins, list(contributions)
        self.contributions.setdefault(place.key, {})[place.tower] = list(contributions)
        if len(arrivals) == self.num_towers:
            self._wire(place.key, name, aggregate)
        return stand_ins

    def _wire(self, key, name, aggregate):
        arrivals = self._arrivals.pop(key)
        order, first = range(self.num_towers), self.graph.version
        # A gradient function runs colocated with its forward op, which would win over the device.
        with tf.get_default_graph().colocate_with(None, ignore_existing=True), tf.device(self.aggregation_device):
            with tf.name_scope(None), tf.name_scope("cross_tower/" + name):
                per_tower = [list(map(tf.convert_to_tensor, results)) for results in aggregate([arrivals[i][1] for i in order])]
                distinct = {result.name: result for results in per_tower for result in results}
                bits = {result_name: _to_bits(result) for result_name, result in distinct.items()}
        self._aggregated.append((first, self.graph.version))
        for i in order:
            for stand_in, result in zip(arrivals[i][0], per_tower[i]):
                if result.dtype.base_dtype != stand_in.dtype:
                    raise TypeError("The aggregate of %r returned %r of %s where its result is to be of %s."
                                    % (name, result.name, result.dtype.base_dtype.name, stand_in.dtype.name))
                stand_in.op._update_input(0, bits[result.name])  # pylint: disable=protected-access


# Not int32, which TensorFlow keeps in the host's memory where a GPU computes.
_BITS = {tf.float64: tf.uint64, tf.float32: tf.uint32, tf.float16: tf.uint16, tf.bfloat16: tf.uint16}


def _to_bits(tensor):
    dtype = tensor.dtype.base_dtype
    return tf.bitcast(tensor, _BITS[dtype], name="bits") if dtype in _BITS else tensor


def _from_bits(bits, dtype):
    return tf.bitcast(bits, dtype, name="met") if dtype in _BITS else tf.stop_gradient(bits, name="met")


_ALIKE = "The model function has to build the same exchanges (synchronized layers, all_reduce, ...) in every tower."


def exchange(contributions, aggregate, results, kind="exchange", name=None):
    """Leaves this tower's contributions and returns what the aggregate of all towers' holds for it.

    Towers meet here. Outside of towers `aggregate` gets the one list of contributions and is computed where it stands.
    Gradients do not pass: what is returned is a constant to `tf.gradients`. `towers.all_reduce` and
    `towers.all_gather` are exchanges with gradients.

    Args:
      contributions: list of tensors, this tower's; the same number and dtypes in every tower.
      aggregate: a function of a list over towers of lists of contributions. Returns a list over towers of lists of
        tensors, what each tower gets. It is called once, with the aggregation device in force, when the last tower
        has come; the call that the last tower made is the one that counts.
      results: list of (dtype, shape) pairs, one for each tensor that a tower gets. Shapes may be partially known.
      kind: str, what this is, for messages.
      name: str, the name scope of the ops and the name in messages.

    Returns:
      A list of tensors, one for each pair in `results`.

    Raises:
      TowerMismatchError: (a ValueError) if this is not the exchange that tower 0 made in this turn. Towers that left
        fewer are found when the tower is complete.
      ValueError: inside control flow or in another graph than the towers'.
    """
    tower = tower_here(kind)
    with tf.name_scope(name, kind.replace(" ", "_")):
        contributions = [tf.convert_to_tensor(c) for c in contributions]
        if tower is None:
            return [tf.stop_gradient(r) for r in aggregate([contributions])[0]]
        return meet_at(next_place(kind, contributions), contributions, aggregate, results)


def tower_here(kind):
    """Returns the current tower, None outside of towers; refuses a forward pass that is built anew in a gradient pass."""
    if is_differentiating() and current_tower() is None:
        raise ValueError(
            "%s (in %r) is called while gradients of towers are built, as tf.contrib.layers.recompute_grad does: the towers "
            "can't meet there, and local statistics would be wrong. Recompute only what stands between such layers."
            % (kind, tf.get_default_graph().get_name_scope()))
    return current_tower()


def next_place(kind, contributions, shapes=None, arguments=None):
    """Returns the place in the current tower that stands for the exchange about to be made, checked against tower 0.

    Args:
      kind: str, for messages.
      contributions: list of tensors; their dtypes have to be those of tower 0.
      shapes: list of `tf.TensorShape` that have to be compatible with tower 0's; None is the contributions' own.
      arguments: dict of what else makes the exchange what it is, which has to be as in tower 0.
    """
    tower = current_tower()
    name = tower.relative(tf.get_default_graph().get_name_scope() + "/")
    given = {key: _comparable(value, tower) for key, value in (arguments or {}).items()}
    return tower.meetings.forward_place(tower.index, name.rstrip("/"), kind, [c.dtype.base_dtype for c in contributions],
                                        shapes or [c.shape for c in contributions], given)


def _comparable(value, tower):
    """Returns an argument as towers compare it: a tensor of the tower's own by its kind, one from outside by its name."""
    op = getattr(value, "op", None)
    if isinstance(op, tf.Operation):
        return "a tensor" if op.name.startswith(tower.name_scope) else op.name
    return list(value) if isinstance(value, tuple) else value


def meet_at(place, contributions, aggregate, results):
    """Leaves contributions at a place, as `exchange` does, and returns the stand-ins of its results."""
    name = place.meetings.name_of(place) + ("/gradient" * (len(place.key) - 1))
    return place.meetings.meet(place, contributions, aggregate, results, name)


def with_gradient(gradient, build, op_types):
    """Builds ops of which one gets another gradient, the same for `tf.gradients` and for every `tf.GradientTape`.

    Args:
      gradient: str, the name that `tf.RegisterGradient` gave a gradient function, one that returns a list or a tuple.
      build: a function without arguments that returns a list of tensors, the first outputs of the op.
      op_types: list of str, the types that the op may have; no other op of `build` may be of them.

    Returns:
      What `build` returns.
    """
    # Not tf.custom_gradient: wiring a stand-in while it builds its function raises "grad_fn must accept 'variables'".
    with not_recorded(), tf.get_default_graph().gradient_override_map(dict.fromkeys(op_types, gradient)):
        outputs = build()
    op = outputs[0].op

    def backward(*d_outputs):
        with tf.name_scope(op.name + "_grad"):
            return ops.get_gradient_function(op)(op, *d_outputs)

    # A tape looks gradients up by the type of an op, and knows no override.
    record.record_operation(gradient, outputs, list(op.inputs), backward)
    return outputs


def pass_with_gradient(gradient, tensors, place, detail=None, name=None):
    """Passes tensors on by an op whose gradient may meet the other towers' at a place that belongs to `place`.

    Args:
      gradient: str, see `with_gradient`; the gradient function gets at `place` and `detail` by `gradient_place`.
      tensors: list of tensors.
      place: from `next_place` or `gradient_place`; None outside of towers.
      detail: anything that the gradient function wants back.
      name: str, of the op.

    Returns:
      A list of tensors.
    """
    outputs = with_gradient(gradient, lambda: tf.identity_n(tensors, name), ["IdentityN"])
    remember_place(outputs[0].op, place, detail)
    return outputs


def remember_place(op, place, detail=None):
    """Notes with an op what its gradient function gets by `gradient_place`, see `pass_with_gradient`."""
    if not hasattr(op.graph, _ORIGINS):
        setattr(op.graph, _ORIGINS, {})
    getattr(op.graph, _ORIGINS)[op.name] = place, detail, {}


def not_recorded():
    """Keeps every `tf.GradientTape` from recording ops for the duration of a `with` block."""
    return record.stop_recording()


def is_recorded():
    """Tells whether a `tf.GradientTape` is recording ops."""
    return record.could_possibly_record()


def gradient_place(op):
    """Returns where the gradient of `op` meets those of the other towers, and the detail that was noted with `op`.

    Returns:
      (place, detail): the place is a new one for each gradient call, and None for an op outside of towers.

    Raises:
      ValueError: if `op` was not made by this process's towers, as in a graph imported from a MetaGraph.
    """
    origin = getattr(op.graph, _ORIGINS, {}).get(op.name)
    if origin is None:
        raise ValueError("No gradient passes the exchange %r: its graph was imported, and only the graph that "
                         "TowerBuilder.build made knows which towers meet there. Build the towers anew." % op.name)
    place, detail, calls = origin
    if place is not None:
        label = place.meetings.label_gradient()
        number = calls[label] = calls.get(label, -1) + 1
        place = place._replace(key=place.key + ((label, number),))
    return place, detail


def stands_at_exchange(op):
    """Tells whether `op` hands on what towers exchanged itself, beside what this tower left."""
    place, *_ = getattr(op.graph, _ORIGINS, {}).get(op.name, [None])
    return place is not None and op.inputs[0].op in place.meetings.stand_ins


def without_numbers(name):
    """Returns a name without the numbers that TensorFlow and Keras add to names that were taken."""
    return re.sub(r"_\d+(?=/|$)", "", name)


def control_flow_now(graph):
    """Returns the tf.cond or tf.while_loop (of control flow v1) that ops are being added to, or None."""
    return graph._get_control_flow_context()  # pylint: disable=protected-access


def control_flow_of(op):
    """Returns the tf.cond or tf.while_loop (of control flow v1) that an op belongs to, or None.

    The op that hands out a loop's result belongs to what the loop stands in.
    """
    flow = op._get_control_flow_context()  # pylint: disable=protected-access
    if flow is not None and flow.IsWhileContext() and any(result.op is op for result in flow.loop_exits):
        return flow.outer_context
    return flow


def rewire(op, index, tensor):
    """Makes `tensor` the input number `index` of an op that exists already."""
    op._update_input(index, tensor)  # pylint: disable=protected-access


def run_after(op, earlier):
    """Makes an op that exists already run after the ops `earlier`."""
    op._add_control_inputs(list(earlier))  # pylint: disable=protected-access


def waiting_for(op):
    """Returns the ops that wait for an op by a control dependency."""
    return op._control_outputs  # pylint: disable=protected-access


def wait_only_for(op, others):
    """Makes an op that exists already wait for no ops but `others`, besides those that its inputs come from."""
    op._remove_all_control_inputs()  # pylint: disable=protected-access
    op._add_control_inputs(list(others))  # pylint: disable=protected-access


def taken_from_outside(op):
    """Returns the tensor that an op stands for in the body of a loop, branch or function that took it in; None of other ops.

    Only of control flow 2 and tf.function, whose bodies are graphs of their own.
    """
    graph, tensor = op.graph, None
    while op.type == "Placeholder" and hasattr(graph, "captures"):
        taken = next((outside for outside, inside in graph.captures if inside.op is op), None)
        if taken is None or not isinstance(taken, tf.Tensor):
            break
        op, graph, tensor = taken.op, taken.graph, taken
    return tensor


def take_in(tensor):
    """Returns what stands for a tensor of an outer graph where ops are made now, or the tensor itself."""
    graph = tf.get_default_graph()
    return tensor if tensor.graph is graph or not hasattr(graph, "capture") else graph.capture(tensor)


def runs_onednn():
    """Tells whether TensorFlow puts oneDNN's kernels in the place of its own on CPUs."""
    return bool(test_util.IsMklEnabled())


def branch_of(op):
    """Returns (predicate, number of the branch) of the tf.cond of control flow v1 that an op stands in, one level deep.

    Returns None for an op outside of a tf.cond, in a tf.while_loop, or in a tf.cond within another one.
    """
    flow = control_flow_of(op)
    if flow is None or not flow.IsCondContext() or flow.outer_context is not control_flow_now(op.graph):
        return None
    return flow.pred, flow.branch


def forward_op_of(op):
    """Returns the op whose gradient function made `op`, or None."""
    return op._original_op  # pylint: disable=protected-access
