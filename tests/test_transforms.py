"""Transforms of averaged gradients, against NumPy."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, run

X = np.random.RandomState(3).randn(6, 3).astype(np.float32)


def train(transforms, num_towers=2):
    """Returns the steps of two variables that one step of plain descent takes."""
    def model(x):
        v, w = (tf.get_variable(name, [3], initializer=tf.zeros_initializer()) for name in "vw")
        return tf.reduce_mean(tf.reduce_sum(x * v + 2 * x * w, 1))

    with tf.Graph().as_default():
        train_op = towers.minimize(build(model, (X,), num_towers), tf.train.GradientDescentOptimizer(1.0), transforms=transforms)
        with tf.control_dependencies([train_op]):
            after = [tf.identity(variable.read_value()) for variable in tf.global_variables()]
        return [-value for value in run(after)]


@pytest.mark.parametrize("num_towers", [1, 3])
@pytest.mark.parametrize("clip_norm", [0.1, 1e3])
def test_clipping_scales_the_gradients_of_the_global_batch_by_one_factor(clip_norm, num_towers):
    slope = X.mean(0, dtype=np.float64)
    norm = np.sqrt(np.sum(slope ** 2) + np.sum((2 * slope) ** 2))
    factor = min(1.0, clip_norm / norm)
    got = train([towers.clip_by_global_norm(clip_norm)], num_towers)
    np.testing.assert_allclose(got, [factor * slope, factor * 2 * slope], rtol=1e-5)


def test_clipped_slices_stay_sparse():
    def model(ids):
        return tf.reduce_mean(tf.nn.embedding_lookup(tf.get_variable("table", [5, 2]), ids))

    seen = []

    def note(grads):
        seen.extend(grads)
        return grads

    replicas = build(model, (np.array([0, 2, 2, 4]),), 2)
    towers.minimize(replicas, tf.train.GradientDescentOptimizer(1.0), transforms=[towers.clip_by_global_norm(0.1), note])
    assert [type(gradient) for gradient, _ in seen] == [tf.IndexedSlices]
    assert run(tf.norm(seen[0][0].values)) <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize("clip_norm", [0, -1.0])
def test_a_norm_that_clips_everything_is_refused(clip_norm):
    with pytest.raises(ValueError, match="clip_norm has to be more than 0, not %r" % clip_norm):
        towers.clip_by_global_norm(clip_norm)
