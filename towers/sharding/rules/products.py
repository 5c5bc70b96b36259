"""Products that are sums over an axis: linear in each input, and a sum's parts where that axis holds the examples."""
import numpy as np
import tensorflow.compat.v1 as tf

from towers.sharding.nodes import OwnRows, Replicated, Unfit
from towers.sharding.placements import Blocks, Partial, Replicate, Shard, moved
from towers.sharding.rules.pointwise import with_whole
from towers.sharding.rules.table import LAYER, SUMS, rule

__all__ = ["contracted"]

ROWS = (Shard, Blocks)


def contracted(node, labels, out, numbers=None):
    """Returns the `Decision` of a product by the labels of axes, as of `tf.einsum`.

    Args:
      node: `Node`.
      labels: list of str, one for each input that is multiplied.
      out: str, of the output.
      numbers: list of int, those inputs; None is the first ones.
    """
    numbers = list(range(len(labels))) if numbers is None else numbers
    others = node.wanted(k for k in range(len(node.inputs)) if k not in numbers)
    label_of = {k: mine for k, mine in zip(numbers, labels)}
    sharded = {k: label_of[k][node.inputs[k].placement.axis] for k in numbers if isinstance(node.inputs[k].placement, ROWS)}
    sums = [k for k in numbers if isinstance(node.inputs[k].placement, SUMS)]
    if not sharded:
        if not sums:
            raise Unfit()
        kept = max(sums, key=lambda k: (np.prod([d or 2 for d in node.inputs[k].dims or []]), -k))
        return with_whole(node, kept)
    # The axis that comes first in the output stays; one that is summed over stays where no other does.
    chosen = min(set(sharded.values()), key=lambda label: out.index(label) if label in out else len(out))
    kept = [k for k, label in sharded.items() if label == chosen]
    outer = {getattr(node.inputs[k].placement, "outer", 1) for k in kept}
    if len(outer) > 1:
        raise Unfit()
    first, outer = kept[0], outer.pop()
    like, wants = (node.inputs[first].tensor, node.inputs[first].placement.axis), dict(others)
    for k in numbers:
        if k in kept:
            continue
        if chosen in label_of[k] and node.inputs[k].whole[label_of[k].index(chosen)] != 1:
            wants[k] = OwnRows(label_of[k].index(chosen), like, outer)
        elif not isinstance(node.inputs[k].placement, Replicate):
            wants[k] = Replicated()
    if chosen not in out:
        return node.decide(Partial(), wants)
    return node.decide(moved(node.inputs[first].placement, out.index(chosen)), wants)


@rule("MatMul SparseMatMul", ROWS + SUMS, does=LAYER)
def matmul(node):
    a = "ki" if node.attr("transpose_a") else "ik"
    b = "jk" if node.attr("transpose_b") else "kj"
    return contracted(node, [a, b], "ij")


@rule("BatchMatMul BatchMatMulV2 BatchMatMulV3", ROWS + SUMS, does=LAYER)
def batch_matmul(node):
    ranks = [node.inputs[0].rank, node.inputs[1].rank, node.outputs[0].rank]
    if max(ranks) > 12:
        raise Unfit()
    batch = "abcdefghlm"
    a, b, out = (batch[len(batch) - (rank - 2):] for rank in ranks)
    return contracted(node, [a + ("ki" if node.attr("adj_x") else "ik"), b + ("jk" if node.attr("adj_y") else "kj")], out + "ij")


@rule("Einsum", ROWS + SUMS, does=LAYER)
def einsum(node):
    given, out = tf.compat.as_str(node.attr("equation")).replace(" ", "").split("->")
    labels = given.split(",")
    if "." in given:
        labels, out = _without_dots(labels, out, [value.rank for value in node.inputs])
    if any(len(set(mine)) < len(mine) for mine in labels + [out]):
        raise Unfit()
    if len(labels) == 1 and isinstance(node.inputs[0].placement, SUMS):
        return node.decide(node.inputs[0].placement)
    return contracted(node, labels, out)


def _without_dots(labels, out, ranks):
    free = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in "".join(labels) + out]
    counts = [rank - len(mine.replace(".", "")) for mine, rank in zip(labels, ranks)]
    most = max(count for mine, count in zip(labels, counts) if "." in mine)
    labels = [mine.replace("...", "".join(free[most - count:most])) for mine, count in zip(labels, counts)]
    return labels, out.replace("...", "".join(free[:most]))


@rule("Cross", ROWS, does=LAYER)
def cross(node):
    found = {value.placement for value in node.inputs}
    if len(found) != 1 or node.inputs[0].placement.axis == node.inputs[0].rank - 1:
        raise Unfit()
    return node.decide(node.inputs[0].placement)


# Gradients of filters: the two inputs that hold examples along axis 0, which are summed over.
FILTERS = {"Conv2DBackpropFilter": (0, 2), "Conv3DBackpropFilterV2": (0, 2), "DepthwiseConv2dNativeBackpropFilter": (0, 2),
           "Dilation2DBackpropFilter": (0, 2)}


@rule(" ".join(FILTERS), ROWS, does=LAYER)
def filter_gradient(node):
    numbers = FILTERS[node.type]
    sharded = [k for k in numbers if isinstance(node.inputs[k].placement, ROWS)]
    found = {node.inputs[k].placement for k in sharded}
    if len(found) != 1 or node.inputs[sharded[0]].placement.axis != 0:
        raise Unfit()
    like = (node.inputs[sharded[0]].tensor, 0)
    wants = node.wanted(k for k in range(len(node.inputs)) if k not in numbers)
    wants.update((k, OwnRows(0, like, getattr(node.inputs[sharded[0]].placement, "outer", 1)))
                 for k in numbers if k not in sharded)
    return node.decide(Partial(), wants)
