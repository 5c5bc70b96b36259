"""A training step of a ResNet-50 on 64 x 64 images whose batch norms `convert_model` synced, against the same unconverted one.

    python -m benchmarks.conversion --rounds 20

Beside them stands the same network written with `sync_batch_norm`, to which the converted one has to be equal before
anything is timed. Then a ResNet-20 with fused batch norms, and one with batch norms by hand: a step, the time to build it, and
its nodes, converted against unconverted.
"""
import functools
import gc

import numpy as np
import tensorflow.compat.v1 as tf

import tf_syncbn
from benchmarks import record, variants
from benchmarks.command import parse, positive_int
from benchmarks.interleave import paired_ratio, spread, take_turns
from benchmarks.networks import fused_layers, model_fn, resnet_50, synced_layers
from benchmarks.unsynced import plain_batch_norm
from benchmarks.variants import SYNCED, UNSYNCED

__all__ = ["main"]

CONVERTED = "converted towers"
_IMAGE_SHAPE, _TARGET, _TOLERANCE = (64, 64, 3), 1.10, 1e-4
_ORDERS = 3  # of the images, in which rounding shows what it does
_SMALL_BATCH = 16  # of a tower of the ResNet-20


def main(argv=None):
    """Runs the command line and returns the path of the JSON that it wrote."""
    settings = parse("Times training steps of a converted ResNet-50.", argv, 20, _add_arguments)
    built = {name: _make(model, settings) for name, model in (
        (CONVERTED, tf_syncbn.convert_model(resnet_50(fused_layers()))), (UNSYNCED, resnet_50(fused_layers())),
        (SYNCED, resnet_50(synced_layers())))}
    checked = _check_losses(built, settings.towers * settings.batch_size)
    print("From the same weights, the losses of the converted network and of that with sync_batch_norm, before and after a step, "
          "agree within %s. (The latter's own, with the images in other orders, within %s.)" % tuple(
              ", ".join("%.1g" % difference for difference in checked[name]) for name in ("converted", "reordered")))
    seconds = take_turns({name: variant.step for name, variant in built.items()}, settings.rounds, label="conversion")
    peers = {name: {"milliseconds": spread(1e3 * seconds[name]), "ratio": paired_ratio(seconds, CONVERTED, name)}
             for name in built}
    described = {"network": "ResNet-50", "images": "64 x 64 x 3", "batch_of_a_tower": settings.batch_size,
                 "rounds": settings.rounds, "optimizer": "momentum SGD"}
    small = {name: _small(layers, settings) for name, layers in (
        ("fused", fused_layers()), ("by hand", fused_layers()._replace(batch_norm=plain_batch_norm)))}
    ratio = peers[UNSYNCED]["ratio"]
    return record.write(settings.out, "conversion", described, [{"towers": settings.towers, "peers": peers, "resnet_20": small,
                                                                 "differences_of_losses": checked}], [
        record.target("conversion, %d converted towers / %s" % (settings.towers, UNSYNCED), ratio["median"], _TARGET,
                      ratio["lower_quartile"], ratio["upper_quartile"])])


def _add_arguments(parser):
    parser.add_argument("--towers", type=positive_int, default=2, help="number of towers")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="images of each tower")


def _make(model, settings):
    devices = ["/cpu:%d" % i for i in range(settings.towers)]
    return variants.GraphVariant(lambda *batch: variants.towers_step(model, *batch), devices, settings.batch_size,
                                 _IMAGE_SHAPE)


def _small(layers, settings):
    """Returns the `spread` of ratios of a converted ResNet-20 to the unconverted one, "step" and "build", and that of "nodes"."""
    models = {CONVERTED: tf_syncbn.convert_model(model_fn(layers)), UNSYNCED: model_fn(layers)}
    devices = ["/cpu:%d" % i for i in range(settings.towers)]
    nodes = {}

    def make(name):
        return variants.GraphVariant(functools.partial(variants.towers_step, models[name]), devices, _SMALL_BATCH)

    def build(name):
        with tf.Graph().as_default() as graph:
            parts = [tf.zeros((_SMALL_BATCH,) + variants.IMAGE_SHAPE)] * len(devices), [
                tf.zeros([_SMALL_BATCH], tf.int32)] * len(devices)
            variants.towers_step(models[name], *parts, devices)
        nodes[name] = len(graph.get_operations())
    built = {name: make(name) for name in models}
    step = take_turns({name: variant.step for name, variant in built.items()}, settings.rounds, label="ResNet-20")
    seconds = take_turns({name: functools.partial(build, name) for name in models}, max(2, settings.rounds // 4), warm_ups=1,
                         label="ResNet-20, building", after_each=lambda _: gc.collect(), collect_garbage=True)
    return {"step": paired_ratio(step, CONVERTED, UNSYNCED), "build": paired_ratio(seconds, CONVERTED, UNSYNCED),
            "nodes": nodes[CONVERTED] / nodes[UNSYNCED]}


def _check_losses(built, size):
    """Trains from the same weights on the same batch, and refuses a converted network that trains another one.

    The loss after a step depends on the gradients too. Rounding grows through fifty layers of batch norm: with 16 images the
    network's own loss after one step differs by a tenth if nothing but their order is changed.

    Returns:
      A dict of lists of relative differences, before and after the step: "converted", between the two networks, and
      "reordered", the largest of the network with `sync_batch_norm` from itself with the images in other orders.
    """
    weights, (images, labels) = built[SYNCED].weights(), variants.make_batch(size, image_shape=_IMAGE_SHAPE)

    def losses(name, order):
        built[name].load(weights, images[order], labels[order])
        return np.array([built[name].step() for _ in range(2)])

    as_is, orders = np.arange(size), [np.random.RandomState(seed).permutation(size) for seed in range(_ORDERS)]
    ours, theirs = losses(CONVERTED, as_is), losses(SYNCED, as_is)
    converted, reordered = np.abs(ours / theirs - 1), np.max([np.abs(losses(SYNCED, o) / theirs - 1) for o in orders], 0)
    if not (converted <= np.maximum(_TOLERANCE, reordered)).all():
        raise RuntimeError("The converted network does not train as that with sync_batch_norm: their losses are %s and %s. (With "
                           "the images in other orders the latter's differ by %s of them.)" % (ours, theirs, reordered))
    return {"converted": converted.tolist(), "reordered": reordered.tolist()}


if __name__ == "__main__":
    main()
