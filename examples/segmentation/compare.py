"""What synchronizing buys in segmentation: the same total batch as one tower, as synced towers and as unsynced ones.

    python -m examples.segmentation.compare --data-dir DATA --batch-size 8 --images-a-tower 2 --seeds 3

All trainings of a seed begin with the same values of the variables and see the same images in the same order, augmented alike. It
prints a table and leaves compare.json and compare.png in --out. The same command again goes on where it was cut.
"""
import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from examples.segmentation import train  # noqa: E402
from examples.segmentation.arguments import add_crop, add_data_dir, add_network, run_on_scenes  # noqa: E402
from examples.segmentation.task import segmentation  # noqa: E402
from examples.training import compare as comparing  # noqa: E402

RATE_OF_AN_IMAGE = train.DEFAULTS["learning_rate"] / 8
_ALIKE = ("depth", "width", "output_stride", "crop")


def main(argv=None):
    """Runs the command line and returns the exit status: 0, 2 for what can't be done, 130 when interrupted."""
    return run_on_scenes(compare, parse_arguments(argv))


def parse_arguments(argv):
    """Returns the settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m examples.segmentation.compare", description=__doc__.split("\n\n")[0])
    add_data_dir(parser)
    add_network(parser)
    add_crop(parser)
    comparing.add_arguments(parser, 8, 1000, RATE_OF_AN_IMAGE, "runs/compare-segmentation")
    settings = parser.parse_args(argv)
    if settings.learning_rate is None:
        settings.learning_rate = RATE_OF_AN_IMAGE * settings.batch_size
    return settings


def compare(settings, dataset):
    """Compares as the settings say, and returns the exit status."""
    alike = {name: getattr(settings, name) for name in _ALIKE}

    def settings_of():
        result = train.parse_arguments([])
        vars(result).update(alike)
        return result
    return comparing.compare(settings, dict(alike, model="PSPNet-%d" % settings.depth, data=dataset.name), settings_of,
                             lambda of_kind, dtype: segmentation(of_kind, dataset, dtype))


if __name__ == "__main__":
    sys.exit(main())
