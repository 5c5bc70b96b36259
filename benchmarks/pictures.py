"""The pictures of the results: one PNG for each benchmark, lanes side by side."""
import os

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

__all__ = ["case_name", "draw"]


def draw(results, folder):
    """Draws every benchmark in `results`, see `benchmarks.report.load`, and returns the paths of the PNGs."""
    paths = []
    for benchmark, several in results.items():
        figure = _DRAWN_BY[benchmark](several)
        last = several[-1]
        figure.suptitle("%s on %s, %d cores" % (_TITLES[benchmark] % last["settings"], last["environment"]["cpu"],
                                                last["environment"]["cores"]), fontsize=11)
        paths.append(os.path.join(folder, benchmark + ".png"))
        figure.tight_layout(rect=(0, 0.04, 1, 0.97))
        figure.savefig(paths[-1], dpi=130)
        plt.close(figure)
    return paths


def case_name(row):
    """Returns the name of a row of the benchmark `layer`: its shape, with dtype and axis where they are not the usual."""
    name = "x".join(str(size) for size in row["shape"])
    if row["dtype"] != "float32":
        name += " " + row["dtype"]
    return name if row["axis"] == 3 else name + " axis %d" % row["axis"]


def _lane(result):
    return result["environment"]["lane"]


def _error_bars(spreads):
    medians = np.array([s["median"] for s in spreads])
    return medians, np.array([medians - [s["lower_quartile"] for s in spreads],
                              [s["upper_quartile"] for s in spreads] - medians])


def _layer(several):
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 7.5), sharey=True)
    names = [case_name(row) for row in several[0]["rows"]]
    for i, result in enumerate(several):
        rows = result["rows"]
        y = np.arange(len(rows)) + 0.2 * (i - (len(several) - 1) / 2.0)
        medians, errors = _error_bars([row["step"]["ratio"] for row in rows])
        left.errorbar(medians, y, xerr=errors, fmt="o", markersize=4, capsize=2, label=_lane(result))
        right.plot([row["bytes_per_second"] / row["copy_bytes_per_second"] for row in rows], y, "o", markersize=4)
    left.axvline(1, color="0.4", linewidth=1)
    left.axvline(0.85, color="0.4", linewidth=1, linestyle=":", label="target of the geometric mean")
    left.set(xscale="log", xlabel="forward + backward, synced / unsynced (quartiles)", yticks=range(len(names)),
             yticklabels=names)
    ticks = [t for t in (0.25, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6) if left.get_xlim()[0] <= t <= left.get_xlim()[1]]
    left.set_xticks(ticks)
    left.set_xticklabels(["%g" % t for t in ticks])
    left.minorticks_off()
    left.invert_yaxis()
    right.set_xlim(0)
    right.set_xlabel("8 passes over the activation / time,\nas a share of the bytes/s of a large copy")
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def _train_step(several):
    figure, panels = plt.subplots(1, len(several), figsize=(max(8, 5.2 * len(several)), 5.5), sharey=True, squeeze=False)
    for axes, result in zip(panels[0], several):
        rows = result["rows"]
        ours, *peers = rows[0]["peers"]
        for i, row in enumerate(rows):
            medians, errors = _error_bars([row["peers"][peer]["ratio"] for peer in peers])
            x = np.arange(len(peers)) + 0.8 * ((i + 0.5) / len(rows) - 0.5)
            axes.bar(x, medians, 0.8 / len(rows), yerr=errors, capsize=2, label="%d towers" % row["towers"])
        for figure_of in result["targets"]:
            x = peers.index(figure_of["what"].split(" / ")[1])
            axes.plot([x - 0.4, x + 0.4], [figure_of["at_most"]] * 2, "k:", linewidth=1.5,
                      label=None if x else "target, %s towers" % figure_of["what"].split()[1])
        axes.axhline(1, color="0.4", linewidth=1)
        axes.set_xticks(range(len(peers)))
        axes.set_xticklabels([peer.replace(", ", ",\n") for peer in peers], rotation=30, ha="right", fontsize=8)
        axes.set_title(_lane(result), fontsize=10)
        axes.grid(axis="y", alpha=0.3)
    panels[0][0].set_ylabel("time of a step, %s / peer (quartiles)" % ours)
    panels[0][0].legend(fontsize=8)
    return figure


def _graph(several):
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.5))
    for i, result in enumerate(several):
        rows = result["rows"]
        towers = [row["towers"] for row in rows]
        for name, style in (("synced", "o-"), ("unsynced", "x--")):
            lines = ([row["sizes"][name]["nodes"] for row in rows], [row["seconds"][name]["median"] for row in rows],
                     [row["sizes"][name]["bytes"] / 1e6 for row in rows])
            for axes, line in zip(panels, lines):
                axes.plot(towers, line, style, color="C%d" % i, markersize=4, label="%s, %s" % (name, _lane(result)))
    for axes, label in zip(panels, ("nodes of the GraphDef", "seconds to build", "megabytes of the GraphDef")):
        axes.set(xlabel="towers", ylabel=label, xlim=0, ylim=0)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    return figure


def _memory(several):
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for i, name in enumerate(several[0]["rows"][0]["peak_bytes"]):
        medians, errors = _error_bars([result["rows"][0]["peak_bytes"][name] for result in several])
        axes.bar(np.arange(len(several)) + 0.4 * (i - 0.5), medians / 2.0 ** 20, 0.4, yerr=errors / 2.0 ** 20, capsize=3,
                 label=name)
    for i, result in enumerate(several):
        top = max(values["upper_quartile"] for values in result["rows"][0]["peak_bytes"].values()) / 2.0 ** 20
        axes.annotate("ratio %.3f" % result["rows"][0]["ratio"]["peak"]["median"], (i, top), (0, 4),
                      textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(several)))
    axes.set_xticklabels([_lane(result) for result in several])
    axes.set_ylabel("peak of the whole process, MiB")
    axes.margins(y=0.15)
    figure.legend(loc="lower center", ncol=2, fontsize=8)
    return figure


def _repeat(several):
    figure, axes = plt.subplots(figsize=(9, 5))
    ways = list(several[0]["rows"][0]["ratios"])
    for i, (result, way) in enumerate([(result, way) for result in several for way in ways]):
        medians, errors = _error_bars([row["ratios"][way] for row in result["rows"]])
        x = np.arange(len(medians)) + 0.8 * ((i + 0.5) / (len(several) * len(ways)) - 0.5)
        axes.bar(x, medians, 0.8 / (len(several) * len(ways)), yerr=errors, capsize=2, label="%s, %s" % (way, _lane(result)))
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set_xticks(range(len(several[0]["rows"])))
    axes.set_xticklabels([
        "%s,\n%d tower%s" % (row["model"].replace(", ", ",\n"), row["towers"], "s" * (row["towers"] > 1))
        for row in several[0]["rows"]], fontsize=8)
    axes.set_ylabel("time of a step in the loop / by the way (quartiles)")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _pipeline(several):
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for i, name in enumerate(several[0]["rows"][0]["milliseconds"]):
        medians, errors = _error_bars([result["rows"][0]["milliseconds"][name] for result in several])
        axes.bar(np.arange(len(several)) + 0.4 * (i - 0.5), medians, 0.4, yerr=errors, capsize=3, label=name)
    axes.set_xticks(range(len(several)))
    axes.set_xticklabels(["%s\nratio %.2f" % (_lane(result), result["rows"][0]["ratio"]["median"]) for result in several])
    axes.set_ylabel("a step, ms (quartiles)")
    axes.margins(y=0.15)
    figure.legend(loc="lower center", ncol=2, fontsize=8)
    return figure


def _workers(several):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    for i, result in enumerate(several):
        rows = result["rows"]
        counts = [row["workers"] for row in rows]
        for name, style in zip(rows[0]["milliseconds"], ("o-", "x--", "s:")):
            medians, errors = _error_bars([row["milliseconds"][name] for row in rows])
            left.errorbar(counts, medians, yerr=errors, fmt=style, color="C%d" % i, capsize=2, markersize=4,
                          label="%s, %s" % (name, _lane(result)))
        for name, style in (("synced", "o"), ("unsynced", "x")):
            right.plot(counts, [row["bytes"][name]["wire"] / 1e3 for row in rows], style, color="C%d" % i,
                       label="%s, on the wire, %s" % (name, _lane(result)))
    for name, style in (("synced", "-"), ("unsynced", "--")):
        rows = several[-1]["rows"]
        right.plot([row["workers"] for row in rows], [row["bytes"][name]["formula"] / 1e3 for row in rows], "k" + style,
                   linewidth=1, label="%s, by formula" % name)
    left.set_ylabel("a step, ms (quartiles)")
    right.set_ylabel("kB that a worker sends in a step")
    for axes in (left, right):
        axes.set(xlabel="workers", xticks=counts, ylim=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def _gpu(several):
    figure, axes = plt.subplots(figsize=(10, 5))
    names = [row["name"] for row in several[0]["rows"][0]["steps"] + several[0]["rows"][0]["layers"]]
    for i, result in enumerate(several):
        rows = result["rows"][0]["steps"] + result["rows"][0]["layers"]
        medians, errors = _error_bars([row["ratio"] for row in rows])
        y = np.arange(len(rows)) + 0.2 * (i - (len(several) - 1) / 2.0)
        axes.errorbar(medians, y, xerr=errors, fmt="o", markersize=4, capsize=2, label=_lane(result))
    axes.axvline(1, color="0.4", linewidth=1)
    axes.set(xlabel="synced / unsynced (quartiles)", yticks=range(len(names)), yticklabels=names)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=8)
    return figure


_DRAWN_BY = {"layer": _layer, "train_step": _train_step, "conversion": _train_step, "graph": _graph, "repeat": _repeat,
             "memory": _memory, "pipeline": _pipeline, "workers": _workers,
             "gpu": _gpu}
_TITLES = {
    "layer": "sync_batch_norm on %(towers)d CPU towers",
    "train_step": "Training steps of %(network)s, %(batch_of_a_tower)d images a tower,",
    "conversion": "Training steps of %(network)s, %(images)s, %(batch_of_a_tower)d images a tower,",
    "graph": "Graphs of a training step of %(network)s",
    "repeat": "%(steps)d training steps in one call, batches of %(batch)d,",
    "memory": "%(network)s on 2 towers, %(batch_of_a_tower)d images each,",
    "pipeline": "Training steps of %(network)s, %(batch)d images, with and without their input,",
    "workers": "Training steps of %(network)s, %(batch)d images over workers on loopback,",
    "gpu": "%(network)s, %(batch_of_a_tower)d images of %(image_size)d pixels a tower, and single layers, on %(towers)d towers,",
}
