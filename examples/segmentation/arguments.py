"""The arguments that name the data and the network, and the data that they name."""
import atexit
import shutil
import tempfile

import tensorflow.compat.v1 as tf

from examples.segmentation.scenes import DataError, find_damage, generate, load
from examples.training.command import positive_int, run

__all__ = ["TRAIN_DIR", "add_crop", "add_data_dir", "add_network", "load_data", "run_on_scenes"]

TRAIN_DIR = "runs/segmentation"


def add_data_dir(parser):
    """Adds what names the data."""
    parser.add_argument("--data-dir", help="folder of CamVid or Cityscapes; without it, scenes made here")


def add_network(parser):
    """Adds what the network is made with."""
    parser.add_argument("--depth", type=int, default=18, help="18 or 34 (default 18)")
    parser.add_argument("--width", type=positive_int, default=32,
                        help="channels of the first stage, a multiple of 8; 64 in the paper (default 32)")
    parser.add_argument("--output-stride", type=int, default=8, help="8, or 4 for small images (default 8)")


def add_crop(parser):
    """Adds the size of training images."""
    parser.add_argument("--crop", type=positive_int, nargs=2, default=[160, 208], metavar=("HEIGHT", "WIDTH"),
                        help="of training images, scaled by a half to two before (default 160 208)")


def load_data(settings):
    """Returns the `scenes.Dataset` that the settings name."""
    if settings.data_dir:
        return load(settings.data_dir)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return generate(folder)


def run_on_scenes(command, settings):
    """Calls a function of settings and the data that they name, and returns its exit status, as `command.run` does.

    Where TensorFlow finds something wrong with an input, the damaged file is named.
    """
    def called():
        dataset = load_data(settings)
        try:
            return command(settings, dataset)
        except tf.errors.InvalidArgumentError as error:
            damage = find_damage(dataset)
            if damage is None:
                raise
            raise damage from error
    return run(called, DataError)
