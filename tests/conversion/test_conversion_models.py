"""convert_model on models that nobody here wrote: tf.contrib.slim.nets, tf.keras.applications, and a network of tf.layers.

Each is converted unchanged; all of its batch norms have to be found, and a step of 2 and of 3 uneven towers has to come to the
step of one tower on the whole batch: loss, every gradient, every variable.
"""
import gc
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
from tests.support import has_tf_layers
from towers.testing import assert_equals_one_batch

IS_TF1 = tf.__version__.startswith("1.")
CLASSES = 10
# oneDNN's gradients of a 1 x 1 convolution with stride 2 write past their memory for 7, 11 or 13 images, in TensorFlow 2.15 and
# 2.21, without towers too: TensorFlow aborts or hangs. They do not for these sizes, nor for 8.
SIZES = {2: [3, 5], 3: [1, 4, 3]}

needs_contrib = pytest.mark.skipif(not IS_TF1, reason="only TensorFlow 1 has tf.contrib")
needs_keras_2 = pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no Keras 2")
# They take minutes, and what is found in them does not depend on the rest: slim's run on 1.15, Keras' on 2.15.
once = pytest.mark.skipif(
    not tf.__version__.startswith(("1.15", "2.15")) or os.environ.get("TOWERS_TEST_BEHAVIOUR") == "graph",
    reason="whole models run on TensorFlow 1.15 or on 2.15")
on_keras_2 = pytest.mark.skipif(IS_TF1, reason="Keras' models run on TensorFlow 2.15")


def batch_of(pixels, dtype):
    rng = np.random.RandomState(0)
    return rng.randn(8, pixels, pixels, 3).astype(dtype), rng.randint(0, CLASSES, 8).astype(np.int32)


def cross_entropy(logits, labels):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def slim_resnet(images, labels):
    from tensorflow.contrib import slim
    from tensorflow.contrib.slim import nets
    with slim.arg_scope(nets.resnet_utils.resnet_arg_scope()):
        logits, _ = nets.resnet_v1.resnet_v1_50(images, CLASSES, is_training=True)
    return cross_entropy(tf.squeeze(logits, [1, 2]), labels)


def slim_inception(images, labels):
    from tensorflow.contrib import slim
    from tensorflow.contrib.slim import nets
    with slim.arg_scope(nets.inception.inception_v3_arg_scope()):
        logits, ends = nets.inception.inception_v3(images, CLASSES, is_training=True, dropout_keep_prob=1.0)
    return cross_entropy(logits, labels) + 0.4 * cross_entropy(ends["AuxLogits"], labels)


def keras_model(name, pixels):
    """A model function of one of Keras' applications, with dropout and drop-connect at rate 0."""
    def model_fn(images, labels):
        model = getattr(tf.keras.applications, name)(weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES)
        for layer in model.layers:
            if hasattr(layer, "rate"):
                layer.rate = 0.0
        model_fn.layers = sum(isinstance(layer, tf.keras.layers.BatchNormalization) for layer in model.layers)
        probabilities = model(images, training=True)
        for update in model.get_updates_for(images):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        chosen = tf.reduce_sum(probabilities * tf.one_hot(labels, CLASSES, dtype=probabilities.dtype), 1)
        return -tf.reduce_mean(tf.log(chosen + 1e-7))
    return model_fn


def layers_resnet(images, labels):
    """A bottleneck network of tf.layers, as the official ResNet of TensorFlow's models was written."""
    def conv(x, filters, size, strides=1):
        x = tf.layers.conv2d(x, filters, size, strides, "same", use_bias=False,
                             kernel_initializer=tf.variance_scaling_initializer())
        fused = False if x.dtype == tf.float64 else None  # TensorFlow 1 does not choose by itself
        return tf.layers.batch_normalization(x, momentum=0.997, epsilon=1e-5, training=True, fused=fused)

    x = tf.nn.relu(conv(images, 8, 3, 2))
    for filters in (8, 16):
        shortcut = conv(x, 4 * filters, 1, 2)
        y = tf.nn.relu(conv(x, filters, 1))
        y = tf.nn.relu(conv(y, filters, 3, 2))
        x = tf.nn.relu(conv(y, 4 * filters, 1) + shortcut)
    return cross_entropy(tf.layers.dense(tf.reduce_mean(x, [1, 2]), CLASSES), labels)


def num_moving_means(model_fn, batch):
    with tf.Graph().as_default():
        model_fn(*map(tf.constant, batch))
        return sum("moving_mean" in variable.op.name for variable in tf.global_variables())


def assert_converted_trains_as_one(model_fn, batch, num_towers, kind):
    converted = tf_syncbn.convert_model(model_fn)
    assert_equals_one_batch(converted, batch, num_towers=num_towers, sizes=SIZES[num_towers], steps=1)
    assert [layer.kind for layer in converted.converted] == [kind] * num_moving_means(model_fn, batch)
    assert len({layer.scope for layer in converted.converted}) == len(converted.converted)
    return converted.converted


@pytest.fixture(autouse=True)
def freed_memory():
    yield
    gc.collect()  # graphs are circles; Keras' clear_session refuses within a graph


@pytest.fixture
def keras_dtype():
    """float64 where Keras' batch norm takes it: TensorFlow 1's does not."""
    dtype = "float32" if IS_TF1 else "float64"
    tf.keras.backend.set_floatx(dtype)
    yield dtype
    tf.keras.backend.set_floatx("float32")


@needs_contrib
@once
def test_slim_resnet_50_trains_as_one_tower_does():
    layers = assert_converted_trains_as_one(slim_resnet, batch_of(32, np.float32), 2, "fused")
    assert len(layers) == 53 and layers[-1].scope == "resnet_v1_50/block4/unit_3/bottleneck_v1/conv3/BatchNorm"


@needs_contrib
@once
def test_slim_inception_v3_trains_as_one_tower_does():
    assert len(assert_converted_trains_as_one(slim_inception, batch_of(107, np.float32), 2, "fused")) == 96


@needs_keras_2
@on_keras_2
@once
@pytest.mark.parametrize("name, count, num_towers", [("ResNet50", 53, 3), ("MobileNetV2", 52, 2), ("EfficientNetB0", 49, 3)])
def test_keras_applications_train_as_one_tower_does(name, count, num_towers, keras_dtype):
    if not hasattr(tf.keras.applications, name):
        pytest.skip("this Keras has no " + name)
    model_fn = keras_model(name, 32)
    kind = "moments" if keras_dtype == "float64" else "fused"
    layers = assert_converted_trains_as_one(model_fn, batch_of(32, keras_dtype), num_towers, kind)
    assert len(layers) == count == model_fn.layers


@on_keras_2
@once
def test_fused_layers_of_a_keras_application_train_as_one_tower_does_and_unconverted_ones_do_not():
    model_fn, batch = keras_model("MobileNetV2", 32), batch_of(32, np.float32)
    assert_converted_trains_as_one(model_fn, batch, 2, "fused")
    with pytest.raises(AssertionError, match="2 towers do not train as one"):
        assert_equals_one_batch(model_fn, batch, num_towers=2, sizes=SIZES[2], steps=1)


@needs_keras_2
@once
@pytest.mark.parametrize("num_towers, dtype, kind", [(2, np.float32, "fused"), (3, np.float64, "moments")])
def test_a_resnet_of_tf_layers_trains_as_one_tower_does(num_towers, dtype, kind):
    assert len(assert_converted_trains_as_one(layers_resnet, batch_of(32, dtype), num_towers, kind)) == 9
