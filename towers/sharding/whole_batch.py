"""`whole_batch`: what a model function computes of its batch becomes the whole batch's.

The model function is called as it is, and makes its ops of the tower's own examples. Then placements are carried through these
(`propagation`), which changes nothing and makes a plan; the plan is held against tower 0's, and carried out (`rewriting`).
"""
import functools
import re
import weakref
from typing import Callable, Pattern, Union

import tensorflow.compat.v1 as tf

from towers.api.annotations import ModelFn
from towers.context import Span, current_tower, enter_tower, may_differ
from towers.graph.inner_training import refuse_training
from towers.graph.private import is_recorded, position_of, without_intermediates
from towers.graph.walk import end_of
from towers.meeting.turns import TowerMismatchError
from towers.sharding.nodes import Refused
from towers.sharding.placements import Own
from towers.sharding.plan.facts import Facts
from towers.sharding.plan.given import Added, Given, without_size
from towers.sharding.plan.gradient_functions import gradient_check
from towers.sharding.plan.pairing import pair
from towers.sharding.plan.propagation import propagate_with_turns
from towers.sharding.plan.twin import build_twin, layers_of, noting_variables
from towers.sharding.report import described, drawn, log_meetings, warn_of_large_gathers
from towers.sharding.rewrite.outputs import Outputs
from towers.sharding.rewrite.rewriting import Rewriting
from towers.sharding.rewrite.writes import alike_writes, leave_to_first
from towers.sharding.rules.table import RULES

__all__ = ["Kernels", "plan_alone", "scope_filter", "whole_batch", "with_kernels"]


def whole_batch(model_fn: ModelFn, only: Union[str, Pattern, Callable[[str], bool], None] = None) -> ModelFn:
    """Makes whatever a model function computes of its batch that of the whole batch, however it is written.

    Batch norms and other statistics, masked means, dice, contrastive losses, the hardest examples, centers, codebooks,
    penalties on
    slopes: what one tower would compute of all examples, the towers do. Each tensor of a tower gets a placement, which says what
    it has to do with the whole batch's (`towers.sharding.placements`); where an op wants another one than its input has, towers
    meet there, forward and in each gradient. An ordinary loss, a mean over examples, needs none: not an op is added.

    The model function sees one tower: `current_tower().num_towers` is 1, and what it exchanges itself comes back as it is.

    Axis 0 of each part of the batch of rank 1 or more holds the examples. Draws with the batch in their shape are each tower's
    own, others tower 0's for all. Writes of variables write what one tower would. A "weight" beside the loss is not needed, and
    not looked at. With one tower, and outside of towers, the model function is called as it is.

    Args:
      model_fn: a model function, see `TowerBuilder.build`.
      only: what to make the whole batch's: a regular expression that `re.search` finds in the scope of the ops where towers would
        meet, or a function of the scope that returns a bool. None is all. Elsewhere a tower keeps what it computes of its own
        examples.

    Returns:
      A model function. Its attribute `meetings`, a list of `towers.sharding.Meeting`, says where the towers of the last build
      meet, for what, and how many bytes each leaves a step; that is logged too. Its attribute `report` is a str with a line for
      each op, its placement, and where towers meet. It raises, while the graph is built:
      ValueError: for an op that has no exact form, by its name, with the mend.
      TowerMismatchError: (a ValueError) where towers would meet otherwise than tower 0.

    Example:

        replicas = builder.build(towers.whole_batch(model_fn), batch)
    """
    return with_kernels(model_fn, scope_filter(model_fn, only), Kernels)


class Kernels:
    """What computes some ops of a tower otherwise than the rules of the table let it; here, none.

    Args:
      tower: `TowerContext`.
      ops: set of the tower's ops.

    Attributes:
      rules: dict from types of ops to `towers.sharding.rules.table.Rule`.
    """
    rules = RULES

    def __init__(self, tower, ops):
        pass

    def planned(self, plan):
        """Takes the tower's `towers.sharding.plan.propagation.Plan`, before it is carried out."""

    def carried_out(self):
        """Is called when the plan has been carried out."""

    def log(self, meetings):
        """Logs, of the first tower, where towers meet."""
        log_meetings(meetings)


def with_kernels(model_fn, only, kernels):
    """Returns a model function as `whole_batch` does.

    Args:
      model_fn: a model function.
      only: a function of a scope, or None.
      kernels: `Kernels`, or a class derived from it.
    """
    builds = weakref.WeakKeyDictionary()  # meetings of a build -> `_Build`

    def of_whole_batch(*args, **kwargs):
        tower = current_tower()
        if tower is None or tower.num_towers == 1:
            return model_fn(*args, **kwargs)
        build = builds.setdefault(tower.meetings, _Build(kernels))
        outputs, meetings, report, made = build.call(lambda args, kwargs: model_fn(*args, **kwargs), (args, kwargs), tower, only,
                                                     getattr(model_fn, "of_any_size", False))
        if tower.is_first:
            of_whole_batch.meetings, of_whole_batch.report, of_whole_batch.kernels = meetings, report, made
            made.log(meetings)
        return outputs

    if hasattr(model_fn, "__name__"):
        functools.update_wrapper(of_whole_batch, model_fn)
    of_whole_batch.meetings, of_whole_batch.report = [], ""
    return of_whole_batch


def plan_alone(model_fn, args, kwargs, tower, only, kernels):
    """Calls a model function in the only tower, and finds out what would become of its ops in one of several.

    Returns:
      The outputs, and the `Kernels`; None for these where several towers would be refused.
    """
    added = Added(tf.get_default_graph(), tower)
    outputs = model_fn(*args, **kwargs)
    try:
        batch = Given((args, kwargs), tower)
        needed = added.needed(outputs)
        made = kernels(tower, needed)
        is_chosen = only and (lambda op: only(_scope_of(op, tower)))
        made.planned(propagate_with_turns(needed, functools.partial(
            Facts, batch.placements, rules=made.rules, is_chosen=is_chosen)))
    except Refused:
        return outputs, None
    return outputs, made


def scope_filter(model_fn, only):
    """Returns what chooses scopes, a function of one or None, and checks the arguments of `whole_batch`."""
    if not callable(model_fn):
        raise TypeError("model_fn has to be a model function, not %r." % (model_fn,))
    if only is None or callable(only):
        return only
    try:
        return re.compile(only).search
    except TypeError as error:
        raise TypeError("`only` has to be a pattern, or a function of a scope, not %r." % (only,)) from error
    except re.error as error:
        raise ValueError("`only` is no regular expression: %r, %s." % (only, error)) from error


class _Build:
    """What the towers of one build have in common: for each call of the model function, the twin and the first tower's plan."""

    def __init__(self, kernels):
        self._twins, self._plans, self._calls, self._chosen, self._sizes = {}, {}, {}, {}, {}
        self._kernels = kernels

    def call(self, model_fn, args, tower, only, of_any_size):
        """Calls a model function in a tower: outputs, meetings, report and kernels, all that it computes the whole batch's.

        Args:
          model_fn: a function of the structures in `args`.
          args: a tuple of structures, the tower's batch.
          tower: `TowerContext`.
          only: a function of a scope, or None.
          of_any_size: whether the model function must not be called for the whole batch, and sees no sizes.
        """
        if is_recorded():
            raise Refused("a tf.GradientTape records the model function, and its gradients would be of each tower's own. Take "
                          "them by towers.minimize or tf.gradients, outside of the tape.")
        turn = self._calls[tower.index] = self._calls.get(tower.index, -1) + 1
        added = Added(tf.get_default_graph(), tower)
        batch = Given(args, tower)
        if batch.whole_sizes is None or of_any_size:  # then Python code must not see the tower's sizes either
            with may_differ():
                args = tf.nest.map_structure(without_size, args)
            batch = Given(args, tower)
        spans = len(tower.spans)
        alone = tower.alone()
        with noting_variables() as variables, enter_tower(alone), without_intermediates():
            outputs = model_fn(*args) if batch.whole_sizes is None else _explained(model_fn, args, tower)
        tower.asked = alone.asked
        refuse_training(added.ops(), added.items().get(tf.GraphKeys.TRAIN_OP, ()) if tower.asked is None else ())
        made, made_here, layers, twin = added.ops(), tf.get_default_graph().get_operations(), {}, None
        for inputs, ops in layers_of(tower, spans):
            layers.update(dict.fromkeys(ops, inputs[0]))
        if batch.whole_sizes is not None:
            if turn not in self._twins:
                self._twins[turn] = build_twin(model_fn, args, batch.whole_sizes, tower, variables, added.first_items)
            twin = pair(outputs, added.items(), set(made) - variables.ops, self._twins[turn],
                        (batch.own, batch.first, batch.total), layers_of(tower, spans))
            # What puts the turns of Python's own loops together takes as many as the tower has examples.
            tower.spans.extend(Span(place, place + 1, None, ()) for place, op in enumerate(made_here) if op in twin.joins)
            for leaf in batch.leaves:
                twin.set_dims(leaf, [batch.whole_sizes[end_of(leaf)]] + leaf.shape.as_list()[1:])
        needed = added.needed(outputs)
        let_be = variables.ops.union(added.regularizers(batch), layers)
        unknown = [op for op in needed if twin is not None and op not in let_be and not twin.knows(op)]
        if unknown:
            unknown.sort(key=lambda op: (op.type == "Const", position_of(op)))
            raise Refused("the model function makes %r in a tower, and nothing like it for the whole batch. Hand "
                          "the batch in with an unknown size, tf.placeholder_with_default(x, [None, ...])." % unknown[0].name)
        if twin is not None:
            let_differ = {op for span in tower.spans[spans:] if span.key is None for op in made_here[span.first:span.last]}
            sizes = tuple(tf.dimension_value(leaf.shape[0]) for leaf in batch.leaves)
            self._check_sizes((turn, sizes), set(needed) - let_be - let_differ, twin, tower)
        given = dict(batch.placements)
        given.update(((op, 0), Own()) for op in tower.meetings.stand_ins if op in needed and op not in layers)
        of_each = {op for first, last in tower.own_examples for op in made_here[first:last]}
        kernels = self._kernels(tower, needed)
        plan = propagate_with_turns(needed, functools.partial(
            Facts, given, twin, batch.own, layers=layers, of_each=of_each, rules=kernels.rules,
            is_chosen=only and self._choice(turn, needed, only, tower)))
        kernels.planned(plan)
        writes = alike_writes(plan)
        tower.alike_writes.update(writes)
        self._check_alike(turn, described(plan, tower, twin and twin.turns), tower)
        report = drawn(plan, tower) if tower.is_first else ""  # before inputs are others
        rewriting = Rewriting(tower, plan, twin, batch.like, batch.own, batch.first)
        rewriting.carry_out()
        if plan.own_gradients.ops:
            tower.meetings.gradient_checks.append(gradient_check(plan, rewriting.now))
        kernels.carried_out()
        warn_of_large_gathers(rewriting.conversions.meetings, tower)
        added.replace(rewriting.now)
        outputs = Outputs(rewriting, plan, batch, tower).of(outputs)
        tower.examined.update(added.ops())
        if writes and not tower.is_first:
            leave_to_first(writes, set(added.ops()), added.results(outputs))
        return outputs, rewriting.conversions.meetings, report, kernels

    def _choice(self, turn, ops, only, tower):
        """Returns a function of an op that tells whether it is chosen: where its like in tower 0 is, whatever its number."""
        ops = sorted(ops, key=position_of)
        chosen = [bool(only(_scope_of(op, tower))) for op in ops]
        first = self._chosen.setdefault(turn, chosen)
        return {op for op, is_chosen in zip(ops, first if len(first) == len(chosen) else chosen) if is_chosen}.__contains__

    def _check_sizes(self, turn_and_sizes, ops, twin, tower):
        """Holds numbers, of which some are of the tower's sizes, against those of an earlier tower of these sizes."""
        mine = {tower.relative(op.name): tf.get_static_value(op.outputs[0]) for op in ops
                if twin.constant(op) is not None and twin.constant(op).dtype.kind in "iuf"}
        first = self._sizes.setdefault(turn_and_sizes, mine)
        for name in sorted(mine.keys() & first.keys()):
            if mine[name].tobytes() != first[name].tobytes():
                raise TowerMismatchError(
                    "towers.whole_batch: towers of as many examples differ: %r has value %s, and in tower %d value %s. The model "
                    "function has to build the same each time." % (name, first[name], tower.index, mine[name]))

    def _check_alike(self, turn, steps, tower):
        first = self._plans.setdefault(turn, steps)
        for mine, of_first in zip(steps + [None], first + [None]):
            if mine != of_first:
                raise TowerMismatchError(
                    "towers.whole_batch: towers would meet otherwise than tower 0: in tower 0 %s, in tower %d %s. Does the model "
                    "function make another network of a batch of another size? Then give each tower as many examples."
                    % (of_first or "nothing more", tower.index, mine or "nothing more"))


def _scope_of(op, tower):
    return tower.relative(op.name).rpartition("/")[0]


def _explained(model_fn, args, tower):
    """Calls a model function with a tower's part of the batch; an error says that it may be too small, for the k largest say."""
    try:
        return model_fn(*args)
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise Refused("the model function can't be called with the examples of tower %d: %s If it takes more of them than the "
                      "tower has, hand the batch in with an unknown size, tf.placeholder_with_default(x, [None, ...])."
                      % (tower.index, error)) from error
