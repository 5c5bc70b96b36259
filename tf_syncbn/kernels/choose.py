"""Which kernels a layer runs: one ordered table of strategies, of which the first that fits is taken.

What was measured for each row stands in docs/kernels.md.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.fused_op import has_few_images
from tf_syncbn.kernels.machines import cudnn, cudnn_unsized, eigen, eigen_plain, eigen_tf1, onednn, products
from tf_syncbn.kernels.plain import own_gradient, reference, scaled_gradient
from tf_syncbn.kernels.rows import is_small

__all__ = ["Machine", "STRATEGIES", "Strategy", "choose"]


class Machine(NamedTuple):
    """What of the machine decides.

    Attributes:
      kind: "CPU", "GPU", or None where the device is not known.
      generation: 1 or 2, TensorFlow's.
      onednn: whether TensorFlow puts oneDNN's kernels in the place of its own on CPUs.
      deterministic: whether TensorFlow refuses ops that give other bits from run to run.
    """
    kind: Any
    generation: int
    onednn: bool
    deterministic: bool = False


class Strategy(NamedTuple):
    """Kernels, and when they fit.

    Attributes:
      name: str.
      fits: a function of a `Layer` and a `Machine` that returns a bool.
      kernels: a module with the functions `local_moments`, `normalize`, `gradient_sums` and `input_gradient`.
      as_one_op: a function of a `Layer` and a `Machine`: whether the output is to be the fused op's own in the caller's graph,
        where Grappler makes one op of it and of a ReLU that reads it.
      plain: a module with the last two of these functions, of plain ops, that return no less: what the gradient of `kernels`'
        ones is taken of.
      takes_shares: whether, where no mask is, `input_gradient` takes `n_i / n` of the sums over towers in place of `1 / n`, and
        the scale over `n_i`.
    """
    name: str
    fits: Any
    kernels: Any
    as_one_op: Any = lambda layer, machine: False
    plain: Any = reference
    takes_shares: bool = False


def _takes_cudnn(layer, machine):
    takes_axis = layer.is_last or machine.kind == "GPU" and layer.axis == 1 and layer.shape.rank == 4
    return machine.kind != "CPU" and takes_axis and layer.accumulator == tf.float32 and has_few_images(layer)


def _is_cudnns(layer, machine):
    # Of one value cuDNN's unbiased variance is no number.
    return machine.kind == "GPU" and _takes_cudnn(layer, machine) and (layer.count or 0) > 1


def _has_few_channels(layer, machine):
    is_large = layer.channels <= products.MOST_CHANNELS and not is_small(layer, products.LEAST_NUMBERS - 1)
    return _is_cudnns(layer, machine) and layer.dtype == tf.float32 and is_large


def _is_cpus(layer, machine):
    return machine.kind == "CPU" and layer.is_last and layer.accumulator == tf.float32


def _is_eigen_plain(layer, machine):
    # In float64 there is no fused op at all.
    small = is_small(layer) and machine.generation == 2 and not machine.onednn
    return machine.kind == "CPU" and layer.is_last and (layer.accumulator == tf.float64 or small)


def _is_image(layer, machine):
    return layer.shape.rank == 4 and (layer.dtype == tf.float32 or layer.dtype == tf.float16 and machine.kind == "GPU")


STRATEGIES = (
    Strategy("products", _has_few_channels, products, _is_image, scaled_gradient),
    Strategy("cudnn", _is_cudnns, cudnn, _is_image, own_gradient, takes_shares=True),
    Strategy("cudnn_unsized", lambda layer, machine: _takes_cudnn(layer, machine) and not machine.deterministic, cudnn_unsized,
             _is_image, scaled_gradient),
    Strategy("eigen_plain", _is_eigen_plain, eigen_plain),
    Strategy("onednn", lambda layer, machine: _is_cpus(layer, machine) and machine.onednn, onednn, _is_image,
             scaled_gradient),
    Strategy("eigen_tf1", lambda layer, machine: _is_cpus(layer, machine) and machine.generation == 1, eigen_tf1),
    Strategy("eigen", _is_cpus, eigen),
    Strategy("reference", lambda layer, machine: True, reference),
)


def choose(layer, machine):
    """Returns the first of the `STRATEGIES` that fits a `Layer` on a `Machine`."""
    return next(strategy for strategy in STRATEGIES if strategy.fits(layer, machine))
