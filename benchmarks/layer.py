"""One layer on two CPU towers, forward and backward, against the same towers with batch norm of each alone.

    python -m benchmarks.layer --rounds 60

Everything that a training step makes a layer do is in the time: y, dx, the gradients of gamma and beta, the exchanges, and
the moving averages. The limit is memory bandwidth: a layer passes over its activation about 8 times, so 8 times the
activation's bytes over the time, beside the bytes/s of a large copy made just before, tells how near it is.
"""
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from benchmarks import record
from benchmarks.command import parse
from benchmarks.interleave import geometric_mean, paired_ratio, spread, take_turns
from benchmarks.saved import num_bytes, tensors_saved_for_backward
from benchmarks.unsynced import EPSILON, MOMENTUM, fused_batch_norm, fused_kernel_runs, plain_batch_norm

__all__ = ["Case", "build_layer", "main"]

_DEVICES = ["/cpu:0", "/cpu:1"]
_PASSES, _LARGE_BYTES = 8, 1e6
_COPY_BYTES, _COPIES = 1 << 28, 5


class Case(NamedTuple):
    """The activation of one tower."""
    shape: tuple
    dtype: tf.DType = tf.float32
    axis: int = 3

    @property
    def num_bytes(self):
        return int(np.prod(self.shape)) * self.dtype.size

    @property
    def counts(self):
        """Whether a target is about this case: NHWC, 1 MB and more."""
        return self.axis == 3 and self.num_bytes >= _LARGE_BYTES

    def __str__(self):
        return "%s %s axis %d" % ("x".join(str(size) for size in self.shape), self.dtype.name, self.axis)


_SHAPES = [(16, 4, 4, 64), (16, 8, 8, 64), (16, 16, 16, 32), (16, 32, 32, 16), (64, 8, 8, 64), (16, 32, 32, 64),
           (8, 28, 28, 256), (16, 14, 14, 512), (8, 56, 56, 64), (32, 32, 32, 64), (2, 33, 33, 1024), (4, 112, 112, 64),
           (8, 64, 64, 128)]
_CASES = ([Case(shape) for shape in _SHAPES] + [Case((8, 64, 56, 56), axis=1)] +
          [Case(shape, dtype) for dtype in (tf.float16, tf.bfloat16, tf.float64)
           for shape in ((16, 8, 8, 64), (16, 32, 32, 64), (8, 28, 28, 256), (8, 56, 56, 64), (4, 112, 112, 64))])


def main(argv=None):
    """Runs the command line and returns the path of the JSON that it wrote."""
    settings = parse("Times one sync_batch_norm on two CPU towers.", argv, 60)
    copy = _LargeCopy()
    rows = [_measure(case, settings.rounds, copy) for case in _CASES]
    described = {"towers": len(_DEVICES), "rounds": settings.rounds, "passes": _PASSES, "large_bytes": _LARGE_BYTES,
                 "copy": "NumPy, %d MiB, a thread a core, read + write" % (_COPY_BYTES >> 20)}
    return record.write(settings.out, "layer", described, rows, _targets(rows))


def _measure(case, rounds, copy):
    fused = fused_kernel_runs(case.dtype, case.axis)
    unsynced = fused_batch_norm if fused else plain_batch_norm
    with tf.Graph().as_default():
        built = {name: build_layer(name, batch_norm, case, _DEVICES)
                 for name, batch_norm in (("synced", _synced), ("unsynced", unsynced))}
        with tf.Session(config=towers.session_config(_DEVICES)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            runs = {name + " forward": session.make_callable(layer.forward) for name, layer in built.items()}
            runs.update((name + " step", session.make_callable(layer.forward + layer.backward))
                        for name, layer in built.items())
            # Not among the others' turns: after the copy whoever came next would find the caches cold.
            seconds = take_turns({"copy": copy.run}, _COPIES, 1)
            seconds.update(take_turns(runs, rounds, 5, "layer, %s" % (case,)))
            saved = {name: sum(num_bytes(tensor, session) for tensor in layer.saved) // len(_DEVICES)
                     for name, layer in built.items()}
    moved = _PASSES * case.num_bytes * len(_DEVICES) / np.median(seconds["synced step"])
    return {"shape": case.shape, "axis": case.axis, "dtype": case.dtype.name, "activation_bytes": case.num_bytes,
            "counts": case.counts, "unsynced": "fused" if fused else "moments and batch_normalization",
            "forward": _compare(seconds, "forward"), "step": _compare(seconds, "step"), "saved_bytes": saved,
            "bytes_per_second": moved, "copy_bytes_per_second": copy.num_bytes / np.median(seconds["copy"])}


def _compare(seconds, part):
    synced, unsynced = "synced " + part, "unsynced " + part
    return {"synced_milliseconds": spread(1e3 * seconds[synced]), "unsynced_milliseconds": spread(1e3 * seconds[unsynced]),
            "ratio": paired_ratio(seconds, synced, unsynced)}


def _inputs(case, index, device):
    """Returns x and dy of one tower, as variables on its device hold them."""
    def variable(name, mean, seed):
        return tf.get_variable("%s_%d" % (name, index), case.shape, case.dtype, tf.random_normal_initializer(mean, seed=seed),
                               trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES]).read_value()

    with tf.device(device):
        return variable("x", 1, 2 * index), variable("dy", 0, 2 * index + 1)


class _Layer(NamedTuple):
    """One layer on all towers.

    Attributes:
      forward, backward: lists of operations; running both is what a training step makes the layer do.
      saved: list of tensors kept for the backward pass.
    """
    forward: list
    backward: list
    saved: list


def build_layer(scope, batch_norm, case, devices):
    """Builds one layer on towers, their inputs in variables of their devices.

    Args:
      scope: str, of the layer's variables.
      batch_norm: function of x, a name and an axis.
      case: `Case`.
      devices: list of str.

    Returns:
      `_Layer`.
    """
    backward_ops = []
    with tf.variable_scope("inputs", reuse=tf.AUTO_REUSE):
        batch = [_inputs(case, i, device) for i, device in enumerate(devices)]

    def model(x, dy):
        y = batch_norm(x, "bn", case.axis)
        affine = [v for v in tf.trainable_variables() if v.op.name.startswith(scope + "/")]
        before = len(tf.get_default_graph().get_operations())
        gradients = tf.gradients(y, [x] + affine, dy)
        backward_ops.extend(tf.get_default_graph().get_operations()[before:])
        return {"forward": _sink([y]), "backward": _sink(gradients)}

    with tf.variable_scope(scope):
        replicas = towers.TowerBuilder(devices).build(model, towers.PerTower(batch))
    updates = [getattr(update, "op", update) for update in towers.collect_update_ops(replicas, "first")]
    parts = {part: [tensor.op for tower in replicas for tensor in tower.outputs[part]] for part in ("forward", "backward")}
    saved = tensors_saved_for_backward(backward_ops, [x for x, _ in batch], [dy for _, dy in batch])
    return _Layer(parts["forward"] + updates, parts["backward"], saved)


def _sink(tensors):
    """Returns identities whose ops can be run by themselves: the tensors are computed and not handed to Python.

    Under a `tf.group` Grappler would drop the computation.
    """
    return [tf.identity(tensor, name="sink") for tensor in tensors]


def _synced(x, name, axis):
    return tf_syncbn.sync_batch_norm(x, axis, MOMENTUM, EPSILON, name=name)


class _LargeCopy:
    """A copy of arrays much larger than any cache, by as many threads as there are cores.

    Attributes:
      num_bytes: int, read and written by one `run`.
    """

    def __init__(self):
        self._parts = np.array_split(np.ones([2, _COPY_BYTES // 4], np.float32), record.num_cores(), axis=1)
        self._threads = ThreadPoolExecutor(len(self._parts))
        self.num_bytes = 2 * _COPY_BYTES

    def run(self):
        """Copies once."""
        list(self._threads.map(lambda part: np.copyto(part[1], part[0]), self._parts))


def _targets(rows):
    def saved(dtype):
        return max(row["saved_bytes"]["synced"] / row["saved_bytes"]["unsynced"] for row in rows
                   if row["dtype"] == dtype and row["unsynced"] == "fused")

    found, dtypes = [], sorted({row["dtype"] for row in rows if row["unsynced"] == "fused"}, reverse=True)
    for dtype in dtypes:
        ratios = [row["step"]["ratio"]["median"] for row in rows if row["counts"] and row["dtype"] == dtype]
        what = "layer, %s, 2 synced towers / unsynced, fused, " % dtype
        found.append(record.target(what + "geometric mean of %d shapes of 1 MB and more" % len(ratios), geometric_mean(ratios),
                                   0.85 if dtype == "float32" else 1.0))
        found.append(record.target(what + "the worst of them", max(ratios), 1.05))
    for dtype in dtypes:
        found.append(record.target("layer, bytes saved for backward, synced / fused, %s, most" % dtype, saved(dtype), 1.0))
    return found


if __name__ == "__main__":
    main()
