"""The law, on whole models at random: N towers train as the same model does without towers, in float64.

`tests.whole_models` draws descriptions, a failure prints one. Many of them, in parts:

    HYPOTHESIS_CASES=1000 python -m pytest tests/test_whole_models.py --hypothesis-seed=1
"""
import os

import hypothesis
import pytest
import tensorflow.compat.v1 as tf

from tests.whole_model_training import difference, on_towers, rounding, without_towers
from tests.whole_models import cases

FEW = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples if "HYPOTHESIS_CASES" in os.environ else 12)
ALLOWED = 1e-9


def assert_law(case):
    """Asserts that towers train as no towers do, within 1e-9, or ten times what a last digit of the batch does."""
    one, several = without_towers(case), on_towers(case)
    by, name = difference(one, several)
    if by > ALLOWED:
        floor = rounding(case, one)
        hypothesis.event("rounding does more than 1e-9")
        assert by <= 10 * floor, "%s differs by %.2g, where a last digit of the batch does %.2g" % (name, by, floor)


@FEW
@hypothesis.given(cases())
def test_whole_models_on_towers_train_as_without_towers(case):
    assert_law(case)
