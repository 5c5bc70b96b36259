"""softmax_cross_entropy: the authority is NumPy in float64, of logits that only the test knows."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, has_tf_layers, run, session
from towers.testing import assert_equals_one_batch

IS_TF1 = tf.__version__.startswith("1.")


def log_softmax(logits, axis=-1):
    shifted = logits - logits.max(axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def expected(logits, labels, axis=-1):
    """Minus the log of each label's probability."""
    return -np.take_along_axis(log_softmax(logits, axis), np.expand_dims(labels, axis), axis).squeeze(axis)


def one_hot(labels, classes, axis=-1):
    return np.moveaxis(np.eye(classes)[labels], -1, axis)


def case(*shape, axis=-1, scale=3.0, seed=0):
    """Returns logits of a shape, and class numbers."""
    rng = np.random.RandomState(seed)
    classes = shape[axis]
    return rng.randn(*shape) * scale, rng.randint(0, classes, [n for i, n in enumerate(shape) if i != axis % len(shape)])


@pytest.fixture
def said(monkeypatch):
    """What is logged."""
    lines = []
    monkeypatch.setattr(tf.logging, "info", lambda message, *values: lines.append(message % values))
    return lines


def by_hand(x):
    exponentials = tf.exp(x - tf.reduce_max(x, -1, keepdims=True))
    return exponentials / tf.reduce_sum(exponentials, -1, keepdims=True)


def by_hand_unshifted(x):
    return tf.exp(x) / tf.reduce_sum(tf.exp(x), -1, keepdims=True)


def by_hand_twice(x):
    return tf.exp(x - tf.reduce_max(x, -1, keepdims=True)) / tf.reduce_sum(
        tf.exp(x - tf.reduce_max(x, -1, keepdims=True)), -1, keepdims=True)


def exponentials_once(x):
    exponentials = tf.exp(x)
    return exponentials / tf.reduce_sum(exponentials, [-1], keepdims=True)


def unknown(x):
    return tf.placeholder_with_default(x, [None] * x.shape.rank)


ROUTES = {  # name -> (shape of the logits, from logits to outputs, the axis of the classes in these)
    "plain": ([5, 4], tf.nn.softmax, -1),
    "identities": ([5, 4], lambda x: tf.identity(tf.identity(tf.nn.softmax(x))), -1),
    "of unknown size": ([5, 4], lambda x: tf.nn.softmax(unknown(x)), -1),
    "flattened": ([2, 3, 3, 4], lambda x: tf.reshape(tf.nn.softmax(x), [-1, 4]), -1),
    "unflattened": ([18, 4], lambda x: tf.reshape(tf.nn.softmax(x), [2, 3, 3, 4]), -1),
    "squeezed": ([5, 1, 1, 4], lambda x: tf.squeeze(tf.nn.softmax(x), [1, 2]), -1),
    "squeezed everywhere": ([5, 1, 1, 4], lambda x: tf.squeeze(tf.nn.softmax(x)), -1),
    "expanded": ([5, 4], lambda x: tf.expand_dims(tf.nn.softmax(x), 1), -1),
    "transposed": ([2, 3, 3, 4], lambda x: tf.transpose(tf.nn.softmax(x), [0, 3, 1, 2]), 1),
    "transposed and flattened": ([2, 3, 3, 4], lambda x: tf.reshape(tf.transpose(tf.nn.softmax(x), [0, 3, 1, 2]), [2, 4, 9]), 1),
    "channels first": ([2, 4, 3, 3], lambda x: tf.nn.softmax(x, axis=1), 1),
    "channels first, counted from behind": ([2, 4, 3, 3], lambda x: tf.nn.softmax(x, axis=-3), -3),
    "rank 3": ([5, 3, 4], tf.nn.softmax, 2),
    "by hand": ([5, 3, 4], by_hand, -1),
    "exponentials": ([5, 4], exponentials_once, -1),
    "written twice": ([5, 4], by_hand_unshifted, -1), "by hand, written twice": ([5, 3, 4], by_hand_twice, -1),
}


# How the logits themselves go where a route's outputs go.
ROUTED = {
    "flattened": lambda x: tf.reshape(x, [-1, 4]), "unflattened": lambda x: tf.reshape(x, [2, 3, 3, 4]),
    "squeezed": lambda x: tf.squeeze(x), "squeezed everywhere": lambda x: tf.squeeze(x),
    "expanded": lambda x: tf.expand_dims(x, 1), "transposed": lambda x: tf.transpose(x, [0, 3, 1, 2]),
    "transposed and flattened": lambda x: tf.reshape(tf.transpose(x, [0, 3, 1, 2]), [2, 4, 9])}


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("route", sorted(ROUTES))
def test_loss_of_a_softmax_is_that_of_numpy_by_its_logits(route, is_dense, said):
    shape, make, axis = ROUTES[route]
    logits, _ = case(*shape)
    outputs = make(tf.constant(logits))
    moved = run(ROUTED.get(route, lambda x: x)(tf.constant(logits)))
    classes = moved.shape[axis]
    labels = np.random.RandomState(1).randint(0, classes, [n for i, n in enumerate(moved.shape) if i != axis % moved.ndim])
    given = one_hot(labels, classes, axis) if is_dense else labels
    of_each = towers.softmax_cross_entropy(outputs, given, axis=axis, reduction="none")
    mean = towers.softmax_cross_entropy(outputs, given, axis=axis)
    ours = run([of_each, mean])
    np.testing.assert_allclose(ours[0], expected(moved, labels, axis), rtol=1e-12)
    np.testing.assert_allclose(ours[1], expected(moved, labels, axis).mean(), rtol=1e-12)
    assert of_each.dtype == tf.float64 and all("is a softmax: the loss is taken of its logits" in line for line in said) and said


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("route", ["plain", "identities", "flattened", "transposed", "channels first", "by hand"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_logits_give_a_finite_loss_and_the_exact_gradient(route, is_dense, dtype):
    shape, make, axis = ROUTES[route]
    logits = (np.sign(np.random.RandomState(0).randn(*shape)) * 1e4).astype(dtype)
    given = tf.constant(logits)
    outputs = make(given)
    moved = run(ROUTED.get(route, lambda x: x)(tf.constant(logits)))
    classes = moved.shape[axis]
    labels = np.random.RandomState(1).randint(0, classes, [n for i, n in enumerate(moved.shape) if i != axis % moved.ndim])
    loss = towers.softmax_cross_entropy(outputs, one_hot(labels, classes, axis) if is_dense else labels, axis=axis)
    ours, gradient = run([loss, tf.gradients(loss, given)[0]])
    np.testing.assert_allclose(ours, expected(moved.astype(np.float64), labels, axis).mean(), rtol=1e-6)
    assert ours > 1000
    of_moved = (np.exp(log_softmax(moved.astype(np.float64), axis)) - one_hot(labels, classes, axis)) / labels.size
    back = {"flattened": of_moved.reshape(shape), "transposed": of_moved.transpose([0, 2, 3, 1])
            if of_moved.ndim == 4 else of_moved}.get(route, of_moved)
    np.testing.assert_allclose(gradient, back, atol=1e-7 if dtype == np.float32 else 1e-15)


def test_logits_of_half_precision_are_computed_in_float32():
    logits, labels = case(64, 4)
    half = logits.astype(np.float16)
    for outputs in (tf.nn.softmax(tf.constant(half)), tf.cast(tf.nn.softmax(tf.constant(half)), tf.float32)):
        loss = towers.softmax_cross_entropy(outputs, labels)
        assert loss.dtype == tf.float32
        np.testing.assert_allclose(run(loss), expected(half.astype(np.float64), labels).mean(), rtol=1e-6)
    direct = towers.softmax_cross_entropy(tf.constant(half), labels, from_logits=True)
    np.testing.assert_allclose(run(direct), expected(half.astype(np.float64), labels).mean(), rtol=1e-6)


def dense_layer(x, classes=4, bias=True):
    y = tf.matmul(x, tf.get_variable("kernel", [x.shape[-1], classes], x.dtype, tf.glorot_uniform_initializer(seed=1)))
    return tf.nn.bias_add(y, tf.get_variable("bias", [classes], x.dtype, tf.ones_initializer())) if bias else y


@pytest.mark.parametrize("make", [
    dense_layer, lambda x: dense_layer(x, bias=False), lambda x: dense_layer(x, bias=False) + tf.get_variable("b", [4], x.dtype),
    lambda x: tf.reshape(dense_layer(x), [-1, 1, 4]), lambda x: tf.stop_gradient(tf.identity(dense_layer(x)))])
def test_what_ends_in_a_layer_is_taken_as_logits(make, said):
    x, _ = case(5, 3)
    outputs = make(tf.constant(x))
    labels = np.arange(5) % 4
    loss = towers.softmax_cross_entropy(outputs, labels.reshape(outputs.shape[:-1].as_list()))
    ours, logits = run([loss, outputs])
    np.testing.assert_allclose(ours, expected(logits.reshape([5, 4]), labels).mean(), rtol=1e-12)
    assert said == ["softmax_cross_entropy: %r is taken as logits." % outputs.name]


def test_a_layer_of_convolutions_resized_is_taken_as_logits():
    images = tf.constant(np.random.RandomState(0).randn(2, 4, 4, 3))
    kernel = tf.get_variable("kernel", [1, 1, 3, 5], tf.float64)
    outputs = tf.image.resize_bilinear(tf.nn.conv2d(images, kernel, [1, 1, 1, 1], "SAME"), [8, 8])
    labels = np.random.RandomState(1).randint(0, 5, [2, 8, 8])
    ours, logits = run([towers.softmax_cross_entropy(outputs, labels, reduction="none"), outputs])
    np.testing.assert_allclose(ours, expected(logits.astype(np.float64), labels), rtol=1e-5)


def divided(x):
    positive = tf.nn.softplus(x)
    return positive / tf.reduce_sum(positive, 1, keepdims=True)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("make", [tf.sigmoid, divided, lambda x: tf.stop_gradient(tf.nn.softmax(x))])
def test_probabilities_without_a_softmax_are_taken_by_their_logarithm_and_named(make, is_dense):
    x, labels = case(5, 4)
    outputs = make(tf.constant(x))
    with pytest.warns(UserWarning, match="%r is taken as probabilities, and no softmax is behind it.*Hand in" % outputs.name):
        loss = towers.softmax_cross_entropy(outputs, one_hot(labels, 4) if is_dense else labels)
    ours, p = run([loss, outputs])
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(ours, -np.log(p[np.arange(5), labels]).mean(), rtol=1e-12)


@pytest.mark.filterwarnings("error")
def test_probabilities_that_are_said_to_be_are_logged_alone(said):
    p = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    loss = towers.softmax_cross_entropy(tf.constant(p), [2, 1], from_logits=False, reduction="none")
    np.testing.assert_allclose(run(loss), [-np.log(0.5), -np.log(1e-7 / (1 + 2e-7))], rtol=1e-12)
    assert len(said) == 1 and "is taken as probabilities" in said[0]


def test_a_probability_of_zero_has_a_finite_loss_and_gradient_and_a_negative_one_none():
    p = tf.constant([[0.0, 1.0], [-0.5, 1.5], [np.nan, 1.0]])
    loss = towers.softmax_cross_entropy(p, [0, 0, 0], from_logits=False, reduction="none")
    ours, gradient = run([loss, tf.gradients(loss[0], p)[0]])
    assert np.isfinite(ours[0]) and np.isnan(ours[1:]).all() and np.isfinite(gradient[0]).all()


def test_from_logits_chooses_what_is_in_doubt():
    x, labels = case(5, 4)
    positive = tf.constant(np.abs(x) + 0.1)
    ours = run([towers.softmax_cross_entropy(positive, labels, from_logits=choice) for choice in (True, False)])
    p = np.abs(x) + 0.1
    np.testing.assert_allclose(ours[0], expected(p, labels).mean(), rtol=1e-12)
    np.testing.assert_allclose(ours[1], expected(np.log(p), labels).mean(), rtol=1e-12)


@pytest.mark.parametrize("make", [
    lambda x: x, lambda x: 2 * x, tf.nn.relu, lambda x: 0.9 * tf.nn.softmax(x) + 0.1 / 4,
    lambda x: 0.5 * (tf.nn.softmax(x) + tf.nn.softmax(2 * x)), lambda x: tf.matmul(tf.nn.softmax(x), tf.ones([4, 4], tf.float64)),
    lambda x: tf.matmul(tf.nn.softmax(x), tf.get_variable("noise", [4, 4], tf.float64)),
    lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, [5, 2, 2])), [5, 4]), lambda x: x / tf.reduce_sum(x, 0, keepdims=True),
    lambda x: tf.exp(x) / tf.reduce_sum(tf.exp(2 * x), 1, keepdims=True),
    lambda x: tf.nn.log_softmax(x)])
def test_what_may_be_either_is_refused_by_name(make):
    x, labels = case(5, 4)
    outputs = make(tf.constant(x))
    with pytest.raises(ValueError, match="can't tell whether '%s', of type %s, holds logits or probabilities.*Give from_logits"
                       % (outputs.name, outputs.op.type)):
        towers.softmax_cross_entropy(outputs, labels)


@pytest.mark.parametrize("make", [tf.nn.softmax, lambda x: tf.identity(tf.nn.softmax(x)), by_hand])
def test_a_softmax_that_is_said_to_be_logits_is_refused(make):
    x, labels = case(5, 4)
    with pytest.raises(ValueError, match="from_logits is True, and '.*' is the result of a softmax, which would be taken twice"):
        towers.softmax_cross_entropy(make(tf.constant(x)), labels, from_logits=True)


@pytest.mark.parametrize("make, axis", [
    (tf.nn.softmax, 1), (lambda x: tf.nn.softmax(x, axis=1), -1), (lambda x: tf.transpose(tf.nn.softmax(x), [0, 2, 1]), 2),
    (lambda x: tf.reshape(tf.nn.softmax(x), [5, 4, 2, 2]), 1)])
def test_a_softmax_along_another_axis_is_refused_by_name(make, axis):
    x, _ = case(5, 4, 4)
    outputs = make(tf.constant(x))
    named = axis % outputs.shape.rank
    with pytest.raises(ValueError, match="is the softmax '.*' along another axis than axis %d of shape" % named):
        towers.softmax_cross_entropy(outputs, tf.zeros(outputs.shape, tf.float64), axis=axis)


OUTPUTS, LABELS = np.ones([5, 4]), np.zeros([5], np.int64)


@pytest.mark.parametrize("outputs, labels, kwargs, error, message", [
    (np.ones([5, 4], np.int64), LABELS, {}, TypeError, "takes logits or probabilities in floating point.*int64"),
    (np.ones([5]), LABELS, {}, ValueError, r"outputs of a known rank of 2 or more.*shape \(5,\), and axis is -1"),
    (OUTPUTS, LABELS, {"axis": 0}, ValueError, "examples along axis 0.*axis is 0"),
    (OUTPUTS, LABELS, {"axis": 2}, ValueError, "axis is 2"),
    (OUTPUTS, np.zeros([6], np.int64), {}, ValueError, r"shape \(5, 4\), classes along axis 1, take integer labels of shape "
     r"\(5,\) or labels of shape \(5, 4\), and '.*' has shape \(6,\)\.$"),
    (OUTPUTS, np.zeros([5, 3]), {}, ValueError, r"has shape \(5, 3\)"),
    (OUTPUTS, LABELS[:, None], {}, ValueError, r"has shape \(5, 1\)\. Take the axis of size 1 away by tf.squeeze\(labels, 1\)"),
    (OUTPUTS, np.zeros([5]), {}, TypeError, r"of shape \(5,\), are the numbers of classes, and have to be integers, not float64"),
    (OUTPUTS, LABELS, {"reduction": "sum"}, ValueError, "knows the reductions 'mean' and 'none', not 'sum'"),
])
def test_what_does_not_fit_is_refused(outputs, labels, kwargs, error, message):
    with pytest.raises(error, match=message):
        towers.softmax_cross_entropy(tf.constant(outputs), labels, from_logits=True, **kwargs)


def test_labels_of_unknown_rank_are_refused():
    with pytest.raises(ValueError, match="has shape <unknown>"):
        towers.softmax_cross_entropy(tf.ones([5, 4]), tf.placeholder(tf.int32), from_logits=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
def test_class_numbers_may_be_of_any_integer_type(dtype):
    logits, labels = case(2, 3, 3, 4)
    ours = run(towers.softmax_cross_entropy(tf.nn.softmax(tf.constant(logits)), labels.astype(dtype)))
    np.testing.assert_allclose(ours, expected(logits, labels).mean(), rtol=1e-12)


def test_what_a_softmax_waits_for_its_logits_wait_for():
    counter = tf.get_variable("counter", [], tf.int32, tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf.assign_add(counter, 1)]):
        outputs = tf.identity(tf.nn.softmax(tf.constant([[1.0, 2.0]])))
    loss = towers.softmax_cross_entropy(outputs, [1])
    with session() as made:
        made.run(loss)
        assert made.run(counter) == 1


def test_a_gradient_of_the_models_own_is_not_passed_by():
    @tf.custom_gradient
    def own(x):
        return tf.identity(x), lambda dy: 2 * dy

    with pytest.raises(ValueError, match="can't tell"):
        towers.softmax_cross_entropy(own(tf.nn.softmax(tf.ones([5, 4]))), np.zeros([5], np.int64))


def pixelwise(ends_in_softmax):
    """A segmentation network, channels last, batch norm after each convolution."""
    def model_fn(images, labels):
        x = images
        for i in range(2):
            kernel = tf.get_variable("kernel%d" % i, [3, 3, x.shape[-1], 4], x.dtype, tf.glorot_uniform_initializer(seed=i))
            x = tf.nn.conv2d(x, kernel, [1, 1, 1, 1], "SAME")
            mean, variance = tf.nn.moments(x, [0, 1, 2])
            x = tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)
            x = tf.tanh(x) if i == 0 else x
        x = tf.nn.bias_add(5 * x, tf.get_variable("bias", [4], x.dtype, tf.zeros_initializer()))
        return towers.softmax_cross_entropy(tf.nn.softmax(x) if ends_in_softmax else x, labels)
    return model_fn


@pytest.mark.parametrize("ends_in_softmax", [False, True])
@pytest.mark.parametrize("num_towers, sizes", [(2, None), (3, [1, 4, 2])])
def test_a_converted_model_that_ends_in_a_softmax_trains_as_one_tower(num_towers, sizes, ends_in_softmax):
    rng = np.random.RandomState(0)
    batch = rng.randn(7, 4, 4, 3), rng.randint(0, 4, [7, 4, 4])
    assert_equals_one_batch(tf_syncbn.convert_model(pixelwise(ends_in_softmax)), batch, num_towers, sizes)


def test_towers_say_once_what_they_take(said):
    x, labels = case(6, 4)
    build(lambda x, labels: towers.softmax_cross_entropy(tf.nn.softmax(dense_layer(x)), labels), (x, labels), 3)
    assert sum("is a softmax" in line for line in said) == 1


@pytest.mark.skipif(not has_tf_layers(), reason="tf.keras is Keras 3 here")
@pytest.mark.parametrize("shape", [[5, 3], [5, 2, 3]])
@pytest.mark.parametrize("make", [
    lambda x: tf.layers.dense(x, 4, activation=tf.nn.softmax), lambda x: tf.keras.layers.Dense(4, activation="softmax")(x),
    lambda x: tf.keras.layers.Softmax()(tf.keras.layers.Dense(4)(x)),
    lambda x: tf.keras.layers.Activation("softmax")(tf.keras.layers.Dense(4)(x))])
def test_softmax_activations_of_layers_are_found(make, shape, said):
    x, _ = case(*shape, scale=300.0)
    outputs = make(tf.constant(x, tf.float32))
    labels = np.random.RandomState(1).randint(0, 4, shape[:-1])
    loss, p = run([towers.softmax_cross_entropy(outputs, labels, reduction="none"), outputs])
    assert "is a softmax" in said[0]
    of_label = np.take_along_axis(p, labels[..., None], -1)[..., 0].astype(np.float64)
    seen = of_label > 1e-30
    np.testing.assert_allclose(loss[seen], -np.log(of_label[seen]), rtol=1e-4, atol=1e-6)
    assert (loss[~seen] > 60).all() and np.isfinite(loss).all() and (~seen).any()


@pytest.mark.skipif(not has_tf_layers(), reason="tf.keras is Keras 3 here")
def test_a_keras_layer_with_softmax_trains_as_one_tower():
    rng = np.random.RandomState(0)

    def model_fn(x, labels):
        layer = tf.keras.layers.Dense(4, "softmax", dtype="float64", kernel_initializer=tf.glorot_uniform_initializer(seed=3))
        return towers.softmax_cross_entropy(layer(x), labels)

    assert_equals_one_batch(model_fn, (rng.randn(7, 3), rng.randint(0, 4, 7)), 3, [1, 4, 2])
