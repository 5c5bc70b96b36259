"""A tower's ops held against those that the model function makes of the whole batch, in pairs, from the results backwards."""
import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.op_types import BODIES
from towers.graph.private import position_of
from towers.graph.static_values import comes_to, filling_of
from towers.graph.walk import ancestors, op_of
from towers.meeting.turns import without_numbers
from towers.sharding.bodies import Bodies, is_stateful
from towers.sharding.nodes import Refused
from towers.sharding.plan.row_loops import attributes_of, join_of, own_of_turns, turns_added_up
from towers.sharding.plan.twin import Twin, TwinOp

__all__ = ["pair"]

_MOST = 1 << 20  # entries of a constant that is looked at
_MEND = "Hand the batch in with an unknown size, tf.placeholder_with_default(x, [None, ...]), and let TensorFlow loop, tf.map_fn."


def pair(outputs, items, made, whole_model, rows, layers=()):
    """Holds what a tower's results are computed of against the whole batch's, op by op, from the results backwards.

    Args:
      outputs: what the model function returned in the tower.
      items: dict from keys of collections to lists of what it put there.
      made: set of operations that it made, but for those that make variables.
      whole_model: `WholeModel`.
      rows: (own, first, total) of the batch's examples, ints; all None where its parts have several sizes.
      layers: see `layers_of`.

    Returns:
      A `Twin`.

    Raises:
      Refused: where the model function makes other ops of a batch of another size.
    """
    pairing = _Pairing(made, whole_model, rows, layers)
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

    def __init__(self, made, whole_model, rows, layers):
        self._made, self._whole = made, whole_model
        self._own_of_turns, self._varying = set(), set()
        self._own, self._first, self._total = rows
        self._twin = Twin(self._total, self._first)
        self._layers = {op: (inputs, others) for (inputs, ops), (others, _) in zip(layers, whole_model.layers) for op in ops}
        self._seen, self._stack, self._differences, self._of_unknown_size = {}, [], [], []
        self._bodies_of_whole = Bodies(are_shared=True)

    def push(self, a, b, turn=None):
        """Pairs two items: tensors, operations, or anything else, which is let be; of a turn of Python's own loop perhaps."""
        of_tower, of_whole = op_of(a), op_of(b)
        if of_tower is not None and of_whole is not None:
            self._stack.append((of_tower, of_whole, turn))
            numbers = [getattr(each, "value_index", 0) for each in (a, b)]
            is_alike = numbers[0] == numbers[1] or of_tower.type != of_whole.type or of_tower not in self._made
            if not is_alike and not self._takes_examples_apart(of_tower, of_whole, numbers, turn):
                self._differences.append((of_tower, "read by its output %d" % numbers[0], "read by its output %d" % numbers[1]))

    def _takes_examples_apart(self, a, b, numbers, turn):
        """Tells whether a turn takes its own example of what has an output for each of the tower's."""
        return (a.type == b.type and turn is not None and numbers == [turn, self._first + turn]
                and [len(a.outputs), len(b.outputs)] == [self._own, self._total])

    def run(self):
        """Returns the `Twin`."""
        while self._stack:
            a, b, turn = self._stack.pop()
            if a not in self._made:
                continue
            turn = turn if b in self._own_of_turns else None
            if a in self._seen:
                self._add_again(a, b, turn)
                continue
            self._seen[a] = b
            if turn is not None:
                self._twin.turns[a] = turn
            join = None if self._total is None else join_of(a, b, self._own, self._total)
            if join is not None:
                self._add_join(a, join, turn)
            elif a in self._layers:
                self._add_layer(a, *self._layers[a])
            elif b in self._whole.taken_in:
                self._add_same(a)
            elif a.type == "Identity" and b.type == a.inputs[0].op.type and b.type in BODIES:
                self._add_handed_on(a, b)
            elif "Const" in (a.type, b.type) and a.type != b.type and comes_to(*((b, a) if a.type == "Const" else (a, b))):
                self._add_constant(a, b)
            elif a.type != b.type or len(a.inputs) != len(b.inputs) or b in self._whole.given:
                turns = turns_added_up(b, self._total) if self._own == 1 and len(a.outputs) == 1 else None
                if turns is not None:
                    self._add_only_turn(a, turns)
                    continue
                self._differences.append((a, "a %s" % a.type, "a %s" % b.type))
            else:
                self._add(a, b, turn)
        self._differences.extend((op, "taken by itself", "added to others") for op in self._twin.sums if any(
            self._twin.turns.get(consumer) is not None for consumer in op.outputs[0].consumers()))
        self._differences.extend((a, "a %s" % a.type, "a Const") for a, b in self._of_unknown_size
                                 if not self._is_of_its_shape(a, b))
        if self._differences:
            op, of_tower, of_whole = min(self._differences, key=lambda each: position_of(each[0]))
            raise Refused("the model function makes other ops of a batch of another size: %r, %s, is %s for the "
                          "whole batch. %s" % (op.name, of_tower, of_whole, _MEND))
        return self._twin

    def _are_sizes(self, mine, other):
        """Tells whether two numbers count the tower's examples and those of the whole batch."""
        return isinstance(mine, int) and bool(self._total) and other % self._total == 0 and (
            mine == other // self._total * self._own)

    def _add_constant(self, a, b):
        """What is of one value is a constant where its size is known and small, and an op elsewhere; so is a shape."""
        dims = _dims(b.outputs[0])
        is_known = a.type == "Const" and b.type != "Shape" and dims is not None and None not in dims
        if not is_known and (a.type == "Const" or a.type == "Fill"):
            self._differences.append((a, "a %s" % a.type, "a %s" % b.type))
            return
        if not is_known:  # and its size comes of what it takes
            self._of_unknown_size.append((a, b))
        self._twin.add(a, TwinOp(a.type, [dims], np.broadcast_to(filling_of(b), dims) if is_known else None))

    def _is_of_its_shape(self, a, b):
        """Tells whether a constant of the whole batch's is the shape of what an op takes, or has it."""
        source = a.inputs[0]
        dims = self._twin.dims(source) if source.op in self._made else _dims(source)
        found = tf.get_static_value(b.outputs[0]).tolist() if a.type == "Shape" else _dims(b.outputs[0])
        return dims is not None and dims == found

    def _add_only_turn(self, a, turns):
        """A tower's only turn stands for the sum of all turns, and is none to what else takes it."""
        if not self._note_turns(a, turns, 1):
            return
        del self._seen[a]
        self._twin.sums.add(a)
        self._stack.append((a, turns[self._first].op, 0))

    def _note_turns(self, a, turns, times):
        try:
            own, constants = own_of_turns(turns, times)
        except ValueError as error:
            self._differences.append((a, "a loop over the examples", str(error)))
            return False
        self._own_of_turns |= own
        self._varying |= constants
        return True

    def _add(self, a, b, turn):
        for mine, other in zip(a.outputs, b.outputs):
            if None not in (mine.shape.rank, other.shape.rank) and mine.shape.rank != other.shape.rank:
                self._differences.append((a, "with %d axes" % mine.shape.rank, "with %d" % other.shape.rank))
                return
        attributes = list(zip(attributes_of(a), attributes_of(b)))
        if not all(mine == other or self._are_sizes(mine, other) for mine, other in attributes):
            self._differences.append((a, *("with %s" % ", ".join(map(repr, values)) for values in zip(*attributes))))
            return
        self._twin.add(a, TwinOp(b.type, [_dims(out) for out in b.outputs], _value(b)))
        if b in self._varying:
            self._twin.varying.add(a)
        for mine, other in zip(a.inputs, b.inputs):
            self.push(mine, other, turn)
        waits, of_whole = ([op for op in sorted(ops, key=position_of)] for ops in (
            [op for op in a.control_inputs if op in self._made],
            [op for op in b.control_inputs if op not in self._whole.taken_in]))
        if [op.type for op in waits] == [op.type for op in of_whole]:
            self._stack.extend((mine, other, turn) for mine, other in zip(waits, of_whole))
        if a.type in BODIES:
            self._add_bodies(a, b, turn)

    def _add_again(self, a, b, turn):
        """What several turns take is of none of them, and has to be the same one in the whole batch's."""
        turns = self._twin.turns
        if (turn is not None or a in turns) and self._seen[a] not in (b, None):
            self._differences.append((a, "made once", "made for each example"))
        if a in turns and turns[a] != turn:
            turns[a] = None

    def _add_join(self, head, join, turn):
        if not self._note_turns(head, join.of_whole, join.times):
            return
        for a, b in join.ops:
            self._seen[a], self._twin.joins[a] = b, join
            self._twin.add(a, TwinOp(b.type, [_dims(out) for out in b.outputs], None))
        for number, mine in enumerate(join.turns):
            self.push(mine, join.of_whole[self._first * join.times + number], number // join.times)
        for mine, other in join.others:
            self.push(mine, other, turn)

    def _add_handed_on(self, a, b):
        """TensorFlow hands on what a tf.while_loop returns by ops of their own, but not in a graph of a function."""
        self._twin.add(a, TwinOp(a.type, [_dims(b.outputs[a.inputs[0].value_index])], None))
        self._stack.append((a.inputs[0].op, b, None))

    def _add_bodies(self, a, b, turn):
        of_tower, of_whole = self._twin.bodies.of(a), self._bodies_of_whole.of(b)
        for mine, other in zip(of_tower, of_whole):
            effects, of_other = ([op for op in sorted(body.ops, key=position_of) if is_stateful(op)] for body in (mine, other))
            if len(mine.inputs) != len(other.inputs) or len(mine.outputs) != len(other.outputs) or len(effects) != len(of_other):
                self._differences.append((a, "with %d arguments" % len(mine.inputs), "with %d" % len(other.inputs)))
                return
            self._made |= mine.ops
            for pair_of_items in zip(mine.inputs + mine.outputs + effects, other.inputs + other.outputs + of_other):
                self.push(*pair_of_items, turn)

    def _add_layer(self, a, inputs, of_whole):
        """What a layer makes of its input follows the input's size, and which ops it takes may."""
        own, whole = _dims(inputs[0]), _dims(of_whole[0])
        self._twin.add(a, TwinOp(a.type, [whole if _dims(out) == own else _dims(out) for out in a.outputs], None))
        for pair_of_inputs in zip(inputs, of_whole):
            self.push(*pair_of_inputs)
        self._stack.extend((source.op, source.op, None) for source in a.inputs if source.op in self._layers)

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
