"""Loops of the graph over the examples stay each tower's own, so that N towers share their turns; else all take the whole batch.

Each model is one tower's on the whole batch, in loss and gradients. What is lost without this file: `tf.map_fn` would cost each
tower the turns of all, or be wrong where a turn takes more than its example.
"""
import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, control_flow_2, loss_and_gradients, session
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(0).randn(12, 4)


def scaled(x):
    return x * tf.get_variable("w", [4], tf.float64, initializer=tf.constant_initializer([.3, -.4, .5, .2]))


def score(y):
    """Something of all examples that is neither a sum nor a mean."""
    return tf.reduce_max(y) * tf.reduce_mean(tf.tanh(y)) + tf.reduce_mean(y)


def turns(x, turn, *state):
    """Returns what a loop over the examples hands on, without its counter."""
    n = tf.shape(x)[0]
    return tf.while_loop(lambda i, *_: i < n, lambda i, *state: (i + 1,) + turn(i, *state), [tf.constant(0), *state])[1:]


def likenesses(x):
    """A row for each example, with a number for each of all."""
    return tf.matmul(scaled(x), x, transpose_b=True)


def row_of_all_written(x):
    rows = likenesses(x)
    return score(turns(x, lambda i, found: (found.write(i, tf.reduce_max(rows[i]) + tf.tanh(rows[i])),),
                       tf.TensorArray(tf.float64, tf.shape(x)[0]))[0].stack())


def zero(shape=()):
    return tf.zeros(shape, tf.float64)


def growing():
    return tf.TensorArray(tf.float64, 0, dynamic_size=True, element_shape=[])


def chosen(row):
    total = tf.reduce_sum(row)
    return tf.cond(total > 0, lambda: tf.constant(2., tf.float64), lambda: 0.5 * total)


def inner_steps(row):
    """A step of gradient descent for each example, as MAML's for each task."""
    start = scaled(tf.ones([4], tf.float64))
    loss = tf.reduce_mean(tf.square(tf.tanh(row * start) - 1))
    return tf.reduce_sum(tf.tanh((start - 0.1 * tf.gradients(loss, start)[0]) * row))


def until_large(row):
    """A loop for each example that ends when the example wants it."""
    count, total = tf.while_loop(lambda k, s: tf.reduce_sum(s) < 3., lambda k, s: (k + 1, s + tf.abs(row) + .3), [
        tf.constant(0), zero([4])])
    return tf.reduce_sum(total) * tf.cast(count, tf.float64)


def written_in_branches(x):
    h = scaled(x)

    def turn(i, found):
        return tf.cond(x[i, 0] > 0, lambda: found.write(i, tf.reduce_sum(h[i])), lambda: found.write(i, zero())),
    return score(turns(x, turn, tf.TensorArray(tf.float64, tf.shape(x)[0], element_shape=[]))[0].stack())


def positive_mean(x):
    h = scaled(x)
    total, count = turns(x, lambda i, total, count: (
        total + tf.nn.relu(tf.reduce_sum(h[i])), count + tf.cast(tf.reduce_sum(h[i]) > 0, tf.int32)), zero(), tf.constant(0))
    return total / tf.cast(tf.maximum(count, 1), tf.float64)


def by_the_last_number(x):
    h, n = scaled(x), tf.shape(x)[0]
    i, total = tf.while_loop(lambda i, _: i < n, lambda i, total: (i + 1, total + tf.tanh(tf.reduce_sum(h[i]))), [
        tf.constant(0), zero()])
    return tf.square(total / tf.cast(i, tf.float64))


def kept_state(x):
    total, mean = turns(x, lambda i, total, mean: (total + tf.tanh(tf.reduce_sum(x[i])), mean), zero(), tf.reduce_mean(scaled(x)))
    return total * mean


def standardized(x):
    h = scaled(x)
    mean, variance = tf.nn.moments(h, [0])
    return score(tf.map_fn(lambda row: tf.reduce_sum(tf.tanh((row - mean) / tf.sqrt(variance + 0.1))), h))


def within_branch(x):
    h = scaled(x)
    return tf.cond(tf.reduce_mean(h) > -9, lambda: score(tf.map_fn(tf.tanh, h)), lambda: tf.reduce_sum(h))


def lists_that_change_places(x):
    h = scaled(x)
    found = [tf.TensorArray(tf.float64, tf.shape(x)[0], element_shape=[]) for _ in range(2)]
    a, b = turns(x, lambda i, a, b: (b.write(i, tf.reduce_sum(h[i])), a), *found)
    return score(a.stack()) + 2 * score(b.stack())


OWN = {  # loops of which each tower takes its own turns
    "tf.map_fn": lambda x: score(tf.map_fn(lambda row: tf.tanh(row) - tf.reduce_mean(row), scaled(x))),
    "of two, twice": lambda x: score(tf.map_fn(lambda pair: tf.reduce_sum(pair[0] * pair[1]), (
        x, tf.map_fn(tf.tanh, scaled(x))), dtype=tf.float64)),
    "a branch for each": lambda x: score(tf.map_fn(chosen, scaled(x))),
    "a loop for each": lambda x: score(tf.map_fn(until_large, scaled(x))),
    "a scan of each": lambda x: score(tf.map_fn(
        lambda row: tf.reduce_sum(tf.scan(lambda s, v: tf.tanh(s * .5 + v), row, zero())), scaled(x))),
    "a map of each": lambda x: score(tf.map_fn(lambda row: tf.reduce_sum(tf.map_fn(tf.tanh, row)), scaled(x))),
    "steps for each": lambda x: score(tf.map_fn(inner_steps, x)),
    "by numbers": lambda x: score(tf.map_fn(lambda i: tf.reduce_sum(scaled(x[i])), tf.range(tf.shape(x)[0]), dtype=tf.float64)),
    "against all": lambda x: score(tf.map_fn(lambda row: tf.reduce_max(tf.reduce_sum(tf.square(scaled(x) - row), 1)), x)),
    "the size of a row of all": lambda x: score(tf.map_fn(lambda row: tf.reduce_logsumexp(row) * tf.cast(
        tf.size(row), tf.float64), likenesses(x))),
    "one of all": lambda x: score(tf.map_fn(lambda row: tf.reduce_sum(tf.gather(scaled(x)[:, 0], tf.cast(
        row[0] > 0, tf.int32)) * row), x)),
    "standardized before": standardized,
    "of chosen entries": lambda x: score(tf.map_fn(lambda row: tf.reduce_logsumexp(tf.boolean_mask(row, row > -9)), scaled(x))),
    "a sum": lambda x: tf.square(turns(x, lambda i, total: (total + tf.reduce_sum(scaled(x[i])),), zero())[0]),
    "a sum upon 1.5": lambda x: tf.square(tf.foldl(lambda total, row: total + tf.reduce_sum(row), tf.tanh(scaled(x)),
                                                   tf.constant(1.5, tf.float64))),
    "a sum in branches": lambda x: tf.square(turns(x, lambda i, total: (tf.cond(
        x[i, 0] > 0, lambda: total + tf.reduce_sum(x[i]), lambda: total),), zero())[0]) * tf.reduce_mean(scaled(x)),
    "a sum in loops": lambda x: tf.square(turns(x, lambda i, total: (tf.while_loop(
        lambda k, _: k < 3, lambda k, total: (k + 1, total + tf.tanh(x[i, k])), [tf.constant(0), total])[1],), zero())[0]
                                          ) * tf.reduce_mean(scaled(x)),
    "a sum and a count": positive_mean, "by the last number": by_the_last_number, "a state that stays": kept_state,
    "written in branches": written_in_branches}

if not tf.control_flow_v2_enabled():  # there a list does not say that it was made empty
    OWN["written to a list that grows"] = lambda x: score(turns(x, lambda i, found: (
        found.write(i, tf.reduce_sum(scaled(x[i]))),), growing())[0].stack())

WHOLE = {  # loops whose turns take more than their example, or make what may have any size, so that each tower takes all turns
    "a row of all": lambda x: score(tf.map_fn(lambda row: tf.tanh(row) - tf.reduce_mean(row), likenesses(x))),
    "a row of all, written": row_of_all_written,
    "a map of a row of all": lambda x: score(tf.map_fn(lambda row: tf.reduce_sum(tf.map_fn(tf.tanh, row)), likenesses(x))),
    "the numbers of a row of all": lambda x: score(tf.map_fn(lambda row: tf.reduce_max(row * tf.cast(
        tf.range(tf.size(row)), tf.float64)), likenesses(x))),
    "a list that grows by two": lambda x: score(turns(x, lambda i, found: (
        found.write(2 * i, tf.reduce_sum(scaled(x[i]))).write(2 * i + 1, x[i, 0]),), growing())[0].stack()),
    "a growing list that some turns write to": lambda x: score(turns(x, lambda i, found: (tf.cond(
        x[i, 0] > 0, lambda: found.write(i, tf.reduce_sum(scaled(x[i]))), lambda: found),), growing())[0].stack()),
    "a list that was begun": lambda x: score(turns(x, lambda i, found: (
        found.write(i, tf.reduce_sum(scaled(x[i]))),), growing().write(tf.shape(x)[0], zero()))[0].stack()),
    "a list that is longer": lambda x: score(turns(x, lambda i, found: (
        found.write(i, tf.reduce_sum(scaled(x[i]))),), tf.TensorArray(tf.float64, tf.shape(x)[0] + 1, element_shape=[]).write(
            tf.shape(x)[0], zero()))[0].stack()),
    "the last one": lambda x: turns(x, lambda i, last: (tf.tanh(tf.reduce_sum(scaled(x[i]))),), zero())[0],
    "weights that fall": lambda x: turns(x, lambda i, total, weight: (
        total + weight * tf.tanh(tf.reduce_sum(scaled(x[i]))), weight * .9), zero(), zero() + 1)[0],
    "the number as a number": lambda x: score(tf.map_fn(
        lambda i: tf.reduce_sum(scaled(x[i])) * tf.cast(i, tf.float64), tf.range(tf.shape(x)[0]), dtype=tf.float64)),
    "sums that change places": lambda x: tf.square(tf.add(*turns(x, lambda i, a, b: (
        b + tf.reduce_sum(scaled(x[i])), a), zero(), zero()))) + turns(x, lambda i, a, b: (b + x[i, 0], a), zero(), zero())[1],
    "the rest": lambda x: score(tf.map_fn(lambda i: tf.reduce_sum(tf.tanh(tf.slice(scaled(x), [i, 0], [-1, 4]))), tf.range(
        tf.shape(x)[0]), dtype=tf.float64)),
    "as many as the example wants": lambda x: score(turns(x, lambda i, found: (found.write(i, tf.reduce_sum(tf.tanh(tf.slice(
        tf.concat([scaled(x), x[:1]], 0), [i, 0], [1 + tf.cast(x[i, 0] > 0, tf.int32), 4])))),), tf.TensorArray(
            tf.float64, tf.shape(x)[0], element_shape=[]))[0].stack()),
    "entries that the example wants": lambda x: score(turns(x, lambda i, found: (found.write(i, tf.reduce_sum(tf.tanh(tf.slice(
        scaled(x), [i, 0], [1, 1 + tf.cast(x[i, 0] > 0, tf.int32)])))),), tf.TensorArray(
            tf.float64, tf.shape(x)[0], element_shape=[]))[0].stack()),
    "with the first one": lambda x: score(tf.map_fn(lambda i: tf.reduce_sum(tf.reduce_prod(tf.gather(scaled(x), [i, 0]), 0)), (
        tf.range(tf.shape(x)[0])), dtype=tf.float64)),
    "a column": lambda x: score(tf.map_fn(lambda i: tf.reduce_max(tf.gather(
        tf.matmul(scaled(x), x, transpose_b=True), i, axis=1)), tf.range(tf.shape(x)[0]), dtype=tf.float64)),
    "all up to it": lambda x: score(tf.map_fn(lambda i: tf.reduce_sum(tf.tanh(tf.strided_slice(
        scaled(x), [i], [i + 1], begin_mask=1))), tf.range(tf.shape(x)[0]), dtype=tf.float64)),
    "whether it is the first": lambda x: score(tf.map_fn(lambda i: tf.reduce_sum(scaled(x)[tf.cast(tf.cast(
        i, tf.bool), tf.int32)] * x[i]), tf.range(tf.shape(x)[0]), dtype=tf.float64)),
    "pairs of numbers": lambda x: score(tf.reduce_sum(scaled(x), 1) * tf.cast(tf.map_fn(
        lambda i: tf.stack([i, i]), tf.range(tf.shape(x)[0])), tf.float64)[:, 1]),
    "a sum of another shape": lambda x: tf.reduce_sum(tf.square(tf.while_loop(
        lambda i, _: i < tf.shape(x)[0], lambda i, total: (i + 1, total + scaled(x[i])), [tf.constant(0), zero([1])],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None])])[1])),
    "within a branch": within_branch,
    "the next one": lambda x: turns(x, lambda i, total: (total + tf.reduce_sum(scaled(x[i]) * x[(i + 1) % tf.shape(x)[0]]),),
                                    zero())[0],
    "from the end": lambda x: score(tf.map_fn(
        lambda i: tf.reduce_sum(scaled(x[i]) * x[tf.shape(x)[0] - 1 - i]), tf.range(tf.shape(x)[0]), dtype=tf.float64)),
    "a scan": lambda x: score(tf.scan(lambda state, row: tf.tanh(.5 * state + row), scaled(x), zero([4]))),
    "products": lambda x: turns(x, lambda i, total: (total * (1 + .1 * tf.tanh(tf.reduce_sum(scaled(x[i])))),), zero() + 1)[0],
    "all but the last": lambda x: tf.while_loop(
        lambda i, _: i < tf.shape(x)[0] - 1, lambda i, total: (i + 1, total + tf.reduce_sum(tf.tanh(scaled(x[i])))), [
            tf.constant(0), zero()])[1],
    "until enough": lambda x: tf.while_loop(
        lambda i, total: tf.logical_and(i < tf.shape(x)[0], total < 2.), lambda i, total: (
            i + 1, total + tf.reduce_sum(tf.square(scaled(x[i])))), [tf.constant(0), zero()])[1],
    "a count upon 5": lambda x: tf.reduce_mean(scaled(x)) * tf.cast(turns(x, lambda i, count: (
        count + tf.cast(x[i, 0] > 0, tf.int32),), tf.constant(5))[0], tf.float64),
    "pieces put together": lambda x: score(turns(x, lambda i, found: (found.write(i, tf.boolean_mask(scaled(x[i]), x[i] > 0)),), (
        tf.TensorArray(tf.float64, tf.shape(x)[0], infer_shape=False, element_shape=[None])))[0].concat()),
    "every other element": lambda x: score(turns(x, lambda i, found: (found.write(i, tf.reduce_sum(scaled(x[i]))),), (
        tf.TensorArray(tf.float64, tf.shape(x)[0], element_shape=[])))[0].gather(tf.range(0, tf.shape(x)[0], 2))),
    "rows that a mask leaves": lambda x: score(tf.map_fn(tf.tanh, tf.boolean_mask(scaled(x), x[:, 0] > -.5)))}
if tf.control_flow_v2_enabled():  # where a list that is not written holds zeros
    WHOLE["lists that change places"] = lists_that_change_places


def gathers_its_turns(model, known):
    """Tells whether towers gather what a loop reads, or meet for its numbers."""
    with tf.Graph().as_default():
        whole = towers.whole_batch(model)
        build(whole, tf.constant(X) if known else tf.placeholder_with_default(X, [None, 4]), 3)
    return not any(meeting.conversion == "sum" or "Stack/Tensor" in meeting.scope for meeting in whole.meetings)


def assert_is_exact(model, known, sizes):
    model = model if known else lambda x, model=model: model(tf.placeholder_with_default(x, [None, 4]))
    assert_equals_one_batch(towers.whole_batch(model), (X[:sum(sizes)],), len(sizes), sizes=sizes, steps=2)


@pytest.mark.once
@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="has both control flows where the process has the first")
def test_loops_in_one_model_are_the_whole_batchs():
    """Those of each control flow that together reach nearly all lines that all do: `make test` holds these, and one by itself."""
    for control_flow, names in (
            (contextlib.nullcontext, ["rows that a mask leaves", "pairs of numbers", "a sum in branches", "a list that is longer",
                                      "standardized before", "a map of a row of all", "all up to it", "with the first one",
                                      "a growing list that some turns write to"]),
            (control_flow_2, ["standardized before", "a column", "entries that the example wants", "within a branch",
                              "a loop for each", "all but the last"])):
        def model(x, names=names):
            found = []
            for number, name in enumerate(names):
                with tf.variable_scope("loop_%d" % number):
                    found.append({**OWN, **WHOLE}[name](x))
            return tf.add_n(found)
        with control_flow():
            of_one = loss_and_gradients(model, (X,), [12])
            of_towers = loss_and_gradients(towers.whole_batch(model), (X,), [5, 7])
        for one, of_several in zip(of_one, of_towers):
            np.testing.assert_allclose(of_several, one, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name,known", covering(sorted(OWN), [True, False], one_in=1))
def test_each_tower_takes_its_own_turns(name, known):
    model = OWN[name]
    assert not gathers_its_turns(model, known)
    assert_is_exact(model, known, [3, 5, 4])


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_tower_of_no_examples_takes_no_turn(name):
    assert_is_exact(OWN[name], False, [4, 0, 3])


@pytest.mark.parametrize("name,known", covering(sorted(WHOLE), [True, False], one_in=1))
def test_what_takes_more_than_its_example_is_the_whole_batchs(name, known):
    assert_is_exact(WHOLE[name], known, [3, 5, 4])
    if not known:
        assert_is_exact(WHOLE[name], known, [4, 0, 3])


@pytest.mark.parametrize("known", [True, False])
def test_each_example_draws_for_itself(known):
    """An image that is cropped and flipped in its turn is another one in each tower, and what is computed of all is of all."""
    def model(x):
        noise = tf.map_fn(lambda row: tf.random_uniform([3], dtype=row.dtype) + tf.cond(
            tf.random_uniform([]) < 0.5, lambda: 0. * row[0], lambda: 0. * row[1]), x)
        return {"loss": tf.reduce_max(noise) * tf.reduce_mean(scaled(x)), "noise": noise}
    with tf.Graph().as_default():
        whole = towers.whole_batch(model)
        replicas = build(whole, tf.constant(X) if known else tf.placeholder_with_default(X, [None, 4]), 3)
        with session() as sess:
            sess.run(tf.global_variables_initializer())
            noise, largest = sess.run([replicas.merged()["noise"], replicas.loss])
            mean = np.mean(X * [.3, -.4, .5, .2])
    assert noise.shape == (12, 3) and len(np.unique(noise)) == 36
    assert any(meeting.conversion in ("sum", "gather") for meeting in whole.meetings)
    assert 0.5 < largest / mean < 1


def test_an_effect_in_a_turn_happens_once_for_each_example():
    def model(x):
        count = tf.get_variable("count", [], tf.float64, tf.zeros_initializer(), trainable=False, use_resource=True)

        def turn(i, total):
            with tf.control_dependencies([count.assign_add(1.)]):
                return total + tf.tanh(tf.reduce_sum(scaled(x[i]))),
        total = turns(x, turn, zero())[0]
        with tf.control_dependencies([total]):
            return {"loss": total, "count": count.read_value()}
    for num_towers in (1, 3):
        with tf.Graph().as_default():
            replicas = build(towers.whole_batch(model), tf.placeholder_with_default(X, [None, 4]), num_towers)
            with session() as sess:
                sess.run(tf.global_variables_initializer())
                assert sess.run(replicas.merged()["count"]) == 12
