"""Functions that ops call, carried out by their plans: branches and loops of control flow 2 made anew, calls inlined.

What an op calls can't be changed where it is. So its functions' ops are made once more, with other inputs, in a new tf.cond,
tf.switch_case or tf.while_loop, or in the place of a call. What towers have to meet about is made outside, in the tower's own
graph, and taken in; within, no towers meet.
"""
import tensorflow.compat.v1 as tf

from towers.graph.walk import end_of, writes_of
from towers.sharding.bodies import is_stateful
from towers.sharding.nodes import AsPartial, Numbered, OwnRows, Refused, Replicated, ShapeOf
from towers.sharding.placements import Replicate
from towers.sharding.rules.control_flow.inner import READS, Carried, is_counted, is_made_within

__all__ = ["carry_out"]


def carry_out(conversions, carried, op, inputs):
    """Returns the outputs of an op of the tower's graph, of functions that are carried out by their plans.

    Args:
      conversions: `Conversions` of the tower.
      carried: `Carried`.
      op: the operation.
      inputs: list of tensors, what it takes by now.
    """
    waits = [conversions.in_place_of.get(earlier, earlier) for earlier in op.control_inputs]
    site = _Site(conversions, tf.get_default_graph(), op.name + "/whole_batch/", waits)

    def outside_of(k, want=None):
        return inputs[k] if want is None else conversions.converted(op.inputs[k], want)
    return _built(site, carried, op, inputs, outside_of, True, conversions.made)


class _Site:
    """Where what is needed outside is made.

    Attributes:
      conversions: `Conversions` of the tower.
      graph: the tower's graph.
      scope: str, for the names of ops.
      waits: list of the ops that what reads a variable waits for.
    """

    def __init__(self, conversions, graph, scope, waits):
        self.conversions, self.graph, self.scope, self.waits = conversions, graph, scope, waits


def _built(site, carried, op, inputs, outside_of, is_in_tower, made):
    """Returns the outputs of an op, made anew where anything changes.

    Args:
      site: `_Site`.
      carried, op, inputs: see `carry_out`; the inputs are where the op is being made.
      outside_of: a function of the number of an input, and of what it is wanted as, that returns it outside of all branches and
        loops.
      is_in_tower: whether the op is being made in the tower's own graph.
      made: a function of an op and inputs that returns the outputs of an op like it.
    """
    is_call = op.type.endswith("Call")
    is_same = not carried.changes and all(_is_like(new, old) for new, old in zip(inputs, op.inputs))
    if is_in_tower and op.type.endswith("While") and any(new is not old for new, old in zip(inputs, op.inputs)):
        is_same = False  # TensorFlow knows of no inputs to be replaced where tf.gradients has added some
    is_branch = not is_call and not op.type.endswith("While")
    alone = _without_effects(carried) if is_branch and any(writes_of(inner.body.ops) for inner in carried.inners) else []
    is_same = is_same and not alone
    if is_same and (is_in_tower or not is_call):
        return made(op, inputs)
    if not is_in_tower and any(_counts_examples(inner) for inner in carried.inners):
        with site.graph.as_default(), tf.control_dependencies(None):
            site.conversions.batch_count()
    if is_call:
        return _call(site, carried, op, inputs, outside_of, is_in_tower)
    if is_in_tower and any(_counts_examples(inner) for inner in carried.inners):
        site.conversions.batch_count()
    if op.type.endswith("While"):
        return _loop(site, carried, op, inputs, outside_of)
    return _branches(site, carried, op, inputs, outside_of, alone)


def _is_like(new, old):
    """Tells whether a tensor is as much as another one for a function that took the other one."""
    if old.shape.rank is None:
        return True
    return new.shape.rank == old.shape.rank and all(
        theirs is None or mine == theirs for mine, theirs in zip(new.shape.as_list(), old.shape.as_list()))


def _counts_examples(inner):
    """Tells whether something is made within a function of how many examples there are."""
    wants = [(inner.body.outputs[k], want) for k, want in inner.returns.items()]
    for op, decision in inner.plan.decisions.items():
        wants += [(op.inputs[k], want) for k, want in decision.wants.items()]
        if decision.own or isinstance(decision.instead, Carried) and any(map(_counts_examples, decision.instead.inners)):
            return True
    return any(not isinstance(inner.placement(tensor), Replicate) or isinstance(want, (AsPartial, Numbered, OwnRows, ShapeOf))
               for tensor, want in wants if is_made_within(inner, tensor, want))


def _call(site, carried, op, inputs, outside_of, is_in_tower):
    function = _Function(site, carried.inners[0], outside_of, is_in_tower)
    found = function.run(inputs)
    if function.effects:  # which a call has whatever is asked of it
        site.conversions.in_place_of[op] = tf.group(*function.effects)
        with tf.control_dependencies(function.effects):
            found = [tf.identity(tensor) for tensor in found]
    return found


def _branches(site, carried, op, inputs, outside_of, alone):
    functions = [_Function(site, inner, lambda k, want=None: outside_of(k + 1, want), False) for inner in carried.inners]
    every = list(range(len(op.outputs)))
    if not alone:
        return _chosen(site, op, functions, inputs, every, True)
    # What is written is alike in all towers, and one of them writes it; what gradients pass through is each tower's own.
    written = _chosen(site, op, functions, inputs, [k for k in every if k not in alone], True)
    with tf.control_dependencies([site.conversions.in_place_of[op]]):
        kept = dict(zip(alone, _chosen(site, None, functions, inputs, alone, False)))
    rest = iter(written)
    return [kept[k] if k in kept else next(rest) for k in every]


def _chosen(site, op, functions, inputs, numbers, has_effects):
    """Returns some outputs of a tf.cond or tf.switch_case of functions."""
    def branch(function):
        def run():
            found = function.run(inputs[1:], numbers, has_effects)
            return found if found else tf.group(*function.effects)
        return run
    if inputs[0].dtype == tf.bool:
        found = tf.cond(inputs[0], *map(branch, functions))
    else:
        found = tf.switch_case(inputs[0], list(map(branch, functions)))
    found = tf.nest.flatten(found)
    if op is not None:
        _note(site, op, found)
    return found if numbers else []


def _without_effects(carried):
    """Returns the numbers of outputs that are computed of nothing that their branch draws, or writes and reads, a list."""
    def is_free(body, number):
        written = {variable for variables in writes_of(body.ops).values() for variable in variables}
        sources = _sources([body.outputs[number]])
        return not any(each in written or is_stateful(each) and each.type not in READS for each in sources)
    bodies = [inner.body for inner in carried.inners]
    return [number for number in range(len(bodies[0].outputs)) if all(is_free(body, number) for body in bodies)]


def _loop(site, carried, op, inputs, outside_of):
    varying = sorted(carried.inners[1].varying)

    def outside(k, want=None):
        if k in varying:
            raise Refused("towers would have to meet about %r in the turns of %r" % (
                op.inputs[k].name, op.name))
        return outside_of(k, want)
    test, turn = (_Function(site, inner, outside, False) for inner in carried.inners)

    def all_of(state):
        found = list(inputs)
        for k, tensor in zip(varying, state):
            found[k] = tensor
        return found

    def one_turn(*state):
        found = turn.run(all_of(state))
        for k, shape in zip(varying, invariants):
            if found[k].shape.is_compatible_with(shape) and found[k].dtype != tf.variant:
                found[k].set_shape(shape)
        return [found[k] for k in varying]
    invariants = [_invariant(op, k, inputs[k]) for k in varying]
    found = tf.while_loop(lambda *state: test.run(all_of(state))[0], one_turn, [inputs[k] for k in varying], invariants,
                          parallel_iterations=op.get_attr("parallel_iterations"), return_same_structure=True)
    _note(site, op, found)
    return all_of(found)


def _invariant(op, k, now):
    """Returns the static shape that what a loop hands on has in all turns."""
    shape = tf.TensorShape(op.get_attr("output_shapes")[k]) if op.get_attr("output_shapes") else op.inputs[k].shape
    if shape.rank is None or now.shape.rank != shape.rank:
        return tf.TensorShape(None) if now.dtype != tf.variant else now.shape
    return tf.TensorShape([None if old is None else new for old, new in zip(shape.as_list(), now.shape.as_list())])


def _note(site, op, found):
    """Notes what stands in the place of an op for those that wait for it."""
    for made in found[:1]:
        site.conversions.in_place_of[op] = made.op if isinstance(made, tf.Tensor) else made


class _Function:
    """A function's ops, made once more.

    Args:
      site: `_Site`.
      inner: `Inner`.
      outside_of: see `_built`.
      is_in_tower: whether the ops are made in the tower's own graph.

    Attributes:
      effects: list of the ops made that have state.
    """

    def __init__(self, site, inner, outside_of, is_in_tower):
        self._site, self._inner, self._outside_of, self._is_in_tower = site, inner, outside_of, is_in_tower
        self._numbers = {end_of(tensor): k for k, tensor in enumerate(inner.body.inputs)}
        self._inside, self._outside, self._ops, self._mine = {}, {}, {}, frozenset(inner.plan.order)
        self._has_effects, self.effects = True, []
        self._conversions_outside = self._conversions(self._out, True)
        self._conversions_inside = None

    def run(self, inputs, numbers=None, has_effects=True):
        """Makes the ops where ops are being made now.

        Args:
          inputs: list of tensors.
          numbers: list of int, the outputs that are wanted; None is all.
          has_effects: whether ops are made that the outputs are not computed of.

        Returns:
          A list of tensors.
        """
        outputs = self._inner.body.outputs
        numbers = list(range(len(outputs))) if numbers is None else numbers
        self._inside = {end_of(tensor): now for tensor, now in zip(self._inner.body.inputs, inputs)}
        self._ops, self._has_effects, self.effects = {}, has_effects, []
        self._conversions_inside = self._conversions(self._in, self._is_in_tower)
        computed_of = self._mine if has_effects else _sources([outputs[k] for k in numbers])
        for op in self._inner.plan.order:
            if op in computed_of and (not op.outputs or (op, 0) not in self._numbers):
                self._visit(op, True)
        return [self._wanted(outputs[k], self._inner.returns.get(k), True) for k in numbers]

    def _conversions(self, now, may_meet):
        def within(op, converted):
            return [converted[k] if k in converted else now(tensor) for k, tensor in enumerate(op.inputs)]

        def copied(op, inputs):
            return list(self._made(op, inputs).outputs)
        return self._site.conversions.for_function(
            self._inner.plan, now, within, copied, lambda op, inputs, flow: self._made(op, inputs), self._taken_whole, may_meet)

    def _taken_whole(self, tensor):
        """Returns the whole batch's of a size that the function takes; None for others."""
        k = self._numbers.get(end_of(tensor))
        if k is None:
            return None
        with self._site.graph.as_default(), tf.control_dependencies(None):
            return self._outside_of(k, Replicated())

    def _in(self, tensor):
        return self._inside[end_of(tensor)] if tensor.op in self._mine else self._site.conversions.now(tensor)

    def _out(self, tensor):
        """Returns a tensor of the function outside of all branches and loops."""
        end = end_of(tensor)
        if self._is_in_tower or tensor.op not in self._mine:
            return self._in(tensor)
        if end not in self._outside:
            if end in self._numbers:
                self._outside[end] = self._outside_of(self._numbers[end])
            else:
                waits = self._site.waits if tensor.op.type in READS else []
                with self._site.graph.as_default(), tf.control_dependencies(None), tf.control_dependencies(waits), tf.name_scope(
                        self._site.scope):
                    self._visit(tensor.op, False)
        return self._outside[end]

    def _wanted(self, tensor, want, is_inside):
        """Returns a tensor as it is wanted, inside or outside."""
        if want is None:
            return self._in(tensor) if is_inside else self._out(tensor)
        if is_inside and (self._is_in_tower or is_made_within(self._inner, tensor, want)):
            return self._conversions_inside.converted(tensor, want)
        with self._site.graph.as_default(), tf.control_dependencies(None):
            return self._conversions_outside.converted(tensor, want)

    def _visit(self, op, is_inside):
        decision = self._inner.plan.decisions.get(op)
        stands = self._inside if is_inside else self._outside
        is_met = decision is not None and _meets(self._inner, decision)
        if is_inside and not self._is_in_tower and (is_met or op.type in READS and not self._has_effects):
            found = [self._out(output) for output in op.outputs]
        else:
            wants = {} if decision is None else decision.wants
            inputs = [self._wanted(tensor, wants.get(k), is_inside) for k, tensor in enumerate(op.inputs)]
            found = self._decided(op, decision, inputs, is_inside)
        for number, tensor in enumerate(found):
            stands[op, number] = tensor

    def _decided(self, op, decision, inputs, is_inside):
        if decision is None:
            return list(self._made(op, inputs).outputs)
        conversions = self._conversions_inside if is_inside else self._conversions_outside
        if isinstance(decision.instead, Carried):
            def outside_of(k, want=None):
                return self._wanted(op.inputs[k], want or decision.wants.get(k), False)
            found = _built(self._site, decision.instead, op, inputs, outside_of,
                           self._is_in_tower or not is_inside, lambda op, inputs: list(self._made(op, inputs).outputs))
            self._note_effect(op, self._site.conversions.in_place_of.get(op))
        elif decision.instead is not None:
            found = list(decision.instead(conversions, op, inputs))
            if any(tensor is None for tensor in found):
                own = self._made(op, inputs).outputs
                found = [own[number] if tensor is None else tensor for number, tensor in enumerate(found)]
        else:
            found = list(self._made(op, inputs).outputs)
        for number, rows in decision.own.items():
            found[number] = conversions.own_rows(found[number], rows)
        return found

    def _made(self, op, inputs):
        """Makes an op like one of the function's where ops are being made now."""
        gradient = op.node_def.attr["_gradient_op_type"].s if "_gradient_op_type" in op.node_def.attr else b""
        if gradient.startswith(b"CustomGradient"):
            raise Refused("%r belongs to a tf.custom_gradient within a function, branch or loop whose ops "
                          "have to be made anew. Call it outside." % op.name)
        graph = tf.get_default_graph()
        attributes = {key: value for key, value in op.node_def.attr.items() if key not in ("_class", "_output_shapes")}
        waits = [self._ops[earlier] for earlier in op.control_inputs if earlier in self._ops]
        waits = [earlier for earlier in waits if earlier.graph is graph]
        with graph.colocate_with(None, ignore_existing=True), tf.device(op.device), tf.control_dependencies(waits):
            made = graph.create_op(op.type, inputs, [output.dtype for output in op.outputs],
                                   input_types=[tensor.dtype for tensor in op.inputs], name=op.name, attrs=attributes,
                                   op_def=op.op_def)
        self._tell_shapes(op, made)
        self._note_effect(op, made)
        return made

    def _note_effect(self, op, made):
        if made is not None:
            self._ops[op] = made
            if is_stateful(op) and op.type not in READS:
                self.effects.append(made)

    def _tell_shapes(self, op, made):
        """Tells an op what is known of its shapes, and TensorFlow does not find by itself."""
        decision = self._inner.plan.decisions.get(op)
        for number, (old, new) in enumerate(zip(op.outputs, made.outputs)):
            if new.shape.is_fully_defined() or old.shape.rank is None or decision is not None and decision.own:
                continue
            dims = self._conversions_outside.dims_of(old)
            if dims is not None and new.shape.is_compatible_with(dims):
                new.set_shape(dims)


def _sources(tensors):
    """Returns the ops that tensors are computed of, a set."""
    seen, stack = set(), [tensor.op for tensor in tensors]
    while stack:
        op = stack.pop()
        if op not in seen:
            seen.add(op)
            stack.extend(tensor.op for tensor in op.inputs)
    return seen


def _meets(inner, decision):
    """Tells whether towers meet in an op itself."""
    if decision.instead is not None and not isinstance(decision.instead, Carried) and decision.meets:
        return True
    return any(not is_counted(inner, rows) for rows in decision.own.values())
