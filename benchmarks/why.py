"""Draws why batch norms are synchronized: the same batch as one tower, as synced towers and as unsynced ones.

    python -m benchmarks.why --comparison docs/results/cifar10/compare.json --out docs/pictures/why.svg

The numbers are those of a comparison that `python -m examples.cifar10.compare` wrote.
"""
import argparse
import json
import sys

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

__all__ = ["draw", "main"]

# Lines of the picture: the comparison's kind, what it is called, color, style.
LINES = (("unsynced", "%d towers of %d, unsynced", "#c44e52", {"linewidth": 2}),
         ("one", "one tower of %d", "0.6", {"linewidth": 6}),
         ("synced", "%d towers of %d, synced", "#4c72b0", {"linewidth": 2, "linestyle": (0, (4, 2))}))


def draw(comparison, path):
    """Draws the mean training loss of each kind, with its test accuracy at the end of the line."""
    settings, (figure, axes) = comparison["settings"], plt.subplots(figsize=(7.5, 3.4))
    whole, each = settings["batch_size"], settings["images_a_tower"]
    for kind, name, color, style in LINES:
        runs = [run for run in comparison["runs"] if run["kind"] == kind]
        steps = [step for step, _ in runs[0]["curve"]]
        losses = np.mean([[loss for _, loss in run["curve"]] for run in runs], 0)
        accuracy = 100 * np.mean([run["test_accuracy"] for run in runs])
        axes.plot(steps, losses, color=color, **style)
        words = name % (whole if kind == "one" else (whole // each, each))
        above = {"unsynced": 0, "one": 0.09, "synced": -0.09}[kind]
        axes.annotate("%s: %.1f %%" % (words, accuracy), (steps[-1], losses[-1] + above), (6, 0), textcoords="offset points",
                      va="center", color="0.35" if kind == "one" else color)
    axes.set(xlabel="step", ylabel="training loss", xlim=(0, steps[-1]),
             title="%s on %s, a batch of %d; test accuracy after %d steps" % (
                 settings["model"], settings["data"], whole, settings["steps"]))
    axes.title.set_fontsize(10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.endswith(".svg") else None, dpi=110)
    plt.close(figure)


def main(argv=None):
    """Runs the command line and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--comparison", default="docs/results/cifar10/compare.json", help="what a comparison wrote")
    parser.add_argument("--out", default="runs/why.svg", help="the picture, an SVG or PNG")
    settings = parser.parse_args(argv)
    with open(settings.comparison) as f:
        draw(json.load(f), settings.out)
    print("wrote %s" % settings.out)


if __name__ == "__main__":
    sys.exit(main())
