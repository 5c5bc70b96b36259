"""Shares of the global batch: what a tower may count, and what fails by name where it would be a silent wrong number."""
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

import tf_syncbn
import towers
from tests.support import build, cpus, run, session
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(0).randn(10, 3).astype(np.float32)
SGD = tf.train.GradientDescentOptimizer


def weighted(x, weight):
    """The mean of w * x, weighted by what the batch says."""
    return {"loss": tf.reduce_mean(x * tf.get_variable("w", [3], initializer=tf.ones_initializer())), "weight": weight}


class Returned(NamedTuple):
    """What a model function returns by name."""
    loss: Any
    weight: Any = None
    logits: Any = None


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("wrapped", [lambda model_fn: model_fn, towers.whole_batch])
def test_a_named_tuple_is_taken_as_a_dict_is(wrapped, is_weighted):
    x = X.astype(np.float64)

    def model_fn(x):
        w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())
        if not is_weighted:
            return Returned(tf.reduce_mean(tf.square(x * w)), logits=x)
        mask = tf.cast(x[:, 0] > 0, x.dtype)
        return Returned(tf.div_no_nan(tf.reduce_sum(tf.square(x * w) * mask[:, None]), tf.reduce_sum(mask)), tf.reduce_sum(mask))

    assert_equals_one_batch(wrapped(model_fn), (x,), 3, sizes=[5, 1, 4], steps=2)
    merged = build(wrapped(model_fn), (x,), 2).merged()
    assert isinstance(merged, Returned) and (merged.logits is None) == is_weighted


def fed(count, dtype=tf.float32):
    return [tf.placeholder(dtype, [], "weight%d" % i) for i in range(count)]


def asserts():
    return [op for op in tf.get_default_graph().get_operations() if op.type == "Assert" and "weighted_loss" not in op.name]


@pytest.mark.parametrize("weight,words", [
    (-2, "-2"), (np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (np.float64(-1e-300), "-1e-300")])
def test_weight_that_is_known_to_be_negative_or_not_finite_is_refused(weight, words):
    batch = towers.PerTower([(X[:2], 5), (X[2:], weight)])
    with pytest.raises(ValueError, match="The \"weight\" of tower 1 .* has to be finite and 0 or more, not %s" % words):
        build(weighted, batch)


@pytest.mark.parametrize("weight,error,message", [
    ("many", TypeError, "\"weight\" of a tower has to be a number; .* is string"),
    (1j, TypeError, "\"weight\" of a tower has to be a number; .* is complex"),
    ([1.0], ValueError, "\"weight\" of a tower has to be a scalar")])
def test_weight_that_is_no_number_is_refused(weight, error, message):
    with pytest.raises(error, match=message):
        build(lambda x: {"loss": tf.reduce_mean(x), "weight": weight}, (X,))


@pytest.mark.parametrize("dtype,values,number", [
    (tf.float32, [np.nan, 3], 0), (tf.float32, [5, -2], 1), (tf.float64, [4, -4], 1), (tf.float64, [1, np.inf], 1),
    (tf.float16, [-1, 0], 0), (tf.int32, [5, -2], 1), (tf.int64, [-1, -1], "[01]"), (tf.float32, [-3], 0),
    (tf.float32, [np.nan], 0)])
def test_weight_that_turns_out_negative_or_not_finite_fails_by_the_towers_name(dtype, values, number):
    weights = fed(len(values), dtype)
    parts = np.split(X[:2 * len(values)], len(values))
    replicas = build(weighted, towers.PerTower(list(zip(parts, weights))), len(values))
    (gradient, _), = towers.average_gradients(replicas, towers.compute_gradients(replicas, SGD(1.0)))
    train_op = towers.minimize(replicas, SGD(1.0))
    with session() as made:
        variable, = tf.trainable_variables()
        for fetch in (replicas.loss, gradient, train_op, replicas[-1].weight, replicas.merged()["loss"]):
            words = r"The weight of tower %s \(.*finite and 0 or more. It is" % number
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                made.run(fetch, dict(zip(weights, values)))
        np.testing.assert_array_equal(made.run(variable), np.ones(3))


@pytest.mark.parametrize("dtype", [tf.float32, tf.int32, tf.uint8, tf.bool])
def test_weights_that_are_0_or_more_share_as_before(dtype):
    weights = fed(3, dtype)
    replicas = build(weighted, towers.PerTower(list(zip((X[:1], X[1:4], X[4:]), weights))), 3)
    values = [1, 0, 1] if dtype == tf.bool else [1, 0, 3]
    found, loss = run([[tower.weight for tower in replicas], replicas.loss], dict(zip(weights, values)))
    expected = np.array(values, np.float64) / sum(values)
    np.testing.assert_array_equal(found, expected)
    assert loss == pytest.approx(expected[0] * X[:1].mean() + expected[2] * X[4:].mean(), rel=1e-5)
    assert len(asserts()) == (3 if dtype in (tf.float32, tf.int32) else 0)


def over_valid(divide):
    def model_fn(x, valid):
        y = tf_syncbn.sync_batch_norm(x * tf.get_variable("w", [3], initializer=tf.ones_initializer()))
        number = tf.reduce_sum(valid)
        return {"loss": divide(tf.reduce_sum(tf.reduce_mean(tf.sin(y), 1) * valid), number), "weight": number}
    return model_fn


def test_a_loss_that_is_nan_where_its_weight_is_0_fails_by_the_tower_before_anything_is_trained():
    valid = np.array([1, 1, 1, 1, 0, 0, 0, 1, 0, 1], np.float32)  # none in tower 1 of 4, 3 and 3 examples
    replicas = build(over_valid(tf.divide), (X, valid), 3)
    train_op = towers.minimize(replicas, SGD(1.0))
    variable, = tf.trainable_variables("w")
    with session() as made:
        made.run(tf.global_variables_initializer())
        for fetch in (replicas.loss, train_op):
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"loss of tower 1 \(.*\) is not finite.*tf.div_no_nan"):
                made.run(fetch)
        np.testing.assert_array_equal(made.run(variable), np.ones(3))


def test_a_loss_that_is_0_where_its_weight_is_0_trains_as_one_batch():
    valid = np.array([1, 1, 1, 1, 0, 0, 0, 1, 0, 1], np.float32)
    assert_equals_one_batch(over_valid(tf.div_no_nan), (X, valid), 3)


def test_a_loss_of_no_examples_may_be_nan():
    x, valid = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None])
    replicas = build(over_valid(tf.divide), (x, valid), 3)
    train_op = towers.minimize(replicas, SGD(1.0))
    with session() as made:
        made.run(tf.global_variables_initializer())
        loss, _ = made.run([replicas.loss, train_op], {x: X[:2], valid: np.ones(2)})
        assert np.isfinite([loss, *made.run(tf.trainable_variables("w"))[0]]).all()


def test_check_of_a_weight_stands_on_the_host_and_in_no_tf_cond():
    x = tf.placeholder(tf.float32, [None, 3])
    replicas = towers.TowerBuilder(["/cpu:1", "/cpu:2"]).build(
        lambda x: {"loss": tf.reduce_mean(x), "weight": tf.reduce_sum(tf.cast(x > 0, tf.float32))}, (x,))
    assert len(asserts()) == 2 and all(op.device.lower().endswith("cpu:0") for op in asserts())
    assert not [op for op in tf.get_default_graph().get_operations() if op.type in ("If", "Switch", "StatelessIf")]
    assert sum(run([tower.weight for tower in replicas], {x: X})) == pytest.approx(1)


@pytest.mark.parametrize("batch", [
    lambda: (X, X[:, 0]), lambda: (tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None])),
    lambda: (tf.placeholder(tf.float32, [None, 3]), X[:, 0]), lambda: towers.PerTower([(X, X[:, 0])] * 2),
    lambda: towers.PerTower([(tf.placeholder(tf.float32, [None, 3]), 1.0) for _ in range(2)])])
def test_sizes_that_can_not_disagree_in_silence_are_not_checked(batch):
    replicas = build(lambda x, y: tf.reduce_mean(x) + tf.reduce_mean(y), batch())
    assert not asserts() and len(replicas) == 2


def pairs(shape_of_x, shape_of_y, count=2):
    return [(tf.placeholder(tf.float32, shape_of_x, "x%d" % i), tf.placeholder(tf.float32, shape_of_y, "y%d" % i))
            for i in range(count)]


def apart(x, y):
    """A loss that does not see whether its tensors agree in size."""
    return tf.reduce_mean(x * tf.get_variable("w", [], initializer=tf.ones_initializer())) + tf.reduce_mean(y)


@pytest.mark.parametrize("shapes", [([None, 3], [None]), (None, [None]), ([4, 3], [None]), ([None, 3], [5]), (None, None)])
@pytest.mark.parametrize("how", ["per tower", "function"])
def test_sizes_of_a_towers_batch_that_turn_out_to_disagree_fail_by_name(shapes, how):
    inputs = pairs(*shapes)
    batch = towers.PerTower(inputs) if how == "per tower" else lambda context: inputs[context.index]
    replicas = build(apart, batch)
    train_op = towers.minimize(replicas, SGD(1.0))
    sizes = [(4, 5), (4, 5)] if [4, 3] in shapes or [5] in shapes else [(6, 6), (4, 5)]
    feed = {tensor: np.ones([size, 3] if tensor.op.name[0] == "x" else [size], np.float32)
            for pair, of_pair in zip(inputs, sizes) for tensor, size in zip(pair, of_pair)}
    for fetch in (replicas.loss, train_op, replicas[0].weight):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"x\d:0, y\d:0 in the batch of tower [01] disagree in size"):
            run(fetch, feed)


@pytest.mark.parametrize("shapes", [([None, 3], [None]), (None, [None]), ([None, 3], [5]), (None, None)])
def test_sizes_of_a_towers_batch_that_agree_are_its_weight(shapes):
    inputs = pairs(*shapes)
    replicas = build(apart, towers.PerTower(inputs))
    sizes = [5, 5] if [5] in shapes else [2, 8]
    feed = {tensor: np.ones([size, 3] if tensor.op.name[0] == "x" else [size], np.float32)
            for pair, size in zip(inputs, sizes) for tensor in pair}
    np.testing.assert_allclose(run([tower.weight for tower in replicas], feed), np.array(sizes) / 10)


def test_scalar_of_unknown_rank_has_no_size_that_could_disagree():
    rates = [tf.placeholder(tf.float32, None, "rate%d" % i) for i in range(2)]
    images = [tf.placeholder(tf.float32, [None, 3], "x%d" % i) for i in range(2)]
    replicas = build(apart, towers.PerTower(list(zip(rates, images))))
    feed = {rates[0]: 0.5, rates[1]: 0.5, images[0]: X[:3], images[1]: X[3:]}
    np.testing.assert_allclose(run([tower.weight for tower in replicas], feed), [0.3, 0.7])


def test_weight_takes_the_place_of_sizes_that_disagree():
    inputs = pairs([None, 3], [None])
    replicas = build(lambda x, y: {"loss": apart(x, y), "weight": tf.size(y)}, towers.PerTower(inputs))
    feed = {tensor: np.ones([3, 3] if tensor.op.name[0] == "x" else [4], np.float32) for pair in inputs for tensor in pair}
    assert run([tower.weight for tower in replicas], feed) == [0.5, 0.5]


def test_one_tower_is_the_whole_batch_whatever_its_sizes():
    (x, y), = pairs([None, 3], [None], 1)
    replicas = build(apart, (x, y), 1)
    loss, weight = run([replicas.loss, replicas[0].weight], {x: X, y: X[:4, 0]})
    assert loss == pytest.approx(X.mean() + X[:4, 0].mean(), rel=1e-5) and weight == 1
    assert not asserts()


def test_sparse_and_ragged_tensors_of_a_towers_batch_have_a_size_too():
    ragged = [tf.RaggedTensor.from_row_lengths(tf.range(3), tf.placeholder_with_default(lengths, [None]))
              for lengths in ([1, 2], [3])]
    sparse = [tf.SparseTensor([[0, 0]], [1.0], tf.placeholder_with_default(np.array(shape, np.int64), [2]))
              for shape in ([2, 3], [1, 3])]
    rows = [tf.placeholder_with_default(x, [None, 3]) for x in (X[:2], X[:1])]

    def model(rows, sparse, ragged):
        return tf.reduce_mean(rows)

    replicas = build(model, towers.PerTower(list(zip(rows, sparse, ragged))))
    np.testing.assert_allclose(run([tower.weight for tower in replicas]), [2 / 3, 1 / 3])
    of_ragged = build(lambda ragged: tf.reduce_mean(tf.cast(ragged.flat_values, tf.float32)), towers.PerTower(ragged))
    np.testing.assert_allclose(run([tower.weight for tower in of_ragged]), [2 / 3, 1 / 3])
    replicas = build(model, towers.PerTower(list(zip(rows, sparse, ragged[::-1]))))
    with pytest.raises(tf.errors.InvalidArgumentError, match="in the batch of tower [01] disagree in size"):
        run(replicas.loss)


def data_set(version):
    return tf2.data.Dataset.from_tensor_slices(X) if version == 2 else tf.data.Dataset.from_tensor_slices(X)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("batch", [
    lambda d: (d, X), lambda d: {"images": d}, lambda d: towers.PerTower([d, d]), lambda d: lambda context: d])
def test_data_set_within_a_batch_is_refused(version, batch):
    message = r"The batch holds a data set, <.*hand it in alone.*make_one_shot_iterator\(dataset\).get_next\(\)"
    with pytest.raises(TypeError, match=message):
        build(lambda *x: tf.reduce_mean(x[0]), batch(data_set(version)))


@pytest.mark.parametrize("version", [1, 2])
def test_iterator_within_a_batch_is_refused_and_what_it_hands_out_is_one(version):
    iterator = tf.data.make_one_shot_iterator(data_set(version).batch(10))
    with pytest.raises(TypeError, match=r"The batch holds an iterator, <.*hand it in alone.*that its get_next\(\) returns"):
        build(lambda *x: tf.reduce_mean(x[0]), (iterator,))
    replicas = towers.TowerBuilder(cpus(3)).build(lambda x: tf.reduce_mean(x), (iterator.get_next(),))
    assert run(replicas.loss) == pytest.approx(X.mean(), rel=1e-5)


def test_checks_work_within_a_loop_around_the_towers():
    weights = [tf.placeholder(tf.float32, [], "weight%d" % i) for i in range(2)]
    x, y = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None])
    tf.get_variable("w", [3], initializer=tf.ones_initializer())  # outside, so that the loop holds no initializer

    def body(i, total):
        with tf.variable_scope("", reuse=True):
            losses = [build(weighted, towers.PerTower(list(zip((x, x + 1), weights)))).loss,
                      build(lambda x, y: weighted(x, None)["loss"], towers.PerTower([(x, y), (x, y)])).loss]
        return i + 1, total + sum(losses)

    _, total = tf.while_loop(lambda i, _: i < 2, body, [0, 0.0])
    feed = {x: X, y: X[:, 0], weights[0]: 1.0, weights[1]: 3.0}
    assert run(total, feed) == pytest.approx(2 * (2 * X.mean() + 0.75), rel=1e-4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="The weight of tower 0"):
        run(total, {**feed, weights[0]: -1.0})
    with pytest.raises(tf.errors.InvalidArgumentError, match="in the batch of tower [01] disagree in size"):
        run(total, {**feed, y: X[:4, 0]})
