"""What a model function makes of the whole batch, where sizes are known while the graph is built: a twin, which is never run.

There `int(x.shape[0])`, `tf.shape(x)` and all that Python computes of them are constants, in which nothing tells a size from any
other number. So the model function is called once more, with placeholders as large as the whole batch, in a graph of its own
that takes from the user's what the model takes from outside. Op by op it is held against each tower: what differs is of a size.
"""
import copy
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.context import enter_tower
from towers.graph_walk import ancestors, end_of, op_of
from towers.meetings import Meetings
from towers.private import captured, counting_scopes_from, new_function_graph, position_of, scope_counts
from towers.sharding.bodies import BODIES, Bodies, is_stateful
from towers.sharding.nodes import Refused
from towers.turns import without_numbers

__all__ = ["Twin", "TwinOp", "WholeModel", "build_twin", "noting_variables", "pair"]

_MOST = 1 << 20  # entries of a constant that is looked at
_MEND = "Hand the batch in with an unknown size, tf.placeholder_with_default(x, [None, ...])."


class TwinOp(NamedTuple):
    """An op of the twin: its type, the shapes of its outputs, and its value where it is a constant."""
    type: str
    shapes: list
    value: object


class Twin:
    """A tower's ops beside those of one tower on the whole batch.

    Attributes:
      num_rows: int, the examples of the whole batch, or None where its parts have several sizes.
      bodies: `Bodies`, the functions that the tower's ops call, whose ops are held against those there too.
    """

    def __init__(self, num_rows):
        self.num_rows, self.bodies = num_rows, Bodies()
        self._dims, self._values = {}, {}

    def knows(self, op):
        """Tells whether an op of the tower has its like there."""
        return not op.outputs or (op, 0) in self._dims

    def dims(self, tensor):
        """Returns the shape of a tensor in one tower on the whole batch, a list; None where that is not known."""
        return self._dims.get(end_of(tensor))

    def constant(self, op):
        """Returns the value that a constant has there, None where it is the same or not known."""
        return self._values.get(op)

    def value(self, tensor):
        """Returns the value that a tensor has there where it is a constant, else None."""
        return self._values.get(tensor.op)

    def add(self, op, of_whole):
        """Notes an op of the tower and what it is there."""
        for number, shape in enumerate(of_whole.shapes):
            self._dims[op, number] = shape
        if of_whole.value is not None:
            self._values[op] = of_whole.value

    def set_dims(self, tensor, dims):
        """Notes the shape of a part of the batch there."""
        self._dims[end_of(tensor)] = dims


class noting_variables:
    """Notes the variables that a model function makes, and the ops that make them, for the duration of a `with` block.

    Attributes:
      made: list of pairs, the name that a variable was asked for by, and the variable, in order.
      ops: set of operations.
      scopes: what `scope_counts` returned before.
    """

    def __init__(self):
        self.made, self.ops, self._scope, self.scopes = [], set(), None, scope_counts()

    def __enter__(self):
        def creator(next_creator, **kwargs):
            with tf.init_scope():  # where a variable is made that a loop's body asks for
                graph = tf.get_default_graph()
            first = graph.version
            variable = next_creator(**kwargs)
            self.ops.update(graph.get_operations()[first:])
            self.made.append((kwargs.get("name"), variable))
            return variable
        self._scope = tf.variable_creator_scope(creator)
        self._scope.__enter__()
        return self

    def __exit__(self, *error):
        return self._scope.__exit__(*error)


class WholeModel(NamedTuple):
    """A model function called for the whole batch.

    Attributes:
      outputs: what it returned.
      items: dict from keys of collections to lists of what it put there.
      taken_in: dict from ops to the tensors of the user's graph that they stand for.
      given: set of ops, the parts of the batch.
      layers: see `layers_of`.
    """
    outputs: Any
    items: dict
    taken_in: dict
    given: set
    layers: list


def layers_of(tower, first=0):
    """Returns the layers of a model function that meet the other towers' by themselves, as synchronized batch norms do.

    Args:
      tower: `TowerContext`.
      first: int, the number of its first span that is looked at.

    Returns:
      A list of pairs: the layer's inputs, the first of which it normalizes, and the set of its ops.
    """
    spans = [span for span in tower.spans[first:] if isinstance(span.key, tuple) and span.key[0] == "sync_batch_norm"]
    return [([tensor for tensor in tf.nest.flatten(span.inputs) if isinstance(tensor, tf.Tensor)],
             set(span.inputs[0].graph.get_operations()[span.first:span.last])) for span in spans]


def build_twin(model_fn, args, sizes, tower, variables, first_items):
    """Calls a model function for the whole batch, in a graph of its own.

    Args:
      model_fn: a model function.
      args: what a tower's is called with, a nested structure.
      sizes: dict from (op, number) of the parts of its batch to int, their sizes along axis 0 in the whole batch.
      tower: `TowerContext`, the first one.
      variables: `noting_variables` of the first tower's call.
      first_items: dict from keys of collections to how many items they had before that.

    Returns:
      A `WholeModel`.
    """
    graph, made = new_function_graph("whole_batch"), list(variables.made)
    for key in graph.collections:
        if key not in _OF_ALL and graph.get_collection_ref(key) is not tf.get_default_graph().get_collection_ref(key):
            del graph.get_collection_ref(key)[first_items.get(key, 0):]
    before = {key: len(graph.get_collection_ref(key)) for key in graph.collections}

    def creator(next_creator, **kwargs):
        # What tf.get_variable made is found without it, and has its scope's name.
        turn = next(turn for turn, (name, _) in enumerate(made) if without_numbers(name or "") == without_numbers(
            kwargs.get("name") or ""))
        return made.pop(turn)[1]
    known = {variable.op.name: variable for _, variable in made}

    def getter(next_getter, name, **kwargs):
        variable = known.get(name.rstrip("/"))  # an average's name ends in "/"
        if variable is not None and kwargs.get("initializer") is not None and not callable(kwargs["initializer"]):
            kwargs["dtype"] = variable.dtype.base_dtype  # under reuse TensorFlow asks for float32, whatever the value is
        return next_getter(name, **kwargs)
    with graph.as_default(), counting_scopes_from(variables.scopes), tf.variable_creator_scope(creator), tf.variable_scope(
            tf.get_variable_scope(), reuse=True, custom_getter=getter, auxiliary_name_scope=False):
        given = tf.nest.map_structure(lambda leaf: _placeholder(leaf, sizes), args)
        shadow = copy.copy(tower)
        shadow.meetings = Meetings([tower.device] * 2, tower.aggregation_device)  # whose second tower never comes
        shadow.shared_updates, shadow.spans, shadow.batch, shadow.placements = [], [], given, {}
        with enter_tower(shadow.alone()), tf.name_scope(tower.name_scope):
            try:
                outputs = model_fn(*given)
            except Exception as error:
                raise Refused("the model function can't be called with the whole batch, as one tower calls it: %s "
                              "Where it counts on the size of a tower's batch, hand the batch in with an unknown size."
                              % error) from error
    items = {key: graph.get_collection(key)[before.get(key, 0):] for key in graph.collections}
    return WholeModel(outputs, items, captured(graph), {
        leaf.op for leaf in tf.nest.flatten(given) if isinstance(leaf, tf.Tensor) and leaf.graph is graph}, layers_of(shadow))


_OF_ALL = (tf.GraphKeys.REGULARIZATION_LOSSES,)  # which tower 0's variables alone come with


def _placeholder(leaf, sizes):
    if not isinstance(leaf, tf.Tensor) or end_of(leaf) not in sizes:
        return leaf
    return tf.placeholder(leaf.dtype, [sizes[end_of(leaf)]] + leaf.shape.as_list()[1:])


def pair(outputs, items, made, whole_model, num_rows, layers=()):
    """Holds what a tower's results are computed of against the whole batch's, op by op, from the results backwards.

    Args:
      outputs: what the model function returned in the tower.
      items: dict from keys of collections to lists of what it put there.
      made: set of operations that it made, but for those that make variables.
      whole_model: `WholeModel`.
      num_rows: see `Twin`.
      layers: see `layers_of`.

    Returns:
      A `Twin`.

    Raises:
      Refused: where the model function makes other ops of a batch of another size.
    """
    pairing = _Pairing(made, whole_model, Twin(num_rows), layers)
    try:
        tf.nest.assert_same_structure(outputs, whole_model.outputs)
    except (TypeError, ValueError) as error:
        raise Refused("the model function returns another structure for the whole batch. %s" % error) from error
    for pair_of_outputs in zip(*[tf.nest.flatten(found, expand_composites=True) for found in (outputs, whole_model.outputs)]):
        pairing.push(*pair_of_outputs)
    for key, of_tower in items.items():
        of_whole = whole_model.items.get(key, [])
        for a, b in zip(of_tower, of_whole) if len(of_tower) == len(of_whole) else _of_one_name(of_tower, of_whole):
            pairing.push(a, b)
    return pairing.run()


def _of_one_name(of_tower, of_whole):
    """Returns pairs of items, in order: a synchronized layer hands out updates in the first tower alone."""
    found, others = [], iter(of_whole)
    for item in of_tower:
        for other in others:
            if None not in (op_of(item), op_of(other)) and _name(item) == _name(other):
                found.append((item, other))
                break
    return found


def _name(item):
    return without_numbers(op_of(item).name.partition("/")[2])


class _Pairing:
    """Two graphs walked in step."""

    def __init__(self, made, whole_model, twin, layers):
        self._made, self._whole, self._twin = made, whole_model, twin
        self._layers = {op: (inputs, others) for (inputs, ops), (others, _) in zip(layers, whole_model.layers) for op in ops}
        self._seen, self._stack, self._differences = {}, [], []
        self._bodies_of_whole = Bodies(are_shared=True)

    def push(self, a, b):
        """Pairs two items: tensors, operations, or anything else, which is let be."""
        a, b = op_of(a), op_of(b)
        if a is not None and b is not None:
            self._stack.append((a, b))

    def run(self):
        """Returns the `Twin`."""
        while self._stack:
            a, b = self._stack.pop()
            if a in self._seen or a not in self._made:
                continue
            self._seen[a] = b
            if a in self._layers:
                self._add_layer(a, *self._layers[a])
            elif b in self._whole.taken_in:
                self._add_same(a)
            elif a.type == "Identity" and b.type == a.inputs[0].op.type and b.type in BODIES:
                self._add_handed_on(a, b)
            elif a.type != b.type or len(a.inputs) != len(b.inputs) or b in self._whole.given:
                self._differences.append((a, "a %s" % a.type, "a %s" % b.type))
            else:
                self._add(a, b)
        if self._differences:
            op, of_tower, of_whole = min(self._differences, key=lambda each: position_of(each[0]))
            raise Refused("the model function makes other ops of a batch of another size: %r, %s, is %s for the "
                          "whole batch. %s" % (op.name, of_tower, of_whole, _MEND))
        return self._twin

    def _add(self, a, b):
        for mine, other in zip(a.outputs, b.outputs):
            if None not in (mine.shape.rank, other.shape.rank) and mine.shape.rank != other.shape.rank:
                self._differences.append((a, "with %d axes" % mine.shape.rank, "with %d" % other.shape.rank))
                return
        self._twin.add(a, TwinOp(b.type, [_dims(out) for out in b.outputs], _value(b)))
        self._stack.extend((mine.op, other.op) for mine, other in zip(a.inputs, b.inputs))
        waits, of_whole = ([op for op in sorted(ops, key=position_of)] for ops in (
            [op for op in a.control_inputs if op in self._made],
            [op for op in b.control_inputs if op not in self._whole.taken_in]))
        if [op.type for op in waits] == [op.type for op in of_whole]:
            self._stack.extend(zip(waits, of_whole))

        if a.type in BODIES:
            self._add_bodies(a, b)

    def _add_handed_on(self, a, b):
        """TensorFlow hands on what a tf.while_loop returns by ops of their own, but not in a graph of a function."""
        self._twin.add(a, TwinOp(a.type, [_dims(b.outputs[a.inputs[0].value_index])], None))
        self._stack.append((a.inputs[0].op, b))

    def _add_bodies(self, a, b):
        of_tower, of_whole = self._twin.bodies.of(a), self._bodies_of_whole.of(b)
        for mine, other in zip(of_tower, of_whole):
            effects, of_other = ([op for op in sorted(body.ops, key=position_of) if is_stateful(op)] for body in (mine, other))
            if len(mine.inputs) != len(other.inputs) or len(mine.outputs) != len(other.outputs) or len(effects) != len(of_other):
                self._differences.append((a, "with %d arguments" % len(mine.inputs), "with %d" % len(other.inputs)))
                return
            self._made |= mine.ops
            self._stack.extend((x.op, y.op) for x, y in zip(mine.inputs + mine.outputs, other.inputs + other.outputs))
            self._stack.extend(zip(effects, of_other))

    def _add_layer(self, a, inputs, of_whole):
        """What a layer makes of its input follows the input's size, and which ops it takes may."""
        own, whole = _dims(inputs[0]), _dims(of_whole[0])
        self._twin.add(a, TwinOp(a.type, [whole if _dims(out) == own else _dims(out) for out in a.outputs], None))
        for pair_of_inputs in zip(inputs, of_whole):
            self.push(*pair_of_inputs)
        self._stack.extend((source.op, source.op) for source in a.inputs if source.op in self._layers)

    def _add_same(self, a):
        """What the whole batch's model takes from the tower's is the same for it: a regularizer's of the variables."""
        for op in ancestors([a], within=self._made):
            self._seen[op] = None
            self._twin.add(op, TwinOp(op.type, [_dims(out) for out in op.outputs], None))


def _dims(tensor):
    return None if tensor.shape.rank is None else tensor.shape.as_list()


def _value(op):
    if op.type != "Const" or (op.outputs[0].shape.num_elements() or 0) > _MOST:
        return None
    return tf.get_static_value(op.outputs[0])
