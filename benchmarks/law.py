"""Draws the law: how far N towers are from one tower on the whole batch, with and without synchronized batch norm.

    python -m benchmarks.law --out docs/pictures/law.svg

A convolutional network with three batch norms trains on one batch of random images, in float32 and in float64, on 1 to 8 CPU
towers, uneven where their number does not divide the batch, and on one tower with the whole batch, from the same variables. Drawn
is the largest difference of the two: of a loss in any step, relative to the largest loss; of a gradient in any step, relative to
the largest gradient; of a variable after the last step, moving averages included, relative to the largest value in it.
"""
import argparse
import sys
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import tf_syncbn  # noqa: E402
import towers  # noqa: E402
from benchmarks.command import positive_int  # noqa: E402
from benchmarks.unsynced import EPSILON, MOMENTUM, plain_batch_norm  # noqa: E402

__all__ = ["Run", "differences", "draw", "measure", "train"]

CHANNELS, CLASSES = (8, 16), 4
_ZERO = 1e-18  # where the picture has a difference of 0
# Lines of the picture: whether batch norm is synchronized, dtype, color, style.
LINES = ((False, np.float32, "#c44e52", "s-"), (False, np.float64, "#e9a3a5", "s--"),
         (True, np.float32, "#4c72b0", "o-"), (True, np.float64, "#9db4d8", "o--"))


class Run(NamedTuple):
    """What a training came to.

    Attributes:
      loss: array [steps].
      gradients: dict from names of variables to arrays [steps, ...].
      variables: dict from names of variables to arrays, after the last step.
    """
    loss: np.ndarray
    gradients: dict
    variables: dict


def train(num_towers, synced, dtype, steps, batch_size):
    """Trains in a graph of its own, always from the same variables and on the same batch; returns a `Run`."""
    rng = np.random.RandomState(0)
    images, labels = rng.randn(batch_size, 8, 8, 3).astype(dtype), rng.randint(0, CLASSES, batch_size)

    def model_fn(images, labels):
        return _loss(images, labels, synced)

    devices = ["/cpu:%d" % i for i in range(num_towers)]
    with tf.Graph().as_default():
        replicas = towers.TowerBuilder(devices).build(model_fn, (images, labels))
        optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
        averaged = towers.average_gradients(replicas, towers.compute_gradients(replicas, optimizer))
        step = [replicas.loss, {v.op.name: g for g, v in averaged}, optimizer.apply_gradients(averaged)]
        variables = {v.op.name: v for v in tf.global_variables() if "Momentum" not in v.op.name}
        with tf.Session(config=towers.session_config(devices)) as session:
            session.run(tf.global_variables_initializer())
            losses, gradients, _ = zip(*[session.run(step) for _ in range(steps)])
            return Run(np.array(losses), {name: np.array([of_step[name] for of_step in gradients]) for name in gradients[0]},
                       session.run(variables))


def _loss(images, labels, synced):
    rng, x = np.random.RandomState(1), images

    def variable(name, *shape):
        start = rng.randn(*shape) * np.sqrt(2.0 / np.prod(shape[:-1]))
        return tf.get_variable(name, shape, images.dtype, tf.constant_initializer(start))

    def batch_norm(x, name):
        if synced:
            return tf_syncbn.sync_batch_norm(x, momentum=MOMENTUM, epsilon=EPSILON, name=name)
        return plain_batch_norm(x, name)

    for number, channels in enumerate(CHANNELS):
        kernel = variable("kernel%d" % number, 3, 3, x.shape.as_list()[3], channels)
        x = tf.nn.relu(batch_norm(tf.nn.conv2d(x, kernel, [1, 2, 2, 1], "SAME"), "bn%d" % number))
    logits = tf.matmul(tf.reduce_mean(x, [1, 2]), variable("weights", CHANNELS[-1], CLASSES))
    logits = batch_norm(logits[:, None, None, :], "bn_logits")[:, 0, 0, :]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def differences(one, other):
    """Returns the largest relative differences of two `Run`s: a dict of floats by "loss", "gradients" and "variables"."""
    largest_gradient = max(np.abs(gradient).max() for gradient in one.gradients.values())
    return {
        "loss": float(np.abs(one.loss - other.loss).max() / np.abs(one.loss).max()),
        "gradients": float(max(np.abs(one.gradients[name] - other.gradients[name]).max() for name in one.gradients)
                           / largest_gradient),
        "variables": float(max(np.abs(one.variables[name] - other.variables[name]).max() / np.abs(one.variables[name]).max()
                               for name in one.variables))}


def measure(most_towers, steps, batch_size):
    """Returns a dict from (synced, name of the dtype) to a list over numbers of towers, from 1 on, of `differences`."""
    found = {}
    for synced, dtype, _, _ in LINES:
        one = train(1, synced, dtype, steps, batch_size)
        found[synced, dtype.__name__] = [differences(one, train(count, synced, dtype, steps, batch_size))
                                         for count in range(1, most_towers + 1)]
    return found


def draw(found, steps, batch_size, path):
    """Draws what `measure` returned."""
    plt.rcParams.update({"svg.hashsalt": "law", "svg.fonttype": "none", "font.size": 9})
    figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.9), sharey=True)
    titles = {"loss": "loss, %d steps" % steps, "gradients": "gradients, %d steps" % steps,
              "variables": "variables after %d steps" % steps}
    for axes, (name, title) in zip(panels, titles.items()):
        for synced, dtype, color, style in LINES:
            values = np.maximum([of_count[name] for of_count in found[synced, dtype.__name__]], _ZERO)
            look = {"color": color, "markersize": 4.5, "markerfacecolor": color if dtype is np.float32 else "white"}
            axes.plot(1, values[0], style[0], **look)  # one tower against itself: no line leads there
            axes.plot(range(2, len(values) + 1), values[1:], style,
                      label="%s, %s" % ("synced" if synced else "unsynced", dtype.__name__), **look)
        axes.set(yscale="log", ylim=(_ZERO / 4, 10), xticks=range(1, len(values) + 1), xlabel="towers", title=title)
        axes.set_yticks([_ZERO] + [10.0 ** power for power in range(-16, 1, 4)])
        axes.set_yticklabels(["0"] + ["$10^{%d}$" % power for power in range(-16, 1, 4)])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("largest difference from one tower\non the whole batch of %d, relative" % batch_size)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncol=4, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None, dpi=110)
    plt.close(figure)


def main(argv=None):
    """Runs the command line; prints the numbers and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", default="runs/law.svg", help="the picture, an SVG or PNG")
    parser.add_argument("--towers", type=positive_int, default=8, help="the most towers")
    parser.add_argument("--steps", type=positive_int, default=5, help="training steps")
    parser.add_argument("--batch-size", type=positive_int, default=36, help="images of the whole batch")
    settings = parser.parse_args(argv)
    if settings.batch_size < 2 * settings.towers:
        parser.error("a tower needs two images, whose batch norm is one of something.")
    tf.disable_eager_execution()
    found = measure(settings.towers, settings.steps, settings.batch_size)
    print("TensorFlow %s; largest relative differences of loss, gradients, variables over 1, 2, ... towers" % tf.__version__)
    for (synced, dtype), of_counts in found.items():
        for name in of_counts[0]:
            print("%-8s %s %-9s %s" % ("synced" if synced else "unsynced", dtype, name,
                                       " ".join("%7.1e" % of_count[name] for of_count in of_counts)))
    draw(found, settings.steps, settings.batch_size, settings.out)
    print("wrote %s" % settings.out)


if __name__ == "__main__":
    sys.exit(main())
