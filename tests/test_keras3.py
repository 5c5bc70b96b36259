"""Keras 3 inside a model function: each in a process of its own, since TensorFlow chooses its Keras when it is imported."""
import importlib.util
import os
import subprocess
import sys

import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.conftest import BEHAVIOUR
from towers.keras3 import explained

HAS_KERAS_3 = tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 16)
PROGRAM = """
import sys, warnings
import numpy as np
import tensorflow.compat.v1 as tf
import towers
if %r == "v1":
    tf.disable_v2_behavior()
else:
    tf.disable_eager_execution()
K = tf.keras.layers

def model(x):
    %s

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        replicas = towers.TowerBuilder(["/cpu:0", "/cpu:1"]).build(model, (np.ones([4, 3], np.float32),))
        towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
    except Exception as error:
        print(type(error).__name__, error, "FROM", type(error.__cause__).__name__)
for warning in caught:
    print(warning.message)
"""
CURE = "Keras 3 is not made for TensorFlow 1 graphs. For Keras 2 and tf.layers install tf-keras and set TF_USE_LEGACY_KERAS=1 in"


def output_of(model, **environment):
    environment = dict({key: value for key, value in os.environ.items() if key != "TF_USE_LEGACY_KERAS"}, **environment)
    done = subprocess.run([sys.executable, "-c", PROGRAM % (BEHAVIOUR, model)], env=environment, stdout=subprocess.PIPE,
                          universal_newlines=True, check=True)
    return done.stdout


@pytest.mark.skipif(not HAS_KERAS_3, reason="this TensorFlow has no Keras 3")
@pytest.mark.parametrize("model,original", [
    ("return tf.reduce_mean(tf.layers.dense(x, 2))", "AttributeError"),
    ("return tf.reduce_mean(K.BatchNormalization()(x, training=tf.constant(True)))", "OperatorNotAllowedInGraphError"),
    ("return tf.reduce_mean(K.Dense(2)(tf.keras.Input(tensor=x)))", "ValueError"),
    ("layer = K.BatchNormalization(); layer(x); return tf.add_n(layer.updates)", "AttributeError"),
    ("return tf.reduce_mean(tf.keras.losses.mean_squared_error(x, x))", "AttributeError"),
])
def test_what_fails_in_keras_3_says_the_cure(model, original):
    out = output_of(model)
    assert out.startswith("RuntimeError The model function of tower 0 fails in Keras 3: %s: " % original), out
    assert CURE in out and out.rstrip().endswith("FROM " + original)


@pytest.mark.skipif(not HAS_KERAS_3, reason="this TensorFlow has no Keras 3")
def test_updates_that_keras_3_keeps_nowhere_are_warned_of_with_the_cure():
    out = output_of("return tf.reduce_mean(K.BatchNormalization()(K.Dense(3)(x), training=True) ** 2)")
    assert "nothing runs them" in out and "moving_mean" in out and CURE in out and "layer.updates" not in out, out


@pytest.mark.skipif(not HAS_KERAS_3, reason="this TensorFlow has no Keras 3")
@pytest.mark.parametrize("model,words", [
    ("K.Dense(2)(x); raise KeyError('mine')", "KeyError 'mine' FROM NoneType"),
    ("return K.Dense(1)(x)[0, 0] + tf.get_variable('v' if towers.current_tower().is_first else 'w', [])",
     "TowerMismatchError Tower 1 makes the variable 'w'"),
])
def test_what_fails_elsewhere_keeps_its_words_under_keras_3(model, words):
    assert output_of(model).startswith(words)


@pytest.mark.skipif(not HAS_KERAS_3 or not importlib.util.find_spec("tf_keras"), reason="needs Keras 2 beside Keras 3")
def test_cure_cures():
    out = output_of("return tf.reduce_mean(tf.layers.dense(x, 2) * K.Dense(2)(x))", TF_USE_LEGACY_KERAS="1")
    assert "Error" not in out and "Keras 3" not in out


def test_errors_of_a_model_function_pass_as_they_are():
    with pytest.raises(ZeroDivisionError), explained(0):
        1 / 0
    with pytest.raises(AttributeError, match="nothing"), explained(0):
        towers.nothing
