"""Trains a ResNet on CIFAR-10 over several towers.

    python -m examples.cifar10.train --data-dir DATA --num-towers 4
    python -m towers.launch -n 2 -m examples.cifar10.train --data-dir DATA --num-towers 2    # the same on two workers

Without --data-dir it trains on images made here, which are not CIFAR-10. How long, at which rate and with which weight decay
the --recipe says, where nothing else does. Running the same command again goes on from the last checkpoint in --train-dir.
There it leaves checkpoints, TensorBoard summaries, results.json and curve.png.
"""
import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from examples.cifar10 import data  # noqa: E402
from examples.cifar10.arguments import TRAIN_DIR, add_data_arguments, load_data  # noqa: E402
from examples.cifar10.recipes import RECIPES  # noqa: E402
from examples.cifar10.task import cifar10  # noqa: E402
from examples.training import loop  # noqa: E402
from examples.training.command import add_train_dir, add_training_arguments, number, run  # noqa: E402


def main(argv=None):
    """Runs the command line and returns the exit status: 0, 2 for what can't be done, 128 + signal when interrupted."""
    return run(lambda: train(parse_arguments(argv)), data.DataError)


def parse_arguments(argv):
    """Returns the settings that the command line asks for, those of its recipe where it does not say."""
    parser = argparse.ArgumentParser(prog="python -m examples.cifar10.train", description=__doc__.split("\n\n")[0])
    add_data_arguments(parser)
    add_train_dir(parser, TRAIN_DIR)
    add_training_arguments(parser, 128, _of_recipes)
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 (default 20)")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="cosine",
                        help="; ".join("%s: %s" % (name, recipe.what) for name, recipe in RECIPES.items()) + " (default cosine)")
    parser.add_argument("--label-smoothing", type=float, default=0.0,
                        help="the share of a label that is spread over all classes (default 0)")
    parser.add_argument("--cutout", type=number(int, 0, data.IMAGE_SHAPE[0]), default=0,
                        help="the side in pixels of a square that training images lose (default 0)")
    settings = parser.parse_args(argv)
    for name in ("epochs", "learning_rate", "warmup_steps", "weight_decay"):
        if getattr(settings, name) is None:
            setattr(settings, name, getattr(RECIPES[settings.recipe], name))
    return settings


def _of_recipes(name):
    """Returns the part of an argument's help that says what recipes have."""
    return "by recipe: " + ", ".join("%s %g" % (recipe, getattr(RECIPES[recipe], name)) for recipe in RECIPES)


def train(settings):
    """Trains as the settings say, and returns the exit status."""
    return loop.train(settings, lambda settings: cifar10(settings, load_data(settings)))


if __name__ == "__main__":
    sys.exit(main())
