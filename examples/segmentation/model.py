"""A PSPNet-like network as a plain model function: a dilated ResNet and a head of pooled pyramids.

Zhao, Shi, Qi, Wang and Jia, "Pyramid Scene Parsing Network" (2017), section 3: a ResNet whose last two stages keep their
resolution by dilation, context pooled into 1, 2, 3 and 6 bins, and an auxiliary loss with weight 0.4 before the last stage. Its
batch norms see few values: those of the first bin one of each image.
"""
import tensorflow.compat.v1 as tf

from examples.segmentation.resampling import nearest, pool_to, resize_to, size_of
from examples.training.batch_norm import synced

__all__ = ["VOID", "pspnet"]

VOID = 255  # a label that counts nowhere
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
BINS = (1, 2, 3, 6)
AUXILIARY = 0.4


def pspnet(classes, depth=18, width=64, output_stride=8, batch_norm=synced, mask=False, weight_decay=1e-4, dtype=None):
    """Returns a model function of images and labels.

    Args:
      classes: int.
      depth: int, 18 or 34, of the ResNet.
      width: int, channels of its first stage, a multiple of 8; the others have 2, 4 and 8 times as many.
      output_stride: int, 8, or 4 for small images: how many pixels a position of the last stage is apart from the next.
      batch_norm: function of x, a name and a mask, as those of `examples.training.batch_norm`.
      mask: whether positions whose label is void are left out of the moments of batch norm.
      weight_decay: float, times half the squared norm of all kernels, is added to the loss.
      dtype: tf.float32 or tf.float64, of the variables and all that is computed; None is what the variable scope says.

    Returns:
      A function of images, float32 [b, h, w, 3], and labels, int32 [b, h, w], `VOID` where they count nowhere. It returns a dict:
      "loss" (scalar: mean cross-entropy over labels, 0.4 times the auxiliary one, and weight decay), "weight" (float32 scalar:
      the number of labels, by which towers share), "accuracy" (scalar), "logits" ([b, h, w, classes]) and "confusion" (int64
      [b, classes, classes]: the pixels of each image by label and prediction).

    Raises:
      ValueError: for another depth, width or output stride.
    """
    if depth not in BLOCKS:
        raise ValueError("The depth of the ResNet is %s, not %s." % (" or ".join(map(str, sorted(BLOCKS))), depth))
    if width < 8 or width % 8:
        raise ValueError("The width is a multiple of 8, not %s." % width)
    if output_stride not in (4, 8):
        raise ValueError("The output stride is 8 or 4, not %s." % output_stride)

    def model_fn(images, labels):
        with tf.variable_scope(tf.get_variable_scope(), dtype=dtype, auxiliary_name_scope=False):
            network = _Network(batch_norm, labels if mask else None)
            images = images if dtype is None else tf.cast(images, dtype)
            before_last, features = network.dilated_resnet(images, BLOCKS[depth], width, output_stride)
            logits = network.classify(network.pyramid(features), classes, "classify")
            auxiliary = network.classify(network.conv_bn(before_last, width, 3, "auxiliary"), classes, "classify_auxiliary")
            size, kernels = size_of(labels), network.kernels
        logits, auxiliary = (resize_to(x, size) for x in (logits, auxiliary))
        return _outputs(logits, auxiliary, labels, weight_decay * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels]))

    return model_fn


class _Network:
    """The parts of the network; it keeps the kernels that decay, and the labels that say where batch norm counts."""

    def __init__(self, batch_norm, labels):
        self._batch_norm, self._labels, self.kernels = batch_norm, labels, []

    def dilated_resnet(self, x, blocks, width, output_stride):
        """Returns the features of the last stage but one, and of the last."""
        with tf.variable_scope("stem"):
            x = self.conv_bn(x, width, 3, "conv1", stride=2)
            x = self.conv_bn(x, width, 3, "conv2")
            if output_stride == 8:
                x = tf.nn.max_pool(x, [1, 3, 3, 1], [1, 2, 2, 1], "SAME")
        for stage, (count, stride, dilation) in enumerate(zip(blocks, (1, 2, 1, 1), (1, 1, 2, 4))):
            before = x
            for block in range(count):
                with tf.variable_scope("stage%d_block%d" % (stage, block)):
                    x = self._block(x, width << stage, stride if block == 0 else 1, dilation)
        return before, x

    def _block(self, x, channels, stride, dilation):
        shortcut = x
        if stride > 1 or x.shape.as_list()[-1] != channels:
            shortcut = self.conv_bn(x, channels, 1, "shortcut", stride, activation=tf.identity)
        x = self.conv_bn(x, channels, 3, "conv1", stride, dilation)
        return tf.nn.relu(self.conv_bn(x, channels, 3, "conv2", 1, dilation, tf.identity) + shortcut)

    def pyramid(self, x):
        """Joins the features with those pooled into few bins, and mixes them."""
        channels, size, parts = x.shape.as_list()[-1], size_of(x), [x]
        for bins in BINS:
            part = self.conv_bn(pool_to(x, bins), channels // len(BINS), 1, "pyramid%d" % bins, is_pooled=True)
            parts.append(resize_to(part, size))
        return self.conv_bn(tf.concat(parts, -1), channels // 4, 3, "pyramid")

    def conv_bn(self, x, channels, size, name, stride=1, dilation=1, activation=tf.nn.relu, is_pooled=False):
        """Returns the activation of the batch norm of a convolution."""
        with tf.variable_scope(name):
            x = self._conv(x, channels, size, stride, dilation)
            mask = None
            if self._labels is not None and not is_pooled:  # a bin averages what counts and what does not
                mask = tf.not_equal(nearest(self._labels, size_of(x)), VOID)
            return activation(self._batch_norm(x, "bn", mask))

    def classify(self, x, classes, name):
        """Returns the logits of each position."""
        with tf.variable_scope(name):
            x = self._conv(x, classes, 1)
            return x + tf.get_variable("bias", [classes], initializer=tf.zeros_initializer())

    def _conv(self, x, channels, size, stride=1, dilation=1):
        shape = [size, size, x.shape.as_list()[-1], channels]
        kernel = tf.get_variable("kernel", shape, initializer=tf.variance_scaling_initializer(2.0, "fan_out"))
        self.kernels.append(kernel)
        if dilation > 1:  # conv2d's own dilation has no gradient on a CPU in every TensorFlow
            return tf.nn.atrous_conv2d(x, kernel, dilation, "SAME")
        return tf.nn.conv2d(x, kernel, strides=[1, stride, stride, 1], padding="SAME")


def _outputs(logits, auxiliary, labels, decay):
    classes = logits.shape.as_list()[-1]
    counts = tf.not_equal(labels, VOID)
    number = tf.reduce_sum(tf.cast(counts, logits.dtype))
    known = tf.where(counts, labels, tf.zeros_like(labels))

    def cross_entropy(of):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=known, logits=of)
        return tf.reduce_sum(tf.where(counts, losses, tf.zeros_like(losses))) / tf.maximum(number, 1)

    predictions = tf.argmax(logits, -1, output_type=tf.int32)
    correct = tf.cast(tf.logical_and(counts, tf.equal(predictions, labels)), logits.dtype)
    accuracy = tf.reduce_sum(correct) / tf.maximum(number, 1)
    loss = cross_entropy(logits) + AUXILIARY * cross_entropy(auxiliary) + decay
    tf.summary.scalar("loss", loss)
    tf.summary.scalar("accuracy", accuracy)
    return {"loss": loss, "weight": tf.cast(number, tf.float32), "accuracy": accuracy, "logits": logits,
            "confusion": _confusion(tf.where(counts, labels, -tf.ones_like(labels)), predictions, classes)}


def _confusion(labels, predictions, classes):
    """Counts the pixels of each image by label and prediction, int64 [b, classes, classes]; labels below 0 count nowhere."""
    number = tf.shape(labels)[0]
    image = tf.range(number)[:, None, None]
    place = tf.where(labels < 0, labels, (image * classes + labels) * classes + predictions)
    counted = tf.math.unsorted_segment_sum(tf.ones_like(place, tf.int64), place, number * classes * classes)  # not those below 0
    return tf.reshape(counted, [number, classes, classes])
