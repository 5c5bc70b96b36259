"""The packages as a whole: what importing does, who imports whom, and what stands in the front doors."""
import ast
import configparser
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.processes import run_forks

ROOT = Path(__file__).parents[2]
in_processes = pytest.mark.xdist_group("packages")  # they share them


def wing(folder, names):
    """Returns the modules of a folder, its `__init__` the last."""
    return [folder + "." + name for name in names.split() + ["__init__"]]


# Nothing imports a file to its right or below; so no wing, a folder, imports from a later one.
ORDER = {
    "towers": [
        "version", *wing("api", "annotations arguments wording"), "context",
        *wing("graph", "op_types private walk gradient_hook ordering static_values functions copies inner_training draws keras3 "
              "assignment"),
        *wing("meeting", "turns meetings exchanges sums slices cross_tower global_loss"),
        *wing("devices", "placement sharing graph_collections variable_copies variable_placement"),
        *wing("batches", "rows batch shares input empty_batches"),
        *wing("workers",
              "cluster collectives step_numbers watchdog gradient_sums variables peers sessions plain one_client connection"),
        "sharding.placements", "sharding.nodes", "sharding.bodies",
        *wing("sharding.rules.loops", "single_rows turns in_turn"),
        *("sharding.rules." + name for name in ("table", "arithmetic", "pointwise", "reductions")),
        *wing("sharding.rules.movement", "axes diagonals reshapes gathers slices"),
        *("sharding.rules." + name for name in ("normalization", "products", "rows", "segments", "sizes", "state")),
        *wing("sharding.rules.control_flow", "lists inner functions tensor_lists"), "sharding.rules.__init__",
        *wing("sharding.rules.plain", "loops numbers table weights powers repeated"),
        *wing("sharding.plan",
              "own_gradients facts loops sums propagation gradient_functions row_loops guesses twin pairing given"),
        *wing("sharding.rewrite", "blocks conversions carrying rewriting writes outputs joining"),
        *wing("sharding", "report own_examples whole_batch"),
        "replicas",
        *wing("state", "lookups likeness own_data equal_ops reads_and_writes own_effects initial_values asked_steps "
              "tower_writes update_ops"),
        "builder",
        *wing("training", "overlap packing gradients transforms masking accumulation loss_scale minimize shared_draws loop "
              "logits losses"),
        *wing("estimators", "gradient_forms tower_optimizer steps metrics specs replication"),
        "testing", "launch"],
    "tf_syncbn": [
        *("kernels." + name for name in (
            "graph_function", "rows", "layer", "sums", "local_moments", "moments", "fused_op", "merge")),
        *wing("kernels.plain", "reference scaled_gradient own_gradient"),
        *wing("kernels.machines", "cudnn_unsized cudnn products onednn eigen_tf1 eigen eigen_plain"),
        *wing("kernels", "choose inference"),
        "arguments", "moving_averages", "renormalization", "whole_batch", "batch_norm", "slim",
        *wing("conversion", "peephole batch_norms averages convert"),
        "recalibration",
        *wing("checkpoints", "variable_names whole files"), "checkpoints.__main__"]}


def imports(path):
    """Returns the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = ROOT / node.module.replace(".", "/")
            found |= {node.module + "." + alias.name if (folder / (alias.name + ".py")).exists() else node.module
                      for alias in node.names}
    return found


@pytest.mark.parametrize("package", sorted(ORDER))
def test_files_import_only_what_stands_before_them(package):
    order, folder = ORDER[package], ROOT / package
    files = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")} - {"__init__"}
    assert files == set(order)
    for position, name in enumerate(order):
        mine = {m[len(package) + 1:] for m in imports(folder / (name.replace(".", "/") + ".py")) if m.startswith(package + ".")}
        before = {name.replace(".__init__", "") for name in order[:position]}
        assert mine <= before, name


@pytest.mark.parametrize("package", sorted(ORDER))
def test_a_wing_stands_together_and_no_folder_is_long(package):
    wings = [name.rpartition(".")[0].partition(".")[0] for name in ORDER[package]]
    together = [wing for i, wing in enumerate(wings) if wing and wings[i - 1:i] != [wing]]
    assert len(together) == len(set(together))
    for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
        entries = [path for path in folder.iterdir() if path.name not in ("__pycache__", "py.typed", "__init__.py")]
        assert len(entries) <= (14 if folder.name == "rules" else 18 if folder == ROOT / package else 13), folder


def op_tables(path, types):
    """Returns the lines of a file on which two or more types of ops stand together: a table that classifies ops."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        items = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else node.keys if isinstance(node, ast.Dict) else ()
        if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Set):  # {"Neg"} | {"Transpose"}
            items = [item for each in ast.walk(node) if isinstance(each, ast.Set) and len(each.elts) == 1 for item in each.elts]
        names = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = node.value.split()
        if len(names) > 1 and sum(name in types for name in names) > len(names) / 2:
            found.append(node.lineno)
    return found


@pytest.mark.skipif(sys.version_info < (3, 8), reason="Python's own parser tells its constants another way")
def test_ops_are_classified_where_rules_are():
    """What is asked of a model is asked of placements. Outside of the rules there are to be fewer such tables, never more."""
    types = {name for name in dir(tf.raw_ops) if name[0].isupper()} | {
        prefix + name for prefix in ("", "Ref") for name in ("Enter", "Exit", "Merge", "NextIteration", "Switch", "Identity")}
    outside = [path for package in ORDER for path in (ROOT / package).rglob("*.py") if "rules" not in path.parts]
    tables = ["%s:%d" % (path.relative_to(ROOT), line) for path in outside for line in op_tables(path, types)]
    assert len(tables) <= 25, tables


def test_no_module_is_hidden_by_what_the_front_door_calls_by_its_name():
    for package in (towers, tf_syncbn):
        for name in package.__all__:
            module = ROOT / package.__name__ / (name + ".py")
            assert not module.exists() or inspect.ismodule(getattr(package, name)), module


def test_every_folder_is_installed():
    folders = {".".join(path.parent.relative_to(ROOT).parts) for package in ORDER for path in (ROOT / package).rglob("*.py")}
    settings = configparser.ConfigParser()
    settings.read(str(ROOT / "setup.cfg"))
    assert set(settings["options"]["packages"].split()) == folders


def test_towers_know_nothing_of_batch_norm_and_examples_use_the_front_doors():
    for path in (ROOT / "towers").rglob("*.py"):
        assert not [module for module in imports(path) if module.startswith("tf_syncbn")], path
    for path in list((ROOT / "examples").rglob("*.py")) + list((ROOT / "benchmarks").rglob("*.py")):
        inside = [m for m in imports(path) if m.startswith(("towers.", "tf_syncbn."))]
        assert set(inside) <= {"towers.testing"}, path  # a door of its own


def test_examples_share_a_room_that_knows_none_of_them():
    for path in (ROOT / "examples").rglob("*.py"):
        of = path.relative_to(ROOT / "examples").parts[0]
        rooms = {module.split(".")[1] for module in imports(path) if module.startswith("examples.")}
        assert rooms <= {"training", of}, path


def test_library_needs_tensorflow_and_numpy_alone():
    for path in list((ROOT / "towers").rglob("*.py")) + list((ROOT / "tf_syncbn").rglob("*.py")):
        allowed = {"tensorflow", "numpy", "towers", "tf_syncbn", "argparse", "ast", "contextlib", "copy", "ctypes", "dataclasses",
                   "functools", "hashlib", "heapq", "importlib", "inspect", "itertools", "json", "operator", "os", "random", "re",
                   "shutil", "signal", "socket", "subprocess", "sys", "threading", "time", "types", "typing",
                   "warnings", "weakref", "zlib"}
        assert {module.split(".")[0] for module in imports(path)} <= allowed, path


@pytest.mark.parametrize("module", [towers, tf_syncbn])
def test_front_door_is_sorted_and_documented(module):
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


IMPORT = """
import logging, os, random, signal, threading, warnings
import numpy
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
def state():
    graph = tf.get_default_graph()
    return (len(graph.get_operations()), graph.collections, len(logging.getLogger().handlers), tf.logging.get_verbosity(),
            dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGINT), list(warnings.filters),
            numpy.random.get_state()[1].tolist(), random.getstate(), os.listdir("."))
before = state()
import %s
assert state() == before
# No device was looked for and no runtime started: devices can still be set up.
getattr(tf.config, "experimental").set_visible_devices([], "GPU")
"""
MODULES = ["towers", "tf_syncbn", "towers.testing", "tf_syncbn.checkpoints"]
BUILD = """
import sys
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
import tf_syncbn, towers
def model(x):
    return tf.reduce_mean(tf_syncbn.sync_batch_norm(x) ** 3)
replicas = towers.TowerBuilder(["/cpu:0", "/cpu:1"]).build(model, (tf.ones([4, 3]),))
towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
assert not [name for name in sys.modules if name.startswith(("tensorflow.contrib.", "tensorflow_core.contrib."))]
"""


@pytest.fixture(scope="module")
def results():
    """What came of programs that begin with nothing but TensorFlow: a dict from modules that are imported, and BUILD."""
    programs = {module: IMPORT % module for module in MODULES}
    programs[BUILD] = BUILD
    return dict(zip(programs, run_forks("import tensorflow.compat.v1", [(program, {}, ()) for program in programs.values()])))


@pytest.mark.laws
@in_processes
@pytest.mark.parametrize("module", MODULES)
def test_importing_changes_nothing_in_the_process(results, module):
    status, output = results[module]
    assert status == 0, output


@pytest.mark.laws
@in_processes
def test_building_and_training_towers_imports_nothing_of_contrib(results):
    status, output = results[BUILD]
    assert status == 0, output


@pytest.mark.parametrize("module", ["towers", "tf_syncbn"])
def test_absence_of_tensorflow_is_one_clear_sentence(module):
    program = "import sys; sys.modules['tensorflow'] = None; import " + module
    out = subprocess.run([sys.executable, "-c", program], cwd=str(ROOT), stderr=subprocess.PIPE, universal_newlines=True)
    assert out.stderr.rstrip().split("\n")[-1].startswith("ImportError: towers needs TensorFlow, 1.15 or 2.x")


def test_version_is_one_number():
    assert towers.__version__.count(".") == 2
    assert "towers.version.__version__" in (ROOT / "setup.cfg").read_text()
    assert "\nversion: %s\n" % towers.__version__ in (ROOT / "CITATION.cff").read_text()


def test_no_file_outside_the_clone_is_named():
    for path in ROOT.rglob("*.py"):
        if ".venv" not in path.parts and ".nox" not in path.parts and path != Path(__file__):
            assert str(ROOT) not in path.read_text() and "/tmp/" not in path.read_text(), path
