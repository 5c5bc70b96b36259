"""Losses that are sums over a tower's examples, where towers average their losses.

A model that divides a sum by the batch size, a number of its own, has in N towers N losses of a part of the examples each,
divided by the number of all: their average is N times too small, and so is every gradient, which no other check would see.
"""
import warnings

from towers.first_axis import sizes_of_examples
from towers.divisors import are_undone, by_examples, divisors_within, is_a_mean
from towers.exchanges import stands_at_exchange
from towers.graph_walk import VARIABLES
from towers.loss_terms import terms_of
from towers.own_data import takes_own_data
from towers.wording import TowersWarning

__all__ = ["warn_of_sums"]


def warn_of_sums(losses, towers, examples, stacklevel):
    """Warns, once, if tower 0's loss is a sum over its examples, divided by nothing that grows with them, or what has none is.

    Only what is sure is said: nothing of losses whose sums go through more than additions and a few multiplications by numbers,
    nor of one that is multiplied by the number of towers, or divided by the tower's own number of examples, a tensor or an int.

    Args:
      losses: list over towers of scalar tensors.
      towers: list of `Tower`.
      examples: `towers.along_examples.Examples` of the first of them.
      stacklevel: int, as of `warnings.warn`.

    Returns:
      Whether it warned.
    """
    num_towers, context = towers[0].context.num_towers, towers[0].context
    sizes = sizes_of_examples(towers)
    means, others = {}, []  # of sums alike one is enough
    for term, shape, divisors, is_sum, are_examples in terms_of(losses[0], context, examples):
        if not is_sum:
            others.append((term, divisors))
        elif by_examples(divisors) or not are_examples and not examples.are_rows_of(term):
            continue
        elif is_a_mean(shape, divisors, sizes) or is_a_mean(shape, divisors + divisors_within(term, context), sizes):
            means.setdefault((str(shape), divisors), shape)
        else:
            warnings.warn(
                "The loss of a tower (%r) is a sum over the tower's examples (%r), divided by nothing of the tower's, and towers "
                "average their losses: over %d towers it and its gradients come to 1/%d of those of one tower on the whole "
                "batch. Take tf.reduce_mean, or divide by the tower's own number of examples, tf.shape(x)[0]; a loss that is "
                "meant as a sum is multiplied by towers.current_tower().num_towers."
                % (losses[0].name, term.name, num_towers, num_towers), TowersWarning, stacklevel=stacklevel)
            return True
    divided = next((term for term in _divided_by_examples(others, means, sizes, num_towers)
                    if not examples.are_in(term) and _is_of_variables(term, context)), None)
    if divided is not None:
        warnings.warn(
            "The loss of a tower (%r) divides what is of variables alone (%r), a weight decay say, by the number of the tower's "
            "own examples: over %d towers it and its gradients come to %d times those of one tower on the whole batch. Add it to "
            "the mean over the examples, decay + tf.reduce_mean(losses), or divide it by the number of all towers' examples, "
            "towers.all_reduce(tf.shape(x)[0])." % (losses[0].name, divided.name, num_towers, num_towers),
            TowersWarning, stacklevel=stacklevel)
    return divided is not None


def _divided_by_examples(others, means, sizes, num_towers):
    """Yields those terms that are divided by the number of a tower's examples, or by what makes a sum beside them a mean.

    Args:
      others: list of (tensor, divisors), terms that are no sums over the examples.
      means: dict from (shape as a str, divisors) to the shape, those that are, by the tower's number.
      sizes: dict, see `sizes_of_examples`.
      num_towers: int; what is divided by that too is meant as it is.
    """
    def is_undone(divisors):
        are_meant = any(divisor.kind == "number" and divisor.number == num_towers for divisor in divisors)
        return are_meant or are_undone(divisors, sizes)

    def makes_a_mean(divisors, summed, of_mean):
        shared, apart = _parted(of_mean, divisors)
        return (shared and is_a_mean(summed, shared, sizes) and not is_a_mean(summed, apart, sizes)
                and not is_undone(_parted(divisors, of_mean)[1]))

    for term, divisors in others:
        if by_examples(divisors) and not is_undone(divisors) or any(
                makes_a_mean(divisors, summed, of_mean) for (_, of_mean), summed in means.items()):
            yield term


def _parted(divisors, others):
    return [divisor for divisor in divisors if divisor in others], [divisor for divisor in divisors if divisor not in others]


def _is_of_variables(tensor, context):
    """Tells whether a tensor is of variables and numbers, none of which is taken of a shape, the batch's perhaps."""
    if takes_own_data([tensor], context):
        return False
    seen, stack = set(), [tensor.op]
    while stack:
        op = stack.pop()
        if op not in seen:
            seen.add(op)
            stack.extend(source.op for source in op.inputs)
    return any(op.type in VARIABLES for op in seen) and not any(
        op.type == "StridedSlice" or op in context.meetings.stand_ins or stands_at_exchange(op) for op in seen)
