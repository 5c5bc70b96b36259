"""Whether towers are alike: compared op by op, from what they hand out and meet with, backwards.

A tower that computes something else than tower 0 is no replica, and what is averaged over towers is then the gradient of no
loss at all. Op types, attributes, constants and variables are compared, and where stand-ins and batches are taken. Names,
devices, seeds, and sizes along the batch are no differences, nor is what waits for what, nor what nothing handed out needs.
What is meant to differ is made under `towers.may_differ()`.
"""
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers.batches.rows import is_sparse
from towers.graph.functions import MADE_UP, Functions
from towers.graph.op_types import ADDS, ENTERS, HANDS_ON, VARIABLES
from towers.graph.private import taken_from_outside
from towers.graph.static_values import comes_to
from towers.graph.walk import end_of, tensors_of
from towers.meeting.turns import TowerMismatchError, without_numbers
from towers.state.lookups import looked_up

__all__ = ["check_alike"]

# Ops that hand on their first input, whatever else they do.
_HANDED_ON = HANDS_ON | ENTERS
# What data come from, for each tower its own: a model function may take them from outside of its arguments.
_DATA = frozenset(["Placeholder", "IteratorGetNext", "IteratorGetNextSync", "Split", "SplitV", "Unpack", "QueueDequeueV2",
                   "QueueDequeueManyV2", "QueueDequeueUpToV2"])
# Those that may hold the size of a batch, or as many entries as it has.
_SIZES = frozenset(["N", "num", "num_elements", "num_split", "shape", "element_shape", "output_shapes", "T", "Tin", "Tout"])

_MEND = ("Towers have to compute alike: does Python keep something between the calls of the model function (a counter, a list, a "
         "tensor), or go by the tower's index or by chance? What is meant to differ stands under `with towers.may_differ():`, or "
         "is built with alike=False.")


class _Difference(NamedTuple):
    """What differs: the position in the graph of tower 0's op, for the first to be named, and a sentence."""
    position: int
    sentence: str


def check_alike(towers, batches, contributions):
    """Raises `TowerMismatchError` where a tower computes something else than tower 0.

    Args:
      towers: list of `towers.Tower`.
      batches: list over towers of what each model function was called with, nested structures.
      contributions: list of lists over towers of lists of tensors, what the towers left where they met.
    """
    graph = tf.get_default_graph()
    positions = {op: position for position, op in enumerate(graph.get_operations())}
    functions, nodes = Functions(graph), {}
    views = [_View(tower, batch, positions) for tower, batch in zip(towers, batches)]
    for number, (tower, view) in enumerate(zip(towers[1:], views[1:]), 1):
        comparison = _Comparison(views[0], view, positions, functions, nodes, set().union(*[v.leaves for v in views[:number]]))
        comparison.compare([(towers[0].outputs, tower.outputs), *_paired_updates(towers[0], tower)]
                           + [(left[0], left[tower.context.local_index]) for left in contributions])
        if comparison.differences:
            raise TowerMismatchError("%s %s" % (min(comparison.differences).sentence, _MEND))


def _paired_updates(first, other):
    """Returns pairs of the towers' own updates, none where one tower makes more: which of them it does is its policy's."""
    own = first.own_updates, other.own_updates
    return list(zip(*own)) if len(own[0]) == len(own[1]) else []


class _View:
    """A tower as it is compared: where its ops lie in the graph, and which tensors are its batch."""

    def __init__(self, tower, batch, positions):
        self.index = tower.context.local_index
        self.start = positions[tower.ops[0]] if tower.ops else len(positions)
        self.spans = {}  # position in the graph -> the outermost span that holds it
        for span in sorted(tower.context.spans, key=lambda span: (span.first, -span.last)):
            for position in range(span.first, span.last):
                self.spans.setdefault(position, span)
        self.stand_ins = tower.context.meetings.stand_ins
        leaves = tensors_of(batch)
        # A sparse tensor's own shape too, which those of its parts do not show.
        self.shapes = [leaf.shape for leaf in leaves + list(filter(is_sparse, tf.nest.flatten(batch)))]
        self.leaves = {}
        for number, leaf in enumerate(leaves):
            self.leaves.setdefault((leaf.op, leaf.value_index), number)
        self._name_scope = tower.context.name_scope

    def by_name(self, tensors):
        """Returns the names of tensors without the tower's, in their order, and the tensors in that order: two tuples."""
        named = [(tensor.name.replace(self._name_scope, ""), tensor) for tensor in tensors]
        return tuple(zip(*sorted(named, key=lambda pair: pair[0])))


class _Comparison:
    """Two towers, compared from pairs of what they hand out backwards."""

    def __init__(self, first, other, positions, functions, nodes, leaves_before):
        self._first, self._other, self._leaves_before = first, other, leaves_before
        self._positions, self._functions, self._nodes = positions, functions, nodes
        self._same_sizes = [_known(s) for s in first.shapes] == [_known(s) for s in other.shapes]
        sizes = [shape[0] for shape in map(_known, first.shapes + other.shapes) if shape]
        self._one_is_of_one = not self._same_sizes and 1 in sizes
        self._seen, self._stack = set(), []
        self.differences = []

    def compare(self, pairs):
        """Fills `differences`."""
        for a, b in pairs:
            self._push_leaves(a, b)
        while self._stack:
            a, b = self._stack.pop()
            a, b = (self._source(*end, view) for end, view in ((a, self._first), (b, self._other)))
            if (a, b) in self._seen:
                continue
            self._seen.add((a, b))
            if self._is_of_earlier_tower(b):
                self._add(b[0], "Tower %d takes %r, which an earlier tower made of its own part of the batch." % (
                    self._other.index, b[0].name))
            elif a != b:
                self._compare(a, b)

    def _push_leaves(self, a, b):
        ends = [[end_of(leaf) for leaf in tf.nest.flatten(of_tower, expand_composites=True)] for of_tower in (a, b)]
        self._stack.extend(pair for pair in zip(*ends) if None not in pair)

    def _source(self, op, index, view):
        """Goes back through ops that hand on what they get, and to what stands outside of a loop's body."""
        while (op.type in _HANDED_ON and (op, index) not in view.leaves and op.inputs and not self._span(op, view)
               and "_gradient_op_type" not in self._node(op).attr):
            op, index = _first_input((op, index))
        outside = None if (op, index) in view.leaves else taken_from_outside(op)
        return (op, index) if outside is None else (outside.op, outside.value_index)

    def _is_of_earlier_tower(self, end):
        """Tells whether the later tower takes what an earlier one made of its part of the batch."""
        stack, seen = [end], set()
        while stack:
            end = stack.pop()
            if end in seen or end in self._other.leaves or end[0] in self._other.stand_ins or not (
                    self._first.start <= self._positions.get(end[0], -1) < self._other.start or end in self._leaves_before):
                continue
            if end in self._leaves_before:
                return True
            seen.add(end)
            stack.extend(map(end_of, end[0].inputs))
        return False

    def _span(self, op, view):
        return view.spans.get(self._positions.get(op, -1))

    def _compare(self, a, b):
        spans = self._span(a[0], self._first), self._span(b[0], self._other)
        if any(span is not None and span.key is None for span in spans):
            return
        if None not in spans and spans[0].key == spans[1].key:
            if spans[0].key not in self._seen:
                self._seen.add(spans[0].key)
                for pair in zip(spans[0].inputs, spans[1].inputs):
                    self._push_leaves(*pair)
            return
        taken = self._first.leaves.get(a), self._other.leaves.get(b)
        met = self._first.stand_ins.get(a[0]), self._other.stand_ins.get(b[0])
        if taken != (None, None) or met != (None, None):
            if taken[0] != taken[1] or met[0] != met[1]:
                self._report(a[0], b[0], "%s where tower %d has %s" % (
                    self._name(a, taken[0], met[0]), self._other.index, self._name(b, taken[1], met[1])))
            return
        self._compare_ops(a, b)

    def _compare_ops(self, a, b):
        (op, index), (other, other_index) = a, b
        are_sums = [_is_left_out_of_one(op), _is_left_out_of_one(other)] if self._one_is_of_one else [False]
        if op.type != other.type and any(are_sums):
            self._stack.append(tuple(_first_input(end) if is_sum else end for end, is_sum in zip((a, b), are_sums)))
            return
        if not self._same_sizes and (
                op.type == "Const" and comes_to(other, op) or other.type == "Const" and comes_to(op, other)):
            return
        if op.type != other.type and not self._are_calls_alike(op, other):
            self._report(op, other, "%r is of type %s, and in tower %d %r of type %s"
                         % (op.name, op.type, self._other.index, other.name, other.type))
            return
        if op.type in _DATA and self._is_outside(op, self._first) and self._is_outside(other, self._first):
            return
        if index != other_index or op is other:
            self._report(op, other, "output %d of %r is read, and in tower %d output %d of %r"
                         % (index, op.name, self._other.index, other_index, other.name))
            return
        if op.type in VARIABLES:
            self._report(op, other, "the variable %r is read, and in tower %d the variable %r"
                         % (op.name, self._other.index, other.name))
            return
        lookups = looked_up(op), looked_up(other)
        if None not in lookups and len(lookups[0]) == len(lookups[1]):
            self._stack.extend(zip(*lookups))
            return
        difference = self._difference_of_attributes(op, other)
        if difference is None and self._same_sizes and len(op.inputs) != len(other.inputs):
            difference = "%d inputs" % len(op.inputs), "%d" % len(other.inputs)
        if difference is not None:
            self._report(op, other, "%r has %s, and in tower %d %r has %s"
                         % (op.name, difference[0], self._other.index, other.name, difference[1]))
            return
        terms = [] if self._same_sizes or op.type not in ADDS else [_added_up(op), _added_up(other)]
        if terms and len(terms[0]) != len(terms[1]):  # a loop over the examples, more of them in one tower: all terms alike
            ends = [[(term.op, term.value_index) for term in of_tower] for of_tower in terms]
            self._stack.extend((ends[0][min(i, len(ends[0]) - 1)], ends[1][min(i, len(ends[1]) - 1)])
                               for i in range(max(map(len, ends))))
            return
        skipped = _seeds(op)
        inputs, others = list(op.inputs), list(other.inputs)
        if op.type == "AddN":  # tf.gradients adds up in whatever order it comes by, which is another where towers wait for others
            (names, by_name), (others_names, others_by_name) = self._first.by_name(inputs), self._other.by_name(others)
            if names == others_names:
                inputs, others = by_name, others_by_name
        if op.type == "ConcatV2":  # the axis, behind as many parts as there are examples
            inputs, others = inputs[-1:] + inputs[:-1], others[-1:] + others[:-1]
        self._stack.extend(((x.op, x.value_index), (y.op, y.value_index))
                           for i, (x, y) in enumerate(zip(inputs, others)) if i not in skipped)

    def _are_calls_alike(self, op, other):
        """Tells whether two ops call functions that compute the same, which a model function makes for each tower: Defuns."""
        names = op.type, other.type
        return all(map(self._functions.has, names)) and (
            not self._same_sizes or len(set(map(self._functions.fingerprint, names))) == 1)

    def _is_outside(self, op, first):
        """Tells whether an op was made before the towers."""
        return self._positions.get(op, -1) < first.start

    def _difference_of_attributes(self, op, other):
        """Returns what two ops of one type have in their first attribute that differs, a pair of str, or None."""
        node, of_other = (self._node(x) for x in (op, other))
        for key in node.attr:
            if key in MADE_UP or key.startswith("_") and key != "_gradient_op_type" or (
                    not self._same_sizes and (key in _SIZES or op.type == "Const")):
                continue
            mine, others = node.attr[key], of_other.attr[key]
            if mine != others and not self._is_same_value(key, mine, others):
                return tuple("%s %s" % (key, _shown(value)) for value in (mine, others))
        return None

    def _node(self, op):
        if op not in self._nodes:
            self._nodes[op] = op.node_def
        return self._nodes[op]

    def _is_same_value(self, key, mine, others):
        if key == "_gradient_op_type":  # tf.custom_gradient numbers its own
            return _without_digits(mine.s) == _without_digits(others.s)
        if mine.HasField("tensor") and others.HasField("tensor"):
            values = [tf.make_ndarray(value.tensor) for value in (mine, others)]
            return values[0].dtype == values[1].dtype and values[0].shape == values[1].shape and (
                values[0].tobytes() == values[1].tobytes() if values[0].dtype.kind in "fc" else bool(np.all(
                    values[0] == values[1])))
        functions = [[value.func] if value.HasField("func") else list(value.list.func) for value in (mine, others)]
        if functions[0] and len(functions[0]) == len(functions[1]):
            return not self._same_sizes or all(
                f.name == g.name or self._functions.fingerprint(f.name) == self._functions.fingerprint(g.name)
                for f, g in zip(*functions))
        return False

    def _name(self, end, number, met):
        if number is not None:
            return "tensor %d of its batch" % number
        if met is not None:
            return "the result of exchange %d" % met[0][0]
        return "%r, of type %s" % (end[0].name, end[0].type)

    def _report(self, op, other, sentence):
        self._add(op, "Towers 0 and %d differ: in tower 0 %s." % (self._other.index, sentence))

    def _add(self, op, sentence):
        self.differences.append(_Difference(self._positions.get(op, -1), sentence))


def _first_input(end):
    return end[0].inputs[0].op, end[0].inputs[0].value_index


def _is_left_out_of_one(op):
    """Tells whether an op is none in a tower of one example.

    It belongs to a sum over examples, as in the gradient of a broadcast, joins what was made of each of them, or gives a product
    its shape, as tf.tensordot does.
    """
    if op.type == "Reshape" and op.inputs[0].op.type == "MatMul":
        return True
    if op.type == "ConcatV2":
        return tf.get_static_value(op.inputs[-1]) == 0
    if op.type == "Reshape":
        op = op.inputs[0].op
        op = op.inputs[0].op if op.type == "Neg" else op
    if op.type != "Sum":
        return op.type == "AddN"
    axes = tf.get_static_value(op.inputs[1])
    return 0 in np.reshape(axes, -1) if axes is not None else op.inputs[1].op.type == "BroadcastGradientArgs"


def _added_up(op):
    """Returns what is added up one after the other, a list of tensors, the first one first."""
    terms = []
    while op.type in ADDS:
        terms.append(op.inputs[1])
        first, op = op.inputs[0], op.inputs[0].op
    return [first] + terms[::-1]


def _known(shape):
    return None if shape.rank is None else shape.as_list()


def _seeds(op):
    """Returns the inputs that are seeds, a set of int."""
    if "Random" not in op.type and "Stateless" not in op.type and "Shuffle" not in op.type:
        return ()
    return {i for i, argument in enumerate(op.op_def.input_arg) if "seed" in argument.name}


def _without_digits(name):
    return without_numbers(name.decode().replace("-", "_"))


def _shown(value):
    """Returns an attribute's value as an error shows it."""
    if value.HasField("tensor"):
        array = tf.make_ndarray(value.tensor)
        shown = str(array.tolist() if array.size <= 8 else array.reshape([-1])[:8].tolist()[:8]).replace("\n", " ")
        return shown if array.size <= 8 else "%s ... of shape %s" % (shown[:-1], array.shape)
    if value.HasField("type"):
        return tf.as_dtype(value.type).name
    return " ".join(str(value).split())
