"""Samples of products of parameters: tests run them, and a sweep, `make test-sweeps`, runs all that is left out."""
import itertools

import pytest


def covering(*lists, one_in=1, also=lambda *values: False):
    """Returns all combinations of the values of several lists for `pytest.mark.parametrize`, most of them marked `sweep`.

    Not marked are as many as the longest list has values, so that each value of each list is in one of them, and those for
    which `also` returns True: the corners where something is likely to go wrong. Of forms of one thing, one in so many will do.
    """
    longest = max(len(values) for values in lists)
    shown = {tuple((i // one_in if number else i) % len(values) for number, values in enumerate(lists))
             for i in range(0, longest, one_in)}
    combinations = []
    for indices in itertools.product(*(range(len(values)) for values in lists)):
        chosen = [values[i] for values, i in zip(lists, indices)]
        is_run = indices in shown or also(*chosen)
        combinations.append(pytest.param(*chosen, marks=() if is_run else pytest.mark.sweep))
    return combinations
