"""A ResNet for 32 x 32 images as a plain model function on `tf.nn` and `tf.get_variable`.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2: depth 6n + 2, three stages of
n blocks with 16, 32 and 64 channels, shortcuts without parameters. Depth 20 has 0.27 million parameters.
"""
import tensorflow.compat.v1 as tf

from examples.training.batch_norm import per_tower, synced

__all__ = ["resnet"]


def resnet(depth=20, sync_bn=True, weight_decay=1e-4, classes=10, label_smoothing=0.0, dtype=None):
    """Returns a model function of images and labels.

    Args:
      depth: int, 6n + 2 with n of 1 or more.
      sync_bn: whether batch norm takes the moments of all towers, or each tower's own.
      weight_decay: float, times half the squared norm of all kernels, is added to the loss.
      classes: int.
      label_smoothing: float, the share of a label that is spread evenly over all classes.
      dtype: tf.float32 or tf.float64, of the variables and all that is computed; None is what the variable scope says.

    Returns:
      A function of images, float32 [b, 32, 32, 3], and labels, int32 [b]. It returns a dict of "loss" (mean cross-entropy
      plus weight decay), "accuracy" (scalar) and "correct" (bool [b]).

    Raises:
      ValueError: for another depth, and for a label smoothing that is not from 0 to less than 1.
    """
    if depth < 8 or depth % 6 != 2:
        raise ValueError("The depth of this ResNet is 6n + 2: 8, 14, 20, 32, 44, 56, 110; not %d." % depth)
    if not 0 <= label_smoothing < 1:
        raise ValueError("The label smoothing is a share from 0 to less than 1, not %s." % label_smoothing)
    batch_norm = synced if sync_bn else per_tower

    def model_fn(images, labels):
        with tf.variable_scope(tf.get_variable_scope(), dtype=dtype, auxiliary_name_scope=False):
            return network(images if dtype is None else tf.cast(images, dtype), labels)

    def network(images, labels):
        kernels = []
        x = tf.nn.relu(batch_norm(_conv(images, 16, 1, "first", kernels), "first_bn"))
        for stage, channels in enumerate((16, 32, 64)):
            for block in range((depth - 2) // 6):
                stride = 2 if stage and not block else 1
                with tf.variable_scope("stage%d_block%d" % (stage, block)):
                    x = _block(x, channels, stride, batch_norm, kernels)
        x = tf.reduce_mean(x, [1, 2])
        logits = _dense(x, classes, kernels)
        losses = _cross_entropies(labels, logits, label_smoothing)
        decay = weight_decay * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
        correct = tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels)
        accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))
        loss = tf.reduce_mean(losses) + decay
        tf.summary.scalar("loss", loss)
        tf.summary.scalar("accuracy", accuracy)
        return {"loss": loss, "accuracy": accuracy, "correct": correct}

    return model_fn


def _block(x, channels, stride, batch_norm, kernels):
    shortcut = x
    if stride > 1:
        more = channels - x.shape.as_list()[-1]
        shortcut = tf.pad(x[:, ::stride, ::stride], [[0, 0], [0, 0], [0, 0], [more // 2, more - more // 2]])
    x = tf.nn.relu(batch_norm(_conv(x, channels, stride, "conv1", kernels), "bn1"))
    return tf.nn.relu(batch_norm(_conv(x, channels, 1, "conv2", kernels), "bn2") + shortcut)


def _conv(x, channels, stride, name, kernels):
    with tf.variable_scope(name):
        shape = [3, 3, x.shape.as_list()[-1], channels]
        kernel = tf.get_variable("kernel", shape, initializer=tf.variance_scaling_initializer(2.0, "fan_out"))
        kernels.append(kernel)
        return tf.nn.conv2d(x, kernel, strides=[1, stride, stride, 1], padding="SAME")


def _dense(x, units, kernels):
    with tf.variable_scope("dense"):
        kernel = tf.get_variable("kernel", [x.shape.as_list()[-1], units], initializer=tf.glorot_uniform_initializer())
        kernels.append(kernel)
        return tf.matmul(x, kernel) + tf.get_variable("bias", [units], initializer=tf.zeros_initializer())


def _cross_entropies(labels, logits, smoothing):
    if not smoothing:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    classes = logits.shape.as_list()[-1]
    smooth = tf.one_hot(labels, classes, dtype=logits.dtype) * (1 - smoothing) + smoothing / classes
    return tf.nn.softmax_cross_entropy_with_logits_v2(labels=smooth, logits=logits)
