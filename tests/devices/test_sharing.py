"""Variables are shared by all towers, however the model function makes them."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, has_tf_layers, run

X = np.random.RandomState(0).randn(6, 3).astype(np.float32)


def index():
    return towers.current_tower().index


def names():
    return [v.op.name for v in tf.global_variables()]


def test_tf_variable_is_shared_and_keeps_its_name_scope():
    got = []

    def model(x):
        with tf.name_scope("block"):
            got.append(tf.Variable(tf.random_normal([3]), name="w"))
        return tf.reduce_sum(x * got[-1])

    build(model, (X,), 3)
    assert names() == ["block/w"] and got[0] is got[1] is got[2]


def test_tf_variables_of_one_name_are_matched_by_shape_dtype_trainable_and_turn():
    got = []

    def model(x):
        made = [tf.Variable(np.ones(3, np.float32), name="v"), tf.Variable(np.ones(2, np.float32), name="v"),
                tf.Variable(np.ones(3), name="v"), tf.Variable(np.ones(3, np.float32), name="v", trainable=False),
                tf.Variable(np.ones(3, np.float32), name="v")]
        got.append(made if index() == 0 else made)
        return x

    build(model, (X,), 2)
    assert all(a is b for a, b in zip(*got)) and len(names()) == 5


def test_tf_variables_made_in_another_order_are_not_confused():
    got = []

    def model(x):
        made = {}
        for name in ("ab" if index() == 0 else "ba"):
            with tf.name_scope(name):
                made[name] = tf.Variable(np.ones(3, np.float32), name="w")
        got.append(made)
        return x

    build(model, (X,), 2)
    assert got[0]["a"] is got[1]["a"] and got[0]["b"] is got[1]["b"]


def test_branch_on_the_towers_number_gives_no_wrong_variable():
    def model(x):
        if index() == 0:
            tf.Variable(np.ones(3, np.float32), name="only_first")
        return x * tf.Variable(np.full(3, 2, np.float32), name="w")

    replicas = build(model, (X,), 2)
    np.testing.assert_allclose(run(replicas.merged()), 2 * X)


def test_layers_of_tf_layers_are_shared_and_named_as_without_towers():
    if not has_tf_layers():
        pytest.skip("this TensorFlow has no tf.layers")

    def model(x):
        x = tf.layers.dense(tf.layers.dense(x, 4), 4)
        return tf.reduce_mean(tf.layers.batch_normalization(x, training=True))

    with tf.Graph().as_default():
        model(tf.constant(X))
        expected = names()
    replicas = build(model, (X,), 3)
    assert names() == expected
    assert [len(tower.update_ops) for tower in replicas] == [2, 2, 2]


def test_keras_layers_made_in_the_model_function_are_shared():
    if not has_tf_layers():
        pytest.skip("this TensorFlow has Keras 3, which has no graph mode")

    def model(x):
        x = tf.keras.layers.Dense(4)(x)
        return tf.reduce_mean(tf.keras.layers.Dense(4)(x))

    build(model, (X,), 3)
    assert names() == ["dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"]


def test_default_scope_names_begin_alike_in_every_tower():
    def model(x):
        for _ in range(2):
            with tf.variable_scope(None, "layer"):
                x = x * tf.get_variable("w", [3])
        return x

    build(model, (X,), 3)
    assert names() == ["layer/w", "layer_1/w"]


def test_get_variable_with_a_float64_tensor_as_initializer_is_shared():
    def model(x):
        return tf.cast(x, tf.float64) * tf.get_variable("w", initializer=tf.constant(np.ones(3)))

    build(model, (X,), 2)
    assert [v.dtype.base_dtype for v in tf.global_variables()] == [tf.float64]


def test_variable_that_only_tower_0_makes_is_legitimate():
    def model(x):
        if index() == 0:
            tf.get_variable("extra", [3])
            tf.train.get_or_create_global_step()
        return tf.reduce_mean(x * tf.get_variable("w", [3]))

    build(model, (X,), 2)
    assert sorted(names()) == ["extra", "global_step", "w"]


@pytest.mark.parametrize("make", [
    lambda: tf.get_variable("extra", [3]),
    lambda: tf.Variable(np.ones(3, np.float32), name="extra"),
])
def test_variable_that_only_a_later_tower_makes_is_refused_by_name(make):
    def model(x):
        if index() == 1:
            make()
        return tf.reduce_mean(x)

    with pytest.raises(towers.TowerMismatchError, match="Tower 1 makes the variable 'extra', which tower 0 does not make"):
        build(model, (X,), 2)
    assert names() == []


def test_auto_reuse_does_not_let_a_later_tower_make_a_variable_in_silence():
    def model(x):
        with tf.variable_scope("scope", reuse=tf.AUTO_REUSE):
            return tf.reduce_mean(x * tf.get_variable("w%d" % index(), [3]))

    with pytest.raises(towers.TowerMismatchError, match="'scope/w1'"):
        build(model, (X,), 2)


def test_another_shape_of_tf_variable_is_refused_and_tower_0s_is_told():
    def model(x):
        tf.Variable(np.ones(3 + index(), np.float32), name="w")
        return x

    with pytest.raises(towers.TowerMismatchError, match=r"'w'.*Tower 0's 'w' has shape \(3,\) and dtype float32"):
        build(model, (X,), 2)


def test_custom_getter_of_the_model_is_honoured_in_every_tower():
    def half(getter, *args, **kwargs):
        return tf.cast(getter(*args, **kwargs), tf.float16)

    def model(x):
        with tf.variable_scope("scope", custom_getter=half):
            return tf.cast(x, tf.float16) * tf.get_variable("w", [3])

    replicas = build(model, (X,), 2)
    assert {tower.outputs.dtype for tower in replicas} == {tf.float16}
    assert [v.dtype.base_dtype for v in tf.global_variables()] == [tf.float32]


def test_optimizer_slots_are_made_outside_of_the_towers():
    def model(x):
        return tf.reduce_mean(x * tf.get_variable("w", [3]))

    towers.minimize(build(model, (X,), 2), tf.train.AdamOptimizer())
    assert {"w", "w/Adam", "w/Adam_1"} <= set(names())


def test_regularizer_of_a_shared_variable_is_added_once():
    def model(x):
        return tf.reduce_mean(x * tf.get_variable("w", [3], regularizer=tf.nn.l2_loss))

    build(model, (X,), 3)
    assert len(tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)) == 1


def test_variable_of_another_scope_is_never_handed_out_for_one_that_tower_0_lacks():
    def model(x):
        for name in (["enc", "dec"] if index() == 0 else ["aux", "enc"]):
            with tf.name_scope(name):
                tf.Variable(np.ones(3, np.float32), name="w")
        return x

    with pytest.raises(towers.TowerMismatchError, match="Tower 1 makes the variable 'aux/w'"):
        build(model, (X,), 2)


def test_numbered_variables_of_which_a_tower_leaves_one_out_are_refused():
    def model(x):
        for number in ([1, 2] if index() == 0 else [3]):
            with tf.name_scope("dense_%d" % number):
                tf.Variable(np.ones(3, np.float32), name="w")
        return x

    with pytest.raises(towers.TowerMismatchError, match="'dense_2/w' and tower 1 makes fewer of that kind"):
        build(model, (X,), 2)


@pytest.mark.parametrize("initializer,dtype", [(np.ones(4), tf.float64), (0, tf.int32)])
def test_get_variable_with_a_value_as_initializer_is_shared(initializer, dtype):
    build(lambda x: [tf.get_variable("w", initializer=initializer, trainable=False), x][1], (X,), 2)
    assert [v.dtype.base_dtype for v in tf.global_variables()] == [dtype]


def test_exponential_moving_average_of_a_tensor_is_shared_and_has_no_tower_in_its_name():
    def model(x):
        mean = tf.reduce_mean(x, name="mean_x")
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.train.ExponentialMovingAverage(0.9).apply([mean]))
        return mean

    build(model, (X,), 3)
    assert names() and not [name for name in names() if "tower" in name]


def test_scope_around_the_towers_stays_in_the_names():
    with tf.variable_scope("model"):
        build(lambda x: x * tf.Variable(np.ones(3, np.float32), name="v") * tf.get_variable("w", [3]), (X,), 2)
    assert sorted(names()) == ["model/v", "model/w"]
