"""Synced towers on GPUs: training steps of ResNet-50, single layers, and how exact and how repeatable they are.

    python -m benchmarks.gpu --rounds 30

Two towers share one GPU; where there are more, towers stand on them in turn. Steps and layers are timed against the same towers
with the fused op of each alone. The variance of a layer whose mean is 1e4 deviations is held against NumPy in float64; a small
network against one tower on the whole batch; and two processes with TF_DETERMINISTIC_OPS=1 against each other, to the bit.
"""
import hashlib
import json
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from benchmarks import networks, record, variants
from benchmarks.command import in_fresh_process, parse, positive_int
from benchmarks.interleave import paired_ratio, spread, take_turns
from benchmarks.layer import Case, build_layer
from benchmarks.unsynced import MOMENTUM, fused_batch_norm
from towers.testing import assert_equals_one_batch

__all__ = ["main"]

_STEP_TARGET, _VARIANCE_TARGET = 1.05, 1e-3
_MEAN = 1e4  # in deviations
_STEPS_OF_BITS = 5


class _Layer(NamedTuple):
    """A layer to be timed, and the most that it may take of the fused op's time."""
    shape: tuple
    at_most: float


# Of 6 and of 51 million numbers a tower.
_LAYERS = [_Layer((32, 28, 28, 256), 1.5), _Layer((64, 112, 112, 64), 1.2)]
_SIZES = [(16, 64, 64, 16), (32, 28, 28, 256), (64, 112, 112, 64)]


def main(argv=None):
    """Runs the command line and returns the path of the JSON that it wrote; None without a GPU, and of a child process."""
    settings = parse("Times synced towers on GPUs.", argv, 30, _add_arguments)
    devices = settings.devices or [device for device in towers.find_devices() if "gpu" in device]
    if settings.child is not None:
        print(json.dumps(_digest(devices, settings)))
        return None
    if not devices:
        print("gpu is left out: this TensorFlow sees no GPU.")
        return None
    devices = [devices[i % len(devices)] for i in range(max(settings.towers, len(devices)))]
    steps = [_time_steps(dtype, axis, devices, settings) for dtype in (tf.float32, tf.float16) for axis in settings.axes]
    layers = [_time_layer(layer, axis, devices, settings.rounds) for layer in _LAYERS for axis in settings.axes]
    exact = {"variance": [_error_of_variance(shape, devices) for shape in _SIZES], "law": _law(devices),
             "bits": _same_bits(devices, settings)}
    described = {"network": "ResNet-50", "towers": len(devices), "devices": devices, "batch_of_a_tower": settings.batch_size,
                 "image_size": settings.image_size, "rounds": settings.rounds}
    return record.write(settings.out, "gpu", described, [{"steps": steps, "layers": layers, "exact": exact}],
                        _targets(steps, layers, exact))


def _add_arguments(parser):
    parser.add_argument("--towers", type=positive_int, default=2, help="number of towers, at least one a GPU")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="images of each tower")
    parser.add_argument("--image-size", type=positive_int, default=224, help="pixels of a side")
    parser.add_argument("--axes", type=int, nargs="+", choices=[1, 3], default=[3, 1], help="where channels lie")
    parser.add_argument("--devices", nargs="+", help="instead of all GPUs")


def _time_steps(dtype, axis, devices, settings):
    """Returns a row: how long a training step takes on synced and on unsynced towers."""
    shape = (settings.image_size, settings.image_size, 3)
    images, labels = variants.make_batch(len(devices) * settings.batch_size, image_shape=shape)

    def make(layers):
        model = networks.resnet_50(layers, axis, dtype)
        return variants.GraphVariant(
            lambda *batch: variants.towers_step(model, *batch), devices, settings.batch_size, shape)
    built = {"synced": make(networks.synced_layers(axis)), "unsynced": make(networks.fused_layers(axis))}
    weights = built["synced"].weights()
    for variant in built.values():
        variant.load(weights, images, labels)
    losses = {name: variant.step() for name, variant in built.items()}
    name = "ResNet-50, %s, channels %s" % (dtype.name, "last" if axis == 3 else "first")
    seconds = take_turns({name: variant.step for name, variant in built.items()}, settings.rounds, 5, name)
    return dict(_row(name, seconds), first_losses=losses)


def _time_layer(layer, axis, devices, rounds):
    """Returns a row: how long a layer takes, forward and backward, synced and unsynced."""
    batch, *sizes, channels = layer.shape
    case = Case(layer.shape if axis == 3 else (batch, channels, *sizes), tf.float32, axis)
    with tf.Graph().as_default():
        built = {name: build_layer(name, batch_norm, case, devices)
                 for name, batch_norm in (("synced", _synced), ("unsynced", fused_batch_norm))}
        with tf.Session(config=towers.session_config(devices)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            runs = {name: session.make_callable(made.forward + made.backward) for name, made in built.items()}
            name = "layer, %.1f million numbers, channels %s" % (np.prod(layer.shape) / 1e6, "last" if axis == 3 else "first")
            seconds = take_turns(runs, rounds, 5, name)
    return dict(_row(name, seconds), at_most=layer.at_most)


def _synced(x, name, axis):
    return tf_syncbn.sync_batch_norm(x, axis, MOMENTUM, name=name)


def _row(name, seconds):
    return {"name": name, "ratio": paired_ratio(seconds, "synced", "unsynced"),
            "milliseconds": {variant: spread(1e3 * values) for variant, values in seconds.items()}}


def _error_of_variance(shape, devices):
    """Returns a row: the largest relative error of a channel's variance where means are large, for one tower and for all."""
    shape = (shape[0] // len(devices) * len(devices),) + shape[1:]
    x = (np.random.RandomState(0).randn(*shape) + _MEAN).astype(np.float32)
    # In float64, of the numbers as float32 has them.
    expected = np.var(x.reshape(-1, shape[-1]), 0, dtype=np.float64, ddof=1)
    found = {}
    for count in sorted({1, len(devices)}):
        with tf.Graph().as_default():
            batch = tf.placeholder(tf.float32, shape)
            replicas = towers.TowerBuilder(devices[:count]).build(
                lambda x: tf_syncbn.sync_batch_norm(x, momentum=0.0, unbiased=True, name="bn"), batch)
            updates = towers.collect_update_ops(replicas, "first")
            variance, = [v for v in tf.global_variables() if "moving_variance" in v.op.name]
            with tf.Session(config=towers.session_config(devices)) as session:
                session.run(tf.global_variables_initializer())
                session.run(updates, {batch: x})
                found[count] = float(np.max(np.abs(session.run(variance) / expected - 1)))
    return {"numbers": int(np.prod(shape)), "error": found}


def _law(devices):
    """Returns how far towers are from one tower on the whole batch, in float32, by what rounding allows."""
    images, labels = variants.make_batch(4 * len(devices) + 1)
    found = assert_equals_one_batch(
        networks.model_fn(networks.synced_layers(), 8), (images, labels), len(devices), devices=devices, steps=2)
    return {name: {"difference": getattr(found, name), "allowed": float(bound)} for name, bound in found.bound.items()}


def _same_bits(devices, settings):
    """Tells whether two processes with TF_DETERMINISTIC_OPS=1 train a ResNet-20 to the same bits."""
    arguments = ["--batch-size", str(settings.batch_size), "--devices"] + devices
    digests = [in_fresh_process("benchmarks.gpu", "bits", settings, arguments, environment={"TF_DETERMINISTIC_OPS": "1"})
               for _ in range(2)]
    return {"digests": digests, "same": digests[0] == digests[1]}


def _digest(devices, settings):
    """Trains some steps, and returns the SHA-256 of losses and weights."""
    model = networks.model_fn(networks.synced_layers())
    variant = variants.GraphVariant(lambda *batch: variants.towers_step(model, *batch), devices, settings.batch_size)
    rng, weights = np.random.RandomState(1), variant.weights()
    drawn = {name: rng.randn(*value.shape).astype(np.float32) * 0.05 for name, value in sorted(weights.items())}
    variant.load(drawn, *variants.make_batch(len(devices) * settings.batch_size))
    digest = hashlib.sha256(np.array([variant.step() for _ in range(_STEPS_OF_BITS)]).tobytes())
    for _, value in sorted(variant.weights().items()):
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _targets(steps, layers, exact):
    found = [record.target("gpu, %s, synced / unsynced" % row["name"], row["ratio"]["median"], row.get("at_most", _STEP_TARGET),
                           row["ratio"]["lower_quartile"], row["ratio"]["upper_quartile"]) for row in steps + layers]
    found += [record.target("gpu, %.1f million numbers, towers: %s, relative error of the variance at a mean of 1e4"
                            % (row["numbers"] / 1e6, count), error, _VARIANCE_TARGET)
              for row in exact["variance"] for count, error in row["error"].items()]
    found.append(record.target("gpu, runs with other bits under TF_DETERMINISTIC_OPS=1", float(not exact["bits"]["same"]), 0.0))
    return found


if __name__ == "__main__":
    main()
