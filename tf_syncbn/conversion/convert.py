"""`convert_model`: the batch norms of an unchanged model function become synced ones.

When the model function of a tower has returned, and before anything is differentiated, its batch norms are found in the
graph and replaced there. Variables, their names, collections and initializers stay as they are.
"""
import contextlib
import functools
import re
import warnings
import weakref
from typing import Any, Callable, List, NamedTuple, Pattern, Union

import tensorflow.compat.v1 as tf

from towers.annotations import ConvertedModelFn, ModelFn, Shape
from towers.context import current_tower
from towers.graph_walk import ancestors
from towers.inner_training import refuse_training
from towers.own_data import leaves_of_rows, takes_own_data
from towers.private import branches_of, forward_op_of, is_recorded
from towers.turns import TowerMismatchError
from tf_syncbn.conversion.crossings import find_crossings
from tf_syncbn.conversion.dependence import find_statistics
from tf_syncbn.conversion.detection import find_batch_norms, find_hidden
from tf_syncbn.conversion.fused_batch_norms import is_fused, is_training
from tf_syncbn.conversion.replacement import Added, Replacement, remember_unreplaced
from tf_syncbn.conversion.roots import is_root
from tf_syncbn.moving_averages import averaged_layers

__all__ = ["ConvertedLayer", "convert_model"]

_ENDINGS = re.compile(r"(/(cond|moments|batchnorm)(_\d+)?)+$")

_MEND = ("Take a layer's own synchronization away (tensorpack's sync_statistics), compute moments of all examples by "
         "tf.nn.moments, or use tf_syncbn.sync_batch_norm.")
_CROSSING = ("convert_model: %s computes something of all examples of a tower together that comes back to each of them, and is "
             "no batch norm of a kind that it knows. It stays each tower's own, and one tower would compute it of the whole "
             "batch. Compute it of all towers' examples, by towers.all_reduce or towers.all_gather (a loss that is divided by "
             "such a number is then to be taken times the number of towers), or leave it out by `only`.")


class ConvertedLayer(NamedTuple):
    """A batch norm that was found in a model.

    Attributes:
      scope: str, the name scope of its ops in the tower.
      shape: `tf.TensorShape` of its input.
      kind: str, what the model had made it of: "fused", "fused in tf.cond", "moments"; "squares", where its variance is
        E[x^2] - E[x]^2 and became the exact one; or "sums", other sums and means.
    """
    scope: str
    shape: Shape
    kind: str


def convert_model(model_fn: ModelFn, only: Union[str, Pattern, Callable[[str], bool], None] = None) -> ConvertedModelFn:
    """Makes every batch norm of a model normalize by the moments of all towers.

    Found are, whatever made them (`tf.layers`, slim, Keras 2 in a graph, hand-written layers), all that normalize by the
    moments of their batch: `tf.nn.fused_batch_norm`; `tf.nn.moments`, or means written alike, over all examples, followed
    by a root; and other sums or means over all examples by whose root examples are scaled: `E[x^2] - E[x]^2`,
    `tf.nn.sufficient_statistics`, `tf.nn.weighted_moments`, a norm. Examples lie along axis 0 of what the model function was
    given, and are followed to where transpositions and reshapes move them. Outputs, the batch moments that feed moving
    averages (with Bessel's correction where the model had it) and gradients become those of one tower on the whole batch. A
    variance that is known to be `E[x^2] - E[x]^2` becomes the exact one: where means are large, the model's own formula, which
    one tower keeps, would lose it.
    What normalizes each example by itself, or weights, stays as it is. No variable, name, collection or initializer changes,
    so checkpoints move between the converted and the unconverted model. Updates of moving averages run once a step, as a
    `sync_batch_norm`'s: in UPDATE_OPS they are shared by all towers, and inline ones remain in tower 0.

    Only what the model's outputs, or items that it added to collections, depend on is converted. A tensor that the model
    function hands out otherwise (an attribute of a Keras layer, say) is that of the unconverted layer. Outside of towers,
    and with one tower, the model stays as it is; what would be refused with more is refused with one too. Not found is
    normalization by a moving average that was just updated. Whatever else takes all examples together and comes back to each
    of them, a mean that is subtracted or a largest value, stays the tower's own, and a warning names it.

    Args:
      model_fn: a model function, see `TowerBuilder.build`.
      only: which layers to convert: a regular expression that `re.search` finds in a layer's scope, or a function of the
        scope that returns a bool. None is all of them. The scope is relative to the tower: "block1/bn".

    Returns:
      A model function with an attribute `converted`, the list of `ConvertedLayer` of its last build. They are logged too.
      It raises, while the graph is built:
      ValueError: where there is nothing to convert, or nothing that `only` chooses; where a batch norm was
        differentiated inside `model_fn`, is recorded by a tf.GradientTape, stands in a tf.while_loop, a tf.function, or a
        tf.cond by the tower's own examples, or one that holds more than the two modes of it, or moments of what is made
        within it; has an unknown number of moments; or where the output waits for
        its update in a tf.cond of control flow 2. `compute_gradients` raises it where a gradient builds a batch norm anew
        (`recompute_grad`).
      TowerMismatchError: (a ValueError) where towers' batch norms differ.

    Warns:
      UserWarning: where something that looks like a batch norm is of no known kind, and stays local: groups of examples that
        are not consecutive, say, or a root of more than sums; and where anything else that a tower computes of all its examples
        comes back to them.

    Example:

        replicas = builder.build(tf_syncbn.convert_model(model_fn), batch)
    """
    if not callable(model_fn):
        raise TypeError("model_fn has to be a model function, not %r." % (model_fn,))
    if only is not None and not callable(only):
        only = _search(only)
    # Of tower 0 of each build, whether each batch norm is converted: Keras numbers its layers on through the towers.
    chosen_of: "weakref.WeakKeyDictionary[Any, List[bool]]" = weakref.WeakKeyDictionary()

    def converted(*args, **kwargs):
        tower = current_tower()
        if tower is None:
            return model_fn(*args, **kwargs)
        added = Added(tf.get_default_graph())
        batch = leaves_of_rows([args, kwargs])
        with _noting_recorded() as recorded:
            outputs = model_fn(*args, **kwargs)
        refuse_training(added.ops(), added.items(tf.GraphKeys.TRAIN_OP) if tower.asked is None else ())
        found, scopes, of_variables = _find(added, batch, outputs, only, tower)
        chosen = chosen_of.setdefault(tower.meetings, [])
        if tower.is_first:
            chosen[:] = [only is None or bool(only(scope)) for scope in scopes]
            if scopes and not any(chosen):
                raise ValueError("convert_model: `only` chooses none of the model's batch norms, whose scopes are %s."
                                 % ", ".join(map(repr, scopes)))
        elif len(found) != len(chosen):
            raise TowerMismatchError(
                "Tower %d has %d batch norms to convert and tower 0 has %d. Does the model function make another network of a "
                "batch of another size? tf.squeeze(x), say, takes away the axis of one example."
                % (tower.index, len(found), len(chosen)))
        found, scopes = ([x for x, is_chosen in zip(several, chosen) if is_chosen] for several in (found, scopes))
        _check(found, scopes, added.ops(), recorded, tower)
        if tower.is_first:
            if only is None:
                tower.meetings.gradient_checks.append(_check_recomputed)
            converted.converted = [ConvertedLayer(scope, b.x.shape, b.kind) for scope, b in zip(scopes, found)]
            _log(converted.converted, len(chosen), of_variables)
        statistics = find_statistics(added.ops(), batch, found)
        if tower.num_towers == 1:
            remember_unreplaced(found, scopes, statistics, tower)
            return outputs
        replacement = Replacement(added, statistics, tower)
        for index, (batch_norm, scope) in enumerate(zip(found, scopes)):
            replacement.replace(batch_norm, index, scope)
        return replacement.finish(outputs)

    if hasattr(model_fn, "__name__"):
        functools.update_wrapper(converted, model_fn)
    converted.converted = []  # type: ignore[attr-defined]  # which knows no attributes of functions
    return converted


def _search(only):
    try:
        return re.compile(only).search
    except TypeError as error:
        raise TypeError("`only` has to be a pattern, or a function of a scope, not %r." % (only,)) from error
    except re.error as error:
        raise ValueError("`only` is no regular expression: %r, %s." % (only, error)) from error


def _find(added, batch, outputs, only, tower):
    """Returns lists of the batch norms that the outputs need, of their scopes, and of the scopes of standardized weights."""
    ops = added.needed(outputs)
    _refuse_hidden(ops, only, tower)
    found, suspects, of_variables, model, known = find_batch_norms(ops, batch)
    scopes, unknown, of_variables = ([_scope_of(op, tower) for op in several] for several in (
        [batch_norm.op for batch_norm in found], suspects, [batch_norm.op for batch_norm in of_variables]))
    if tower.is_first and tower.num_towers > 1:
        crossings = find_crossings(model, known, ancestors([leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)]))
        _warn_of_crossings([_scope_of(op, tower) for op in crossings], unknown, only)
    tower.examined.update(added.ops())
    if found and unknown and tower.is_first:
        warnings.warn("convert_model: what looks like a batch norm is of no kind that it knows, and keeps the moments of each "
                      "tower: %s. %s" % (", ".join(map(repr, unknown)), _MEND), stacklevel=4)
    if not found and tower.training is not False and tower.is_first:
        raise ValueError(_why_none_is_found(ops, unknown, len(averaged_layers(added.graph, tower))))
    return found, scopes, of_variables


def _refuse_hidden(ops, only, tower):
    hidden = [op for op in find_hidden(ops) if only is None or only(_scope_of(op, tower))]
    if hidden:
        raise ValueError(
            "convert_model: %s contains a batch norm in training mode, and towers can't meet in a function, loop or branch of "
            "TensorFlow 2. Give the layer `training` as a bool, call the model without tf.function, or call "
            "tf.disable_control_flow_v2() when the program starts."
            % ", ".join(repr(tower.relative(op.name)) for op in hidden))


def _warn_of_crossings(scopes, unknown, only):
    scopes = [scope for scope in dict.fromkeys(scopes) if scope not in unknown and (only is None or only(scope))]
    if scopes:
        warnings.warn(_CROSSING % ", ".join(map(repr, scopes)), stacklevel=5)


def _why_none_is_found(ops, unknown, num_synced):
    """Returns the message for a model without batch norms to convert."""
    if unknown:
        return ("convert_model found no batch norm of a kind that it knows; what looks like one is %s. %s"
                % (", ".join(map(repr, unknown)), _MEND))
    frozen = sum(is_fused(op) and not is_training(op) for op in ops)
    return ("convert_model found no batch norm in training mode in what the model function returned%s%s. Is `training` True "
            "where the layers are called, and does the loss depend on them? A model without batch norm needs no convert_model."
            % (", and %d fused ones in inference mode" % frozen if frozen else "",
               ", besides %d of sync_batch_norm, which need no conversion" % num_synced if num_synced else ""))


@contextlib.contextmanager
def _noting_recorded():
    """Yields a set that fills with the ops that are made while a tf.GradientTape records."""
    recorded = set()

    def note(op):
        if is_recorded():
            recorded.add(op)
        return op.device or ""  # None of what Keras asks for the present device by

    with tf.device(note):  # TensorFlow calls it for every op
        yield recorded


def _check(batch_norms, scopes, made, recorded, tower):
    """Raises for batch norms that can't be synced."""
    differentiated = {forward_op_of(op) for op in made}
    for batch_norm, scope in zip(batch_norms, scopes):
        if batch_norm.trouble:
            raise ValueError("convert_model can't sync the batch norm %r: %s." % (scope, batch_norm.trouble))
        if takes_own_data([predicate for predicate, _ in branches_of(batch_norm.op)], tower):
            raise ValueError("convert_model can't sync the batch norm %r: it stands in a tf.cond by the tower's own examples, so "
                             "that some towers would normalize by moments, and others not." % scope)
        if any(op in recorded for op in batch_norm.ops):
            raise ValueError("convert_model: a tf.GradientTape, or a function that uses one (recompute_grad), records the batch "
                             "norm %r, which by then is not synced. Take the gradients by tf.gradients, use "
                             "tf_syncbn.sync_batch_norm there, or leave it out by `only`." % scope)
        if any(op in differentiated for op in batch_norm.ops):
            raise ValueError("convert_model: the model function itself takes gradients through the batch norm %r, which by then "
                             "is not synced. Use tf_syncbn.sync_batch_norm there, or leave it out by `only`." % scope)


def _check_recomputed(made):
    """Raises where a gradient pass builds a batch norm anew."""
    may_be = any(is_root(op) or is_fused(op) and is_training(op) for op in made)  # to look closely takes as long as to build them
    for batch_norm in find_batch_norms(made, []).batch_norms if may_be else ():
        raise ValueError(
            "convert_model: the batch norm %r is built anew while gradients are taken, as recompute_grad does: the towers "
            "can't meet there, and local statistics would be wrong. Recompute only what stands between batch norms."
            % batch_norm.op.name)


def _log(layers, num_found, of_variables):
    tf.logging.info("convert_model: %d of %d batch norms are synced over towers:%s", len(layers), num_found, "".join(
        "\n  %s %s (%s)" % (layer.scope, layer.shape, layer.kind) for layer in layers))
    if of_variables:
        tf.logging.info("convert_model: %s standardizes what depends on variables alone, as weights, and stays as it is.",
                        ", ".join(map(repr, of_variables)))


def _scope_of(op, tower):
    """Returns the name scope of the layer that made `op`, relative to the tower; the name of `op` where it has none."""
    name = tower.relative(op.name)
    return _ENDINGS.sub("", "/" + name.rpartition("/")[0])[1:] or name
