"""What the benchmarks' command lines have in common, and parts of a benchmark that need a process of their own."""
import argparse
import json
import os
import subprocess
import sys

import tensorflow.compat.v1 as tf

__all__ = ["in_fresh_process", "parse", "positive_int"]


def parse(description, argv, rounds, add_arguments=None):
    """Parses a benchmark's command line, and makes this process ready for it.

    Eager execution stays as TensorFlow has it, on in TensorFlow 2, since `MirroredStrategy` needs it there. The benchmarks
    build their graphs under `tf.Graph()`.

    Args:
      description: str, a sentence.
      argv: list of str, or None for the process's own.
      rounds: int, the default of --rounds.
      add_arguments: a function of the parser that adds the benchmark's own arguments, or None.

    Returns:
      `argparse.Namespace` with `out`, `rounds`, `v1_behaviour`, `child` (what `in_fresh_process` was given, or None) and what
      was added.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", default="runs/benchmarks", help="the folder for JSON, tables and pictures")
    parser.add_argument("--rounds", type=positive_int, default=rounds, help="how often each variant is timed")
    parser.add_argument("--v1-behaviour", action="store_true",
                        help="call tf.disable_v2_behavior() first: ref variables and control flow of TensorFlow 1, and no "
                             "MirroredStrategy")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    if add_arguments is not None:
        add_arguments(parser)
    settings = parser.parse_args(argv)
    tf.logging.set_verbosity(tf.logging.ERROR)
    if settings.v1_behaviour:
        tf.disable_v2_behavior()
    return settings


def in_fresh_process(module, child, settings, arguments=(), quiet=False, environment=None):
    """Runs a benchmark's module with `--child`, and returns what it prints, JSON on its last line.

    Args:
      module: str, such as "benchmarks.memory".
      child: str, the value of --child.
      settings: what `parse` returned.
      arguments: list of str, the benchmark's own arguments.
      quiet: whether what the process writes to stderr is shown only if it fails.
      environment: dict of str, of what its environment has beside this one's.

    Raises:
      RuntimeError: if the process fails.
    """
    command = [sys.executable, "-m", module, "--child", child, "--rounds", str(settings.rounds)] + list(arguments)
    command += ["--v1-behaviour"] if settings.v1_behaviour else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE if quiet else None,
                          env=dict(os.environ, **(environment or {})))
    if done.returncode:
        raise RuntimeError("%s failed.\n%s" % (" ".join(command), (done.stderr or b"").decode()))
    return json.loads(done.stdout.decode().strip().split("\n")[-1])


def positive_int(text):
    """Returns an int of 1 or more, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("%d is less than 1" % value)
    return value
