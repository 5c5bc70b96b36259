"""Masked gradients: what is frozen stays what it is to the bit, what trains trains as without."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, session, set_variables

RNG = np.random.RandomState(7)
X, Y = RNG.randn(12, 6).astype(np.float32), RNG.randn(12, 3).astype(np.float32)
MASK = RNG.rand(6, 3) < 0.5
INITIAL = {"w": RNG.randn(6, 3).astype(np.float32), "b": RNG.randn(3).astype(np.float32)}


class DecayingMomentum(tf.train.MomentumOptimizer):
    """Momentum with decoupled weight decay, which moves weights without a gradient."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        applied = super().apply_gradients(grads_and_vars, global_step, name)
        with tf.control_dependencies([applied]):
            return tf.group(*[tf.assign(variable, variable.read_value() * 0.99) for _, variable in grads_and_vars])


def model(x, y):
    w, b = tf.get_variable("w", [6, 3]), tf.get_variable("b", [3])
    return tf.reduce_mean(tf.square(tf.matmul(x, w) + b - y)) + 1e-2 * tf.nn.l2_loss(w)


def train(transforms, steps, optimizer, slots=None):
    """Returns variables by name after some steps on 2 towers of X and Y."""
    with tf.Graph().as_default():
        train_op = towers.minimize(build(model, (X, Y), 2), optimizer, transforms=transforms)
        with session() as made:
            set_variables(made, dict(INITIAL, **(slots or {})))
            for _ in range(steps):
                made.run(train_op)
            return made.run({variable.op.name: variable for variable in tf.global_variables()})


def by_hand(steps, slot):
    """Returns w after momentum with weight decay by NumPy in float64, where frozen parts are put back after each step."""
    w, b = (INITIAL[name].astype(np.float64) for name in "wb")
    m, m_b = slot.astype(np.float64), np.zeros(3)
    x, y = X.astype(np.float64), Y.astype(np.float64)
    for _ in range(steps):
        d = 2 * (x @ w + b - y) / y.size
        gradient = np.where(MASK, x.T @ d + 1e-2 * w, 0)
        m, m_b = 0.9 * m + gradient, 0.9 * m_b + d.sum(0)
        w, b = np.where(MASK, 0.99 * (w - 0.05 * m), w), 0.99 * (b - 0.05 * m_b)
    return w


def test_a_masked_slice_stays_to_the_bit_under_momentum_and_weight_decay():
    slot = RNG.randn(6, 3).astype(np.float32)  # as if trained without a mask before
    after = train([towers.mask_gradients({"w": MASK})], 200, DecayingMomentum(0.05, 0.9), {"w/Momentum": slot})
    np.testing.assert_array_equal(after["w"][~MASK], INITIAL["w"][~MASK])
    np.testing.assert_allclose(after["w"], by_hand(200, slot), rtol=1e-4, atol=1e-5)
    assert (after["w"][MASK] != INITIAL["w"][MASK]).all() and (after["b"] != INITIAL["b"]).all()


def test_a_mask_of_ones_changes_nothing():
    plain = train([], 5, tf.train.MomentumOptimizer(0.05, 0.9))
    masked = train([towers.mask_gradients({"w": np.ones([6, 3]), "b": 1})], 5, tf.train.MomentumOptimizer(0.05, 0.9))
    for name in "wb":
        np.testing.assert_array_equal(masked[name], plain[name])


def test_a_frozen_part_takes_no_part_in_what_comes_after():
    """Here the norm that gradients are clipped by."""
    masks = {"w": np.zeros([6, 3]), "b": [1, 0, 0]}
    after = train([towers.mask_gradients(masks), towers.clip_by_global_norm(0.01)], 1, tf.train.GradientDescentOptimizer(1.0))
    np.testing.assert_allclose(np.abs(after["b"] - INITIAL["b"]), [0.01, 0, 0], rtol=1e-4, atol=1e-8)


def test_a_variable_is_named_by_itself_or_by_its_tensor():
    replicas = build(model, (X, Y), 2)
    variable = next(v for v in tf.trainable_variables() if v.op.name == "w")
    key = variable.ref() if hasattr(variable, "ref") else variable
    seen = []
    for masks in ({key: MASK}, {"w:0": MASK}):
        def note(grads):
            seen.append(dict((v.op.name, gradient) for gradient, v in grads)["w"])
            return grads

        towers.minimize(replicas, tf.train.GradientDescentOptimizer(1.0), transforms=[towers.mask_gradients(masks), note])
    with session() as made:
        for gradient in made.run(seen):
            assert (gradient[~MASK] == 0).all() and (gradient[MASK] != 0).all()


def test_rows_of_a_table_are_frozen_and_its_gradient_stays_sparse():
    def looks_up(ids):
        return tf.reduce_mean(tf.nn.embedding_lookup(tf.get_variable("table", [4, 2]), ids))

    seen = []

    def note(grads):
        seen.extend(grads)
        return grads

    replicas = build(looks_up, (np.array([0, 1, 1, 3]),), 2)
    masks = {"table": np.array([[1], [0], [1], [1]])}
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(1.0), transforms=[towers.mask_gradients(masks), note])
    assert isinstance(seen[0][0], tf.IndexedSlices)
    with session() as made:
        before = made.run(tf.trainable_variables())[0]
        made.run(train_op)
        after = made.run(tf.trainable_variables())[0]
    np.testing.assert_array_equal((before != after).any(1), [True, False, False, True])


@pytest.mark.parametrize("masks, error, match", [
    (["w"], TypeError, "takes a dict from variables, or their names, to masks"),
    ({3: MASK}, TypeError, "3 is neither a variable nor a name of one"),
    ({"w": "yes"}, TypeError, "the mask of 'w' has to be of booleans or numbers"),
    ({"w": 0.5 * MASK}, ValueError, "the mask of 'w' has to hold 1 for what trains and 0 for what is frozen"),
    ({"w": np.ones([6, 4])}, ValueError,
     r"the mask of 'w' has shape \(6, 4\), which does not broadcast to the variable's, \(6, 3\)"),
    ({"w": np.ones([2, 6, 3])}, ValueError, "does not broadcast"),
    ({"u": MASK}, ValueError, "this step trains no variable 'u'; it trains 'w', 'b'"),
])
def test_masks_that_fit_nothing_are_refused(masks, error, match):
    replicas = build(model, (X, Y), 2)
    with pytest.raises(error, match=match):
        towers.minimize(replicas, tf.train.GradientDescentOptimizer(1.0), transforms=[towers.mask_gradients(masks)])
