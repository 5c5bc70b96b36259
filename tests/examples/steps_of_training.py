"""Runs examples.cifar10.train on few images and writes each step's loss: `... PATH float32|float64 its arguments`.

An epoch has five steps of 10. TOWERS_TEST_SLOWLY is how many seconds a step takes longer; from step 7 on a step waits, where
TOWERS_TEST_UNTIL names a file, until there is one. The network is of one layer, if TOWERS_TEST_NETWORK does not say "whole".
"""
import contextlib
import functools
import json
import os
import sys
import time
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow.compat.v1 as tf  # noqa: E402

from examples.cifar10 import data, model, train  # noqa: E402
from examples.training import record  # noqa: E402


def run(path, dtype, arguments, network="of one layer", pause=0.0, until=None):
    """Trains, and returns the command's status."""
    losses, kept, made = [], record.Record.step, data.generate(59, 21)

    def note(self, step, loss, accuracy):
        """Notes a step's loss beside what the record keeps of it."""
        losses.append(float(loss))
        kept(self, step, loss, accuracy)
        time.sleep(pause)
        while until and step >= 7 and not os.path.exists(until):
            time.sleep(0.01)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(record.Record, "step", note))
        patches.enter_context(mock.patch.object(data, "generate", lambda: made))
        if network != "whole":
            patches.enter_context(mock.patch.object(model, "_block", lambda x, *_: x[..., :16]))
        if dtype == "float64":
            patches.enter_context(mock.patch.object(train, "cifar10", functools.partial(train.cifar10, dtype=tf.float64)))
        status = train.main(arguments)
    if losses:  # the chief's
        with open(path, "w") as f:
            json.dump(losses, f)
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3:], os.environ.get("TOWERS_TEST_NETWORK"),
                 float(os.environ.get("TOWERS_TEST_SLOWLY", 0)), os.environ.get("TOWERS_TEST_UNTIL")))
