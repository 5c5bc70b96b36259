"""Segmentation as a task: the scenes and the network, as the settings of a command line name them, and how well it does."""
import numpy as np
import tensorflow.compat.v1 as tf

from examples.segmentation.model import pspnet
from examples.segmentation.pipeline import Pipeline
from examples.segmentation.scenes import size_of_file
from examples.training import batch_norm
from examples.training.folder import UsageError
from examples.training.graph import Measure, Task
from examples.training.schedule import poly

__all__ = ["MEASURES", "accuracy", "batch_of_test", "intersections_over_unions", "network_of", "segmentation"]

MEASURES = (Measure("test_mean_iou", "test mean IoU"), Measure("test_accuracy", "test pixel accuracy"))
EVALUATION_BATCH = 8


def segmentation(settings, dataset, dtype=None):
    """Returns the `Task` of a PSPNet-like network.

    Args:
      settings: of the command line: batch_size, crop, mask, recolour, seed, and what `network_of` needs.
      dataset: `scenes.Dataset`.
      dtype: of the model, as for `pspnet`.

    Raises:
      UsageError: for what the model refuses.
    """
    return Task(
        model_name="PSPNet-%d" % settings.depth, data_name=dataset.name,
        identity=dict({name: getattr(settings, name) for name in ("depth", "width", "output_stride")}, data=dataset.name),
        num_images=len(dataset.train.images),
        training_input=lambda rows: Pipeline(
            dataset.train, dataset.table, settings.batch_size, True, settings.seed, rows, settings.crop, settings.recolour),
        test_input=lambda part, parts: Pipeline(
            type(dataset.test)(*(paths[part::parts] for paths in dataset.test)), dataset.table,
            batch_of_test(dataset.test, EVALUATION_BATCH), False),
        model_fn=network_of(settings, dataset, dtype),
        optimizer=lambda rate: tf.train.MomentumOptimizer(rate, 0.9, use_nesterov=True),
        decay=poly,
        counts=lambda outputs: tf.reduce_sum(outputs["confusion"], 0),
        measures=MEASURES,
        evaluation=lambda confusion: [np.nanmean(intersections_over_unions(confusion)), accuracy(confusion)])


def network_of(settings, dataset, dtype=None):
    """Returns the model function that settings name: depth, mask, output_stride, sync_bn, weight_decay, width.

    Raises:
      UsageError: for what the model refuses.
    """
    try:
        return pspnet(
            len(dataset.classes), settings.depth, settings.width, settings.output_stride,
            batch_norm.synced if settings.sync_bn else batch_norm.per_tower, settings.mask, settings.weight_decay, dtype)
    except ValueError as error:
        raise UsageError(str(error)) from error


def batch_of_test(scenes, most):
    """Returns how many test images go together: `most`, or 1 where they differ in size."""
    return most if len({size_of_file(path) for path in scenes.images}) == 1 else 1


def intersections_over_unions(confusion):
    """Returns each class' intersection over union.

    Args:
      confusion: int [classes, classes], pixels by label and prediction.

    Returns:
      float64 [classes], NaN for a class that neither labels nor predictions have.
    """
    right = np.diag(confusion).astype(np.float64)
    union = confusion.sum(0) + confusion.sum(1) - right
    return np.divide(right, union, out=np.full(right.shape, np.nan), where=union > 0)


def accuracy(confusion):
    """Returns the share of pixels that are classified rightly."""
    return np.trace(confusion) / max(confusion.sum(), 1)
