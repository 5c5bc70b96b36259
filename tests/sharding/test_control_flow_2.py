"""Branches, loops and functions of control flow 2, all in one model: whoever changes a rule of theirs learns it by `make test`.

`make test-graph` holds each of them by itself.
"""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.sharding.test_sharding_bodies import FORMS, HELD, batch
from tests.support import control_flow_2, loss_and_gradients


def all_forms(*args):
    losses = []
    for name in HELD:
        with tf.variable_scope(name):
            losses.append(FORMS[name](*args))
    return tf.add_n([tf.cast(loss, tf.float64) for loss in losses])


@pytest.mark.once
def test_what_bodies_compute_in_one_model_is_the_whole_batch():
    with control_flow_2():
        of_one = loss_and_gradients(all_forms, batch(), [9])
        of_towers = loss_and_gradients(towers.whole_batch(all_forms), batch(), [4, 5])
    assert len(of_one) == len(of_towers)
    for one, several in zip(of_one, of_towers):
        bound = 1e-5 if one.dtype == np.float32 else 1e-9
        np.testing.assert_allclose(several, one, rtol=bound, atol=bound)
