"""Normalization by the moments of the whole batch: where the towers of a layer meet, forward and backward.

No variables are made here, and no moving average moves.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from tf_syncbn.kernels import fused_op
from tf_syncbn.kernels.choose import Machine, choose
from tf_syncbn.kernels.graph_function import call, call_with_gradient
from tf_syncbn.kernels.layer import Layer
from tf_syncbn.kernels.merge import merge, merge_apart, merge_groups, merge_merged, with_count
from tf_syncbn.kernels.moments import split
from tf_syncbn.kernels.plain import reference
from tf_syncbn.kernels.rows import along
from towers.context import span
from towers.graph.gradient_hook import with_gradient
from towers.graph.private import control_flow_now, is_deterministic, runs_onednn
from towers.meeting.cross_tower import Divisor, cross_tower_sum_at
from towers.meeting.exchanges import gradient_place, meet_at, next_place, pass_with_gradient
from towers.meeting.meetings import Across
from towers.sharding.rules.normalization import FUSED

__all__ = ["Normalization", "moments_over_towers", "normalize_over_towers"]


class Normalization(NamedTuple):
    """How a layer normalizes.

    Attributes:
      layer: `Layer`, what it normalizes.
      epsilon: float, added to the variance.
      group_size: int, moments are shared by groups of so many consecutive towers; None is all towers.
      kernels, plain, takes_shares: see `tf_syncbn.kernels.choose.Strategy`; set here.
    """
    layer: Layer
    epsilon: float
    group_size: Any = None
    kernels: Any = reference
    plain: Any = reference
    takes_shares: bool = False


def normalize_over_towers(x, gamma, beta, how, tower, mask=None, training=None, frozen=None, correct=None, arguments=()):
    """Computes `gamma (x - mean) / sqrt(var + epsilon) + beta` by the moments of all towers, or of the tower's group.

    The tower meets the others once here, and once in each gradient.

    Args:
      x: floating point tensor, of which `how.layer` is.
      gamma, beta: tensors [C] of the accumulator's dtype, or None.
      how: `Normalization`.
      tower: the current `TowerContext`, or None outside of towers.
      mask: weights of the positions, in the accumulator's dtype, of a shape that broadcasts to `x`, size 1 along the
        channels' axis; or None.
      training: scalar bool tensor; where it is False the moments are `frozen`. None stands for True.
      frozen: (mean, variance), two tensors [C].
      correct: a function of an aggregate of moments that makes it return corrections too, see
        `tf_syncbn.renormalization.with_corrections`; or None.
      arguments: dict of what else makes the layer what it is, alike in every tower.

    Returns:
      y: tensor of the shape and dtype of `x`.
      whole: the moments of all towers, a tuple, see `tf_syncbn.kernels.moments`.
    """
    layer = how.layer
    arguments = dict(arguments, axis=layer.axis, epsilon=how.epsilon, group_size=how.group_size, mask=mask is not None,
                     scale=gamma is not None, center=beta is not None, training=True if training is None else training)
    with _span(tower, x, gamma, beta, mask, training, frozen):
        machine = machine_of(x, tower)
        strategy, known = choose(layer, machine), layer.count if mask is None else None
        how = how._replace(kernels=strategy.kernels, plain=strategy.plain, takes_shares=strategy.takes_shares and mask is None)
        as_one_op = strategy.as_one_op(layer, machine)
        is_plain = known and training is None and correct is None and how.epsilon >= fused_op.LEAST_EPSILON
        # TensorFlow takes the fused op's second derivative for zero in a loop.
        is_plain = is_plain and control_flow_now(tf.get_default_graph()) is None
        if is_plain and as_one_op and machine.kind == "GPU" and (tower is None or tower.num_towers == 1):
            if tower is not None:
                next_place("sync_batch_norm", [], arguments=arguments)  # for what it checks
            y, whole = fused_op.normalize_images_alone(x, gamma, beta, how.epsilon, layer)
            return y, (whole, None, None)
        # Packed, the moments are fewer nodes of the graph; apart, fewer ops to start, which is what counts on a GPU.
        are_apart = as_one_op and machine.kind != "CPU" or training is not None
        left = _Left(call(how.kernels.local_moments, x, mask, axis=layer.axis), layer.channels, known,
                     are_apart and (tower is None or tower.meetings.peers is None))
        place, moments, whole, corrections = _moments_of(left, how, correct, tower, arguments)
        if corrections is not None:
            r, d = tf.split(tf.stop_gradient(corrections), 2)
            gamma, d = (r, d) if gamma is None else (gamma * r, gamma * d)
            beta = d if beta is None else beta + d
        if are_apart and moments[1] is None:
            moments = call(split, moments[0])
        if training is not None:
            moments = (moments[0], *(tf.where_v2(training, new, old) for new, old in zip(moments[1:], frozen)))
        packed, mean, variance = _as_kernels_take(*moments)
        optional = (gamma, beta, mask, training)
        if as_one_op:
            # Grappler does not see through a kernel's call or an identity_n. So the layer's gradient stands in front of the op,
            # whose own gradient hands dy on to it.
            if not are_apart:
                mean, variance = call(fused_op.statistics, packed, epsilon=how.epsilon)
            epsilon = how.epsilon if are_apart else max(how.epsilon, fused_op.LEAST_EPSILON)
            x = _with_gradient(place, how, x, moments, x, optional)
            y, = with_gradient(
                "TowersHandOn", lambda: [fused_op.normalize_images(x, mean, variance, gamma, beta, epsilon,
                                                                   fused_op.data_format(layer, layer.axis))],
                FUSED.split())
            return y, whole
        y = call(how.kernels.normalize, x, packed, mean, variance, gamma, beta, axis=layer.axis, epsilon=how.epsilon)
        return _with_gradient(place, how, y, moments, x, optional), whole


def _span(tower, *inputs):
    """Holds a layer together: kernels follow the size of its input, so towers of other sizes may compute it otherwise."""
    return span(None if tower is None else ("sync_batch_norm", tower.meetings.turns.next_of(tower.local_index)), *inputs)


def moments_over_towers(x, axis, tower):
    """Computes the moments of all towers, for a model that normalizes by them itself.

    The tower meets the others once here, and once in each gradient.

    Args:
      x: floating point tensor, C channels along `axis`.
      axis: int, not negative.
      tower: the current `TowerContext`, or None outside of towers.

    Returns:
      Tensor [2C + 1] of the accumulator's dtype, see `tf_syncbn.kernels.merge.merge`. Gradients pass its means and variances.
    """
    with _span(tower, x):
        layer = Layer(x.shape, x.dtype, axis)
        packed = call(choose(layer, machine_of(x, tower)).kernels.local_moments, x, None, axis=axis)
        place, whole = _meet(_Left(packed, layer.channels, layer.count), None, (), tower, {"axis": axis})
        return pass_with_gradient("SyncMoments", [whole, x], place, axis, "with_gradient")[0]


def machine_of(x, tower):
    """Returns the `Machine` that a tower's kernels of `x` are going to run on."""
    generation = int(tf.__version__.split(".")[0])
    if tower is not None and "CPU" in tower.device.upper():
        return Machine("CPU", generation, runs_onednn())
    # Not a CPU that stands in for a GPU, nor one that a layer outside of towers is put on: an op made here says so.
    on_gpu = "CPU" not in tf.no_op().device.upper() if tower is None else "GPU" in tower.device.upper()
    on_gpu = on_gpu and "CPU" not in x.device.upper()
    kind = "GPU" if on_gpu and tf.config.experimental.list_physical_devices("GPU") else None
    return Machine(kind, generation, False, is_deterministic())


class _Left(NamedTuple):
    """What a tower leaves where towers meet for their moments.

    Attributes:
      packed: tensor, from a kernel `local_moments`.
      channels: int, C.
      count: int, its count; None where that is not known while the graph is built.
      is_apart: whether the tower takes the moments of all towers as two tensors, see `tf_syncbn.kernels.merge.merge_apart`.
    """
    packed: tf.Tensor
    channels: int
    count: Any
    is_apart: bool = False


def _moments_of(left, how, correct, tower, arguments):
    """Returns the layer's place, the moments that its tower normalizes by, those of all towers, and corrections [2C] or None."""
    if correct is None and how.group_size is None:
        place, count, *pair = _meet(left, None, (), tower, arguments)
        whole = (count, *(tf.unstack(pair[0]) if pair else (None, None)))
        return place, whole, whole, None
    dtype, channels = left.packed.dtype, left.channels
    aggregate, results = _merged(channels, how.group_size), [(dtype, [2 * channels + 1])] * 2
    if correct is not None:
        aggregate, results = correct(aggregate), results + [(dtype, [2 * channels])]
    place, used, whole, *corrections = _meet(left, aggregate, results, tower, arguments)
    return place, (used, None, None), (whole, None, None), corrections[0] if corrections else None


def _merged(channels, group_size):
    """Returns an aggregate for an exchange: for each tower, the moments of its group and of all towers."""
    def aggregate(per_tower):
        packed, counts = zip(*[(packed, known and known[0]) for packed, known in per_tower])
        size = group_size or len(packed)
        *groups, whole = call(merge_groups, *packed, channels=channels, counts=counts, group_size=size)
        return [[groups[i // size], whole] for i in range(len(packed))]
    return aggregate


def _of_all(channels):
    """Returns an aggregate for an exchange: for each tower the moments of all of them, in the form that it takes."""
    def aggregate(per_tower):
        packed, known = zip(*per_tower)
        counts, forms = zip(*known)
        made = {is_apart: call(merge_apart if is_apart else merge, *packed, channels=channels, counts=counts)
                for is_apart in dict.fromkeys(forms)}
        return [list(made[is_apart]) if is_apart else [made[is_apart]] for is_apart in forms]
    return aggregate


def _meet(left, aggregate, results, tower, arguments):
    """Returns the layer's place, and for each of `results`, pairs of dtype and shape, what the aggregate holds.

    A count that is known does not cross: where all are, the merge takes them as constants. Where `aggregate` is None, every
    tower gets the moments of all of them, in the form that it takes.
    """
    packed, channels, known = left.packed, left.channels, [left.count, left.is_apart]
    if aggregate is None:
        results = [(packed.dtype, shape) for shape in ([[1], [2, channels]] if left.is_apart else [[2 * channels + 1]])]
    if tower is None:
        return (None, *(aggregate or _of_all(channels))([[packed, known]])[0])
    with tf.name_scope("exchange"):
        across = Across(lambda per_tower: _of_all(channels)(per_tower)[0][0], lambda merged: [call(merge_merged, merged)])
        shape = tf.TensorShape(None)
        if aggregate and tower.meetings.peers is not None:  # groups may lie in several workers: all of it crosses
            if left.count is not None:
                packed = call(with_count, packed, count=left.count)
            across, shape, known = None, packed.shape, None
        place = next_place("sync_batch_norm", [packed], [shape], dict(arguments, channels=channels))
        return (place, *meet_at(place, [packed], aggregate or _of_all(channels), results, [known], across))


def _with_gradient(place, how, value, moments, x, optional):
    """Returns `value`, which is to have the gradient of the layer's output, with the layer's gradient.

    Autodiff sees neither how the output nor how its moments were computed.
    """
    optional = (*moments, *optional)
    tensors = [value, x] + [tensor for tensor in optional if tensor is not None]
    detail = how, tuple(tensor is not None for tensor in optional)
    return pass_with_gradient("SyncBatchNorm", tensors, place, detail, "with_gradient")[0]


@tf.RegisterGradient("SyncBatchNorm")
def _sync_batch_norm_gradient(op, dy, _, *d_given):
    """The gradient of one tower's part; `op` passes on what it was given, moments among them.

    The moments are outputs of `op`, whose gradients arrive here when this function is itself differentiated: hence derivatives
    of any order. In a first derivative they are zeros, and towers exchange less.
    """
    place, (how, optional) = gradient_place(op)
    dy = tf.convert_to_tensor(dy)  # slices, where rows of the output were gathered
    num_moments = sum(optional[:3])
    d_moments = [] if all(map(_is_zeros, d_given[:num_moments])) else d_given[:num_moments]
    with _gradient_span(op, place, dy, d_moments, list(op.outputs)):
        x, given = op.inputs[1], iter(list(op.outputs[2:2 + num_moments]) + list(op.inputs[2 + num_moments:]))
        *moments, gamma, beta, mask, training = [next(given) if there else None for there in optional]
        count, moments = moments[0], _as_kernels_take(*moments)
        options = {"axis": how.layer.axis, "epsilon": how.epsilon}
        with tf.name_scope("exchange"):
            sums, *scaled = call_with_gradient(how.kernels.gradient_sums, dy, x, *moments, gamma, masked=mask is not None,
                                               plain=how.plain.gradient_sums, **options)
            d_beta, d_gamma, scale = tf.unstack(sums)
            means = tf.concat([sums, _rows_of(d_moments)], 0) if d_moments else sums
            known = how.layer.count if mask is None else None
            divisor = Divisor(lambda: count if num_moments == 3 else count[:1], known, how.takes_shares)
            if place is not None:
                means = cross_tower_sum_at(place, means, how.group_size, 2, divisor)  # row 2 is the scale, whose sum nobody takes
            elif not how.takes_shares:
                means = tf.div_no_nan(means, divisor.of_all())
        dy, scaled = (None, scaled[0]) if scaled else (dy, None)
        dx, = call_with_gradient(how.kernels.input_gradient, dy, x, *moments, scale, sums, means, scaled, training, mask,
                                 plain=how.plain.input_gradient, **options)
        of_optional = zip((d_gamma, d_beta, None, None), (gamma, beta, mask, training))
        return [None, dx] + [None] * num_moments + [d for d, tensor in of_optional if tensor is not None]


def _rows_of(d_moments):
    """Returns the gradients by mean and variance [2, C], of those by the moments."""
    return tf.stack(d_moments[1:]) if len(d_moments) == 3 else tf.reshape(d_moments[0][1:], [2, -1])


def _as_kernels_take(count, mean, variance):
    """Returns moments as the kernels of a layer take them, which need no count."""
    return (count, None, None) if mean is None else (None, mean, variance)


def _gradient_span(op, place, *inputs):
    """Holds a layer's gradient together in a model function that takes it, as `_span` does the layer."""
    return span(("sync_batch_norm gradient", op.name if place is None else place.key), *inputs)


@tf.RegisterGradient("SyncMoments")
def _sync_moments_gradient(op, d_moments, _):
    """The gradient of the moments of all towers with respect to one tower's part of the batch."""
    place, axis = gradient_place(op)
    with _gradient_span(op, place, d_moments, list(op.outputs)):
        with tf.name_scope("exchange"):
            if place is not None:
                d_moments = cross_tower_sum_at(place, d_moments)
        dx, = call_with_gradient(_moments_gradient, op.inputs[1], op.outputs[0], d_moments, axis=axis, plain=_moments_gradient)
    return None, dx


def _moments_gradient(x, moments, d_moments, *, axis):
    """Computes `(d mean + 2 d var (x - mean)) / n`; that the mean moves with `x` changes no variance."""
    count, mean, _ = split(moments)
    _, d_mean, d_variance = split(d_moments)
    share = tf.div_no_nan(tf.ones_like(count), count)
    wide = tf.cast(x, moments.dtype)
    dx = (wide - along(mean, x, axis)) * along(2 * share * d_variance, x, axis) + along(share * d_mean, x, axis)
    return tf.cast(dx, x.dtype),


def _is_zeros(tensor):
    """Tells whether a tensor is known to be zero while the graph is built."""
    if tensor.op.type == "ZerosLike":  # what tf.gradients makes for an output that nobody uses
        return True
    value = tf.get_static_value(tensor)
    return value is not None and not value.any()
