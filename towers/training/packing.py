"""Small gradients of a tower in one tensor, so that few transfers carry what many would."""
import tensorflow.compat.v1 as tf

__all__ = ["averaged_in_packs"]

_SMALL = 1 << 16  # numbers of a gradient; larger ones pay for a transfer of their own, and packing copies them


def averaged_in_packs(columns, devices, average):
    """Averages small gradients in packs, one of each dtype, and returns what it averaged.

    Each number is averaged over the towers as it would be by itself, so that packing changes no bit.

    Args:
      columns: list over variables of lists over towers of gradients.
      devices: list of str, the towers' devices.
      average: a function of a list over towers of tensors that returns their average.

    Returns:
      A dict from numbers of variables to averages.
    """
    packs, found = {}, {}
    for number, gradients in enumerate(columns):
        if all(isinstance(gradient, tf.Tensor) and _is_small(gradient) for gradient in gradients):
            packs.setdefault(gradients[0].dtype, []).append(number)
    for numbers in packs.values():
        if len(numbers) > 1:
            found.update(zip(numbers, _averaged([columns[number] for number in numbers], devices, average)))
    return found


def _is_small(gradient):
    return gradient.shape.is_fully_defined() and gradient.shape.num_elements() <= _SMALL


def _averaged(columns, devices, average):
    packed = []
    for device, of_tower in zip(devices, zip(*columns)):
        with tf.device(device):
            packed.append(tf.concat([tf.reshape(gradient, [-1]) for gradient in of_tower], 0, name="pack"))
    shapes = [gradients[0].shape for gradients in columns]
    parts = tf.split(average(packed), [shape.num_elements() for shape in shapes], name="unpack")
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]
