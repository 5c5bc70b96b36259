"""Scripts without towers: six lines change, and two workers train what one process does on the whole batch.

The scripts are whole programs, written as TensorFlow's tutorials write them. The authority is the unchanged one.
"""
import difflib
import json
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.processes import cluster, run_forks

pytestmark = pytest.mark.xdist_group("plain scripts")  # they share processes

FEEDING = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

learning_rate, training_steps, batch_size = 0.01, 12, 24
rng = np.random.RandomState(0)
images, labels = rng.rand(96, 8, 8, 1), np.eye(10)[rng.randint(0, 10, 96)]


def next_batch(step):
    start = step * batch_size % len(images)
    return images[start:start + batch_size], labels[start:start + batch_size]


x = tf.placeholder(tf.float64, [None, 8, 8, 1])
y = tf.placeholder(tf.float64, [None, 10])
weights = {
    "conv": tf.Variable(tf.random_normal([3, 3, 1, 4], dtype=tf.float64), name="conv"),
    "hidden": tf.Variable(tf.random_normal([256, 16], stddev=0.1, dtype=tf.float64), name="hidden"),
    "out": tf.Variable(tf.random_normal([16, 10], dtype=tf.float64), name="out"),
}
bias = tf.Variable(tf.zeros([10], tf.float64), name="bias")
layer = tf.nn.relu(tf.nn.conv2d(x, weights["conv"], [1, 1, 1, 1], "SAME"))
layer = tf.nn.sigmoid(tf.matmul(tf.reshape(layer, [-1, 256]), weights["hidden"]))
logits = tf.matmul(layer, weights["out"]) + bias
cost = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(logits=logits, labels=y))
optimizer = tf.train.AdamOptimizer(learning_rate)
train_op = optimizer.minimize(cost)
saver = tf.train.Saver()
with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    saver.save(sess, sys.argv[1] + "/first") if sys.argv[2] == "save" else saver.restore(sess, sys.argv[2])
    for step in range(training_steps):
        batch_x, batch_y = next_batch(step)
        sess.run(train_op, feed_dict={x: batch_x, y: batch_y})
    saver.save(sess, sys.argv[1] + "/last")
"""
FEEDING_CHANGED = {
    "tf.disable_v2_behavior()": "tf.disable_v2_behavior()\nimport towers\nworkers = towers.workers.connect(time_limit=60)",
    "optimizer = tf.train.AdamOptimizer(learning_rate)":
        "optimizer = workers.optimizer(tf.train.AdamOptimizer(learning_rate))",
    "with tf.Session() as sess:": "with workers.session() as sess:",
    "    for step in range(training_steps):":
        "    sess.run(workers.broadcast_variables())\n    for step in range(training_steps):",
    "        batch_x, batch_y = next_batch(step)":
        "        batch_x, batch_y = (part[workers.rank::workers.size] for part in next_batch(step))",
}

MONITORED = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

rng = np.random.RandomState(0)
words, targets = rng.randint(0, 20, [60, 5]), rng.randn(60)


def input_fn():
    data = tf.data.Dataset.from_tensor_slices((words, targets)).repeat().batch(20)
    return tf.data.make_one_shot_iterator(data).get_next()


def model(words):
    embedded = tf.nn.embedding_lookup(tf.get_variable("embedding", [20, 6], tf.float64), words)
    hidden = tf.tanh(tf.tensordot(embedded, tf.get_variable("hidden", [6, 6], tf.float64), 1))
    return tf.reduce_sum(tf.reduce_max(hidden, 1) * tf.get_variable("out", [6], tf.float64), 1)


inputs, labels = input_fn()
loss = tf.losses.mean_squared_error(labels, model(inputs))
global_step = tf.train.get_or_create_global_step()
optimizer = tf.train.MomentumOptimizer(tf.train.exponential_decay(tf.constant(0.1, tf.float64), global_step, 5, 0.9), 0.9)
grads, variables = zip(*optimizer.compute_gradients(loss))
grads, norm = tf.clip_by_global_norm(grads, 0.5)
train_op = optimizer.apply_gradients(zip(grads, variables), global_step=global_step)
hooks = [tf.train.StopAtStepHook(last_step=12)]
with tf.train.MonitoredTrainingSession(checkpoint_dir=sys.argv[1], hooks=hooks, save_checkpoint_steps=4) as session:
    while not session.should_stop():
        session.run(train_op)
"""
MONITORED_CHANGED = {
    "tf.disable_v2_behavior()": "tf.disable_v2_behavior()\nimport towers\nworkers = towers.workers.connect(time_limit=60)",
    "    return tf.data.make_one_shot_iterator(data).get_next()":
        "    return [part[workers.rank::workers.size] for part in tf.data.make_one_shot_iterator(data).get_next()]",
    "optimizer = tf.train": "optimizer = workers.optimizer(tf.train",
    "0.9), 0.9)": "0.9), 0.9))",
    "hooks = [": "hooks = [workers.hook(), ",
    "MonitoredTrainingSession(checkpoint_dir=sys.argv[1],":
        "MonitoredTrainingSession(workers.target, checkpoint_dir=sys.argv[1] if workers.is_chief else None, "
        "config=workers.session_config(),",
}


def changed(script, changes):
    """Returns a script with lines replaced, and holds them to six new ones."""
    after = script
    for line, by in changes.items():
        assert after.count(line) == 1, line
        after = after.replace(line, by)
    new = [line for line in difflib.ndiff(script.splitlines(), after.splitlines()) if line.startswith("+ ")]
    assert len(new) <= 6, new
    return after


def alone(script, *arguments):
    """Returns a program of one process."""
    return script, {"TF_CONFIG": ""}, arguments


def of_two_workers(script, *arguments):
    return [(script, {"TF_CONFIG": json.dumps(config)}, arguments) for config in cluster(2)]


def run(*programs):
    for status, output in run_forks("import tensorflow.compat.v1, towers", programs):
        assert status == 0, output[-3000:]


def values_of(checkpoint):
    """Returns a checkpoint's values by name; a folder stands for its newest."""
    reader = tf.train.load_checkpoint(str(checkpoint))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def check_equal(values, others, before):
    assert set(values) == set(others) == set(before)
    for name, value in others.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
        assert np.abs(value - before[name]).max() > 1e-6, name  # that it trained


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder where all scripts have saved what they trained."""
    folder = tmp_path_factory.mktemp("trained")
    for name in ("plain", "workers"):
        (folder / "feeding" / name).mkdir(parents=True)
    first = folder / "monitored" / "first"
    run(alone(FEEDING, folder / "feeding" / "plain", "save"),
        alone(MONITORED.replace("last_step=12", "last_step=1"), first))  # the weights that both go on from
    for name in ("plain", "workers"):
        shutil.copytree(str(first), str(folder / "monitored" / name))
        (folder / "monitored" / name / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"\n')
    # What each worker restores or initializes, it gets from worker 0: here the first weights of the plain script.
    feeding = changed(FEEDING, FEEDING_CHANGED).replace(
        "saver.restore(sess, sys.argv[2])", "workers.is_chief and saver.restore(sess, sys.argv[2])")
    run(alone(MONITORED, folder / "monitored" / "plain"),
        *of_two_workers(feeding, folder / "feeding" / "workers", folder / "feeding" / "plain" / "first"),
        *of_two_workers(changed(MONITORED, MONITORED_CHANGED), folder / "monitored" / "workers"))
    return folder


@pytest.mark.laws
def test_script_that_feeds_trains_on_two_workers_as_on_one_process(trained):
    check_equal(*[values_of(trained / "feeding" / name) for name in ("workers/last", "plain/last", "plain/first")])


@pytest.mark.laws
def test_script_with_a_monitored_session_trains_on_two_workers_as_on_one_process(trained):
    check_equal(*[values_of(trained / "monitored" / name) for name in ("workers", "plain", "first")])
