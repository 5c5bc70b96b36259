"""Evaluates a trained network on test scenes, with moving averages: each class' intersection over union, and their mean.

    python -m examples.segmentation.evaluate --data-dir DATA --train-dir runs/segmentation
    python -m examples.segmentation.evaluate --data-dir DATA --window 160 208

Whole images are classified at once, or, with --window, window by window, those of a third of a window apart: what a network that
was trained on crops of large images is used for. The logits of windows that overlap are averaged.
"""
import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import towers  # noqa: E402
from examples.segmentation.arguments import TRAIN_DIR, add_data_dir, run_on_scenes  # noqa: E402
from examples.segmentation.model import VOID  # noqa: E402
from examples.segmentation.pipeline import Pipeline  # noqa: E402
from examples.segmentation.task import accuracy, batch_of_test, intersections_over_unions  # noqa: E402
from examples.segmentation.trained import Trained  # noqa: E402
from examples.training.command import add_train_dir, positive_int  # noqa: E402
from examples.training.graph import tower_devices  # noqa: E402


def main(argv=None):
    """Runs the command line and returns the exit status: 0, or 2 for what can't be done."""
    parser = argparse.ArgumentParser(prog="python -m examples.segmentation.evaluate", description=__doc__.split("\n\n")[0])
    add_data_dir(parser)
    add_train_dir(parser, TRAIN_DIR)
    parser.add_argument("--batch-size", type=positive_int, default=8, help="of all towers together (default 8)")
    parser.add_argument("--window", type=positive_int, nargs=2, metavar=("HEIGHT", "WIDTH"),
                        help="classify windows of this size, and average where they overlap")
    return run_on_scenes(evaluate, parser.parse_args(argv))


def evaluate(settings, dataset):
    """Prints how well the newest checkpoint does."""
    trained = Trained(settings.train_dir, dataset)
    with tf.Graph().as_default():
        confusion = (by_windows if settings.window else by_images)(settings, dataset, trained)
    each = intersections_over_unions(confusion)
    width = max(map(len, dataset.classes))
    for name, value in zip(dataset.classes, each):
        print("%-*s  %s" % (width, name, "in no image" if np.isnan(value) else "%5.2f %%" % (100 * value)))
    print("Test mean IoU %.2f %%, pixel accuracy %.2f %% on %s, %s"
          % (100 * np.nanmean(each), 100 * accuracy(confusion), dataset.name, trained.checkpoint))


def by_images(settings, dataset, trained):
    """Returns pixels by label and prediction, int64 [classes, classes], of whole images over towers."""
    builder = towers.TowerBuilder(tower_devices(settings.num_towers))
    pipeline = Pipeline(dataset.test, dataset.table, batch_of_test(dataset.test, settings.batch_size), False)
    counts = tf.reduce_sum(builder.build(trained.model_fn, pipeline.batch, training=False).merged()["confusion"], 0)
    with tf.Session(config=towers.session_config(builder.devices)) as session:
        trained.restore(session)
        pipeline.start(session)
        return sum(session.run(counts) for _ in range(pipeline.steps_an_epoch))


def by_windows(settings, dataset, trained):
    """Returns pixels by label and prediction, int64 [classes, classes], of windows of each image over towers."""
    builder, classes = towers.TowerBuilder(tower_devices(settings.num_towers)), len(dataset.classes)
    pipeline = Pipeline(dataset.test, dataset.table, 1, False)
    windows = tf.placeholder(tf.float32, [None] + settings.window + [3])
    no_labels = tf.fill(tf.shape(windows)[:3], VOID)
    logits = builder.build(trained.model_fn, (windows, no_labels), training=False).merged()["logits"]
    confusion = np.zeros([classes, classes], np.int64)
    with tf.Session(config=towers.session_config(builder.devices)) as session:
        trained.restore(session)
        pipeline.start(session)
        for _ in range(pipeline.steps_an_epoch):
            (image,), (labels,) = session.run(pipeline.batch)
            predictions = classify(image, settings.window, lambda batch: session.run(logits, {windows: batch}),
                                   settings.batch_size).argmax(-1)
            counts = labels != VOID
            confusion += np.bincount(labels[counts] * classes + predictions[counts], minlength=classes * classes).reshape(
                classes, classes)
    return confusion


def classify(image, window, logits_of, batch_size):
    """Returns the mean of the logits of all windows that a pixel is in.

    Args:
      image: float32 [h, w, 3]; where it is smaller than a window, the window is filled up with 0, the mean pixel.
      window: (height, width).
      logits_of: function of windows, float32 [b, height, width, 3], that returns their logits, [b, height, width, classes].
      batch_size: int, the most windows at a time.

    Returns:
      float64 [h, w, classes].
    """
    size = image.shape[:2]
    image = np.pad(image, [(0, max(0, most - here)) for most, here in zip(window, size)] + [(0, 0)], "constant")
    places = [(top, left) for top in begins(image.shape[0], window[0]) for left in begins(image.shape[1], window[1])]
    total, count = 0, np.zeros(image.shape[:2] + (1,))
    for first in range(0, len(places), batch_size):
        part = places[first:first + batch_size]
        batch = np.stack([image[top:top + window[0], left:left + window[1]] for top, left in part])
        for (top, left), found in zip(part, logits_of(batch)):
            if np.isscalar(total):
                total = np.zeros(image.shape[:2] + found.shape[-1:])
            total[top:top + window[0], left:left + window[1]] += found
            count[top:top + window[0], left:left + window[1]] += 1
    return (total / count)[:size[0], :size[1]]


def begins(length, window):
    """Returns where windows begin: a third of a window apart or nearer, the last one ending where the image does."""
    steps = -(-3 * (length - window) // window)
    return [round(step * (length - window) / steps) for step in range(steps + 1)] if steps else [0]


if __name__ == "__main__":
    sys.exit(main())
