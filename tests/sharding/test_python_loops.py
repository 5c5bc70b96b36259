"""Python's own loops over the examples of a batch of known size: exact where each turn is of its own example, else refused."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, run
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(0).randn(9, 4)


def layer(x):
    kernel = tf.get_variable("kernel", [4, 3], tf.float64, tf.random_normal_initializer(seed=1))
    return tf.matmul(x, kernel)


def layer_of_one(row):
    with tf.variable_scope("layer", reuse=tf.AUTO_REUSE):
        return layer(tf.reshape(row, [1, 4]))[0]


def centred(h):
    return h - tf.reduce_mean(h, 0)


def number_of(x):
    return int(x.shape[0])


def powers(h):
    """A loss that is of the whole batch in all its parts."""
    return tf.reduce_mean(tf.abs(centred(h)) ** 1.5) ** 2


def stacked(x):
    return powers(tf.stack([tf.sin(layer_of_one(row)) for row in tf.unstack(x)]))


def stacked_by_number(x):
    return powers(tf.stack([tf.sin(layer_of_one(x[i])) for i in range(number_of(x))]))


def of_slices(x):
    return powers(tf.concat([tf.sin(layer_of_one(x[i:i + 1]))[None] * x[i, 0] for i in range(number_of(x))], 0))


def of_tf_slices(x):
    return powers(tf.concat([tf.sin(layer_of_one(tf.slice(x, [i, 0], [1, 4])))[None] for i in range(number_of(x))], 0))


def gathered(x):
    return powers(tf.stack([layer_of_one(tf.gather(x, i)) for i in range(number_of(x))], 1))


def split(x):
    """A convolution of each example's own, as of experts mixed for each: CondConv."""
    mixed = tf.reshape(tf.nn.softmax(layer(x)), [-1, 3, 1])
    experts = tf.get_variable("experts", [3, 5], tf.float64, tf.random_normal_initializer(seed=2))
    kernels = tf.unstack(tf.reduce_sum(mixed * experts, 1))
    rows = tf.split(x, number_of(x))
    return powers(tf.concat([tf.reduce_max(row) * kernel[None] for row, kernel in zip(rows, kernels)], 0))


def added(x):
    h, loss = centred(layer(x)), 0.0
    for i in range(number_of(x)):
        loss += tf.reduce_max(h[i]) ** 2
    return tf.sqrt(loss / number_of(x))


def added_to_a_penalty(x):
    h, loss = centred(layer(x)), 0.1 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])
    for row in tf.unstack(h):
        loss = tf.reduce_max(row) ** 2 + loss
    return tf.sqrt(loss)


def added_at_once(x):
    return tf.add_n([tf.reduce_max(row) ** 2 for row in tf.unstack(centred(layer(x)))]) / tf.cast(tf.shape(x)[0], tf.float64)


def averaged(x):
    return tf.square(tf.reduce_mean([tf.reduce_max(row) for row in tf.unstack(layer(x))]))


def of_two_each(x):
    h = layer(x)
    return powers(tf.stack([each for row in tf.unstack(h) for each in (tf.reduce_max(row), tf.reduce_sum(tf.sin(row)))]))


def of_two_lists(x):
    rows = tf.unstack(layer(x))
    return powers(tf.stack([tf.reduce_max(row) for row in rows] + [tf.reduce_min(row) for row in rows]))


def against_all(x):
    h = layer(x)
    return tf.square(tf.reduce_mean([tf.reduce_logsumexp(tf.matmul(h, row[:, None])) for row in tf.unstack(h)]))


def by_the_turns_number(x):
    h = layer(x)
    return tf.square(tf.reduce_mean([tf.reduce_sum(tf.sin(h[i])) * float(i + 1) for i in range(number_of(x))]))


def of_as_many_rows_as_a_mask_leaves(x):
    parts = [tf.boolean_mask(pair, pair[:, 0] > 0) for pair in tf.unstack(tf.reshape(x, [number_of(x), 2, 2]))]
    return powers(tf.concat(parts, 0)) + tf.reduce_mean(layer(x) ** 2)


def of_branches(x):
    return tf.square(tf.reduce_mean([tf.cond(tf.reduce_sum(row) > 0, lambda: tf.reduce_max(row), lambda: tf.reduce_min(2 * row))
                                     for row in tf.unstack(layer(x))]))


def of_slopes(x):
    h = tf.stack([tf.sin(row) for row in tf.unstack(x)])
    return tf.reduce_mean(tf.square(tf.gradients(powers(layer(h)), x)[0]))


def against_the_first(x):
    h = layer(x)
    return tf.square(tf.reduce_mean([tf.reduce_sum(tf.sin(h[i]) * h[0]) for i in range(number_of(x))]))


def against_the_one_before(x):
    h = layer(x)
    return tf.square(tf.reduce_mean([tf.reduce_sum(tf.sin(h[i]) * h[i - 1]) for i in range(number_of(x))]))


def by_constants_alone(x):
    return tf.reduce_mean(layer(x) ** 2) + tf.square(tf.reduce_mean(tf.stack([tf.constant(0.1 * i, x.dtype) for i in range(
        number_of(x))])))


def of_as_many_sums(x):
    """What each turn sums up over all examples is of its own number."""
    h = layer(x)
    return tf.square(tf.reduce_mean([tf.reduce_sum(h * float(i // 2)) / number_of(x) for i in range(number_of(x))]))


def added_to_the_first(x):
    loss = None
    for row in tf.unstack(centred(layer(x))):
        loss = tf.reduce_max(row) ** 2 if loss is None else loss + tf.reduce_max(row) ** 2
    return tf.sqrt(loss / number_of(x))


def by_rows_of_a_variable(x):
    rows = tf.get_variable("rows", [9, 3], x.dtype, tf.random_normal_initializer(seed=3))
    return tf.add_n([tf.reduce_sum(tf.sin(row) * tf.gather(rows, i) * rows[i]) for i, row in enumerate(tf.unstack(layer(x)))])


def with_products_behind(x):
    """Products that meet have the numbers of others of tower 0 in a tower of more examples, whose loop makes more products."""
    h = tf.stack([tf.squeeze(tf.matmul(row[None], tf.eye(3, dtype=x.dtype)), 0) for row in tf.unstack(layer(x))])
    return 0.01 * tf.add_n([tf.reduce_sum(tf.tanh(tf.matmul(of(h), h, transpose_a=True))) ** 2 for of in (
        tf.sin, tf.tanh, tf.cos, tf.abs)])


EXACT = [added_at_once, added_to_the_first, by_rows_of_a_variable, stacked, stacked_by_number, of_slices, of_tf_slices,
         gathered, split, added, added_to_a_penalty, averaged, of_two_each,
         of_two_lists, against_all,
         by_the_turns_number, of_as_many_rows_as_a_mask_leaves, of_branches, of_slopes,
         against_the_first, against_the_one_before, by_constants_alone, of_as_many_sums,
         with_products_behind]
# Those that together reach nearly all lines that all do.
TOGETHER = [of_as_many_sums, of_as_many_rows_as_a_mask_leaves, added_at_once, added, of_slopes, split, of_two_lists,
            against_the_first, with_products_behind, added_to_the_first, of_branches, stacked_by_number, of_tf_slices,
            added_to_a_penalty]


@pytest.mark.parametrize("model", EXACT)
def test_a_loop_of_which_each_turn_is_of_its_own_example_is_exact(model):
    for sizes in ([1, 5, 3], [3, 3, 3]):
        assert_equals_one_batch(towers.whole_batch(model), (X,), len(sizes), sizes)


def test_such_loops_in_one_model_are_exact():
    def all_models(x):
        losses = []
        for model in TOGETHER:  # the penalty is last: on all variables, once they are made
            with tf.variable_scope(model.__name__):
                losses.append(model(x))
        return tf.add_n(losses)
    assert_equals_one_batch(towers.whole_batch(all_models), (X[:4],), 2, [1, 3], steps=1)


@pytest.mark.parametrize("model", [stacked, of_slices, split])
def test_converted_models_may_have_such_loops(model):
    assert_equals_one_batch(tf_syncbn.convert_model(model), (X,), 2, [4, 5])


def test_examples_of_towers_are_put_together_in_order():
    def model(x):
        return {"rows": tf.stack([tf.sin(row) for row in tf.unstack(x)], 1)}
    parts = towers.PerTower([X[:4], X[4:]])
    np.testing.assert_allclose(run(build(towers.whole_batch(model), parts).merged())["rows"], np.sin(X).T)


def test_what_a_turn_draws_is_of_its_example():
    def model(x):
        return {"noise": tf.stack([row + tf.random_uniform([4], dtype=tf.float64) for row in tf.unstack(x)])}
    whole = towers.whole_batch(model)
    noise = run(build(whole, towers.PerTower([np.zeros([4, 4]), np.zeros([5, 4])])).merged())["noise"]
    assert not whole.meetings and len(np.unique(noise)) == noise.size == 36


def test_what_is_drawn_once_is_the_same_for_all_turns():
    def model(x):
        noise = tf.random_uniform([4], dtype=tf.float64)
        return {"noise": tf.stack([row + noise for row in tf.unstack(x)])}
    for sizes in ([4, 5], [1, 1]):
        parts = towers.PerTower([np.zeros([size, 4]) for size in sizes])
        noise = run(build(towers.whole_batch(model), parts).merged())["noise"]
        assert len(np.unique(noise)) == 4


def the_first(x):
    return tf.reduce_sum(tf.unstack(layer(x))[0] ** 2)


def against_the_row_before(x):
    rows = tf.unstack(layer(x))
    return tf.add_n([tf.reduce_sum(rows[i] * rows[i - 1]) for i in range(len(rows))])


def against_each_other(x):
    rows = tf.unstack(layer(x))
    return tf.add_n([tf.reduce_sum(tf.sin(a * b)) for a in rows for b in rows])


def of_all_before(x):
    found, total = [], 0.0
    for row in tf.unstack(layer(x)):
        total += row
        found.append(tf.sin(total))
    return tf.reduce_mean(tf.stack(found))


def backwards(x):
    return tf.reduce_sum(tf.stack(tf.unstack(layer(x))[::-1])[0])


def every_second(x):
    return tf.reduce_mean(tf.stack(tf.unstack(layer(x))[::2]))


def with_noise_for_all(x):
    h = layer(x)
    return tf.reduce_mean([tf.reduce_max(row * (h + tf.random_normal([number_of(x), 3], dtype=x.dtype)))
                           for row in tf.unstack(h)])


def by_as_many_rows_of_a_variable(x):
    rows = tf.unstack(tf.get_variable("rows", [9, 3], x.dtype, tf.random_normal_initializer(seed=3)))
    return tf.add_n([tf.reduce_sum(tf.sin(row) * each) for row, each in zip(tf.unstack(layer(x)), rows)])


def by_an_attribute(x):
    square = tf.get_variable("square", [3, 3], x.dtype, tf.random_normal_initializer(seed=3))
    return tf.add_n([tf.reduce_sum(tf.matmul(row[None], square, transpose_b=bool(i % 2)) ** 2)
                     for i, row in enumerate(tf.unstack(layer(x)))])


def written_in_turn(x):
    total = tf.get_variable("total", [3], tf.float64, tf.zeros_initializer(), trainable=False)
    for row in tf.unstack(layer(x)):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(total, 0.9 * total + 0.1 * row))
    return tf.reduce_mean(layer_of_one(x[0]))


def of_branches_by_number(x):
    return tf.square(tf.reduce_mean([tf.cond(tf.reduce_sum(row) > 0, lambda: tf.reduce_max(row) * float(i), lambda: 0.5 * row[0])
                                     for i, row in enumerate(tf.unstack(layer(x)))]))


def test_a_constant_in_a_function_that_turns_have_not_alike_is_refused():
    whole = towers.whole_batch(of_branches_by_number)
    if not tf.control_flow_v2_enabled():  # there are no functions, then
        assert_equals_one_batch(whole, (X,), 2, [4, 5])
        return
    with pytest.raises(ValueError, match="a constant in a function of .* is not the same for all examples"):
        build(whole, towers.PerTower([tf.constant(X[:4]), tf.constant(X[4:])]))


@pytest.mark.parametrize("model,message", [
    (the_first, "takes example 0 of 4 of the tower's by its place"),
    (against_the_row_before, "read by its output 3, is read by its output 8 for the whole batch"),
    (by_as_many_rows_of_a_variable, "read by its output 4, is read by its output 8 for the whole batch"),
    (by_an_attribute, "whose turns are not alike"),
    (against_each_other, "makes other ops of a batch of another size"),
    (of_all_before, "whose turns are not alike"),
    (backwards, "read by its output 3, is read by its output 8 for the whole batch"),
    (with_noise_for_all, "draws for all examples in a turn"),
    (every_second, "makes other ops of a batch of another size"),
    (written_in_turn, "by its place|nothing like it for the whole batch")])
def test_a_loop_whose_turns_are_not_alike_is_refused_by_name(model, message):
    with pytest.raises(ValueError, match=message):
        towers.TowerBuilder(cpus(2)).build(towers.whole_batch(model), towers.PerTower([tf.constant(X[:4]), tf.constant(X[4:])]))


def test_parts_of_the_batch_that_are_one_example_each_in_one_tower_are_no_loop():
    def model_fn(x):
        first, second = tf.split(tf.sin(x * tf.get_variable("w", [], x.dtype, tf.ones_initializer())), 2)
        return tf.reduce_mean(tf.square(first - second))

    for width in (4, 1):
        with tf.Graph().as_default():
            x = np.random.RandomState(0).randn(12, width)
            assert_equals_one_batch(towers.whole_batch(model_fn), (x,), 3, sizes=[4, 6, 2], steps=2)
