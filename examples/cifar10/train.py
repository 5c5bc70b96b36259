"""Trains a ResNet on CIFAR-10 over several towers.

    python -m examples.cifar10.train --data-dir DATA --num-towers 4
    python -m towers.launch -n 2 -m examples.cifar10.train --data-dir DATA --num-towers 2    # the same on two workers

Without --data-dir it trains on images made here, which are not CIFAR-10. How long, at which rate and with which weight decay
the --recipe says, where nothing else does. Running the same command again goes on from the last checkpoint in --train-dir.
There it leaves checkpoints, TensorBoard summaries, results.json and curve.png.
"""
import argparse
import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import towers  # noqa: E402
from examples.cifar10 import data  # noqa: E402
from examples.cifar10.arguments import add_data_arguments, add_train_dir, load_data, positive_int  # noqa: E402
from examples.cifar10.checkpoint import (  # noqa: E402
    UsageError, changed_settings, check_checkpoint, check_settings, make_saver, restore, saved_checkpoints)
from examples.cifar10.recipes import RECIPES  # noqa: E402
from examples.cifar10.record import NoRecord, Record  # noqa: E402
from examples.cifar10.report import exit_status  # noqa: E402
from examples.cifar10.training import Training, tower_devices  # noqa: E402


def main(argv=None):
    """Runs the command line and returns the exit status: 0, 2 for what can't be done, 128 + signal when interrupted."""
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    return exit_status(lambda: train(parse_arguments(argv)), UsageError, data.DataError)


def parse_arguments(argv):
    """Returns the settings that the command line asks for, those of its recipe where it does not say."""
    parser = argparse.ArgumentParser(prog="python -m examples.cifar10.train", description=__doc__.split("\n\n")[0])
    add_data_arguments(parser)
    add_train_dir(parser)
    parser.add_argument("--batch-size", type=positive_int, default=128,
                        help="of all towers of all workers together (default 128)")
    parser.add_argument("--sync-bn", dest="sync_bn", action="store_true", default=True,
                        help="batch norm over all towers (the default)")
    parser.add_argument("--no-sync-bn", dest="sync_bn", action="store_false", help="batch norm of each tower alone")
    parser.add_argument("--update-ops", choices=["first", "all", "last", "none"], default="first",
                        help="whose moving averages are updated (default first)")
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 (default 20)")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="cosine",
                        help="; ".join("%s: %s" % (name, recipe.what) for name, recipe in RECIPES.items()) + " (default cosine)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive_int, help=_of_recipes("epochs"))
    length.add_argument("--steps", type=positive_int, help="instead of --epochs")
    parser.add_argument("--learning-rate", type=float, help="at its peak, " + _of_recipes("learning_rate"))
    parser.add_argument("--warmup-steps", type=int,
                        help="in which the rate rises to its peak, at most a tenth of all steps; " + _of_recipes("warmup_steps"))
    parser.add_argument("--weight-decay", type=float, help=_of_recipes("weight_decay"))
    parser.add_argument("--label-smoothing", type=float, default=0.0,
                        help="the share of a label that is spread over all classes (default 0)")
    parser.add_argument("--save-every", type=positive_int, default=200, metavar="STEPS", help="default 200")
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(argv)
    for name in ("epochs", "learning_rate", "warmup_steps", "weight_decay"):
        if getattr(settings, name) is None:
            setattr(settings, name, getattr(RECIPES[settings.recipe], name))
    return settings


def _of_recipes(name):
    """Returns the part of an argument's help that says what recipes have."""
    return "by recipe: " + ", ".join("%s %g" % (recipe, getattr(RECIPES[recipe], name)) for recipe in RECIPES)


class _Interruption:
    """Notes the first SIGINT or SIGTERM instead of dying of it; a second one has its usual effect."""

    def __enter__(self):
        self.signal = None
        self._usual = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, _):
        self.signal = number
        signal.signal(number, self._usual[number])

    def came(self, training, session):
        """Tells whether a signal came to any worker. All ask between the same steps, and stop together."""
        if not training.sum_over_workers(session, int(self.signal is not None)):
            return False
        self.signal = self.signal or signal.SIGTERM
        return True

    def __exit__(self, *_):
        for number, handler in self._usual.items():
            signal.signal(number, handler)


def train(settings):
    """Trains as the settings say, and returns the exit status."""
    workers = connect(settings)
    dataset = load_data(settings)
    with tf.Graph().as_default():
        if workers.is_chief:
            check_settings(settings, dataset.name)
        training = Training(settings, dataset, workers)
        with workers.session() as session, _Interruption() as interruption:
            if workers.is_chief:
                return _run(settings, training, session, interruption, _begin(settings, training, session))
            session.run(tf.global_variables_initializer())
            return _run(settings, training, session, interruption, NoRecord())


def connect(settings):
    """Returns the `towers.workers.Workers` that this process is one of, alone where no others are named."""
    try:
        workers = towers.workers.connect(devices=tower_devices(settings.num_towers))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RuntimeError as error:  # others did not come, or a port is taken: another time it may work
        sys.exit("error: %s" % error)
    if workers.is_evaluator:
        raise UsageError("TF_CONFIG says that this process evaluates: examples.cifar10.evaluate does, once for all.")
    if settings.batch_size < settings.num_towers * workers.size:
        raise UsageError("A batch of %d is too small for %d towers: each needs an image."
                         % (settings.batch_size, settings.num_towers * workers.size))
    if workers.size > 1:
        settings.num_workers = workers.size
    return workers


def _begin(settings, training, session):
    """Restores or initializes the variables, and returns the `Record` of this training."""
    print("Training a ResNet-%d on %s: %s, batch %d, %s batch norm, update ops '%s'." % (
        settings.depth, training.data_name, training.who, settings.batch_size,
        "synced" if settings.sync_bn else "per-tower", settings.update_ops))
    saver, checkpoints, changes = make_saver(), saved_checkpoints(settings.train_dir), changed_settings(settings)
    if checkpoints:
        check_checkpoint(checkpoints[-1], tf.global_variables(), settings.depth)
        restore(saver, session, checkpoints[-1])
        saver.recover_last_checkpoints(checkpoints)
        print("Going on from step %d, %s." % (session.run(training.global_step), checkpoints[-1]))
        if changes:
            print("From here on with other settings: %s." % ", ".join("%s %s, not %s" % change for change in changes))
    else:
        session.run(tf.global_variables_initializer())
    return Record(settings, training, saver, session, int(session.run(training.global_step)))


def _run(settings, training, session, interruption, record):
    session.run(training.broadcast)
    step = first_step = int(session.run(training.global_step))
    if step >= training.num_steps:
        record.say("The %d steps asked for are done." % training.num_steps)
    steps_an_epoch = training.pipeline.steps_an_epoch
    try:
        while step < training.num_steps and not interruption.came(training, session):
            if step == first_step or step % steps_an_epoch == 0:
                training.pipeline.start(session, step // steps_an_epoch, step % steps_an_epoch)
                record.restart_clock(step)  # evaluating and saving are no training
            fetches = [training.loss, training.accuracy, training.train_op]
            if record.wants_summary(step):
                loss, accuracy, _, summary = session.run(fetches + [training.summary])
                record.add_summary(summary, step)
            else:
                loss, accuracy, _ = session.run(fetches)
            if not np.isfinite(loss):
                raise UsageError("The loss is %s at step %d: try a smaller --learning-rate. The checkpoints in %s are "
                                 "those of earlier steps." % (loss, step, settings.train_dir))
            step += 1
            record.step(step, loss, accuracy)
            if step % steps_an_epoch == 0 or step == training.num_steps:
                record.end_epoch(step, training.test_accuracy(session))
            if step % settings.save_every == 0 or step % steps_an_epoch == 0 or step == training.num_steps:
                record.save(step)
        record.save(step)
    finally:
        record.close()
    if step < training.num_steps:
        record.interrupted(step)
        return 128 + interruption.signal
    record.finish(step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
