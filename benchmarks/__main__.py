"""Runs benchmarks, each in a process of its own, and reports on all results in the folder.

    python -m benchmarks --out runs/benchmarks
    python -m benchmarks layer graph --rounds 10

Each can also be run alone, with arguments of its own (`python -m benchmarks.train_step --help`), and so can the report
(`python -m benchmarks.report runs/benchmarks`). The results of other lanes that the folder holds stand beside this lane's.
"""
import argparse
import os
import subprocess
import sys

# Otherwise glibc hands large buffers back to the system and faults them in anew, up to fifty thousand pages a step in one
# process and a hundred in the next, whatever is timed.
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}

BENCHMARKS = ("layer", "train_step", "conversion", "graph", "repeat", "memory", "pipeline", "workers", "gpu")


def main(argv=None):
    """Runs the command line and returns the exit status: that of the first benchmark that failed, or 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="benchmark", help="%s; all of them if none is named" % ", ".join(BENCHMARKS))
    parser.add_argument("--out", default="runs/benchmarks", help="the folder for JSON, tables and pictures")
    parser.add_argument("--rounds", help="how often each variant is timed; each benchmark has its own default")
    parser.add_argument("--v1-behaviour", action="store_true", help="call tf.disable_v2_behavior() first")
    settings = parser.parse_intermixed_args(argv)
    unknown = sorted(set(settings.names) - set(BENCHMARKS))
    if unknown:
        parser.error("there is no benchmark %s; there are %s" % (", ".join(unknown), ", ".join(BENCHMARKS)))
    arguments = ["--out", settings.out] + (["--rounds", settings.rounds] if settings.rounds else [])
    arguments += ["--v1-behaviour"] if settings.v1_behaviour else []
    for name in settings.names or BENCHMARKS:
        print("running %s" % name, flush=True)
        status = _run(["-m", "benchmarks." + name] + arguments, {} if name == "memory" else _KEEP_FREED_MEMORY)
        if status:
            return status
    return _run(["-m", "benchmarks.report", settings.out])


def _run(arguments, defaults=()):
    environment = dict(defaults, **os.environ)
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    environment.setdefault("PYTHONWARNINGS", "ignore")
    environment["CUDA_VISIBLE_DEVICES"] = "-1"  # all towers stand on CPU devices
    return subprocess.call([sys.executable] + arguments, env=environment)


if __name__ == "__main__":
    sys.exit(main())
