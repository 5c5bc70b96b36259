"""The lanes: every pair of Python and TensorFlow that the tests have to pass in."""
import shutil
import subprocess

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

LANES = {
    "tf1": (["3.7"], ["tensorflow==1.15.5", "protobuf<3.21", "numpy<1.19"]),
    "tf2-keras2": (["3.11", "3.10", "3.9"], ["tensorflow==2.15.1"]),
    "tf2": (["3.11", "3.12", "3.13", "3.10"], ["tensorflow"]),
}
# Towers and layers under resource variables, and TensorFlow 2's control flow where there is that; examples depend on neither.
LIBRARY_TESTS = ["tests", "--ignore=tests/examples"]
# The lane between the oldest TensorFlow and the newest leaves to them what it shares with both: examples, benchmarks, processes,
# warnings, and how batch norms by hand are found. Under resource variables it and TensorFlow 1 run the laws and what follows
# variables and control flow; the rest knows neither, and is run in the newest. The longest of these it runs there alone.
BETWEEN = "tf2-keras2"
V1_OF_BETWEEN = LIBRARY_TESTS + ["--ignore=tests/test_%s.py" % name for name in (
    "batch_norm_law", "benchmarks", "bits", "cluster", "conversion_forms", "crossings", "errors_page", "graph_function",
    "inner_gradients", "launch", "law", "loop_in_turn", "mixed_losses", "number_powers", "one_client", "plain_scripts",
    "positions", "recurrent", "regrouping", "site", "summed_losses", "whole_checkpoints", "worker_failures", "workers")]
OF_RESOURCES = ["tests/test_%s.py" % name for name in (
    "accumulation", "batch_norm_law", "bits", "builder", "checkpoints", "conversion", "estimator", "estimator_transforms",
    "gradients", "graph_function", "kernels", "law", "loop", "loop_in_turn", "masking", "recurrent", "renormalization",
    "sessions", "state", "update_ops", "variable_placement", "whole_models", "workers")]


def first_installed(versions):
    """Returns the first Python that runs here, or the first of all for nox to report as missing."""
    for version in versions:
        program = shutil.which("python" + version)  # may be a version manager's shim for a Python that is not there
        if program and subprocess.call([program, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return version
    return versions[0]


def test_lane(session, requirements, tests, graph_tests):
    """Installs the project and one TensorFlow, and runs the tests in each behaviour of TensorFlow."""
    session.install(".[test]", *requirements)
    session.run("python", "-m", "pytest", *tests, *session.posargs)
    session.run("python", "-m", "pytest", *graph_tests, *session.posargs, env={"TOWERS_TEST_BEHAVIOUR": "graph"})


for name, (versions, requirements) in LANES.items():
    def lane(session, requirements=requirements, between=name == BETWEEN, of_resources=name != "tf2"):
        test_lane(session, requirements, V1_OF_BETWEEN if between else (), OF_RESOURCES if of_resources else LIBRARY_TESTS)
    nox.session(lane, python=first_installed(versions), name=name)
