"""Every test gets a fresh graph and seeds; the tests run under one behaviour of TensorFlow at a time.

TOWERS_TEST_BEHAVIOUR chooses it: "v1" (the default) is `disable_v2_behavior()`, with ref variables and control flow v1;
"graph" is `disable_eager_execution()` alone, with resource variables, and with control flow v2 on TensorFlow 2.
"""
import collections
import gc
import importlib.util
import os
import signal
import warnings
from pathlib import Path

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell leaves it in the background; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # on a GPU, float32 with all its digits
if importlib.util.find_spec("tf_keras"):
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # tf.layers and Keras 2 in graph mode, on the newest TensorFlow

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

BEHAVIOUR = os.environ.get("TOWERS_TEST_BEHAVIOUR", "v1")

if BEHAVIOUR == "graph":
    tf.disable_eager_execution()
    tf.enable_resource_variables()  # TensorFlow 2's default
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)

# What reads files alone, is no part of the library, looks at how a model is written, or runs in processes that choose a behaviour
# themselves, is tested once.
_ONCE = ("benchmarks", "cluster", "control_flow_2", "conversion_forms", "errors_page", "inlined", "keras3", "launch",
         "mixed_losses", "number_powers", "one_client", "packages", "plain_scripts", "positions", "regrouping", "sharding_rules",
         "site", "step_numbers", "summed_losses", "whole_batch_forms", "whole_checkpoints", "worker_failures")
collect_ignore_glob = ["*/test_%s.py" % name for name in _ONCE] if BEHAVIOUR == "graph" else []

# Folders and files whose tests take moments, so that `make test` runs so many cases of each; of other tests it runs one.
_OF_QUICK = 4
_QUICK = {"api", "batches", "devices", "plain_towers", "state", "test_exchange.py", "test_kernels.py"}

# Cases a property is tried on: few in a test run, the first of these in lanes that run beside another, and as many as
# HYPOTHESIS_CASES says when it matters.
_IS_FIRST_LANE = BEHAVIOUR == "v1" and os.environ.get("TOWERS_TEST_LANE", "first") == "first"
hypothesis.settings.register_profile(
    "towers", deadline=None, max_examples=int(os.environ.get("HYPOTHESIS_CASES", 25 if _IS_FIRST_LANE else 10)), print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck), derandomize="HYPOTHESIS_CASES" not in os.environ)
hypothesis.settings.load_profile("towers")


@pytest.hookimpl(tryfirst=True)  # before they are chosen by their marks
def pytest_collection_modifyitems(items):
    """Marks all cases of a test but its first ones as left to `make test-laws`.

    Groups of tests that run in one process begin first: at the end the other process would wait.
    """
    cases = collections.Counter()
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("sweep") is None:
            test = item.parent, item.originalname
            cases[test] += 1
            if cases[test] > (1 if _QUICK.isdisjoint(Path(item.fspath).parts[-2:]) else _OF_QUICK):
                item.add_marker(pytest.mark.laws)
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_collection_finish():
    """Spares Python a look at TensorFlow's own objects whenever it looks for circles of garbage, which graphs are."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_graph():
    """A graph and seeds of its own for each test."""
    np.random.seed(0)
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(0)
        yield graph


@pytest.fixture
def silent():
    """Makes the warning about plain towers an error."""
    from tests.support import SAID
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + SAID)
        yield
