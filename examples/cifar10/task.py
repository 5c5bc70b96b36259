"""CIFAR-10 as a task: the data and the ResNet, as the settings of a command line name them."""
import tensorflow.compat.v1 as tf

from examples.cifar10 import data
from examples.cifar10.model import resnet
from examples.cifar10.recipes import RECIPES
from examples.training.folder import UsageError
from examples.training.graph import Measure, Task

__all__ = ["MEASURES", "cifar10"]

EVALUATION_BATCH = 500
MEASURES = (Measure("test_accuracy", "test accuracy"),)


def cifar10(settings, dataset, dtype=None):
    """Returns the `Task` of a ResNet.

    Args:
      settings: of the command line: batch_size, cutout, depth, label_smoothing, recipe, seed, sync_bn, weight_decay.
      dataset: `data.Dataset`.
      dtype: of the model, as for `resnet`.

    Raises:
      UsageError: for what the model refuses.
    """
    try:
        model_fn = resnet(settings.depth, settings.sync_bn, settings.weight_decay, data.CLASSES, settings.label_smoothing, dtype)
    except ValueError as error:
        raise UsageError(str(error)) from error
    recipe = RECIPES[settings.recipe]
    return Task(
        model_name="ResNet-%d" % settings.depth, data_name=dataset.name,
        identity={"depth": settings.depth, "data": dataset.name},
        num_images=len(dataset.train.labels),
        training_input=lambda rows: data.Pipeline(
            dataset.train, settings.batch_size, True, settings.seed, rows, settings.cutout),
        test_input=lambda part, parts: data.Pipeline(
            data.Images(*(values[part::parts] for values in dataset.test)), EVALUATION_BATCH, False),
        model_fn=model_fn,
        optimizer=lambda rate: tf.train.MomentumOptimizer(rate, 0.9, use_nesterov=recipe.nesterov),
        decay=recipe.decay,
        counts=_right_and_all,
        measures=MEASURES,
        evaluation=lambda counts: [counts[0] / counts[1]])


def _right_and_all(outputs):
    return tf.stack([tf.reduce_sum(tf.cast(outputs["correct"], tf.int64)), tf.size(outputs["correct"], out_type=tf.int64)])
