"""Whole models at random: what Hypothesis draws is a description, plain values that print well.

`tests.whole_model_layers` builds a model function of one, `tests.whole_model_training` trains it on towers and without them.
"""
import itertools
from typing import Any, NamedTuple, Optional

import numpy as np
from hypothesis import strategies as st

from tests.support import has_tf_layers

CHANNELS, TIME, WORDS, CLASSES = 3, 4, 5, 3
INPUTS = {"vectors": [CHANNELS], "sequences": [TIME, CHANNELS], "images": [3, 4, CHANNELS],
          "images, channels first": [CHANNELS, 3, 4]}
STATES = ("counter", "running mean", "power iteration", "average of weights")
SHAPES = ("rows", "time first", "positions")  # in which some layers of a model see its examples
KERNELS = ("weight norm", "standardized", "symmetric")
FUNCTIONS = ("tanh", "relu", "softplus", "sin", "elu")
LOSSES = ("scalar", "dict", "weighted", "weighted by all", "two", "steps")
PLACEMENTS = ("host", "first", "replicated", "round_robin", "balanced")
OPTIMIZERS = ("sgd", "momentum", "adam", "rms_prop")
TRANSFORMS = ("clip_by_global_norm", "mask_gradients", "accumulate")
POLICIES = ("first", "all", "last", "none")
DEPTHS = (1, 1, 2, 2, 3, 3, 4, 5, 6)  # most of the time is the building of graphs
# What stands where moments are taken by hand, for convert_model to find.
BY_HAND = ("moments", "squares", "weighted", "masked", "conditional", "sums", "corrected") + (
    ("tf.layers",) if has_tf_layers() else ())
OF_EXAMPLES = ("weighted", "masked", "conditional")  # those that weights or ids of examples go into


# The arguments of a `sync_batch_norm` that is an ordinary one.
SYNC = dict(momentum=0.9, epsilon=1e-3, center=True, scale=True, twice=False, mask=None, renorm=False, fused=None, unbiased=None,
            training=None, trainable=True, updates="collected", positive_axis=False)


class Layer(NamedTuple):
    """A layer that keeps the shape of its input."""
    kind: str
    options: dict = {}
    branches: tuple = ()  # of lists of layers


class Model(NamedTuple):
    """A network and its losses."""
    inputs: str
    layers: list
    loss: str
    regularized: bool
    penalty: bool  # whether the loss has slopes by the input in it, so that training takes second derivatives


class Training(NamedTuple):
    """How a model is trained, and on what."""
    sizes: list  # rows of each tower
    split: str  # "given" to each tower; a batch of a "known" or "unknown" size that the builder splits into the same sizes
    num_devices: int
    policy: str
    optimizer: str
    transforms: list
    placement: str
    resource: Optional[bool]
    repeated: bool
    rewritten: bool  # whether Grappler rewrites the graph
    seed: int


class Case(NamedTuple):
    """What is drawn."""
    model: Model
    training: Training


def layers_of(layers):
    """Yields all layers, those of branches too."""
    for layer in layers:
        yield layer
        for branch in layer.branches:
            yield from layers_of(branch)


def is_converted(model):
    """Tells whether a model has batch norms of its own, which have to be converted."""
    return any(layer.kind == "by hand" for layer in layers_of(model.layers))


def mostly(draw, usual, *others):
    """Draws a value that is the usual one in half of all cases."""
    return draw(st.sampled_from([usual] * len(others) + list(others)))


@st.composite
def batch_norms(draw, kinds, inputs, masked=True):
    """Draws a batch norm of the library, or one made by hand."""
    kind = draw(st.sampled_from(kinds))
    options = dict(
        momentum=draw(st.sampled_from([0.9, 0.99, 0.5, 0.0])), epsilon=draw(st.sampled_from([1e-3, 0.1])),
        center=mostly(draw, True, False), scale=mostly(draw, True, False), twice=mostly(draw, False, False, True))
    if kind == "by hand":
        form = draw(st.sampled_from([form for form in BY_HAND if masked or form not in OF_EXAMPLES]))
        form = "moments" if form == "corrected" and inputs == "vectors" else form  # n - 1 would be 0 in a tower of one
        twice = options["twice"] and form != "tf.layers"  # whose two updates of one moving average do not wait for each other
        mask = {"weighted": ["examples", "weights"], "masked": ["examples"]}.get(form)
        mask = mask and draw(st.sampled_from(mask))
        return Layer(kind, dict(options, form=form, twice=twice, mask=mask))
    masks = ["examples", "weights"] + ["steps"] * 2 * (inputs == "sequences")
    options.update(
        mask=mostly(draw, None, *masks) if masked else None, renorm=mostly(draw, False, False, True),
        fused=mostly(draw, None, True, False),
        unbiased=mostly(draw, None, True, False), training=mostly(draw, None, True, "fed", False),
        trainable=mostly(draw, True, True, False), updates=mostly(draw, "collected", "inline", "left alone"),
        positive_axis=draw(st.booleans()))
    return Layer(kind, options)


@st.composite
def layers(draw, inputs, kinds, depths=DEPTHS):
    """Draws a list of layers, as many as one of `depths`; branches are one level deep."""
    return [draw(_layer(inputs, kinds)) for _ in range(draw(st.sampled_from(depths)))]


@st.composite
def _layer(draw, inputs, kinds):
    kind = draw(st.sampled_from(kinds))
    if kind in ("sync", "by hand"):
        return draw(batch_norms([kind], inputs))
    if kind == "reshaped":
        shape = draw(st.sampled_from([s for s in SHAPES if s != "time first" or inputs == "sequences"]))
        inner = st.sampled_from(["by hand"] * 2 * ("by hand" in kinds) + ["sync"] * 2 + ["nonlinearity", "dense", "mixed by"])
        return Layer(kind, dict(shape=shape), ([
            draw(batch_norms([k], "vectors", False) if k in ("sync", "by hand") else _layer(inputs, [k]))
            for k in draw(st.lists(inner, min_size=1, max_size=3))],))
    if kind in ("residual", "concatenated"):
        inner = [k for k in kinds if k not in ("residual", "concatenated")]
        return Layer(kind, {}, tuple(draw(layers(inputs, inner, [1, 2])) for _ in range(1 if kind == "residual" else 2)))
    options = {
        "nonlinearity": lambda: dict(function=draw(st.sampled_from(FUNCTIONS))),
        "dense": lambda: dict(twice=mostly(draw, False, True)),
        "pool": lambda: dict(largest=draw(st.booleans())),
        "norm of examples": lambda: dict(of=draw(st.sampled_from(["layers", "instances"]))),
        "mixed by": lambda: dict(kernel=draw(st.sampled_from(KERNELS))),
        "state": lambda: dict(form=draw(st.sampled_from(STATES)), inline=draw(st.booleans())),
    }.get(kind, dict)()
    return Layer(kind, options)


def kinds_for(inputs, converted, second_derivatives):
    """Returns the kinds of layers that inputs of a kind can have."""
    kinds = ["sync"] * 4 + ["by hand"] * 4 * converted + ["nonlinearity"] * 3 + ["dense"] * 2 + [
        "residual", "concatenated", "embedding", "unused", "all_reduce", "state", "norm of examples", "gate", "mixed by",
        "turned channels", "largest channels"]
    kinds += {"vectors": [], "sequences": ["conv", "attention", "unstacked", "reshaped", "reshaped"]}.get(
        inputs, ["conv", "depthwise", "pool", "reshaped", "reshaped"])
    if second_derivatives:  # TensorFlow has none of a tf.while_loop, and of some kernels for images
        return kinds
    return kinds + ["while_loop", "cond"] + {
        "vectors": [], "sequences": ["dynamic_rnn"] * 2}.get(inputs, ["resized"])


@st.composite
def models(draw):
    """Draws a model."""
    inputs, converted = draw(st.sampled_from(sorted(INPUTS))), draw(st.booleans())
    # A model that takes gradients through a batch norm can't be converted.
    penalty = not converted and mostly(draw, False, False, True)
    losses = [loss for loss in LOSSES if loss != "steps" or inputs == "sequences"]
    return Model(inputs, draw(layers(inputs, kinds_for(inputs, converted, penalty))), draw(st.sampled_from(losses)),
                 draw(st.booleans()), penalty)


@st.composite
def trainings(draw, numbers_of_towers=(2, 3, 2, 3, 1, 4, 5)):
    """Draws a training."""
    num_towers = draw(st.sampled_from(numbers_of_towers))
    split = draw(st.sampled_from(["given", "known", "unknown"]))
    if split == "given":
        sizes = draw(st.lists(st.sampled_from([1, 2, 3, 5, 1, 2, 3, 5, 0]), min_size=num_towers, max_size=num_towers))
        sizes[0] += max(0, 7 - sum(sizes))  # enough for moments
    else:
        whole, rest = divmod(draw(st.integers(7, 12)), num_towers)
        sizes = [whole + (i < rest) for i in range(num_towers)]
    return Training(
        sizes, split, draw(st.integers(1, num_towers)), mostly(draw, *POLICIES), draw(st.sampled_from(OPTIMIZERS)),
        draw(st.lists(st.sampled_from(TRANSFORMS), max_size=2, unique=True)), draw(st.sampled_from(PLACEMENTS)),
        draw(st.sampled_from([None, True])), mostly(draw, False, False, True), mostly(draw, False, False, True),
        draw(st.integers(0, 10 ** 6)))


@st.composite
def cases(draw, **kwargs):
    """Draws a model and how it is trained."""
    model, training = draw(models()), draw(trainings(**kwargs))
    if model.loss == "weighted by all":  # whose weights add up to the number of towers, which accumulate() keeps in a variable
        training = training._replace(transforms=[name for name in training.transforms if name != "accumulate"])
    return Case(model, training)


def features(case):
    """Returns a set of strings, all that a case has of what may be drawn."""
    model, training = case
    found = {model.inputs, "loss " + model.loss, "depth %d" % len(model.layers), "%d towers" % len(training.sizes)}
    found.update("%s %s" % pair for pair in model._asdict().items() if isinstance(pair[1], bool))
    for name, value in training._asdict().items():
        found.update("%s %s" % (name, v) for v in (value if name == "transforms" else [value] if name != "sizes" else []))
    found.add("empty tower" if 0 in training.sizes else "uneven" if len(set(training.sizes)) > 1 else "even")
    for layer in layers_of(model.layers):
        found.add(layer.kind)
        found.update("%s %s %s" % (layer.kind, *option) for option in layer.options.items())
    return found - {"seed %d" % training.seed}


def make_batches(case, count):
    """Returns as many batches: dicts of arrays over the rows of all towers, and a scalar."""
    rows, batches = sum(case.training.sizes), []
    for number in range(count):
        rng = np.random.RandomState(case.training.seed + number * (not case.training.repeated))  # a loop is fed once
        valid = (rng.rand(rows) < 0.7) * 1.0
        valid[:4] = 1  # rows of which moments are taken
        lengths = np.where(valid, rng.randint(1, TIME + 1, rows), rng.randint(0, TIME + 1, rows))
        batches.append(dict(
            x=rng.randn(rows, *INPUTS[case.model.inputs]), ids=rng.randint(0, WORDS, rows), labels=rng.randint(0, CLASSES, rows),
            valid=valid, lengths=lengths.astype(np.int32), rate=np.float64(rng.rand())))
    return batches


def divided(batch: dict, sizes: list) -> Any:
    """Returns a list over towers of their parts of a batch."""
    ends = np.cumsum(sizes)
    return [{key: value[end - n:end] if value.ndim else value for key, value in batch.items()} for n, end in zip(sizes, ends)]


def all_features():
    """Returns those that have to be drawn at times: each kind of layer, and each value of each option."""
    return {
        *INPUTS, "sync", "by hand", "nonlinearity", "dense", "residual", "concatenated", "embedding", "unused", "all_reduce",
        "state", "conv", "depthwise", "pool", "while_loop", "cond", "dynamic_rnn", "norm of examples", "gate", "empty tower",
        "uneven", "even", "mixed by", "turned channels", "largest channels", "attention", "unstacked", "reshaped", "resized",
        *("mixed by kernel " + name for name in KERNELS), *("reshaped shape " + name for name in SHAPES),
        *("norm of examples of " + what for what in ("layers", "instances")),
        *("loss " + kind for kind in LOSSES), *("depth %d" % n for n in DEPTHS), *("%d towers" % n for n in range(1, 6)),
        *("nonlinearity function " + name for name in FUNCTIONS), *("by hand form " + form for form in BY_HAND),
        *("placement " + name for name in PLACEMENTS), *("optimizer " + name for name in OPTIMIZERS),
        *("transforms " + name for name in TRANSFORMS), *("policy " + name for name in POLICIES),
        *("split " + name for name in ("given", "known", "unknown")), *("resource %s" % flag for flag in (None, True)),
        *("sync mask %s" % mask for mask in (None, "examples", "weights", "steps")),
        *("sync training %s" % value for value in (None, True, "fed", False)),
        *("sync updates " + where for where in ("collected", "inline", "left alone")),
        *("sync %s %s" % pair for pair in itertools.product(("fused", "unbiased"), (None, True, False))),
        *("%s %s" % pair for pair in itertools.product((
            "sync twice", "sync renorm", "sync center", "sync scale", "sync trainable", "sync positive_axis", "by hand twice",
            "dense twice", "pool largest", "state inline", "regularized", "penalty", "repeated", "rewritten"), (True, False))),
        *("sync momentum %s" % m for m in (0.9, 0.99, 0.5, 0.0)), *("sync epsilon %s" % e for e in (1e-3, 0.1)),
        *("state form " + form for form in STATES),
        *("by hand mask %s" % mask for mask in (None, "examples", "weights"))}
