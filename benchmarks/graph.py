"""The graph of a training step of ResNet-20: its nodes, its bytes, and the time to build it, on up to 64 towers.

    python -m benchmarks.graph --rounds 9

Built is the whole step, `TowerBuilder.build` and `minimize`, in a fresh `tf.Graph`, with synced and with unsynced towers in
turn. "Nodes" are those of the GraphDef itself; the nodes inside its library of functions stand beside them, each function
counted once however often it is called. One tower meets nobody, so the line of nodes begins at two.
"""
import gc

import numpy as np
import tensorflow.compat.v1 as tf

import towers
from benchmarks import record
from benchmarks.command import parse, positive_int
from benchmarks.interleave import paired_ratio, spread, take_turns
from benchmarks.networks import IMAGE_SHAPE, fused_layers, model_fn, synced_layers

__all__ = ["main"]

_LAYERS = {"synced": synced_layers, "unsynced": fused_layers}
_DEPTH, _BATCH, _FEW, _MANY = 20, 16, 4, 64


def main(argv=None):
    """Runs the command line and returns the path of the JSON that it wrote."""
    settings = parse("Measures the graphs of training steps of ResNet-20.", argv, 9, _add_arguments)
    rows = [_measure(num_towers, settings.rounds) for num_towers in settings.towers]
    described = {"network": "ResNet-%d" % _DEPTH, "batch_of_a_tower": _BATCH, "optimizer": "momentum SGD",
                 "rounds": {num_towers: _rounds(num_towers, settings.rounds) for num_towers in settings.towers}}
    return record.write(settings.out, "graph", described, rows, _targets(rows))


def _add_arguments(parser):
    parser.add_argument("--towers", type=positive_int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="numbers of towers")


def _rounds(num_towers, rounds):
    """Returns fewer rounds for more towers: a build of many takes long, and varies less."""
    return max(2, min(rounds, rounds * _FEW // num_towers))


def _measure(num_towers, rounds):
    built, sizes = {}, {}

    def build(name):
        built[name] = _build(_LAYERS[name](), num_towers)

    def weigh_and_forget(name):
        if name not in sizes:
            sizes[name] = _size(built[name])
        built.clear()
        gc.collect()  # else every round would be charged for a larger heap

    seconds = take_turns({name: lambda name=name: build(name) for name in _LAYERS}, _rounds(num_towers, rounds),
                         1 if num_towers <= _FEW else 0, "graph, %d towers" % num_towers, weigh_and_forget, True)
    return {"towers": num_towers, "sizes": sizes, "seconds": {name: spread(seconds[name]) for name in _LAYERS},
            "build_ratio": paired_ratio(seconds, "synced", "unsynced")}


def _build(layers, num_towers):
    with tf.Graph().as_default() as graph:
        batch = (tf.placeholder(tf.float32, (_BATCH * num_towers,) + IMAGE_SHAPE),
                 tf.placeholder(tf.int32, [_BATCH * num_towers]))
        builder = towers.TowerBuilder(["/cpu:%d" % i for i in range(num_towers)])
        replicas = builder.build(model_fn(layers, _DEPTH), batch)
        towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9), update_ops="first")
    return graph


def _size(graph):
    """Returns a dict of nodes, nodes in functions, and bytes of the GraphDef."""
    graph_def = graph.as_graph_def()
    return {"nodes": len(graph_def.node), "function_nodes": sum(len(f.node_def) for f in graph_def.library.function),
            "bytes": graph_def.ByteSize()}


def _targets(rows):
    by_towers = {row["towers"]: row for row in rows}
    found = []
    if _FEW in by_towers:
        row = by_towers[_FEW]
        sizes, ratio = row["sizes"], row["build_ratio"]
        found.append(record.target("graph, nodes of %d synced towers / unsynced" % _FEW,
                                   sizes["synced"]["nodes"] / sizes["unsynced"]["nodes"], 1.5))
        found.append(record.target("graph, time to build %d synced towers / unsynced" % _FEW,
                                   ratio["median"], 2.0, ratio["lower_quartile"], ratio["upper_quartile"]))
    if _FEW in by_towers and _MANY in by_towers:
        few, many = (by_towers[n]["seconds"]["synced"]["median"] / n for n in (_FEW, _MANY))
        found.append(record.target("graph, time to build a synced tower at %d towers / at %d" % (_MANY, _FEW), many / few, 2.5))
    several = [row for row in rows if row["towers"] > 1]
    if len(several) > 2:
        found.append(record.target("graph, nodes off a straight line in the number of towers, largest share",
                                   _off_line([row["towers"] for row in several],
                                             [row["sizes"]["synced"]["nodes"] for row in several]), 0.01))
    return found


def _off_line(towers_of_rows, nodes):
    """Returns how far counts are from the line through the first and the last of them, as a share of the count."""
    line = np.interp(towers_of_rows, [towers_of_rows[0], towers_of_rows[-1]], [nodes[0], nodes[-1]])
    return float(np.max(np.abs(line / nodes - 1)))


if __name__ == "__main__":
    main()
