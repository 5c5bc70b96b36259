"""The law, on whole models at random: N towers train as the same model does without towers, in float64.

`tests.whole_models` draws descriptions, and a failure prints one. Many of them, in parts:

    HYPOTHESIS_CASES=1000 python -m pytest tests/laws/test_whole_models.py --hypothesis-seed=1
"""
import os

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.whole_model_layers import REFUSED
from tests.whole_model_training import difference, on_towers, rounding, without_towers
from tests.whole_models import Layer, all_features, cases, features, is_converted

ALLOWED = 1e-9
CASES = hypothesis.settings.default.max_examples if "HYPOTHESIS_CASES" in os.environ else 5
FEW = hypothesis.settings(max_examples=CASES)
FEWER = hypothesis.settings(max_examples=max(CASES // 10, 2))


@FEW
@hypothesis.given(cases())
def test_whole_models_on_towers_train_as_without_towers(case):
    one, several = without_towers(case), on_towers(case)
    by, name = difference(one, several)
    if by > ALLOWED:  # where what stands near a kink, or is divided by next to nothing, no sum can be held to more
        floor = rounding(case, one)
        hypothesis.event("a last digit of the batch does more than 1e-10")
        assert by <= 10 * floor, "%s differs by %.2g, where a last digit of the batch does %.2g" % (name, by, floor)


@pytest.mark.laws
@FEWER
@hypothesis.given(cases(numbers_of_towers=(2, 3)), st.integers(0, 6), st.sampled_from(["moments", "squares"]))
def test_one_batch_norm_that_is_not_synced_is_found_in_any_model(case, place, form):
    """Else the law above would say nothing. Slopes through it are said to be of the tower's own examples."""
    hypothesis.assume(not is_converted(case.model) and sum(size > 0 for size in case.training.sizes) > 1)
    local = Layer("local", dict(momentum=0.9, epsilon=1e-3, center=True, scale=True, twice=False, form=form, mask=None))
    layers = case.model.layers[:place] + [local] + case.model.layers[place:]
    case = case._replace(model=case.model._replace(layers=layers))
    try:
        several = on_towers(case)
    except UserWarning as warning:
        assert case.model.penalty and "adds up over the tower's own examples" in str(warning)
    else:
        assert difference(without_towers(case), several)[0] > 1e-6


@pytest.mark.laws
@hypothesis.settings(max_examples=max(CASES // 10, 8))  # towers are built, and nothing is run
@hypothesis.given(st.sampled_from(sorted(REFUSED)), cases(numbers_of_towers=(2, 3)), st.integers(0, 6))
def test_what_can_not_be_exact_is_refused_in_any_model(why, case, place):
    _, converted, message = REFUSED[why]
    hypothesis.assume(converted is None or is_converted(case.model) == converted)
    # Towers of other known sizes may have other constants: such as count their examples.
    hypothesis.assume(why != "other constant" or case.training.split == "unknown" or len(set(case.training.sizes)) == 1)
    layers = case.model.layers[:place] + [Layer("refused", dict(why=why))] + case.model.layers[place:]
    case = case._replace(model=case.model._replace(layers=layers))
    with pytest.raises(ValueError, match=message):
        on_towers(case)


@pytest.mark.sweep
def test_everything_that_may_be_drawn_is_drawn():
    """Descriptions alone, of which none is built."""
    missing = all_features()

    @hypothesis.settings(max_examples=300, derandomize=False, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(cases())
    def collect(case):
        missing.difference_update(features(case))

    for seed in range(10):  # some are drawn once in a hundred, and draws of one run resemble each other
        if missing:
            hypothesis.seed(seed)(collect)()
    assert not missing, sorted(missing)
