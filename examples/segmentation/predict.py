"""Draws what a trained network sees: each scene, its labels and the prediction over it, side by side.

    python -m examples.segmentation.predict --data-dir DATA --train-dir runs/segmentation --count 4 --out predictions.png
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
from examples.segmentation.scenes import Scenes  # noqa: E402
from examples.segmentation.trained import Trained  # noqa: E402
from examples.training.command import positive_int  # noqa: E402
from examples.training.report import new_figure, save_figure  # noqa: E402


def main(argv=None):
    """Runs the command line and returns the exit status: 0, or 2 for what can't be done."""
    parser = argparse.ArgumentParser(prog="python -m examples.segmentation.predict", description=__doc__.split("\n\n")[0])
    add_data_dir(parser)
    parser.add_argument("--train-dir", default=TRAIN_DIR, help="default %s" % TRAIN_DIR)
    parser.add_argument("--count", type=positive_int, default=4, help="how many test images, far apart (default 4)")
    parser.add_argument("--out", default="predictions.png", help="default predictions.png")
    return run_on_scenes(predict, parser.parse_args(argv))


def predict(settings, dataset):
    """Draws some test images, and says where."""
    trained, count = Trained(settings.train_dir, dataset), min(settings.count, len(dataset.test.images))
    chosen = [len(dataset.test.images) * number // count for number in range(count)]
    scenes = Scenes(*([paths[number] for number in chosen] for paths in dataset.test))
    with tf.Graph().as_default():
        pipeline = Pipeline(scenes, dataset.table, 1, False)
        logits = towers.TowerBuilder(["/cpu:0"]).build(trained.model_fn, pipeline.batch, training=False).merged()["logits"]
        predictions = tf.argmax(logits, -1, output_type=tf.int32)
        with tf.Session() as session:
            trained.restore(session)
            pipeline.start(session)
            found = [session.run([pipeline.batch[1], predictions]) for _ in range(count)]
    draw(scenes.images, [labels[0] for labels, _ in found], [predicted[0] for _, predicted in found], dataset, settings.out)
    print("%d test images of %s: %s" % (count, dataset.name, settings.out))


def draw(images, labels, predictions, dataset, path):
    """Writes a PNG: a row for each image, with its labels and its predictions, and the classes' colours.

    Args:
      images: list of paths of PNG files.
      labels, predictions: lists of int32 [h, w].
      dataset: `scenes.Dataset`.
      path: str.

    Raises:
      WriteError: if it can't be written.
    """
    from matplotlib import image as files, patches
    height, width = labels[0].shape
    figure, axes = new_figure(len(images), 3, figsize=(12, 4 * height / width * len(images) + 1), squeeze=False)
    for row, (image, of_image, predicted) in enumerate(zip(images, labels, predictions)):
        pixels = files.imread(image)[..., :3]
        for place, (title, shown) in enumerate((("image", pixels), ("labels, void in black", coloured(of_image, dataset.colours)),
                                                ("prediction", 0.4 * pixels + 0.6 * coloured(predicted, dataset.colours)))):
            axes[row, place].imshow(shown)
            axes[row, place].axis("off")
            if row == 0:
                axes[row, place].set_title(title)
    handles = [patches.Patch(color=colour / 255, label=name) for name, colour in zip(dataset.classes, dataset.colours)]
    figure.legend(handles=handles, loc="lower center", ncol=min(len(handles), 7), frameon=False)
    figure.tight_layout(rect=(0, 0.7 / figure.get_figheight(), 1, 1))
    save_figure(figure, path)


def coloured(labels, colours):
    """Returns the colours of labels, float64 [h, w, 3] from 0 to 1; void is black."""
    return np.where((labels == VOID)[..., None], 0, colours[np.where(labels == VOID, 0, labels)]) / 255


if __name__ == "__main__":
    sys.exit(main())
