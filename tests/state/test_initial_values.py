"""Variables that start from what is computed of the batch: of all towers' it is one tower's, of a tower's own it is warned of."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, session

X = np.random.RandomState(0).randn(7, 3) + 1


@pytest.fixture(params=["ref", "resource"])
def resource(request):
    """Runs a test with variables of both kinds."""
    return request.param == "resource"


def started_from(value, resource, make=None):
    """A model that scales its examples by a variable whose initial value `value` computes."""
    def model(x):
        w = tf.get_variable("w", [3], tf.float64, tf.constant_initializer(0.5), use_resource=resource)
        g = tf.get_variable("g", dtype=x.dtype, initializer=value(x), use_resource=resource) if make is None else make(value(x))
        return tf.reduce_mean(tf.square(tf.sin(x * w * g) - 1))
    return model


def scale(x):
    return 1 / tf.sqrt(tf.nn.moments(x, [0])[1] + 1e-10)


def gathered(x):
    return scale(towers.all_gather(x))


def of_sums(x):
    count = towers.all_reduce(tf.cast(tf.shape(x)[0], x.dtype))
    return 1 / tf.sqrt(towers.all_reduce(tf.reduce_sum(x ** 2, 0)) / count)


OF_OWN = {"moments": scale, "last example": lambda x: x[-1], "first rows": lambda x: tf.reduce_mean(x[:5], 0),
          "products": lambda x: scale(x * tf.constant([1., 2, 3], x.dtype)),
          "beside aggregates": lambda x: scale(x) + gathered(x),
          "by a condition": lambda x: tf.where(scale(x) > 1, x[0], -x[0]) * scale(x),
          "matrices": lambda x: tf.reduce_mean(tf.matmul(x, np.random.RandomState(1).randn(3, 3)), 0)}
OF_NO_DATA = {"first example": lambda x: x[0], "second": lambda x: x[1, :], "first rows": lambda x: tf.reduce_mean(x[:3], 0),
              "constant": lambda x: tf.constant([1., 2, 3], x.dtype), "zeros": lambda x: tf.zeros_like(x[0]) + 1,
              "size": lambda x: tf.ones([3], x.dtype) / tf.cast(tf.shape(x)[1], x.dtype), "gathered": gathered, "sums": of_sums,
              "other variable": lambda x: 2 * tf.get_variable(
                  "other", initializer=tf.constant([1., 2, 3], x.dtype)).initial_value}
SAID = "The initial value of 'g' is computed of a tower's own examples, and tower 0's is taken"


def starts(model, num_towers):
    with tf.Graph().as_default():
        build(model, (X,), num_towers)
        with session() as made:
            return {v.op.name: made.run(v) for v in tf.global_variables()}["g"]


@pytest.mark.parametrize("how", sorted(OF_OWN))
def test_an_initial_value_of_a_towers_own_data_is_warned_of_once_and_another_than_one_towers(how, resource):
    model = started_from(OF_OWN[how], resource)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        several = starts(model, 3)
    assert len([w for w in said if SAID in str(w.message)]) == 1
    assert np.abs(several - starts(model, 1)).max() > 1e-3


@pytest.mark.parametrize("how", sorted(OF_NO_DATA))
def test_an_initial_value_of_no_towers_own_data_passes_in_silence(how, resource):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = started_from(OF_NO_DATA[how], resource)
        np.testing.assert_allclose(starts(model, 3), starts(model, 1), rtol=1e-9)


def test_a_random_initial_value_passes_in_silence(resource):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(started_from(lambda x: tf.random_normal([3], dtype=x.dtype), resource), (X,), 3)


def test_variables_made_by_hand_are_named_too(resource):
    with pytest.warns(UserWarning, match=SAID):
        build(started_from(scale, resource, lambda value: tf.Variable(value, name="g", use_resource=resource)), (X,), 2)


def test_a_converted_model_is_warned_of_too(resource):
    def model(x):
        y = started_from(scale, resource)(x)
        mean, variance = tf.nn.moments(x, [0])
        return y + tf.reduce_mean(tf.sin((x - mean) / tf.sqrt(variance + 1e-3)))

    with pytest.warns(UserWarning, match=SAID):
        build(tf_syncbn.convert_model(model), (X,), 2)


def test_all_such_variables_are_named_in_one_warning(resource):
    def model(x):
        return tf.reduce_mean(x * sum(tf.get_variable("g%d" % i, initializer=scale(x), use_resource=resource) for i in range(7)))

    with pytest.warns(UserWarning, match="initial value of 'g0', 'g1', 'g2', 'g3', 'g4' and 2 more is computed") as said:
        build(model, (X,), 3)
    assert len([w for w in said if "initial value" in str(w.message)]) == 1


def test_one_tower_data_given_to_all_and_variables_that_nobody_needs_pass_in_silence(resource):
    def unused(x):
        tf.get_variable("copy", initializer=tf.identity(x), use_resource=resource)
        return tf.reduce_mean(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(started_from(scale, resource), (X,), 1)
        given = tf.constant(X)
        with tf.variable_scope("given"):
            towers.TowerBuilder(["/cpu:0"] * 2).build(started_from(scale, resource), towers.PerTower([(given,)] * 2))
        with tf.variable_scope("unused"):
            build(unused, (X,), 2)


def test_a_second_build_of_the_same_variables_says_nothing(resource):
    parts = towers.PerTower([(tf.constant(X[:3]),), (tf.constant(X[3:]),)])
    builder = towers.TowerBuilder(["/cpu:0"] * 2)
    with pytest.warns(UserWarning, match=SAID):
        builder.build(started_from(scale, resource), parts)
    with warnings.catch_warnings(), tf.variable_scope("", reuse=True):
        warnings.simplefilter("error", UserWarning)
        builder.build(started_from(scale, resource), parts, training=False)
