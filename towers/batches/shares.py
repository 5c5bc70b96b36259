"""What each tower counts in the global batch, and its share of it.

A tower counts the examples of its batch, or what its model function returned as "weight". Sizes that are known while the
graph is built stay Python numbers. What is known only when it runs is checked then where it could be wrong: shares of
negative numbers or NaN would be silent wrong numbers. Sizes come from shapes, on the host, so no check waits for a GPU but that
of a "weight".
"""
import tensorflow.compat.v1 as tf

from towers.api.arguments import as_tensor
from towers.batches.batch import count_examples
from towers.devices.placement import HOST
from towers.meeting.sums import sum_in_order
from towers.meeting.turns import TowerMismatchError

__all__ = ["by_name", "checked_loss", "count", "scalar_loss", "shares", "weighted_sum"]


def by_name(outputs):
    """Returns what a model function returned by name: a dict's items, a NamedTuple's fields that are not None, or nothing."""
    if hasattr(outputs, "_asdict"):
        return {name: value for name, value in outputs._asdict().items() if value is not None}
    return outputs if isinstance(outputs, dict) else {}


def count(outputs, batch, context):
    """Returns what a tower counts in the global batch: its "weight", or the number of examples in its batch.

    Args:
      outputs: what the model function returned.
      batch: what it was given.
      context: the tower's `TowerContext`.

    Returns:
      An int or a scalar tensor; None for a batch without sizes. A tensor fails when it is run if the "weight" is negative,
      infinite or NaN, or if the tensors of the batch disagree in size.

    Raises:
      TypeError: for a "weight" that is no number.
      ValueError: for one that is no scalar, and for what would fail when it is run but is known now.
    """
    with tf.name_scope(context.name_scope):
        if "weight" in by_name(outputs):
            return tf.stop_gradient(_checked(tf.convert_to_tensor(by_name(outputs)["weight"]), context))
        return count_examples(batch, context)


def shares(counts, device, peers=None):
    """Returns each tower's share of the sum of `counts`, and that sum.

    Args:
      counts: list over towers of what `count` returns.
      device: str, the device of the arithmetic.
      peers: `towers.workers.peers.Peers`, other workers whose towers share with these; None where there are none.

    Returns:
      - A list of floats where all towers' counts are ints, else of float64 scalar tensors.
      - An int, or a float64 scalar tensor; None where all counts are.

    Raises:
      TowerMismatchError: if some counts are None and others are not.
      ValueError: if they sum to 0.
    """
    everyone = counts if peers is None else peers.tell(
        [number if number is None or isinstance(number, int) else "known when it is run" for number in counts])
    if all(number is None for number in everyone):
        return [1.0 / len(everyone)] * len(counts), None
    if any(number is None for number in everyone):
        raise TowerMismatchError("Some towers' batches hold a tensor of rank 1 or more and others' do not, so their "
                                 "shares of the global batch are unknown: return a \"weight\" from the model function.")
    if all(isinstance(number, int) for number in everyone):
        if not sum(everyone):
            raise ValueError("The batches of all towers are empty.")
        return [number / sum(everyone) for number in counts], sum(everyone)
    with tf.name_scope("weights"), tf.device(device):
        counts = [tf.cast(number, tf.float64) for number in counts]
        total = sum_in_order(counts)
        if peers is not None:
            total = peers.sum(total, "weights")
        return [tf.div_no_nan(number, total) for number in counts], total


def weighted_sum(values, weights):
    """Returns the sum over towers of a tensor's values, each times the tower's share; a tower without one counts nothing."""
    if values[0].shape.rank == 0:
        # Of a product of a loss with a constant and one with its share Grappler makes one product, and forgets who waits for the
        # first: then a step's loss was seen to be of weights that the step itself had updated. Of a stack it makes none.
        return tf.reduce_sum(_weighted(tf.stack(values), tf.convert_to_tensor(weights, tf.float64)), 0)
    return sum_in_order([_weighted(value, weight) for value, weight in zip(values, weights)])


def _weighted(value, weight):
    if isinstance(weight, float):
        return value * weight if weight else tf.zeros_like(value)
    # Not a product alone: the mean loss of an empty tower is NaN, and NaN survives a product with zero.
    return tf.where_v2(weight > 0, value * tf.cast(weight, value.dtype), tf.zeros_like(value))


def scalar_loss(loss, index):
    """Returns a tower's loss as a tensor; a ValueError if it is no floating point scalar."""
    if loss is None:
        raise ValueError("The loss of tower %d is None: return a scalar as \"loss\", or leave that key out where there is none."
                         % index)
    loss = as_tensor(loss, "The loss of tower %d" % index)
    if loss.shape.rank not in (0, None) or not loss.dtype.is_floating:
        raise ValueError("The loss of tower %d has to be a floating point scalar; %r is %s of shape %s. Average it over the "
                         "tower's examples; a list of terms, decays say, is added up, tf.reduce_sum."
                         % (index, loss.name, loss.dtype.name, loss.shape))
    return loss


def checked_loss(loss, weight, outputs, context):
    """Returns a tower's loss, which fails when it is run if it is infinite or NaN where a "weight" of 0 takes it away.

    What it is made of is NaN in the backward pass too, and reaches every tower that this one meets. A batch without examples
    hands nothing on.
    """
    known = tf.get_static_value(weight) if tf.is_tensor(weight) else weight
    if "weight" in by_name(outputs) and (known is None or not known):
        leaves = [leaf for leaf in tf.nest.flatten(context.batch) if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
        with tf.name_scope(context.name_scope + "weighted_loss/"), tf.device(HOST):
            is_empty = tf.reduce_any([tf.equal(tf.shape(leaf)[0], 0) for leaf in leaves] or [False])
            fine = tf.reduce_any([is_empty, tf.is_finite(loss), tf.cast(weight, tf.float64) > 0])
            check = tf.raw_ops.Assert(condition=fine, data=[
                "The loss of tower %d (%s) is not finite where its weight is 0, so its derivatives are NaN. Divide by "
                "tf.div_no_nan in the model function. It is" % (context.index, loss.name), loss])
            with tf.device(context.device), tf.control_dependencies([check]):
                return tf.identity(loss, name="loss")
    return loss


def _checked(weight, context):
    if weight.shape.rank not in (0, None):
        raise ValueError("The \"weight\" of a tower has to be a scalar; %r has shape %s." % (weight.name, weight.shape))
    if not (weight.dtype.is_floating or weight.dtype.is_integer or weight.dtype.is_bool):
        raise TypeError("The \"weight\" of a tower has to be a number; %r is %s." % (weight.name, weight.dtype.name))
    known, rule = tf.get_static_value(weight), "counts examples, so it has to be finite and 0 or more"
    if known is not None:
        if not 0 <= float(known) < float("inf"):
            raise ValueError("The \"weight\" of tower %d (%s) %s, not %s." % (context.index, weight.name, rule, known))
        return weight
    if weight.dtype.is_bool or weight.dtype.is_unsigned:
        return weight
    with tf.name_scope("weight"):
        with tf.device(HOST):
            fine = weight >= 0
            if weight.dtype.is_floating:
                fine = tf.logical_and(fine, tf.is_finite(weight))
            # Not tf.debugging.Assert, which builds a tf.cond around it. The op prints quotation marks with backslashes.
            check = tf.raw_ops.Assert(condition=tf.reduce_all(fine), data=[
                "The weight of tower %d (%s) %s. It is" % (context.index, weight.name, rule), weight])
        with tf.device(context.device), tf.control_dependencies([check]):
            return tf.identity(weight)
