"""A training step of a ResNet-50 on 64 x 64 images whose batch norms `convert_model` synced, against the same unconverted one.

    python -m benchmarks.conversion --rounds 20

Beside them stands the same network written with `sync_batch_norm`, to which the converted one has to be equal before
anything is timed.
"""
import numpy as np

import tf_syncbn
from benchmarks import record, variants
from benchmarks.command import parse, positive_int
from benchmarks.interleave import paired_ratio, spread, take_turns
from benchmarks.networks import fused_layers, resnet_50, synced_layers
from benchmarks.variants import SYNCED, UNSYNCED

__all__ = ["main"]

CONVERTED = "converted towers"
_IMAGE_SHAPE, _TARGET, _TOLERANCE = (64, 64, 3), 1.10, 1e-4
_FLOORS = 5  # what rounding may do, over the most it does where nothing but the order of the images changes
_ORDERS = 3


def main(argv=None):
    """Runs the command line and returns the path of the JSON that it wrote."""
    settings = parse("Times training steps of a converted ResNet-50.", argv, 20, _add_arguments)
    built = {name: _make(model_fn, settings) for name, model_fn in (
        (CONVERTED, tf_syncbn.convert_model(resnet_50(fused_layers()))), (UNSYNCED, resnet_50(fused_layers())),
        (SYNCED, resnet_50(synced_layers())))}
    checked = _check_losses(built, settings.towers * settings.batch_size)
    print("From the same weights, the losses of the converted network and of that with sync_batch_norm agree within %(first).1g, "
          "and after a step within %(later).1g. (With the images in other orders, the latter's own come up to "
          "%(reordered).1g apart.)" % checked)
    seconds = take_turns({name: variant.step for name, variant in built.items()}, settings.rounds, label="conversion")
    peers = {name: {"milliseconds": spread(1e3 * seconds[name]), "ratio": paired_ratio(seconds, CONVERTED, name)}
             for name in built}
    described = {"network": "ResNet-50", "images": "64 x 64 x 3", "batch_of_a_tower": settings.batch_size,
                 "rounds": settings.rounds, "optimizer": "momentum SGD"}
    ratio = peers[UNSYNCED]["ratio"]
    return record.write(settings.out, "conversion", described, [{"towers": settings.towers, "peers": peers,
                                                                 "differences_of_losses": checked}], [
        record.target("conversion, %d converted towers / %s" % (settings.towers, UNSYNCED), ratio["median"], _TARGET,
                      ratio["lower_quartile"], ratio["upper_quartile"])])


def _add_arguments(parser):
    parser.add_argument("--towers", type=positive_int, default=2, help="number of towers")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="images of each tower")


def _make(model_fn, settings):
    devices = ["/cpu:%d" % i for i in range(settings.towers)]
    return variants.GraphVariant(lambda *batch: variants.towers_step(model_fn, *batch), devices, settings.batch_size,
                                 _IMAGE_SHAPE)


def _check_losses(built, size):
    """Trains a step from the same weights and the same batch, and refuses a converted network that trains another one.

    The later loss depends on the gradients too. Rounding grows through fifty layers of batch norm: with 16 images the
    network's own loss after one step differs by a tenth if nothing but their order is changed.

    Returns:
      A dict of relative differences: "first" and "later", of the converted network's losses before and after the step, and
      "reordered", the largest of the other's after the step, with the images in other orders.
    """
    weights, (images, labels) = built[SYNCED].weights(), variants.make_batch(size, image_shape=_IMAGE_SHAPE)

    def losses(name, images, labels):
        built[name].load(weights, images, labels)
        return np.array([built[name].step() for _ in range(2)])

    ours, theirs = losses(CONVERTED, images, labels), losses(SYNCED, images, labels)
    orders = [np.random.RandomState(seed).permutation(size) for seed in range(_ORDERS)]
    reordered = [losses(SYNCED, images[order], labels[order])[1] for order in orders]
    (first, later), floor = np.abs(ours / theirs - 1), np.abs(np.divide(reordered, theirs[1]) - 1).max()
    if not (first <= _TOLERANCE and later <= max(_TOLERANCE, _FLOORS * floor)):
        raise RuntimeError("The converted network does not train as that with sync_batch_norm: its losses are %s, the other's "
                           "%s, after the step %s with the images in other orders." % (ours, theirs, reordered))
    return {"first": float(first), "later": float(later), "reordered": float(floor)}


if __name__ == "__main__":
    main()
