"""Random ops that the model function gives seeds: what they draw for the examples of several towers."""
import re
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, run

X = np.ones([6, 40])
WORDS = r"Tower 1 draws the same random numbers as tower 0 at '{}.*', since the model function gives that op a seed"


def dropped(x, seed=0):
    return tf.nn.dropout(x, rate=0.5, seed=seed, name="drop")


@pytest.fixture
def silent():
    """Makes our warning an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*draws the same random numbers")
        yield


@pytest.mark.parametrize("graph_seed", [None, 1])
@pytest.mark.parametrize("of_known_size", [True, False])
def test_noise_by_a_seed_of_the_model_functions_is_warned_of_once(graph_seed, of_known_size):
    tf.set_random_seed(graph_seed)
    x = X if of_known_size else tf.placeholder_with_default(X, [None, 40])
    with pytest.warns(UserWarning, match=WORDS.format("tower_1/drop/")) as caught:
        rows = build(lambda x: {"rows": dropped(x) + dropped(x, 2)}, (x,), 2).merged()["rows"]
    assert len([w for w in caught if re.match("Tower . draws", str(w.message))]) == 1
    rows = run(rows)
    np.testing.assert_array_equal(rows[:3], rows[3:])                   # what it warns of


@pytest.mark.parametrize("graph_seed", [None, 1])
def test_noise_without_a_seed_of_its_own_is_anew_in_each_tower(graph_seed, silent):
    tf.set_random_seed(graph_seed)
    rows = run(build(lambda x: {"rows": dropped(x, None)}, (X,), 2).merged()["rows"])
    assert (rows[:3] != rows[3:]).any()


def test_noise_by_a_seed_to_which_the_towers_number_is_added_is_anew_in_each_tower(silent):
    rows = run(build(lambda x: {"rows": dropped(x, 5 + towers.current_tower().index)}, (X,), 2).merged()["rows"])
    assert (rows[:3] != rows[3:]).any()


@pytest.mark.parametrize("model", [
    lambda x: x * tf.get_variable("w", [40], tf.float64, tf.random_normal_initializer(seed=1)),
    lambda x: x + tf.random_normal([40], seed=1, dtype=tf.float64),                      # one tower would draw just that
    lambda x: (dropped(x), x)[1],                                                        # nothing needs it
    lambda x: x + dropped(tf.ones([2, 40], tf.float64))[0]])
def test_seeds_of_what_is_not_drawn_for_examples_pass_in_silence(model, silent):
    rows = run(build(lambda x: {"rows": model(x)}, (X,), 2).merged()["rows"])
    np.testing.assert_array_equal(rows[:3], rows[3:])


def test_one_tower_is_not_warned_of(silent):
    assert run(build(lambda x: {"rows": dropped(x)}, (X,), 1).merged()["rows"]).shape == (6, 40)


def stateless(x, seed=(1, 2)):
    return x + tf.random.stateless_normal(tf.shape(x), seed, dtype=x.dtype)


def test_noise_of_a_stateless_op_is_warned_of():
    with pytest.warns(UserWarning, match="Tower 1 draws the same random numbers as tower 0 at 'tower_1/stateless_random_normal"):
        rows = run(build(lambda x: {"rows": stateless(x)}, (X,), 2).merged()["rows"])
    np.testing.assert_array_equal(rows[:3], rows[3:])                   # what it warns of


def test_noise_of_a_stateless_op_whose_seed_is_the_towers_or_of_a_whole_batch_model_passes_in_silence(silent):
    build(lambda x: {"rows": stateless(x, (1, towers.current_tower().index))}, (X,), 2, alike=False)
    whole = build(towers.whole_batch(lambda x: {"rows": stateless(x)}), (X,), 2).merged()["rows"]
    np.testing.assert_array_equal(run(whole), run(stateless(tf.constant(X))))
