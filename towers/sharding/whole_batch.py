"""`whole_batch`: what a model function computes of its batch becomes the whole batch's.

The model function is called as it is, and makes its ops of the tower's own examples. Then placements are carried through these
(`propagation`), which changes nothing and makes a plan; the plan is held against tower 0's, and carried out (`rewriting`).
"""
import functools
import re
import weakref
from typing import Callable, Pattern, Union

import tensorflow.compat.v1 as tf

from towers.annotations import ModelFn
from towers.context import Span, current_tower, enter_tower, may_differ
from towers.graph_walk import ancestors, end_of, op_of
from towers.inner_training import refuse_training
from towers.private import is_recorded, position_of, without_intermediates
from towers.rows import is_ragged, is_sparse
from towers.sharding.gradient_functions import gradient_check
from towers.sharding.nodes import AsPartial, Numbered, Refused, Replicated
from towers.sharding.pairing import pair
from towers.sharding.placements import (BATCH, Additive, Listed, OneRow, Own, Partial, PartialMean, Replicate, RowNumbers,
                                        Rows, RowSum, Shard, Size)
from towers.sharding.propagation import Facts, propagate
from towers.sharding.report import described, drawn, log_meetings, warn_of_large_gathers
from towers.sharding.rewriting import Rewriting
from towers.sharding.rules.table import RULES
from towers.sharding.twin import build_twin, layers_of, noting_variables
from towers.sharding.writes import alike_writes, leave_to_first
from towers.turns import TowerMismatchError

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
        """Takes the tower's `towers.sharding.propagation.Plan`, before it is carried out."""

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
    added = _Added(tf.get_default_graph(), tower)
    outputs = model_fn(*args, **kwargs)
    try:
        batch = _Batch((args, kwargs), tower)
        needed = added.needed(outputs)
        made = kernels(tower, needed)
        is_chosen = only and (lambda op: only(_scope_of(op, tower)))
        made.planned(propagate(needed, Facts(batch.placements, rules=made.rules, is_chosen=is_chosen)))
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
        self._twins, self._plans, self._calls, self._chosen = {}, {}, {}, {}
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
        added = _Added(tf.get_default_graph(), tower)
        batch = _Batch(args, tower)
        if batch.whole_sizes is None or of_any_size:  # then Python code must not see the tower's sizes either
            with may_differ():
                args = tf.nest.map_structure(_of_any_size, args)
            batch = _Batch(args, tower)
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
        given = dict(batch.placements)
        given.update(((op, 0), Own()) for op in tower.meetings.stand_ins if op in needed and op not in layers)
        of_each = {op for first, last in tower.own_examples for op in made_here[first:last]}
        kernels = self._kernels(tower, needed)
        plan = propagate(needed, Facts(given, twin, batch.own, layers=layers, of_each=of_each, rules=kernels.rules,
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
        outputs = _Outputs(rewriting, plan, batch, tower).of(outputs)
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


def _of_any_size(leaf):
    """Returns a part of the batch whose size along axis 0 is not known while the graph is built."""
    if is_sparse(leaf):
        if tf.dimension_value(leaf.dense_shape.shape[0]) is None:
            return leaf
        shape = tf.concat([tf.placeholder_with_default(leaf.dense_shape[:1], [1]), leaf.dense_shape[1:]], 0)
        return tf.SparseTensor(leaf.indices, leaf.values, shape)
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or tf.dimension_value(leaf.shape[0]) is None:
        return leaf
    return tf.placeholder_with_default(leaf, [None] + leaf.shape.as_list()[1:])


class _Added:
    """What a graph gets while a model function runs; to be made before."""

    def __init__(self, graph, tower):
        self._graph, self._tower = graph, tower
        self._first_op = len(graph.get_operations())
        self.first_items = {key: len(graph.get_collection_ref(key)) for key in graph.collections}

    def ops(self):
        """Returns the ops made since, but for those that belong to no tower."""
        of_all = self._tower.meetings.aggregated()
        return [op for op in self._graph.get_operations()[self._first_op:] if op not in of_all]

    def items(self):
        """Returns what was added to collections since, a dict of lists."""
        return {key: self._graph.get_collection_ref(key)[self.first_items.get(key, 0):] for key in self._graph.collections}

    def regularizers(self, batch):
        """Returns the ops of penalties on variables, which are made with these, in the first tower alone; a set."""
        made, found = set(self.ops()), set()
        for item in self.items().get(tf.GraphKeys.REGULARIZATION_LOSSES, ()):
            ops = ancestors([item], within=made) if op_of(item) is not None else ()
            if not any(end_of(tensor) in batch.placements for op in ops for tensor in op.inputs):
                found.update(ops)
        return found

    def needed(self, outputs):
        """Returns those of the ops that outputs and what was added to collections depend on."""
        return ancestors(self.results(outputs), within=set(self.ops()))

    def results(self, outputs):
        """Returns the ops and tensors among outputs and what was added to collections, a list."""
        items = tf.nest.flatten(outputs, expand_composites=True) + sum(self.items().values(), [])
        return [item for item in items if op_of(item) is not None and op_of(item).graph is self._graph]

    def replace(self, now):
        """Puts what stands for tensors into collections."""
        for key in self._graph.collections:
            items = self._graph.get_collection_ref(key)
            first = self.first_items.get(key, 0)
            items[first:] = [now(item) if isinstance(item, tf.Tensor) and item.graph is self._graph else item
                             for item in items[first:]]


class _Batch:
    """The batch of a tower: which of its tensors hold the examples, and how many there are.

    Attributes:
      leaves: list of tensors that hold examples along axis 0, dense ones.
      placements: dict from (op, number) to `Placement`.
      own, first, total: int, how many examples the tower has, the number of its first, and how many there are; None where sizes
        are not known while the graph is built.
      like: (tensor, axis) whose size is the number of the tower's examples, (tensor, None) that number, or None.
      whole_sizes: dict from (op, number) to the size along axis 0 in the whole batch; None where that is not known.
    """

    def __init__(self, args, tower):
        self.placements, self.leaves, self.like = {}, [], None
        for leaf in tf.nest.flatten(args):
            if is_ragged(leaf):
                raise Refused("a part of the batch is ragged, %r, and of its rows nothing is known. Hand in a "
                              "dense tensor and each row's length." % (leaf,))
            if is_sparse(leaf):
                self._add_sparse(leaf)
            elif isinstance(leaf, tf.Tensor):
                if leaf.shape.rank is None:
                    raise Refused("a part of the batch, %r, has an unknown rank: give it a shape." % leaf.name)
                if leaf.shape.rank:
                    self.leaves.append(leaf)
        own = [tf.dimension_value(leaf.shape[0]) for leaf in self.leaves]
        per_tower = [tower.sizes_of(leaf) for leaf in self.leaves]
        is_sparse_too = any(is_sparse(leaf) for leaf in tf.nest.flatten(args))
        is_known = bool(self.leaves) and None not in own + per_tower and not is_sparse_too
        # What is not known is checked when it runs.
        is_one_size = not is_known or all(sizes == per_tower[0] for sizes in per_tower)
        for number, leaf in enumerate(self.leaves):
            rows = BATCH if is_one_size else Rows("part %d of the batch" % number)
            self.placements[end_of(leaf)] = Shard(0, rows, 1)
        if self.leaves:
            self.like = (self.leaves[0], 0) if is_one_size else None
        self.own = self.first = self.total = self.whole_sizes = None
        if is_known:
            self.whole_sizes = {end_of(leaf): sum(sizes) for leaf, sizes in zip(self.leaves, per_tower)}
        if is_known and is_one_size:
            self.own, self.total, self.first = own[0], sum(per_tower[0]), sum(per_tower[0][:tower.index])

    def _add_sparse(self, leaf):
        rows = Rows(leaf.values.op.name)
        self.like = leaf.dense_shape[0], None
        self.placements[end_of(leaf.indices)] = RowNumbers(0, rows, 1, Additive(1, BATCH), self.like, 0)
        self.placements[end_of(leaf.values)] = Shard(0, rows, 1)
        rank = tf.dimension_value(leaf.dense_shape.shape[0])
        if rank is None:
            raise Refused("a sparse part of the batch, %r, has an unknown rank." % leaf.values.name)
        self.placements[end_of(leaf.dense_shape)] = Size((Additive(1, BATCH),) + (None,) * (rank - 1), (rank,))


class _Outputs:
    """What a tower hands out: losses that are averaged by the towers' shares, and the placements of all else."""

    def __init__(self, rewriting, plan, batch, tower):
        self._rewriting, self._plan, self._batch, self._tower = rewriting, plan, batch, tower

    def of(self, outputs):
        """Returns the model function's outputs."""
        graph = tf.get_default_graph()
        is_weighted = isinstance(outputs, dict) and "weight" in outputs
        found = tf.nest.map_structure(lambda leaf: self._leaf(leaf) if isinstance(
            leaf, tf.Tensor) and leaf.graph is graph else leaf, outputs, expand_composites=True)
        if is_weighted:
            if self._tower.is_first:
                tf.logging.warning("towers.whole_batch: the model function returns a \"weight\", which is not needed and not "
                                   "looked at: its loss is that of the whole batch as it stands.")
            found = dict(found, weight=self._weight())
            self._tower.placements[end_of(found["weight"])] = Partial() if self._batch.like is not None else Replicate()
        return found

    def _weight(self):
        with may_differ():
            if self._batch.like is None:
                return tf.constant(1.0, tf.float64)
            if self._batch.own is not None:
                return tf.constant(self._batch.own)
            if not self._batch.leaves:
                return tf.cast(self._batch.like[0], tf.int32)
            sizes = tf.stack([tf.shape(leaf)[0] for leaf in self._batch.leaves])
            check = tf.raw_ops.Assert(condition=tf.reduce_all(tf.equal(sizes, sizes[0])), data=[
                "The tensors in the batch of tower %d disagree in size along axis 0. Their sizes are" % self._tower.index, sizes])
            with tf.control_dependencies([check]):
                return tf.identity(sizes[0])

    def _leaf(self, tensor):
        placement = self._plan.placements.get(end_of(tensor), Replicate())
        conversions, now = self._rewriting.conversions, self._rewriting.now(tensor)
        if isinstance(placement, Listed):
            raise Refused("the model function returns a list, %r: stack it." % tensor.name)
        if isinstance(placement, (OneRow, RowSum, Size)):
            now, placement = conversions.converted(tensor, Replicated()), Replicate()
        elif isinstance(placement, RowNumbers):
            now, placement = conversions.converted(tensor, Numbered()), Shard(placement.axis, placement.rows, placement.times)
        elif isinstance(placement, PartialMean) and placement.rows != BATCH:
            now, placement = conversions.converted(tensor, AsPartial()), Partial()
        if isinstance(placement, Partial) and now.shape.rank == 0 and now.dtype.is_floating:
            now, placement = self._over_share(now), PartialMean()
        if not isinstance(placement, Own):  # which `only` left to each tower
            self._tower.placements[end_of(now)] = placement
        return now

    def _over_share(self, loss):
        """Returns a sum's part as the towers' shares average it."""
        own, total = self._batch.own, self._batch.total
        with tf.name_scope(self._tower.name_scope + "whole_batch/"), may_differ():
            if self._batch.like is None:
                return tf.multiply(loss, tf.constant(self._tower.num_towers, loss.dtype), name="loss")
            if own is None:
                own, total, _ = self._rewriting.conversions.batch_count()
                own, total = tf.cast(own, tf.float64), tf.cast(total, tf.float64)
                return tf.multiply(loss, tf.cast(tf.math.divide_no_nan(total, own), loss.dtype), name="loss")
            return tf.multiply(loss, tf.constant(total / own if own else 0.0, loss.dtype), name="loss")
