"""The timing protocol: variants take turns in one process, and are compared within each round.

A machine's speed drifts by more than the differences that matter here, between processes and from minute to minute. What
runs a moment later in the same process drifts alike, so the ratio of two times of one round says more than the ratio of two
medians.
"""
import gc
import time

import numpy as np
from tqdm import tqdm

__all__ = ["geometric_mean", "paired_ratio", "spread", "take_turns"]


def take_turns(variants, rounds, warm_ups=3, label=None, after_each=None, collect_garbage=False):
    """Times variants in turn: A B C, then C A B backwards, and so on, so that none always follows the same other.

    Args:
      variants: dict from a name to a function without arguments.
      rounds: int, how often each is timed.
      warm_ups: int, rounds that run first and are not timed.
      label: str, shown beside a progress bar on a terminal; None shows none.
      after_each: a function of the variant's name that is called after each run, outside of the timing; None calls nothing.
      collect_garbage: whether Python's collector runs in the timed part, for variants that are Python's own work. It would
        charge a step that TensorFlow runs for what others left.

    Returns:
      A dict from each name to an array [rounds] of seconds.
    """
    seconds = {name: [] for name in variants}
    gc.collect()
    if not collect_garbage:
        gc.disable()
    try:
        for index in tqdm(range(-warm_ups, rounds), label, leave=False, disable=None if label else True):
            for name in _order(list(variants), index):
                start = time.perf_counter()
                variants[name]()
                elapsed = time.perf_counter() - start
                if index >= 0:
                    seconds[name].append(elapsed)
                if after_each is not None:
                    after_each(name)
    finally:
        gc.enable()
    return {name: np.array(values) for name, values in seconds.items()}


def _order(names, index):
    start = index // 2 % len(names)
    turned = names[start:] + names[:start]
    return turned[::-1] if index % 2 else turned


def paired_ratio(seconds, name, other):
    """Returns the `spread` of one variant's time over another's, round by round."""
    return spread(seconds[name] / seconds[other])


def spread(values):
    """Returns a dict of the median and the lower and upper quartile of an array [n]."""
    lower, median, upper = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "lower_quartile": float(lower), "upper_quartile": float(upper)}


def geometric_mean(values):
    """Returns the geometric mean of positive numbers, which treats a ratio and its inverse alike."""
    return float(np.exp(np.mean(np.log(values))))
