"""The product's promise as a check for anyone's model: N towers train as one tower on the whole batch would."""
import contextlib
import functools
import itertools
import re
from typing import Callable, Dict, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from towers.api.annotations import ModelFn, Optimizer, Structure
from towers.api.arguments import FUNCTION, check, optional
from towers.api.wording import some_of
from towers.batches.batch import PerTower, even_sizes
from towers.builder import TowerBuilder
from towers.context import current_tower
from towers.devices.placement import session_config
from towers.graph.assignment import assign
from towers.graph.ordering import order_writes
from towers.graph.walk import ancestors, op_of
from towers.training.gradients import average_gradients, compute_gradients

__all__ = ["Differences", "assert_equals_one_batch"]

_NUM_PERMUTATIONS = 3
_EXACT = 1e-9
_MORE_THAN_ROUNDING = 1e-2
_HINT = " A loss that is no mean over examples is the whole batch's by towers.whole_batch(model_fn), however it is written."
_UNITS = {tf.float64: 2.0 ** -52, tf.float32: 2.0 ** -23, tf.float16: 2.0 ** -10, tf.bfloat16: 2.0 ** -7}
_RANDOM = re.compile("(Random|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial|StatefulRandom|StatefulStandardNormal|"
                     "StatefulUniform|StatefulTruncatedNormal)(?!.*(Dataset|Seed))")


class Differences(NamedTuple):
    """How far two trainings are apart, and how far they may be.

    Attributes:
      loss: the largest difference of a loss, relative to the largest loss.
      gradients: the largest difference of a gradient, relative to the model's largest gradient.
      variables: the largest difference of a variable after the last step, relative to the variable, or to the largest
        step that any variable took if that is more.
      bound: dict from these names to what was allowed.
    """
    loss: float
    gradients: float
    variables: float
    bound: Dict[str, float]


class _Trained(NamedTuple):
    losses: np.ndarray
    gradients: dict  # name of a variable -> array [steps, ...]
    initial: dict
    final: dict
    unit: float  # of the last place of the coarsest numbers that the loss and gradients go through, relative


def assert_equals_one_batch(model_fn: ModelFn, batch: Structure, num_towers: int = 2, sizes: Optional[Sequence[int]] = None,
                            update_ops: str = "first", steps: int = 5, optimizer: Optional[Callable[[], Optimizer]] = None,
                            devices: Optional[Sequence[str]] = None) -> Differences:
    """Trains a model on towers and on one tower with the whole batch, and asserts that it comes to the same.

    Compared are the loss, every gradient and, after the last step, every variable, moving averages included. A model in
    float64 has to agree within 1e-9. One with float32 in it, as `tf.losses` has, has to agree within three times the floor:
    the difference between one tower and itself with its batch permuted, which is what the order of sums does, measured here; or
    float32's last place, which no order of the batch may show.
    Where that is more than a percent, the model may go by the order of its examples, as mixup by `x[::-1]` does: then no more is
    allowed than a hundred times what the last bit of each number of the batch does, or 0.1 percent.
    Where the input of a ReLU is 0 but for rounding, its gradient is now 1 and now 0: so where the towers differ by more, they
    train on the permuted batches too, and have to agree with one tower in some order of the batch on both sides. A large
    model on random images may still differ in all of them. Hold it to the promise in float64 where it can be made so, by
    `tf.variable_scope(..., dtype=tf.float64)` for one.

    Where a model writes a variable more than once in a step, and TensorFlow gives the writes no order, as those of a batch norm
    applied twice, they run in the order in which they were made, in one tower and in several.

    On a GPU, convolutions and products are computed in float32 meanwhile, not in TensorFloat-32, which has 10 bits.

    The promise holds for losses that are means over examples, or over what "weight" counts. Random ops draw anew in each
    tower: set dropout rates to 0, where the loss depends on one it is an error.

    Args:
      model_fn: model function with a loss, see `TowerBuilder.build`.
      batch: nested structure of arrays; those of rank 1 or more agree in axis 0.
      num_towers: int.
      sizes: list of int, the towers' shares of axis 0; None splits evenly, the rest over the first towers.
      update_ops: policy of `collect_update_ops`. With ordinary batch norms one tower's updates are not those of the whole
        batch: make them synced, or expect this assertion to fail.
      steps: int, training steps on the same batch.
      optimizer: a function that makes a `tf.train.Optimizer`; None makes momentum 0.9 with learning rate 0.05.
      devices: list of str, the towers' devices; None is a CPU device each.

    Returns:
      `Differences`.

    Raises:
      AssertionError: if something differs by more; it says what, by how much, and what was allowed.
      ValueError: if `sizes` do not sum to the size of the batch, or there are not as many as towers; if the model draws at
        random; if one tower's own training comes to infinity or NaN, which nothing can be held against.
    """
    batch = tf.nest.map_structure(np.asarray, batch)
    check(optional(FUNCTION), optimizer=optimizer)
    optimizer = optimizer or (lambda: tf.train.MomentumOptimizer(0.05, 0.9))
    devices = devices or ["/cpu:%d" % i for i in range(num_towers)]
    size = max(len(leaf) for leaf in tf.nest.flatten(batch) if leaf.ndim)
    sizes = _check_sizes(sizes, size, num_towers)
    orders = [batch] + [_permute(batch, size, seed) for seed in range(_NUM_PERMUTATIONS)]

    def train(alternatives, devices, initial=None):
        return _train(model_fn, alternatives, devices, initial, update_ops, steps, optimizer)

    def excess(found):
        return max(found[name][0] / bound[name] for name in bound)

    of_loss = "" if hasattr(model_fn, "meetings") else _HINT
    ones = train([[order] for order in orders], devices[:1])
    one = ones[0]
    _check_finite(one)
    several = train([_divide(batch, sizes)], devices, one.initial)
    found = _compare(one, several[0])
    if one.unit == _UNITS[tf.float64]:
        bound, hint = dict.fromkeys(("loss", "gradients", "variables"), _EXACT), of_loss
    else:
        hint = of_loss + " A ReLU whose input is 0 but for rounding may do as much: try the model in float64, or another batch."
        bound = _floor(ones, one.unit)
        if max(bound.values()) > _MORE_THAN_ROUNDING:
            nearly = train([[_other_last_bits(batch, seed)] for seed in range(2)], devices[:1], one.initial)
            rounding = _floor([one] + nearly, one.unit)
            rounding = {name: max(100 * rounding[name], _MORE_THAN_ROUNDING / 10) for name in bound}
            if any(rounding[name] < bound[name] for name in bound):
                hint += " Or it goes by the order of its examples, of which towers.whole_batch lets each tower see all."
            bound = {name: min(bound[name], rounding[name]) for name in bound}
        if excess(found) > 1:
            several += train([_divide(order, sizes) for order in orders[1:]], devices, one.initial)
            found = min((_compare(*pair) for pair in itertools.product(ones, several)), key=excess)
    wrong = ["%s by %.2g (%s), allowed %.2g" % (name, found[name][0], found[name][1], bound[name])
             for name in bound if not found[name][0] <= bound[name]]
    if wrong:
        if all(found[name][0] <= bound[name] for name in ("loss", "gradients")):
            hint = (" Loss and gradients agree: is %r written by what a tower computes of its own examples, as the averages "
                    "of an unsynced batch norm are?" % found["variables"][1])
        raise AssertionError("%d towers do not train as one on the whole batch; they differ in %s.%s"
                             % (num_towers, "; in ".join(wrong), hint))
    return Differences(bound=bound, **{name: difference for name, (difference, _) in found.items()})


@contextlib.contextmanager
def _in_float32():
    config = tf.config.experimental
    is_rounded = getattr(config, "tensor_float_32_execution_enabled", bool)()
    try:
        if is_rounded:
            config.enable_tensor_float_32_execution(False)
        yield
    finally:
        if is_rounded:
            config.enable_tensor_float_32_execution(True)


def _check_sizes(sizes, size, num_towers):
    if sizes is None:
        return even_sizes(size, num_towers)
    if len(sizes) != num_towers or sum(sizes) != size:
        raise ValueError("sizes has to hold %d numbers that sum to the batch of %d, not %r." % (num_towers, size, sizes))
    return list(sizes)


def _divide(batch, sizes):
    ends = np.cumsum(sizes)
    return [tf.nest.map_structure(lambda leaf: leaf[end - n:end] if leaf.ndim else leaf, batch)
            for n, end in zip(sizes, ends)]


def _train(model_fn, alternatives, devices, initial, update_ops, steps, optimizer):
    """Trains on each of several divided batches of the same shapes, from the same variables; returns a list of `_Trained`.

    A model in float64 needs no floor, and trains on the first of them alone.
    """
    with tf.Graph().as_default(), _in_float32():
        tf.set_random_seed(0)
        given = [tf.nest.map_structure(lambda leaf: tf.placeholder(leaf.dtype, leaf.shape) if leaf.ndim else leaf, part)
                 for part in alternatives[0]]
        replicas = TowerBuilder(devices).build(_with_ordered_writes(model_fn), PerTower(given))
        made = optimizer()
        grads = average_gradients(replicas, compute_gradients(replicas, made), update_ops)
        train_op = made.apply_gradients(grads)
        _check_draws(replicas, train_op)
        dense = {variable.op.name: tf.convert_to_tensor(gradient) for gradient, variable in grads}
        variables = {variable.op.name: variable for variable in tf.global_variables()}
        tables, trained = tf.tables_initializer(), []
        initializers = [tf.global_variables_initializer(), tf.local_variables_initializer()]
        with tf.Session(config=session_config(devices)) as session:
            session.run(tables)
            session.run(initializers)
            before = dict(session.run(variables), **(initial or {}))
            unit = max(_UNITS[dtype] for dtype in {gradient.dtype for gradient in dense.values()} | _dtypes_of(replicas.loss))
            for parts in alternatives[:1] if unit == _UNITS[tf.float64] else alternatives:
                session.run(initializers)
                assign(session, [(variables[name], value) for name, value in before.items()])
                feeds = {tensor: leaf for tensor, leaf in zip(tf.nest.flatten(given), tf.nest.flatten(parts)) if leaf.ndim}
                ran = [session.run([replicas.loss, dense, train_op], feeds)[:2] for _ in range(steps)]
                trained.append(_Trained(
                    np.array([loss for loss, _ in ran]),
                    {name: np.array([gradients[name] for _, gradients in ran]) for name in dense}, before,
                    session.run(variables), unit))
    return trained


def _with_ordered_writes(model_fn):
    """Returns a model function whose writes of a variable have an order where TensorFlow leaves it open."""
    @functools.wraps(model_fn)
    def ordered(*args, **kwargs):
        graph, updates = tf.get_default_graph(), current_tower().shared_updates
        num_ops, num_updates = len(graph.get_operations()), len(updates)
        outputs = model_fn(*args, **kwargs)
        ops = graph.get_operations()[num_ops:]
        collected = tf.get_collection(tf.GraphKeys.UPDATE_OPS) + updates[num_updates:]
        ends = tf.nest.flatten(outputs, expand_composites=True) + collected
        run = ancestors([op for op in map(op_of, ends) if op is not None], within=set(ops))
        order_writes([op for op in ops if op in run], ops)
        return outputs
    return ordered


def _dtypes_of(loss):
    """Returns the floating point dtypes that a loss is computed in: through float32 in float64, as `tf.losses` does, is both."""
    casts = [{op.inputs[0].dtype, op.outputs[0].dtype} for op in ancestors([loss]) if op.type == "Cast"]
    return {loss.dtype}.union(*[dtypes for dtypes in casts if dtypes <= set(_UNITS)])


def _check_draws(replicas, train_op):
    draws = sorted(op.name for op in ancestors([replicas.loss, train_op]) if _RANDOM.match(op.type))
    if draws:
        raise ValueError("The model draws at random, so no two trainings of it are alike: %s. Set rates of dropout to 0, and "
                         "feed other noise with the batch." % some_of(draws))


def _check_finite(one):
    values = dict(one.gradients, **one.final)
    wrong = ["the loss"] * (not np.isfinite(one.losses).all()) + [
        name for name in sorted(values) if values[name].dtype.kind == "f" and not np.isfinite(values[name]).all()]
    if wrong:
        raise ValueError("One tower alone, trained on the whole batch, comes to infinity or NaN in %s: nothing can be held "
                         "against it. Take fewer steps, or an optimizer with a smaller learning rate." % ", ".join(wrong[:5]))


def _permute(batch, size, seed):
    order = np.random.RandomState(seed).permutation(size)
    return tf.nest.map_structure(lambda leaf: leaf[order] if leaf.ndim else leaf, batch)


def _other_last_bits(batch, seed):
    """Returns a batch whose floating point numbers are the next ones, up or down."""
    rng = np.random.RandomState(seed)

    def moved(leaf):
        if leaf.dtype.kind != "f":
            return leaf
        return np.nextafter(leaf, np.where(rng.rand(*leaf.shape) < 0.5, -np.inf, np.inf).astype(leaf.dtype))
    return tf.nest.map_structure(moved, batch)


def _floor(ones, smallest):
    """Returns three times how far one tower is from itself when its batch is permuted; three times `smallest` at least."""
    floor = dict.fromkeys(("loss", "gradients", "variables"), smallest)
    one, *permuted = ones
    for other in permuted:
        for name, (difference, _) in _compare(one, other).items():
            floor[name] = max(floor[name], difference)
    return {name: 3 * difference for name, difference in floor.items()}


def _compare(one, other):
    """Returns a dict of (difference, name of what differs most)."""
    for kind in ("gradients", "final"):
        if set(getattr(one, kind)) != set(getattr(other, kind)):
            raise AssertionError("The towers have other %s than one tower: %s." % (
                "variables" if kind == "final" else "gradients",
                ", ".join(sorted(set(getattr(one, kind)) ^ set(getattr(other, kind))))))

    def difference(a, b):
        if a.dtype.kind not in "fiuc":  # bools, strings
            return (a != b).astype(np.float64)
        return a - b

    largest_gradient = max(_largest(gradient) for gradient in one.gradients.values())
    largest_step = max(_largest(one.final[name] - one.initial[name]) for name in one.gradients)
    size = {name: 0.0 if value.dtype.kind not in "fiuc" else _largest(value) for name, value in one.final.items()}
    return {
        "loss": (_ratio(_largest(one.losses - other.losses), _largest(one.losses)), "the loss"),
        "gradients": max((_ratio(_largest(one.gradients[name] - other.gradients[name]), largest_gradient), name)
                         for name in one.gradients),
        "variables": max((_ratio(_largest(difference(one.final[name], other.final[name])), max(size[name], largest_step)), name)
                         for name in one.final),
    }


def _largest(array):
    return float(np.max(np.abs(np.asarray(array, np.float64)))) if np.size(array) else 0.0


def _ratio(difference, scale):
    # NaN on either side is a difference without bound, never one that compares as small.
    return np.inf if np.isnan(difference) else 0.0 if difference == 0 else difference / scale if scale else np.inf
