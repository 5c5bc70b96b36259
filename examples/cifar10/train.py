"""Trains a ResNet on CIFAR-10 over several towers.

    python -m examples.cifar10.train --data-dir DATA --num-towers 4

Without --data-dir it trains on images made here, which are not CIFAR-10. Running the same command again goes on from the
last checkpoint in --train-dir. There it leaves checkpoints, TensorBoard summaries, results.json and curve.png.
"""
import argparse
import os
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import towers  # noqa: E402
from examples.cifar10 import data  # noqa: E402
from examples.cifar10.checkpoint import (  # noqa: E402
    UsageError, check_checkpoint, check_folder, check_settings, make_saver, read_history, read_sums, restore, save,
    saved_checkpoints)
from examples.cifar10.model import resnet  # noqa: E402
from examples.cifar10.report import (  # noqa: E402
    EventWriter, Progress, draw_curve, exit_status, read_json, write_json)

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
    parser.add_argument("--batch-size", type=positive_int, default=128, help="of all towers together (default 128)")
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
    settings = parser.parse_args(argv)
    if settings.batch_size < settings.num_towers:
        raise UsageError("A batch of %d is too small for %d towers: each needs an image."
                         % (settings.batch_size, settings.num_towers))
    return settings


def add_data_arguments(parser):
    """Adds what training and evaluation share."""
    parser.add_argument("--data-dir", help="folder of CIFAR-10, binary or Python files")
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 into --data-dir if it is not there")
    parser.add_argument("--train-dir", default="runs/cifar10", help="default runs/cifar10")
    parser.add_argument("--num-towers", type=positive_int, default=2, help="default 2")


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
    """The graph: training on towers, and evaluation of the same variables on the same towers.

    Attributes:
      pipeline, test_pipeline: `data.Pipeline`.
      global_step: int64 variable.
      train_op, loss, accuracy, summary: what a training step runs.
      correct: bool [b], of the test pipeline's next batch.
      config: `tf.ConfigProto`.
    """

    def __init__(self, settings, dataset):
        tf.set_random_seed(settings.seed)
        self.pipeline = data.Pipeline(dataset.train, settings.batch_size, True, settings.seed)
        self.test_pipeline = data.Pipeline(dataset.test, EVALUATION_BATCH, False)
        self.num_steps = settings.steps or settings.epochs * self.pipeline.steps_an_epoch
        self.global_step = tf.train.get_or_create_global_step()
        try:
            model_fn = resnet(settings.depth, settings.sync_bn, settings.weight_decay)
        except ValueError as error:
            raise UsageError(str(error)) from error
        builder = towers.TowerBuilder(tower_devices(settings.num_towers))
        replicas = builder.build(model_fn, self.pipeline.batch)
        rate = learning_rate(self.global_step, self.num_steps, settings.learning_rate, settings.warmup_steps)
        optimizer = tf.train.MomentumOptimizer(rate, 0.9, use_nesterov=True)
        self.train_op = towers.minimize(replicas, optimizer, settings.update_ops, global_step=self.global_step)
        tf.summary.scalar("learning_rate", rate)
        self.summary = tf.summary.merge_all()
        self.loss, self.accuracy = replicas.loss, replicas.merged()["accuracy"]
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            self.correct = builder.build(model_fn, self.test_pipeline.batch, training=False).merged()["correct"]
        self.config = towers.session_config(builder.devices)

    def test_accuracy(self, session):
        """Returns the fraction of test images classified rightly with moving averages."""
        self.test_pipeline.start(session)
        correct = [session.run(self.correct) for _ in range(self.test_pipeline.steps_an_epoch)]
        return float(np.concatenate(correct).mean())


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

    def __exit__(self, *_):
        for number, handler in self._usual.items():
            signal.signal(number, handler)


def train(settings):
    """Trains as the settings say, and returns the exit status."""
    dataset = load_data(settings)
    if settings.batch_size > len(dataset.train.labels):
        raise UsageError("A batch of %d is larger than the %d training images."
                         % (settings.batch_size, len(dataset.train.labels)))
    check_settings(settings, dataset.name)
    print("Training a ResNet-%d on %s: %d towers, batch %d, %s batch norm, update ops '%s'." % (
        settings.depth, dataset.name, settings.num_towers, settings.batch_size,
        "synced" if settings.sync_bn else "per-tower", settings.update_ops))
    with tf.Graph().as_default():
        training = Training(settings, dataset)
        saver, checkpoints = make_saver(), saved_checkpoints(settings.train_dir)
        if checkpoints:
            check_checkpoint(checkpoints[-1], tf.global_variables(), settings.depth)
        with tf.Session(config=training.config) as session, _Interruption() as interruption:
            if checkpoints:
                restore(saver, session, checkpoints[-1])
                saver.recover_last_checkpoints(checkpoints)
                print("Going on from step %d, %s." % (session.run(training.global_step), checkpoints[-1]))
            else:
                session.run(tf.global_variables_initializer())
            return _run(settings, dataset, training, saver, session, interruption)


def _run(settings, dataset, training, saver, session, interruption):
    step = first_step = int(session.run(training.global_step))
    if step >= training.num_steps:
        print("The %d steps asked for are done." % training.num_steps)
    steps_an_epoch = training.pipeline.steps_an_epoch
    # Damaged files are refused before anything is written.
    history, sums = read_history(settings.train_dir, step), read_sums(settings.train_dir, step, step % steps_an_epoch)
    check_folder(settings.train_dir)
    write_json(os.path.join(settings.train_dir, "settings.json"), dict(vars(settings), data=dataset.name))
    history_path = os.path.join(settings.train_dir, "history.json")
    progress = Progress(step, training.num_steps, settings.batch_size)
    saved = step if step else None
    writer = EventWriter(settings.train_dir, session.graph if step == 0 else None)
    started = time.time()
    try:
        while step < training.num_steps and interruption.signal is None:
            if step == first_step or step % steps_an_epoch == 0:
                training.pipeline.start(session, step // steps_an_epoch, step % steps_an_epoch)
                progress.restart_clock(step)  # evaluating and saving are no training
            fetches = [training.loss, training.accuracy, training.train_op]
            if step % 20 == 0:
                loss, accuracy, _, summary = session.run(fetches + [training.summary])
                writer.add(summary, step)
            else:
                loss, accuracy, _ = session.run(fetches)
            if not np.isfinite(loss):
                raise UsageError("The loss is %s at step %d: try a smaller --learning-rate. The checkpoints in %s are "
                                 "those of earlier steps." % (loss, step, settings.train_dir))
            step += 1
            sums += loss, accuracy, 1
            progress.step(step, loss, accuracy)
            if step % steps_an_epoch == 0 or step == training.num_steps:
                history.append(_end_epoch(step, steps_an_epoch, sums, training, session, progress, writer))
                write_json(history_path, history)
                sums = sums * (step % steps_an_epoch > 0)  # of an epoch that goes on later they are kept
            if step % settings.save_every == 0 or step % steps_an_epoch == 0 or step == training.num_steps:
                save(saver, session, settings.train_dir, step, sums)
                saved = step
        if step != saved and step > 0:
            save(saver, session, settings.train_dir, step, sums)
    finally:
        progress.close()
        writer.close()
    if step < training.num_steps:
        if step:
            print("Interrupted; step %d is saved in %s. Run the same command again to go on from there."
                  % (step, settings.train_dir))
        else:
            print("Interrupted before the first step.")
        return 128 + interruption.signal
    _finish(settings, dataset, history, step, time.time() - started, (step - first_step) * settings.batch_size)
    return 0


def _end_epoch(step, steps_an_epoch, sums, training, session, progress, writer):
    loss, accuracy = sums[:2] / sums[2]
    record = {"step": step, "epoch": round(step / steps_an_epoch, 3), "train_loss": float(loss),
              "train_accuracy": float(accuracy), "test_accuracy": training.test_accuracy(session)}
    progress.say("epoch %g: training loss %.3f, accuracy %.1f %%; test accuracy %.1f %%" % (
        record["epoch"], loss, 100 * accuracy, 100 * record["test_accuracy"]))
    summary = tf.Summary(value=[tf.Summary.Value(tag="test_accuracy", simple_value=record["test_accuracy"])])
    writer.add(summary, step)
    return record


def _finish(settings, dataset, history, step, seconds, images):
    results_path = os.path.join(settings.train_dir, "results.json")
    curve_path = os.path.join(settings.train_dir, "curve.png")
    if images or _step_of(results_path) != step:
        write_json(results_path, {
            "settings": vars(settings), "data": dataset.name, "tensorflow": tf.__version__, "step": step,
            "test_accuracy": history[-1]["test_accuracy"] if history else None,
            "images_per_second_of_last_run": images / seconds if images else None, "history": history})
    if history:
        draw_curve(history, "ResNet-%d, %d towers, %s" % (settings.depth, settings.num_towers, dataset.name), curve_path)
        print("Test accuracy %.2f %% on %s after %d steps." % (100 * history[-1]["test_accuracy"], dataset.name, step))
        print("Results: %s, curve: %s" % (results_path, curve_path))


def _step_of(results_path):
    try:
        return read_json(results_path, {}).get("step")
    except (AttributeError, ValueError):  # it is damaged, and written anew
        return None


if __name__ == "__main__":
    sys.exit(main())
