"""Random ops of towers, and those that draw in one tower what they draw in another.

TensorFlow gives a random op without a seed of its own another seed in each tower. One that the model function gives a seed, by
`tf.nn.dropout(x, seed=0)` say, begins each tower's stream at the same number, and nothing that is trained would tell.
"""
import warnings

import tensorflow.compat.v1 as tf

from towers.api.wording import TowersWarning
from towers.graph.walk import ancestors, calls_of, computes_the_same, tensors_of

__all__ = ["drawing", "drawing_ops", "seeds_of", "warn_of_same_draws"]

_DRAWING = ("Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial")


def drawing(ops):
    """Returns those of a list of ops whose kernels hold the state of random numbers, and calls of such, a list."""
    calls = set(calls_of(ops, lambda nodes: any("seed" in node.attr for node in nodes)))
    return [op for op in ops if op in calls or op.op_def is not None and op.op_def.is_stateful and "seed" in op.node_def.attr]


def drawing_ops(towers):
    """Returns the random ops that outputs of a list of `Tower` need, in the order of their names."""
    return sorted(filter(_draws, _needed(towers)), key=lambda op: op.name)


def _needed(towers):
    return ancestors([leaf for tower in towers for leaf in tf.nest.flatten(tower.outputs, expand_composites=True)
                      if hasattr(leaf, "op")], within={op for tower in towers for op in tower.ops})


def seeds_of(op):
    """Returns both seeds of a random op, a list of two ints; 0 and 0 where it draws by none."""
    return [op.get_attr("seed"), op.get_attr("seed2")]


def warn_of_same_draws(towers):
    """Warns, once, where a random op draws for a tower's examples what tower 0's draws for its own.

    Numbers that are not drawn for examples, noise of a weight's shape say, are those of one tower just where they are the same.

    Args:
      towers: list of `Tower`.
    """
    of_first = [seeds_of(op) for op in _drawn_for_examples(towers[0])]
    # Of a whole-batch model a stateless op draws for all examples, of which each tower takes its own.
    stateless = [] if towers[0].context.placements else _drawn_for_examples(towers[0], _is_stateless)
    for tower in towers[1:]:
        same = [op for op in _drawn_for_examples(tower) if seeds_of(op) in of_first] + [
            op for op, first in zip(_drawn_for_examples(tower, _is_stateless), stateless)
            if computes_the_same(op.inputs[1], first.inputs[1])]
        needed = _needed([tower]) if same else ()
        for op in same:
            if op in needed:
                warnings.warn("Tower %d draws the same random numbers as tower 0 at %r, since the model function gives that op a "
                              "seed: examples of several towers would get the same noise. Leave seed= out, tf.set_random_seed "
                              "makes runs alike, or add towers.current_tower().index to it." % (tower.context.index, op.name),
                              TowersWarning, stacklevel=3)
                return


def _has_seeds(op):
    return _draws(op) and any(seeds_of(op))


def _is_stateless(op):
    return op.type.startswith("Stateless") and op.type[len("Stateless"):].startswith(_DRAWING) and op.outputs[0].dtype.is_floating


def _drawn_for_examples(tower, is_kind=_has_seeds):
    """Returns the random ops of a tower, of some kind, whose first axis may be that of its batch."""
    sizes = {leaf.shape.as_list()[0] for leaf in tensors_of(tower.context.batch) if leaf.shape.rank}
    return [op for op in tower.ops if is_kind(op) and _may_begin_with(op, sizes)]


def _draws(op):
    return op.type.startswith(_DRAWING) and "seed2" in op.node_def.attr


def _may_begin_with(op, sizes):
    shape = op.outputs[0].shape
    return shape.rank is None or shape.rank > 0 and (shape.as_list()[0] is None or shape.as_list()[0] in sizes)
