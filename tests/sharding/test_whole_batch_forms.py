"""Losses, sums, positions, numbers and gradients however they are written: through `whole_batch` each is what one tower computes.

The model functions are those of the files that hold the warnings about them; here nothing is warned of, and all is exact.
"""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.meeting import test_crossings as crossings
from tests.plain_towers import test_inner_gradients as gradients
from tests.plain_towers import test_mixed_losses as mixed
from tests.plain_towers import test_number_powers as powers
from tests.plain_towers import test_positions as positions
from tests.plain_towers import test_regrouping as regrouping
from tests.plain_towers import test_summed_losses as summed
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

SIZES = ["known", "unknown"]
MANY = 4  # forms that rules take for one


def unsized(model_fn):
    return lambda *batch: model_fn(*[
        tf.placeholder_with_default(x, [None] + x.shape.as_list()[1:]) if x.shape.rank else x for x in batch])


def assert_is_exact(model_fn, batch, size, sizes=(3, 5, 4)):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message=".*tower")
        assert_equals_one_batch(towers.whole_batch(model_fn if size == "known" else unsized(model_fn)), batch, len(sizes),
                                sizes=list(sizes), steps=2)


# Whose gradients are zero but for rounding, so that there is nothing to hold them against.
OF_NO_SLOPE = ("of what is standardized", "of tf.boolean_mask, by a softmax")
MIXED = {**mixed.MIXED, **mixed.MEANS_IN_A_LOOP, **{name + ", a mean": form for name, form in mixed.MEANS.items()}}


@pytest.mark.parametrize("name,size", covering(sorted(set(MIXED) - set(OF_NO_SLOPE)), SIZES, one_in=MANY))
def test_losses_that_take_examples_together_are_those_of_the_whole_batch(name, size):
    assert_is_exact(MIXED[name], mixed.batch_for(name), size)


@pytest.mark.parametrize("name", OF_NO_SLOPE)
def test_a_loss_that_is_always_the_same_is_so(name):
    with tf.Graph().as_default():
        replicas = towers.TowerBuilder(["/cpu:0", "/cpu:0"]).build(towers.whole_batch(MIXED[name]), mixed.BATCH)
        slopes = tf.gradients(replicas.loss, tf.trainable_variables())
        with tf.Session(config=towers.session_config(["/cpu:0"])) as session:
            session.run(tf.global_variables_initializer())
            assert np.abs(session.run(slopes)).max() < 1e-12


SUMMED = {**summed.SUMS, **{name + ", a mean": form for name, form in summed.MEANS.items()}, **{
    "decays " + name: form for table in (summed.DECAYS, summed.RIGHT_DECAYS) for name, form in table.items()}}
SUMMED_OF_KNOWN_SIZE = {
    name: form for table in (summed.MEANS_OF_KNOWN_SIZE, summed.DECAYS_OF_KNOWN_SIZE, summed.RIGHT_DECAYS_OF_KNOWN_SIZE)
    for name, form in table.items() if "each one" not in name}


@pytest.mark.parametrize("name,size", covering(sorted(SUMMED), SIZES, one_in=MANY))
def test_sums_and_decays_by_numbers_of_examples_are_those_of_the_whole_batch(name, size):
    assert_is_exact(SUMMED[name], summed.batch_for(name), size)


@pytest.mark.parametrize("name", covering(sorted(SUMMED_OF_KNOWN_SIZE), one_in=MANY))
def test_sums_by_numbers_that_python_computed_are_those_of_the_whole_batch(name):
    assert_is_exact(SUMMED_OF_KNOWN_SIZE[name], summed.batch_for(name), "known")


HALVED = (4, 6, 2)  # some of the models take halves
PLACED = {**positions.RUNNING, **{model.__name__: model for model in positions.ALIKE if model is not positions.one_by_one}}
TAKEN = {name: form for name, form in positions.TAKING.items()
         if not name.startswith(("each", "halves by slices", "of a given"))}


@pytest.mark.parametrize("name,size", covering(sorted(PLACED), SIZES, one_in=MANY))
def test_what_runs_along_the_batch_is_that_of_the_whole_batch(name, size):
    assert_is_exact(PLACED[name], (positions.X, positions.Y, positions.LABELS), size, HALVED)


@pytest.mark.parametrize("name,size", covering(sorted(TAKEN), SIZES, one_in=MANY))
def test_examples_by_their_place_in_the_batch_are_those_of_the_whole_batch(name, size):
    assert_is_exact(TAKEN[name], (positions.X, positions.Y, positions.LABELS), size, HALVED)


@pytest.mark.parametrize("name,size", covering(sorted(regrouping.FINE), SIZES))
def test_rows_that_are_examples_are_those_of_the_whole_batch(name, size):
    assert_is_exact(regrouping.FINE[name], (regrouping.X,), size)


@pytest.mark.parametrize("name", covering(sorted(regrouping.REGROUPED), one_in=MANY))
def test_a_network_as_wide_as_the_tower_has_examples_is_refused(name):
    with pytest.raises(ValueError, match="can't be called with the whole batch, as one tower calls it: .*shape"):
        assert_is_exact(regrouping.REGROUPED[name], (regrouping.X,), "known")


INNER = {name: form for name, form in {**gradients.OTHERS, **gradients.SAME}.items()
         if "synced" not in name and "meet" not in name}


@pytest.mark.parametrize("name,size", covering(sorted(INNER), SIZES, one_in=MANY))
def test_gradients_that_a_model_takes_are_those_of_the_whole_batch(name, size):
    assert_is_exact(INNER[name], (gradients.X, gradients.Y), size, (2, 4, 3))


def layers():
    """What takes all examples together and comes back to each, but for loops of Python's over them."""
    return [pytest.param(layer, SIZES[number // MANY % 2], id="%s %d" % (layer.__name__.strip("<>"), number),
                         marks=pytest.mark.sweep if number % MANY else ())
            for number, layer in enumerate(crossings.CROSSING)]


@pytest.mark.parametrize("layer,size", layers())
def test_what_comes_back_to_examples_is_of_the_whole_batch(layer, size):
    assert_is_exact(crossings.model_of(layer), (np.random.RandomState(0).randn(7, 4, 3),), size, (3, 4))


NUMBERS = {kind + " " + name: form for kind, table in (
    ("mean", powers.MEANS), ("sum", powers.SUMS), ("variables", powers.OF_VARIABLES), ("right", powers.RIGHT))
    for name, form in table.items()}


@pytest.mark.parametrize("name,size", covering(sorted(NUMBERS), SIZES, one_in=MANY))
def test_numbers_of_examples_are_the_whole_batchs(name, size):
    assert_is_exact(NUMBERS[name], (powers.X,), size)


LOOPS_OF_PYTHON = {**mixed.MIXED_OF_KNOWN_SIZE, **mixed.MEANS_OF_KNOWN_SIZE, **{
    "summed " + name: lambda x, *_, form=form: form(x) for name, form in summed.MEANS_OF_LISTS.items()}}


@pytest.mark.parametrize("name", covering(sorted(LOOPS_OF_PYTHON), one_in=MANY))
def test_a_loop_of_python_over_the_examples_is_of_the_whole_batch(name):
    assert_is_exact(LOOPS_OF_PYTHON[name], mixed.BATCH, "known")


@pytest.mark.parametrize("size", SIZES)
def test_row_numbers_that_are_labels_and_a_mask_are_each_what_is_wanted(size):
    """NT-Xent as it is written for one device: the labels are numbers of rows, and the mask is one-hot of them."""
    def model_fn(a, b):
        a = tf.nn.l2_normalize(a * tf.get_variable("w", [4], a.dtype, tf.ones_initializer()), 1)
        own, count = tf.range(tf.shape(a)[0]), tf.shape(a)[0]

        def loss(rows, partners, same_view):
            others = tf.matmul(rows, same_view, transpose_b=True) - 1e9 * tf.one_hot(own, count, dtype=a.dtype)
            logits = tf.concat([tf.matmul(rows, partners, transpose_b=True), others], 1)
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=logits))
        return (loss(a, b, a) + loss(b, a, b)) / 2

    x = np.random.RandomState(0).randn(12, 4)
    assert_is_exact(model_fn, (x, x[::-1] + 1), size)
