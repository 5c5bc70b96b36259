"""The results of `compare`: its file, its table and its picture."""
import numpy as np

from examples.training.folder import UsageError
from examples.training.report import new_figure, read_json, save_figure

__all__ = ["FIRST_STEPS", "draw", "largest_difference", "read", "table"]

FIRST_STEPS = 20
_OF_A_RUN = {"kind": str, "seed": int, "milliseconds_a_step": float}
_LISTS = ("first_losses", "first_losses_in_float64", "curve")  # of a run too
_COLOURS = {"one": "0.6", "synced": "C0", "unsynced": "C1", "unsynced-all": "C3"}
_SHORT = {"one": "one\ntower", "synced": "synced", "unsynced": "unsynced,\ntower 0's\naverages",
          "unsynced-all": "unsynced,\nall\naverages"}


def read(path, settings, measure):
    """Returns the comparison in a file, or one without runs where there is no file.

    Args:
      path: str.
      settings: dict of what the comparison has to have been made with.
      measure: `graph.Measure`, which each run has.

    Returns:
      A dict of "settings" and "runs", a list of what `compare.Trainings.train_one` returns.

    Raises:
      UsageError: if the file is damaged, or of other settings.
    """
    try:
        found = read_json(path, {"settings": settings, "runs": []})
        before, whole = dict(found["settings"]), _are_whole(found["runs"], dict(_OF_A_RUN, **{measure.name: float}))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError("%s is damaged: delete it, or choose another --out." % path) from error
    except OSError as error:
        raise UsageError("%s can't be read: %s." % (path, error.strerror)) from error
    if not whole:
        raise UsageError("%s is damaged: delete it, or choose another --out." % path)
    for name, now in settings.items():
        if before.get(name) != now:
            raise UsageError("%s holds a comparison with %s %s, and %s was asked for: choose another --out."
                             % (path, name, before.get(name), now))
    return found


def _are_whole(runs, types):
    """Tells whether runs have values of these types by name, lists of numbers that are as long in all, and are all different."""
    if not all(type(run[name]) is kind for run in runs for name, kind in types.items()):
        return False
    shapes = {tuple(np.array(run[name], np.float64).shape for name in _LISTS) for run in runs}  # raises for what is no array
    which = [(run["kind"], run["seed"]) for run in runs]
    return (len(shapes) <= 1 and all(len(first) == 1 and double == first and len(curve) == 2 and curve[0] > 0 and curve[1] == 2
                                     for first, double, curve in shapes)
            and len(set(which)) == len(which) and all(kind in _COLOURS for kind, _ in which))


def table(comparison, measure):
    """Returns the comparison by a `graph.Measure` as lines of text: a row for each kind, over its seeds."""
    names = _names(comparison["settings"])
    row = "%%-%ds  %%-21s  %%-14s  %%-14s  %%s" % max(map(len, names.values()))
    lines = [row % ("", measure.words + " in %,", "first %d losses, furthest from one tower's" % FIRST_STEPS, "", ""),
             row % ("", "mean (lowest-highest)", "float32", "float64", "ms a step")]
    for kind, runs in _by_kind(comparison).items():
        values = 100 * np.array([run[measure.name] for run in runs])
        furthest = [largest_difference(comparison, kind, losses) for losses in ("first_losses", "first_losses_in_float64")]
        furthest = ["-" if kind == "one" or difference is None else "%.1e" % difference for difference in furthest]
        lines.append(row % (names[kind], "%.2f (%.2f-%.2f)" % (values.mean(), values.min(), values.max()),
                            furthest[0], furthest[1], "%.0f" % np.mean([run["milliseconds_a_step"] for run in runs])))
    return "\n".join(line.rstrip() for line in lines)


def largest_difference(comparison, kind, losses):
    """Returns how far a kind's first losses are from those of one tower with the same seed, at most; None without such."""
    runs = _by_kind(comparison)
    of_one = {run["seed"]: run[losses] for run in runs.get("one", [])}
    differences = [np.abs(np.subtract(run[losses], of_one[run["seed"]])).max() for run in runs[kind] if run["seed"] in of_one]
    return float(max(differences)) if differences else None


def draw(comparison, measure, path):
    """Writes a PNG: the losses over steps, thin lines for the seeds, and what a `graph.Measure` comes to.

    Raises:
      WriteError: if it can't be written.
    """
    settings, by_kind = comparison["settings"], _by_kind(comparison)
    names = _names(settings)
    figure, (left, right) = new_figure(1, 2, figsize=(11, 5), gridspec_kw={"width_ratios": [1.4, 1]})
    for place, (kind, runs) in enumerate(by_kind.items()):
        # What lies on another line is dashed, over a broad one.
        colour, style, width = _COLOURS[kind], "--" if kind in ("synced", "unsynced-all") else "-", 4 if kind == "one" else 1.8
        curves = np.array([run["curve"] for run in runs])
        for curve in curves[:len(curves) if len(curves) > 1 else 0]:
            left.plot(curve[:, 0], curve[:, 1], color=colour, linewidth=0.6, alpha=0.5)
        left.plot(*curves.mean(0).T, style, color=colour, linewidth=width, label=names[kind])
        values = 100 * np.array([run[measure.name] for run in runs])
        right.plot([place] * len(runs), values, "o", color=colour, alpha=0.7)
        right.plot([place - 0.25, place + 0.25], [values.mean()] * 2, "-", color=colour, linewidth=2)
        right.annotate("%.1f" % values.mean(), (place + 0.28, values.mean()), va="center", fontsize=9)
    runs = next(iter(by_kind.values()))
    steps = round(settings["steps"] / len(runs[0]["curve"]))
    left.set(xlabel="step", ylabel="training loss" + (", mean of %d steps" % steps if steps > 1 else ""))
    right.set(ylabel=measure.words + " in %", xlim=(-0.5, len(by_kind) - 0.2), xticks=range(len(by_kind)))
    right.set_xticklabels([_SHORT[kind] for kind in by_kind], fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.set_title("thick: mean over %d seeds; thin: each seed" % len(runs) if len(runs) > 1 else "one seed", fontsize=10)
    right.set_title("after %d steps; dots: seeds, lines: means" % settings["steps"], fontsize=10)
    figure.suptitle("%s on %s, a batch of %d" % (settings["model"], settings["data"], settings["batch_size"]))
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncol=2, fontsize=9)
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    save_figure(figure, path)


def _by_kind(comparison):
    """Returns the runs of each kind, in the order of seeds."""
    kinds = [kind for kind in _COLOURS if any(run["kind"] == kind for run in comparison["runs"])]
    return {kind: sorted((run for run in comparison["runs"] if run["kind"] == kind), key=lambda run: run["seed"])
            for kind in kinds}


def _names(settings):
    each = settings["images_a_tower"]
    divided = "%d %%s towers of %d" % (settings["batch_size"] // each, each)
    return {"one": "one tower of %d" % settings["batch_size"], "synced": divided % "synced",
            "unsynced": divided % "unsynced" + ", averages of tower 0",
            "unsynced-all": divided % "unsynced" + ", averages of all"}
