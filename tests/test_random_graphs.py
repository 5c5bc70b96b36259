"""Models at random through `towers.whole_batch`: exact or refused by name, whatever ops they are made of."""
import hypothesis
from hypothesis import strategies as st

from tests.random_graphs import SPLITS, Step, difference, on_one, on_towers, programs

# What a loop would have to begin with was found out again and again, and propagation did not end.
ENDLESS = [Step(*step) for step in [
    ("scanned", ()), ("masked_by_length", (8, 26, 7, 21, 10)), ("cut", ()), ("squeeze", (4, 23, 25, 11, 21, 22)), ("tile", (20,)),
    ("gradient", (11,)), ("as_real", (24,)), ("mapped", ()), ("mapped", ()), ("places", (20, 5, 24)),
    ("scanned", (17, 12, 25, 29, 19)), ("loss_of", (8,))]]


@hypothesis.example(ENDLESS, (2, 1, 3), True)
@hypothesis.given(programs(), st.sampled_from(SPLITS), st.booleans())
def test_a_program_of_ops_is_exact_on_towers_or_refused(program, split, is_known):
    try:
        one, nudged = on_one(program, sum(split))
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
