"""What plain towers compute of their own examples, where one tower would take the whole batch: one warning says it.

Placements are carried through the loss of a tower as if its towers were to meet, and the plan is not carried out. Wherever they
would meet, towers come to something else than one tower on the whole batch. Batch norms with moving averages are everybody's
ordinary towers, and not said.
"""
import warnings

import numpy as np
import tensorflow.compat.v1 as tf

from towers.api.wording import TowersWarning, some_of
from towers.batches.shares import by_name
from towers.graph.gradient_hook import detail_of
from towers.graph.private import forward_op_of
from towers.graph.static_values import static_value
from towers.graph.walk import compares, computes_the_same, descendants, end_of, writes_of
from towers.sharding.nodes import AsPartial, Numbered, OwnRows, Refused, Replicated, ShapeOf, TakenByPlace
from towers.sharding.placements import BATCH, Additive, Blocks, Partial, PartialMean, Replicate, RowNumbers, Shard, Size
from towers.sharding.plan.given import Given
from towers.sharding.plan.guesses import Guesses
from towers.sharding.plan.propagation import propagate
from towers.sharding.plan.twin import layers_of
from towers.sharding.rules.movement.slices import takes_by_place, takes_equal_parts
from towers.sharding.rules.normalization import is_batch_norm
from towers.sharding.rules.plain.powers import Powers, others_than_means
from towers.sharding.rules.plain.repeated import repeats_along
from towers.sharding.rules.plain.table import OtherRows
from towers.sharding.rules.plain.weights import Weight

__all__ = ["warn_of_own_examples"]

_SUMS = (Partial, PartialMean)
_ROWS = (Shard, Blocks, RowNumbers)
_MOST_LINES = 5


def warn_of_own_examples(losses, towers, is_divided=False, stacklevel=3):
    """Warns, once, of what towers compute of their own examples where one tower would take the whole batch.

    Args:
      losses: list over towers of scalar tensors.
      towers: list of `Tower`.
      is_divided: bool, whether the caller divided the batch: then places in it are the caller's choice.
      stacklevel: int, as of `warnings.warn`.
    """
    if towers[0].context.num_towers == 1:
        return
    # One example is not told from other axes of size 1: a tower of several is asked.
    loss, tower = min(zip(losses, towers), key=lambda pair: any(
        tf.dimension_value(leaf.shape[0]) == 1 for leaf in tf.nest.flatten(pair[1].context.batch)
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank))
    question = _Question(loss, tower, is_divided)
    lines = question.answer()
    if question.batch_norms:
        tf.logging.info("TowerBuilder.build: batch norms of each tower's own moments, which tf_syncbn.convert_model would sync: "
                        "%d, %s", len(question.batch_norms), some_of(sorted(question.batch_norms), _MOST_LINES))
    if lines:
        more = ["and %d more" % (len(lines) - _MOST_LINES)] if len(lines) > _MOST_LINES else []
        warnings.warn(
            "Each of %d towers computes this from its own part of the batch, where one tower would use the whole batch:%s\nSo "
            "the average of the towers is not what one tower would train on. Use towers.whole_batch(model_fn) or, in a model "
            "with batch norms, tf_syncbn.convert_model(model_fn), and it is." % (tower.context.num_towers, "".join(
                "\n  - " + line for line in lines[:_MOST_LINES] + more)), TowersWarning, stacklevel=stacklevel)


class _Question:
    """What is asked of one tower's loss."""

    def __init__(self, loss, tower, is_divided):
        self._tower, self._is_divided, self._made = tower, is_divided, set(tower.ops)
        while loss.op not in self._made and loss.op.inputs:  # a check of its weight
            loss = loss.op.inputs[0]
        self._loss, self._counts, self._lines, self._outside = loss, set(), {}, {}
        self.batch_norms = set()  # scopes of those with moving averages

    def answer(self):
        """Returns a list of lines, one for each scope, the loss's first."""
        context = self._tower.context
        try:
            self._given = Given(context.batch, context)
        except Refused:
            return []  # ragged, or of an unknown rank: nothing is known of its examples
        needed = self._needed()
        layers = {op: inputs[0] for inputs, ops in layers_of(context) for op in ops}
        layers.update({op: layers[forward_op_of(op)] for op in needed if forward_op_of(op) in layers})
        sizes = {tf.dimension_value(leaf.shape[0]) for leaf in self._given.leaves}
        num_rows = sizes.pop() if len(sizes) == 1 else None
        self._sizes = num_rows, context.sizes_of(self._given.leaves[0]) if num_rows else None
        self._facts = Guesses(self._given.placements, num_rows=num_rows or None, layers=layers, ops=needed,
                              handed_on=context.handed_on)
        try:
            self._plan = propagate(needed, self._facts)
        except Refused as error:
            is_said = not (self._is_divided and isinstance(error, TakenByPlace))
            return [str(error).partition(": ")[2].partition(". ")[0].replace(context.name_scope, "")] if is_said else []
        self._placements = dict(self._plan.placements)
        weight = by_name(self._tower.outputs).get("weight")
        self._weight = Weight(weight if isinstance(weight, tf.Tensor) else None, self._loss.graph, set(self._given.placements),
                              self._made, self._from_outside)
        self._averaged = self._moving_averages()
        self._look_at(self._plan, "")
        return list(self._lines.values()) or self._of_loss(num_rows)

    def _needed(self):
        """Returns the ops that the loss is computed of; not what is multiplied by 0, or printed beside it."""
        handed_on, seen, stack = self._tower.context.handed_on, set(), [self._loss.op]
        while stack:
            op = stack.pop()
            if op in seen or op not in self._made:
                continue
            seen.add(op)
            forward = forward_op_of(op)
            is_shape = op.type == "Const" and op.name.rpartition("/")[2].startswith("Shape")
            if forward is not None and (forward.type == "Mean" or is_shape):
                stack.append(forward)  # of which its gradient takes no more than shapes
            taken = [handed_on[op]] if op in handed_on else list(op.inputs)[:1] if op.type == "Print" else list(op.inputs)
            if op.type == "Mul" and any(map(_is_zero, taken)):
                taken = [source for source in taken if _is_zero(source)]
            stack.extend(source.op for source in taken)
        return seen

    # What is met about.

    def _look_at(self, plan, scope):
        """Adds lines for all that towers would meet about, in the functions that ops call too."""
        self._placements.update(plan.placements)
        for op in plan.order:
            decision = plan.decisions.get(op)
            for k, want in sorted(decision.wants.items()) if decision is not None else ():
                placement = plan.placements.get(end_of(op.inputs[k]))
                how = self._how(op, k, want, placement)
                if how is not None:
                    self._add(op, scope, how)
            rows = [getattr(plan.placements.get(end_of(source)), "rows", None) for source in op.inputs]
            is_sum = any(isinstance(plan.placements.get(end_of(output)), _SUMS) for output in op.outputs)
            if is_sum and any(isinstance(each, OtherRows) for each in rows):
                self._add(op, scope, "combines the tower's own examples")
            for inner in getattr(decision.instead, "inners", ()) if decision is not None else ():
                given = list(op.inputs)[len(op.inputs) - len(inner.body.inputs):]
                self._outside.update(zip(map(end_of, inner.body.inputs), given))
                self._look_at(inner.plan, scope + self._named(op.outputs[0]) + "/")
                if any(isinstance(want, Replicated) and isinstance(inner.placement(inner.body.outputs[number]), _ROWS)
                       for number, want in inner.returns.items()):
                    self._add(op, scope, "combines the tower's own examples (in what it returns)")
            if decision is not None and decision.instead is not None and decision.meets == "sum" and op in self._averaged:
                self._note_batch_norm(op, scope)
            elif decision is not None and decision.instead is not None and decision.meets == "sum":
                self._add(op, scope, "normalizes with the tower's own moments" if is_batch_norm(op) else
                          "combines the tower's own examples")
            for output in op.outputs:
                if end_of(output) in plan.at_source and self._is_moved(output):
                    self._note_batch_norm(op, scope)
                elif end_of(output) in plan.at_source and not self._is_count(output):
                    self._add(op, scope, "is computed from all of the tower's own examples, and used further")

    def _note_batch_norm(self, op, scope):
        """Notes the scope of a layer whose moments go into moving averages: of a fused op, or as `tf.nn.moments` names it."""
        layer, _, name = (scope + self._tower.context.relative(op.name)).rpartition("/")
        if is_batch_norm(op) or layer.endswith("moments"):
            self.batch_norms.add(layer.rpartition("/")[0] if not is_batch_norm(op) else layer or name)

    def _how(self, op, k, want, placement):
        """Returns how an op takes an input otherwise than one tower would, a str; None where it does not."""
        source = op.inputs[k]
        is_mean_of_chosen = isinstance(placement, PartialMean) and placement.rows != BATCH
        if isinstance(want, AsPartial) and is_mean_of_chosen and not self._weight.leaves:
            return "adds a mean over as many examples as the tower's own data decide (its input %r)" % self._named(source)
        if isinstance(want, Numbered):
            return "numbers the tower's own examples (its input %r)" % self._named(source)
        if isinstance(want, OwnRows) and isinstance(placement, _ROWS):
            return "combines the tower's own examples (its input %r)" % self._named(source)
        if isinstance(want, OwnRows) and isinstance(placement, Replicate) and not repeats_along(
                source, want.axis, self._facts, self._from_outside):
            return "takes what all towers have alike for what belongs to its examples (its input %r)" % self._named(source)
        if isinstance(want, ShapeOf) and isinstance(placement, Size) and _is_long_twice(source, placement, want):
            return "makes as many of each example as there are others (its input %r)" % self._named(source)
        if not isinstance(want, Replicated):
            return None
        if isinstance(placement, Size) and source.dtype.base_dtype == tf.bool:
            return None if _guards_or_loops(source) else "chooses by the number of the tower's own examples (its input %r)" % (
                self._named(source))
        if isinstance(placement, Size):
            is_said = op.outputs[0].dtype.is_floating and self._counts_others(source) and not self._stands_for_weight(source)
            return "uses a number that the tower's own examples decide (its input %r)" % self._named(source) if is_said else None
        if isinstance(placement, _SUMS):
            if _is_compared_with_0(op, k) or self._is_moved(source) or isinstance(placement, Partial) and self._is_count(source):
                return None
            how = "computes with a sum over the tower's own examples (its input %r)" if isinstance(placement, Partial) else (
                "computes with a mean over the tower's own examples (its input %r)")
            return how % self._named(source)
        if not isinstance(placement, _ROWS) or self._is_length(op, k):
            return None
        if self._is_divided and takes_equal_parts(op, placement.axis, self._placements, self._sizes):
            return None
        if takes_by_place(op):
            return "picks some of the tower's own examples by their place (its input %r)" % self._named(source)
        return "combines the tower's own examples (its input %r)" % self._named(source)

    def _add(self, op, scope, how):
        name = scope + self._tower.context.relative(op.name)
        self._lines.setdefault(name.rpartition("/")[0] or name, "%r (%s) %s" % (name, op.type, how))

    def _named(self, tensor):
        return self._tower.context.relative(tensor.op.name)

    # What is no such thing.

    def _moving_averages(self):
        """Returns the ops of what is one for all of a tower's examples and goes into a variable, a moving average say; a set."""
        seen, stack = set(), [tensor for op in writes_of(self._tower.ops) for tensor in op.inputs]
        while stack:
            tensor = stack.pop()
            is_of_each = not tensor.value_index and isinstance(self._placements.get(end_of(tensor)), _ROWS)
            if tensor.op in self._made and tensor.op not in seen and not is_of_each:
                seen.add(tensor.op)
                stack.extend(() if is_batch_norm(tensor.op) else tensor.op.inputs)
        return seen

    def _is_moved(self, tensor):
        """Tells whether a sum or mean is of such alone."""
        seen, stack = set(), [tensor.op]
        while stack:
            op = stack.pop()
            if op in seen or op in self._averaged:
                continue
            seen.add(op)
            sums = [source.op for source in op.inputs if isinstance(self._placements.get(end_of(source)), _SUMS)]
            if not sums:
                return False
            stack.extend(sums)
        return True

    def _is_count(self, tensor):
        """Tells whether a sum counts the tower's examples, or what its "weight" counts."""
        leaves = self._weight.leaves_of(tensor.op)
        if leaves:
            return tensor.shape.num_elements() == 1 and None not in leaves and self._stands_for_weight(tensor)
        return self._noted(tensor, self._is_over_batch(tensor))

    def _stands_for_weight(self, tensor):
        """Tells whether a number, of rows or a sum, is what the tower's "weight" is."""
        return self._noted(tensor, self._weight.counts(tensor))

    def _noted(self, tensor, is_count):
        """Returns whether a tensor counts examples, and notes it where it does."""
        if is_count:
            self._counts.add(end_of(tensor))
        return is_count

    def _from_outside(self, tensor):
        """Returns what a function was given for a tensor that it takes; others as they are."""
        while end_of(tensor) in self._outside:
            tensor = self._outside[end_of(tensor)]
        return tensor

    def _is_over_batch(self, tensor):
        """Tells whether a sum's parts are summed over the batch's own rows."""
        return not any(isinstance(placement, (Shard, Blocks)) and placement.rows != BATCH
                       for placement in self._placements_behind(tensor, _SUMS))

    def _counts_others(self, tensor):
        """Tells whether a size is computed of a number of other rows than the batch's."""
        return any(isinstance(element, Additive) and element.rows != BATCH
                   for placement in self._placements_behind(tensor, Size) if isinstance(placement, Size)
                   for element in placement.elements)

    def _placements_behind(self, tensor, kinds):
        """Yields the placements of a tensor and of what it is computed of, not of what is behind others than some kinds."""
        seen, stack = set(), [tensor]
        while stack:
            each = stack.pop()
            placement = self._placements.get(end_of(each))
            if end_of(each) not in seen:
                seen.add(end_of(each))
                yield placement
                stack.extend(each.op.inputs if isinstance(placement, kinds) else ())

    def _is_length(self, op, k):
        """Tells whether the largest of some whole numbers says how long something is made, and no mean is taken along that."""
        if op.type != "Max" or k or not op.inputs[0].dtype.is_integer:
            return False
        stack, seen = [op.outputs[0]], set()
        while stack:
            tensor = stack.pop()
            for consumer in set(tensor.consumers()) - seen:
                seen.add(consumer)
                is_length = consumer.type == "Range" and tensor is consumer.inputs[1] and all(
                    compares(each) for each in consumer.outputs[0].consumers())
                if is_length and not any(map(self._is_mean_along_last, descendants([consumer], within=set(self._plan.order)))):
                    continue
                if consumer.type == "OneHot" and tensor is consumer.inputs[1]:
                    continue
                made = consumer.outputs[0] if consumer.outputs and not is_length else None
                if made is None or not made.dtype.is_integer or made.shape.rank:
                    return False
                stack.append(made)
        return True

    def _is_mean_along_last(self, op):
        """Tells whether an op is a mean along the last axis, where a mask has its length, if no examples lie along that."""
        if op.type != "Mean" or op.inputs[0].shape.rank is None:
            return False
        axes, last = static_value(op.inputs[1]), op.inputs[0].shape.rank - 1
        along = getattr(self._placements.get(end_of(op.inputs[0])), "axis", None)
        return last != along and (axes is None or any(int(axis) % (last + 1) == last for axis in np.ravel(axes)))

    # The loss.

    def _of_loss(self, num_rows):
        """Returns lines of a loss that is a sum, keeps a number, or is a mean over chosen examples; a list of one or none."""
        placement, name = self._placements.get(end_of(self._loss)), self._named(self._loss)
        context, num_towers = self._tower.context, self._tower.context.num_towers
        if isinstance(placement, PartialMean) and placement.rows != BATCH and not (
                self._weight.leaves and self._weight.leaves_of(placement.count[0].op) >= self._weight.leaves):
            return ["the loss (%r) is a mean over as many examples as the tower's own data decide (%r)" % (
                name, context.relative(placement.rows.name))]
        if self._weight.leaves and self._has_mean_over_batch():
            return ["the loss (%r) has a mean over the tower's own examples in it, and its \"weight\" counts something else"
                    % name]
        numbers = self._numbers() if self._weight.leaves else []
        if len(numbers) > 1:
            return ["the loss (%r) depends on several numbers of the tower's own examples (%s), and its \"weight\" can be one "
                    "of them" % (name, some_of([self._named(number) for number in numbers]))]
        num_rows = None if self._weight.leaves else num_rows
        sizes = [context.sizes_of(leaf) for leaf in self._given.leaves]
        is_even = bool(sizes) and all(each and len(set(each)) == 1 for each in sizes)
        powers = Powers(self._counts, num_rows, not self._weight.leaves, _is_of_layer, is_even)
        kinds = others_than_means(powers.of(self._plan, [self._loss])[0], num_rows, num_towers)
        if "sum" in kinds:
            return ["the loss (%r) is a sum over the tower's own examples that no number of them divides: the towers' average is "
                    "1/%d of it. Take tf.reduce_mean, or divide by the batch size; if you want the sum, multiply it by "
                    "towers.current_tower().num_towers" % (name, num_towers)]
        return ["the loss (%r) depends on the number of the tower's own examples: a mean or what is no sum is divided by it, or "
                "a sum is divided twice" % name] if kinds else []

    def _numbers(self):
        """Returns what counts of examples come to before anything else is computed with them, and what means are taken over.

        Each is there once, though it be written twice; a list of tensors.
        """
        derived, needed = {end for end in self._counts if self._weight.leaves_of(end[0])}, set(self._plan.order)
        ops = {op.name: op for op in self._plan.order}
        for op in self._plan.order:
            varying = [end_of(source) for source in op.inputs if source.op.type != "Const"]
            derived.update(map(end_of, op.outputs) if varying and derived.issuperset(varying) else ())
        counts = [op.outputs[k] for op in self._plan.order for k in range(len(op.outputs)) if (op, k) in derived]
        used = [tensor for tensor in counts if tensor.dtype.is_floating and any(
            op in needed and not derived.issuperset(map(end_of, op.outputs)) for op in tensor.consumers())]
        rows = [placement.rows.name for placement in self._placements.values() if isinstance(placement, PartialMean)]
        found = []
        for number in used + [ops[name].outputs[0] for name in dict.fromkeys(rows) if name in ops]:
            if not any(computes_the_same(number, other) for other in found):
                found.append(number)
        return found

    def _has_mean_over_batch(self):
        """Tells whether a mean over all of the tower's examples is a term of the loss."""
        return PartialMean() in self._placements_behind(self._loss, _SUMS)


def _is_long_twice(shape, size, want):
    """Tells whether a shape, no constant, has the number of the tower's examples beside the axis that these lie along."""
    return shape.op.type != "Const" and any(
        isinstance(element, Additive) and k not in want.own + want.unknown for k, element in enumerate(size.elements))


def _is_of_layer(op):
    """Tells whether an op belongs to the gradient of a layer in which towers meet."""
    return forward_op_of(op) is not None and getattr(detail_of(forward_op_of(op)), "place", None) is not None


def _is_zero(tensor):
    """Tells whether a tensor is a number that is 0, by which a part of a loss is switched off."""
    return tensor.op.type == "Const" and not np.any(tf.get_static_value(tensor))


def _guards_or_loops(choice):
    """Tells whether a choice asks whether there is anything at all, or is that of a loop."""
    while len(choice.op.inputs) == 1 and choice.op.inputs[0].dtype.base_dtype == tf.bool:
        if choice.op.type == "LoopCond":
            return True
        choice = choice.op.inputs[0]
    return choice.op.type == "LoopCond" or compares(choice.op) and any(map(_is_zero, choice.op.inputs))


def _is_compared_with_0(op, k):
    """Tells whether an op asks whether there is anything."""
    return compares(op) and op.inputs[k].dtype.base_dtype != tf.bool and _is_zero(op.inputs[1 - k])
