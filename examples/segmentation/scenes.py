"""Street scenes as folders of images and of label images, as CamVid and Cityscapes have them, or scenes made here.

CamVid (http://mi.eng.cam.ac.uk/research/projects/VideoRec/CamVid/) as SegNet's authors share it: train/NAME.png and
trainannot/NAME.png, the same for val and test; labels from 0 to 10, 11 void. Cityscapes (https://www.cityscapes-dataset.com) as
it is unpacked: leftImg8bit/train/CITY/*_leftImg8bit.png and gtFine/train/CITY/*_gtFine_labelIds.png. Whatever is wrong with a
file is a `DataError`.
"""
import glob
import os
import struct
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from examples.segmentation.model import VOID
from examples.training.files import check_file

__all__ = ["DataError", "Dataset", "Scenes", "WRONG", "find_damage", "generate", "load", "size_of_file"]

_LARGEST_PNG = 1 << 28  # bytes; TensorFlow reads a file as a whole
WRONG = 254  # in a table of labels: there is no such label


class DataError(ValueError):
    """A data file is missing or is not what it should be; the message is one sentence for the person at the terminal."""


class Scenes(NamedTuple):
    """Paths of images and of their label images, PNG files both, in the order of their names."""
    images: list
    labels: list


class Dataset(NamedTuple):
    """What to train on, what to test on, and what is in it.

    Attributes:
      train, test: `Scenes`.
      name: str.
      classes: tuple of str.
      colours: uint8 [classes, 3], red, green, blue.
      table: uint8 [256], from the labels in files to classes, `VOID` or `WRONG`.
    """
    train: Scenes
    test: Scenes
    name: str
    classes: tuple
    colours: np.ndarray
    table: np.ndarray


_CAMVID = [
    ("sky", (128, 128, 128)), ("building", (128, 0, 0)), ("pole", (192, 192, 128)), ("road", (128, 64, 128)),
    ("pavement", (60, 40, 222)), ("tree", (128, 128, 0)), ("sign", (192, 128, 128)), ("fence", (64, 64, 128)),
    ("car", (64, 0, 128)), ("pedestrian", (64, 64, 0)), ("bicyclist", (0, 128, 192))]
# By the number that files have, those that are evaluated.
_CITYSCAPES = {
    7: ("road", (128, 64, 128)), 8: ("sidewalk", (244, 35, 232)), 11: ("building", (70, 70, 70)), 12: ("wall", (102, 102, 156)),
    13: ("fence", (190, 153, 153)), 17: ("pole", (153, 153, 153)), 19: ("traffic light", (250, 170, 30)),
    20: ("traffic sign", (220, 220, 0)), 21: ("vegetation", (107, 142, 35)), 22: ("terrain", (152, 251, 152)),
    23: ("sky", (70, 130, 180)), 24: ("person", (220, 20, 60)), 25: ("rider", (255, 0, 0)), 26: ("car", (0, 0, 142)),
    27: ("truck", (0, 0, 70)), 28: ("bus", (0, 60, 100)), 31: ("train", (0, 80, 100)), 32: ("motorcycle", (0, 0, 230)),
    33: ("bicycle", (119, 11, 32))}
_MADE = [("sky", (130, 170, 230)), ("ground", (120, 100, 80)), ("box", (200, 60, 60)), ("ball", (60, 160, 80))]


def load(data_dir):
    """Finds the images and label images in `data_dir`, or in a folder "camvid" inside it.

    Cityscapes is tested on its validation images: the labels of its test images are not handed out.

    Raises:
      DataError: if there is neither data set, an image has no labels, or a file is no PNG file or of another size than its
        labels.
    """
    if not os.path.isdir(data_dir):
        raise DataError("There is no folder %s." % data_dir)
    if os.path.isdir(os.path.join(data_dir, "leftImg8bit")):
        found = _dataset("Cityscapes", list(_CITYSCAPES.values()), _table(dict(enumerate(_CITYSCAPES)), range(34)),
                         *(_cityscapes(data_dir, split) for split in ("train", "val")))
    else:
        inside = os.path.join(data_dir, "camvid")
        root = inside if os.path.isdir(inside) else data_dir
        found = _dataset("CamVid", _CAMVID, _table({i: i for i in range(11)}, [11]),
                         *(_camvid(root, split) for split in ("train", "test")))
    for scenes in (found.train, found.test):
        for image, labels in zip(*scenes):
            size, of_labels = size_of_file(image), size_of_file(labels)
            if size != of_labels:
                raise DataError("The label image %s has %d x %d pixels where its image %s has %d x %d."
                                % ((labels,) + of_labels + (image,) + size))
    return found


def _dataset(name, classes, table, train, test):
    names, colours = zip(*classes)
    return Dataset(train, test, name, names, np.array(colours, np.uint8), table)


def _table(labels, void):
    table = np.full([256], WRONG, np.uint8)
    table[list(void)] = VOID
    table[VOID] = VOID  # as many tools write it
    for number, label in labels.items():
        table[label] = number
    return table


def _camvid(root, split):
    images = sorted(glob.glob(os.path.join(glob.escape(root), split, "*.png")))
    if not images:
        raise DataError("There are no PNG files in the folder %s, nor is there a folder leftImg8bit beside it."
                        % os.path.join(root, split))
    return _with_labels(images, lambda path: os.path.join(root, split + "annot", os.path.basename(path)))


def _cityscapes(root, split):
    images = sorted(glob.glob(os.path.join(glob.escape(root), "leftImg8bit", split, "*", "*_leftImg8bit.png")))
    if not images:
        raise DataError("There are no files *_leftImg8bit.png in the folders of %s." % os.path.join(root, "leftImg8bit", split))

    def labels(path):
        folder, name = os.path.split(path)
        return os.path.join(root, "gtFine", split, os.path.basename(folder),
                            name.replace("_leftImg8bit.png", "_gtFine_labelIds.png"))
    return _with_labels(images, labels)


def _with_labels(images, labels_of):
    labels = [labels_of(path) for path in images]
    for image, path in zip(images, labels):
        if not os.path.isfile(path):
            raise DataError("The image %s has no labels: there is no file %s." % (image, path))
    return Scenes(images, labels)


def size_of_file(path):
    """Returns the width and height that a PNG file says it has."""
    try:
        check_file(path, _LARGEST_PNG)
        with open(path, "rb") as f:
            head = f.read(24)
    except OSError as error:
        raise DataError("The data file %s can't be read: %s." % (path, error.strerror)) from error
    if len(head) < 24 or head[:8] != b"\x89PNG\r\n\x1a\n" or head[12:16] != b"IHDR":
        raise DataError("The data file %s is not a PNG file." % path)
    return struct.unpack(">II", head[16:24])


def find_damage(dataset):
    """Decodes the files of a `Dataset` one by one, and returns a `DataError` that names the first that is damaged, or None.

    A pipeline fails without the name of the file that it was reading.
    """
    with tf.Graph().as_default(), tf.Session() as session:
        content = tf.placeholder(tf.string, [])
        image, labels = (tf.image.decode_png(content, channels) for channels in (3, 1))
        for scenes in (dataset.train, dataset.test):
            for path, decoded in [(path, image) for path in scenes.images] + [(path, labels) for path in scenes.labels]:
                try:
                    with open(path, "rb") as f:
                        values = session.run(decoded, {content: f.read()})
                except OSError as error:
                    return DataError("The data file %s can't be read: %s." % (path, error.strerror))
                except tf.errors.InvalidArgumentError:
                    return DataError("The data file %s is damaged: it is no whole PNG file." % path)
                wrong = values[dataset.table[values] == WRONG] if decoded is labels else []
                if len(wrong):
                    return DataError("The label image %s has the label %d, and %s has no such class."
                                     % (path, wrong[0], dataset.name))
    return None


def generate(folder, num_train=160, num_test=40, size=(48, 64), seed=0):
    """Writes scenes of a sky, a ground, boxes and balls into a folder, and returns their `Dataset`.

    Args:
      folder: str, which is there.
      num_train, num_test: int.
      size: (height, width).
      seed: int.
    """
    rng, found = np.random.RandomState(seed), []
    with tf.Graph().as_default(), tf.Session() as session:
        pixels = tf.placeholder(tf.uint8, [None, None, None])
        encoded = tf.image.encode_png(pixels)
        for split, count in (("train", num_train), ("test", num_test)):
            scenes = Scenes([], [])
            for number in range(count):
                made = zip(scenes, ("", "annot"), _scene(rng, *size))
                for paths, ending, values in made:
                    os.makedirs(os.path.join(folder, split + ending), exist_ok=True)
                    paths.append(os.path.join(folder, split + ending, "%04d.png" % number))
                    with open(paths[-1], "wb") as f:
                        f.write(session.run(encoded, {pixels: values}))
            found.append(scenes)
    return _dataset("scenes made here (not CamVid)", _MADE, _table({i: i for i in range(len(_MADE))}, [len(_MADE)]), *found)


def _scene(rng, height, width):
    """Returns an image, uint8 [height, width, 3], and its labels, uint8 [height, width, 1], void where things begin and end."""
    rows, columns = np.mgrid[:height, :width]
    labels = (rows > height * rng.uniform(0.3, 0.7)).astype(np.int32)
    for _ in range(rng.randint(2, 6)):
        kind, size = rng.randint(2, 4), rng.uniform(0.1, 0.3) * height
        away = np.abs([rows - rng.uniform(0, height), columns - rng.uniform(0, width)])
        labels[(away.max(0) if kind == 2 else np.hypot(*away)) < size] = kind
    brightness = rng.uniform(0.6, 1.4) * (1 + 0.3 * np.sin(rng.uniform(0, 6) + columns / rng.uniform(5, 20)))
    colours = np.array([colour for _, colour in _MADE], np.float64)[labels]
    image = colours * brightness[..., None] + rng.randn(height, width, 3) * 25
    edges = np.zeros(labels.shape, bool)
    edges[1:] |= labels[1:] != labels[:-1]
    edges[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    labels = np.where(edges, len(_MADE), labels)
    return np.clip(image, 0, 255).astype(np.uint8), labels[..., None].astype(np.uint8)
