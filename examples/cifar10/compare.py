"""What synchronizing buys: the same total batch as one tower, as synced towers and as unsynced ones, from the same start.

    python -m examples.cifar10.compare --data-dir DATA --batch-size 16 --images-a-tower 2 --seeds 3

All trainings of a seed begin with the same values of the variables and see the same images in the same order, augmented alike. It
prints a table and leaves compare.json and compare.png in --out. The same command again goes on where it was cut.
"""
import argparse
import contextlib
import os
import sys
import time
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

from examples.cifar10 import data, train  # noqa: E402
from examples.cifar10.arguments import add_data_arguments, load_data, positive_int  # noqa: E402
from examples.cifar10.checkpoint import UsageError  # noqa: E402
from examples.cifar10.comparison import FIRST_STEPS, draw, read, table  # noqa: E402
from examples.cifar10.report import Progress, WriteError, exit_status, write_json  # noqa: E402
from examples.cifar10.training import Training, alone, tower_devices  # noqa: E402

RATE_OF_AN_IMAGE = 0.1 / 128  # the recipe's, times the images of a batch
POINTS = 60  # of a curve


class Kind(NamedTuple):
    """One side of the comparison: whether it has towers of few images, its batch norm, and whose moving averages it keeps."""
    is_divided: bool
    sync_bn: bool
    update_ops: str


KINDS = {
    "one": Kind(False, False, "first"),  # TensorFlow's own batch norm, which knows nothing of towers, is the authority
    "synced": Kind(True, True, "first"),
    "unsynced": Kind(True, False, "first"),
    "unsynced-all": Kind(True, False, "all"),
}


def main(argv=None):
    """Runs the command line and returns the exit status: 0, 2 for what can't be done, 130 when interrupted."""
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    return exit_status(lambda: compare(parse_arguments(argv)), UsageError, data.DataError)


def parse_arguments(argv):
    """Returns the settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m examples.cifar10.compare", description=__doc__.split("\n\n")[0])
    add_data_arguments(parser)
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 (default 20)")
    parser.add_argument("--batch-size", type=positive_int, default=16, help="of all towers together (default 16)")
    parser.add_argument("--images-a-tower", type=positive_int, default=2, help="of the synced and unsynced towers (default 2)")
    parser.add_argument("--seeds", type=positive_int, default=3, help="how many, from 0 on (default 3)")
    parser.add_argument("--steps", type=positive_int, default=3000, help="of each training (default 3000)")
    parser.add_argument("--learning-rate", type=float, help="at its peak (default 0.1 / 128 times the batch size)")
    parser.add_argument("--out", default="runs/compare", help="folder of compare.json and compare.png (default runs/compare)")
    settings = parser.parse_args(argv)
    if settings.learning_rate is None:
        settings.learning_rate = RATE_OF_AN_IMAGE * settings.batch_size
    return settings


def compare(settings):
    """Runs what has not been run yet, prints the table, draws the picture, and returns the exit status."""
    if settings.batch_size % settings.images_a_tower or settings.batch_size == settings.images_a_tower:
        raise UsageError("A batch of %d does not make two or more towers of %d images each."
                         % (settings.batch_size, settings.images_a_tower))
    dataset = load_data(settings)
    json_path, png_path = (os.path.join(settings.out, "compare." + ending) for ending in ("json", "png"))
    described = {name: getattr(settings, name) for name in ("depth", "batch_size", "images_a_tower", "steps", "learning_rate")}
    comparison = read(json_path, dict(described, data=dataset.name, tensorflow=tf.__version__))
    try:
        os.makedirs(settings.out, exist_ok=True)
    except OSError as error:
        raise WriteError("The folder %s can't be made: %s." % (settings.out, error.strerror)) from error
    write_json(json_path, comparison)  # before hours of training
    try:
        for seed in range(settings.seeds):
            done = [run["kind"] for run in comparison["runs"] if run["seed"] == seed]
            missing = [kind for kind in KINDS if kind not in done]
            start = initial_values(settings, dataset, seed) if missing else None
            for kind in missing:
                comparison["runs"].append(train_one(settings, dataset, kind, seed, start))
                write_json(json_path, comparison)
    except KeyboardInterrupt:
        print("\nInterrupted; run the same command again to go on after %d of %d trainings."
              % (len(comparison["runs"]), settings.seeds * len(KINDS)))
        return 130
    print(table(comparison))
    draw(comparison, png_path)
    print("Results: %s, picture: %s" % (json_path, png_path))
    return 0


def settings_of(settings, kind, seed):
    """Returns what a `Training` of a kind needs."""
    result = train.parse_arguments(["--steps", str(settings.steps), "--seed", str(seed), "--update-ops", KINDS[kind].update_ops])
    result.batch_size, result.depth, result.learning_rate = settings.batch_size, settings.depth, settings.learning_rate
    result.num_towers = settings.batch_size // settings.images_a_tower if KINDS[kind].is_divided else 1
    result.sync_bn = KINDS[kind].sync_bn
    return result


def initial_values(settings, dataset, seed):
    """Returns the values that the variables of the one tower begin with, a dict by name.

    Other kinds would draw others from the same seed on TensorFlow 1, where a draw follows the number of ops made before it.
    """
    of_one = settings_of(settings, "one", seed)
    with tf.Graph().as_default():
        training = Training(of_one, dataset, alone(tower_devices(1)))
        with training.workers.session() as session:
            session.run(tf.global_variables_initializer())
            return session.run({v.op.name: v.read_value() for v in tf.global_variables()})


def train_one(settings, dataset, kind, seed, start):
    """Trains one kind with one seed.

    Args:
      settings: of the command line.
      dataset: `data.Dataset`.
      kind: str, of `KINDS`.
      seed: int.
      start: dict from the names of all variables to the arrays that they begin with.

    Returns:
      A dict of "kind", "seed", "test_accuracy" from 0 to 1, "milliseconds_a_step" without the first ten steps, "first_losses" of
      `FIRST_STEPS` steps, "first_losses_in_float64", the same steps done in float64, where rounding tells nothing, and "curve", a
      list of [step, mean loss of the steps since the point before].
    """
    print("%s, seed %d:" % (kind, seed), flush=True)
    of_kind, moments = settings_of(settings, kind, seed), [time.time()]
    progress, losses = Progress(0, settings.steps, settings.batch_size), []
    try:
        with begun(of_kind, dataset, start) as (training, session):
            for step, (loss, accuracy) in enumerate(training.steps(session, 0, settings.steps), 1):
                losses.append(loss)
                moments.append(time.time())
                progress.step(step, loss, accuracy)
            test_accuracy = training.test_accuracy(session)
    finally:
        progress.close()
    with begun(of_kind, dataset, start, tf.float64) as (training, session):
        in_float64 = [loss for loss, _ in training.steps(session, 0, min(FIRST_STEPS, settings.steps))]
    first = min(10, settings.steps - 1)
    milliseconds = 1e3 * (moments[-1] - moments[first]) / (settings.steps - first)
    print("%s, seed %d: test accuracy %.2f %%, %.0f ms a step" % (kind, seed, 100 * test_accuracy, milliseconds), flush=True)
    return {"kind": kind, "seed": seed, "test_accuracy": test_accuracy, "milliseconds_a_step": round(milliseconds, 2),
            "first_losses": losses[:FIRST_STEPS], "first_losses_in_float64": in_float64, "curve": curve(losses)}


@contextlib.contextmanager
def begun(of_kind, dataset, start, dtype=None):
    """Gives a `Training`, and a session in which its variables have the values of a dict by name."""
    with tf.Graph().as_default():
        training = Training(of_kind, dataset, alone(tower_devices(of_kind.num_towers)), dtype=dtype)
        with training.workers.session() as session:
            session.run(tf.global_variables_initializer())
            for variable in tf.global_variables():
                variable.load(start[variable.op.name], session)
            yield training, session


def curve(losses):
    """Returns the means of up to `POINTS` stretches of losses, a list of [last step, mean]."""
    stretches = np.array_split(np.arange(len(losses)), min(POINTS, len(losses)))
    return [[int(steps[-1]) + 1, round(float(np.mean([losses[step] for step in steps])), 5)] for steps in stretches]


if __name__ == "__main__":
    sys.exit(main())
