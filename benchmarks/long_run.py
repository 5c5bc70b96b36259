"""Trains for hours in a process of its own, and watches what that process and its folder grow to.

    python -m benchmarks.long_run --hours 6

It runs the CIFAR-10 example, a ResNet-8 on 4 synced towers on images made on the spot, whose graph is finalized before the first
step. Every half a minute it notes the steps done, the memory that the process holds (VmRSS), its threads and open files, and the
checkpoints and bytes in its folder. At the end it interrupts the training as a user would, writes the notes as CSV and a picture,
and says how much of the memory came in the last three quarters of the time. It reads /proc, so it is for Linux.
"""
import argparse
import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

__all__ = ["Sample", "draw", "growth", "main", "sample", "watch"]

_NEWEST = re.compile(r'^model_checkpoint_path: ".*-(\d+)"', re.MULTILINE)
_TRAINING = ["--depth", "8", "--num-towers", "4", "--batch-size", "32", "--steps", "1000000000", "--save-every", "500"]


class Sample(NamedTuple):
    """What was seen at one moment.

    Attributes:
      seconds: since the training began.
      step: of the newest checkpoint.
      resident: bytes of memory that the process holds.
      threads, files: how many it has, and has open.
      checkpoints: how many the folder has.
      folder: bytes in it.
    """
    seconds: float
    step: int
    resident: int
    threads: int
    files: int
    checkpoints: int
    folder: int


def sample(pid, folder, seconds):
    """Returns the `Sample` of a process and its training folder; raises `OSError` if the process is gone."""
    with open("/proc/%d/status" % pid) as f:
        status = dict(line.rstrip("\n").split(":", 1) for line in f)
    if "VmRSS" not in status:
        raise ProcessLookupError("process %d has ended" % pid)
    names = os.listdir(folder)
    try:
        with open(os.path.join(folder, "checkpoint")) as f:
            newest = _NEWEST.search(f.read())
    except FileNotFoundError:
        newest = None
    return Sample(seconds, int(newest.group(1)) if newest else 0, int(status["VmRSS"].split()[0]) << 10, int(status["Threads"]),
                  len(os.listdir("/proc/%d/fd" % pid)), sum(name.endswith(".index") for name in names),
                  sum(os.path.getsize(path) for path in (os.path.join(folder, name) for name in names) if os.path.exists(path)))


def watch(process, folder, log, hours, every, path):
    """Samples a training from its first words on, until the hours are over or it ends; a CSV has the samples too."""
    while process.poll() is None and "Training a" not in _text(log):
        time.sleep(0.5)
    began, samples = time.time(), []
    with open(path, "w", newline="") as f:
        rows = csv.writer(f)
        rows.writerow(Sample._fields)
        while process.poll() is None and time.time() - began < 3600 * hours:
            try:
                samples.append(sample(process.pid, folder, round(time.time() - began, 1)))
            except OSError:  # it ended this moment
                break
            rows.writerow(samples[-1])
            f.flush()
            try:
                process.wait(every)
            except subprocess.TimeoutExpired:
                pass
    return samples


def _text(path):
    with open(path) as f:
        return f.read()


def growth(samples):
    """Returns by how many bytes an hour the memory grew in the last three quarters of the time, on a line through its samples."""
    settled = [one for one in samples if one.seconds >= samples[-1].seconds / 4]
    if len(settled) < 3:
        raise ValueError("There are %d samples after the first quarter of the time, and a line needs 3." % len(settled))
    return float(np.polyfit([one.seconds / 3600 for one in settled], [one.resident for one in settled], 1)[0])


def draw(samples, path):
    """Draws memory, steps and the folder over time."""
    hours = [one.seconds / 3600 for one in samples]
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6))
    for axes, label, values in zip(panels, ("memory of the process, MiB", "steps done", "bytes in the folder, MiB"), (
            [one.resident / 2.0 ** 20 for one in samples], [one.step for one in samples],
            [one.folder / 2.0 ** 20 for one in samples])):
        axes.plot(hours, values)
        axes.set(xlabel="hours", title=label, ylim=(0, 1.1 * max(values) or 1))
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv=None):
    """Runs the command line and returns the exit status: 1 if the training ended by itself."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", default="runs/long_run", help="the folder of samples.csv, memory.png and the training's log")
    parser.add_argument("--hours", type=float, default=6.0, help="how long")
    parser.add_argument("--every", type=float, default=30.0, help="seconds from one sample to the next")
    settings = parser.parse_args(argv)
    os.makedirs(settings.out, exist_ok=True)
    csv_path, picture, log = (os.path.join(settings.out, name) for name in ("samples.csv", "memory.png", "training.log"))
    with tempfile.TemporaryDirectory() as folder, open(log, "w") as output:
        process = subprocess.Popen([sys.executable, "-u", "-m", "examples.cifar10.train", "--train-dir", folder] + _TRAINING,
                                   stdout=output, stderr=subprocess.STDOUT)
        try:
            samples = watch(process, folder, log, settings.hours, settings.every, csv_path)
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait()
    if status != 128 + signal.SIGTERM:
        print("error: the training ended with status %d; what it said is in %s" % (status, log), file=sys.stderr)
        return 1
    draw(samples, picture)
    first, last = samples[0], samples[-1]
    print("%.2f hours, %d steps; memory %.0f MiB at its most, in the last three quarters of the time %+.2f MiB an hour; "
          "threads %d, open files %d, checkpoints %d at their most; %s, %s" % (
              (last.seconds - first.seconds) / 3600, last.step, max(one.resident for one in samples) / 2.0 ** 20,
              growth(samples) / 2.0 ** 20, max(one.threads for one in samples), max(one.files for one in samples),
              max(one.checkpoints for one in samples), csv_path, picture))
    return 0


if __name__ == "__main__":
    sys.exit(main())
