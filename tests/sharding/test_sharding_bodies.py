"""Branches and loops of control flow 2, and functions: whole-batch models hold them to what one tower computes, gradients too."""
import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import towers
from tests.support import loss_and_gradients
from towers.testing import assert_equals_one_batch

pytestmark = pytest.mark.skipif(not tf.control_flow_v2_enabled(), reason="of control flow 2")

F, H, T = 4, 3, 5


def batch():
    rng = np.random.RandomState(3)
    return rng.randn(9, F), rng.randn(9), rng.randn(9, T, 2), rng.randint(1, T + 1, 9).astype(np.int32)


def weight(name, shape):
    return tf.get_variable(name, shape, tf.float64, initializer=tf.random_normal_initializer(seed=len(name), stddev=0.5))


def dense(x, n=H, name="w"):
    return tf.matmul(x, weight(name, [tf.dimension_value(x.shape[-1]), n]))


def centred(h):
    return h - tf.reduce_mean(h, 0)


def loss_of(h, y):
    return tf.reduce_mean(tf.square(tf.reduce_sum(h, -1) - y))


FORMS = {}


def form(function):
    FORMS[function.__name__] = function
    return function


# Branches.

@form
def a_branch_by_a_statistic(x, y, s, lengths):
    h = dense(x)
    return loss_of(tf.cond(tf.reduce_mean(h) > 0.1, lambda: h * 2, lambda: h + 1), y)


@form
def a_branch_by_a_sum_over_the_batch(x, y, s, lengths):
    h = dense(x)
    return loss_of(tf.cond(tf.reduce_sum(x) > 1.0, lambda: h * tf.reduce_mean(x), lambda: h), y)


@form
def a_branch_that_centres(x, y, s, lengths):
    h = dense(x)
    return loss_of(tf.cond(tf.placeholder_with_default(True, []), lambda: centred(h), lambda: h), y)


@form
def a_branch_that_normalizes_what_it_computes(x, y, s, lengths):
    w = weight("w", [F, H])

    def normalized():
        h = tf.tanh(tf.matmul(x, w))
        mean, variance = tf.nn.moments(h, [0])
        return (h - mean) / tf.sqrt(variance + 1e-3)
    return loss_of(tf.cond(tf.placeholder_with_default(True, []), normalized, lambda: tf.matmul(x, w)), y)


@form
def branches_that_are_a_mean_and_a_sum(x, y, s, lengths):
    h = tf.square(dense(x))
    return tf.sqrt(tf.cond(tf.placeholder_with_default(False, []), lambda: tf.reduce_mean(h), lambda: tf.reduce_sum(h) * 0.1)) + (
        loss_of(h, y))


@form
def branches_that_are_a_sum_and_a_constant(x, y, s, lengths):
    h = tf.square(dense(x))
    return tf.log(1 + tf.cond(tf.reduce_sum(h) > 0, lambda: tf.reduce_sum(h), lambda: tf.constant(0.5, tf.float64)))


@form
def branches_of_chosen_rows(x, y, s, lengths):
    h = dense(x)

    def of(mask):
        return lambda: tf.reduce_mean(tf.boolean_mask(h, mask))
    return tf.square(tf.cond(tf.placeholder_with_default(True, []), of(x[:, 0] > 0), of(x[:, 1] > 0))) + loss_of(h, y)


@form
def a_branch_in_a_branch(x, y, s, lengths):
    h, yes = dense(x), tf.placeholder_with_default(True, [])
    return loss_of(tf.cond(yes, lambda: tf.cond(yes, lambda: centred(h), lambda: h) * 2, lambda: tf.cond(
        tf.reduce_mean(h) > 0, lambda: -h, lambda: h)), y)


@form
def a_case(x, y, s, lengths):
    h, k = dense(x), tf.placeholder_with_default(2, [])
    return loss_of(tf.case([(tf.equal(k, 1), lambda: h), (tf.equal(k, 2), lambda: centred(h))], default=lambda: h * 2), y)


@form
def a_switch_case(x, y, s, lengths):
    h, k = dense(x), tf.placeholder_with_default(1, [])
    return loss_of(tf.switch_case(k, [lambda: h, lambda: h / tf.norm(h), lambda: tf.nn.softmax(h, 0)]), y)


@form
def a_branch_by_the_size(x, y, s, lengths):
    h = dense(x)
    return loss_of(tf.cond(tf.shape(tf.placeholder_with_default(x, [None, F]))[0] > 5, lambda: h, lambda: h * 3), y)


@form
def a_branch_with_a_gradient_within_the_model(x, y, s, lengths):
    h = dense(x)
    energy = tf.reduce_mean(tf.cond(tf.reduce_mean(h) > -100, lambda: tf.square(centred(h)), lambda: h))
    slope, = tf.gradients(energy, x)
    return loss_of(h, y) + tf.reduce_mean(tf.square(slope)) * 50


# Loops.

def over_steps(step, state, steps=3):
    return tf.while_loop(lambda i, h: i < steps, lambda i, h: (i + 1, step(i, h)), (tf.constant(0), state))[1]


@form
def a_loop_with_a_state_of_each_example(x, y, s, lengths):
    u = weight("u", [H, H])
    return loss_of(over_steps(lambda i, h: tf.tanh(tf.matmul(h, u)), dense(x)), y)


@form
def a_loop_that_centres_each_turn(x, y, s, lengths):
    u = weight("u", [H, H])
    return loss_of(over_steps(lambda i, h: centred(tf.tanh(tf.matmul(h, u))), dense(x)), y)


@form
def a_loop_that_takes_a_statistic_of_the_batch(x, y, s, lengths):
    h = dense(x)
    return loss_of(over_steps(lambda i, a: tf.tanh(a) + tf.reduce_mean(h, 0), h), y)


@form
def a_loop_that_divides_by_the_size(x, y, s, lengths):
    n = tf.cast(tf.shape(x)[0], tf.float64)
    return loss_of(over_steps(lambda i, a: tf.tanh(a) / n + a, dense(x)), y)


@form
def a_loop_that_divides_by_the_size_that_it_asks(x, y, s, lengths):
    return loss_of(over_steps(lambda i, a: tf.tanh(a) / tf.cast(tf.shape(a)[0], tf.float64) + a, dense(x)), y)


@form
def a_loop_that_adds_up_sums_over_examples(x, y, s, lengths):
    h = dense(x, T)
    total = tf.while_loop(lambda i, a: i < T, lambda i, a: (i + 1, a + tf.reduce_sum(tf.square(h[:, i]))),
                          (tf.constant(0), tf.zeros([], tf.float64)))[1]
    return tf.sqrt(total) + loss_of(h, y)


@form
def a_loop_that_adds_up_means(x, y, s, lengths):
    h = dense(x, T)
    total = tf.while_loop(lambda i, a: i < T, lambda i, a: (i + 1, a + tf.reduce_mean(tf.square(h[:, i]))),
                          (tf.constant(0), tf.zeros([], tf.float64)))[1]
    return tf.sqrt(total) + loss_of(h, y)


@form
def a_loop_until_the_batch_is_small(x, y, s, lengths):
    return loss_of(tf.while_loop(lambda h: tf.norm(h) > 1.0, lambda h: [h * 0.7], [dense(x)]), y)


@form
def a_loop_as_often_as_there_are_examples(x, y, s, lengths):
    h, n = dense(x), tf.shape(x)[0]
    return loss_of(tf.while_loop(lambda i, a: i < n, lambda i, a: (i + 1, a * 1.1), (tf.constant(0), h))[1], y)


@form
def a_loop_over_pairs(x, y, s, lengths):
    h = dense(x)
    pairs = tf.matmul(h, h, transpose_b=True)
    return tf.reduce_mean(over_steps(lambda i, a: tf.tanh(a) + tf.reduce_mean(a), pairs)) + loss_of(h, y)


@form
def a_loop_over_pairs_with_a_state_of_each(x, y, s, lengths):
    h = dense(x)
    kernel = tf.nn.softmax(tf.matmul(h, h, transpose_b=True))
    return loss_of(over_steps(lambda i, a: tf.matmul(kernel, a) + h, h), y)


@form
def a_loop_in_a_loop(x, y, s, lengths):
    h = dense(x)
    return loss_of(over_steps(lambda i, a: over_steps(lambda j, b: tf.tanh(b) + tf.reduce_max(h), a, 2), h, 2), y)


@form
def a_loop_in_a_loop_that_centres(x, y, s, lengths):
    return loss_of(over_steps(lambda i, a: over_steps(lambda j, b: centred(tf.tanh(b)), a, 2), dense(x), 2), y)


@form
def a_loop_in_a_branch_that_centres(x, y, s, lengths):
    h = dense(x)
    looped = tf.cond(tf.placeholder_with_default(True, []), lambda: over_steps(lambda i, a: centred(tf.tanh(a)), h), lambda: h)
    return loss_of(looped, y)


@form
def a_branch_in_a_loop(x, y, s, lengths):
    h = dense(x)
    return loss_of(over_steps(lambda i, a: tf.cond(i < 2, lambda: a + centred(h), lambda: a * 2), h), y)


@form
def a_branch_in_a_loop_by_what_changes(x, y, s, lengths):
    return loss_of(over_steps(lambda i, a: tf.cond(tf.reduce_mean(a) > 0.2, lambda: a * 0.5, lambda: a * 2), dense(x)), y)


@form
def a_loop_with_a_gradient_within_the_model(x, y, s, lengths):
    h = dense(x)
    slope, = tf.gradients(tf.reduce_mean(tf.square(over_steps(lambda i, a: tf.tanh(a) * 2, h))), x)
    return loss_of(h, y) + tf.reduce_mean(tf.square(slope)) * 50


@form
def a_loop_that_centres_with_a_gradient_within_the_model(x, y, s, lengths):
    h = dense(x)
    slope, = tf.gradients(tf.reduce_mean(tf.square(over_steps(lambda i, a: centred(tf.tanh(a)) * 2, h))), x)
    return loss_of(h, y) + tf.reduce_mean(tf.square(slope)) * 50


@form
def a_loop_of_descent(x, y, s, lengths):
    def step(i, v):
        return v - 0.1 * tf.gradients(tf.reduce_mean(tf.square(tf.linalg.matvec(x, v) - y)), v)[0]
    return loss_of(dense(x), y) + tf.reduce_sum(tf.square(over_steps(step, weight("v", [F]))))


# Lists.

@form
def a_map_over_examples(x, y, s, lengths):
    return loss_of(tf.map_fn(lambda row: tf.tanh(row), dense(x)), y)


@form
def a_map_over_examples_with_the_batch(x, y, s, lengths):
    h = dense(x)
    return loss_of(tf.map_fn(lambda row: row * tf.reduce_sum(tf.square(h - row)), h), y)


@form
def a_map_over_steps(x, y, s, lengths):
    h = tf.tensordot(s, weight("w", [2, H]), 1)
    return loss_of(tf.reduce_mean(tf.map_fn(tf.tanh, tf.transpose(h, [1, 0, 2])), 0), y)


@form
def a_map_over_steps_that_centres(x, y, s, lengths):
    h = tf.tensordot(s, weight("w", [2, H]), 1)
    return loss_of(tf.reduce_mean(tf.map_fn(centred, tf.transpose(h, [1, 0, 2])), 0), y)


@form
def a_map_over_features(x, y, s, lengths):
    h = dense(x)
    return tf.reduce_max(tf.map_fn(lambda column: tf.reduce_sum(tf.square(column)), tf.transpose(h))) + loss_of(h, y)


@form
def a_fold_over_examples(x, y, s, lengths):
    h = dense(x)
    return tf.reduce_sum(tf.foldl(lambda a, row: tf.maximum(a, row), h)) + loss_of(h, y)


@form
def a_scan_over_examples(x, y, s, lengths):
    return loss_of(tf.scan(lambda a, row: a * 0.5 + row, dense(x)), y)


@form
def a_scan_over_time(x, y, s, lengths):
    h, u = tf.tensordot(tf.transpose(s, [1, 0, 2]), weight("w", [2, H]), 1), weight("u", [H, H])
    return loss_of(tf.scan(lambda a, step: tf.tanh(tf.matmul(a, u) + step), h)[-1], y)


@form
def a_scan_over_time_that_normalizes(x, y, s, lengths):
    h, u = tf.tensordot(tf.transpose(s, [1, 0, 2]), weight("w", [2, H]), 1), weight("u", [H, H])
    return loss_of(tf.scan(lambda a, step: centred(tf.tanh(tf.matmul(a, u) + step)), h)[-1], y)


@form
def an_array_of_steps(x, y, s, lengths):
    h = dense(x)
    found = tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.write(i, tf.tanh(h * tf.cast(i, tf.float64)))),
                          (tf.constant(0), tf.TensorArray(tf.float64, 3)))[1]
    return loss_of(tf.reduce_sum(tf.square(found.stack()), 0), y)


@form
def an_array_of_sums(x, y, s, lengths):
    h = dense(x)
    found = tf.while_loop(lambda i, a: i < H, lambda i, a: (i + 1, a.write(i, tf.reduce_sum(tf.square(h[:, i])))),
                          (tf.constant(0), tf.TensorArray(tf.float64, H)))[1]
    return tf.reduce_max(found.stack()) + loss_of(h, y)


@form
def a_map_of_what_has_been_chosen(x, y, s, lengths):
    h = dense(x)
    return tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_max(row), tf.boolean_mask(h, x[:, 0] > 0))) + loss_of(h, y)


@form
def a_fold_over_time_within_a_map(x, y, s, lengths):
    h = tf.tensordot(s, weight("w", [2, H]), 1)
    return loss_of(tf.map_fn(lambda steps: tf.foldl(lambda a, b: tf.tanh(a + b), steps), h), y)


# Recurrent networks.

def rnn(s, lengths, name="c"):
    """A masked recurrence over time, as `tf.nn.dynamic_rnn` writes it."""
    w, u = weight(name + "w", [2, H]), weight(name + "u", [H, H])
    inputs = tf.transpose(s, [1, 0, 2])
    n = tf.shape(inputs)[1]
    array = tf.TensorArray(tf.float64, T).unstack(inputs)
    outputs = tf.TensorArray(tf.float64, T)
    longest, shortest = tf.reduce_max(lengths), tf.reduce_min(lengths)

    def turn(time, state, outputs):
        new = tf.tanh(tf.matmul(array.read(time), w) + tf.matmul(state, u))
        kept = lengths <= time
        new = tf.cond(time < shortest, lambda: new, lambda: tf.where(kept, state, new))
        return time + 1, new, outputs.write(time, tf.where(kept, tf.zeros_like(new), new))
    _, state, outputs = tf.while_loop(lambda time, *_: time < tf.minimum(T, tf.maximum(longest, 1)), turn, (
        0, tf.zeros([n, H], tf.float64), outputs), shape_invariants=(
            tf.TensorShape([]), tf.TensorShape([s.shape[0], H]), tf.TensorShape(None)), maximum_iterations=T)
    return state, outputs


@form
def a_recurrence_with_lengths(x, y, s, lengths):
    state, _ = rnn(s, lengths)
    return loss_of(state, y)


@form
def a_recurrence_whose_state_is_normalized(x, y, s, lengths):
    state, _ = rnn(s, lengths)
    return loss_of(centred(state), y)


@form
def a_recurrence_there_and_back(x, y, s, lengths):
    state, _ = rnn(s, lengths)
    back, _ = rnn(tf.reverse_sequence(s, lengths, 1, 0), lengths, "back")
    return loss_of(tf.concat([state, back], 1), y)


# Functions.

@form
def a_function_of_each_example(x, y, s, lengths):
    return loss_of(tf2.function(tf.tanh)(dense(x)), y)


@form
def a_function_that_centres(x, y, s, lengths):
    return loss_of(tf2.function(lambda h: centred(h) * 2)(dense(x)), y)


@form
def a_function_called_twice(x, y, s, lengths):
    function = tf2.function(lambda h: h / tf.reduce_max(tf.abs(h)))
    return loss_of(function(function(dense(x)) + 1), y)


@form
def a_function_called_with_weights_and_examples(x, y, s, lengths):
    function = tf2.function(centred)
    return loss_of(function(tf.matmul(x, function(weight("w", [F, H])))), y)


@form
def a_function_in_a_function(x, y, s, lengths):
    inner = tf2.function(lambda h: h - tf.reduce_mean(h))
    return loss_of(tf2.function(lambda h: inner(tf.tanh(h)) * 2)(dense(x)), y)


@form
def a_function_with_a_loop_called_twice(x, y, s, lengths):
    function = tf2.function(lambda h: over_steps(lambda i, a: tf.tanh(a) + tf.reduce_mean(h, 0), h))
    return loss_of(function(function(dense(x))), y)


@form
def a_function_with_a_loop_that_centres(x, y, s, lengths):
    return loss_of(tf2.function(lambda h: over_steps(lambda i, a: centred(tf.tanh(a)), h))(dense(x)), y)


@form
def a_function_in_a_loop(x, y, s, lengths):
    function, h = tf2.function(lambda a, b: tf.tanh(a) + tf.reduce_mean(b)), dense(x)
    return loss_of(over_steps(lambda i, a: function(a, h), h), y)


@form
def a_function_in_a_loop_that_centres(x, y, s, lengths):
    function = tf2.function(lambda a: centred(tf.tanh(a)))
    return loss_of(over_steps(lambda i, a: function(a), dense(x)), y)


@form
def a_function_in_a_branch(x, y, s, lengths):
    function, h = tf2.function(lambda a: centred(tf.tanh(a))), dense(x)
    return loss_of(tf.cond(tf.placeholder_with_default(True, []), lambda: function(h), lambda: h), y)


@form
def a_function_that_divides_by_the_size(x, y, s, lengths):
    return loss_of(tf2.function(lambda h: h / tf.cast(tf.shape(h)[0], tf.float64))(dense(x)), y)


@form
def a_function_that_makes_pairs(x, y, s, lengths):
    return tf.reduce_mean(tf2.function(lambda h: tf.reduce_logsumexp(tf.matmul(h, h, transpose_b=True), 1))(dense(x)))


@form
def a_function_of_pairs(x, y, s, lengths):
    h = dense(x)
    return tf.reduce_mean(tf2.function(lambda a: tf.tanh(a))(tf.matmul(h, h, transpose_b=True)))


@form
def a_function_with_a_gradient_within_the_model(x, y, s, lengths):
    h = dense(x)
    slope, = tf.gradients(tf.reduce_mean(tf.square(tf2.function(lambda a: centred(tf.tanh(a)))(h))), x)
    return loss_of(h, y) + tf.reduce_mean(tf.square(slope)) * 50


@form
def a_function_of_a_variable(x, y, s, lengths):
    w = weight("w", [F, H])
    return loss_of(tf2.function(lambda a: centred(tf.matmul(a, w)))(x), y)


# More of all, by themselves or in each other.

@form
def a_branch_that_writes_a_moving_mean(x, y, s, lengths):
    h = dense(x)
    moving = tf.get_variable("moving", [H], tf.float64, trainable=False, initializer=tf.zeros_initializer())

    def trained():
        mean = tf.reduce_mean(h, 0)
        with tf.control_dependencies([moving.assign(moving * 0.9 + mean * 0.1)]):
            return h - mean
    return loss_of(tf.cond(tf.placeholder_with_default(True, []), trained, lambda: h - moving), y)


@form
def a_branch_with_a_fused_batch_norm(x, y, s, lengths):
    w = tf.get_variable("w", [F, H], initializer=tf.random_normal_initializer(seed=1))
    h = tf.reshape(tf.matmul(tf.cast(x, tf.float32), w), [-1, 1, 1, H])
    ones, zeros = tf.ones([H]), tf.zeros([H])

    def normalized():
        return tf.nn.fused_batch_norm(h, ones, zeros, is_training=True)[0]
    found = tf.cond(tf.placeholder_with_default(True, []), normalized, lambda: h)
    return loss_of(tf.reshape(found, [-1, H]), tf.cast(y, tf.float32))


@form
def a_branch_that_asserts(x, y, s, lengths):
    h = dense(x)

    def asserted():
        with tf.control_dependencies([tf.debugging.assert_greater(tf.reduce_max(h), -100 * tf.ones([], tf.float64))]):
            return centred(h)
    return loss_of(tf.cond(tf.placeholder_with_default(True, []), asserted, lambda: h), y)


@form
def a_loop_that_chooses_rows(x, y, s, lengths):
    return loss_of(over_steps(lambda i, a: a - tf.reduce_mean(tf.boolean_mask(a, a[:, 0] > -1)), dense(x)), y)


@form
def a_loop_that_divides_by_a_number_of_python(x, y, s, lengths):
    n = x.shape[0] or tf.cast(tf.shape(x)[0], tf.float64)
    return loss_of(over_steps(lambda i, a: tf.tanh(a) / n + a, dense(x)), y)


@form
def a_loop_from_zeros(x, y, s, lengths):
    h = dense(x)
    return loss_of(over_steps(lambda i, a: tf.tanh(a + h), tf.zeros_like(h)), y)


@form
def a_loop_that_starts_with_zeros_of_the_size(x, y, s, lengths):
    h = dense(x)
    return loss_of(over_steps(lambda i, a: tf.tanh(a + h) + tf.zeros([tf.shape(x)[0], 1], tf.float64), tf.zeros(
        [tf.shape(x)[0], H], tf.float64)), y)


@form
def a_loop_that_sorts(x, y, s, lengths):
    h = dense(x)
    return loss_of(over_steps(lambda i, a: tf.tanh(a) + tf.sort(h, 0), h), y)


@form
def a_loop_over_two_states(x, y, s, lengths):
    h = dense(x)
    _, a, total = tf.while_loop(lambda i, a, total: i < 3, lambda i, a, total: (
        i + 1, tf.tanh(a), total + tf.reduce_mean(tf.square(a))), (tf.constant(0), h, tf.zeros([], tf.float64)))
    return loss_of(a, y) + tf.square(total)


@form
def a_loop_whose_mean_steers_it(x, y, s, lengths):
    _, a, total = tf.while_loop(lambda i, a, total: total < 0.5, lambda i, a, total: (
        i + 1, tf.tanh(a), total + tf.reduce_mean(tf.square(a))), (tf.constant(0), dense(x), tf.zeros([], tf.float64)))
    return loss_of(a, y) + tf.square(total)


@form
def an_array_of_growing_size(x, y, s, lengths):
    h = dense(x)
    found = tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.write(i, centred(h) * tf.cast(i, tf.float64))),
                          (tf.constant(0), tf.TensorArray(tf.float64, 0, dynamic_size=True)))[1]
    return loss_of(tf.reduce_sum(tf.square(found.stack()), 0), y)


@form
def an_array_that_is_joined(x, y, s, lengths):
    h = dense(x)
    found = tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.write(i, tf.transpose(tf.tanh(h)))),
                          (tf.constant(0), tf.TensorArray(tf.float64, 3, element_shape=[H, x.shape[0]])))[1]
    return loss_of(tf.transpose(found.concat()), y)


@form
def a_scan_within_a_function_in_a_branch(x, y, s, lengths):
    h = tf.tensordot(tf.transpose(s, [1, 0, 2]), weight("w", [2, H]), 1)
    function = tf2.function(lambda h: tf.scan(lambda a, step: tf.tanh(a + step), h)[-1])
    return loss_of(tf.cond(tf.reduce_mean(h) > -100, lambda: function(h - tf.reduce_mean(h, 1, keepdims=True)), lambda: h[0]), y)


@form
def a_slope_through_a_loop_with_a_branch(x, y, s, lengths):
    h = dense(x)
    found = over_steps(lambda i, a: tf.cond(i < 2, lambda: centred(tf.tanh(a)), lambda: a * 2), h)
    slope, = tf.gradients(tf.reduce_mean(tf.square(found)), x)
    return loss_of(h, y) + tf.reduce_mean(tf.square(slope)) * 50


@form
def a_slope_through_a_scan(x, y, s, lengths):
    h = tf.tensordot(tf.transpose(s, [1, 0, 2]), weight("w", [2, H]), 1)
    slope, = tf.gradients(tf.reduce_mean(tf.square(tf.scan(lambda a, step: tf.tanh(a + step), h)[-1])), s)
    return loss_of(dense(x, name="v"), y) + tf.reduce_mean(tf.square(slope)) * 50


@form
def a_slope_through_a_map_over_examples(x, y, s, lengths):
    h = dense(x)
    slope, = tf.gradients(tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_sum(tf.square(row)), h)), x)
    return loss_of(h, y) + tf.reduce_mean(tf.square(slope)) * 50


@form
def a_function_that_writes(x, y, s, lengths):
    h = dense(x)
    moving = tf.get_variable("moving", [H], tf.float64, trainable=False, initializer=tf.zeros_initializer())

    @tf2.function
    def normalized(h):
        mean = tf.reduce_mean(h, 0)
        moving.assign(moving * 0.9 + mean * 0.1)
        return h - mean
    return loss_of(normalized(h), y)


@form
def a_function_with_two_results(x, y, s, lengths):
    mean, h = tf2.function(lambda h: (tf.reduce_mean(h), tf.tanh(h)))(dense(x))
    return loss_of(h, y) * tf.exp(mean)


@form
def a_function_whose_branch_centres(x, y, s, lengths):
    function = tf2.function(lambda h: tf.cond(tf.reduce_mean(h) > -100, lambda: centred(h), lambda: h))
    return loss_of(function(dense(x)), y)


def unsized(model_fn):
    def of_any_size(*args):
        return model_fn(*[tf.placeholder_with_default(leaf, [None] + leaf.shape.as_list()[1:]) for leaf in args])
    return of_any_size


# Held in each run: a form of each kind. A sweep holds them all, with known and unknown sizes.
HELD = ("a_branch_by_a_statistic a_branch_that_centres a_branch_that_writes_a_moving_mean branches_of_chosen_rows "
        "a_switch_case a_loop_that_centres_each_turn a_loop_that_divides_by_the_size a_loop_that_adds_up_sums_over_examples "
        "a_branch_in_a_loop a_loop_over_pairs_with_a_state_of_each a_loop_that_centres_with_a_gradient_within_the_model "
        "a_map_over_examples_with_the_batch a_scan_over_time a_slope_through_a_scan a_recurrence_there_and_back "
        "a_function_called_twice a_function_in_a_loop a_function_that_writes a_function_that_makes_pairs "
        "a_loop_that_chooses_rows a_branch_in_a_branch a_function_with_a_gradient_within_the_model an_array_of_sums "
        "an_array_that_is_joined").split()


@pytest.mark.parametrize("name, is_known", [
    pytest.param(name, is_known, marks=() if name in HELD and is_known == (HELD.index(name) % 3 > 0) else pytest.mark.sweep)
    for name in sorted(FORMS) for is_known in (True, False)])
def test_what_a_body_computes_is_the_whole_batch(name, is_known):
    model_fn = FORMS[name] if is_known else unsized(FORMS[name])
    assert_equals_one_batch(towers.whole_batch(model_fn), batch(), 3, sizes=[3, 1, 5], steps=2)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in HELD[::6] else pytest.mark.sweep) for name in sorted(FORMS)])
def test_what_a_body_computes_is_that_of_a_batch_whose_size_nobody_knows(name):
    of_one = loss_and_gradients(FORMS[name], batch(), [9])
    of_towers = loss_and_gradients(towers.whole_batch(FORMS[name]), batch(), [3, 1, 5])
    for one, several in zip(of_one, of_towers):
        np.testing.assert_allclose(several, one, atol=1e-5 if one.dtype == np.float32 else 1e-9)


# What is refused.

@tf.custom_gradient
def doubled(h):
    return h * 2, lambda d: d * 2


def noise_in_a_loop(x, y, s, lengths):
    return loss_of(over_steps(lambda i, a: a + tf.random.normal([H], dtype=tf.float64), dense(x)), y)


def a_statistic_of_noise_in_a_branch(x, y, s, lengths):
    h = dense(x)
    return loss_of(tf.cond(tf.placeholder_with_default(True, []), lambda: centred(h * tf.random.uniform(
        tf.shape(h), dtype=tf.float64)), lambda: h), y)


def a_gradient_of_its_own_in_a_function(x, y, s, lengths):
    return loss_of(tf2.function(lambda h: centred(doubled(h)))(dense(x)), y)


def python_in_a_loop(x, y, s, lengths):
    return loss_of(over_steps(lambda i, a: a * tf.reshape(tf.py_func(np.sum, [a], tf.float64), []), dense(x)), y)


def a_list_of_examples_joined(x, y, s, lengths):
    h = dense(x)
    found = tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.write(i, h)), (0, tf.TensorArray(tf.float64, 3)))[1]
    return tf.reduce_mean(tf.square(found.concat()))


@pytest.mark.parametrize("model_fn, message", [
    (noise_in_a_loop, "in 'tower_0/while', a While, towers would have to meet about 'random_normal/RandomStandardN.* before"),
    (a_statistic_of_noise_in_a_branch, "in 'tower_0/cond', a If, towers would have to meet about 'random_uniform/RandomUniform'"),
    (a_gradient_of_its_own_in_a_function, "belongs to a tf.custom_gradient within a function.*Call it outside"),
    (python_in_a_loop, "the op 'PyFunc' in 'tower_0/while' is a PyFunc, for which there is no rule.*placement_rule"),
    (a_list_of_examples_joined, "joins a list of the towers' own examples along their axis: stack it"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_what_no_body_can_compute_exactly_is_refused_by_name(model_fn, message):
    with pytest.raises(ValueError, match="^towers.whole_batch: .*" + message):
        towers.TowerBuilder(["/cpu:0"] * 2).build(towers.whole_batch(model_fn), tuple(map(tf.constant, batch())))


def test_draws_of_each_example_in_a_loop_are_each_tower_its_own():
    def model_fn(x, y, s, lengths):
        return loss_of(over_steps(lambda i, a: a + tf.random.normal(tf.shape(a), dtype=tf.float64), dense(x)), y)
    whole = towers.whole_batch(model_fn)
    replicas = towers.TowerBuilder(["/cpu:0"] * 2).build(whole, tuple(map(tf.constant, batch())))
    assert whole.meetings == []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert np.isfinite(session.run(replicas.loss))


def test_what_needs_no_meeting_stays_as_it_is():
    def model_fn(x, y, s, lengths):
        return loss_of(over_steps(lambda i, a: tf.tanh(a), tf2.function(tf.tanh)(dense(x))), y)
    towers.TowerBuilder(["/cpu:0"] * 2).build(towers.whole_batch(model_fn), tuple(map(tf.constant, batch())))
    types = [op.type for op in tf.get_default_graph().get_operations()]
    assert types.count("PartitionedCall") + types.count("StatefulPartitionedCall") == 2
    assert types.count("StatelessWhile") + types.count("While") == 2
