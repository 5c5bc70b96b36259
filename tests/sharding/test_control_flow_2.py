"""Branches, loops and functions of control flow 2, all in one model: whoever changes a rule of theirs learns it by `make test`.

`make test-graph` holds each of them by itself.
"""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.sharding.test_sharding_bodies import FORMS, batch
from tests.support import control_flow_2, loss_and_gradients


# Those that together reach nearly all lines that all do.
TOGETHER = """
a_branch_that_writes_a_moving_mean branches_of_chosen_rows a_switch_case a_loop_that_adds_up_sums_over_examples
a_map_over_examples_with_the_batch a_slope_through_a_scan a_recurrence_there_and_back a_function_called_twice a_function_in_a_loop
a_function_that_writes a_loop_that_chooses_rows a_function_with_a_gradient_within_the_model an_array_that_is_joined
""".split()


def all_forms(*args):
    losses = []
    for name in TOGETHER:
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
