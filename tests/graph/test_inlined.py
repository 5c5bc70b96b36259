"""What functions compute, tf.function's and branches and loops of control flow 2, is looked at as what stands outside of them."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import SAID, build, has_tf_layers
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(0).randn(12, 4)
CLASSES = (np.arange(12) % 3).astype(np.int32)


@pytest.fixture(autouse=True)
def control_flow_2():
    before = tf.control_flow_v2_enabled()
    tf.enable_control_flow_v2()
    yield
    if not before:
        tf.disable_control_flow_v2()


def weights():
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        return tf.get_variable("w", [4], tf.float64, tf.ones_initializer(), use_resource=True)


def features(x):
    return tf.sin(x * weights()) - 0.5


def squares(x):
    return tf.square(features(x))


def number(x):
    return tf.cast(tf.shape(x)[0], x.dtype)


def in_training(one, other):
    return tf.cond(tf.placeholder_with_default(True, []), one, other)


def added_up(x, of_row):
    """What a loop adds up of each example, by its number."""
    return tf.while_loop(lambda i, _: i < tf.shape(x)[0], lambda i, total: (i + 1, total + of_row(x[i])),
                         (0, tf.zeros([], x.dtype)))[1]


def dice_in_a_map(x, classes):
    def dice(k):
        mask = tf.cast(tf.equal(classes, k), x.dtype)
        p = tf.sigmoid(tf.reduce_sum(features(x), 1))
        return 1 - 2 * tf.reduce_sum(p * mask) / tf.reduce_sum(p + mask)
    return tf.reduce_mean(tf.map_fn(dice, tf.range(3), x.dtype))


def recurrent(x):
    """States [batch, 4], of a loop over the steps of sequences."""
    return tf.transpose(tf.scan(lambda state, step: tf.tanh(state + step), tf.transpose(features(x)), tf.zeros_like(x[:, 0])))


@tf.function
def mean_of_squares(y):
    return tf.reduce_mean(tf.square(y))


@tf.function
def squares_of(y):
    return tf.square(y)


@tf.function
def sum_of_squares(y):
    return tf.reduce_sum(tf.square(y))


@tf.function
def mean_by_number(y):
    return mean_of_squares(y) / number(y)


@tf.function
def centred(y):
    return y - tf.reduce_mean(y, 0)


@tf.function
def root_of_its_mean(y):
    return tf.sqrt(mean_of_squares(y))


OTHERS = {
    "a sum in a function": lambda x, _: sum_of_squares(features(x)),
    "a root in a function that calls one": lambda x, _: root_of_its_mean(features(x)),
    "less their mean in a function": lambda x, _: tf.reduce_mean(tf.square(centred(features(x)) - 1)),
    "a sum over a map": lambda x, _: tf.reduce_sum(tf.map_fn(tf.reduce_sum, squares(x))),
    "a root of a map": lambda x, _: tf.sqrt(tf.reduce_mean(tf.map_fn(tf.reduce_sum, squares(x)))),
    "dice of each class in a map": dice_in_a_map,
    "a root of what a loop adds up": lambda x, _: tf.sqrt(added_up(x, lambda row: tf.reduce_sum(squares(row)))),
    "a sum of a fold": lambda x, _: tf.foldl(lambda total, row: total + tf.reduce_sum(row), squares(x), tf.zeros([], x.dtype)),
    "a norm of each step in a loop": lambda x, _: tf.while_loop(lambda k, _: k < 4, lambda k, total: (
        k + 1, total + tf.sqrt(tf.reduce_mean(features(x)[:, k] ** 2))), (0, tf.zeros([], x.dtype)))[1],
    "a sum of states": lambda x, _: tf.reduce_sum(recurrent(x)),
    "a root in a branch": lambda x, _: in_training(
        lambda: tf.sqrt(tf.reduce_mean(squares(x))), lambda: tf.reduce_mean(squares(x))),
    "a sum in a branch within a loop": lambda x, _: tf.while_loop(lambda k, _: k < 4, lambda k, total: (
        k + 1, total + tf.cond(k < 2, lambda: tf.reduce_sum(squares(x)), lambda: tf.zeros([], x.dtype))),
        (0, tf.zeros([], x.dtype)))[1],
    "a mean by their number, in a function": lambda x, _: mean_by_number(features(x)),
    "a scan along the batch": lambda x, _: tf.reduce_mean(tf.scan(lambda state, row: tf.tanh(state + row), features(x)))}
MEANS = {
    "a mean in a function": lambda x, _: mean_of_squares(features(x)),
    "a function of each": lambda x, _: tf.reduce_mean(squares_of(features(x))),
    "a mean over a map": lambda x, _: tf.reduce_mean(tf.map_fn(tf.reduce_sum, squares(x))),
    "a sum over a map by their number": lambda x, _: tf.reduce_sum(tf.map_fn(tf.reduce_sum, squares(x))) / number(x),
    "a root of each in a map": lambda x, _: tf.reduce_mean(tf.map_fn(lambda row: tf.sqrt(tf.reduce_sum(row)), squares(x))),
    "what a loop adds up by their number": lambda x, _: added_up(x, lambda row: tf.sqrt(tf.reduce_sum(squares(row)))) / number(x),
    "a fold by their number": lambda x, _: tf.foldl(
        lambda total, row: total + tf.reduce_sum(row), squares(x), tf.zeros([], x.dtype)) / number(x),
    "a mean of states": lambda x, _: tf.reduce_mean(tf.square(recurrent(x))),
    "a mean in a branch": lambda x, _: in_training(
        lambda: tf.reduce_mean(squares(x)), lambda: 2 * tf.reduce_mean(tf.abs(features(x)))),
    "a branch of each": lambda x, _: tf.reduce_mean(in_training(lambda: squares(x), lambda: features(x))),
    "one of several branches": lambda x, _: tf.reduce_mean(tf.switch_case(
        tf.placeholder_with_default(1, []), [lambda: features(x), lambda: squares(x), lambda: tf.abs(features(x))])),
    "means added up in a loop": lambda x, _: tf.while_loop(lambda k, _: k < 4, lambda k, total: (
        k + 1, total + tf.reduce_mean(features(x)[:, k] ** 2)), (0, tf.zeros([], x.dtype)))[1]}


if tf.__version__.startswith("1."):  # which has not all of control flow 2 yet
    for name in ("a sum of states", "a sum in a branch within a loop"):
        del OTHERS[name]


def model_of(models, name, is_known):
    def model_fn(x, classes):
        return models[name](x if is_known else tf.placeholder_with_default(x, [None, 4]), classes)
    return model_fn


def build_uneven(model_fn):
    """Builds two towers, each of as many examples as the other has not, which is known while the graph is built."""
    parts = [(tf.placeholder(X.dtype, [size, 4]), tf.placeholder(CLASSES.dtype, [size])) for size in (5, 7)]
    build(model_fn, towers.PerTower(parts), 2)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_functions_take_together_is_said(name, is_known):
    with pytest.warns(UserWarning, match=SAID):
        build_uneven(model_of(OTHERS, name, is_known))


@pytest.mark.sweep
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_functions_take_together_is_another_loss_and_is_said(name, is_known):
    with pytest.warns(UserWarning, match=SAID):
        with pytest.raises(AssertionError):
            assert_equals_one_batch(model_of(OTHERS, name, is_known), (X, CLASSES), 3, sizes=[3, 5, 4], steps=2)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("name", sorted(MEANS))
def test_what_functions_compute_of_each_example_passes_in_silence(name, is_known):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + SAID)
        build_uneven(model_of(MEANS, name, is_known))


@pytest.mark.sweep
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("name", sorted(MEANS))
def test_what_functions_compute_of_each_example_of_three_towers_is_that_of_the_whole_batch(name, is_known):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + SAID)
        assert_equals_one_batch(model_of(MEANS, name, is_known), (X, CLASSES), 3, sizes=[3, 5, 4], steps=2)


def test_what_towers_exchanged_is_no_number_that_is_given():
    def model_fn(x):
        num_towers = towers.all_reduce(tf.ones([], x.dtype))
        return {"loss": num_towers * sum_of_squares(features(x)) / towers.all_reduce(number(x)), "weight": 1.0}

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + SAID)
        assert_equals_one_batch(model_fn, (X,), 3, sizes=[3, 5, 4], steps=2)


@pytest.mark.skipif(not has_tf_layers() or tf.__version__.startswith("1."), reason="of Keras 2 on TensorFlow 2")
@pytest.mark.parametrize("of_states,is_mean", [(tf.reduce_mean, True), (tf.reduce_sum, False)])
def test_keras_recurrent_layers_are_looked_into(of_states, is_mean):
    def model_fn(x):
        return of_states(tf.square(tf.keras.layers.LSTM(3, return_sequences=True, dtype="float64")(x)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(model_fn, X.reshape([6, 2, 4]))
    assert is_mean != any(SAID in str(warning.message) for warning in caught)


def test_the_graph_and_its_functions_stay_as_they_are():
    def model_fn(x):
        return tf.reduce_mean(tf.map_fn(tf.reduce_sum, squares(x)))

    made = build(model_fn, X)
    functions = made.loss.graph.as_graph_def().library.function
    assert functions and "_of_known_shape" not in str(functions)
    assert not [op for op in made.loss.graph.get_operations() if op.type in ("Enter", "Exit") or "given_" in op.name]
