"""Tables and pictures of all the JSON files in a folder, several lanes side by side.

    python -m benchmarks.report runs/benchmarks
"""
import argparse
import glob
import json
import os
import re
import sys

from benchmarks import pictures
from benchmarks.interleave import geometric_mean

__all__ = ["load", "main", "show", "tables"]


def main(argv=None):
    """Prints the tables of a folder's results, writes them to `report.md`, and draws the pictures, all in that folder."""
    parser = argparse.ArgumentParser(description="Tables and pictures of the results in a folder.")
    parser.add_argument("folder", nargs="?", default="runs/benchmarks", help="where the JSON files are (runs/benchmarks)")
    folder = parser.parse_args(argv).folder
    results = load(folder)
    if not results:
        sys.exit("There is no result in %s: run python -m benchmarks --out %s first." % (folder, folder))
    text = tables(results)
    with open(os.path.join(folder, "report.md"), "w") as f:
        f.write(text)
    print(text)
    for path in [os.path.join(folder, "report.md")] + pictures.draw(results, folder):
        print("wrote " + path)


def load(folder):
    """Returns a dict from a benchmark's name to the list of its results, one for each lane, the oldest TensorFlow first."""
    results = {}
    for path in sorted(glob.glob(os.path.join(folder, "*-tf*.json")), key=_natural):
        with open(path) as f:
            result = json.load(f)
        results.setdefault(result["benchmark"], []).append(result)
    return results


def show(path):
    """Prints the table of one JSON file, and where the file is."""
    with open(path) as f:
        result = json.load(f)
    title, table = _TABLES[result["benchmark"]]
    print("%s, %s\n\n%s\n\nwrote %s" % (title, result["environment"]["lane"], table(result), path))


def tables(results):
    """Returns the tables of `load`'s results as Markdown."""
    parts = ["# Benchmarks\n", _lanes(results), "\n## Targets\n", _targets(results)]
    for benchmark, (title, table) in _TABLES.items():
        for result in results.get(benchmark, ()):
            parts += ["\n## %s: %s, %s\n" % (benchmark, title, result["environment"]["lane"]), table(result)]
    return "\n".join(parts) + "\n"


def _natural(path):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def _table(header, rows):
    """Returns a Markdown table whose columns also line up on a terminal."""
    cells = [[str(cell) for cell in row] for row in [header] + rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    return "\n".join(lines[:1] + ["|" + "|".join("-" * (width + 2) for width in widths) + "|"] + lines[1:])


def _lanes(results):
    rows = []
    for benchmark in results:
        for result in results[benchmark]:
            e = result["environment"]
            rows.append([benchmark, e["lane"], e["python"], "on" if e["onednn"] else "off",
                         "%s, %d cores, %s GiB" % (e["cpu"], e["cores"], e["memory_gib"]), e["date"], "`%s`" % e["command"]])
    return _table(["benchmark", "lane", "Python", "oneDNN", "machine", "date", "command"], rows)


def _targets(results):
    found, lanes = {}, []
    for result in [result for several in results.values() for result in several]:
        lane = result["environment"]["lane"]
        if lane not in lanes:
            lanes.append(lane)
        for figure in result["targets"]:
            found.setdefault((figure["what"], figure["at_most"]), {})[lane] = _judged(figure)
    rows = [[what, "-" if at_most is None else "%.2f" % at_most] + [by_lane.get(lane, "-") for lane in lanes]
            for (what, at_most), by_lane in found.items()]
    return _table(["figure (lower is better)", "at most"] + lanes, rows)


def _judged(figure):
    text = "%.2f" % figure["value"]
    if figure["lower_quartile"] is not None:
        text += " (%.2f-%.2f)" % (figure["lower_quartile"], figure["upper_quartile"])
    if figure["at_most"] is None:
        return text
    return text + (", met" if figure["value"] <= figure["at_most"] else ", missed")


def _spread(values, digits=2):
    return "{median:.{d}f} ({lower_quartile:.{d}f}-{upper_quartile:.{d}f})".format(d=digits, **values)


def _layer(result):
    rows = []
    for row in sorted(result["rows"], key=lambda row: (row["dtype"] != "float32", row["dtype"], row["axis"] != 3)):
        activation, step, saved = row["activation_bytes"], row["step"], row["saved_bytes"]
        rows.append([
            pictures.case_name(row), "%.2f" % (activation / 1e6), row["unsynced"].split()[0],
            _spread(row["forward"]["ratio"]), _spread(step["ratio"]),
            "%.2f / %.2f" % (step["synced_milliseconds"]["median"], step["unsynced_milliseconds"]["median"]),
            "%.3f / %.3f" % (saved["synced"] / activation, saved["unsynced"] / activation),
            "%.1f (%.0f %%)" % (row["bytes_per_second"] / 1e9, 100 * _share_of_copy(row))])
    table = _table(["a tower's activation", "MB", "unsynced", "forward", "forward + backward", "ms synced / unsynced",
                    "saved, activations", "8 passes, GB/s"], rows)
    text = table + "\n\nNHWC of 1 MB and more, geometric means; the copy is %s:\n" % result["settings"]["copy"]
    for dtype in sorted({row["dtype"] for row in result["rows"]}, key=lambda dtype: (dtype != "float32", dtype)):
        counting = [row for row in result["rows"] if row["counts"] and row["dtype"] == dtype]
        means = [geometric_mean([row[part]["ratio"]["median"] for row in counting]) for part in ("forward", "step")]
        share = geometric_mean([_share_of_copy(row) for row in counting])
        text += "\n- %s: forward %.2f, forward + backward %.2f, 8 passes at %.0f %% of the bytes/s of a large copy" % (
            dtype, means[0], means[1], 100 * share)
    return text


def _share_of_copy(row):
    return row["bytes_per_second"] / row["copy_bytes_per_second"]


def _train_step(result):
    rows = []
    for row in result["rows"]:
        for name, peer in row["peers"].items():
            rows.append([row["towers"], name, _spread(peer["milliseconds"], 1), _spread(peer["ratio"]),
                         "%.1f" % row["first_step_seconds"][name]])
    table = _table(["towers", "variant", "ms a step", "synced towers / variant", "first step, s"], rows)
    left_out = result["settings"]["left_out"]
    return table + ("\n\nMirroredStrategy is left out: %s" % left_out if left_out else
                    "\n\nMirroredStrategy runs Keras %s." % result["settings"]["keras"])


def _conversion(result):
    table = _table(["towers", "variant", "ms a step", "converted towers / variant"], [
        [row["towers"], name, _spread(peer["milliseconds"], 1), _spread(peer["ratio"])]
        for row in result["rows"] for name, peer in row["peers"].items()])
    return table + "\n\nA ResNet-20, converted / unconverted:\n\n" + _table(["batch norms", "a step", "to build it", "nodes"], [
        [name, _spread(of_network["step"]), _spread(of_network["build"]), "%.2f" % of_network["nodes"]]
        for row in result["rows"] for name, of_network in row.get("resnet_20", {}).items()])


def _graph(result):
    rows = []
    for row in result["rows"]:
        synced, unsynced = row["sizes"]["synced"], row["sizes"]["unsynced"]
        rows.append([row["towers"]] + ["%d + %d" % (size["nodes"], size["function_nodes"]) for size in (synced, unsynced)] + [
            "%.2f" % (synced["nodes"] / unsynced["nodes"]),
            "%.2f / %.2f" % (synced["bytes"] / 1e6, unsynced["bytes"] / 1e6),
            "%.2f / %.2f" % (row["seconds"]["synced"]["median"], row["seconds"]["unsynced"]["median"]),
            _spread(row["build_ratio"])])
    return _table(["towers", "nodes synced + in functions", "unsynced", "nodes' ratio", "MB synced / unsynced",
                   "s to build synced / unsynced", "build ratio"], rows)


def _memory(result):
    rows = []
    for row in result["rows"]:
        for key, title in (("peak", "the whole process"), ("growth", "over that before the first step")):
            figures = {name: values["median"] / 2.0 ** 20 for name, values in row[key + "_bytes"].items()}
            rows.append([title] + ["%.0f" % figures[name] for name in figures] + [_spread(row["ratio"][key], 3)])
    return _table(["peak, MiB"] + list(figures) + ["ratio"], rows)


def _pipeline(result):
    return _table(["towers"] + ["ms a step, " + name for name in result["rows"][0]["milliseconds"]] + ["ratio"], [
        [row["towers"]] + [_spread(values, 1) for values in row["milliseconds"].values()] + [_spread(row["ratio"])]
        for row in result["rows"]])


def _repeat(result):
    return _table(["model", "towers", "way", "us a step", "towers.repeat / way"], [
        [row["model"], row["towers"], way, _spread(microseconds, 0), _spread(row["ratios"][way]) if way in row["ratios"] else "-"]
        for row in result["rows"] for way, microseconds in row["microseconds"].items()])


def _workers(result):
    names, rows = list(result["rows"][0]["milliseconds"]), []
    for row in result["rows"]:
        sent = [" / ".join("%.1f" % (row["bytes"][name][way] / 1e3) for way in ("formula", "graph", "wire"))
                for name in ("synced", "unsynced")]
        rows.append([row["workers"]] + [_spread(row["milliseconds"][name], 1) for name in names] + [
            _spread(row["ratio"])] + sent + ["%.0f" % row["bytes"]["synced"]["a_layer"]])
    table = _table(["workers"] + ["ms a step, " + name for name in names] + [
        "synced / unsynced", "kB a worker sends, synced", "unsynced", "bytes of a synced layer"], rows)
    text = table + "\n\nWhat a worker sends in a step: by formula / by the graph's collectives / on the loopback interface."
    return text if result["settings"]["horovod"] else text + " Horovod is left out: this Python has no horovodrun."


def _gpu(result):
    row, = result["rows"]
    table = _table(["on %d towers of %s" % (result["settings"]["towers"], ", ".join(sorted(set(result["settings"]["devices"])))),
                    "ms synced", "unsynced", "synced / unsynced"],
                   [[each["name"], _spread(each["milliseconds"]["synced"]), _spread(each["milliseconds"]["unsynced"]),
                     _spread(each["ratio"])] for each in row["steps"] + row["layers"]])
    exact = row["exact"]
    lines = ["A variance at a mean of 1e4 deviations, %.1f million numbers: off by %s." % (
        each["numbers"] / 1e6, ", ".join("%.1e (%s tower%s)" % (error, count, "s" * (int(count) > 1))
                                         for count, error in each["error"].items())) for each in exact["variance"]]
    lines.append("From one tower on the whole batch: %s." % ", ".join(
        "%s %.1e, by rounding up to %.1e" % (name, each["difference"], each["allowed"]) for name, each in exact["law"].items()))
    lines.append("Two processes with TF_DETERMINISTIC_OPS=1 have %s bits." % ("the same" if exact["bits"]["same"] else "OTHER"))
    return table + "\n\n" + "\n".join("- " + line for line in lines)


_TABLES = {
    "layer": ("one layer on 2 CPU towers, synced / unsynced", _layer),
    "train_step": ("ResNet-20, a training step", _train_step),
    "conversion": ("ResNet-50 of 64 x 64 images, a training step", _conversion),
    "graph": ("ResNet-20, the graph of a training step", _graph),
    "repeat": ("many training steps in one call", _repeat),
    "memory": ("ResNet-20, peak memory of 2 towers", _memory),
    "pipeline": ("ResNet-20, a training step with its input", _pipeline),
    "workers": ("a training step over workers on loopback", _workers),
    "gpu": ("ResNet-50 and single layers on GPUs", _gpu),
}

if __name__ == "__main__":
    main()
