"""Trains a PSPNet-like network on street scenes over several towers.

    python -m examples.segmentation.train --data-dir DATA --num-towers 4
    python -m towers.launch -n 2 -m examples.segmentation.train --data-dir DATA --num-towers 2    # the same on two workers

Without --data-dir it trains on scenes made here. Running the same command again goes on from the last checkpoint in --train-dir.
There it leaves checkpoints, TensorBoard summaries, results.json and curve.png.
"""
import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from examples.segmentation.arguments import TRAIN_DIR, add_crop, add_data_dir, add_network, run_on_scenes  # noqa: E402
from examples.segmentation.task import segmentation  # noqa: E402
from examples.training import loop  # noqa: E402
from examples.training.command import add_train_dir, add_training_arguments, number  # noqa: E402

DEFAULTS = {"epochs": 200, "learning_rate": 0.05, "warmup_steps": 200, "weight_decay": 5e-4}


def main(argv=None):
    """Runs the command line and returns the exit status: 0, 2 for what can't be done, 128 + signal when interrupted."""
    return run_on_scenes(train, parse_arguments(argv))


def parse_arguments(argv):
    """Returns the settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m examples.segmentation.train", description=__doc__.split("\n\n")[0])
    add_data_dir(parser)
    add_train_dir(parser, TRAIN_DIR)
    add_training_arguments(parser, 8, lambda name: "default %g" % DEFAULTS[name])
    add_network(parser)
    add_crop(parser)
    parser.add_argument("--mask", action="store_true",
                        help="leave void, what images are filled up with too, out of the moments of batch norm")
    parser.add_argument("--recolour", type=number(float, 0, 1), default=0.0, metavar="SHARE",
                        help="by how much saturation, contrast and brightness are changed at most, 0 to 1 (default 0)")
    parser.set_defaults(evaluate_every=10)
    settings = parser.parse_args(argv)
    for name, value in DEFAULTS.items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    return settings


def train(settings, dataset):
    """Trains as the settings say, and returns the exit status."""
    return loop.train(settings, lambda settings: segmentation(settings, dataset))


if __name__ == "__main__":
    sys.exit(main())
