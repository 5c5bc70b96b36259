"""Peak memory of the whole process that trains two towers with large activations, synced and unsynced.

    python -m benchmarks.memory --rounds 5

A process's peak can't be taken back, so each repetition of each variant is a fresh process, and the variants take turns. The
peak is the kernel's: VmHWM, or `ru_maxrss` where there is no /proc.
"""
import json
import os
import resource
import sys

import numpy as np
from tqdm import tqdm

from benchmarks import record, variants
from benchmarks.command import in_fresh_process, parse, positive_int
from benchmarks.interleave import spread
from benchmarks.variants import SYNCED, UNSYNCED

__all__ = ["main"]

_TOWERS, _DEPTH, _STEPS = 2, 20, 3


def main(argv=None):
    """Runs the command line and returns the path of the JSON that it wrote; of a child process, None."""
    settings = parse("Measures the peak memory of training steps.", argv, 5, _add_arguments)
    if settings.child is not None:
        print(json.dumps(_train(settings)))
        return None
    runs = {name: [] for name in (SYNCED, UNSYNCED)}
    for _ in tqdm(range(settings.rounds), "memory", leave=False, disable=None):
        for name in runs:
            runs[name].append(in_fresh_process("benchmarks.memory", name, settings,
                                               ["--batch-size", str(settings.batch_size)], quiet=True))
    peaks, growths = ({name: np.array([run[key] for run in runs[name]]) for name in runs} for key in ("peak", "growth"))
    ratios = {"peak": spread(peaks[SYNCED] / peaks[UNSYNCED]), "growth": spread(growths[SYNCED] / growths[UNSYNCED])}
    row = {"towers": _TOWERS, "peak_bytes": {name: spread(peaks[name]) for name in runs},
           "growth_bytes": {name: spread(growths[name]) for name in runs}, "ratio": ratios}
    described = {"network": "ResNet-%d" % _DEPTH, "batch_of_a_tower": settings.batch_size, "rounds": settings.rounds,
                 "steps": _STEPS, "growth": "the peak over that before the first step"}
    return record.write(settings.out, "memory", described, [row], [
        record.target("memory, peak of %d synced towers / unsynced" % _TOWERS, ratios["peak"]["median"], 1.05,
                      ratios["peak"]["lower_quartile"], ratios["peak"]["upper_quartile"])])


def _add_arguments(parser):
    parser.add_argument("--batch-size", type=positive_int, default=256, help="images of each tower")


def _train(settings):
    """Trains a few steps and returns the process's peak bytes, and how far they are over those before the first step."""
    variant = variants.make_variant(settings.child, _TOWERS, settings.batch_size, _DEPTH)
    before = _peak_bytes()
    for _ in range(_STEPS):
        variant.step()
    return {"peak": _peak_bytes(), "growth": _peak_bytes() - before}


def _peak_bytes():
    if os.path.exists("/proc/self/status"):
        # Not ru_maxrss: Linux hands a forked parent's on to the child, and the parent may have been larger.
        with open("/proc/self/status") as f:
            kib, = [line.split()[1] for line in f if line.startswith("VmHWM:")]
        return int(kib) << 10
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
