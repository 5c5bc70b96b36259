"""What a model function makes of the whole batch, where sizes are known while the graph is built: a twin, which is never run.

There `int(x.shape[0])`, `tf.shape(x)` and all that Python computes of them are constants, in which nothing tells a size from any
other number. So the model function is called once more, with placeholders as large as the whole batch, in a graph of its own
that takes from the user's what the model takes from outside. Op by op it is held against each tower, in
`towers.sharding.plan.pairing`: what differs is of a size.
"""
import copy
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.context import enter_tower
from towers.graph.private import captured, counting_scopes_from, new_function_graph, scope_counts
from towers.graph.walk import end_of
from towers.meeting.meetings import Meetings
from towers.meeting.turns import without_numbers
from towers.sharding.bodies import Bodies
from towers.sharding.nodes import Refused

__all__ = ["Twin", "TwinOp", "WholeModel", "build_twin", "layers_of", "noting_variables"]


class TwinOp(NamedTuple):
    """An op of the twin: its type, the shapes of its outputs, and its value where it is a constant."""
    type: str
    shapes: list
    value: object


class Twin:
    """A tower's ops beside those of one tower on the whole batch.

    Attributes:
      num_rows: int, the examples of the whole batch, or None where its parts have several sizes.
      first: int, the number of the tower's first example, or None.
      varying: set of constants that are not the same in all turns of Python's own loops over the examples.
      turns: dict from the ops of such loops to the number of the turn, one of the tower's examples.
      sums: set of the ops of a tower's only turn whose likes are added to those of other turns.
      joins: dict from ops that put such turns together to `towers.sharding.plan.row_loops.Join`.
      bodies: `Bodies`, the functions that the tower's ops call, whose ops are held against those there too.
    """

    def __init__(self, num_rows, first):
        self.num_rows, self.first, self.bodies = num_rows, first, Bodies()
        self.varying, self.turns, self.joins, self.sums = set(), {}, {}, set()
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
        return _collected(made.pop(turn)[1], graph, kwargs.get("collections"))
    known = {variable.op.name: variable for _, variable in made}

    def getter(next_getter, name, **kwargs):
        variable = known.get(name.rstrip("/"))  # an average's name ends in "/"
        if variable is not None and kwargs.get("initializer") is not None and not callable(kwargs["initializer"]):
            kwargs["dtype"] = variable.dtype.base_dtype  # under reuse TensorFlow asks for float32, whatever the value is
        found = next_getter(name, **kwargs)
        return found if variable is None else _collected(found, graph, kwargs.get("collections"))
    with graph.as_default(), counting_scopes_from(variables.scopes), tf.variable_creator_scope(creator), tf.variable_scope(
            tf.get_variable_scope(), reuse=True, custom_getter=getter, auxiliary_name_scope=False):
        given = tf.nest.map_structure(lambda leaf: _placeholder(leaf, sizes), args)
        shadow = copy.copy(tower)
        shadow.meetings = Meetings([tower.device] * 2, tower.aggregation_device)  # whose second tower never comes
        shadow.shared_updates, shadow.spans, shadow.own_examples, shadow.batch, shadow.placements = [], [], [], given, {}
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


def _collected(variable, graph, collections):
    """Puts a variable that the tower has made into the collections that the model asks for, and returns it."""
    for key in collections or ():
        if not any(variable is item for item in graph.get_collection_ref(key)):
            graph.add_to_collection(key, variable)
    return variable


def _placeholder(leaf, sizes):
    if not isinstance(leaf, tf.Tensor) or end_of(leaf) not in sizes:
        return leaf
    return tf.placeholder(leaf.dtype, [sizes[end_of(leaf)]] + leaf.shape.as_list()[1:])
