"""Steps that are repeated in turn, as those of a GAN, are to the last bit as many calls of session.run in turn."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, session

RNG = np.random.RandomState(0)
REAL = RNG.randn(50, 4).astype(np.float32)
Adam = tf.train.AdamOptimizer


def dense(x, size, name):
    return tf.matmul(x, tf.get_variable(name, [x.shape[-1], size], initializer=tf.glorot_uniform_initializer(seed=len(name))))


def discriminator(x):
    with tf.variable_scope("discriminator", reuse=tf.AUTO_REUSE):
        x = tf.nn.dropout(tf.tanh(tf_syncbn.sync_batch_norm(dense(x, 5, "ccc"), name="bn")), rate=0.3)
        return dense(x, 1, "dddd")


def gan(real):
    """Noise that both steps depend on, dropout, and batch norm in both networks."""
    with tf.variable_scope("generator"):
        noise = tf.random_normal([tf.shape(real)[0], 3])
        fake = dense(tf.tanh(tf_syncbn.sync_batch_norm(dense(noise, 5, "a"), name="bn")), 4, "bb")
    of_real, of_fake = discriminator(real), discriminator(fake)
    return {"generator_loss": tf.reduce_mean(tf.nn.softplus(-of_fake)), "noise": noise,
            "discriminator_loss": tf.reduce_mean(tf.nn.softplus(-of_real) + tf.nn.softplus(of_fake))}


def gan_steps(num_towers=2):
    """Returns two step functions, of one build, by names."""
    data = tf.data.Dataset.from_tensor_slices(REAL).shuffle(50, seed=5).batch(7).repeat()  # the last batch has one example
    replicas, ops = build(gan, data, num_towers), {}
    updates = towers.collect_update_ops(replicas)
    for name, rate in (("discriminator", 0.1), ("generator", 0.2)):
        step = tf.train.get_or_create_global_step() if name == "generator" else None
        ops[name] = towers.minimize(replicas, Adam(rate), update_ops=[op for op in updates if name in op.name], global_step=step,
                                    var_list=tf.trainable_variables(name), loss=name + "_loss")
    merged = replicas.merged()
    mean = tf.reduce_mean(merged["noise"])
    return {name: lambda name=name: {"loss": merged[name + "_loss"], "train_op": ops[name], "mean": mean} for name in ops}


def other_steps():
    """Returns three step functions that share a batch and no random op, and draw numbers of their own."""
    number = tf.data.make_one_shot_iterator(tf.data.Dataset.range(1000)).get_next()
    total = tf.get_variable("total", [], tf.int64, tf.zeros_initializer())

    def draw():
        with tf.control_dependencies([tf.assign_add(total, number)]):
            return tf.random_uniform([2]), total.read_value() + 0

    return {"add": lambda: tf.assign_add(total, number), "double": lambda: (tf.assign(total, 2 * total.read_value()), number),
            "draw": draw}


def in_graph(make_steps, order, fetches_of, run):
    """Builds steps in a graph of its own, and returns what `run` makes of a session and `fetches_of`, and all variables."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        steps = make_steps()
        fetches = fetches_of([steps[name] for name in order])
        with session() as made:
            results = run(made, fetches)
            return results, made.run({v.op.name: v for v in tf.global_variables()})


def built_once(steps):
    built = {id(step): step() for step in dict.fromkeys(steps)}
    return [built[id(step)] for step in steps]


def assert_same(make_steps, order, num_rounds=6):
    """Asserts that results and variables are the very bits of calls of session.run in turn, which our loop has no part in."""
    apart, expected = in_graph(make_steps, order, built_once, lambda made, fetches: [
        [made.run(each) for each in fetches] for _ in range(num_rounds)])
    together, ours = in_graph(make_steps, order, lambda steps: towers.repeat(steps, num_rounds),
                              lambda made, fetches: made.run(fetches))
    assert list(ours) == list(expected)
    for name in expected:
        np.testing.assert_array_equal(ours[name], expected[name], err_msg=name)
    assert len(together) == len(order)
    for place, of_place in enumerate(together):
        per_round = [tf.nest.flatten(of_round[place]) for of_round in apart]
        for number, leaf in enumerate(tf.nest.flatten(of_place)):
            if leaf is not None:  # of an operation
                np.testing.assert_array_equal(leaf, [of_round[number] for of_round in per_round])
    return together


@pytest.mark.laws
@pytest.mark.parametrize("order,num_towers", [("ddg", 3), ("gd", 1)] + [
    pytest.param(*case, marks=pytest.mark.sweep) for case in [("dg", 1), ("dg", 3), ("gd", 3), ("ddg", 1)]])
def test_a_gan_trains_as_by_separate_calls_in_turn_to_the_bit(order, num_towers):
    names = [{"d": "discriminator", "g": "generator"}[letter] for letter in order]
    results = assert_same(lambda: gan_steps(num_towers), names, num_rounds=9)
    assert [len(set(of_place["loss"])) for of_place in results] == [9] * len(order)
    assert len({mean for of_place in results for mean in of_place["mean"]}) == 9 * len(order)  # noise goes on, never the same


@pytest.mark.parametrize("order", [["double", "add", "draw", "add", "double"], ["draw"]] + [
    pytest.param(order, marks=pytest.mark.sweep) for order in [["add", "double"], ["draw", "add", "double"], ["add", "add"]]])
def test_steps_of_any_kind_run_in_their_order(order):
    assert_same(other_steps, order)


def test_a_step_sees_what_the_one_before_has_written():
    value = tf.get_variable("value", [], tf.int64, tf.ones_initializer())
    double = towers.repeat([lambda: tf.assign(value, 3 * value.read_value()), lambda: tf.assign_add(value, 1)], 4)
    with session() as made:
        tripled, added = made.run(double)
    assert list(tripled) == [3, 12, 39, 120] and list(added) == [4, 13, 40, 121]


def test_a_variable_that_a_step_returns_is_what_it_was_in_that_turn():
    vector = tf.get_variable("vector", [2], initializer=tf.zeros_initializer())
    _, read = towers.repeat([lambda: tf.assign_add(vector, [1.0, 2.0]), lambda: vector], 3)
    with session() as made:
        np.testing.assert_array_equal(made.run(read), [[1, 2], [2, 4], [3, 6]])


def test_the_number_of_rounds_may_be_fed_and_a_second_call_goes_on():
    count = tf.placeholder(tf.int32, [])
    value = tf.get_variable("value", [], tf.int64, tf.zeros_initializer())
    results = towers.repeat([lambda: tf.assign_add(value, 1), lambda: tf.assign_add(value, 10)], count)
    with session() as made:
        assert [list(of_step) for of_step in made.run(results, {count: 2})] == [[1, 12], [11, 22]]
        assert [list(of_step) for of_step in made.run(results, {count: 1})] == [[23], [33]]
        with pytest.raises(tf.errors.InvalidArgumentError, match="1 or more and less than 2.31 / 2"):
            made.run(results, {count: 2 ** 30})


def test_a_function_that_has_several_turns_is_called_once():
    calls = []

    def step():
        calls.append(1)
        return tf.assign_add(tf.get_variable("value", [], tf.int64, tf.zeros_initializer()), 1)

    first, second = towers.repeat([step, step], 3)
    with session() as made:
        assert len(calls) == 1 and [list(each) for each in made.run([first, second])] == [[1, 3, 5], [2, 4, 6]]


def test_an_operation_that_is_shared_noise_itself_runs_in_each_step():
    noise = tf.random_normal([2], seed=1)
    (first, _), second = towers.repeat([lambda: (noise, noise.op), lambda: noise], 2)
    again = tf.random_normal([2], seed=1)
    with session() as made:
        first, second = made.run([first, second])
    assert len(np.unique(np.concatenate([first, second]))) == 8 and again.shape == [2]


def test_steps_that_are_none_are_refused():
    with pytest.raises(TypeError, match="step_fn is an empty list"):
        towers.repeat([], 3)
    with pytest.raises(TypeError, match="or a list of such functions, not 3"):
        towers.repeat([lambda: tf.constant(1), 3], 3)
    with pytest.raises(ValueError, match="less than 2.31 / 2, not 1073741824"):
        towers.repeat([lambda: tf.constant(1), lambda: tf.constant(1)], 2 ** 30)


def test_noise_that_some_steps_share_and_others_do_not_is_refused_by_name():
    noise = tf.random_normal([2], name="noise")
    with pytest.raises(ValueError, match="The random op 'noise/RandomStandardNormal' belongs to 2 of the 3 steps"):
        towers.repeat([lambda: noise, lambda: noise + 1, lambda: tf.constant(1)], 3)


def test_noise_that_steps_share_within_a_loop_goes_on_where_that_is_one_op_and_is_else_refused_by_name():
    shared = tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + tf.random_normal([2], name="noise")),
                           [0, tf.zeros([2])], name="steps")[1]
    if not tf.control_flow_v2_enabled():
        with pytest.raises(ValueError, match="The random op .*noise.* depends on 'steps/.* in a tf.cond or tf.while_loop"):
            towers.repeat([lambda: shared, lambda: shared + 1], 2)
        return
    results = towers.repeat([lambda: shared, lambda: shared + 1], 2)
    with session() as made:
        first, second = made.run(results)
    assert len(np.unique(np.concatenate([first, second - 1]))) == 8
