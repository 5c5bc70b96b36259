"""The peer that rewrites the model over lists of tensors, one tensor a tower, as TensorFlow 1 projects did.

Written from the public description of holyseven/PSPNet-TF-Reproduce (`model/utils_mg.py`): every layer takes a list and
returns a list, with each tower's part on its device; batch norm averages every tower's mean and mean of squares with equal
weights. Its variance is the biased one here, so that the network is the same as everyone else's. Gradients are taken
tower by tower, as there, or of all towers' losses at once.
"""
import tensorflow.compat.v1 as tf

from benchmarks.networks import Layers, fused_layers, resnet
from benchmarks.unsynced import EPSILON, norm_variables, update_moving_averages

__all__ = ["build_step"]


def build_step(images, labels, devices, optimizer, call_per_tower, depth):
    """Builds a training step of the ResNet on lists of tensors.

    Args:
      images, labels: lists over towers of float32 [b, 32, 32, 3] and int32 [b].
      devices: list of str.
      optimizer: a `tf.train.Optimizer`.
      call_per_tower: bool, whether gradients are taken of each tower's loss, or once of the mean of all losses.
      depth: int, of the ResNet.

    Returns:
      The mean loss, a scalar tensor, and the train op.
    """
    losses = []
    for logits, labels_of_tower, device in zip(resnet(_layers(devices), images, depth), labels, devices):
        with tf.device(device):
            losses.append(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=labels_of_tower, logits=logits)))
    with tf.device(devices[0]):
        loss = tf.add_n(losses) / len(devices)
    if call_per_tower:
        per_tower = [optimizer.compute_gradients(tower_loss, colocate_gradients_with_ops=True) for tower_loss in losses]
        with tf.device(devices[0]):
            grads = [(tf.add_n([gradient for gradient, _ in pairs]) / len(devices), pairs[0][1])
                     for pairs in zip(*per_tower)]
    else:
        grads = optimizer.compute_gradients(loss, colocate_gradients_with_ops=True)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return loss, optimizer.apply_gradients(grads)


def _layers(devices):
    """Returns layers on lists over towers."""
    plain = fused_layers()

    def each(function, *lists):
        return _on_each(devices, lambda i, *xs: function(*xs), *lists)

    def conv(xs, channels, stride, name):
        return _on_each(devices, lambda i, x: _reused(i, plain.conv, x, channels, stride, name), xs)

    def dense(xs, units, name):
        return _on_each(devices, lambda i, x: _reused(i, plain.dense, x, units, name), xs)

    def batch_norm(xs, name):
        return _batch_norm(xs, name, devices)

    return Layers(each, conv, batch_norm, dense)


def _on_each(devices, function, *lists):
    results = []
    for i, (device, *xs) in enumerate(zip(devices, *lists)):
        with tf.device(device):
            results.append(function(i, *xs))
    return results


def _reused(i, layer, *args):
    with tf.variable_scope(tf.get_variable_scope(), reuse=i > 0):
        return layer(*args)


def _batch_norm(xs, name, devices):
    with tf.variable_scope(name), tf.device(devices[0]):
        gamma, beta, moving_mean, moving_variance = norm_variables(xs[0])
        means = _on_each(devices, lambda i, x: tf.reduce_mean(x, [0, 1, 2]), xs)
        square_means = _on_each(devices, lambda i, x: tf.reduce_mean(tf.square(x), [0, 1, 2]), xs)
        mean = tf.add_n(means) / len(xs)
        variance = tf.add_n(square_means) / len(xs) - tf.square(mean)
        update_moving_averages((moving_mean, mean), (moving_variance, variance))
        return _on_each(devices, lambda i, x: tf.nn.batch_normalization(x, mean, variance, beta, gamma, EPSILON), xs)
