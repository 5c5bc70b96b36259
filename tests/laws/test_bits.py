"""The same towers train to the same bits: from run to run, on any devices, and over a checkpoint."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import cpus, session

IMAGES = np.random.RandomState(0).randn(22, 6, 6, 3).astype(np.float32)
LABELS = np.random.RandomState(1).randint(0, 5, 22)
OPTIMIZERS = {"momentum": lambda: tf.train.MomentumOptimizer(0.05, 0.9), "adam": lambda: tf.train.AdamOptimizer(0.01)}
# The devices that towers stand on, in turn, and the one that they meet on.
DEVICES = [(cpus(1), None), (["/cpu:1", "/cpu:0"], None), (["/cpu:2", "/cpu:0", "/cpu:3", "/cpu:1"], "/cpu:1")]


def ordinary_batch_norm(x):
    """A batch norm of each tower's own moments, with moving averages."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    for name, moment in (("mean", mean), ("variance", variance)):
        moving = tf.get_variable("moving_" + name, [x.shape[-1]], initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(moving, 0.1 * (moving - moment)))
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def model(images, labels):
    x = tf.nn.conv2d(images, tf.get_variable("kernel", [3, 3, 3, 8]), [1, 1, 1, 1], "SAME")
    x = tf.nn.relu(tf_syncbn.sync_batch_norm(x, momentum=0.9, name="bn"))
    x = ordinary_batch_norm(tf.nn.conv2d(x, tf.get_variable("kernel_1", [3, 3, 8, 8]), [1, 1, 1, 1], "SAME"))
    logits = tf.matmul(tf.reduce_mean(tf.nn.relu(x), [1, 2]), tf.get_variable("weights", [8, 5]))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def trained(num_towers, devices, aggregation_device, optimizer, policy, steps=20, restore=None, save=None):
    """Trains, and returns the losses and every variable, as bytes."""
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        builder = towers.TowerBuilder(devices, aggregation_device, num_towers=num_towers)
        replicas = builder.build(model, (IMAGES, LABELS))
        train_op = towers.minimize(replicas, OPTIMIZERS[optimizer](), update_ops=policy)
        saver = tf.train.Saver()
        with session() as made:
            if restore:
                saver.restore(made, restore)
            losses = [made.run([replicas.loss, train_op])[0] for _ in range(steps)]
            if save:
                saver.save(made, save)
            values = made.run({v.op.name: v for v in tf.global_variables()})
    assert len(replicas) == num_towers and np.isfinite(losses).all()
    return dict({name: value.tobytes() for name, value in values.items()}, loss=np.array(losses).tobytes())


@pytest.mark.parametrize("num_towers,optimizer,policy", [(4, "momentum", "all")] + [
    pytest.param(*chosen, marks=pytest.mark.sweep) for chosen in (
        (4, "momentum", "first"), (8, "adam", "all"), (5, "momentum", "last"))])
def test_the_same_towers_give_the_same_bits_on_any_devices(num_towers, optimizer, policy):
    first = trained(num_towers, *DEVICES[-1], optimizer, policy)
    assert len(first) > 10
    for devices, aggregation_device in DEVICES[::2]:
        again = trained(num_towers, devices, aggregation_device, optimizer, policy)
        assert [name for name in first if again[name] != first[name]] == []


@pytest.mark.laws
def test_training_goes_on_from_a_checkpoint_on_other_devices_as_if_never_stopped(tmp_path):
    path = str(tmp_path / "model")
    uninterrupted = trained(4, *DEVICES[1], "adam", "first")
    trained(4, *DEVICES[2], "adam", "first", steps=8, save=path)
    rest = trained(4, *DEVICES[0], "adam", "first", steps=12, restore=path)
    assert [name for name in rest if name != "loss" and rest[name] != uninterrupted[name]] == []


def test_towers_are_put_on_devices_in_turn():
    builder = towers.TowerBuilder(cpus(2), num_towers=5)
    assert builder.devices == ["/cpu:0", "/cpu:1", "/cpu:0", "/cpu:1", "/cpu:0"]
    assert [tower.context.device for tower in builder.build(tf.reduce_mean, (np.ones([5, 2]),))] == builder.devices


@pytest.mark.parametrize("number,error,words", [(2.0, TypeError, "has to be an integer, not 2.0"), (True, TypeError, "not True"),
                                                (1, ValueError, "1 towers leave some of the 2 devices without one")])
def test_numbers_of_towers_that_are_none_are_refused(number, error, words):
    with pytest.raises(error, match=words):
        towers.TowerBuilder(cpus(2), num_towers=number)
