"""What a case of sync_batch_norm is to come to, and how near: the textbook in float64, and the same steps in NumPy.

Per channel the results are NumPy's within a tolerance where a channel has at least 8 values whose mean is at most 10 standard
deviations; beyond that they are as near as the same steps come in NumPy. Rounded inputs are what NumPy is given too.
"""
import numpy as np
import tensorflow.compat.v1 as tf

from tests.batch_norm_oracle import frozen, gradients, group_variances, in_steps, normalized

# Of the largest value. Moving averages and gradients of gamma and beta are float32 under float16 inputs, and held to that.
TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
UNIT = {"float64": 2.0 ** -53, "float32": 2.0 ** -24, "float16": 2.0 ** -11, "bfloat16": 2.0 ** -8}  # of rounding to nearest
UNDERFLOW = {"float16": 2.0 ** -25}  # is rounded to 0; the other dtypes reach below all that stands here
FACTOR = 4  # of the error of the same steps in NumPy, for few values and large means, on top of the tolerance
# How often what cancels on the way may have been rounded where chance spared NumPy's steps: half the root of a block of 256 rows,
# which are added row to row.
ROUNDINGS = 8


def expect(case, data):
    """Returns what the textbook makes of a case in float64, by name."""
    common = data.x, data.dy, case.axis
    if not case.is_trained:
        results = frozen(*common, data.gamma, data.beta, data.moving_mean, data.moving_variance, case.epsilon)
        return _by_name(case, data, *results, moments=None)
    y, *moments = normalized(data.x, case.axis, data.gamma, data.beta, data.weights, case.ends_of_groups, case.epsilon)
    slopes = gradients(*common, data.gamma, data.weights, case.ends_of_groups, case.epsilon)
    return _by_name(case, data, y, *slopes, moments=moments)


def expect_in_steps(case, data):
    """Returns what the steps of towers make of a case in NumPy, in the dtype of the layer's moments, by name."""
    results = in_steps(data.x, data.dy, case.axis, data.gamma, data.beta, data.weights, case.groups, case.epsilon,
                       np.dtype(case.stored).type)
    assert all(result.dtype == case.stored for result in results)
    return _by_name(case, data, *results[:4], moments=results[4:])


def _by_name(case, data, y, dx, d_gamma, d_beta, moments):
    results = {"y": y, "dx": dx, "moving_mean": data.moving_mean, "moving_variance": data.moving_variance}
    results.update({"d_gamma": d_gamma} if case.scale else {}, **({"d_beta": d_beta} if case.center else {}))
    if moments is not None and moments[2] > 0:
        mean, variance, count = moments
        rank, keep = len(case.shape), case.momentum
        fused_axes = {4: (1, 3)} if tf.__version__.startswith("1.") else {4: (1, 3), 5: (1, 4)}
        if case.axis % rank in fused_axes.get(rank, ()) and case.dtype != "float64":
            variance = variance * (count / max(count - 1, 1))
        results["moving_mean"] = keep * data.moving_mean + (1 - keep) * mean
        results["moving_variance"] = keep * data.moving_variance + (1 - keep) * variance
    return results


def sums_of_random_sign(case, data):
    """Returns how large sums of so many terms are where nothing but chance cancels, a channel, by name."""
    dy, hat = data.dy, expect(case, data._replace(gamma=1.0, beta=0.0))["y"]
    return {name: np.sqrt(np.square(np.moveaxis(terms, case.axis, -1)).sum(tuple(range(dy.ndim - 1))))
            for name, terms in (("d_gamma", dy * hat), ("d_beta", dy))}


def sizes_that_cancel(case, data):
    """Returns how large, a channel, what is summed or subtracted on the way to each result is, by name.

    Where a result is small because large terms cancel, it can't be known better than to their rounding: a mean to that of the
    largest x, which in standard deviations is `lost`; a variance to that of the means of towers; a sum to that of its terms; a
    moving average to that of its value before.
    """
    x, dy = (np.moveaxis(a, case.axis, -1) for a in (data.x, data.dy))
    axes = tuple(range(x.ndim - 1))
    variances = data.moving_variance[None]
    if case.is_trained:
        variances = group_variances(data.x, case.axis, data.weights, case.ends_of_groups)
    inverse, largest_x, gamma = 1 / np.sqrt(variances.min(0) + case.epsilon), np.abs(x).max(axes), np.abs(data.gamma)
    lost = np.maximum(largest_x * inverse, 1)
    std, = np.sqrt(group_variances(data.x, case.axis, data.weights, []))
    # The rounding of the largest x, squared, is what the variance of a constant channel may come to.
    squares = largest_x * (std + UNIT[case.stored] * largest_x)
    return {"y": gamma * lost + np.abs(data.beta), "dx": gamma * inverse * lost * np.abs(dy).max(axes),
            "d_gamma": np.abs(dy).sum(axes) + lost * np.sqrt(np.square(dy).sum(axes)), "d_beta": np.abs(dy).sum(axes),
            "moving_mean": np.maximum(largest_x, np.abs(data.moving_mean)),
            "moving_variance": np.maximum(squares, data.moving_variance)}


def largest_a_channel(case, data, name, a, wanted):
    """Returns the largest absolute value of each channel where a result is defined: [C]."""
    if name not in ("y", "dx"):
        return np.abs(a)
    # Where nothing was counted y is x / sqrt(epsilon), which float16 may not hold.
    defined = np.logical_not(np.abs(wanted) > (65504 if case.dtype == "float16" else np.inf))
    if case.poison is not None:
        defined &= np.expand_dims(data.weights > 0, case.axis % a.ndim)
    return np.moveaxis(np.abs(np.where(defined, a, 0)), case.axis, -1).max(tuple(range(a.ndim - 1)))


@np.errstate(invalid="ignore")  # of NaN where x is poison
def assert_law(case, data, ours, wanted, steps=None):
    """Asserts that results are those wanted within the tolerance; with `steps`, that and as near as `steps` are."""
    assert set(ours) == set(wanted)
    sums, cancel = sums_of_random_sign(case, data), sizes_that_cancel(case, data)
    for name in sorted(ours):
        dtype = case.dtype if name in ("y", "dx") else case.stored
        error, value = (largest_a_channel(case, data, name, a, wanted[name]) for a in (ours[name] - wanted[name], wanted[name]))
        allowed = TOLERANCE[dtype] * np.maximum(value, sums.get(name, 0)) + UNDERFLOW.get(dtype, 0)
        if steps is not None and dtype == "float64":
            allowed += TOLERANCE[dtype] * cancel[name]  # what is wanted was rounded likewise
        elif steps is not None or name.startswith("moving"):
            allowed += ROUNDINGS * UNIT[case.stored] * cancel[name]
        if steps is not None:
            allowed += FACTOR * largest_a_channel(case, data, name, steps[name] - wanted[name], wanted[name])
        worst = np.argmax(error - allowed)  # NaN, if there is one
        assert error[worst] <= allowed[worst], "%s of channel %d is off by %g, and %g is allowed" % (
            name, worst, error[worst], allowed[worst])
