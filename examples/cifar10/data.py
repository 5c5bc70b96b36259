"""CIFAR-10 from its official files, or images made here; and the input pipeline, on the host.

The binary files (https://www.cs.toronto.edu/~kriz/cifar.html) hold records of one label byte and 3,072 bytes of red,
green and blue planes; the Python files hold the same in pickles. Whatever is wrong with a file is a `DataError`.
"""
import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zlib
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from examples.cifar10 import pickles
from examples.training import order
from examples.training.files import check_file

__all__ = ["DataError", "Dataset", "Images", "Pipeline", "download", "generate", "is_there", "load"]

CLASSES = 10
IMAGE_SHAPE = (32, 32, 3)
RECORDS_A_FILE = 10000
ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_LARGEST_ARCHIVE = 1 << 28  # bytes; the official one has 170 million
BINARY_FOLDER, PICKLE_FOLDER = "cifar-10-batches-bin", "cifar-10-batches-py"
_RECORD = 1 + 3 * 32 * 32
_PAD = 4
# Mean and standard deviation of the training pixels of CIFAR-10, by channel.
_MEAN = np.array([125.3, 123.0, 113.9], np.float32)
_STD = np.array([63.0, 62.1, 66.7], np.float32)


class DataError(ValueError):
    """A data file is missing or is not what it should be; the message is one sentence for the person at the terminal."""


class Images(NamedTuple):
    """Images uint8 [n, 32, 32, 3] and labels int32 [n] from 0 to 9."""
    images: np.ndarray
    labels: np.ndarray


class Dataset(NamedTuple):
    """What to train on, what to test on, and what to call it."""
    train: Images
    test: Images
    name: str


def load(data_dir):
    """Reads CIFAR-10 from the binary or the Python files in `data_dir`, or in their official folder inside it.

    Raises:
      DataError: if a file is missing, unreadable, truncated, oversized, or holds a label that is no whole number from 0 to 9.
    """
    if not os.path.isdir(data_dir):
        raise DataError("There is no folder %s." % data_dir)
    train = ["data_batch_%d" % i for i in range(1, 6)]
    for folder in (os.path.join(data_dir, BINARY_FOLDER), data_dir):
        if os.path.exists(os.path.join(folder, "data_batch_1.bin")):
            return Dataset(_join([_read_binary(os.path.join(folder, name + ".bin")) for name in train]),
                           _read_binary(os.path.join(folder, "test_batch.bin")), "CIFAR-10")
    for folder in (os.path.join(data_dir, PICKLE_FOLDER), data_dir):
        if os.path.exists(os.path.join(folder, "data_batch_1")):
            return Dataset(_join([_read_pickle(os.path.join(folder, name)) for name in train]),
                           _read_pickle(os.path.join(folder, "test_batch")), "CIFAR-10")
    raise DataError("There is no CIFAR-10 in %s: neither data_batch_1.bin nor data_batch_1 is there, nor in %s or %s. "
                    "--download fetches it." % (data_dir, BINARY_FOLDER, PICKLE_FOLDER))


def is_there(data_dir):
    """Tells whether `load` would find CIFAR-10 in a folder, whole or not."""
    return any(os.path.exists(os.path.join(data_dir, *path)) for path in (
        (BINARY_FOLDER, "data_batch_1.bin"), ("data_batch_1.bin",), (PICKLE_FOLDER, "data_batch_1"), ("data_batch_1",)))


def generate(num_train=5000, num_test=1000, seed=0):
    """Makes images of ten classes that a small network can learn: five patterns of waves, narrow and wide.

    Phase, colour, contrast, background and noise are random, so no single pixel tells the class, and mirroring an image
    leaves its class as it is. This is not CIFAR-10.
    """
    rng = np.random.RandomState(seed)
    return Dataset(_patterns(num_train, rng), _patterns(num_test, rng), "generated images (not CIFAR-10)")


def _patterns(count, rng):
    labels = np.arange(count) % CLASSES
    rng.shuffle(labels)

    def random(low, high, shape=(1, 1)):
        return rng.uniform(low, high, (count,) + shape)

    wave_number = 2 * np.pi / np.where(labels < 5, 4.5, 8.0)[:, None, None] * random(0.85, 1.15)
    y, x = np.mgrid[:32, :32]
    x, y = x - random(8, 24), y - random(8, 24)
    phase = random(0, 2 * np.pi)
    waves = [np.sin(wave_number * along + phase) for along in (x, y, np.hypot(x, y), (x + y) / 1.4, (x - y) / 1.4)]
    vertical, horizontal, rings, falling, rising = waves
    kinds = np.stack([vertical, horizontal, rings, 1.4 * vertical * horizontal, 1.4 * falling * rising])
    pattern = kinds[labels % 5, np.arange(count)][..., None]
    colour = rng.normal(size=(count, 1, 1, 3))
    colour /= np.linalg.norm(colour, axis=-1, keepdims=True)
    pixels = random(80, 175, (1, 1, 3)) + random(25, 60, (1, 1, 1)) * colour * pattern
    pixels += rng.normal(0, 40, pixels.shape)
    return Images(np.clip(pixels, 0, 255).astype(np.uint8), labels.astype(np.int32))


def download(data_dir, url=ARCHIVE_URL, md5=ARCHIVE_MD5):
    """Fetches the official archive into `data_dir`, checks it, and unpacks it in one step.

    The folder appears under its name only when it is whole: an interrupted download leaves nothing behind that `load`
    would read. Does nothing if the folder is there.

    Raises:
      DataError: if the archive can't be fetched or written, or is not the official one.
    """
    folder = os.path.join(data_dir, BINARY_FOLDER)
    if os.path.isdir(folder):
        return folder
    try:
        os.makedirs(data_dir, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix="download-", dir=data_dir)
        try:
            _fetch(url, md5, scratch)
            os.rename(os.path.join(scratch, BINARY_FOLDER), folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DataError("CIFAR-10 can't be written to %s: %s." % (data_dir, error.strerror or error)) from error
    return folder


def _fetch(url, md5, scratch):
    """Fetches an archive, checks it, and unpacks its data files into their folder in `scratch`."""
    archive = os.path.join(scratch, "archive.tar.gz")
    with open(archive, "wb") as out:
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                _copy(response, out, _LARGEST_ARCHIVE, url)
        except (OSError, http.client.HTTPException) as error:
            raise DataError("%s could not be fetched: %s." % (url, str(error).rstrip("."))) from error
    found = _md5(archive)
    if found != md5:
        raise DataError("%s is not the official archive: its MD5 is %s where %s was expected." % (url, found, md5))
    try:
        _unpack(archive, scratch)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError("%s can't be unpacked: %s." % (url, error)) from error


def _unpack(archive, scratch):
    """Unpacks the files of the one folder: no link, no device, nothing of another folder, no owner and no rights."""
    folder = os.path.join(scratch, BINARY_FOLDER)
    with tarfile.open(archive) as tar:
        for member in tar:
            parent, name = os.path.split(member.name)
            if member.isfile() and parent == BINARY_FOLDER and name not in (".", ".."):
                os.makedirs(folder, exist_ok=True)
                with open(os.path.join(folder, name), "wb") as out:
                    _copy(tar.extractfile(member), out, RECORDS_A_FILE * _RECORD, member.name)


def _copy(source, out, most, name):
    """Copies a stream to a file, and no more bytes than `most`."""
    for block in iter(lambda: source.read(1 << 20), b""):
        if out.tell() + len(block) > most:
            raise DataError("%s is larger than the %d bytes that it may have." % (name, most))
        out.write(block)


def _md5(path):
    digest = hashlib.md5()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _join(parts):
    return Images(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))


def _read_binary(path):
    content, expected = _read(path), RECORDS_A_FILE * _RECORD
    if len(content) != expected:
        raise DataError("The data file %s is %s: it has %d bytes where %d were expected." % (
            path, "truncated" if len(content) < expected else "too long", max(len(content), os.path.getsize(path)), expected))
    records = np.frombuffer(content, np.uint8).reshape(RECORDS_A_FILE, _RECORD)
    labels = records[:, 0]
    wrong = np.flatnonzero(labels >= CLASSES)
    if wrong.size:
        raise DataError("The data file %s has the label %d in record %d; labels are whole numbers from 0 to %d."
                        % (path, labels[wrong[0]], wrong[0], CLASSES - 1))
    return _images(records[:, 1:], labels)


def _read_pickle(path):
    content = _read(path)
    try:
        planes, labels = pickles.parse(content, RECORDS_A_FILE, _RECORD - 1, CLASSES)
    except ValueError as error:
        raise DataError("The data file %s can't be read: %s." % (path, error)) from error
    return _images(planes, labels)


def _read(path):
    """Returns the bytes of a file, or, where it is longer than a data file, enough of them to tell."""
    try:
        check_file(path)
        with open(path, "rb") as f:
            return f.read(2 * RECORDS_A_FILE * _RECORD)  # text in UTF-8, as Python 3 may write bytes, takes up to twice as many
    except FileNotFoundError as error:
        raise DataError("The data file %s is missing." % path) from error
    except OSError as error:
        raise DataError("The data file %s can't be read: %s." % (path, error.strerror)) from error


def _images(planes, labels):
    images = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(images), labels.astype(np.int32))


class Pipeline(order.Pipeline):
    """Batches of (images float32 [b, 32, 32, 3], labels int32 [b]) from the host's memory, prefetched.

    In training, images are padded by 4 pixels, cropped and flipped at random, as drawn from the seed, the epoch and the
    image alone.

    Args:
      source: `Images`.
      batch_size, training, seed, rows: as for `order.Pipeline`.
      cutout: int, the side in pixels of a square of each training image that is made the mean color, its center anywhere in
        the image (DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout", 2017).
    """

    def __init__(self, source, batch_size, training, seed=0, rows=None, cutout=0):
        with tf.device("/cpu:0"), tf.name_scope("input"):
            images = tf.placeholder(tf.uint8, (None,) + IMAGE_SHAPE)
            labels = tf.placeholder(tf.int32, [None])

            def example(epoch, index):
                image = tf.gather(images, index)
                if training:
                    draws = tf.random.stateless_uniform([5], tf.stack([seed + 7919 * epoch, index]))
                    image = _augment(image, draws[:3])
                image = (tf.cast(tf.reshape(image, IMAGE_SHAPE), tf.float32) - _MEAN) / _STD
                if training and cutout:
                    image *= _outside_of_square(draws[3:], cutout)
                return image, tf.gather(labels, index)

            super().__init__(len(source.labels), example, batch_size, training, seed, rows,
                             {images: source.images, labels: source.labels})


def _augment(image, draws):
    """Pads by 4, crops 32 x 32, and flips half of the images, as `draws`, three numbers from 0 to 1, say."""
    offset = tf.cast(draws[:2] * (2 * _PAD + 1), tf.int32)
    image = tf.pad(image, [[_PAD, _PAD], [_PAD, _PAD], [0, 0]])
    image = tf.slice(image, tf.concat([offset, [0]], 0), IMAGE_SHAPE)
    return tf.cond(draws[2] < 0.5, lambda: tf.reverse(image, [1]), lambda: image)


def _outside_of_square(draws, side):
    """Returns [32, 32, 1] of 0 within a square, whose center is where the two `draws` say, and 1 elsewhere."""
    first = tf.cast(tf.floor(draws * IMAGE_SHAPE[0]), tf.int32) - side // 2
    along = tf.range(IMAGE_SHAPE[0])[:, tf.newaxis]
    within = tf.logical_and(along >= first, along < first + side)  # rows, and columns
    return tf.cast(tf.logical_not(tf.logical_and(within[:, :1], within[:, 1])), tf.float32)[:, :, tf.newaxis]
