"""Models at random, whatever ops they are made of.

Through `towers.whole_batch` they are exact or refused by name; as plain towers they come to what one tower does, or it is said.
"""
import hypothesis
import pytest
from hypothesis import strategies as st

from tests.random_graphs import OPS, SPLITS, Step, difference, on_one, on_plain_towers, on_towers, programs

# What a loop would have to begin with was found out again and again, and propagation did not end.
ENDLESS = [Step(*step) for step in [
    ("scanned", ()), ("masked_by_length", (8, 26, 7, 21, 10)), ("cut", ()), ("squeeze", (4, 23, 25, 11, 21, 22)), ("tile", (20,)),
    ("gradient", (11,)), ("as_real", (24,)), ("mapped", ()), ("mapped", ()), ("places", (20, 5, 24)),
    ("scanned", (17, 12, 25, 29, 19)), ("loss_of", (8,))]]


# In TensorFlow 1.15 this tiles by a quotient of sizes, which is 0 in a tower of no examples.
TILED = [Step("pairs", ()), Step("gradient", ())]
# Rows with a number for each of all examples, in turn: TensorFlow took them for as long as the tower's batch.
ROWS_OF_ALL = [Step("reshape", ()), Step("gather", (7,)), Step("mapped", ())]
# In control flow 1 TensorFlow has no gradient of what is looked up in a loop's result by rows of a known number.
LOOKED_UP = [Step("looped", (15, 21, 29, 0, 11)), Step("number_of", (0, 0, 0, 29, 0, 0)), Step("reshape", (0, 0)),
             Step("gather", ())]


@pytest.mark.laws
@hypothesis.example(LOOKED_UP, (3, 2), True)
@hypothesis.example(LOOKED_UP, (3, 2), False)
@hypothesis.example(ROWS_OF_ALL, (1, 4), True)
@hypothesis.example(ENDLESS, (2, 1, 3), True)
@hypothesis.example(TILED, (3, 0, 4), False)
@hypothesis.given(programs(), st.sampled_from(SPLITS), st.booleans())
def test_a_program_of_ops_is_exact_on_towers_or_refused(program, split, is_known):
    try:
        one, nudged = on_one(program, sum(split), is_known)
    except Exception:  # no program of TensorFlow's either
        hypothesis.event("fails in one tower")
        hypothesis.reject()
    floor = difference(one, nudged)
    hypothesis.assume(floor < 1e-10)  # where a change of the last digits shows, rounding would too
    try:
        ours = on_towers(program, split, is_known)
    except ValueError as error:
        assert str(error).startswith(("towers.whole_batch: ", "The batch of tower ")), error
        hypothesis.event("refused")
        return
    hypothesis.event("exact")
    assert difference(one, ours) < 1e-9


# What is computed of each example, whatever else there is.
COMPUTING = ("as_real", "compare", "convolution", "cross_entropy", "mapped", "one_hot", "unary", "where",
             "with_its_own_gradient", "written")
SAYING = tuple(name for name in OPS if name != "number_of")  # of known sizes a number is not told from others


SPLIT_EVENLY = st.sampled_from([(2, 4), (2, 6), (3, 6)])  # numbers of towers, and of examples


def is_said(program, counts, is_known):
    """Tells whether anything is said of a program's plain towers; if not, they have to come to what one tower does."""
    num_towers, total = counts
    try:
        one, _ = on_plain_towers(program, 1, total, is_known)
    except Exception:  # no program of TensorFlow's either
        hypothesis.reject()
    ours, said = on_plain_towers(program, num_towers, total, is_known)
    assert said or difference(one, ours) < 1e-9
    return bool(said)


@hypothesis.given(programs(SAYING), SPLIT_EVENLY, st.booleans())
@pytest.mark.laws
def test_a_program_comes_to_the_same_on_plain_towers_or_is_said(program, counts, is_known):
    hypothesis.event("said" if is_said(program, counts, is_known) else "the same")


@hypothesis.given(programs(COMPUTING), SPLIT_EVENLY, st.booleans())
@pytest.mark.laws
def test_nothing_is_said_of_a_program_that_computes_of_each_example(program, counts, is_known):
    assert not is_said(program, counts, is_known)
