"""Evaluates a trained ResNet on the test images of CIFAR-10, with moving averages.

    python -m examples.cifar10.evaluate --data-dir DATA --train-dir runs/cifar10

The model is the one that the training left in --train-dir; its depth is read there. With --recalibrate K its moving averages
are estimated anew before, and the checkpoint stays as it is.
"""
import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import tf_syncbn  # noqa: E402
import towers  # noqa: E402
from examples.cifar10 import data  # noqa: E402
from examples.cifar10.arguments import TRAIN_DIR, add_data_arguments, load_data  # noqa: E402
from examples.cifar10.model import resnet  # noqa: E402
from examples.training.command import add_train_dir, positive_int, run  # noqa: E402
from examples.training.folder import (  # noqa: E402
    UsageError, check_checkpoint, read_settings, restore, saved_checkpoints)
from examples.training.graph import tower_devices  # noqa: E402

_NEEDED = {"depth": int, "data": str, "sync_bn": bool, "weight_decay": (int, float)}


def main(argv=None):
    """Runs the command line and returns the exit status: 0, or 2 for what can't be done."""
    parser = argparse.ArgumentParser(prog="python -m examples.cifar10.evaluate", description=__doc__.split("\n\n")[0])
    add_data_arguments(parser)
    add_train_dir(parser, TRAIN_DIR)
    parser.add_argument("--batch-size", type=positive_int, default=500, help="of all towers together (default 500)")
    parser.add_argument("--recalibrate", type=positive_int, metavar="K",
                        help="estimate the moving averages anew, over K batches of training images")
    settings = parser.parse_args(argv)
    return run(lambda: evaluate(settings), data.DataError)


def evaluate(settings):
    """Prints the test accuracy of the newest checkpoint."""
    checkpoints, trained = saved_checkpoints(settings.train_dir), read_settings(settings.train_dir)
    if not checkpoints:
        raise UsageError("There is no checkpoint in %s: train first, or name another --train-dir." % settings.train_dir)
    checkpoint = checkpoints[-1]
    for name, kind in _NEEDED.items():
        if not isinstance(trained.get(name), kind):
            raise UsageError("%s does not say the %s of the training in it: it has %r."
                             % (os.path.join(settings.train_dir, "settings.json"), name, trained.get(name)))
    dataset = load_data(settings)
    if dataset.name != trained["data"]:
        raise UsageError("The model in %s was trained on %s, and this is %s: name its --data-dir."
                         % (settings.train_dir, trained["data"], dataset.name))
    with tf.Graph().as_default():
        pipeline = data.Pipeline(dataset.test, settings.batch_size, False)
        builder = towers.TowerBuilder(tower_devices(settings.num_towers))
        try:
            model_fn = resnet(trained["depth"], trained["sync_bn"], trained["weight_decay"])
        except ValueError as error:
            raise UsageError("%s is damaged: %s" % (os.path.join(settings.train_dir, "settings.json"), error)) from error
        correct = builder.build(model_fn, pipeline.batch, training=False).merged()["correct"]
        check_checkpoint(checkpoint, tf.global_variables(), "ResNet-%d" % trained["depth"])
        recalibrate = _recalibration(settings, dataset, builder, trained)
        with tf.Session(config=towers.session_config(builder.devices)) as session:
            restore(tf.train.Saver(), session, checkpoint)
            recalibrate(session)
            pipeline.start(session)
            right = np.concatenate([session.run(correct) for _ in range(pipeline.steps_an_epoch)])
    print("Test accuracy %.2f %% on %s, %s" % (100 * right.mean(), dataset.name, checkpoint))


def _recalibration(settings, dataset, builder, trained):
    """Builds the training model on the same variables, and returns a function of a session that recalibrates it."""
    if not settings.recalibrate:
        return lambda session: None
    pipeline = data.Pipeline(dataset.train, settings.batch_size, True)
    if settings.recalibrate > pipeline.steps_an_epoch:
        raise UsageError("--recalibrate %d asks for more batches than the training images have, %d of %d."
                         % (settings.recalibrate, pipeline.steps_an_epoch, settings.batch_size))
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        # Synced even if the training was not: the averages are those of the whole batch.
        replicas = builder.build(resnet(trained["depth"], True, trained["weight_decay"]), pipeline.batch)

    def recalibrate(session):
        pipeline.start(session)
        tf_syncbn.recalibrate(session, replicas, settings.recalibrate)
        print("Moving averages recalibrated over %d batches of %d training images."
              % (settings.recalibrate, settings.batch_size))

    return recalibrate


if __name__ == "__main__":
    sys.exit(main())
