"""`convert_model`: `towers.whole_batch`, with the kernels of `sync_batch_norm` for the batch norms of an unchanged model.

Placements find what has to be of the whole batch, without knowing what it is. What is left to do here is to compute batch norms
by kernels (`batch_norms`), to tell which were found, and to know their moving averages (`averages`).
"""
import contextlib
import functools
import re
from typing import Callable, NamedTuple, Pattern, Union

import tensorflow.compat.v1 as tf

from tf_syncbn.conversion.averages import order_updates, remember_averages, sources_of
from tf_syncbn.conversion.batch_norms import BatchNorms
from towers.api.annotations import ConvertedModelFn, ModelFn, Shape
from towers.context import current_tower
from towers.sharding.report import log_meetings
from towers.sharding.whole_batch import plan_alone, scope_filter, with_kernels

__all__ = ["ConvertedLayer", "convert_model"]

_ENDINGS = re.compile(r"(/(cond|moments|normalize|batchnorm)(_\d+)?)+$")


class ConvertedLayer(NamedTuple):
    """A batch norm that was found in a model.

    Attributes:
      scope: str, the name scope of its ops in the tower.
      shape: `tf.TensorShape` of its input.
      kind: str, what the model had made it of: "fused", "moments", or "squares", where its variance is E[x^2] - E[x]^2, which
        loses digits where the mean is large.
    """
    scope: str
    shape: Shape
    kind: str


def convert_model(model_fn: ModelFn, only: Union[str, Pattern, Callable[[str], bool], None] = None) -> ConvertedModelFn:
    """Makes every batch norm of a model normalize by the moments of all towers, and all else it computes of its batch alike.

    It is `towers.whole_batch`, see there, with batch norms computed by the kernels of `sync_batch_norm`: `tf.nn.fused_batch_norm`
    in training mode, whatever made it (`tf.layers`, slim, Keras 2 in a graph), and moments as `tf.nn.moments` takes them. What
    normalizes otherwise (`E[x^2] - E[x]^2`, `tf.nn.weighted_moments`, groups, whitening) is computed as the model has it, of the
    whole batch. Outputs, the batch moments that feed moving averages (with Bessel's correction where the model had it), losses
    and gradients become those of one tower on the whole batch, gradients that the model takes itself among them.

    What normalizes each example by itself, or weights, stays as it is. No variable, name, collection or initializer changes, so
    checkpoints move between the converted and the unconverted model. Updates of moving averages run once a step, as a
    `sync_batch_norm`'s: in UPDATE_OPS they are shared by all towers, and inline ones remain in tower 0.

    A tensor that the model function hands out otherwise than by its outputs or collections (an attribute of a Keras layer, say)
    is that of the unconverted layer. Outside of towers, and with one tower, the model stays as it is.

    Args:
      model_fn: a model function, see `TowerBuilder.build`.
      only: what to convert: a regular expression that `re.search` finds in a layer's scope, or a function of the scope that
        returns a bool. None is all of them, and whatever else the model computes of its batch. The scope is relative to the
        tower: "block1/bn".

    Returns:
      A model function with an attribute `converted`, the list of `ConvertedLayer` of its last build, and `meetings` and `report`,
      see `towers.whole_batch`. The layers are logged too. It raises, while the graph is built:
      ValueError: where `only` chooses none of the model's layers, and for what has no exact form, by its name.
      TowerMismatchError: (a ValueError) where towers would meet otherwise than tower 0.

    Example:

        replicas = builder.build(tf_syncbn.convert_model(model_fn), batch)
    """
    chosen = scope_filter(model_fn, only)
    of_scope = chosen and (lambda scope: chosen(_ENDINGS.sub("", "/" + scope)[1:] or scope))
    of_many = with_kernels(model_fn, of_scope, _Conversion)

    def converted(*args, **kwargs):
        tower = current_tower()
        if tower is None:
            return model_fn(*args, **kwargs)
        if tower.num_towers > 1:
            with _saying_its_name():
                outputs = of_many(*args, **kwargs)
            if tower.is_first:
                converted.meetings, converted.report = of_many.meetings, of_many.report
                converted.converted = of_many.kernels.layers(chosen)
            return outputs
        outputs, conversion = plan_alone(model_fn, args, kwargs, tower, of_scope, _Conversion)
        if conversion is not None:
            converted.converted = conversion.layers(chosen)
            conversion.carried_out()
        return outputs

    if hasattr(model_fn, "__name__"):
        functools.update_wrapper(converted, model_fn)
    converted.converted, converted.meetings, converted.report = [], [], ""  # type: ignore[attr-defined]
    return converted


@contextlib.contextmanager
def _saying_its_name():
    """Lets what `towers.whole_batch` refuses name the function that the user called."""
    try:
        yield
    except ValueError as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (re.sub("^towers.whole_batch: ", "convert_model: ", error.args[0]),) + error.args[1:]
        raise


class _Conversion(BatchNorms):
    """The conversion of one tower."""

    def layers(self, only):
        """Returns the list of `ConvertedLayer`; raises ValueError where `only` chooses none of several."""
        scopes = [self._scope_of(batch_norm.op) for batch_norm in self.found]
        if only is not None and scopes and not self.chosen:
            raise ValueError("convert_model: `only` chooses none of the model's batch norms, whose scopes are %s."
                             % ", ".join(map(repr, scopes)))
        return [ConvertedLayer(self._scope_of(batch_norm.op), batch_norm.x.shape, batch_norm.kind) for batch_norm in self.chosen]

    def planned(self, plan):
        super().planned(plan)
        self._sources = sources_of(plan, self.chosen)  # before inputs are others

    def carried_out(self):
        if self._tower.num_towers > 1:
            order_updates(self.plan, self._sources)
        if self._tower.is_first:
            scopes = [self._scope_of(batch_norm.op) for batch_norm in self.chosen]
            remember_averages(self.chosen, scopes, self._sources, self.moments_of, self._tower)

    def log(self, meetings):
        layers = [(self._scope_of(b.op), b.x.shape, b.kind) for b in self.chosen]
        tf.logging.info("convert_model: %d of %d batch norms are synced over towers:%s", len(layers), len(self.found), "".join(
            "\n  %s %s (%s)" % layer for layer in layers))
        others = [meeting for meeting in meetings if meeting.conversion != "moments"]
        if others:
            log_meetings(others)

    def _scope_of(self, op):
        """Returns the name scope of the layer that made `op`, relative to the tower; the name of `op` where it has none."""
        name = self._tower.relative(op.name)
        return _ENDINGS.sub("", "/" + name.rpartition("/")[0])[1:] or name
