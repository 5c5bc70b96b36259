"""Runs examples.cifar10.train on few images and writes each step's loss: `... PATH float32|float64 its arguments`.

An epoch has five steps of 10. TOWERS_TEST_SLOWLY is how many seconds a step takes longer.
"""
import functools
import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow.compat.v1 as tf  # noqa: E402

from examples.cifar10 import data, train  # noqa: E402
from examples.training import record  # noqa: E402


def note(self, step, loss, accuracy):
    """Notes a step's loss beside what the record keeps of it."""
    losses.append(float(loss))
    kept(self, step, loss, accuracy)
    time.sleep(float(os.environ.get("TOWERS_TEST_SLOWLY", 0)))


path, dtype = sys.argv[1:3]
losses, kept = [], record.Record.step
record.Record.step = note
data.generate = lambda generated=data.generate(59, 21): generated
if dtype == "float64":
    train.cifar10 = functools.partial(train.cifar10, dtype=tf.float64)
status = train.main(sys.argv[3:])
if losses:  # the chief's
    with open(path, "w") as f:
        json.dump(losses, f)
sys.exit(status)
