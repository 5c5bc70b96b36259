"""Trains the same towers on several numbers of CPU devices, and compares all variables to the bit.

    python -m examples.cifar10.same_bits
    python -m examples.cifar10.same_bits --data-dir DATA --depth 20 --num-towers 8 --devices 1 2 8

Each training is a process of its own; the last one stops half-way, and a process with another number of devices goes on from
its checkpoint. The exit status is 0 where all bits are the same and 1 where they are not.
"""
import argparse
import concurrent.futures
import hashlib
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

from examples.cifar10 import data, train  # noqa: E402
from examples.cifar10.arguments import add_data_arguments, load_data  # noqa: E402
from examples.cifar10.model import resnet  # noqa: E402
from examples.cifar10.task import cifar10  # noqa: E402
from examples.training.command import positive_int, run, seed  # noqa: E402
from examples.training.folder import UsageError, make_saver, restore  # noqa: E402
from examples.training.graph import Training, alone  # noqa: E402


class Part(NamedTuple):
    """A training, or a part of one: the number of devices, its steps, and the checkpoints that it begins from and leaves."""
    num_devices: int
    first_step: int
    last_step: int
    begin: str = None
    end: str = None


def main(argv=None):
    """Runs the command line and returns the exit status: 0 for the same bits, 1 for others, 2 for what can't be done."""
    return run(lambda: compare(parse_arguments(argv)), data.DataError)


def parse_arguments(argv):
    """Returns the settings that the command line asks for, with all that a `Training` needs."""
    parser = argparse.ArgumentParser(prog="python -m examples.cifar10.same_bits", description=__doc__.split("\n\n")[0])
    add_data_arguments(parser)
    parser.add_argument("--num-towers", type=positive_int, default=4, help="default 4, on any number of devices")
    parser.add_argument("--devices", type=positive_int, nargs="+", default=[1, 2, 4], metavar="N",
                        help="numbers of CPU devices, two or more (default 1 2 4)")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="of all towers together (default 32)")
    parser.add_argument("--depth", type=int, default=8, help="6n + 2 (default 8)")
    parser.add_argument("--steps", type=positive_int, default=40, help="default 40")
    parser.add_argument("--threads", type=positive_int, help="threads of an op; default TensorFlow's, one for each core")
    parser.add_argument("--seed", type=seed, default=0, help="0 or more (default 0)")
    given = parser.parse_args(argv)
    settings = train.parse_arguments(["--steps", str(given.steps)])
    vars(settings).update(vars(given))
    return settings


def compare(settings):
    """Trains, prints the digests side by side, and returns the exit status."""
    data_name, found = check(settings), {}
    print("ResNet-%d on %s, %d synced towers, batch %d, %d steps, seed %d, TensorFlow %s." % (
        settings.depth, data_name, settings.num_towers, settings.batch_size, settings.steps, settings.seed, tf.__version__))
    with tempfile.TemporaryDirectory() as folder:
        trainings = trainings_of(settings, os.path.join(folder, "model.ckpt"))
        width = max(map(len, trainings))
        print("%-*s  SHA-256 of all variables" % (width, "towers on"), flush=True)
        for name, parts in trainings.items():
            for part in parts:
                found[name] = in_a_process(settings, part)
            print("%-*s  %s" % (width, name, digest_of_all(found[name])), flush=True)
    first, *others = found.values()
    if all(other == first for other in others):
        print("The same bits.")
        return 0
    names = sorted(set(first).union(*others))
    different = [name for name in names if any(other.get(name) != first.get(name) for other in others)]
    print("Different bits: in %d of %d variables, %s among them." % (len(different), len(names), different[0]))
    return 1


def check(settings):
    """Returns the name of the data; raises `UsageError` for what can't be done, before any process starts."""
    if len(set(settings.devices)) < 2 or settings.steps < 2:
        raise UsageError("There is nothing to compare: name two numbers of --devices or more, and two --steps or more.")
    if max(settings.devices) > settings.num_towers:
        raise UsageError("%d towers leave some of %d devices without one: name fewer --devices."
                         % (settings.num_towers, max(settings.devices)))
    if settings.batch_size < settings.num_towers:
        raise UsageError("A batch of %d is too small for %d towers." % (settings.batch_size, settings.num_towers))
    try:
        resnet(settings.depth)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return load_data(settings).name


def trainings_of(settings, path):
    """Returns the parts of each training by its name: on each number of devices, and stopped half-way, saved at a path."""
    first, last, half = settings.devices[0], settings.devices[-1], settings.steps // 2
    trainings = {_devices(number): [Part(number, 0, settings.steps)] for number in settings.devices}
    trainings["%s, after %d steps %s" % (_devices(last), half, _devices(first))] = [
        Part(last, 0, half, end=path), Part(first, half, settings.steps, begin=path)]
    return trainings


def _devices(number):
    return "%d device%s" % (number, "s" * (number > 1))


def in_a_process(settings, part):
    """Calls `digests` in a process of its own: nothing that TensorFlow keeps for a process is shared."""
    # An executor, since a Pool waits for ever for a process that was killed.
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        try:
            return executor.submit(digests, settings, part).result()
        except BrokenProcessPool as error:
            raise UsageError("A training's process was killed, for want of memory maybe: see what else runs, and run it again.") \
                from error


def digests(settings, part):
    """Trains a part of a training.

    Returns:
      A dict from the names of all variables, optimizer's and moving averages among them, to the SHA-256 of their bytes, str.
    """
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    devices = ["/cpu:%d" % i for i in range(part.num_devices)]
    config = tf.ConfigProto(intra_op_parallelism_threads=settings.threads or 0)
    with tf.Graph().as_default():
        training = Training(settings, cifar10(settings, load_data(settings)), alone(devices, config), devices)
        saver = make_saver()
        with training.workers.session() as session:
            if part.begin:
                restore(saver, session, part.begin)
            else:
                session.run(tf.global_variables_initializer())
            for _ in training.steps(session, part.first_step, part.last_step):
                pass
            if part.end:
                saver.save(session, part.end, write_meta_graph=False)
            values = session.run({v.op.name: v.read_value() for v in tf.global_variables()})
    return {name: hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest() for name, value in sorted(values.items())}


def digest_of_all(of_variables):
    """Returns the SHA-256 of the variables' names and digests, in the order of names."""
    lines = "".join("%s %s\n" % item for item in sorted(of_variables.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
