"""Batches over towers and layers that Hypothesis draws, and what sync_batch_norm makes of them."""
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

import tf_syncbn
import towers
from tests.kernel_machines import MACHINES, running_on
from tests.support import build, session

DTYPES = "float64", "float32", "float16", "bfloat16"
STATIC = [False, False, True]  # known shapes are traced anew in each case, which takes half of its time
MASKS_OF_ALL_EXAMPLES = ["shared", "trailing"]  # one mask for all examples, which is not divided over towers
MASKS = [None, None, "bool", "weights", "counts", "examples"] + MASKS_OF_ALL_EXAMPLES


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
def cases(draw, few_values=False, trainings=(True,), mean_over_std=(0.0, 1.0, 10.0), dtypes=DTYPES, poison=True):
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
