"""The segmentation example's network: the law, with void labels, towers of unequal images and tf.layers; and its parts."""
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from examples.segmentation import model
from examples.segmentation.model import BLOCKS, VOID, pspnet
from examples.segmentation.resampling import nearest, pool_to, resize_to
from examples.training import batch_norm
from tests.support import cpus, has_tf_layers, session, set_variables, train_by
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

CLASSES = 3
# For minutes TensorFlow 1.15 makes such a graph faster, of which a step is run.
of_tf2 = pytest.mark.skipif(tf.__version__.startswith("1."), reason="Grappler of TensorFlow 1.15 takes minutes for the graph")


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """A stage has one block."""
    monkeypatch.setitem(BLOCKS, 18, (1, 1, 1, 1))


@pytest.fixture(params=["few parts", pytest.param("all parts", marks=pytest.mark.sweep)])
def parts(request, few_blocks, monkeypatch):
    """Only the last stage has a block, which is dilated and has a shortcut, and the pyramid the bin of one value an image."""
    if request.param == "few parts":
        monkeypatch.setitem(BLOCKS, 18, (0, 0, 0, 1))
        monkeypatch.setattr(model, "BINS", (1,))


def scenes(count, height=8, width=24, void=0.3, seed=0):
    """Random images, and labels of which a share is void."""
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, CLASSES, [count, height, width])
    labels[rng.rand(*labels.shape) < void] = VOID
    return rng.randn(count, height, width, 3).astype(np.float32), labels.astype(np.int32)


def network(**options):
    return pspnet(CLASSES, width=8, dtype=tf.float64, **options)


@pytest.mark.laws
@of_tf2
@pytest.mark.parametrize("options", [{"mask": True, "output_stride": 4}] + [
    pytest.param(options, marks=pytest.mark.sweep) for options in ({}, {"mask": True}, {"output_stride": 4})])
def test_towers_with_void_labels_train_as_one_batch(parts, options):
    images, labels = scenes(4)
    labels[0] = VOID  # of the first tower, which has no label then
    assert_equals_one_batch(network(**options), (images, labels), 3, [1, 2, 1], steps=1)


@of_tf2
@pytest.mark.laws
def test_unsynced_towers_do_not(parts):
    with pytest.raises(AssertionError, match="2 towers do not train as one on the whole batch"):
        assert_equals_one_batch(network(batch_norm=batch_norm.per_tower), scenes(3), 2, [1, 2], steps=1)


class Joined:
    """Batch norm of several calls of a model function over the pixels of all of them, by the moments of what is concatenated.

    The calls are made in threads, of which one runs at a time: each waits in its batch norm for the others to come there.
    """

    def __init__(self, model, batches):
        """Calls the model function that `model` makes of a batch norm on each batch."""
        self._inputs, self._moments, self._turn = [], [], threading.Condition()
        self._count, self.outputs, model_fn = len(batches), [None] * len(batches), model(self._batch_norm)
        self._run(model_fn, batches, tf.get_default_graph())

    def _run(self, model_fn, batches, graph):
        def call(place):
            with self._turn, graph.as_default(), tf.variable_scope("", reuse=tf.AUTO_REUSE):
                self.outputs[place] = model_fn(*batches[place])
        threads = [threading.Thread(target=call, args=(place,)) for place in range(self._count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _batch_norm(self, x, name, mask):
        channels, layer = x.shape.as_list()[-1], len(self._moments)
        self._inputs.append(tf.reshape(x, [-1, channels]))
        if len(self._inputs) == self._count:
            self._moments.append(tf.nn.moments(tf.concat(self._inputs, 0), [0]))
            self._inputs.clear()
            self._turn.notify_all()
        assert self._turn.wait_for(lambda: len(self._moments) > layer, 60)
        with tf.variable_scope(name):
            gamma = tf.get_variable("gamma", [channels], initializer=tf.ones_initializer())
            beta = tf.get_variable("beta", [channels], initializer=tf.zeros_initializer())
        return tf.nn.batch_normalization(x, *self._moments[layer], beta, gamma, 1e-5)


@pytest.mark.laws
@of_tf2
def test_towers_whose_images_differ_in_size_train_as_their_pixels_together(parts):
    batches = [scenes(2, 16, 24), scenes(1, 17, 13, seed=1)]
    with tf.Graph().as_default():
        outputs = Joined(lambda joined: network(batch_norm=joined), [tuple(map(tf.constant, batch)) for batch in batches]).outputs
        weights = [tf.cast(each["weight"], tf.float64) for each in outputs]
        loss = tf.add_n([weight * each["loss"] for weight, each in zip(weights, outputs)]) / tf.add_n(weights)
        variables = tf.trainable_variables()
        gradients = {v.op.name: gradient for v, gradient in zip(variables, tf.gradients(loss, variables))}
        with session() as made:
            initial = made.run({v.op.name: v for v in variables})
            expected_loss, expected = made.run([loss, gradients])
    replicas = towers.TowerBuilder(cpus(2)).build(network(), towers.PerTower(batches))
    tower_grads = towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(0.1))
    averaged = {v.op.name: gradient for gradient, v in towers.average_gradients(replicas, tower_grads)}
    with session() as made:
        set_variables(made, initial)
        found_loss, found = made.run([replicas.loss, averaged])
    assert set(found) == set(expected) and abs(found_loss - expected_loss) < 1e-12
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-10 * largest, err_msg=name)


@of_tf2
@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no tf.layers")
@pytest.mark.laws
def test_network_of_tf_layers_is_converted_to_the_same_losses(parts):
    batch, losses, initial = scenes(3), [], None
    converted = tf_syncbn.convert_model(network(batch_norm=batch_norm.of_layers))
    for model_fn in (network(), converted):
        with tf.Graph().as_default():
            replicas = towers.TowerBuilder(cpus(2)).build(model_fn, tuple(map(tf.constant, batch)))
            found, initial, after = train_by(
                towers.minimize(replicas, tf.train.MomentumOptimizer(0.05, 0.9)), replicas.loss, 2, initial)
            losses.append(found)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-10)
    assert len(converted.converted) == sum(name.endswith("moving_mean") for name in after) > 7


@pytest.mark.laws
def test_mask_leaves_void_out_of_the_moments(parts):
    images, labels = scenes(4, void=0)
    labels[:, :, 12:] = VOID
    changed = images.copy()
    changed[:, :, 16:] += 5  # far enough from what counts for the first convolutions not to see it
    found, fed = [], tf.placeholder(tf.float32, images.shape)
    towers.TowerBuilder(cpus(2)).build(network(mask=True), (fed, tf.constant(labels)))
    for batch in (images, changed):
        with session() as made:
            set_variables(made, {"stem/conv1/kernel": np.linspace(-1, 1, 3 * 3 * 3 * 8).reshape(3, 3, 3, 8)})
            made.run(tf.get_collection(tf.GraphKeys.UPDATE_OPS), {fed: batch})
            found.append(made.run([v for v in tf.global_variables() if "stem/conv1/bn/moving" in v.op.name]))
    for before, after in zip(*found):
        np.testing.assert_array_equal(before, after)
    assert np.abs(found[0][0]).max() > 1e-3


def bilinear(x, height, width):
    """Interpolates pixel by pixel, in Python."""
    result = np.zeros([height, width])
    for i in range(height):
        for j in range(width):
            row = min(max((i + 0.5) * x.shape[0] / height - 0.5, 0), x.shape[0] - 1)
            column = min(max((j + 0.5) * x.shape[1] / width - 0.5, 0), x.shape[1] - 1)
            top, left = min(int(row), max(x.shape[0] - 2, 0)), min(int(column), max(x.shape[1] - 2, 0))
            bottom, right = min(top + 1, x.shape[0] - 1), min(left + 1, x.shape[1] - 1)
            a, b = row - top, column - left
            result[i, j] = ((1 - a) * ((1 - b) * x[top, left] + b * x[top, right])
                            + a * ((1 - b) * x[bottom, left] + b * x[bottom, right]))
    return result


@pytest.mark.parametrize("sizes,is_known", covering([
    ((3, 5), (12, 20)), ((1, 1), (4, 3)), ((7, 4), (3, 4)), ((6, 9), (13, 5)), ((1, 6), (3, 6))], [True, False]))
def test_resizing_is_bilinear_interpolation(sizes, is_known):
    before, after = sizes
    x = np.random.RandomState(0).randn(2, *before, 3)
    fed = tf.placeholder(tf.float64, x.shape if is_known else [None, None, None, 3])
    resized = resize_to(fed, after)
    assert resized.shape.as_list()[1:] == [*after, 3]
    with tf.Session() as made:
        found = made.run(resized, {fed: x})
    for image, of_image in zip(found, x):
        for channel in range(3):
            np.testing.assert_allclose(image[..., channel], bilinear(of_image[..., channel], *after), atol=1e-12)


@pytest.mark.parametrize("size", [(6, 6), (7, 11), (2, 3), (1, 1), (23, 30)])
def test_pooling_averages_parts_that_cover_the_image(size):
    x = np.random.RandomState(0).randn(2, *size, 3)
    with tf.Session() as made:
        pooled = made.run({bins: pool_to(tf.constant(x), bins) for bins in (1, 2, 3, 6)})
    for bins, found in pooled.items():
        for i, j in np.ndindex(bins, bins):
            (top, bottom), (left, right) = [(int(np.floor(k * length / bins)), int(np.ceil((k + 1) * length / bins)))
                                            for k, length in ((i, size[0]), (j, size[1]))]
            np.testing.assert_allclose(found[:, i, j], x[:, top:bottom, left:right].mean((1, 2)), atol=1e-12)


def test_nearest_takes_the_value_under_each_center():
    labels = np.arange(2 * 8 * 12).reshape(2, 8, 12).astype(np.int32)
    with tf.Session() as made:
        smaller, larger, same = made.run([nearest(tf.constant(labels), size) for size in ((4, 3), (16, 12), (8, 12))])
    np.testing.assert_array_equal(smaller, labels[:, 1::2, 2::4])
    np.testing.assert_array_equal(larger, labels.repeat(2, 1))
    np.testing.assert_array_equal(same, labels)


@pytest.mark.laws
def test_outputs_are_counted_as_numpy_counts():
    images, labels = scenes(4)
    outputs = towers.TowerBuilder(cpus(2)).build(network(weight_decay=0.0), tuple(map(tf.constant, (images, labels)))).merged()
    with session() as made:
        found = made.run(outputs)
    counts, predicted = labels != VOID, found["logits"].argmax(-1)
    for image in range(4):
        expected = np.zeros([CLASSES, CLASSES], int)
        np.add.at(expected, (labels[image][counts[image]], predicted[image][counts[image]]), 1)
        np.testing.assert_array_equal(found["confusion"][image], expected)
    assert abs(found["accuracy"] - (predicted == labels)[counts].mean()) < 1e-12
    logits = found["logits"][counts]
    cross_entropy = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), labels[counts]]
    assert 1.2 * cross_entropy.mean() < found["loss"] < 1.8 * cross_entropy.mean()  # the auxiliary loss is near to it at first


@pytest.mark.parametrize("options,message", [
    ({"depth": 50}, "18 or 34, not 50"), ({"width": 12}, "a multiple of 8, not 12"), ({"width": 0}, "a multiple of 8, not 0"),
    ({"output_stride": 16}, "8 or 4, not 16")])
def test_other_networks_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        pspnet(CLASSES, **options)
