"""The record of where the towers of one build meet: stand-ins that wait, and aggregates that are wired to them.

When the last tower has left its contribution, the aggregate of all is built on the aggregation device and becomes the input of
every stand-in. A backward meeting is known by its forward exchange and the number of the gradient call, never by a global
order, so towers may be differentiated in any order, more than once, and within the model function.

Gradients do not pass a stand-in: it takes the aggregate's bits as integers, so that `tf.gradients` of one tower's loss does
not even walk through the other towers' ops behind it.
"""
import contextlib
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.context import current_tower, differentiate
from towers.graph.private import control_flow_now, rewire, within_control_flow
from towers.meeting.turns import Exchange, TowerMismatchError, Turns, have_to_be_alike, without_numbers

__all__ = ["Across", "Meetings", "Place"]


class Place(NamedTuple):
    """A point of one tower where it meets the others; the same `key` in every tower."""
    meetings: "Meetings"
    tower: int
    key: tuple


class Across(NamedTuple):
    """How an exchange whose towers all get the same meets in two steps, within each worker and then once for each worker.

    Attributes:
      part: a function of a list over this worker's towers of lists of contributions, that returns the tensor that crosses, of
        one shape in every worker.
      whole: a function of these parts, stacked over workers, that returns the list of tensors that each tower gets.
      of_sum: whether `whole` is a function of the sum of the parts instead.
    """
    part: Any
    whole: Any
    of_sum: bool = False


class Meetings:
    """All exchanges of the towers of one build, forward and backward.

    Args:
      devices: list of str, the towers' devices.
      aggregation_device: str, where aggregates are computed.
      peers: `towers.workers.peers.Peers`, the other workers whose towers meet these; None where there are none.
    """

    def __init__(self, devices, aggregation_device, peers=None):
        self.graph, self.peers = tf.get_default_graph(), peers
        self.num_towers = len(devices)
        self.aggregation_device = aggregation_device
        self._control_flow = control_flow_now(self.graph)
        self.turns = Turns(self.num_towers)  # of the exchanges of the forward pass
        self._arrivals = {}  # key -> {tower: (stand-ins, contributions and what is known)}, until the last tower comes
        self.contributions = {}  # key -> {tower: what it left}
        self.stand_ins = {}  # op of a stand-in -> (key, number of the result)
        self._aggregated = []  # positions in the graph of the first and behind the last op of each aggregate
        self._flow_at = {}  # key -> the graph and control flow that its first tower came in
        self._gradient_label = None
        self._left_in_pass = []  # the ops whose results towers left in the gradient pass under way, in order
        self._num_gradient_passes = 0
        self.gradient_checks = []  # functions of the list of ops that a gradient pass made

    def aggregated(self):
        """Returns the ops of all aggregates, a set: they were made within the last tower, and belong to none."""
        ops = self.graph.get_operations()
        return {op for first, last in self._aggregated for op in ops[first:last]}

    @contextlib.contextmanager
    def where_built(self):
        """Builds ops beside the towers, whatever loop or control dependencies the caller stands in."""
        with self.graph.as_default(), within_control_flow(self._control_flow):
            yield

    def forward_place(self, tower, name, kind, dtypes, shapes, arguments):
        """Returns the `Place` of a tower's next exchange; raises where it is not tower 0's exchange of that turn."""
        graph = tf.get_default_graph()
        if graph is not self.graph or control_flow_now(graph) is not self._control_flow:
            raise ValueError(
                "%s %r stands inside a tf.cond, a tf.while_loop, a tf.function or another graph. Towers can meet only "
                "where every tower comes each step: move it out, or choose between its results with tf.where."
                % (kind, name))
        return Place(self, tower, (self.turns.take(tower, Exchange(name, kind, tuple(dtypes), tuple(shapes), arguments)),))

    def name_of(self, place):
        """Returns the name of the layer that a place belongs to, relative to its tower."""
        return self.turns[place.key[0]].name

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
                    "on it alike. %s" % (self.turns[key[0]], min(arrivals), missing[0], have_to_be_alike(self.turns[key[0]])))

    def label_gradient(self):
        """Returns what tells apart the gradient calls of model functions, of passes over all towers, and all others."""
        return self._gradient_label or ("model" if current_tower() is not None else "call")

    def meet(self, place, contributions, aggregate, results, name, known=(), across=None):
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
        arrivals[place.tower] = stand_ins, list(contributions) + list(known)
        self.contributions.setdefault(place.key, {})[place.tower] = list(contributions)
        if len(arrivals) == self.num_towers:
            self._wire(place.key, name, aggregate, across)
        return stand_ins

    def _wire(self, key, name, aggregate, across):
        arrivals = self._arrivals.pop(key)
        order, first = range(self.num_towers), self.graph.version
        # A gradient function runs colocated with its forward op, which would win over the device.
        with tf.get_default_graph().colocate_with(None, ignore_existing=True), tf.device(self.aggregation_device):
            with tf.name_scope(None), tf.name_scope("cross_tower/" + name):
                left = [arrivals[i][1] for i in order]
                found = aggregate(left) if self.peers is None else self.peers.meet(
                    self._purpose(key, name), left, aggregate, across, self.turns[key[0]].shapes if len(key) == 1 else None)
                per_tower = [list(map(tf.convert_to_tensor, results)) for results in found]
                distinct = {result.name: result for results in per_tower for result in results}
                bits = {result_name: _to_bits(result) for result_name, result in distinct.items()}
        self._aggregated.append((first, self.graph.version))
        for i in order:
            for stand_in, result in zip(arrivals[i][0], per_tower[i]):
                if result.dtype.base_dtype != stand_in.dtype:
                    raise TypeError("The aggregate of %r returned %r of %s where its result is to be of %s."
                                    % (name, result.name, result.dtype.base_dtype.name, stand_in.dtype.name))
                rewire(stand_in.op, 0, bits[result.name])

    def _purpose(self, key, name):
        """Returns what a meeting is known by in every worker, a tuple of str and int."""
        passes = [part for label in key[1:] for part in label]
        return (self.turns[key[0]].kind, key[0], without_numbers(name), *passes)


# Not int32, which TensorFlow keeps in the host's memory where a GPU computes.
_BITS = {tf.float64: tf.uint64, tf.float32: tf.uint32, tf.float16: tf.uint16, tf.bfloat16: tf.uint16}


def _to_bits(tensor):
    dtype = tensor.dtype.base_dtype
    return tf.bitcast(tensor, _BITS[dtype], name="bits") if dtype in _BITS else tensor


def _from_bits(bits, dtype):
    return tf.bitcast(bits, dtype, name="met") if dtype in _BITS else tf.stop_gradient(bits, name="met")
