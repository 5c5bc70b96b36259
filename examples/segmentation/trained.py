"""A trained network as its folder has it: what was trained, and the newest checkpoint."""
import argparse
import os

import tensorflow.compat.v1 as tf

from examples.segmentation.task import network_of
from examples.training.folder import UsageError, check_checkpoint, read_settings, restore, saved_checkpoints

__all__ = ["Trained"]

_NEEDED = {"depth": int, "width": int, "output_stride": int, "data": str, "sync_bn": bool, "mask": bool}


class Trained:
    """The network that a training left in a folder.

    Args:
      train_dir: str.
      dataset: `scenes.Dataset`, which has to be what was trained on.

    Raises:
      UsageError: if there is none, or it was trained on other data.

    Attributes:
      checkpoint: str, the path of its newest checkpoint.
      model_fn: its model function.
    """

    def __init__(self, train_dir, dataset):
        checkpoints, settings = saved_checkpoints(train_dir), read_settings(train_dir)
        if not checkpoints:
            raise UsageError("There is no checkpoint in %s: train first, or name another --train-dir." % train_dir)
        for name, kind in _NEEDED.items():
            if not isinstance(settings.get(name), kind):
                raise UsageError("%s does not say the %s of the training in it: it has %r."
                                 % (os.path.join(train_dir, "settings.json"), name, settings.get(name)))
        if dataset.name != settings["data"]:
            raise UsageError("The network in %s was trained on %s, and this is %s: name its --data-dir."
                             % (train_dir, settings["data"], dataset.name))
        self.checkpoint = checkpoints[-1]
        try:
            self.model_fn = network_of(argparse.Namespace(**dict(settings, weight_decay=0.0)), dataset)
        except UsageError as error:
            raise UsageError("%s is damaged: %s" % (os.path.join(train_dir, "settings.json"), error)) from error
        self._model_name = "PSPNet-%d" % settings["depth"]

    def restore(self, session):
        """Restores the variables of the default graph, which are those of `model_fn`."""
        check_checkpoint(self.checkpoint, tf.global_variables(), self._model_name)
        restore(tf.train.Saver(), session, self.checkpoint)
