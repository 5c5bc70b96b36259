"""The graph of a training: towers on all workers, and the same variables evaluated."""
from typing import Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

import towers
from examples.training.folder import UsageError
from examples.training.order import rows_of_part
from examples.training.schedule import learning_rate

__all__ = ["Measure", "Task", "Training", "alone", "tower_devices"]


class Measure(NamedTuple):
    """A number from 0 to 1 that an evaluation comes to.

    Attributes:
      name: str, in files and summaries: "test_accuracy".
      words: str, on the terminal and in pictures: "test accuracy".
    """
    name: str
    words: str


class Task(NamedTuple):
    """What an example trains.

    Attributes:
      model_name: str, "ResNet-20".
      data_name: str.
      identity: dict by name of the settings that make it another model, with which no training goes on.
      num_images: int, the training images.
      training_input, test_input: functions of the rows (first, last + 1) of each batch in training, and of a worker's number and
        the number of workers in the test, that return an `order.Pipeline`, of parts that are this process's.
      model_fn: a model function whose outputs are a dict of "loss", "accuracy" and what `counts` needs.
      optimizer: function of a learning rate that returns a `tf.train.Optimizer`.
      decay: as for `schedule.learning_rate`.
      counts: function of the outputs for a batch of test images that returns an int64 tensor; they are summed over all batches.
      measures: tuple of `Measure`, the one that counts most first.
      evaluation: function of the sum of the counts, an array, that returns the values of the measures, a list of floats.
    """
    model_name: str
    data_name: str
    identity: dict
    num_images: int
    training_input: Callable
    test_input: Callable
    model_fn: Callable
    optimizer: Callable
    decay: Callable
    counts: Callable
    measures: tuple
    evaluation: Callable


def tower_devices(num_towers):
    """Returns a device for each tower: the GPUs in turn, or as many CPU devices."""
    gpus = [device for device in towers.find_devices() if "gpu" in device]
    return [gpus[i % len(gpus)] if gpus else "/cpu:%d" % i for i in range(num_towers)]


def alone(devices, config=None):
    """Returns the `towers.workers.Workers` of a process that trains by itself, whatever TF_CONFIG says.

    Args:
      devices: list of str, of its towers.
      config: optional `tf.ConfigProto` to start from.
    """
    return towers.workers.connect(["localhost:1"], 0, devices, config)  # one worker starts no server: the port stays free


class Training:
    """The graph: training on the towers of all workers, and evaluation of the same variables on this worker's.

    Args:
      settings: with what `loop.train` saves in settings.json as attributes: batch_size, epochs, learning_rate, num_towers, seed,
        steps, update_ops, warmup_steps.
      task: `Task`.
      workers: `towers.workers.Workers`.
      devices: list of str on which the towers stand in turn; None is one for each.

    Raises:
      UsageError: for a batch that is larger than the training images.

    Attributes:
      task, workers: as given.
      who: str, the towers that train, their batch, and whether their batch norm is synced.
      pipeline, test_pipeline: `order.Pipeline`, of this worker's part of each batch, and of the test images.
      num_steps, steps_an_epoch: int.
      global_step: int64 variable.
      train_op, loss, accuracy, summary: what a training step runs.
      counts: int64 tensor, of the test pipeline's next batch.
      broadcast: op that gives every worker the chief's variables.
    """

    def __init__(self, settings, task, workers, devices=None):
        if settings.batch_size > task.num_images:
            raise UsageError("A batch of %d is larger than the %d training images." % (settings.batch_size, task.num_images))
        tf.set_random_seed(settings.seed)
        self.task, self.workers = task, workers
        self.who = "%d towers" % (workers.size * settings.num_towers)
        self.who += " of %d workers" % workers.size if workers.size > 1 else ""
        self.who += ", batch %d, %s batch norm" % (settings.batch_size, "synced" if settings.sync_bn else "per-tower")
        self.pipeline = task.training_input(
            rows_of_part(settings.batch_size, workers.rank, workers.size, settings.num_towers))
        self.test_pipeline = task.test_input(workers.rank, workers.size)
        self.steps_an_epoch = self.pipeline.steps_an_epoch
        self.num_steps = settings.steps or settings.epochs * self.steps_an_epoch
        self.global_step = tf.train.get_or_create_global_step()
        devices, number = devices or tower_devices(settings.num_towers), settings.num_towers
        replicas = towers.TowerBuilder(devices, num_towers=number, workers=workers).build(task.model_fn, self.pipeline.batch)
        rate = learning_rate(self.global_step, self.num_steps, settings.learning_rate, settings.warmup_steps, task.decay)
        self.train_op = towers.minimize(
            replicas, task.optimizer(rate), update_ops=settings.update_ops, global_step=self.global_step)
        tf.summary.scalar("learning_rate", rate)
        self.summary = tf.summary.merge_all()
        self.loss, self.accuracy = replicas.loss, replicas.merged()["accuracy"]
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            evaluator = towers.TowerBuilder(devices, num_towers=number)
            self.counts = task.counts(evaluator.build(task.model_fn, self.test_pipeline.batch, training=False).merged())
        if workers.size > 1:
            share = tf.add_n([tf.cast(tower.weight, self.accuracy.dtype) for tower in replicas])
            self.accuracy = workers.all_reduce(self.accuracy * share)
            self._numbers = tf.placeholder(tf.int64, self.counts.shape)
            self._sum_of_numbers = workers.all_reduce(self._numbers)
            self._signals = tf.placeholder(tf.int64, [])
            self._sum_of_signals = workers.all_reduce(self._signals)
        self.broadcast = workers.broadcast_variables()

    def begin_epoch(self, session, step):
        """Starts the pipeline at a step, as it stands in its epoch."""
        self.pipeline.start(session, step // self.steps_an_epoch, step % self.steps_an_epoch)

    def steps(self, session, first_step, last_step, fetch=lambda step: ()):
        """Trains from one step up to another, and yields each step's number from 1 on, loss, accuracy and what was fetched.

        Args:
          session: `tf.Session`.
          first_step, last_step: int, how many steps are done before and after.
          fetch: function of the number of steps done that returns what else to run.

        Raises:
          UsageError: where the loss is not finite.
        """
        for step in range(first_step, last_step):
            if step == first_step or step % self.steps_an_epoch == 0:
                self.begin_epoch(session, step)
            loss, accuracy, _, fetched = session.run([self.loss, self.accuracy, self.train_op, fetch(step)])
            if not np.isfinite(loss):
                raise UsageError("The loss is %s at step %d: try a smaller --learning-rate." % (loss, step))
            yield step + 1, float(loss), float(accuracy), fetched

    def evaluate(self, session):
        """Returns the measures of the test images with moving averages, a dict by name; each worker takes some of them."""
        self.test_pipeline.start(session)
        counts = np.zeros(self.counts.shape.as_list(), np.int64)
        for _ in range(self.test_pipeline.steps_an_epoch):
            counts += session.run(self.counts)
        if self.workers.size > 1:
            counts = session.run(self._sum_of_numbers, {self._numbers: counts})
        return {measure.name: float(value) for measure, value in zip(self.task.measures, self.task.evaluation(counts))}

    def sum_over_workers(self, session, number):
        """Returns the sum of an integer over workers, which all have to call this."""
        return int(session.run(self._sum_of_signals, {self._signals: number})) if self.workers.size > 1 else number
