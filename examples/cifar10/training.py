"""The graph of a training: what `train`, `compare` and `same_bits` run."""
import numpy as np
import tensorflow.compat.v1 as tf

import towers
from examples.cifar10 import data
from examples.cifar10.checkpoint import UsageError
from examples.cifar10.model import resnet
from examples.cifar10.recipes import RECIPES, learning_rate

__all__ = ["Training", "alone", "tower_devices"]

EVALUATION_BATCH = 500


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
      settings: with what `train` saves in settings.json as attributes: batch_size, depth, epochs, label_smoothing, learning_rate,
        num_towers, recipe, seed, steps, sync_bn, update_ops, warmup_steps, weight_decay.
      dataset: `data.Dataset`.
      workers: `towers.workers.Workers`.
      devices: list of str on which the towers stand in turn; None is one for each.
      dtype: of the model, as for `resnet`.

    Raises:
      UsageError: for a batch that is larger than the training images, and for what the model refuses.

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

    def __init__(self, settings, dataset, workers, devices=None, dtype=None):
        if settings.batch_size > len(dataset.train.labels):
            raise UsageError("A batch of %d is larger than the %d training images."
                             % (settings.batch_size, len(dataset.train.labels)))
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
            model_fn = resnet(settings.depth, settings.sync_bn, settings.weight_decay, data.CLASSES,
                              settings.label_smoothing, dtype)
        except ValueError as error:
            raise UsageError(str(error)) from error
        devices, number = devices or tower_devices(settings.num_towers), settings.num_towers
        replicas = towers.TowerBuilder(devices, num_towers=number, workers=workers).build(model_fn, self.pipeline.batch)
        recipe = RECIPES[settings.recipe]
        rate = learning_rate(self.global_step, self.num_steps, settings.learning_rate, settings.warmup_steps, recipe.decay)
        optimizer = tf.train.MomentumOptimizer(rate, 0.9, use_nesterov=recipe.nesterov)
        self.train_op = towers.minimize(replicas, optimizer, settings.update_ops, global_step=self.global_step)
        tf.summary.scalar("learning_rate", rate)
        self.summary = tf.summary.merge_all()
        self.loss, self.accuracy = replicas.loss, replicas.merged()["accuracy"]
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            evaluator = towers.TowerBuilder(devices, num_towers=number)
            replicas_alone = evaluator.build(model_fn, self.test_pipeline.batch, training=False)
            self.correct = replicas_alone.merged()["correct"]
        if workers.size > 1:
            self.accuracy = workers.all_reduce(self.accuracy * (rows[1] - rows[0]) / settings.batch_size)
            self._number = tf.placeholder(tf.int64, [])
            self._sum_of_numbers = workers.all_reduce(self._number)
        self.broadcast = workers.broadcast_variables()

    def steps(self, session, first_step, last_step):
        """Trains from one step up to another, and yields each step's loss and accuracy.

        Raises:
          UsageError: where the loss is not finite.
        """
        steps_an_epoch = self.pipeline.steps_an_epoch
        for step in range(first_step, last_step):
            if step == first_step or step % steps_an_epoch == 0:
                self.pipeline.start(session, step // steps_an_epoch, step % steps_an_epoch)
            loss, accuracy, _ = session.run([self.loss, self.accuracy, self.train_op])
            if not np.isfinite(loss):
                raise UsageError("The loss is %s at step %d: try a smaller --learning-rate." % (loss, step))
            yield float(loss), float(accuracy)

    def test_accuracy(self, session):
        """Returns the fraction of test images classified rightly with moving averages; each worker takes some of them."""
        self.test_pipeline.start(session)
        right = sum(int(session.run(self.correct).sum()) for _ in range(self.test_pipeline.steps_an_epoch))
        return self.sum_over_workers(session, right) / self._num_test_images

    def sum_over_workers(self, session, number):
        """Returns the sum of an integer over workers, which all have to call this."""
        return int(session.run(self._sum_of_numbers, {self._number: number})) if self.workers.size > 1 else number
