"""Batch norm of a whole batch in NumPy, the authority of the tests, in two ways.

`normalized`, `gradients` and `frozen` are the textbook's formulas in float64. `in_steps` takes, in the dtype asked for, the
steps that towers have to take: the moments of each tower, shifted by a first mean and corrected; their merge (Chan, Golub and
LeVeque 1979); two sums in the backward pass. What it loses in float32 is the measure of whoever takes these steps.

`weights` are those of the positions, [N, ...], without the channels; None is 1 everywhere.
"""
from typing import Any, NamedTuple

import numpy as np

__all__ = ["EPSILON", "Results", "frozen", "gradients", "group_variances", "in_steps", "largest", "normalized",
           "numerical_gradient"]

EPSILON = 1e-3


class Results(NamedTuple):
    """A batch norm's output and gradients, and the moments of the whole batch with their count, of shape [1]."""
    y: Any
    dx: Any
    d_gamma: Any
    d_beta: Any
    mean: Any
    variance: Any
    count: Any


def largest(a):
    """Returns the largest absolute value, 0 where there is none."""
    return np.abs(a).max() if np.size(a) else 0.0


def numerical_gradient(f, x, step=1e-5):
    """Returns the difference quotients of a scalar function at `x`."""
    result = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        moved = x.copy()
        moved[i] += step
        above = f(moved)
        moved[i] -= 2 * step
        result[i] = (above - f(moved)) / (2 * step)
    return result


def normalized(x, axis, gamma, beta, weights=None, groups=None, epsilon=EPSILON):
    """Batch norm of the whole batch in float64: y, and mean and variance of the whole batch with its count.

    `groups` are the rows at which the batch is divided: each part is normalized by its own moments.
    """
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    weights = _weights_of(x, weights)
    parts = []
    for part, w in zip(np.split(x, groups or []), np.split(weights, groups or [])):
        mean, variance, _ = _moments(part, w)
        parts.append((part - mean) / np.sqrt(variance + epsilon) * gamma + beta)
    return (np.moveaxis(np.concatenate(parts), -1, axis),) + _moments(x, weights)


def gradients(x, dy, axis, gamma, weights=None, groups=None, epsilon=EPSILON):
    """The gradients of sum(y dy) by x, gamma and beta in float64: the textbook's formula, with weights."""
    x, dy = (np.moveaxis(np.asarray(a, np.float64), axis, -1) for a in (x, dy))
    weights = _weights_of(x, weights)
    dxs, d_gamma, d_beta = [], 0, 0
    for part, d, w in zip(*(np.split(a, groups or []) for a in (x, dy, weights))):
        mean, variance, count = _moments(part, w)
        inverse = 1 / np.sqrt(variance + epsilon)
        hat = (part - mean) * inverse
        s, t = _sum(d), _sum(d * hat)
        dxs.append(gamma * inverse * (d - w[..., None] * (s + hat * t) / max(count, 1e-300)))
        d_gamma, d_beta = d_gamma + t, d_beta + s
    return np.moveaxis(np.concatenate(dxs), -1, axis), d_gamma, d_beta


def frozen(x, dy, axis, gamma, beta, mean, variance, epsilon=EPSILON):
    """Batch norm by given moments, constants to the gradient, in float64: y, and the gradients by x, gamma and beta."""
    x, dy = (np.moveaxis(np.asarray(a, np.float64), axis, -1) for a in (x, dy))
    inverse = 1 / np.sqrt(variance + epsilon)
    hat = (x - mean) * inverse
    y, dx = (np.moveaxis(a, -1, axis) for a in (gamma * hat + beta, gamma * inverse * dy))
    return y, dx, _sum(dy * hat), _sum(dy)


def group_variances(x, axis, weights, groups):
    """Returns the biased variances of the groups that have rows, in float64: [groups, C]."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    parts = zip(np.split(x, groups), np.split(_weights_of(x, weights), groups))
    return np.stack([_moments(part, w)[1] for part, w in parts if len(part)])


def in_steps(x, dy, axis, gamma, beta, weights, groups, epsilon, dtype=np.float32):
    """Batch norm of a batch that is divided over towers, each step in `dtype`.

    Args:
      x, dy: arrays of one shape, N rows, C channels along `axis`.
      axis: int.
      gamma, beta: arrays [C].
      weights: array [N, ...], or None.
      groups: list over groups of lists over their towers of numbers of rows.
      epsilon: float.
      dtype: of every intermediate result.

    Returns:
      `Results`.
    """
    x, dy = (np.moveaxis(np.asarray(a, dtype), axis, -1) for a in (x, dy))
    gamma, beta, epsilon = (np.asarray(a, dtype) for a in (gamma, beta, epsilon))
    ends = np.cumsum([rows for group in groups for rows in group])[:-1]
    towers = list(zip(*(np.split(a, ends) for a in (x, dy, _weights_of(x, weights).astype(dtype)))))
    ys, dxs, d_gamma, d_beta, first = [], [], 0, 0, 0
    for group in groups:
        y, dx, s, t = _group_in_steps(towers[first:first + len(group)], gamma, beta, epsilon)
        ys, dxs, d_beta, d_gamma, first = ys + y, dxs + dx, d_beta + s, d_gamma + t, first + len(group)
    y, dx = (np.moveaxis(np.concatenate(parts), -1, axis) for parts in (ys, dxs))
    return Results(y, dx, d_gamma, d_beta, *_merge([_tower_moments(part, w) for part, _, w in towers]))


def _group_in_steps(towers, gamma, beta, epsilon):
    """Returns lists over towers of y and dx, and the sums over towers of dy and of dy xhat."""
    mean, variance, count = _merge([_tower_moments(part, w) for part, _, w in towers])
    inverse = 1 / np.sqrt(variance + epsilon)
    hats = [(part - mean) * inverse for part, _, _ in towers]
    s = sum(_sum(d) for _, d, _ in towers)
    t = sum(_sum(d * hat) for (_, d, _), hat in zip(towers, hats))
    share = _inverse(count)
    dxs = [gamma * inverse * (d - w[..., None] * (s + hat * t) * share) for (_, d, w), hat in zip(towers, hats)]
    return [gamma * hat + beta for hat in hats], dxs, s, t


def _tower_moments(x, weights):
    """Returns the mean, the centred squares and the count of one tower."""
    count = weights.sum(keepdims=True).reshape([1])  # beside a Python number a scalar of NumPy would become float64
    share = _inverse(count)
    shift = _weighted_sum(x, weights) * share
    centred = x - shift
    rest = _weighted_sum(centred, weights)
    squares = _weighted_sum(np.square(centred), weights) - np.square(rest) * share
    return shift + rest * share, np.maximum(squares, 0), count


def _merge(moments):
    """Returns the mean, the biased variance and the count of several towers together."""
    count = sum(n for _, _, n in moments)
    share = _inverse(count)
    mean = sum(n * m for m, _, n in moments) * share
    return mean, sum(squares + n * np.square(m - mean) for m, squares, n in moments) * share, count


def _inverse(count):
    return np.divide(1, count, out=np.zeros_like(count), where=count > 0)  # where nothing is counted all moments are zero


def _sum(x):
    return x.sum(tuple(range(x.ndim - 1)))


def _weighted_sum(x, weights):
    return _sum(x * weights[..., None])


def _weights_of(x, weights):
    return np.ones(x.shape[:-1]) if weights is None else np.broadcast_to(weights, x.shape[:-1]).astype(np.float64)


def _moments(x, weights):
    count = weights.sum()
    mean = _weighted_sum(x, weights) / max(count, 1e-300)
    return mean, _weighted_sum((x - mean) ** 2, weights) / max(count, 1e-300), count
