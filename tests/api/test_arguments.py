"""Whatever is handed to a public function in the place of an argument, the error is a sentence of the library's, by its name.

What is lost without this file: a misplaced argument would be an error of TensorFlow's or Python's about something else.
"""
import dis
import inspect
import pathlib
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
import towers.testing
from tests.support import build
from towers.api import arguments

HERE = [pathlib.Path(package.__file__).parent for package in (towers, tf_syncbn)]
X = np.random.RandomState(0).randn(6, 3)

# What a function of the caller's says that is called with other arguments than it takes, and tf.get_variable of an initializer.
OF_THE_CALLERS = r"\(\) (takes|got|missing) .*argument|^Initializer type|^If initializer is a constant"


def model_fn(x):
    return tf.reduce_mean(tf.square(x * tf.get_variable("w", [3], x.dtype, tf.ones_initializer())))


def optimizer():
    return tf.train.GradientDescentOptimizer(0.1)


def replicas():
    return build(model_fn, (X,), 2)


def gradients(found):
    return towers.compute_gradients(found, optimizer())


def of_towers(function, **others):
    found = replicas()
    return function, dict({name: value(found) if callable(value) else value for name, value in others.items()}, replicas=found)


CALLS = {  # a function of the library -> a function that returns it and right arguments
    "TowerBuilder": lambda: (towers.TowerBuilder, {"devices": ["/cpu:0"]}),
    "TowerBuilder.build": lambda: (towers.TowerBuilder(["/cpu:0"] * 2).build, {
        "model_fn": model_fn, "batch": (tf.constant(X),)}),
    "PerTower": lambda: (towers.PerTower, {"batches": [(X,)]}),
    "accumulate": lambda: (towers.accumulate, {"num_batches": 2}),
    "all_gather": lambda: (towers.all_gather, {"tensor": tf.constant(X)}),
    "all_reduce": lambda: (towers.all_reduce, {"tensor": tf.constant(X)}),
    "average_gradients": lambda: of_towers(towers.average_gradients, tower_grads=gradients),
    "clip_by_global_norm": lambda: (towers.clip_by_global_norm, {"clip_norm": 1.0}),
    "clip_by_value": lambda: (towers.clip_by_value, {"least": -1.0, "most": 1.0}),
    "collect_update_ops": lambda: of_towers(towers.collect_update_ops),
    "compute_gradients": lambda: of_towers(towers.compute_gradients, optimizer=lambda _: optimizer()),
    "convert_model": lambda: (tf_syncbn.convert_model, {"model_fn": model_fn}),
    "mask_gradients": lambda: (towers.mask_gradients, {"masks": {"w": np.ones(3)}}),
    "minimize": lambda: of_towers(towers.minimize, optimizer=lambda _: optimizer()),
    "placement_rule": lambda: (towers.placement_rule, {"op_type": "Sin"}),
    "repeat": lambda: (towers.repeat, {"step_fn": lambda: tf.no_op(), "num_steps": 2}),
    "scale_loss": lambda: (towers.scale_loss, {"scale": 2.0}),
    "session_config": lambda: (towers.session_config, {"devices": ["/cpu:0"]}),
    "softmax_cross_entropy": lambda: (towers.softmax_cross_entropy, {
        "outputs": tf.constant(X), "labels": tf.constant([0, 1, 2, 0, 1, 2]), "from_logits": True}),
    "sync_batch_norm": lambda: (tf_syncbn.sync_batch_norm, {"inputs": tf.constant(X), "training": True}),
    "whole_batch": lambda: (towers.whole_batch, {"model_fn": model_fn}),
}
if hasattr(tf, "estimator"):
    CALLS["replicate_model_fn"] = lambda: (towers.replicate_model_fn, {
        "model_fn": lambda features, labels, mode: None})
    CALLS["TowerOptimizer"] = lambda: (towers.TowerOptimizer, {"optimizer_or_optimizer_fn": optimizer()})

KINDS = [  # a kind of arguments, what is one, and what is none
    (arguments.WHOLE, [0, -3, np.int32(2)], [True, 0.5, "2", None, [2]]),
    (arguments.NUMBER, [0, 0.5, np.float32(2), np.array(1.0)], [True, "2", None, [2.0], np.ones(1)]),
    (arguments.FLAG, [True, np.bool_(False)], [0, "True", None]),
    (arguments.TEXT, ["a"], [b"a", 1, None]),
    (arguments.LIST, [[], (1,), iter([1])], ["ab", {}, 1, None]),
    (arguments.FUNCTION, [len, tf.Graph], ["len", None]),
    (arguments.optional(arguments.WHOLE), [None, 2], [True, 0.5]),
]


@pytest.mark.parametrize("kind,right,wrong", KINDS, ids=lambda value: getattr(value, "what", ""))
def test_a_kind_of_arguments_holds_what_is_one_and_nothing_else(kind, right, wrong):
    for value in right:
        arguments.check(kind, size=value)
    for value in wrong:
        with pytest.raises(TypeError, match="^size has to be %s, not " % re.escape(kind.what)):
            arguments.check(kind, size=value)


WRONG = {
    "a number": lambda: 7, "a fraction": lambda: 0.5, "a string": lambda: "nonsense", "a list": lambda: [3],
    "an empty list": list, "a dict": lambda: {"a": 1}, "an object": object, "a tensor": lambda: tf.constant([1.0, 2.0]),
    "a function": lambda: lambda: None,
    "None": lambda: None, "an optimizer": optimizer, "towers": replicas, "a class": lambda: tf.train.MomentumOptimizer,
    "a loss": lambda: replicas().loss, "a transform": lambda: towers.clip_by_value,
}


def is_ours(error):
    """Tells whether a `raise` of the library's raised an error, or a function of the caller's did, which takes something else."""
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    raising = [each for each in dis.get_instructions(code) if each.offset == last.tb_lasti]
    is_here = any(package in pathlib.Path(code.co_filename).parents for package in HERE)
    is_raised = is_here and raising[0].opname == "RAISE_VARARGS" and isinstance(error, (TypeError, ValueError))
    return is_raised or code.co_filename == __file__ or re.search(OF_THE_CALLERS, str(error)) is not None


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_argument_is_an_error_of_the_librarys(name):
    found = []
    with tf.Graph().as_default():
        function, _ = CALLS[name]()
        names = list(inspect.signature(function).parameters)
    for argument in names:
        for kind, value in WRONG.items():
            with tf.Graph().as_default():
                function, right = CALLS[name]()
                with tf.variable_scope("other"):
                    wrong = value()
                try:
                    function(**dict(right, **{argument: wrong}))
                except Exception as error:
                    if not is_ours(error):
                        found.append("%s for %s: %s: %s" % (kind, argument, type(error).__name__, error))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("function,message", [
    (lambda: towers.minimize(replicas().loss, optimizer()), "replicas has to be the Towers that TowerBuilder.build returned"),
    (lambda: towers.minimize(optimizer(), replicas()), "replicas has to be the Towers that TowerBuilder.build returned"),
    (lambda: towers.minimize(replicas(), optimizer(), transforms=towers.clip_by_global_norm(1.0)), "transforms has to be a list"),
    (lambda: towers.minimize(replicas(), optimizer(), transforms=[towers.clip_by_global_norm]),
     r"towers.clip_by_global_norm makes a transform: hand in what it returns, transforms=\[towers.clip_by_global_norm\(...\)\]"),
    (lambda: towers.minimize(replicas(), optimizer(), transforms=[towers.accumulate]), "towers.accumulate makes a transform"),
    (lambda: build(model_fn, X.tolist(), 2), "no tensor of rank 1 or more.*np.asarray makes it one"),
    (lambda: build(lambda x, y: tf.reduce_mean(x * y), [X, X], 2),
     r"The batch hands the model function 1 argument: .*'y'.* hand in \(x, y\) for \[x, y\]"),
    (lambda: build(towers.whole_batch(lambda x, y: tf.reduce_mean(x * y)), [X, X], 2), "hands the model function 1 argument"),
])
def test_what_a_slip_of_the_pen_hands_in_is_named_with_the_cure(function, message):
    with pytest.raises((TypeError, ValueError), match=message):
        function()
