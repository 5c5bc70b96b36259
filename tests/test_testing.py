"""`assert_equals_one_batch`: what it finds, what rounding it forgives, what it refuses."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import images_and_labels
from towers.testing import assert_equals_one_batch


def test_assertion_fails_for_unsynced_batch_norm_and_says_what_differs():
    def model(images, labels):
        x, _, _ = tf.nn.fused_batch_norm(images, tf.ones([3]), tf.zeros([3]))
        kernel = tf.get_variable("kernel", [3, 3, 3, 4], initializer=tf.glorot_uniform_initializer(seed=3))
        logits = tf.reduce_mean(tf.nn.conv2d(x, kernel, [1, 1, 1, 1], "SAME"), [1, 2])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))

    with pytest.raises(AssertionError, match=r"2 towers do not train as one.*gradients by .*\(kernel\), allowed.*in float64"):
        assert_equals_one_batch(model, images_and_labels(np.float32), 2)


def test_where_moving_averages_alone_differ_it_does_not_ask_about_the_loss():
    def model(x):
        y = tf.reduce_mean(tf.square(x * tf.get_variable("w", [3], tf.float64, tf.ones_initializer())))
        tf.layers.batch_normalization(x, training=True, name="bn")
        return y

    said = "differ in variables by .*Loss and gradients agree: is 'bn/moving_.*' written by"
    with pytest.raises(AssertionError, match=said) as info:
        assert_equals_one_batch(model, (np.random.RandomState(0).randn(8, 3),))
    assert "whole_batch" not in str(info.value)


def test_assertion_fails_where_averaging_counts_uneven_towers_alike():
    def model(x):
        w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())
        return {"loss": tf.reduce_mean(tf.square(x * w)), "weight": tf.constant(1.0)}

    batch = np.random.RandomState(0).randn(8, 3)
    with pytest.raises(AssertionError, match=r"differ in loss.*A loss that is no mean over examples .*whole_batch\(model_fn\)"):
        assert_equals_one_batch(model, (batch,), 2, [7, 1])
    assert_equals_one_batch(towers.whole_batch(model), (batch,), 2, [7, 1])


@pytest.mark.parametrize("flipped", [[0], [0, 1, 2], [4], [4, 5, 6], [1, 4], [4, 5, 6, 7]])
def test_assertion_takes_what_rounding_flips_in_some_orders_of_the_batch_but_not_in_all(flipped):
    """Of the runs of one tower, 0 to 3, and of two towers, 4 to 7, some see a rounded sum on the other side of 0."""
    calls = []

    def flips():
        calls.append(None)
        run_index = len(calls) - 1 if len(calls) <= 4 else 4 + (len(calls) - 5) // 2
        return np.float32(0.01 * (run_index in flipped))

    def model(x):
        w = tf.get_variable("w", [3], initializer=tf.ones_initializer())
        return tf.reduce_mean(x * w) * (1 + tf.reshape(tf.py_func(flips, [], tf.float32), []))

    def check():
        return assert_equals_one_batch(model, (np.random.RandomState(0).rand(8, 3).astype(np.float32),), 2, steps=1)

    if flipped == [4, 5, 6, 7]:
        with pytest.raises(AssertionError, match=r"differ in loss by 0\.01 .*gradients by 0\.0.*in float64"):
            check()
    else:
        found = check()
        assert max(found.loss, found.gradients, found.variables) < (0.02 if 0 in flipped or 1 in flipped else 1e-6)


@pytest.mark.parametrize("draw", [lambda y: tf.nn.dropout(y, rate=0.5), lambda y: y + tf.random.normal([3])])
def test_assertion_refuses_models_that_draw_at_random(draw):
    def model(x):
        return tf.reduce_mean(draw(x * tf.get_variable("w", [3], initializer=tf.random_uniform_initializer())))

    with pytest.raises(ValueError, match="model draws at random, so no two trainings of it are alike: 'tower_0/.*andom"):
        assert_equals_one_batch(model, (np.ones([8, 3], np.float32),), 2)


@pytest.mark.parametrize("function, what", [
    (lambda y: tf.log(-1 - y * y), "the loss:"), (lambda y: 1e30 * y * y, "w"), (lambda y: tf.sqrt(y - y), "w")])
def test_assertion_refuses_trainings_that_come_to_infinity_or_nan(function, what):
    def model(x):
        return tf.reduce_mean(function(x * tf.get_variable("w", [3], initializer=tf.ones_initializer())))

    with pytest.raises(ValueError, match="One tower alone.* comes to infinity or NaN in .*%s" % what):
        assert_equals_one_batch(model, (np.ones([8, 3], np.float32),), 2)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"2 numbers that sum to the batch of 4, not \[1, 1\]"):
        assert_equals_one_batch(lambda x: x, (np.zeros([4, 1]),), 2, [1, 1])


@pytest.mark.skipif(not hasattr(tf.config.experimental, "tensor_float_32_execution_enabled"), reason="there is no TF32")
@pytest.mark.parametrize("enabled", [True, False])
def test_float32_is_no_tensor_float_32_meanwhile_and_what_it_was_afterwards(enabled):
    config, seen = tf.config.experimental, []
    before = config.tensor_float_32_execution_enabled()

    def note():
        seen.append(config.tensor_float_32_execution_enabled())
        return np.float32(1)

    def model(x):
        rounded = tf.py_func(note, [], tf.float32, stateful=True)
        return tf.reduce_mean(x * tf.get_variable("w", [])) * tf.reshape(rounded, [])

    try:
        config.enable_tensor_float_32_execution(enabled)
        assert_equals_one_batch(model, np.ones([4, 2], np.float32))
        assert seen and not any(seen) and config.tensor_float_32_execution_enabled() == enabled
    finally:
        config.enable_tensor_float_32_execution(before)


def through_float32(x, centred=False):
    h = tf.matmul(x, tf.get_variable("w", [3, 4], x.dtype, tf.glorot_uniform_initializer(seed=1)))
    h = h - tf.reduce_mean(h, 0) if centred else h
    return tf.losses.mean_squared_error(tf.ones([tf.shape(x)[0], 4], x.dtype), tf.tanh(h))


def test_what_goes_through_float32_is_held_to_its_rounding_and_not_to_float64s():
    x = np.random.RandomState(0).randn(5, 3)
    found = assert_equals_one_batch(through_float32, (x,), num_towers=2, sizes=[3, 2])
    assert 1e-9 < found.bound["loss"] < 1e-5
    with pytest.raises(AssertionError, match="do not train as one on the whole batch"):
        assert_equals_one_batch(lambda x: through_float32(x, centred=True), (x,), num_towers=2, sizes=[3, 2])


@pytest.mark.parametrize("name", ["absolute_difference", "hinge_loss", "huber_loss", "log_loss", "mean_squared_error",
                                  "sigmoid_cross_entropy"])
def test_functions_of_tf_losses_are_no_false_alarm_in_float64(name):
    """Which go through float32: for some batches the orders of the batch alone tell no rounding."""
    def model_fn(x, labels):
        h = tf.reduce_sum(x * tf.get_variable("w", [4], tf.float64, tf.constant_initializer([.3, -.4, .5, .2])), 1)
        return getattr(tf.losses, name)(labels, tf.sigmoid(h) if name == "log_loss" else h)

    for seed in range(3):
        rng = np.random.RandomState(seed)
        batch = rng.randn(12, 4), (rng.rand(12) > 0.5).astype(np.float64)
        found = assert_equals_one_batch(towers.whole_batch(model_fn), batch, 3, sizes=[6, 2, 4], steps=2)
        assert found.bound["gradients"] < 1e-5


def test_a_variable_that_is_no_number_has_to_be_the_same():
    def model_fn(x):
        done = tf.get_variable("done", [], tf.bool, tf.zeros_initializer(), trainable=False, use_resource=True)
        with tf.control_dependencies([done.assign(tf.reduce_sum(x) > 3)]):
            return tf.reduce_mean(tf.square(x * tf.get_variable("w", [3], tf.float64, tf.ones_initializer())))

    x = np.arange(24.0).reshape([8, 3]) / 20 - 0.2
    assert_equals_one_batch(towers.whole_batch(model_fn), (x,), 2)
    with pytest.raises(AssertionError, match=r"differ in variables by .* \(done\)"):
        assert_equals_one_batch(model_fn, (x[::-1].copy(),), 2)


def mixed_up(x):
    """Mixup with the examples in the opposite order, in float32: another model for each order of the batch."""
    w = tf.get_variable("w", [5], tf.float32, tf.constant_initializer([.5, -1., .3, .8, -.2]))
    y = tf.tanh(.7 * x + .3 * x[::-1])
    return tf.reduce_mean(tf.square(tf.reduce_sum(y * w, 1) - tf.sin(3 * x[:, 0])))


def test_a_model_that_goes_by_the_order_of_its_examples_is_not_held_to_what_another_order_changes():
    """The batch permuted is another batch to it: the bound was 156 %, and plain towers passed with gradients 47 % off."""
    batch = (np.random.RandomState(0).randn(8, 5).astype(np.float32),)
    with pytest.raises(AssertionError, match="differ in loss by .*, allowed 0.001;.* goes by the order of its examples"):
        assert_equals_one_batch(mixed_up, batch, 2)
    found = assert_equals_one_batch(towers.whole_batch(mixed_up), batch, 2)
    assert max(found.loss, found.gradients, found.variables) < 1e-5


@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize("in_line", [False, True])
@pytest.mark.parametrize("wrap", [towers.whole_batch, tf_syncbn.convert_model])
def test_updates_that_tensorflow_gives_no_order_run_in_that_in_which_they_were_made(wrap, in_line, use_resource):
    """A batch norm applied to two batches, each of another mean: its average would be now of one order, now of the other."""
    def layer(x):
        mean, variance = tf.nn.moments(x, [0])
        with tf.variable_scope("bn", reuse=tf.AUTO_REUSE, use_resource=use_resource):
            moving = tf.get_variable("moving", [3], x.dtype, tf.zeros_initializer(), trainable=False)
            scale = tf.get_variable("scale", [3], x.dtype, tf.ones_initializer())
        update = tf.assign(moving, 0.9 * moving + 0.1 * mean)  # the first product waits for nothing of the batch
        if not in_line:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        with tf.control_dependencies([update] * in_line):
            return tf.nn.batch_normalization(x, mean, variance, None, scale, 1e-3)

    def model_fn(real, fake):
        return tf.reduce_mean(tf.square(tf.sin(layer(real)) - 1)) + tf.reduce_mean(tf.square(tf.sin(layer(fake)) - 2))

    rng = np.random.RandomState(0)
    assert_equals_one_batch(wrap(model_fn), (rng.randn(7, 3), rng.randn(7, 3) + 3))


def test_a_model_is_held_to_how_far_the_next_numbers_move_it():
    x, labels = towers.testing._other_last_bits((np.ones(99, np.float32), np.arange(3)), 0)
    assert x.dtype == np.float32 and set(x.tolist()) == {1 - 2.0 ** -24, 1 + 2.0 ** -23}
    assert labels.dtype == np.arange(3).dtype and labels.tolist() == [0, 1, 2]


def test_a_model_may_look_numbers_up_in_a_table():
    def model(x, words):
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], np.array([0, 1], np.int64)), -1)
        rows = tf.gather(tf.get_variable("rows", [2, 3], tf.float64, tf.ones_initializer()), table.lookup(words))
        return tf.reduce_mean(tf.square(rows - x))

    assert_equals_one_batch(model, (np.random.RandomState(0).randn(5, 3), np.array(list("abbab"))), 2)
