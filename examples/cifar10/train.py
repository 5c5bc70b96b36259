"""Trains a ResNet on CIFAR-10 over several towers.

    python -m examples.cifar10.train --data-dir DATA --num-towers 4
    python -m towers.launch -n 2 -m examples.cifar10.train --data-dir DATA --num-towers 2    # the same on two workers

Without --data-dir it trains on images made here, which are not CIFAR-10. Running the same command again goes on from the
last checkpoint in --train-dir. There it leaves checkpoints, TensorBoard summaries, results.json and curve.png.
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
from examples.cifar10.checkpoint import (  # noqa: E402
    UsageError, check_checkpoint, check_settings, make_saver, restore, saved_checkpoints)
from examples.cifar10.model import resnet  # noqa: E402
from examples.cifar10.record import NoRecord, Record  # noqa: E402
from examples.cifar10.report import exit_status  # noqa: E402

EVALUATION_BATCH = 500


def main(argv=None):
    """Runs the command line and returns the exit status: 0, 2 for what can't be done, 128 + signal when interrupted."""
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    return exit_status(lambda: train(parse_arguments(argv)), UsageError, data.DataError)


def parse_arguments(argv):
    """Returns the settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m examples.cifar10.train", description=__doc__.split("\n\n")[0])
    add_data_arguments(parser)
    parser.add_argument("--batch-size", type=positive_int, default=128,
                        help="of all towers of all workers together (default 128)")
    parser.add_argument("--sync-bn", dest="sync_bn", action="store_true", default=True,
                        help="batch norm over all towers (the default)")
    parser.add_argument("--no-sync-bn", dest="sync_bn", action="store_false", help="batch norm of each tower alone")
    parser.add_argument("--update-ops", choices=["first", "all", "last", "none"], default="first",
                        help="whose moving averages are updated (default first)")
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 (default 20)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive_int, default=10, help="default 10")
    length.add_argument("--steps", type=positive_int, help="instead of --epochs")
    parser.add_argument("--learning-rate", type=float, default=0.1,
                        help="at its peak, after warm-up; it then falls to zero as a cosine (default 0.1)")
    parser.add_argument("--warmup-steps", type=int, default=200, help="default 200, at most a tenth of all steps")
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--save-every", type=positive_int, default=200, metavar="STEPS", help="default 200")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def add_data_arguments(parser):
    """Adds what training and evaluation share."""
    parser.add_argument("--data-dir", help="folder of CIFAR-10, binary or Python files")
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 into --data-dir if it is not there")
    parser.add_argument("--train-dir", default="runs/cifar10", help="default runs/cifar10")
    parser.add_argument("--num-towers", type=positive_int, default=2, help="of each worker (default 2)")


def positive_int(text):
    """Returns an int of 1 or more, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("%s is not 1 or more" % text)
    return value


def load_data(settings):
    """Returns the `Dataset` that the settings name, downloaded if they say so."""
    if settings.download:
        if not settings.data_dir:
            raise UsageError("--download needs a --data-dir to fetch CIFAR-10 into.")
        if not data.is_there(settings.data_dir):
            data.download(settings.data_dir)
    return data.load(settings.data_dir) if settings.data_dir else data.generate()


def tower_devices(num_towers):
    """Returns a device for each tower: the GPUs in turn, or as many CPU devices."""
    gpus = [device for device in towers.find_devices() if "gpu" in device]
    return [gpus[i % len(gpus)] if gpus else "/cpu:%d" % i for i in range(num_towers)]


class Training:
    """The graph: training on the towers of all workers, and evaluation of the same variables on this worker's.

    Attributes:
      workers: `towers.workers.Workers`.
      data_name: str.
      who: str, the towers that train.
      pipeline, test_pipeline: `data.Pipeline`, of this worker's part of each batch, and of the test images.
      global_step: int64 variable.
      train_op, loss, accuracy, summary: what a training step runs.
      correct: bool [b], of the test pipeline's next batch.
      broadcast: op that gives every worker the chief's variables.
    """

    def __init__(self, settings, dataset, workers):
        tf.set_random_seed(settings.seed)
        self.workers, self.data_name = workers, dataset.name
        self.who = "%d towers" % (workers.size * settings.num_towers)
        self.who += " of %d workers" % workers.size if workers.size > 1 else ""
        rows = data.rows_of_part(settings.batch_size, workers.rank, workers.size, settings.num_towers)
        self.pipeline = data.Pipeline(dataset.train, settings.batch_size, True, settings.seed, rows)
        self._num_test_images = len(dataset.test.labels)
        self.test_pipeline = data.Pipeline(
            data.Images(*(values[workers.rank::workers.size] for values in dataset.test)), EVALUATION_BATCH, False)
        self.num_steps = settings.steps or settings.epochs * self.pipeline.steps_an_epoch
        self.global_step = tf.train.get_or_create_global_step()
        try:
            model_fn = resnet(settings.depth, settings.sync_bn, settings.weight_decay)
        except ValueError as error:
            raise UsageError(str(error)) from error
        devices = tower_devices(settings.num_towers)
        replicas = towers.TowerBuilder(devices, workers=workers).build(model_fn, self.pipeline.batch)
        rate = learning_rate(self.global_step, self.num_steps, settings.learning_rate, settings.warmup_steps)
        optimizer = tf.train.MomentumOptimizer(rate, 0.9, use_nesterov=True)
        self.train_op = towers.minimize(replicas, optimizer, settings.update_ops, global_step=self.global_step)
        tf.summary.scalar("learning_rate", rate)
        self.summary = tf.summary.merge_all()
        self.loss, self.accuracy = replicas.loss, replicas.merged()["accuracy"]
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            replicas_alone = towers.TowerBuilder(devices).build(model_fn, self.test_pipeline.batch, training=False)
            self.correct = replicas_alone.merged()["correct"]
        if workers.size > 1:
            self.accuracy = workers.all_reduce(self.accuracy * (rows[1] - rows[0]) / settings.batch_size)
            self._number = tf.placeholder(tf.int64, [])
            self._sum_of_numbers = workers.all_reduce(self._number)
        self.broadcast = workers.broadcast_variables()

    def test_accuracy(self, session):
        """Returns the fraction of test images classified rightly with moving averages; each worker takes some of them."""
        self.test_pipeline.start(session)
        right = sum(int(session.run(self.correct).sum()) for _ in range(self.test_pipeline.steps_an_epoch))
        return self.sum_over_workers(session, right) / self._num_test_images

    def sum_over_workers(self, session, number):
        """Returns the sum of an integer over workers, which all have to call this."""
        return int(session.run(self._sum_of_numbers, {self._number: number})) if self.workers.size > 1 else number


def learning_rate(step, num_steps, peak, warmup_steps):
    """Rises linearly to `peak` in `warmup_steps`, at most a tenth of all, then falls to zero as a cosine."""
    warmup = max(1.0, min(warmup_steps, num_steps / 10))
    step = tf.cast(step, tf.float32)
    done = tf.clip_by_value((step - warmup) / max(1.0, num_steps - warmup), 0.0, 1.0)
    return peak * tf.minimum((step + 1) / warmup, 1.0) * 0.5 * (1 + tf.cos(np.pi * done))


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
    if settings.batch_size > len(dataset.train.labels):
        raise UsageError("A batch of %d is larger than the %d training images."
                         % (settings.batch_size, len(dataset.train.labels)))
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
    saver, checkpoints = make_saver(), saved_checkpoints(settings.train_dir)
    if checkpoints:
        check_checkpoint(checkpoints[-1], tf.global_variables(), settings.depth)
        restore(saver, session, checkpoints[-1])
        saver.recover_last_checkpoints(checkpoints)
        print("Going on from step %d, %s." % (session.run(training.global_step), checkpoints[-1]))
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
