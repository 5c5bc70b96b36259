"""Keras 3 inside a model function: in processes of their own, since TensorFlow chooses its Keras when it is imported."""
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.conftest import BEHAVIOUR
from tests.support import build
from towers.graph.keras3 import explained

HAS_KERAS_3 = tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 16)
PROGRAM = """
import json, sys, warnings
import numpy as np
import tensorflow.compat.v1 as tf
import towers
if %r == "v1":
    tf.disable_v2_behavior()
else:
    tf.disable_eager_execution()
K = tf.keras.layers

def told_of(model):
    with tf.Graph().as_default(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            replicas = towers.TowerBuilder(["/cpu:0", "/cpu:1"]).build(model, (np.ones([4, 3], np.float32),))
            towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
        except Exception as error:
            print(type(error).__name__, error, "FROM", type(error.__cause__).__name__)
    for warning in caught:
        print(warning.message)

for model in json.loads(sys.argv[1]):
    defined = {}
    exec("def model(x):\\n    " + model, globals(), defined)
    told_of(defined["model"])
    print(END)
"""
END = "That is what was said of a model."
CURE = "Keras 3 is not made for TensorFlow 1 graphs. For Keras 2 and tf.layers install tf-keras and set TF_USE_LEGACY_KERAS=1 in"


# What fails in Keras 3, and whose error is its cause; what is warned of; and what fails elsewhere, in its own words.
FAILING = {
    "return tf.reduce_mean(tf.layers.dense(x, 2))": "AttributeError",
    "return tf.reduce_mean(K.BatchNormalization()(x, training=tf.constant(True)))": "OperatorNotAllowedInGraphError",
    "return tf.reduce_mean(K.Dense(2)(tf.keras.Input(tensor=x)))": "ValueError",
    "layer = K.BatchNormalization(); layer(x); return tf.add_n(layer.updates)": "AttributeError",
    "return tf.reduce_mean(tf.keras.losses.mean_squared_error(x, x))": "AttributeError"}
WITH_UPDATES = "return tf.reduce_mean(K.BatchNormalization()(K.Dense(3)(x), training=True) ** 2)"
FAILING_ELSEWHERE = {
    "K.Dense(2)(x); raise KeyError('mine')": "KeyError 'mine' FROM NoneType",
    "return K.Dense(1)(x)[0, 0] + tf.get_variable('v' if towers.current_tower().is_first else 'w', [])":
    "TowerMismatchError Tower 1 makes the variable 'w'"}
of_keras_3 = pytest.mark.skipif(not HAS_KERAS_3, reason="this TensorFlow has no Keras 3")


def outputs_of(models):
    """Returns what a process without Keras 2 says of each of several models."""
    environment = {key: value for key, value in os.environ.items() if key != "TF_USE_LEGACY_KERAS"}
    done = subprocess.run([sys.executable, "-c", PROGRAM.replace("END", repr(END)) % BEHAVIOUR, json.dumps(models)],
                          env=environment, stdout=subprocess.PIPE, universal_newlines=True, check=True)
    *outputs, rest = done.stdout.split(END + "\n")
    assert len(outputs) == len(models) and not rest
    return outputs


@pytest.fixture(scope="module")
def output_of():
    """Returns a function of a model that returns what is said of it under Keras 3."""
    models = [*FAILING, WITH_UPDATES, *FAILING_ELSEWHERE]
    return dict(zip(models, outputs_of(models))).__getitem__


@pytest.mark.laws
@of_keras_3
@pytest.mark.parametrize("model", FAILING)
def test_what_fails_in_keras_3_says_the_cure(output_of, model):
    out, original = output_of(model), FAILING[model]
    assert out.startswith("RuntimeError The model function of tower 0 fails in Keras 3: %s: " % original), out
    assert CURE in out and out.rstrip().endswith("FROM " + original)


@pytest.mark.laws
@of_keras_3
def test_updates_that_keras_3_keeps_nowhere_are_warned_of_with_the_cure(output_of):
    out = output_of(WITH_UPDATES)
    assert "nothing runs them" in out and "moving_mean" in out and CURE in out and "layer.updates" not in out, out


@pytest.mark.laws
@of_keras_3
@pytest.mark.parametrize("model", FAILING_ELSEWHERE)
def test_what_fails_elsewhere_keeps_its_words_under_keras_3(output_of, model):
    assert output_of(model).startswith(FAILING_ELSEWHERE[model])


@pytest.mark.skipif(not HAS_KERAS_3 or not importlib.util.find_spec("tf_keras"), reason="needs Keras 2 beside Keras 3")
def test_cure_cures(recwarn):
    assert os.environ["TF_USE_LEGACY_KERAS"] == "1"  # by conftest.py
    x = np.ones([4, 3], np.float32)
    replicas = build(lambda x: tf.reduce_mean(tf.layers.dense(x, 2) * tf.keras.layers.Dense(2)(x)), (x,))
    towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
    assert len(tf.trainable_variables()) == 4 and not [each for each in recwarn if "Keras" in str(each.message)]


def test_errors_of_a_model_function_pass_as_they_are():
    with pytest.raises(ZeroDivisionError), explained(0):
        1 / 0
    with pytest.raises(AttributeError, match="nothing"), explained(0):
        towers.nothing
