"""The lanes: every pair of Python and TensorFlow that the tests have to pass in."""
import pathlib
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
HELD = "not once and not sweep"
FIRST_CASES = HELD + " and not laws"
# The lane between the oldest TensorFlow and the newest runs `make test`'s cases: under resource variables and control flow 2 of
# what follows variables and control flow, and of the laws; in the other behaviour of the rest, but for what it shares with both
# other lanes: examples, processes, threads, warnings, and how batch norms by hand are found. The oldest, which has not that
# control flow, leaves the longest of them to its run in the other behaviour.
BETWEEN = "tf2-keras2"
OF_RESOURCES = ("accumulation", "builder", "checkpoints", "conversion", "estimator", "estimator_transforms", "gradients",
                "kernels", "loop", "masking", "renormalization", "sessions", "state", "update_ops", "variable_placement")
LAWS = ("batch_norm_law", "bits", "graph_function", "law", "loop_in_turn", "random_graphs", "recurrent", "sharding_bodies",
        "whole_batch", "whole_batch_everywhere", "whole_batch_models", "whole_batch_unseen", "whole_models", "workers")
LEFT_TO_OTHERS = (
    "cluster", "contrastive", "conversion_forms", "conversion_shared", "crossings", "errors_page", "inlined", "inner_gradients",
    "launch", "likeness", "mixed_losses", "number_powers", "one_client", "own_effects", "plain_scripts", "positions", "readme",
    "registered_gradients", "regrouping", "site", "summed_losses", "threads", "whole_checkpoints",
    "worker_failures")


# Whose laws follow our own rules more than TensorFlow: the oldest lane runs `make test`'s cases of these folders.
OF_OWN_RULES = ("api", "batches", "examples", "graph", "meeting", "plain_towers", "project")

# What takes minutes, and follows the rules more than TensorFlow: run by hand in the lanes beside the machine's own.
BY_HAND = ("sharding_rules", "whole_batch_forms")


def files(names):
    """Returns the paths of test files of the library, in whatever wing each is."""
    return [str(path) for name in names for path in sorted(pathlib.Path("tests").rglob("test_%s.py" % name))
            if "examples" not in path.parts]


def tests_of(lane):
    """Returns what a lane runs, a list of pairs: a behaviour of TensorFlow, and pytest's arguments."""
    if lane == BETWEEN:
        ignored = files(OF_RESOURCES + LAWS + LEFT_TO_OTHERS + BY_HAND)
        return [("v1", ["-m", FIRST_CASES] + LIBRARY_TESTS + ["--ignore=" + path for path in ignored]),
                ("graph", ["-m", FIRST_CASES] + files(OF_RESOURCES + LAWS))]
    chosen = ["-m", HELD, "tests"] + ["--ignore=" + path for path in files(BY_HAND)]
    if lane == "tf1":
        folders = ["tests/" + folder for folder in OF_OWN_RULES]
        return [("v1", chosen + ["--ignore=" + folder for folder in folders]), ("v1", ["-m", FIRST_CASES] + folders),
                ("graph", ["-m", HELD] + files(OF_RESOURCES))]
    return [("v1", chosen), ("graph", chosen + LIBRARY_TESTS[1:])]


def first_installed(versions):
    """Returns the first Python that runs here, or the first of all for nox to report as missing."""
    for version in versions:
        program = shutil.which("python" + version)  # may be a version manager's shim for a Python that is not there
        if program and subprocess.call([program, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return version
    return versions[0]


def test_lane(session, requirements, tests):
    """Installs the project and one TensorFlow, and runs the tests but those that are alike with each TensorFlow."""
    session.install(".[test]", *requirements)
    for behaviour, paths in tests:
        session.run("python", "-m", "pytest", *paths, *session.posargs,
                    env={"TOWERS_TEST_BEHAVIOUR": behaviour, "TOWERS_TEST_LANE": session.name})


for name, (versions, requirements) in LANES.items():
    def lane(session, requirements=requirements, tests=tests_of(name)):
        test_lane(session, requirements, tests)
    nox.session(lane, python=first_installed(versions), name=name)
