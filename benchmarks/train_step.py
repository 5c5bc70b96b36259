"""A training step of ResNet-20 on 2, 4 and 8 synced towers, against everything else that trains the same network.

    python -m benchmarks.train_step --rounds 40

The peers: the same towers with the fused op and no synchronization; one tower on the whole batch; lists of tensors through
every layer, with one gradient call for all towers and with one for each; and, on TensorFlow 2, MirroredStrategy with Keras'
synchronized layer. Moving averages are kept by all. Before anything is timed, all variants have to compute the same loss.
"""
import json
import time

import numpy as np

from benchmarks import mirrored, record, variants
from benchmarks.command import in_fresh_process, parse, positive_int
from benchmarks.interleave import paired_ratio, spread, take_turns
from benchmarks.variants import LISTS_PER_TOWER, MIRRORED, ONE_TOWER, SYNCED, UNSYNCED

__all__ = ["main"]

_TARGETS = {UNSYNCED: 1.00, ONE_TOWER: 0.90, MIRRORED: 0.85, LISTS_PER_TOWER: 0.35}
_TARGET_TOWERS, _DEPTH, _TOLERANCE = 4, 20, 1e-4


def main(argv=None):
    """Runs the command line and returns the path of the JSON that it wrote; of a child process, None."""
    settings = parse("Times training steps of ResNet-20 on synced towers and its peers.", argv, 40, _add_arguments)
    if settings.child is not None:
        print(json.dumps(_measure(int(settings.child), settings)))
        return None
    missing = mirrored.why_not()
    if missing is not None:
        print("%s is left out: %s" % (MIRRORED, missing))
    rows = [_measure_apart(num_towers, settings) for num_towers in settings.towers]
    described = {"network": "ResNet-%d" % _DEPTH, "images": "32 x 32 x 3", "batch_of_a_tower": settings.batch_size,
                 "rounds": settings.rounds, "optimizer": "momentum SGD", "left_out": missing,
                 "keras": None if missing else mirrored.keras_version()}
    return record.write(settings.out, "train_step", described, rows, _targets(rows))


def _add_arguments(parser):
    parser.add_argument("--towers", type=positive_int, nargs="+", default=[2, 4, 8], help="numbers of towers")
    parser.add_argument("--batch-size", type=positive_int, default=16, help="images of each tower")


def _measure_apart(num_towers, settings):
    """Measures in a fresh process: TensorFlow refuses two MirroredStrategies of different sizes in one."""
    row = in_fresh_process("benchmarks.train_step", str(num_towers), settings, ["--batch-size", str(settings.batch_size)])
    print("%d towers: from the same weights, the first losses of all %d variants agree within %.1g. (On different images the "
          "unsynced towers are %.1g apart, as they should be.)" % (
              num_towers, len(row["peers"]), row["largest_difference_of_losses"], row["unsynced_difference_of_losses"]))
    return row


def _measure(num_towers, settings):
    if mirrored.why_not() is None:
        mirrored.make_cpus(num_towers)
    built = {name: variants.make_variant(name, num_towers, settings.batch_size, _DEPTH) for name in variants.names()}
    checked = _check_losses(built, num_towers, settings.batch_size)
    steps = {name: variant.step for name, variant in built.items()}
    seconds = take_turns(steps, settings.rounds, label="train_step, %d towers" % num_towers)
    return dict(checked, towers=num_towers, peers={
        name: {"milliseconds": spread(1e3 * seconds[name]), "ratio": paired_ratio(seconds, SYNCED, name)}
        for name in built})


def _check_losses(built, num_towers, batch_size):
    """Makes every variant train a few steps from the same weights, and refuses losses that differ.

    On a batch of different images the unsynced towers rightly differ, so all are compared once more where every tower has
    the same images: there a tower's own moments are those of the whole batch.

    Returns:
      A dict of the largest relative difference, that of the unsynced towers on different images, and each variant's seconds
      in its first step.
    """
    weights = built[SYNCED].weights()
    batch = variants.make_batch(num_towers * batch_size)
    images, labels = variants.make_batch(batch_size)
    repeated = np.tile(images, [num_towers, 1, 1, 1]), np.tile(labels, num_towers)
    losses, first_step, losses_of_repeated = {}, {}, {}
    for name, variant in built.items():
        variant.load(weights, *batch)
        start = time.perf_counter()
        losses[name] = [variant.step()]
        first_step[name] = time.perf_counter() - start
        losses[name] += [variant.step() for _ in range(2)]
        variant.load(weights, *repeated)
        losses_of_repeated[name] = [variant.step()]
    unsynced = losses.pop(UNSYNCED)
    found = max(_largest_difference(losses), _largest_difference(losses_of_repeated))
    if not found <= _TOLERANCE:
        raise RuntimeError("The variants do not train the same network; their losses are %s, and %s where all towers have the "
                           "same images." % (losses, losses_of_repeated))
    return {"largest_difference_of_losses": found, "first_step_seconds": first_step,
            "unsynced_difference_of_losses": abs(unsynced[0] / losses[SYNCED][0] - 1)}


def _largest_difference(losses):
    values = np.array(list(losses.values()))
    return float(np.max(np.abs(values / values[0] - 1)))


def _targets(rows):
    found = []
    for row in rows:
        if row["towers"] == _TARGET_TOWERS:
            for name, at_most in _TARGETS.items():
                if name in row["peers"]:
                    ratio = row["peers"][name]["ratio"]
                    found.append(record.target("train_step, %d synced towers / %s" % (_TARGET_TOWERS, name),
                                               ratio["median"], at_most, ratio["lower_quartile"], ratio["upper_quartile"]))
    return found


if __name__ == "__main__":
    main()
