"""Small gradients in packs: the same bits, in fewer transfers."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, session

RNG = np.random.RandomState(4)
X = RNG.randn(13, 5)


def model(x):
    """Has gradients in two dtypes, slices, one that some towers lack, and one too large for a pack."""
    tower = towers.current_tower()
    wide = tf.get_variable("wide", [5, 70000], tf.float64, tf.constant_initializer(1e-3))
    v, w = tf.get_variable("v", [5, 4], tf.float64), tf.get_variable("w", [4], tf.float64)
    single, table = tf.get_variable("single", [3]), tf.get_variable("table", [6, 2], tf.float64)
    some = tf.get_variable("some", [], tf.float64, tf.ones_initializer())
    y = tf.sin(tf.matmul(x, v)) * w
    loss = tf.reduce_mean(y) + tf.reduce_mean(tf.matmul(x, wide)) + tf.reduce_mean(tf.gather(table, [0, 3, 3]))
    loss += tf.cast(tf.reduce_sum(tf.square(single)), tf.float64) * tf.reduce_mean(x)
    with towers.may_differ():
        return loss * some if tower.is_first else loss


def gradients(num_towers, pack):
    replicas = build(model, (X,), num_towers, alike=False)
    tower_grads = towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(1.0))
    return replicas, towers.average_gradients(replicas, tower_grads, pack=pack)


@pytest.mark.parametrize("num_towers", [1, 2, 3, 5])
def test_packing_changes_no_bit(num_towers):
    replicas = build(model, (X,), num_towers, alike=False)
    tower_grads = towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(1.0))
    pairs = [[(tf.convert_to_tensor(gradient), variable.op.name) for gradient, variable in
              towers.average_gradients(replicas, tower_grads, pack=pack)] for pack in (False, True)]
    with session() as made:
        plain, packed = made.run([[gradient for gradient, _ in grads] for grads in pairs])
    assert [name for _, name in pairs[0]] == [name for _, name in pairs[1]] and len(plain) == 6
    for (_, name), a, b in zip(pairs[0], plain, packed):
        np.testing.assert_array_equal(a, b, name)


def test_a_tower_sends_small_gradients_of_one_dtype_in_one_tensor():
    replicas, grads = gradients(3, True)
    packs = [op for op in tf.get_default_graph().get_operations() if op.type == "ConcatV2" and "/pack" in op.name]
    assert [op.device[-5:].lower() for op in packs] == ["cpu:%d" % i for i in range(3)]
    assert [op.outputs[0].shape.as_list() for op in packs] == [[24]] * 3  # v and w
    assert [variable.op.name for _, variable in grads] == ["wide", "v", "w", "single", "table", "some"]
    assert isinstance(dict((v.op.name, gradient) for gradient, v in grads)["table"], tf.IndexedSlices)


def test_minimize_packs():
    replicas = build(model, (X,), 2, alike=False)
    towers.minimize(replicas, tf.train.GradientDescentOptimizer(1.0), pack=True)
    assert [op for op in tf.get_default_graph().get_operations() if op.name.endswith("average_gradients/pack")]
