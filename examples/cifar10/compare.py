"""What synchronizing buys: the same total batch as one tower, as synced towers and as unsynced ones, from the same start.

    python -m examples.cifar10.compare --data-dir DATA --batch-size 16 --images-a-tower 2 --seeds 3

All trainings of a seed begin with the same values of the variables and see the same images in the same order, augmented alike. It
prints a table and leaves compare.json and compare.png in --out. The same command again goes on where it was cut.
"""
import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from examples.cifar10 import data, train  # noqa: E402
from examples.cifar10.arguments import add_data_arguments, load_data  # noqa: E402
from examples.cifar10.task import cifar10  # noqa: E402
from examples.training import compare as comparing  # noqa: E402
from examples.training.command import run  # noqa: E402

RATE_OF_AN_IMAGE = 0.1 / 128  # the recipe's


def main(argv=None):
    """Runs the command line and returns the exit status: 0, 2 for what can't be done, 130 when interrupted."""
    return run(lambda: compare(parse_arguments(argv)), data.DataError)


def parse_arguments(argv):
    """Returns the settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m examples.cifar10.compare", description=__doc__.split("\n\n")[0])
    add_data_arguments(parser)
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 (default 20)")
    comparing.add_arguments(parser, 16, 3000, RATE_OF_AN_IMAGE, "runs/compare")
    settings = parser.parse_args(argv)
    if settings.learning_rate is None:
        settings.learning_rate = RATE_OF_AN_IMAGE * settings.batch_size
    return settings


def compare(settings):
    """Compares as the settings say, and returns the exit status."""
    dataset = load_data(settings)
    return comparing.compare(
        settings, {"model": "ResNet-%d" % settings.depth, "data": dataset.name},
        lambda: train.parse_arguments(["--depth", str(settings.depth)]), lambda of_kind, dtype: cifar10(of_kind, dataset, dtype))


if __name__ == "__main__":
    sys.exit(main())
