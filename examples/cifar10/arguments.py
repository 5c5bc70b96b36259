"""The arguments that name the data, and the data that they name."""
from examples.cifar10 import data
from examples.training.folder import UsageError

__all__ = ["TRAIN_DIR", "add_data_arguments", "load_data"]

TRAIN_DIR = "runs/cifar10"


def add_data_arguments(parser):
    """Adds what names the data."""
    parser.add_argument("--data-dir", help="folder of CIFAR-10, binary or Python files; without it, images made here")
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 into --data-dir if it is not there")
    parser.add_argument("--data-name", help="what results and pictures call the data of --data-dir (default CIFAR-10)")


def load_data(settings):
    """Returns the `data.Dataset` that the settings name, downloaded if they say so."""
    if settings.download:
        if not settings.data_dir:
            raise UsageError("--download needs a --data-dir to fetch CIFAR-10 into.")
        if not data.is_there(settings.data_dir):
            data.download(settings.data_dir)
    if not settings.data_dir:
        if settings.data_name:
            raise UsageError("--data-name names the data of a --data-dir, and there is none.")
        return data.generate()
    dataset = data.load(settings.data_dir)
    return dataset._replace(name=settings.data_name or dataset.name)
