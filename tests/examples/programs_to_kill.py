"""What tests kill: a small training and a conversion, called in processes that have TensorFlow loaded already."""
import os
import sys
import threading
import time

import tqdm

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from examples.cifar10 import data, model, train  # noqa: E402
from examples.training import record  # noqa: E402
from tf_syncbn.checkpoints import __main__ as checkpoints  # noqa: E402

tqdm.tqdm.set_lock(threading.RLock())  # its own is shared by processes, and those that are killed leave it behind
IMAGES, BATCH, STEPS_AN_EPOCH = 200, 10, 20


def training(log, arguments):
    """Trains a network of one layer, a step each few milliseconds, and ends the process with the command's status."""
    made, noted = data.generate(IMAGES, 20), record.Record.step

    def step(self, *values):
        noted(self, *values)
        time.sleep(0.003)
    data.generate, model._block, record.Record.step = lambda: made, lambda x, *_: x[..., :16], step
    _run(log, train.main, ["--depth", "8", "--batch-size", str(BATCH)] + arguments)


def conversion(log, arguments):
    """Converts a checkpoint, and ends the process with the command's status."""
    _run(log, checkpoints.main, ["convert"] + arguments)


def _run(log, main, arguments):
    with open(log, "a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        status = main(arguments)
        sys.stdout.flush()
    sys.exit(status)
