"""The laws of sync_batch_norm, on batches, towers, masks, groups and dtypes that Hypothesis draws.

Per channel the results are NumPy's within a tolerance where a channel has at least 8 values whose mean is at most 10 standard
deviations; beyond that they are as near as the same steps come in NumPy. Rounded inputs are what NumPy is given too.
"""
from typing import Any, NamedTuple, Optional

import hypothesis
import numpy as np
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

import tf_syncbn
import towers
from tests.batch_norm_oracle import (
    frozen, gradients, group_variances, in_steps, largest, normalized, numerical_gradient)
from tests.kernel_machines import MACHINES, running_on
from tests.support import build, session

# Of the largest value. Moving averages and gradients of gamma and beta are float32 under float16 inputs, and held to that.
TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
UNIT = {"float64": 2.0 ** -53, "float32": 2.0 ** -24, "float16": 2.0 ** -11, "bfloat16": 2.0 ** -8}  # of rounding to nearest
UNDERFLOW = {"float16": 2.0 ** -25}  # is rounded to 0; the other dtypes reach below all that stands here
FACTOR = 4  # of the error of the same steps in NumPy, for few values and large means, on top of the tolerance
# How often what cancels on the way may have been rounded where chance spared NumPy's steps: half the root of a block of 256 rows,
# which are added row to row.
ROUNDINGS = 8

STATIC = [False, False, True]  # known shapes are traced anew in each case, which takes half of its time
MASKS_OF_ALL_EXAMPLES = ["shared", "trailing"]  # one mask for all examples, which is not divided over towers
MASKS = [None, None, "bool", "weights", "counts", "examples"] + MASKS_OF_ALL_EXAMPLES
FEWER = hypothesis.settings(max_examples=max(hypothesis.settings.default.max_examples // 8, 5))  # for what builds two graphs


class Case(NamedTuple):
    """What Hypothesis draws: a batch over towers, and a layer."""
    shape: list
    axis: int
    sizes: list  # rows of each tower
    outside: bool  # whether the one tower is no tower: the layer stands alone
    group_size: Optional[int]
    dtype: str
    mask: Optional[str]
    poison: Optional[float]  # what x holds at positions of weight 0
    center: bool
    scale: bool
    momentum: float
    epsilon: float
    training: Any  # True, False, or "fed True" and "fed False", what a placeholder is fed
    static: bool  # whether shapes are known while the graph is built
    machine: Optional[str]  # whose kernels are chosen, None for this one's
    small: bool  # whether kernels are those of small tensors; all here are
    mean_over_std: float
    std: float
    order: str  # "drawn"; "sorted" rows, so that towers differ; or the first row an "outlier"
    constant: bool  # whether every other channel holds one value
    fresh: bool  # whether the moving averages start at zero
    seed: int

    @property
    def stored(self):
        """The dtype of moments and variables."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def is_trained(self):
        return self.training in (True, "fed True")

    @property
    def groups(self):
        """List over groups of lists over their towers of numbers of rows."""
        size = self.group_size or len(self.sizes)
        return [self.sizes[i:i + size] for i in range(0, len(self.sizes), size)]

    @property
    def ends_of_groups(self):
        return np.cumsum([sum(group) for group in self.groups])[:-1].tolist()


class Data(NamedTuple):
    """The arrays of a case, in float64 but for `given` and `mask`."""
    x: Any  # rounded to the case's dtype
    given: Any  # x with poison, in the case's dtype
    dy: Any  # rounded, zero where x is poison
    mask: Any
    weights: Any  # of all positions
    gamma: Any
    beta: Any
    moving_mean: Any
    moving_variance: Any


@st.composite
def cases(draw, few_values=False, trainings=(True,), mean_over_std=(0.0, 1.0, 10.0), dtypes=tuple(TOLERANCE), poison=True):
    """Draws a case; with `few_values` a channel may have less than 8, or one and the same everywhere."""
    rank, num_towers = draw(st.integers(2, 5)), draw(st.integers(1, 5))
    axis = draw(st.integers(1, rank - 1))
    group_size = draw(st.sampled_from([None] + [g for g in range(1, num_towers + 1) if num_towers % g == 0]))
    rows = st.sampled_from([0, 1, 2, 3, 5, 9])
    sizes = draw(st.lists(rows, min_size=num_towers, max_size=num_towers).filter(any))
    inner = [draw(st.sampled_from([1, 2, 3, 4, 9])) for _ in range(rank - 1)]
    inner[axis - 1] = 1
    mask, training = draw(st.sampled_from(MASKS)), draw(st.sampled_from(trainings))
    if not few_values:
        sizes = _with_enough_rows(sizes, group_size or num_towers, np.prod(inner), 8 if mask is None else 24)
    inner[axis - 1] = draw(st.sampled_from([1, 2, 3, 5, 7, 33, 64]))
    # Frozen moments know of no mask: there NaN passes on, as in any batch norm.
    poisons = [None, np.nan, np.inf, 6e4] if poison and mask and training in (True, "fed True") else [None]
    orders = ["drawn", "sorted"] + ["outlier"] * few_values
    return Case(
        [sum(sizes)] + inner, axis - draw(st.sampled_from([0, rank])), sizes, num_towers == 1 and draw(st.booleans()),
        group_size, draw(st.sampled_from(dtypes)), mask, draw(st.sampled_from(poisons)), draw(st.booleans()),
        draw(st.booleans()), draw(st.sampled_from([0.0, 0.3, 0.9, 0.99])), draw(st.sampled_from([1e-5, 1e-3, 0.1])), training,
        draw(st.sampled_from(STATIC)), draw(st.sampled_from([None] + sorted(MACHINES))), draw(st.booleans()),
        draw(st.sampled_from(mean_over_std)),
        draw(st.sampled_from([0.1, 1.0, 4.0])), draw(st.sampled_from(orders)), few_values and draw(st.booleans()),
        draw(st.booleans()), draw(st.integers(0, 10**6)))


def _with_enough_rows(sizes, group_size, positions, values):
    """Returns `sizes` with rows added so that each group has no values or enough of them."""
    sizes = list(sizes)
    for first in range(0, len(sizes), group_size):
        missing = -(-values // int(positions)) - sum(sizes[first:first + group_size])
        if missing > 0 and any(sizes[first:first + group_size]):
            sizes[first] += missing
    return sizes


def make_data(case, few_values=False):
    """Makes the arrays of a case."""
    rng = np.random.RandomState(case.seed)
    axis, channels = case.axis % len(case.shape), case.shape[case.axis]
    positions = [n for i, n in enumerate(case.shape) if i != axis]
    mask, weights = _make_mask(rng, case, positions)
    while not few_values and min(_numbers_of_values(weights, case)) < 8:
        mask, weights = _make_mask(rng, case, positions)
    x = rng.randn(*(positions + [channels]))
    x = {"drawn": x, "sorted": np.sort(x, 0), "outlier": np.concatenate([x[:1] + 100, x[1:]])}[case.order]
    if case.constant:
        x[..., ::2] = 0
    offsets = np.concatenate([[1], rng.uniform(-1, 1, channels - 1)])
    given = _rounded(np.moveaxis(case.std * (x + case.mean_over_std * offsets), -1, axis), case.dtype)
    x, dy = given.astype(np.float64), _rounded(rng.randn(*case.shape), case.dtype).astype(np.float64)
    if case.poison is not None:
        uncounted = np.expand_dims(weights == 0, axis)
        given, dy = np.where(uncounted, given.dtype.type(case.poison), given), np.where(uncounted, 0, dy)
    gamma = rng.uniform(0.5, 1.5, channels) * rng.choice([-1, 1], channels) if case.scale else np.ones(channels)
    beta = rng.randn(channels) if case.center else np.zeros(channels)
    averages = rng.randn(channels) * (not case.fresh), rng.uniform(0.5, 2, channels) * (not case.fresh)
    return Data(x, given, dy, mask, weights, *[_rounded(a, "float32").astype(np.float64) for a in (gamma, beta) + averages])


def _rounded(x, dtype):
    if dtype == "bfloat16":
        x = x.astype(np.float32)  # NumPy does not know bfloat16, and TensorFlow 1.15 rounds to it from float32 alone
    return x.astype(tf.as_dtype(dtype).as_numpy_dtype)


def _make_mask(rng, case, positions):
    """Returns a mask or None, and the float64 weights of all positions that it stands for."""
    shape = {"examples": positions[:1] + [1] * (len(positions) - 1), "shared": [1] + positions[1:],
             "trailing": positions[1:]}.get(case.mask, positions)
    if case.mask is None:
        return None, np.ones(positions)
    if case.mask == "weights":
        mask = np.where(rng.rand(*shape) < 0.8, rng.rand(*shape), 0).astype(np.float32)
    elif case.mask == "counts":
        mask = rng.randint(0, 4, shape).astype(np.int32)
    else:
        mask = np.asarray(rng.rand(*shape) < 0.7)
    return mask, np.broadcast_to(mask, positions).astype(np.float64)


def _numbers_of_values(weights, case):
    """Returns the number of values a channel in each group that has any, by Kish: (sum w)^2 / sum w^2."""
    return [w.sum() ** 2 / max(np.square(w).sum(), 1e-300) for w in np.split(weights, case.ends_of_groups) if len(w)]


class Fed(NamedTuple):
    """Placeholders of each tower, and what they are fed."""
    xs: list
    dys: list
    masks: list
    training: Any
    feed_dict: dict


def feed(case, data):
    """Makes the placeholders of a case."""
    feed_dict, ends = {}, np.cumsum(case.sizes)[:-1]

    def place(arrays, known_axis=None):
        shapes = [[n if case.static or i == known_axis else None for i, n in enumerate(a.shape)] for a in arrays]
        made = [tf.placeholder(a.dtype, shape) for a, shape in zip(arrays, shapes)]
        feed_dict.update(zip(made, arrays))
        return made

    xs, dys = (place(np.split(a, ends), case.axis % a.ndim) for a in (data.given, data.dy.astype(data.given.dtype)))
    masks, training = [None] * len(xs), case.training
    if data.mask is not None:
        masks = place([data.mask] * len(xs) if case.mask in MASKS_OF_ALL_EXAMPLES else np.split(data.mask, ends))
    if isinstance(training, str):
        training = tf.placeholder(tf.bool, [])
        feed_dict[training] = case.training == "fed True"
    return Fed(xs, dys, masks, training, feed_dict)


def tower_index():
    """Returns the number of the tower being built, 0 outside of towers."""
    return towers.current_tower().index if towers.current_tower() else 0


def apply_layer(case, data, x, fed):
    """Builds the layer of a case in the current tower, or outside of towers."""
    y = tf_syncbn.sync_batch_norm(
        x, case.axis, case.momentum, case.epsilon, case.center, case.scale, name="bn", group_size=case.group_size,
        mask=fed.masks[tower_index()], training=fed.training if case.outside else None,
        **{name + "_initializer": tf.constant_initializer(getattr(data, name))
           for name in ("gamma", "beta", "moving_mean", "moving_variance")})
    assert y.dtype == x.dtype and y.shape.as_list() == x.shape.as_list()
    return y


def build_towers(function, case, fed):
    """Returns a list over towers of what `function` makes of their x, and the update ops."""
    if case.outside:
        return [function(fed.xs[0])], tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    replicas = build(function, towers.PerTower([(x,) for x in fed.xs]), len(fed.xs), training=fed.training)
    return [tower.outputs for tower in replicas], towers.collect_update_ops(replicas)


def run_layer(case, data):
    """Returns what sync_batch_norm makes of a case, by name, in float64."""
    with tf.Graph().as_default(), running_on(case.machine, case.small):
        fed = feed(case, data)
        ys, updates = build_towers(lambda x: apply_layer(case, data, x, fed), case, fed)
        affine = tf.trainable_variables()
        slopes = tf.gradients(ys, fed.xs + affine, fed.dys)
        averages = {v.op.name[len("bn/"):]: v for v in tf.global_variables() if "moving" in v.op.name}
        with session() as made:
            ys, slopes, _ = made.run([ys, slopes, updates], fed.feed_dict)
            results = made.run(averages)
        results.update({"d_" + v.op.name[len("bn/"):]: slope for v, slope in zip(affine, slopes[len(fed.xs):])})
    assert all(value.dtype == case.stored for value in results.values())
    results.update(y=np.concatenate(ys), dx=np.concatenate(slopes[:len(fed.xs)]))
    return {name: value.astype(np.float64) for name, value in results.items()}


def expect(case, data):
    """Returns what the textbook makes of a case in float64, by name."""
    common = data.x, data.dy, case.axis
    if not case.is_trained:
        results = frozen(*common, data.gamma, data.beta, data.moving_mean, data.moving_variance, case.epsilon)
        return _by_name(case, data, *results, moments=None)
    y, *moments = normalized(data.x, case.axis, data.gamma, data.beta, data.weights, case.ends_of_groups, case.epsilon)
    slopes = gradients(*common, data.gamma, data.weights, case.ends_of_groups, case.epsilon)
    return _by_name(case, data, y, *slopes, moments=moments)


def expect_in_steps(case, data):
    """Returns what the steps of towers make of a case in NumPy, in the dtype of the layer's moments, by name."""
    results = in_steps(data.x, data.dy, case.axis, data.gamma, data.beta, data.weights, case.groups, case.epsilon,
                       np.dtype(case.stored).type)
    assert all(result.dtype == case.stored for result in results)
    return _by_name(case, data, *results[:4], moments=results[4:])


def _by_name(case, data, y, dx, d_gamma, d_beta, moments):
    results = {"y": y, "dx": dx, "moving_mean": data.moving_mean, "moving_variance": data.moving_variance}
    results.update({"d_gamma": d_gamma} if case.scale else {}, **({"d_beta": d_beta} if case.center else {}))
    if moments is not None and moments[2] > 0:
        mean, variance, count = moments
        rank, keep = len(case.shape), case.momentum
        fused_axes = {4: (1, 3)} if tf.__version__.startswith("1.") else {4: (1, 3), 5: (1, 4)}
        if case.axis % rank in fused_axes.get(rank, ()) and case.dtype != "float64":
            variance = variance * (count / max(count - 1, 1))
        results["moving_mean"] = keep * data.moving_mean + (1 - keep) * mean
        results["moving_variance"] = keep * data.moving_variance + (1 - keep) * variance
    return results


def sums_of_random_sign(case, data):
    """Returns how large sums of so many terms are where nothing but chance cancels, a channel, by name."""
    dy, hat = data.dy, expect(case, data._replace(gamma=1.0, beta=0.0))["y"]
    return {name: np.sqrt(np.square(np.moveaxis(terms, case.axis, -1)).sum(tuple(range(dy.ndim - 1))))
            for name, terms in (("d_gamma", dy * hat), ("d_beta", dy))}


def sizes_that_cancel(case, data):
    """Returns how large, a channel, what is summed or subtracted on the way to each result is, by name.

    Where a result is small because large terms cancel, it can't be known better than to their rounding: a mean to that of the
    largest x, which in standard deviations is `lost`; a variance to that of the means of towers; a sum to that of its terms; a
    moving average to that of its value before.
    """
    x, dy = (np.moveaxis(a, case.axis, -1) for a in (data.x, data.dy))
    axes = tuple(range(x.ndim - 1))
    variances = data.moving_variance[None]
    if case.is_trained:
        variances = group_variances(data.x, case.axis, data.weights, case.ends_of_groups)
    inverse, largest_x, gamma = 1 / np.sqrt(variances.min(0) + case.epsilon), np.abs(x).max(axes), np.abs(data.gamma)
    lost = np.maximum(largest_x * inverse, 1)
    std, = np.sqrt(group_variances(data.x, case.axis, data.weights, []))
    # The rounding of the largest x, squared, is what the variance of a constant channel may come to.
    squares = largest_x * (std + UNIT[case.stored] * largest_x)
    return {"y": gamma * lost + np.abs(data.beta), "dx": gamma * inverse * lost * np.abs(dy).max(axes),
            "d_gamma": np.abs(dy).sum(axes) + lost * np.sqrt(np.square(dy).sum(axes)), "d_beta": np.abs(dy).sum(axes),
            "moving_mean": np.maximum(largest_x, np.abs(data.moving_mean)),
            "moving_variance": np.maximum(squares, data.moving_variance)}


def largest_a_channel(case, data, name, a, wanted):
    """Returns the largest absolute value of each channel where a result is defined: [C]."""
    if name not in ("y", "dx"):
        return np.abs(a)
    # Where nothing was counted y is x / sqrt(epsilon), which float16 may not hold.
    defined = np.logical_not(np.abs(wanted) > (65504 if case.dtype == "float16" else np.inf))
    if case.poison is not None:
        defined &= np.expand_dims(data.weights > 0, case.axis % a.ndim)
    return np.moveaxis(np.abs(np.where(defined, a, 0)), case.axis, -1).max(tuple(range(a.ndim - 1)))


@np.errstate(invalid="ignore")  # of NaN where x is poison
def assert_law(case, data, ours, wanted, steps=None):
    """Asserts that results are those wanted within the tolerance; with `steps`, that and as near as `steps` are."""
    assert set(ours) == set(wanted)
    sums, cancel = sums_of_random_sign(case, data), sizes_that_cancel(case, data)
    for name in sorted(ours):
        dtype = case.dtype if name in ("y", "dx") else case.stored
        error, value = (largest_a_channel(case, data, name, a, wanted[name]) for a in (ours[name] - wanted[name], wanted[name]))
        allowed = TOLERANCE[dtype] * np.maximum(value, sums.get(name, 0)) + UNDERFLOW.get(dtype, 0)
        if steps is not None and dtype == "float64":
            allowed += TOLERANCE[dtype] * cancel[name]  # what is wanted was rounded likewise
        elif steps is not None or name.startswith("moving"):
            allowed += ROUNDINGS * UNIT[case.stored] * cancel[name]
        if steps is not None:
            allowed += FACTOR * largest_a_channel(case, data, name, steps[name] - wanted[name], wanted[name])
        worst = np.argmax(error - allowed)  # NaN, if there is one
        assert error[worst] <= allowed[worst], "%s of channel %d is off by %g, and %g is allowed" % (
            name, worst, error[worst], allowed[worst])


@hypothesis.given(cases(trainings=(True, True, "fed True", "fed False", False)))
def test_values_gradients_and_moving_averages_are_numpys(case):
    data = make_data(case)
    ours = run_layer(case, data)
    assert_law(case, data, ours, expect(case, data))
    if not case.is_trained:
        assert (ours["moving_mean"] == data.moving_mean).all() and (ours["moving_variance"] == data.moving_variance).all()


@hypothesis.given(cases(few_values=True, trainings=(True, "fed True"), mean_over_std=(0.0, 1.0, 10.0, 1e2, 1e3, 1e4)))
def test_few_values_and_large_means_are_as_near_as_the_same_steps_come_in_numpy(case):
    data = make_data(case, few_values=True)
    ours = run_layer(case, data)
    assert (ours["moving_variance"] >= 0).all()
    assert_law(case, data, ours, expect(case, data), expect_in_steps(case, data))


@FEWER
@hypothesis.given(cases(), st.data())
def test_another_split_of_the_batch_changes_nothing(case, draws):
    case, rows = case._replace(group_size=None, outside=False), case.shape[0]
    cuts = sorted(draws.draw(st.lists(st.integers(0, rows), max_size=4)))
    data, sizes = make_data(case), np.diff([0] + cuts + [rows]).tolist()
    assert_law(case, data, run_layer(case._replace(sizes=sizes), data), run_layer(case, data))


def second_derivatives(case, data):
    """Returns the gradients of sum(dx^2) by x and by gamma, where dx is that of sum(y^3 dy)."""
    with tf.Graph().as_default():
        fed = feed(case, data)

        def penalty(x):
            y = apply_layer(case, data, x, fed)
            return tf.reduce_sum(tf.square(tf.gradients(y ** 3, x, fed.dys[tower_index()])[0]))

        penalties, _ = build_towers(penalty, case, fed)
        slopes = tf.gradients(penalties, fed.xs + [v for v in tf.trainable_variables() if "gamma" in v.op.name])
        with session() as made:
            slopes = made.run(slopes, fed.feed_dict)
    return [np.concatenate(slopes[:len(fed.xs)])] + slopes[len(fed.xs):]


@FEWER
@hypothesis.given(cases(trainings=(True, "fed True", "fed False"), dtypes=("float64",), poison=False))
def test_second_derivatives_over_towers_are_those_of_one_tower(case):
    case = case._replace(group_size=None, outside=False)
    data = make_data(case)
    one_tower = second_derivatives(case._replace(sizes=case.shape[:1], outside=True), data)
    for ours, wanted in zip(second_derivatives(case, data), one_tower):
        assert largest(ours - wanted) <= 1e-9 * largest(wanted)


@hypothesis.given(cases(dtypes=("float64",)))
def test_the_two_oracles_agree_in_float64(case):
    data = make_data(case)
    assert_law(case, data, expect_in_steps(case, data), expect(case, data))


def test_the_oracles_gradients_are_difference_quotients_of_its_values():
    rng = np.random.RandomState(0)
    x, dy, gamma, beta, weights = rng.randn(7, 2, 3), rng.randn(7, 2, 3), rng.randn(2), rng.randn(2), rng.rand(7, 3)

    def loss(x, gamma, beta):
        return (normalized(x, 1, gamma, beta, weights, [3])[0] * dy).sum()

    dx, d_gamma, d_beta = gradients(x, dy, 1, gamma, weights, [3])
    np.testing.assert_allclose(dx, numerical_gradient(lambda x: loss(x, gamma, beta), x), atol=1e-8)
    np.testing.assert_allclose(d_gamma, numerical_gradient(lambda gamma: loss(x, gamma, beta), gamma), atol=1e-8)
    np.testing.assert_allclose(d_beta, numerical_gradient(lambda beta: loss(x, gamma, beta), beta), atol=1e-8)
