"""Many steps in one `session.run` are, to the last bit, so many calls of `session.run`."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, session, train_plainly

RNG = np.random.RandomState(0)
X, LABELS = RNG.randn(50, 6, 6, 3).astype(np.float32), RNG.randint(0, 4, 50)
FLOWS_V2 = tf.control_flow_v2_enabled()


def batches(batch_size, repeat=True, shuffle=True):
    """Returns the tensors of the next batch of images and labels."""
    data = tf.data.Dataset.from_tensor_slices((X, LABELS))
    data = data.shuffle(50, seed=5) if shuffle else data
    data = data.repeat() if repeat else data
    return tf.data.make_one_shot_iterator(data.batch(batch_size)).get_next()


def convolutional(images, labels):
    kernel = tf.get_variable("kernel", [3, 3, 3, 4], initializer=tf.glorot_uniform_initializer(seed=1))
    weights = tf.Variable(tf.random_normal([4, 4], seed=2), name="weights")
    x = tf_syncbn.sync_batch_norm(tf.nn.conv2d(images, kernel, [1, 2, 2, 1], "SAME"), momentum=0.9)
    x = tf.nn.dropout(tf.reduce_mean(tf.nn.relu(x), [1, 2]), rate=0.3)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=tf.matmul(x, weights)))


def training(model=convolutional, num_towers=2, batch_size=7, optimizer=tf.train.AdamOptimizer):
    """Returns a step function of a training with everything: a shuffled input, dropout, a schedule, a global step."""
    def step():
        global_step = tf.train.get_or_create_global_step()
        replicas = build(model, batches(batch_size), num_towers)
        rate = tf.train.exponential_decay(0.1, global_step, 2, 0.7)
        train_op = towers.minimize(replicas, optimizer(rate), global_step=global_step)
        return {"loss": replicas.loss, "rate": rate, "train_op": train_op}
    return step


def run_apart(make_step, num_steps, feed_dict=None):
    """Runs a step, without towers.repeat, by so many calls of session.run: a list of results, and variables by name."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        fetches = make_step()
        with session() as made:
            results = [made.run(fetches, feed_dict) for _ in range(num_steps)]
            return results, made.run({v.op.name: v for v in tf.global_variables()})


def run_together(make_step, num_steps, feed_dict=None, calls=1):
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        fetches = towers.repeat(make_step, num_steps)
        with session() as made:
            results = [made.run(fetches, feed_dict) for _ in range(calls)]
            return results, made.run({v.op.name: v for v in tf.global_variables()})


def assert_same(make_step, num_steps=6, calls=1, feed_dict=None):
    """Asserts that results and variables are the very bits of so many calls of session.run."""
    expected, variables = run_apart(make_step, num_steps * calls, feed_dict)
    found, ours = run_together(make_step, num_steps, feed_dict, calls)
    of_step = [tf.nest.flatten(results) for results in expected]
    of_call = [tf.nest.flatten(results) for results in found]
    for number, leaf in enumerate(of_step[0]):
        if leaf is not None:  # of an operation
            joined = np.concatenate([results[number] for results in of_call])
            np.testing.assert_array_equal(joined, [results[number] for results in of_step])
    assert list(ours) == list(variables)
    for name in variables:
        np.testing.assert_array_equal(ours[name], variables[name], err_msg=name)
    return found


OPTIMIZERS = {"adam": tf.train.AdamOptimizer, "momentum": lambda rate: tf.train.MomentumOptimizer(rate, 0.9),
              "adagrad": tf.train.AdagradOptimizer, "rmsprop": tf.train.RMSPropOptimizer}


@pytest.mark.parametrize("num_towers", [1, 2, 3])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_training_is_that_of_separate_calls_to_the_bit(num_towers, optimizer):
    results, = assert_same(training(num_towers=num_towers, optimizer=OPTIMIZERS[optimizer]))
    assert results["loss"].shape == (6,) and len(set(results["loss"])) == 6
    np.testing.assert_allclose(results["rate"], 0.1 * 0.7 ** (np.arange(6) / 2), rtol=1e-5)


def test_a_second_call_goes_on_where_the_first_one_ended():
    assert_same(training(), num_steps=3, calls=3)
