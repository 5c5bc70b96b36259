"""Losses that are sums over a tower's examples: said where the towers train by less than one tower would, and nowhere else."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import SAID, SUM_IS_SAID, build
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

B, C = 12, 4
X = np.random.RandomState(3).randn(B, C)


def weights(dtype=tf.float64):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        return tf.get_variable("w", [C], dtype, tf.ones_initializer())


def squares(x):
    return tf.square(tf.sin(x * weights(x.dtype)) - 0.3)


def curves(x):
    return tf.cos(x * weights(x.dtype))


def in_a_loop(x, of_row, rounds=None):
    """A sum over the rounds of a loop, one for each of a tower's examples, of what is made of the examples and a number."""
    y, number_of_rounds = squares(x), tf.shape(x)[0] if rounds is None else rounds
    return tf.while_loop(lambda i, _: i < number_of_rounds, lambda i, total: (i + 1, total + of_row(y, i)),
                         [0, tf.zeros([], x.dtype)])[1]


def folded(x, of_row=tf.reduce_sum, by=tf.add):
    return tf.foldl(lambda total, row: by(total, of_row(row)), squares(x), tf.zeros([], x.dtype))


def mean_of_norms(x):
    return tf.reduce_mean(tf.sqrt(tf.reduce_sum(squares(x), 1)))


def decay():
    return 0.01 * tf.reduce_sum(tf.square(weights()))


def number(x):
    return tf.cast(tf.shape(x)[0], x.dtype)


def counted(x):
    """A mean over the examples that count, with a decay that is divided by their number too."""
    mask = tf.cast(x[:, 1] > -0.5, x.dtype)
    return {"weight": tf.reduce_sum(mask),
            "loss": (decay() + tf.reduce_sum(mask * squares(x)[:, 0])) / tf.maximum(tf.reduce_sum(mask), 1)}


def fed(x):
    return tf.placeholder_with_default(np.float64(B), [])


def norm(row):
    return tf.sqrt(tf.reduce_sum(row))


def norms(x, taken=tf.unstack, of_row=norm):
    """What a Python loop computes of each example."""
    return [of_row(row) for row in taken(squares(x))]


def by_index(y):
    return [y[i] for i in range(int(y.shape[0]))]


def by_split(y):
    return tf.split(y, int(y.shape[0]))


def by_turns(y):
    """Parts of a row of each example and of its number from the end."""
    return [tf.concat([y[i], 2 * y[-1 - i]], 0) for i in range(int(y.shape[0]))]


def chosen(x, one, other=lambda: 0.5):
    """What one branch of a tf.cond makes of the examples, the one that is taken, or another one."""
    return tf.cond(tf.reduce_sum(weights()) > 0, one, lambda: tf.cast(other(), x.dtype))


def turned(x):
    """The numbers of each of C steps, all of the tower's examples in a row, as recurrent networks have them."""
    return tf.transpose(squares(x))


def recurrent(x):
    """What a loop over steps makes of them one after the other, [C, batch]."""
    return tf.scan(lambda state, step: tf.tanh(0.5 * state + step), turned(x), tf.zeros_like(x[:, 0]))


def of_steps(x, of_row):
    """What tf.map_fn makes of each of C steps, along which no examples lie."""
    return tf.map_fn(of_row, tf.transpose(squares(x)))


def of_samples(x):
    """A number for each of five samples of each example, [5, batch], which stand one behind the other in between."""
    samples = squares(tf.tile(x, [5, 1]) * 0.5 + 0.1)
    return tf.reshape(tf.reduce_sum(samples, 1), [5, -1]) * tf.constant([[1.0], [2.0], [3.0], [4.0], [5.0]], x.dtype)


SUMS = {
    "of samples, all": lambda x: tf.reduce_sum(of_samples(x)) / B,
    "of samples, over their mean": lambda x: tf.reduce_mean(tf.reduce_sum(of_samples(x), 1)) / B,
    "a sum": lambda x: tf.reduce_sum(squares(x)),
    "by the whole batch": lambda x: tf.reduce_sum(squares(x)) / B,
    "times a quotient of numbers": lambda x: tf.constant(0.7, x.dtype) / tf.constant(5.0, x.dtype) * tf.reduce_sum(squares(x)),
    "times its inverse": lambda x: (1.0 / B) * tf.reduce_sum(squares(x)),
    "of all entries": lambda x: tf.reduce_sum(squares(x)) / (B * C),
    "by as many classes as a tower has examples": lambda x: tf.reduce_sum(squares(x)) / tf.cast(tf.shape(x)[1] * B * 2, x.dtype),
    "of a number fed": lambda x: tf.reduce_sum(squares(x)) / fed(x),
    "of classes, then examples": lambda x: tf.reduce_sum(tf.reduce_sum(squares(x), 1)) / B,
    "of squares": lambda x: tf.nn.l2_loss(squares(x)),
    "and a decay": lambda x: tf.add_n([tf.reduce_sum(squares(x)[:, 0]) / B, decay()]),
    "beside a mean": lambda x: tf.reduce_mean(squares(x)) - 0.1 * tf.reduce_sum(x * squares(x)) / 77,
    "of tf.losses": lambda x: tf.losses.mean_squared_error(x, squares(x), reduction="weighted_sum"),
    "of pairs by tf.losses": lambda x: tf.losses.mean_pairwise_squared_error(x, squares(x)),
    "where there is any": lambda x: tf.where(tf.size(x) > 0, tf.reduce_sum(squares(x)) / B, 0.0),
    "of a product": lambda x: tf.reduce_sum(tf.matmul(squares(x), tf.ones([C, 3], tf.float64))) / (3 * B),
    "of means": lambda x: tf.reduce_sum(tf.reduce_mean(squares(x), 1)) / B,
    "a mean of sums": lambda x: tf.reduce_mean([tf.reduce_sum(squares(x)), tf.nn.l2_loss(squares(x))]) / B,
    "a sum of a mean of sums": lambda x: tf.reduce_sum([tf.reduce_mean([tf.nn.l2_loss(x - squares(x))])]) / B,
    "a mean over classes of sums": lambda x: tf.reduce_mean(tf.reduce_sum(squares(x), 0)) / B,
    "of products by tf.einsum": lambda x: tf.einsum("bt,bt->", squares(x), curves(x)) / B,
    "of products with a mask by tf.einsum": lambda x: tf.einsum("bt,b->", curves(x), x[:, 0]) / B,
    "by weights in tf.einsum": lambda x: tf.einsum("bt,t->", squares(x), weights()) / B,
    "of products by tf.tensordot": lambda x: tf.tensordot(squares(x), curves(x), [[0, 1], [0, 1]]) / B,
    "of products by tf.matmul": lambda x: tf.reduce_sum(tf.matmul(squares(x), curves(x), transpose_a=True)) / B,
    "of what is divided": lambda x: tf.reduce_sum(squares(x) / B),
    "in a loop": lambda x: in_a_loop(x, lambda y, i: tf.reduce_sum(y[i])) / B,
    "in a loop, of tf.gather": lambda x: in_a_loop(x, lambda y, i: tf.sqrt(tf.reduce_mean(tf.gather(y, i)))) / B,
    "in a loop over classes": lambda x: in_a_loop(x, lambda y, i: tf.reduce_sum(y[:, i]), C) / B,
    "time first": lambda x: tf.reduce_sum(turned(x)) / B,
    "time first, of all entries": lambda x: tf.reduce_sum(turned(x)) / (B * C),
    "time first, of squares": lambda x: tf.nn.l2_loss(turned(x)),
    "time first, of products": lambda x: tf.reduce_sum(turned(x) * tf.transpose(curves(x))) / B,
    "time first, flattened": lambda x: tf.reduce_sum(tf.reshape(turned(x), [-1])) / B,
    "time first, of each step's": lambda x: tf.reduce_sum(tf.reduce_sum(turned(x), 1)) / B,
    "time first, a mean over steps": lambda x: tf.reduce_mean(tf.reduce_sum(turned(x), 1)) / B,
    "time first, step by step": lambda x: tf.add_n([tf.reduce_sum(step) for step in tf.unstack(turned(x), C)]) / B,
    "a mean of one sum of squares": lambda x: tf.reduce_mean(tf.nn.l2_loss(squares(x))) / B,
    "by tf.foldl": lambda x: folded(x) / B,
    "by tf.foldl, of squares": lambda x: folded(x, tf.nn.l2_loss) / B,
    "in the graph of a dict": lambda x: {"loss": tf.reduce_sum(squares(x)) / B, "weight": tf.shape(x)[0]}}

SUMS.update({
    "by tf.map_fn": lambda x: tf.reduce_sum(tf.map_fn(norm, squares(x))),
    "by tf.map_fn over the whole batch": lambda x: tf.reduce_sum(tf.map_fn(norm, squares(x))) / B,
    "by tf.map_fn of what is divided": lambda x: tf.reduce_sum(tf.map_fn(lambda row: norm(row) / B, squares(x))),
    "by tf.map_fn of two": lambda x: tf.reduce_sum(tf.map_fn(
        lambda rows: norm(rows[0]) * tf.reduce_mean(rows[1]), (squares(x), x), dtype=x.dtype)) / B,
    "by tf.map_fn within another": lambda x: tf.reduce_sum(tf.map_fn(
        lambda row: norm(tf.map_fn(lambda each: each * tf.reduce_mean(row), row)), squares(x))) / B,
    "time first, of a recurrent network": lambda x: tf.reduce_sum(recurrent(x)) / B,
    "of a recurrent network": lambda x: tf.reduce_sum(tf.transpose(recurrent(x))) / B,
    "by tf.vectorized_map": lambda x: tf.reduce_sum(tf.vectorized_map(tf.reduce_sum, squares(x))) / B,
    "of a recurrent network's last state": lambda x: tf.reduce_sum(tf.foldl(
        lambda state, step: tf.tanh(state + step), tf.transpose(squares(x)), tf.zeros_like(x[:, 0]))) / B,
    "in a branch": lambda x: chosen(x, lambda: tf.reduce_sum(squares(x)) / B),
    "in a branch, of what is outside": lambda x, by=B: chosen(x, lambda y=squares(x): tf.reduce_sum(y)) / by,
    "in a branch, of what is fed outside": lambda x: (
        lambda y, by: chosen(x, lambda: 0.1 + tf.reduce_sum(y) / by))(squares(x), fed(x)),
    "in either branch": lambda x: chosen(
        x, lambda: tf.reduce_sum(squares(x)) / B, lambda: tf.reduce_mean(squares(x))),
    "in a branch beside a mean": lambda x: tf.reduce_mean(squares(x)) + chosen(x, lambda: tf.nn.l2_loss(squares(x)) / B),
    "by tf.map_fn of rows": lambda x: tf.reduce_sum(tf.sqrt(tf.map_fn(tf.cos, squares(x)) + 2)) / B})

# Those of a Python loop over the examples, whose number is known while the graph is built.
SUMS_OF_KNOWN_SIZE = {
    "of what is stacked": lambda x: tf.reduce_sum(tf.sqrt(tf.stack(norms(x, of_row=tf.square)))) / B,
    "of what is joined": lambda x: tf.reduce_sum(tf.concat(norms(x, by_split, tf.square), 0)) / B,
    "of a list": lambda x: tf.reduce_sum(norms(x)) / B,
    "of a list, by index": lambda x: tf.reduce_sum(tf.stack(norms(x, by_index))),
    "of a list, by tf.split": lambda x: tf.reduce_sum(tf.stack(norms(x, by_split, tf.reduce_mean))) / B,
    "of a list of what is divided": lambda x: tf.reduce_sum(tf.stack(norms(x)) / B),
    "of each one": lambda x: tf.add_n(norms(x)) / B,
    "of each one, divided": lambda x: tf.add_n([each / B for each in norms(x, by_index)]),
    "of each one's mean": lambda x: tf.add_n(norms(x, of_row=tf.reduce_mean)) / B,
    "of each one's squares": lambda x: tf.add_n(norms(x, by_split, tf.nn.l2_loss)) / B,
    "one after the other": lambda x: sum(norms(x)) / B,
    "in the graph beside a mean": lambda x: tf.reduce_mean(squares(x)) + 0.3 * sum(norms(x, by_index)) / B}

MEANS = {
    "a trace, by the number": lambda x: tf.linalg.trace(tf.matmul(squares(x), squares(x), transpose_a=True)) / number(x),
    "of samples": lambda x: tf.reduce_mean(tf.reduce_sum(of_samples(x), 0)),
    "of samples, by the number": lambda x: tf.reduce_sum(of_samples(x)) / number(x),
    "of steps less each one's value": lambda x: tf.reduce_mean(tf.reduce_sum(
        tf.square(turned(x) - tf.expand_dims(squares(x)[:, 0], 0)), 0)),
    "of steps that are stacked": lambda x: tf.reduce_mean(tf.reduce_sum(tf.stack(
        [tf.square(squares(x)[:, i]) for i in range(C)]), 0)),
    "of steps backwards": lambda x: tf.reduce_mean(tf.reduce_sum(tf.reverse_sequence(
        turned(x), tf.fill([tf.shape(x)[0]], 2) + tf.cast(x[:, 0] > 0, tf.int32), seq_axis=0, batch_axis=1) * [
            [float(i)] for i in range(C)], 0)),
    "a mean": lambda x: tf.reduce_mean(squares(x)),
    "by the tower's examples": lambda x: tf.reduce_sum(squares(x)) / tf.cast(tf.shape(x)[0], tf.float64),
    "without examples too": lambda x: tf.div_no_nan(tf.reduce_sum(squares(x)), tf.cast(tf.size(x), tf.float64)),
    "of sums": lambda x: tf.reduce_mean(tf.reduce_sum(squares(x), 1)),
    "a sum of means": lambda x: tf.reduce_sum(tf.reduce_mean(squares(x), 0)),
    "a sum of means, turned": lambda x: tf.reduce_sum(tf.reduce_mean(tf.transpose(squares(x)), 1)),
    "a sum of products of all examples": lambda x: tf.reduce_sum(
        tf.matmul(x, squares(x), transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float64)),
    "of products by tf.einsum": lambda x: tf.einsum("bt,bt->", squares(x), curves(x)) / number(x),
    "of products of each one by tf.einsum": lambda x: tf.reduce_mean(tf.einsum("bt,t->b", squares(x), weights())),
    "of products of parts by tf.einsum": lambda x: tf.einsum("bt,bt->", squares(x), curves(x) / number(x)),
    "of products by tf.tensordot": lambda x: tf.tensordot(squares(x), curves(x) / number(x), [[0, 1], [0, 1]]),
    "of products by tf.matmul": lambda x: tf.reduce_sum(tf.matmul(squares(x) / number(x), curves(x), transpose_a=True)),
    "of what is divided": lambda x: tf.reduce_sum(squares(x) / number(x)),
    "in a loop": lambda x: in_a_loop(x, lambda y, i: tf.reduce_sum(y[i])) / number(x),
    "in a loop, by the number": lambda x: in_a_loop(x, lambda y, i: tf.reduce_sum(y[i] / number(x))),
    "in a loop over classes": lambda x: in_a_loop(x, lambda y, i: tf.reduce_mean(y[:, i]), C) / C,
    "in a loop over weights": lambda x: tf.reduce_mean(squares(x)) + in_a_loop(x, lambda y, i: weights()[i], C) / C,
    "by tf.map_fn": lambda x: tf.reduce_mean(tf.map_fn(tf.reduce_sum, squares(x))),
    "by tf.map_fn and their number": lambda x: tf.reduce_sum(tf.map_fn(norm, squares(x))) / number(x),
    "by tf.map_fn of what is divided": lambda x: tf.reduce_sum(tf.map_fn(lambda row: norm(row) / number(x), squares(x))),
    "by tf.map_fn over steps": lambda x: tf.reduce_sum(of_steps(x, tf.reduce_mean)) / C,
    "by tf.map_fn over weights": lambda x: tf.reduce_mean(squares(x)) + tf.reduce_sum(
        tf.map_fn(tf.square, weights())) / C,
    "by tf.map_fn over classes": lambda x: tf.reduce_sum(tf.map_fn(
        lambda i: tf.reduce_mean(squares(x)[:, i]), tf.range(C), dtype=x.dtype)),
    "by a Python loop over steps": lambda x: tf.add_n([tf.reduce_mean(squares(x)[:, i]) for i in range(C)]),
    "by a Python loop over steps, unstacked": lambda x: tf.reduce_sum(
        [tf.reduce_mean(step) for step in tf.unstack(squares(x), axis=1)]),
    "by a Python loop over layers": lambda x: tf.reduce_sum(
        [tf.reduce_mean(layer) for layer in tf.unstack(tf.stack([squares(x), curves(x)]))]),
    "by tf.foldl": lambda x: folded(x) / number(x),
    "time first": lambda x: tf.reduce_mean(turned(x)),
    "time first, by their number": lambda x: tf.reduce_sum(turned(x)) / number(x),
    "time first, by the number of an axis": lambda x: tf.reduce_sum(turned(x)) / tf.cast(tf.shape(turned(x))[1], x.dtype),
    "time first, by the number of entries": lambda x: tf.reduce_sum(turned(x)) / tf.cast(tf.size(turned(x)), x.dtype),
    "time first, of squares by their number": lambda x: tf.nn.l2_loss(turned(x)) / number(x),
    "time first, of weights": lambda x: tf.reduce_sum(turned(x) * (tf.ones_like(turned(x)) / number(x))),
    "time first, a sum over steps": lambda x: tf.reduce_sum(tf.reduce_mean(turned(x), 1)),
    "time first, a mean of each example's": lambda x: tf.reduce_mean(tf.reduce_sum(turned(x), 0)),
    "time first, step by step": lambda x: tf.add_n([tf.reduce_mean(step) for step in tf.unstack(turned(x), C)]),
    "of a recurrent network": lambda x: tf.reduce_mean(tf.reduce_sum(recurrent(x), 0)),
    "of a recurrent network by their number": lambda x: tf.reduce_sum(recurrent(x)) / number(x),
    "in a branch": lambda x: chosen(x, lambda: tf.reduce_mean(squares(x)), lambda: tf.reduce_mean(x)),
    "in a branch, by the number": lambda x: chosen(x, lambda: tf.reduce_sum(squares(x)) / number(x)),
    "in a branch, by the number from outside": lambda x: (
        lambda y, by: chosen(x, lambda: tf.reduce_sum(y) / tf.maximum(by, 1)))(squares(x), number(x)),
    "in a branch, of what is divided after it": lambda x: chosen(x, lambda: tf.reduce_sum(squares(x)), lambda: 0.0) / number(x),
    "in a branch, of weights": lambda x: tf.reduce_mean(squares(x)) + chosen(x, decay),
    "with a rate in a branch": lambda x: tf.reduce_mean(squares(x)) * chosen(x, lambda: tf.constant(0.5, x.dtype)),
    "of what is multiplied": lambda x: tf.reduce_sum(tf.reduce_sum(squares(x) * (1 / number(x)), 1)),
    "a mean of means": lambda x: tf.reduce_mean([tf.reduce_mean(squares(x)), tf.reduce_mean(x * squares(x))]),
    "with a decay": lambda x: mean_of_norms(x) + decay() / B,
    "beside a sum times 0": lambda x: tf.reduce_mean(squares(x)) + 0 * tf.reduce_sum(squares(x)),
    "of tf.losses": lambda x: tf.losses.mean_squared_error(x, squares(x)),
    "of tf.losses over the batch": lambda x: tf.losses.absolute_difference(
        x, squares(x), reduction="weighted_sum_over_batch_size"),
    "where there is any": lambda x: tf.where(
        tf.size(x) > 0, tf.reduce_sum(squares(x)) / tf.cast(tf.shape(x)[0], tf.float64), tf.zeros([], tf.float64)),
    "of pairs by tf.losses and their number": lambda x: tf.losses.mean_pairwise_squared_error(x, squares(x)) / tf.cast(
        tf.shape(x)[0], x.dtype),
    "of the sum of all": lambda x: towers.all_reduce(tf.reduce_sum(squares(x))) / B,
    "times the towers": lambda x: tf.reduce_sum(squares(x)) / B * towers.current_tower().num_towers}

# Those that count on what is known while the graph is built.
MEANS_OF_KNOWN_SIZE = {
    "by a number": lambda x: tf.reduce_sum(squares(x)) / int(x.shape[0]),
    "by a number of entries": lambda x: tf.reduce_sum(squares(x)) / (int(x.shape[0]) * C),
    "by half of it": lambda x: 0.5 * tf.reduce_sum(squares(x)) / int(x.shape[0]),
    "of squares": lambda x: tf.nn.l2_loss(squares(x)) / int(x.shape[0]),
    "time first": lambda x: tf.reduce_sum(turned(x)) / int(turned(x).shape[1]),
    "time first, of entries": lambda x: tf.reduce_sum(turned(x)) / (C * int(x.shape[0])),
    "time first, step by step": lambda x: tf.add_n([tf.reduce_sum(step) for step in tf.unstack(turned(x))]) / int(x.shape[0]),
    "time first, a mean over steps": lambda x: tf.reduce_mean(tf.reduce_sum(turned(x), 1)) / int(x.shape[0]),
    "a mean of sums": lambda x: tf.reduce_mean([tf.reduce_sum(squares(x)), tf.nn.l2_loss(squares(x))]) / int(x.shape[0]),
    "a mean of each one's sum": lambda x: tf.reduce_mean([tf.reduce_sum(row) for row in tf.unstack(squares(x))]),
    "a sum of each one's sum": lambda x: tf.add_n(
        [tf.reduce_sum(squares(x)[i]) for i in range(int(x.shape[0]))]) / int(x.shape[0]),
    "by tf.map_fn": lambda x: tf.reduce_sum(tf.map_fn(norm, squares(x))) / int(x.shape[0]),
    "by tf.map_fn of what is divided": lambda x: tf.reduce_sum(tf.map_fn(lambda row: norm(row) / int(x.shape[0]), squares(x))),
    "by tf.map_fn by a number from outside": lambda x: tf.reduce_sum(tf.map_fn(
        lambda row, by=tf.constant(x.shape.as_list()[0], x.dtype): norm(row) / by, squares(x))),
    "by a weight and it": lambda x: tf.reduce_sum(squares(x)) * (1.0 / B) / int(x.shape[0]),
    "of what is divided": lambda x: tf.reduce_sum(squares(x) / int(x.shape[0])),
    "in a loop": lambda x: in_a_loop(x, lambda y, i: tf.reduce_sum(tf.gather(y, i))) / int(x.shape[0]),
    "by tf.foldl, of squares": lambda x: folded(x, tf.nn.l2_loss) / int(x.shape[0]),
    "of the flattened": lambda x: tf.reduce_sum(tf.reshape(squares(x), [-1])) / int(x.shape[0])}

# Those of a Python loop over the examples, of which all towers have as many.
MEANS_OF_LISTS = {
    "of a list": lambda x: tf.reduce_mean(norms(x)),
    "of a list, weighed": lambda x: 0.5 * tf.reduce_mean(norms(x)) + 0.1 * tf.reduce_mean(tf.stack(norms(x, by_index))),
    "of a list of two each": lambda x: tf.reduce_mean(norms(x) + norms(x, of_row=tf.reduce_sum)),
    "of what is stacked": lambda x: tf.reduce_mean(tf.reduce_sum(tf.stack(norms(x, of_row=tf.square)), 1)),
    "of what is stacked, by their number": lambda x: tf.reduce_sum(tf.stack(norms(x, of_row=tf.square))) / int(x.shape[0]),
    "of a list, weighed each": lambda x: tf.reduce_mean(2 * tf.stack(norms(x))),
    "of a list, by their number": lambda x: tf.reduce_sum(norms(x, by_index)) / int(x.shape[0]),
    "of a list, by tf.split": lambda x: tf.reduce_sum(norms(x, by_split, tf.reduce_mean)) / int(x.shape[0]),
    "of a list, by the graph's number": lambda x: tf.reduce_sum(norms(x)) / number(x),
    "of a list of what is divided": lambda x: tf.reduce_sum([each / int(x.shape[0]) for each in norms(x)]),
    "of what is divided by the graph's number": lambda x: tf.add_n([each * (1 / number(x)) for each in norms(x)]),
    "of each one's sum, by tf.split": lambda x: tf.add_n(norms(x, by_split, tf.reduce_sum)) / int(x.shape[0]),
    "of each one, times the towers": lambda x: tf.add_n(norms(x)) / B * towers.current_tower().num_towers,
    "one after the other": lambda x: sum(norms(x)) / int(x.shape[0]),
    "of one and its number from the end": lambda x: tf.add_n(norms(x)) / int(x.shape[0]) + 0 * tf.add_n(norms(x, by_turns))}

# Sums that have a number beside that of the whole batch, as small as that of a tower's examples may be.
SUMS_AND_FACTORS = {
    "by the whole batch and 2": lambda x: tf.reduce_sum(squares(x)) / B / 2,
    "half of it": lambda x: 0.5 * tf.reduce_sum(squares(x)) / B,
    "half of it by its inverse": lambda x: 0.5 * (tf.reduce_sum(squares(x)) * (1.0 / B)),
    "a tenth of it": lambda x: 0.1 * tf.reduce_sum(squares(x)) / B,
    "two times it": lambda x: 2 * tf.reduce_sum(squares(x)) / B,
    "of entries": lambda x: tf.reduce_sum(squares(x)) / (B * C) / 2}

# The 2 undoes TensorFlow's half, and is not two towers'.
SUMS_OF_HALVES = {
    "twice half of it": lambda x: 2 * tf.nn.l2_loss(squares(x)) / B,
    "twice half of it, divided": lambda x: 0.3 * (2 * (tf.nn.l2_loss(squares(x)) / B))}

# Weight decays that are divided by the number of a tower's examples.
DECAYS = {
    "beside a sum": lambda x: (decay() + tf.reduce_sum(squares(x))) / number(x),
    "beside two": lambda x: tf.add_n([tf.reduce_sum(squares(x)), decay(), 0.1 * tf.nn.l2_loss(squares(x))]) / number(x),
    "a root": lambda x: tf.div_no_nan(tf.reduce_sum(squares(x)) + 0.1 * tf.norm(weights()), number(x)),
    "weighed after": lambda x: 0.5 * ((decay() + tf.reduce_sum(squares(x))) / number(x)),
    "by what is counted": counted}
DECAYS_OF_KNOWN_SIZE = {
    "by a number": lambda x: (decay() + tf.reduce_sum(squares(x))) / int(x.shape[0]),
    "times one over it": lambda x: (1.0 / int(x.shape[0])) * (decay() + tf.reduce_sum(squares(x))),
    "by the number of entries": lambda x: (decay() + tf.reduce_sum(squares(x))) / (int(x.shape[0]) * C)}
DECAYS_OF_UNKNOWN_SIZE = {"alone": lambda x: tf.reduce_mean(squares(x)) + decay() / number(x)}

RIGHT_DECAYS = {
    "beside a mean": lambda x: 0.5 * (decay() + tf.reduce_mean(squares(x))),
    "beside a sum by the number": lambda x: (decay() + tf.reduce_sum(squares(x)) / number(x)) / C,
    "by the towers": lambda x: (decay() / towers.current_tower().num_towers + tf.reduce_sum(squares(x))) / number(x),
    "by all examples": lambda x: tf.reduce_mean(squares(x)) + decay() / towers.all_reduce(number(x)),
    "times the number": lambda x: (number(x) * decay() + tf.reduce_sum(squares(x))) / number(x),
    "of each example": lambda x: tf.reduce_sum(squares(x) + decay()) / (C * number(x)),
    "by a sum of weights": lambda x: decay() / tf.reduce_sum(tf.square(weights())) + tf.reduce_sum(squares(x)) / number(x)}
RIGHT_DECAYS_OF_KNOWN_SIZE = {
    "times a number": lambda x: (int(x.shape[0]) * decay() + tf.reduce_sum(squares(x))) / int(x.shape[0]),
    "and a mean by a number": lambda x: 0.5 * (decay() + tf.reduce_sum(squares(x)) / int(x.shape[0])),
    "by a number as large": lambda x: decay() / 4 + tf.reduce_sum(squares(x)) / int(x.shape[0])}


def batch_for(name):
    """Returns the batch, in float32 for what computes in it always."""
    return (X.astype(np.float32) if "tf.losses" in name else X,)


def of_unknown_size(model):
    return lambda x: model(tf.placeholder_with_default(x, [None, C]))


def divided_by(num_towers):
    return SUM_IS_SAID + ": the towers' average is 1/%d of it" % num_towers


def assert_differs_from_one_batch(model, batch, num_towers, sizes=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(AssertionError):
            assert_equals_one_batch(model, batch, num_towers, sizes)


def build_sizes(model, sizes):
    """Builds towers of so many examples, which are known while the graph is built."""
    build(model, towers.PerTower([tf.placeholder(X.dtype, [size, C]) for size in sizes]), len(sizes))


@pytest.mark.parametrize("name", covering(sorted(SUMS), one_in=4))
def test_a_sum_over_examples_is_said(name):
    with pytest.warns(UserWarning, match=divided_by(2)):
        build(SUMS[name], batch_for(name), 2)
    with pytest.warns(UserWarning, match=divided_by(3)):
        build(of_unknown_size(SUMS[name]), batch_for(name), 3)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(SUMS))
@pytest.mark.parametrize("num_towers", [2, 3])
def test_a_sum_over_examples_is_not_what_one_tower_trains_by_and_is_said(name, num_towers):
    for model in (SUMS[name], of_unknown_size(SUMS[name])):
        with pytest.warns(UserWarning, match=divided_by(num_towers)):
            build(model, batch_for(name), num_towers)
    assert_differs_from_one_batch(SUMS[name] if num_towers == 2 else model, batch_for(name), num_towers)


@pytest.mark.parametrize("name,sizes", covering(sorted(SUMS_OF_KNOWN_SIZE), [[6, 6], [4] * 3, [2] * 6], one_in=4))
def test_a_sum_over_a_list_of_each_examples_own_is_said_too(name, sizes):
    with pytest.warns(UserWarning, match=SUM_IS_SAID):
        build_sizes(SUMS_OF_KNOWN_SIZE[name], sizes)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(SUMS_OF_KNOWN_SIZE))
@pytest.mark.parametrize("sizes", [[6, 6], [4] * 3, [2] * 6])
def test_a_sum_over_a_list_of_each_examples_own_is_not_what_one_tower_trains_by(name, sizes):
    assert_differs_from_one_batch(SUMS_OF_KNOWN_SIZE[name], (X,), len(sizes), sizes)


@pytest.mark.parametrize("model", [
    lambda x: tf.add_n(norms(x)[1:]) / 3 + tf.reduce_mean(squares(x)), lambda x: tf.add_n(norms(x, by_turns)) / 5])
def test_a_list_of_some_examples_is_none_of_all(model):
    with pytest.warns(UserWarning, match="by (its|their) place"):
        build(model, (X,), 3)


@pytest.mark.parametrize("name", covering(sorted(MEANS), one_in=4))
def test_a_mean_over_examples_passes_in_silence(name, silent):
    build(MEANS[name], batch_for(name), 2)
    build(of_unknown_size(MEANS[name]), batch_for(name), 3)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(MEANS))
@pytest.mark.parametrize("num_towers", [2, 3])
def test_a_mean_over_examples_is_one_towers_and_passes_in_silence(name, num_towers, silent):
    for model in (MEANS[name], of_unknown_size(MEANS[name])):
        build(model, batch_for(name), num_towers)
        assert_equals_one_batch(model, batch_for(name), num_towers)


SPLITS = [[6, 6], [4] * 3, [3] * 4, [1, 7, 4]]
SIZES_OF_LISTS = [[6, 6], [4] * 3, [3] * 4, [1] * 12]


@pytest.mark.parametrize("name,sizes", covering(sorted(MEANS_OF_KNOWN_SIZE), SPLITS, one_in=4))
def test_a_mean_by_the_number_of_the_towers_own_examples_passes_in_silence(name, sizes, silent):
    build_sizes(MEANS_OF_KNOWN_SIZE[name], sizes)


@pytest.mark.parametrize("name,sizes", covering(sorted(MEANS_OF_LISTS), SIZES_OF_LISTS, one_in=4))
def test_a_mean_over_a_list_of_each_examples_own_passes_in_silence(name, sizes, silent):
    build_sizes(MEANS_OF_LISTS[name], sizes)


@pytest.mark.sweep
@pytest.mark.parametrize("table,name,sizes", [
    (table, name, sizes) for table, splits in ((MEANS_OF_KNOWN_SIZE, SPLITS), (MEANS_OF_LISTS, SIZES_OF_LISTS))
    for name in sorted(table) for sizes in splits])
def test_a_mean_over_examples_of_a_known_number_is_one_towers(table, name, sizes):
    assert_equals_one_batch(table[name], (X,), len(sizes), sizes)


def models_of(name, either, known, unknown=()):
    if name in either:
        return [either[name], of_unknown_size(either[name])]
    return [known[name] if name in known else of_unknown_size(unknown[name])]


NAMES_OF_DECAYS = sorted({**DECAYS, **DECAYS_OF_KNOWN_SIZE, **DECAYS_OF_UNKNOWN_SIZE})
SIZES_OF_DECAYS = [[6, 6], [3, 5, 4], [2] * 6]


@pytest.mark.parametrize("name,sizes", covering(NAMES_OF_DECAYS, SIZES_OF_DECAYS, one_in=4))
def test_a_decay_by_the_number_of_a_towers_examples_is_several_times_that_of_one_tower_and_is_said(name, sizes):
    for model in models_of(name, DECAYS, DECAYS_OF_KNOWN_SIZE, DECAYS_OF_UNKNOWN_SIZE):
        with pytest.warns(UserWarning, match=SAID):
            build_sizes(model, sizes)


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES_OF_DECAYS)
@pytest.mark.parametrize("sizes", SIZES_OF_DECAYS)
def test_a_decay_by_the_number_of_a_towers_examples_is_not_what_one_tower_trains_by(name, sizes):
    for model in models_of(name, DECAYS, DECAYS_OF_KNOWN_SIZE, DECAYS_OF_UNKNOWN_SIZE):
        assert_differs_from_one_batch(model, (X,), len(sizes), sizes)


NAMES_OF_RIGHT_DECAYS = sorted({**RIGHT_DECAYS, **RIGHT_DECAYS_OF_KNOWN_SIZE})


@pytest.mark.parametrize("name,num_towers", covering(NAMES_OF_RIGHT_DECAYS, [2, 3, 6], one_in=4))
def test_a_decay_beside_a_mean_passes_in_silence(name, num_towers, silent):
    for model in models_of(name, RIGHT_DECAYS, RIGHT_DECAYS_OF_KNOWN_SIZE):
        build(model, (X,), num_towers)


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES_OF_RIGHT_DECAYS)
@pytest.mark.parametrize("num_towers", [2, 3, 6])
def test_a_decay_beside_a_mean_is_one_towers(name, num_towers):
    for model in models_of(name, RIGHT_DECAYS, RIGHT_DECAYS_OF_KNOWN_SIZE):
        assert_equals_one_batch(model, (X,), num_towers)


# Of six towers each has two examples, and a half may be taken for one over their number.
@pytest.mark.parametrize("name,num_towers", covering(sorted(SUMS_AND_FACTORS), [6, 3, 12], one_in=4))
def test_a_factor_beside_the_number_of_the_whole_batch_is_none_of_a_towers_examples(name, num_towers):
    with pytest.warns(UserWarning, match=SUM_IS_SAID):
        build_sizes(SUMS_AND_FACTORS[name], [B // num_towers] * num_towers)


@pytest.mark.sweep
@pytest.mark.parametrize("name,num_towers", [(name, n) for name in sorted(SUMS_AND_FACTORS) for n in (3, 6, 12)] + [
    (name, 2) for name in sorted(SUMS_OF_HALVES)])
def test_a_sum_with_a_factor_is_not_what_one_tower_trains_by(name, num_towers):
    assert_differs_from_one_batch({**SUMS_AND_FACTORS, **SUMS_OF_HALVES}[name], (X,), num_towers)


@pytest.mark.parametrize("name", covering(sorted(SUMS_OF_HALVES), one_in=4))
def test_the_two_of_half_a_sum_is_not_the_number_of_towers(name):
    with pytest.warns(UserWarning, match=SUM_IS_SAID):
        build_sizes(SUMS_OF_HALVES[name], [6, 6])


@pytest.mark.parametrize("weight,num_towers", covering([0.5, 0.25, 0.1, 3.0, 1.0 / B], [6, 12], one_in=4))
def test_a_mean_over_one_or_two_examples_may_have_a_weight(weight, num_towers, silent):
    sizes = [B // num_towers] * num_towers
    build_sizes(lambda x: weight * tf.reduce_sum(squares(x)) / int(x.shape[0]), sizes)
    build_sizes(lambda x: weight * tf.reduce_sum(squares(x)) / (int(x.shape[0]) * C), sizes)


@pytest.mark.sweep
@pytest.mark.parametrize("weight", [0.5, 0.25, 0.1, 3.0, 1.0 / B])
@pytest.mark.parametrize("num_towers", [6, 12])
def test_a_mean_over_one_or_two_examples_with_a_weight_is_one_towers(weight, num_towers):
    assert_equals_one_batch(lambda x: weight * tf.reduce_sum(squares(x)) / int(x.shape[0]), (X,), num_towers)
    assert_equals_one_batch(lambda x: weight * tf.reduce_sum(squares(x)) / (int(x.shape[0]) * C), (X,), num_towers)


def test_a_mean_over_as_many_entries_as_the_whole_batch_has_examples_passes_in_silence(silent):
    assert_equals_one_batch(lambda x: 0.5 * tf.reduce_sum(squares(x)) / int(x.shape[0]) / C, (X[:8],), 2)
    assert_equals_one_batch(lambda x: tf.reduce_sum(squares(x)) / int(x.shape[0]) / C, (X[:4],), 2)


@pytest.mark.parametrize("product", [
    lambda y: tf.tensordot(y, y, [[0], [0]]), lambda y: tf.einsum("bi,bj->ij", y, y)], ids=["tensordot", "einsum"])
def test_a_covariance_by_the_number_of_examples_is_no_sum(product):
    def model(x):
        return tf.reduce_sum(tf.square(product(squares(x)) / number(x)))

    with pytest.warns(UserWarning, match=SAID) as caught:
        build(model, (X,), 2)
        build(of_unknown_size(model), (X,), 2)
    assert not [w for w in caught if "is a sum" in str(w.message)]


def test_the_largest_of_a_loop_is_no_sum():
    with pytest.warns(UserWarning, match=SAID) as caught:
        build(lambda x: folded(x, by=tf.maximum), (X,), 2)
    assert not [w for w in caught if "is a sum" in str(w.message)]


def test_a_sum_over_one_example_of_each_tower_is_said_too():
    with pytest.warns(UserWarning, match=SUM_IS_SAID), pytest.raises(AssertionError):
        assert_equals_one_batch(SUMS["a sum"], (X[:3],), 3)


def test_a_loss_that_is_discounted_over_many_steps_is_built_at_once(silent):
    def model(x):
        total = tf.reduce_sum(squares(x)) / B
        for step in range(60):
            total = (0.9 - 0.001 * step) * total + tf.reduce_mean(squares(x) * step)
        return total

    build(model, (X,), 3)  # all products of 60 numbers would never be looked through


def test_one_tower_may_add_up(silent):
    assert_equals_one_batch(SUMS["a sum"], (X,), 1)


def test_a_loss_that_is_chosen_later_is_looked_at_when_it_is(silent):
    def model(x):
        return {"mean": tf.reduce_mean(squares(x)), "sum": tf.reduce_sum(squares(x)) / B}

    replicas = build(model, (X,), 2)
    towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(0.1), loss="mean")
    with pytest.warns(UserWarning, match=SUM_IS_SAID) as caught:
        warnings.simplefilter("always")
        towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(0.1), loss="sum")
    assert [w.filename for w in caught if SAID in str(w.message)] == [__file__]
