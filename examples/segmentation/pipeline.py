"""Batches of scenes: in training scaled, cropped, flipped and recoloured at random, in a test as they are."""
import numpy as np
import tensorflow.compat.v1 as tf

from examples.segmentation.model import VOID
from examples.segmentation.scenes import WRONG
from examples.training import order

__all__ = ["Pipeline"]

# Mean and standard deviation of the pixels of ImageNet, by channel, which other data are near to.
_MEAN = np.array([123.7, 116.3, 103.5], np.float32)
_STD = np.array([58.4, 57.1, 57.4], np.float32)


class Pipeline(order.Pipeline):
    """Batches of (images float32 [b, h, w, 3], labels int32 [b, h, w]), read and decoded on the host, prefetched.

    Args:
      scenes: `scenes.Scenes`.
      table: uint8 [256], as a `scenes.Dataset` has it.
      batch_size, training, seed, rows: as for `order.Pipeline`.
      crop: (height, width) of training images: scaled by a factor from 0.5 to 2, whose logarithm is drawn evenly, cropped or
        filled up with void, and half of them flipped, as drawn from the seed, the epoch and the image alone.
      recolour: float from 0 to 1, how far saturation and contrast of training images are changed at most, as a part of what
        they are, and brightness, as a part of a standard deviation.
    """

    def __init__(self, scenes, table, batch_size, training, seed=0, rows=None, crop=None, recolour=0.0):
        with tf.device("/cpu:0"), tf.name_scope("input"):
            images, labels = tf.placeholder(tf.string, [None]), tf.placeholder(tf.string, [None])

            def example(epoch, index):
                path = tf.gather(labels, index)
                image = tf.image.decode_png(tf.read_file(tf.gather(images, index)), 3)
                of_pixels = tf.gather(tf.constant(table), tf.cast(tf.image.decode_png(tf.read_file(path), 1), tf.int32))
                right = tf.Assert(tf.reduce_all(tf.not_equal(of_pixels, WRONG)), ["no such class in", path])
                with tf.control_dependencies([right]):
                    image, of_pixels = (tf.cast(image, tf.float32) - _MEAN) / _STD, tf.cast(of_pixels, tf.int32)
                if training:
                    draws = tf.random.stateless_uniform([7], tf.stack([seed + 7919 * epoch, index]))
                    image, of_pixels = _augment(_recolour(image, recolour, draws[4:]), of_pixels, crop, draws)
                return image, of_pixels[..., 0]

            super().__init__(len(scenes.images), example, batch_size, training, seed, rows,
                             {images: scenes.images, labels: scenes.labels})


def _recolour(image, most, draws):
    """Changes saturation, contrast and brightness of an image, float32 [h, w, 3] around 0, as numbers from 0 to 1 say."""
    saturation, contrast, brightness = [most * (2 * draws[i] - 1) for i in range(3)]
    grey = tf.reduce_mean(image, -1, keepdims=True)
    return (grey + (1 + saturation) * (image - grey)) * (1 + contrast) + brightness


def _augment(image, labels, crop, draws):
    """Scales, crops and flips an image, float32 [h, w, 3], and its labels, int32 [h, w, 1], as numbers from 0 to 1 say."""
    size = tf.cast(tf.round(tf.cast(tf.shape(image)[:2], tf.float32) * 4.0 ** (draws[0] - 0.5)), tf.int32)
    image = tf.image.resize_bilinear(image[None], size, half_pixel_centers=True)[0]
    labels = tf.image.resize_nearest_neighbor(labels[None], size, half_pixel_centers=True)[0]
    missing = tf.maximum(np.array(crop, np.int32) - size, 0)
    padding = tf.concat([[[0, missing[0]], [0, missing[1]]], [[0, 0]]], 0)
    image, labels = tf.pad(image, padding), tf.pad(labels, padding, constant_values=VOID)
    room = tf.cast(tf.maximum(size - np.array(crop, np.int32), 0) + 1, tf.float32)
    offset = tf.concat([tf.cast(draws[1:3] * room, tf.int32), [0]], 0)
    image, labels = tf.slice(image, offset, list(crop) + [3]), tf.slice(labels, offset, list(crop) + [1])
    return tf.cond(draws[3] < 0.5, lambda: (tf.reverse(image, [1]), tf.reverse(labels, [1])), lambda: (image, labels))
