"""Inputs of an op with every placement, made of a batch as models make them, and the op's outputs in towers and in one tower."""
import itertools
import random
import zlib
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.util import tf_inspect

import towers
from tests.support import build, session_as_written

__all__ = ["Combination", "Form", "Sample", "combinations", "differences", "op_def", "of"]

SIZES = dict(a=2, b=3, c=3, d=2, h=5, w=4, i=3, j=2, k=5, l=2, m=3, n=2, p=1, q=3, r=2)
# Kind of an input -> the numbers it lies between.
INTERVALS = {"real": (-1.7, 1.9), "pos": (0.3, 2.1), "unit": (0.1, 0.9), "sym": (-0.9, 0.9), "big": (1.2, 3.0),
             "wide": (-6.3, 6.9),
             "int": (0, 5), "signed": (-3, 4), "nonzero": (1, 6), "bool": (0, 2)}
WIDTH = 600


class Form(NamedTuple):
    """How an input is made: a kind of placement, and the axis that it is along."""
    kind: str
    axis: Optional[int] = None


class Input(NamedTuple):
    """An input of a sample: a letter or a digit for each axis, its kind, None for what is given as it is."""
    labels: str
    kind: str


class Sample(NamedTuple):
    """A call of an op: `inputs`, those of them that are given as they are, attributes, and what calls it."""
    inputs: tuple
    given: tuple
    attrs: dict
    dtype: Any
    call: Any
    sizes: dict
    forms: Any


class Combination(NamedTuple):
    """Placements of all inputs of a sample.

    Attributes:
      long: dict from the labels of axes that are as long as the batch to how many blocks of it they have.
      forms: tuple of `Form`; None for inputs that are given.
    """
    long: dict
    forms: tuple

    @property
    def placed(self):
        """int, how many inputs are not the same in all towers."""
        return sum(form is not None and form.kind != "replicated" for form in self.forms)

    def __str__(self):
        return "%s with %s" % (", ".join("-" if form is None else form.kind + ("" if form.axis is None else " %d" % form.axis)
                                         for form in self.forms), self.long)


def of(inputs, *given, **attrs):
    """Returns a `Sample`.

    Args:
      inputs: str, one word an input: letters are axes, digits axes of that size, "1" among them,
      "." is none; "?" takes the next of
        `given`. Behind a colon stands the kind, a key of `INTERVALS`, "complex", or "in_i": numbers of entries along axis i.
      *given: arrays, or functions of the inputs made so far.
      **attrs: of the op, but for `dtype` of real inputs, `call`, a function of the inputs instead of the op, `sizes`, a dict from
        labels to sizes, and `forms`, the only kinds of placements.
    """
    words = [word.partition(":") for word in inputs.split()]
    parsed = tuple(Input("" if labels == "." else labels, None if labels == "?" else kind or "real") for labels, _, kind in words)
    return Sample(parsed, given, attrs, attrs.pop("dtype", tf.float64), attrs.pop("call", None),
                  dict(SIZES, **attrs.pop("sizes", {})), attrs.pop("forms", None))


def op_def(name):
    """Returns the definition of a type of ops, None where this TensorFlow has none."""
    if hasattr(op_def_registry, "get"):
        return op_def_registry.get(name)
    return op_def_registry.get_registered_ops().get(name)


def _raw(name, inputs, attrs):
    """Makes an op of its inputs in their order."""
    args, values, left = op_def(name).input_arg, {}, list(inputs)
    lists = [arg for arg in args if arg.number_attr or arg.type_list_attr]
    count = (len(inputs) - (len(args) - len(lists))) // max(len(lists), 1)
    for arg in args:
        if arg in lists:
            values[arg.name], left = left[:count], left[count:]
        else:
            values[arg.name] = left.pop(0)
    function = getattr(tf.raw_ops, name)
    taken = tf_inspect.getfullargspec(function).args
    known = list(values) + [attr.name for attr in op_def(name).attr] + ["name"]
    others = iter([each for each in taken if each not in known])  # what Python calls otherwise
    return function(**{each if each in taken else next(others): value for each, value in values.items()}, **attrs)


def combinations(name, sample, most):
    """Returns `Combination`s in which each input has each form, and others, so many together if there are as many."""
    letters = sorted({label for each in sample.inputs for label in each.labels if label.isalpha()})
    found = []
    for count in (0, 1, 2):
        for chosen in itertools.combinations(letters, count):
            for blocks in itertools.product((1, 2), repeat=count):
                long = dict(zip(chosen, blocks))
                for forms in itertools.product(*[_forms(each, long, sample) for each in sample.inputs]):
                    if any(form is not None and form.kind != "replicated" for form in forms) and _is_used(sample, long, forms):
                        found.append(Combination(long, forms))
    random.Random(zlib.crc32(name.encode())).shuffle(found)
    found.sort(key=lambda each: each.placed > 1)
    seen, first, others = set(), [], []
    for each in found:
        new = {(k, form) for k, form in enumerate(each.forms)} - seen
        (first if new else others).append(each)
        seen |= new
    several = [each for each in others if each.placed > 1]
    others = several + [each for each in others if each not in several]
    return first + others[:max(most - len(first), 0)]


def _is_used(sample, long, forms):
    """Tells whether some input has the batch along each axis that is as long as it, or is what all have of it."""
    return all(any(form is not None and form.kind in ("sharded", "blocks", "numbers") and each.labels[form.axis] == label
                   for each, form in zip(sample.inputs, forms)) or len(long) == 1 for label in long)


def _forms(each, long, sample):
    if each.kind is None:
        return [None]
    found = [Form("replicated")]
    for axis, label in enumerate(each.labels):
        if label in long:
            found.append(Form("blocks" if long[label] > 1 else "sharded", axis))
    if each.kind not in ("bool",):
        found.append(Form("sum"))
    if each.kind == "num":
        found.append(Form("size"))
    if each.kind not in ("bool", "int", "signed", "nonzero", "num") and not each.kind.startswith("in_"):
        found.append(Form("mean"))
    if each.kind.startswith("in_") and len(each.labels) == 1 and long.get(each.labels) == 1 and long.get(each.kind[3:]) == 1:
        found.append(Form("numbers", 0))
    return [form for form in found if sample.forms is None or form.kind in sample.forms or form.kind == "replicated"]


class _Batch:
    """Makes inputs of `features` and `numbers` [n, WIDTH], `weights` [n] that sum to 1, and `pick` [n], 1 for one example."""

    def __init__(self, features, numbers, weights, pick, total):
        self.features, self.numbers, self.weights, self.pick, self.total = features, numbers, weights, pick, total
        self._whole = {}

    def make(self, k, each, sample, combination):
        """Returns an input."""
        form, long = combination.forms[k], combination.long
        if form.kind == "numbers":
            return tf.range(tf.shape(self.features)[0])
        if each.kind == "num":
            return self._number(k, each, form)
        sizes = [int(label) if label.isdigit() else long[label] * self.total if label in long else sample.sizes[label]
                 for label in each.labels]
        is_integer = each.kind in ("int", "signed", "nonzero", "bool") or each.kind.startswith("in_")
        limits = (0, _size(each.kind[3:], sample, combination, self.total)) if each.kind.startswith("in_") else INTERVALS.get(
            each.kind, (-1.7, 1.9))
        long_axes = [axis for axis, label in enumerate(each.labels) if label in long]
        if form.kind == "replicated" and not long_axes:
            rng = np.random.RandomState(100 * k + len(sizes))
            found = tf.constant(rng.randint(*limits, size=sizes).astype(np.int32) if is_integer else rng.uniform(*limits,
                                                                                                                 size=sizes))
        elif is_integer:
            found = self._integers(k, each, form, long, sizes, limits)
        else:
            found = self._reals(k, each, form, long, sizes, limits)
        if each.kind == "bool":
            return tf.equal(found, 1)
        if each.kind == "complex":
            return tf.cast(found, tf.complex128) * tf.constant(0.6 + 0.8j, tf.complex128)
        return found if is_integer or sample.dtype == tf.float64 else tf.cast(found, sample.dtype)

    def _number(self, k, each, form):
        sizes = tuple(int(label) for label in each.labels)
        if form.kind == "size":
            n = tf.shape(self.features)[0]
            return tf.stack([(n + i) * 2 for i in range(sizes[0])]) if sizes else n * 2 if k else n
        known = np.full(sizes, 3 + k, np.int32)
        if form.kind == "sum":
            return tf.reduce_sum(tf.reshape(self.pick, [-1] + [1] * len(sizes)) * known, 0)
        return tf.constant(known)

    def _terms(self, k, each, form, long, sizes, source):
        """Returns what an input is made of: one tensor with the examples along axis 0 and all others, and what is whole."""
        own = form.axis if form.kind in ("sharded", "blocks") else None
        short = [1 if label in long else size for label, size in zip(each.labels, sizes)]
        width = int(np.prod(short, dtype=int))
        first = 41 * k % (WIDTH - width)
        examples = tf.reshape(source[:, first:first + width], [-1] + short)
        whole = [tf.reshape(self._whole_of(source, axis + 7 * k, long[label]),
                            [-1 if a == axis else 1 for a in range(len(sizes))])
                 for axis, label in enumerate(each.labels) if label in long and axis != own]
        return examples, whole

    def _whole_of(self, source, column, blocks):
        """Returns a column of the whole batch, in every tower, once or in two blocks."""
        key = source.name, column, blocks
        if key not in self._whole:
            own = source[:, column]
            own = tf.concat([own, own * own if own.dtype.is_floating else own + 1], 0) if blocks > 1 else own
            self._whole[key] = tf.reduce_max(tf.expand_dims(own, 0) + tf.zeros_like(source[:, :1]), 0)
        return self._whole[key]

    def _reals(self, k, each, form, long, sizes, limits):
        examples, whole = self._terms(k, each, form, long, sizes, self.features)
        count, (low, high) = 1 + len(whole), limits

        def mapped(value):
            return low + (high - low) / count * value
        if form.kind == "replicated":
            short = [1 if label in long else size for label, size in zip(each.labels, sizes)]
            return mapped(_added(tf.constant(np.random.RandomState(k).uniform(size=short)), whole))
        if form.kind in ("sharded", "blocks"):
            own = _moved(examples, form.axis)
            own = tf.concat([own, 1 - own], form.axis) if form.kind == "blocks" else own
            return mapped(_added(own, whole))
        found = mapped(_added(examples, [tf.expand_dims(term, 0) for term in whole]))
        if form.kind == "mean":
            return tf.reduce_mean(found, 0)
        return tf.reduce_sum(found * tf.reshape(self.weights, [-1] + [1] * len(sizes)), 0)

    def _integers(self, k, each, form, long, sizes, limits):
        examples, whole = self._terms(k, each, form, long, sizes, self.numbers)
        low, high = limits
        if form.kind == "replicated":
            short = [1 if label in long else size for label, size in zip(each.labels, sizes)]
            found = _added(tf.constant(np.random.RandomState(k).randint(0, 99, short).astype(np.int32)), whole)
        elif form.kind == "sum":
            found = _added(examples, [tf.expand_dims(term, 0) for term in whole])
            return tf.reduce_sum((low + found % (high - low)) * tf.reshape(self.pick, [-1] + [1] * len(sizes)), 0)
        else:
            own = _moved(examples, form.axis)
            found = _added(tf.concat([own, own + 1], form.axis) if form.kind == "blocks" else own, whole)
        return low + found % (high - low)


def _size(label, sample, combination, total):
    return combination.long[label] * total if label in combination.long else sample.sizes[label]


def _added(value, terms):
    for term in terms:
        value = value + term
    return value


def _moved(examples, axis):
    """Moves the examples from axis 0 to the place of an axis that has one entry: [n, .., 1, ..] to [.., n, ..]."""
    rank = examples.shape.rank
    order = list(range(1, axis + 1)) + [0] + list(range(axis + 2, rank))
    return tf.transpose(tf.squeeze(examples, [axis + 1]), [a if a <= axis else a - 1 for a in order])


def _called(name, sample, inputs):
    if sample.call is not None:
        found = sample.call(*inputs, **sample.attrs)
    else:
        found = _raw(name, inputs, sample.attrs)
    return [each for each in tf.nest.flatten(found) if each.dtype not in (tf.resource, tf.variant)]


def _key(k, each, sample, combination):
    """Returns what tells an input from others."""
    labels = set(each.labels + (each.kind[3:] if each.kind.startswith("in_") else ""))
    return (k, each, combination.forms[k], sample.dtype, tuple((label, sample.sizes.get(label), combination.long.get(label))
                                                               for label in sorted(labels)))


def _is_real(each):
    return each.kind in ("real", "pos", "unit", "sym", "big", "wide", "complex")


def _model(cases, total, slopes):
    """Returns a model function that makes ops of inputs with all these placements, and a loss that is not linear in them.

    Args:
      slopes: list of bool, for each case whether TensorFlow knows its gradient; an empty one is filled by the model function.
    """
    def model_fn(features, numbers, weights, pick):
        batch = _Batch(features, numbers, weights, pick, total)
        keys = sorted({_key(k, each, sample, combination) for _, sample, combination in cases
                       for k, each in enumerate(sample.inputs) if each.kind is not None and _is_real(each)}, key=repr)
        theta = tf.get_variable("theta", [max(len(keys), 1)], tf.float64, tf.ones_initializer())
        factors, made, found, losses = dict(zip(keys, tf.unstack(theta))), {}, [], []
        for name, sample, combination in cases:
            inputs, given = [], iter(sample.given)
            for k, each in enumerate(sample.inputs):
                if each.kind is None:
                    value = next(given)
                    inputs.append(value(*inputs) if callable(value) else value)
                    continue
                key = _key(k, each, sample, combination)
                if key not in made:
                    value = batch.make(k, each, sample, combination)
                    made[key] = value * tf.cast(factors[key], value.dtype) if key in factors else value
                inputs.append(made[key])
            outputs = _called(name, sample, inputs)
            found.append(outputs)
            losses.append([])
            for output in outputs:
                for part in (tf.real(output), tf.imag(output)) if output.dtype.is_complex else (output,):
                    if part.dtype.is_floating:
                        losses[-1].append(tf.reduce_sum(tf.sin(
                            part if part.dtype == tf.float64 else tf.cast(part, tf.float64))))
        if not slopes:
            slopes.extend(_have_slopes(losses, theta))
        result = {"outputs": found}
        sloped = [loss for case, has_slope in zip(losses, slopes) if has_slope for loss in case]
        if sloped:
            result["loss"] = loss = tf.add_n(sloped) / total
            inner = tf.gradients(loss, [theta])[0]
            if inner is not None:
                result["inner"] = inner
        return result
    return model_fn


def _have_slopes(losses, theta):
    """Returns for which cases TensorFlow has a gradient, which it may lack for an op or for unknown sizes: halves are tried."""
    if _has_slope([loss for case in losses for loss in case], theta):
        return [True] * len(losses)
    half = len(losses) // 2
    return _have_slopes(losses[:half], theta) + _have_slopes(losses[half:], theta) if half else [False]


def _has_slope(losses, theta):
    try:
        return not losses or bool(tf.gradients(losses, [theta]))
    except (LookupError, TypeError, ValueError):
        return False


def _values(total):
    rng = np.random.RandomState(7)
    weights = rng.uniform(0.5, 1.5, total)
    return [rng.uniform(0.02, 0.98, (total, WIDTH)), rng.randint(0, 10 ** 6, (total, WIDTH)).astype(np.int32),
            weights / weights.sum(), (np.arange(total) == total // 2).astype(np.int32)]


def _run(fetches, feeds):
    with session_as_written() as made:
        return made.run(fetches, feeds)


def _plain(cases, total, slopes):
    with tf.Graph().as_default():
        given = [tf.placeholder(value.dtype, (None,) + value.shape[1:]) for value in _values(total)]
        result = _model(cases, total, slopes)(*given)
        return _run(result, dict(zip(given, _values(total))))


def _on_towers(cases, split, is_known, slopes):
    ends = np.cumsum((0,) + split)
    with tf.Graph().as_default():
        parts, feeds = [], {}
        for start, end in zip(ends, ends[1:]):
            part = []
            for value in _values(ends[-1]):
                holder = tf.placeholder(value.dtype, (end - start if is_known else None,) + value.shape[1:])
                feeds[holder] = value[start:end]
                part.append(holder)
            parts.append(tuple(part))
        replicas = build(towers.whole_batch(_model(cases, int(ends[-1]), slopes)), towers.PerTower(parts), len(split))
        result = dict(replicas.merged())
        if "inner" in result and not is_known:
            optimizer = tf.train.GradientDescentOptimizer(1.0)
            (gradient, _), = towers.average_gradients(replicas, towers.compute_gradients(replicas, optimizer))
            result["slope"] = tf.convert_to_tensor(gradient)
        return _run(result, feeds)


def differences(cases, split, is_known):
    """Returns what ops compute otherwise in towers than in one tower on the whole batch, a list of str.

    Args:
      cases: list of triples of an op's type, a `Sample` and a `Combination`, all made in one graph.
      split: tuple of int, the examples of each tower.
      is_known: bool, whether their numbers are known while the graph is built.
    """
    total, slopes = sum(split), []
    try:
        expected = _plain(cases, total, slopes)
        actual = _on_towers(cases, split, is_known, slopes)
    except Exception as error:
        said = "%s: %s" % (type(error).__name__, _said(error))
        if len(cases) == 1:
            return ["%s of %s: %s" % (cases[0][0], cases[0][2], said)]
        return _of_halves(cases, split, is_known) or ["all together: " + said]
    found = []
    for number, (name, sample, combination) in enumerate(cases):
        for output, (one, other) in enumerate(zip(actual["outputs"][number], expected["outputs"][number])):
            _compare("%s of %s: output %d" % (name, combination, output), one, other, sample.dtype, found)
    dtype = tf.float32 if any(sample.dtype == tf.float32 for _, sample, _ in cases) else tf.float64
    for key, one in (("inner", "inner"), ("slope", "inner")):
        if key in actual:
            _compare("%s gradient" % key, actual[key], expected[one], dtype, found)
    if found and len(cases) > 1 and found[0].startswith(("inner", "slope")):
        return _of_halves(cases, split, is_known) or found
    return found


def _said(error):
    """Returns what an error says, without TensorFlow's stacks."""
    return " ".join(line for line in str(error).partition("Original stack trace")[0].splitlines() if not line.startswith((
        "Graph exec", "Detected", "  File", "    ")))[:500]


def _of_halves(cases, split, is_known):
    return [each for half in (cases[:len(cases) // 2], cases[len(cases) // 2:]) for each in differences(half, split, is_known)]


def _compare(what, actual, expected, dtype, found):
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        found.append("%s has the shape %s, not %s" % (what, actual.shape, expected.shape))
    elif expected.dtype.kind in "fc":
        tolerance = 3e-9 if dtype == tf.float64 and expected.dtype.itemsize >= 8 else 3e-4
        if not np.allclose(actual, expected, tolerance, tolerance, equal_nan=True):
            found.append("%s is %s, not %s" % (what, actual.ravel()[:6], expected.ravel()[:6]))
    elif not np.array_equal(actual, expected):
        found.append("%s is %s, not %s" % (what, actual.ravel()[:6], expected.ravel()[:6]))
