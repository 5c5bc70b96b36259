"""Sums and joins over all towers, with their gradients: for losses, metrics and layers that need the whole batch.

The gradient of a sum over towers is a sum over towers, so the backward pass meets by the very function of the forward
one, to any order of derivative. `tf.gradients` of one tower's loss never walks through another tower's graph.
"""
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from towers.api.annotations import Tensor, TensorLike
from towers.api.arguments import FLAG, TEXT, as_tensor, check, optional
from towers.meeting.exchanges import gradient_place, meet_at, next_place, others_here, pass_with_gradient
from towers.meeting.meetings import Across
from towers.meeting.slices import as_dense
from towers.meeting.sums import EXTREMES, check_reduction, gradient_of_extreme, sum_in_order

__all__ = ["Divisor", "all_gather", "all_reduce", "cross_tower_sum_at"]


def all_reduce(tensor: TensorLike, reduction: str = "sum", name: Optional[str] = None) -> Tensor:
    """Sums or averages a tensor over all towers, or takes the largest or smallest; every tower gets the result.

        sum_i x_i    or    sum_i x_i / N    or    max_i x_i    or    min_i x_i,    N towers

    Towers meet here, forward, and again in each gradient. The mean counts every tower alike, whatever the sizes of
    their batches: for the mean over examples of uneven towers, divide the sum of sums by the sum of counts. The gradient of
    the largest goes to the tower that has it, in equal parts where several do, as `tf.reduce_max` has it.

    Args:
      tensor: floating point or integer tensor, of the same shape and dtype in every tower.
      reduction: "sum", "mean", "max" or "min"; "mean" takes floating point only.
      name: str, optional name scope.

    Returns:
      A tensor of the shape and dtype of `tensor`. Outside of towers, `tensor` itself.

    Raises:
      ValueError: for another reduction.
      TypeError: for the mean of integers, or a bool tensor.
      TowerMismatchError: where towers differ, see `towers.exchange`.

    Example:

        mean = towers.all_reduce(tf.reduce_sum(x)) / towers.all_reduce(tf.cast(tf.size(x), x.dtype))
    """
    check_reduction(reduction)
    check(optional(TEXT), name=name)
    tower = others_here("all_reduce")
    with tf.name_scope(name, "all_reduce"):
        tensor = as_tensor(tensor, "tensor")
        if tensor.dtype == tf.bool or (reduction == "mean" and not tensor.dtype.is_floating):
            raise TypeError("all_reduce takes no %s of %s tensors (%r): cast it first."
                            % (reduction, tensor.dtype.name, tensor.name))
        if tower is None:
            return tensor
        place = next_place("all_reduce " + reduction, [tensor])
        if reduction in EXTREMES:
            return _extreme_at(place, tensor, EXTREMES[reduction])
        total = cross_tower_sum_at(place, tensor)
        return total if reduction == "sum" else total / tf.cast(tower.num_towers, total.dtype)


def all_gather(tensor: TensorLike, name: Optional[str] = None, with_offset: bool = False) -> Any:
    """Joins the tensors of all towers along axis 0, in the order of the towers; every tower gets the result.

    Towers meet here, forward, and again in each gradient. The towers' parts may differ in size along axis 0.

    Args:
      tensor: tensor of rank 1 or more, alike in every tower but for axis 0.
      name: str, optional name scope.
      with_offset: whether to return where this tower's part begins as well.

    Returns:
      A tensor of the dtype of `tensor`, its size along axis 0 the sum over towers. Outside of towers, `tensor` itself.
      With `with_offset` a pair of that and of an int32 scalar, the number of the row of it that is the first one of `tensor`; 0
      outside of towers. Towers do not count as unlike for what is made of it.

    Raises:
      ValueError: if the rank is 0 or unknown.
      TowerMismatchError: where towers differ, see `towers.exchange`.

    Example:

        of_all, first = towers.all_gather(features, with_offset=True)
        similar = tf.matmul(features, of_all, transpose_b=True)
        own = first + tf.range(tf.shape(features)[0])       # the column of each row of `similar` that is the row itself
    """
    check(optional(TEXT), name=name)
    check(FLAG, with_offset=with_offset)
    tower = others_here("all_gather")
    with tf.name_scope(name, "all_gather"):
        tensor = as_tensor(tensor, "tensor")
        if not tensor.shape.rank:
            raise ValueError("all_gather joins along axis 0 and needs a known rank of 1 or more; %r has shape %s."
                             % (tensor.name, tensor.shape))
        if tower is None:
            return (tensor, tf.constant(0, name="offset")) if with_offset else tensor
        joined_shape = tf.TensorShape([None]).concatenate(tensor.shape[1:])
        place = next_place("all_gather", [tensor], [joined_shape])
        joined, offset = meet_at(place, [tensor], _join, [(tensor.dtype, joined_shape), (tf.int32, [])])
        joined = pass_with_gradient("TowersAllGather", [joined, tensor, offset], place)[0]
        return (joined, offset) if with_offset else joined


class Divisor(NamedTuple):
    """What a sum over towers is divided by.

    Attributes:
      of_all: a function without arguments that returns a tensor that broadcasts to the sum, alike in all towers of a group, to
        which no gradient is wanted; where it is 0 the result is 0. It is called where it is needed.
      own: number, this tower's part of it; None where that is not known while the graph is built.
      gives_share: whether the tower gets the sum times `own`, which is known then, over `of_all`.
    """
    of_all: Any
    own: Any
    gives_share: bool = False


def cross_tower_sum_at(place, tensor, group_size=None, unused=None, divisor=None):
    """Sums a tensor over towers at a place, with its gradient: what gradients of cross-tower functions are made of.

    Args:
      place: from `towers.meeting.exchanges.next_place` or `gradient_place`.
      tensor: floating point or integer tensor, of the same shape and dtype in every tower.
      group_size: int, the sum is taken over each group of so many consecutive towers; None is all of them.
      unused: int, the row of the tensor whose sum nobody uses: between workers it does not cross, and is 0 there.
      divisor: `Divisor`, or None. Where all towers know their parts of it, the sum is multiplied by a constant instead.

    Returns:
      A tensor of the shape and dtype of `tensor`.
    """
    gives_share, peers = divisor is not None and divisor.gives_share, place.meetings.peers
    if gives_share and peers is not None:  # what is known does not cross workers: towers multiply by it themselves
        return divisor.own * cross_tower_sum_at(place, tensor, group_size, unused, divisor._replace(gives_share=False))

    def totals_of(group):
        total = sum_in_order([part for part, *_ in group])
        if divisor is None:
            return [total] * len(group)
        divisors = [given if peers is None else Divisor(lambda given=given: given, None) for _, given in group]
        own, factors = [each.own for each in divisors], [each.own if each.gives_share else 1 for each in divisors]
        distinct = dict.fromkeys(factors)
        if None not in own and sum(own) > 0:
            products = {times: total * tf.constant(times / sum(own), total.dtype) for times in distinct}
        else:
            mean = tf.div_no_nan(total, divisors[0].of_all())
            products = {times: mean if times == 1 else mean * times for times in distinct}
        return [products[times] for times in factors]

    def add(per_tower):
        size = group_size or len(per_tower)
        groups = [per_tower[i:i + size] for i in range(0, len(per_tower), size)]
        return [[total] for group in groups for total in totals_of(group)]

    def part(left):
        total = add(left)[0][0]
        return total if unused is None else tf.concat([total[:unused], total[unused + 1:]], 0)

    def whole(total):
        return [total if unused is None else tf.concat([total[:unused], tf.zeros_like(total[:1]), total[unused:]], 0)]

    across = None if group_size else Across(part, whole, of_sum=True)
    left, known = [tensor], []
    if divisor is not None and peers is None:
        known = [divisor]
    elif divisor is not None:  # a group may lie in several workers
        left = [tensor, divisor.of_all()]
    total, = meet_at(place, left, add, [(tensor.dtype, tensor.shape)], known, across)
    return pass_with_gradient("TowersSum", [total, tensor], place, (group_size, divisor))[0]


def _extreme_at(place, tensor, reduce):
    def of_all(parts):
        return [reduce(tf.stack(parts), 0)]

    across = Across(lambda left: of_all([part for part, in left])[0], lambda parts: [reduce(parts, 0)])
    extreme, = meet_at(place, [tensor], lambda left: [of_all([part for part, in left])] * len(left),
                       [(tensor.dtype, tensor.shape)], across=across)
    return pass_with_gradient("TowersExtreme", [extreme, tensor], place)[0]


def _join(per_tower):
    parts = [part for part, in per_tower]
    offsets, end = [], tf.constant(0)
    for part in parts:
        offsets.append(end)
        end += tf.shape(part)[0]
    joined = tf.concat(parts, 0)
    return [[joined, offset] for offset in offsets]


@tf.RegisterGradient("TowersSum")
def _sum_gradient(op, dy, _):
    place, (group_size, divisor) = gradient_place(op)
    dy = as_dense(dy, op.inputs[0])
    if divisor is not None and divisor.gives_share:
        dy, divisor = dy * divisor.own, divisor._replace(gives_share=False)
    return None, cross_tower_sum_at(place, dy, group_size, divisor=divisor)


@tf.RegisterGradient("TowersExtreme")
def _extreme_gradient(op, dy, _):
    place, _ = gradient_place(op)
    return None, gradient_of_extreme(as_dense(dy, op.inputs[0]), *op.inputs, lambda parts: cross_tower_sum_at(place, parts))


@tf.RegisterGradient("TowersAllGather")
def _all_gather_gradient(op, dy, *_):
    place, _ = gradient_place(op)
    total = cross_tower_sum_at(place, as_dense(dy, op.inputs[0]))
    _, part, offset = op.inputs
    begin = tf.concat([[offset], tf.zeros([part.shape.rank - 1], tf.int32)], 0)
    return None, tf.slice(total, begin, tf.shape(part)), None
