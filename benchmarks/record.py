"""The figures of one benchmark in one lane as a JSON file, with what one has to know to read them.

Hardware, lane, batch and command stand in every file, since a ratio without them claims nothing.
"""
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys

import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["num_cores", "session_runs_onednn", "target", "write"]


def write(out, benchmark, settings, rows, targets):
    """Writes `out/<benchmark>-<lane>.json`, prints its table, and returns its path.

    Args:
      out: str, a folder; it is made if need be.
      benchmark: str.
      settings: dict, what was measured and how.
      rows: list of dicts, the figures.
      targets: list of `target` dicts.
    """
    os.makedirs(out, exist_ok=True)
    environment = _environment()
    path = os.path.join(out, "%s-%s.json" % (benchmark, environment["lane"]))
    content = {"benchmark": benchmark, "environment": environment, "settings": settings, "targets": targets, "rows": rows}
    with open(path, "w") as f:
        json.dump(content, f, indent=1)
        f.write("\n")
    from benchmarks import report  # not above: the processes that benchmarks.memory weighs have no matplotlib
    report.show(path)
    return path


def target(what, value, at_most, lower_quartile=None, upper_quartile=None):
    """Returns a figure that has a target, as it stands in the JSON.

    Args:
      what: str, the quantity.
      value: float, as measured.
      at_most: float, its target; None for a figure that is only reported.
      lower_quartile, upper_quartile: floats, the spread of the value, or None.
    """
    return {"what": what, "value": value, "at_most": at_most, "lower_quartile": lower_quartile,
            "upper_quartile": upper_quartile}


def num_cores():
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _environment():
    module, onednn, v2_behaviour = sys.modules["__main__"].__spec__, session_runs_onednn(), bool(tf.executing_eagerly())
    v1_of_2 = not v2_behaviour and not tf.__version__.startswith("1.")
    return {
        "lane": "tf" + tf.__version__ + ("-onednn" if onednn else "") + ("-v1" if v1_of_2 else ""),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": "python -m " + " ".join([module.name if module else sys.argv[0]] + sys.argv[1:]),
        "cpu": _proc_entry("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": num_cores(),
        "gpus": _gpus(),
        "memory_gib": round(int((_proc_entry("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2.0 ** 20, 1),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "numpy": np.__version__,
        "onednn": onednn,
        "v2_behaviour": v2_behaviour,
        "malloc": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")},
    }


def _gpus():
    """Returns the names of the machine's GPUs and the version of their driver, a list of str."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], stdout=subprocess.PIPE)
    return done.stdout.decode().strip().split("\n") if done.returncode == 0 else []


def _proc_entry(path, key):
    """Returns the first value of `key` in a file of lines `key: value`, or None."""
    if os.path.exists(path):
        with open(path) as f:
            for line in f:
                if line.split(":")[0].strip() == key:
                    return line.split(":", 1)[1].strip()
    return None


def session_runs_onednn():
    """Tells whether TensorFlow puts oneDNN's kernels in the place of its own, by what it runs for a convolution."""
    metadata = tf.RunMetadata()
    with tf.Graph().as_default(), tf.device("/cpu:0"), tf.Session() as session:
        images = tf.placeholder(tf.float32, [8, 16, 16, 16])
        convolved = tf.nn.conv2d(images, tf.ones([3, 3, 16, 16]), [1, 1, 1, 1], "SAME")
        session.run(convolved, {images: np.ones([8, 16, 16, 16])}, tf.RunOptions(output_partition_graphs=True), metadata)
    return any(node.op.startswith("_Mkl") for graph in metadata.partition_graphs for node in graph.node)
