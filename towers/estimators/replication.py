"""`tf.estimator.Estimator` on several devices: an Estimator's model function, replicated.

The model function stays an Estimator's: it gets features, labels and a mode, and returns an `EstimatorSpec`. Each tower is
given its part of the batch, and what Estimator gets is one spec for the whole batch. Nothing of tf.estimator is looked for
before it is asked for: the newest TensorFlow has none.
"""
import copy
import inspect
from typing import Any, Callable, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers.api.annotations import ModelFn, TensorLike, Transforms, VariablePlacement
from towers.api.arguments import FUNCTION, TEXT, check, optional
from towers.builder import TowerBuilder
from towers.context import TowerContext, current_tower, enter_tower
from towers.devices.placement import HOST, session_config
from towers.estimators.metrics import count_all_examples, merged_metrics
from towers.estimators.specs import joined, joined_exports, tensors_of_export
from towers.estimators.steps import build_train_op, leaves_of_group
from towers.estimators.tower_optimizer import Asked
from towers.graph.inner_training import applies_gradients
from towers.graph.op_types import HANDS_ON, QUOTIENTS, VARIABLES
from towers.graph.private import control_flow_of
from towers.graph.walk import ancestors, op_of, writes_of
from towers.meeting.meetings import Meetings
from towers.meeting.turns import TowerMismatchError
from towers.sharding.rules import pointwise
from towers.state.own_data import takes_own_data
from towers.state.update_ops import POLICIES
from towers.training.transforms import Transform, check_transforms

__all__ = ["replicate_model_fn"]

_SUMS = HANDS_ON.union(pointwise.JOINT.split())
_MULTIPLES = frozenset((pointwise.LINEAR + " " + pointwise.PRODUCTS).split())


def replicate_model_fn(model_fn: ModelFn, loss_reduction: str = tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS,
                       devices: Optional[Sequence[str]] = None, update_ops: str = "first",
                       transforms: Transforms = (), convert: Optional[Callable[[ModelFn], ModelFn]] = None,
                       weight: Optional[Callable[..., TensorLike]] = None, alike: bool = True,
                       aggregation_device: Optional[str] = None, variable_placement: VariablePlacement = "host",
                       num_towers: Optional[int] = None) -> Callable[..., Any]:
    """Replicates an Estimator's model function over towers, as `tf.contrib.estimator.replicate_model_fn` did.

    The function that it returns is for `tf.estimator.Estimator(model_fn=...)`. Features and labels, any structure of tensors,
    are split over the towers along axis 0, evenly or not. The model function wraps its optimizer in `towers.TowerOptimizer`, and
    changes in nothing else.

    - Training is that of one tower on the whole batch: one step, of the averaged gradients. Control dependencies of the train
      op, groups that it is put in, and what waits for it mean what they mean without towers.
    - Evaluation counts each example once in `eval_metric_ops`.
    - Predictions and export outputs are joined along axis 0, in the order of the examples; scalars are averaged, and what takes
      nothing of the batch (a variable) is tower 0's.
    - Prediction of placeholders, as for a serving input receiver, is built once, on no device, without a tower in any name.
    - Hooks and the scaffold are tower 0's. A tensor that the model function names at its top level is found by that name without
      the tower: the `LoggingTensorHook(["learning_rate"], ...)` of a program goes on, on tower 0's tensor.

    Args:
      model_fn: an Estimator's model function of `features`, and any of `labels`, `mode`, `params` and `config`.
      loss_reduction: how the loss is made of its examples': `tf.losses.Reduction.SUM`, which adds up the towers' losses, or any
        other but NONE, which are means. A sum can't hold a regularization loss, which would count once a tower.
      devices: list of str, as for `towers.TowerBuilder`.
      update_ops: which towers' update ops run in a step: "first", "all" or "last", see `towers.collect_update_ops`, whether or
        not the model function makes its train op wait for them. "none" leaves that to the model function: of tower 0's those
        run that the train op waits for.
      transforms: what becomes of averaged gradients before the model function gets them, as for `towers.minimize`. In batches in
        which `towers.accumulate` or `scale_loss` let nothing be trained, what the model function makes its train op run beside
        or after the step runs all the same. These two and `mask_gradients` want a model function of one step, and `accumulate`,
        and what comes behind `scale_loss` in the list, one that calls `minimize`.
      convert: a function of a model function that returns another, `tf_syncbn.convert_model` say, or None.
      weight: a function of a tower's features and labels that returns what its loss is a mean over, where that is not all its
        examples: the number of valid ones. None is the number of examples.
      alike: as for `towers.TowerBuilder.build`.
      aggregation_device: as for `towers.TowerBuilder`.
      variable_placement: as for `towers.TowerBuilder`.
      num_towers: as for `towers.TowerBuilder`.

    Returns:
      A function of `features, labels, mode, params, config` that returns a `tf.estimator.EstimatorSpec`. It raises, beside what
      `TowerBuilder.build` does:
      TypeError: where the model function returns no `EstimatorSpec`.
      ValueError: where its train op is not of a `TowerOptimizer`; where the Session of the `RunConfig` lacks the towers' CPU
        devices; for a metric that would not count examples; for a Saver that was made before the optimizer's variables; for
        transforms that the model function's steps can't have.

    Raises:
      RuntimeError: where this TensorFlow has no tf.estimator.
      TypeError, ValueError: for arguments that are none.

    Example:

        def model_fn(features, labels, mode):
            loss = tf.losses.sparse_softmax_cross_entropy(labels, network(features))
            optimizer = towers.TowerOptimizer(tf.train.MomentumOptimizer(0.1, 0.9))
            train_op = optimizer.minimize(loss, tf.train.get_global_step())
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

        devices = ["/gpu:0", "/gpu:1"]
        estimator = tf.estimator.Estimator(
            towers.replicate_model_fn(model_fn, devices=devices), model_dir,
            tf.estimator.RunConfig(session_config=towers.session_config(devices)))
    """
    _check_estimator()
    names = _check_arguments(model_fn, loss_reduction, update_ops, transforms, convert, weight)
    builder = TowerBuilder(devices, aggregation_device, variable_placement, num_towers)

    def replicated(features, labels, mode, params=None, config=None):
        if labels is not None and "labels" not in names:
            raise ValueError("The model function does not take labels, and the input function returns labels.")
        _check_session(config, builder.devices + [builder.aggregation_device])
        given = {"mode": mode, "params": params, "config": config}
        given = {name: value for name, value in given.items() if name in names}
        call = _Call(model_fn, given, "labels" in names, loss_reduction == tf.losses.Reduction.SUM, weight, update_ops)
        if mode == tf.estimator.ModeKeys.PREDICT and _is_fed(features):
            return call.without_towers(features)
        batch = (features,) if labels is None else (features, labels)
        tower_fn = call.of_tower if convert is None else convert(call.of_tower)
        replicas = builder.build(tower_fn, batch, training=mode == tf.estimator.ModeKeys.TRAIN, alike=alike)
        return call.whole_spec(replicas, transforms)
    return replicated


class _Call:
    """One call of the replicated model function: what each tower's returned."""

    def __init__(self, model_fn, given, takes_labels, is_sum, weight, update_ops):
        self._model_fn, self._given, self._takes_labels = model_fn, given, takes_labels
        self._is_sum, self._weight, self._update_ops = is_sum, weight, update_ops
        self._specs, self._asked = [], []
        self._is_training = given.get("mode") == tf.estimator.ModeKeys.TRAIN

    def without_towers(self, features):
        """Returns the spec of the model function as it is, where layers find one tower that does not train."""
        with enter_tower(TowerContext(0, 1, HOST, HOST, False, "", Meetings([HOST], HOST), [])):
            current_tower().asked = Asked()
            return self._spec(features, None)._replace(train_op=None)

    def _spec(self, features, labels):
        arguments = {name: copy.deepcopy(value) if name == "params" else value for name, value in self._given.items()}
        if self._takes_labels:
            arguments["labels"] = labels
        spec = self._model_fn(features=features, **arguments)
        if not isinstance(spec, tf.estimator.EstimatorSpec):
            raise TypeError("The model function has to return a tf.estimator.EstimatorSpec, not %r." % (spec,))
        return spec

    def of_tower(self, features, labels=None):
        """The model function of a tower: returns what is needed of a spec as a dict."""
        tower, asked = current_tower(), Asked()
        tower.asked = asked
        first_op = len(tf.get_default_graph().get_operations())
        spec = self._spec(features, labels)
        self._specs.append(spec)
        self._asked.append(asked)
        outputs = {}
        if spec.loss is not None:
            outputs["loss"] = self._scaled(spec.loss)
        if self._is_sum:
            outputs["weight"] = 1.0
        elif self._weight is not None:
            outputs["weight"] = self._weight(features) if labels is None else self._weight(features, labels)
        if spec.predictions is not None:
            outputs["predictions"] = spec.predictions
        if spec.export_outputs:
            outputs["exports"] = {name: tensors_of_export(output) for name, output in spec.export_outputs.items()}
        if spec.eval_metric_ops:
            outputs["metrics"] = {name: _pair_of_metric(metric) for name, metric in spec.eval_metric_ops.items()}
            count_all_examples(outputs["metrics"], tf.get_default_graph().get_operations()[first_op:], tower)
        if self._is_training:
            outputs.update(self._training_of(spec, asked, first_op))
        return outputs

    # What TowerOptimizers are asked for is asked once a tower: `towers.whole_batch` must not call it for the whole batch.
    of_tower.of_any_size = True  # type: ignore[attr-defined]

    def _training_of(self, spec, asked, first_op):
        """Returns what a tower's train op runs, and the losses that it trains by."""
        first, made = self._asked[0], set(tf.get_default_graph().get_operations()[first_op:])
        others = sorted(op.name for op in made if applies_gradients(op))
        if others or not asked.steps:
            raise ValueError("The train op %r of the model function is of no towers.TowerOptimizer: wrap the optimizer, "
                             "towers.TowerOptimizer(optimizer), before its minimize or apply_gradients is called."
                             % (others + [spec.train_op.name])[0])
        if [len(asked.passes), len(asked.steps)] != [len(first.passes), len(first.steps)]:
            raise TowerMismatchError("The model function asks a TowerOptimizer for %d steps in tower %d and for %d in tower 0."
                                     % (len(asked.steps), current_tower().index, len(first.steps)))
        updates = {op_of(update) for update in tf.get_collection(tf.GraphKeys.UPDATE_OPS)}
        left_out = updates | {step.done for step in asked.steps}
        waits, after = [leaves_of_group(step.waits, left_out) for step in asked.steps], leaves_of_group([spec.train_op], left_out)
        # What writes nothing is not held against the other towers': an assertion's message has the tower's names.
        writing = {op for ops in waits + [after] for op in ops if writes_of(ancestors([op], within=made, stop=left_out))}
        asked.quiet_waits = [[op for op in ops if op not in writing and op not in left_out] for ops in waits]
        asked.quiet_after = [op for op in after if op not in writing and op not in left_out]
        waits, after = [[op for op in ops if op in writing] for ops in waits], [op for op in after if op in writing]
        changed = [[g for g, _ in step.gradients if g is not None] for step in asked.steps if step.gradients is not None]
        return {"losses": [self._scaled(of_pass.loss) for of_pass in asked.passes], "waits": waits, "after": after,
                "changed": changed}

    def _scaled(self, loss):
        """Returns a tower's loss as a mean; N times a sum, where N towers share alike."""
        if not self._is_sum:
            return loss
        tower = current_tower()
        shared = [term for term in _terms(loss) if tf.get_static_value(term) is None and not takes_own_data(term, tower)]
        if shared and tower.num_towers > 1:
            raise ValueError(
                "The loss %r is a sum over examples, by loss_reduction, and adds %r, which takes nothing of the batch and would "
                "count once a tower, %d times. Make the loss a mean over examples, tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS."
                % (loss.name, shared[0].name, tower.num_towers))
        return loss * tower.num_towers

    def whole_spec(self, replicas, transforms):
        """Returns the spec of all towers."""
        first, fields = self._specs[0], {"loss": replicas.loss}
        if first.predictions is not None:
            fields["predictions"] = joined(replicas, "predictions")
        if first.export_outputs:
            fields["export_outputs"] = joined_exports(replicas, first.export_outputs)
        if first.eval_metric_ops:
            fields["eval_metric_ops"] = merged_metrics(replicas)
        fields["train_op"] = None
        if self._is_training:
            before = tf.global_variables()
            train_ops = [spec.train_op for spec in self._specs]
            fields["train_op"] = build_train_op(replicas, self._asked, train_ops, self._update_ops, transforms)
            _check_saver(first.scaffold, before)
        _name_without_tower(replicas[0])
        return first._replace(**fields)


def _check_estimator():
    try:
        there = callable(tf.estimator.Estimator)
    except (AttributeError, ImportError):
        there = False
    if not there:
        raise RuntimeError("towers.replicate_model_fn is for tf.estimator, which TensorFlow %s does not have: it went with 2.16. "
                           "Use TensorFlow 1.15 to 2.15; or towers.TowerBuilder and a loop of session.run." % tf.__version__)


def _check_arguments(model_fn, loss_reduction, update_ops, transforms, convert, weight):
    """Returns the names of the model function's arguments; raises TypeError or ValueError for arguments that are none."""
    check(FUNCTION, model_fn=model_fn)
    check(optional(FUNCTION), convert=convert, weight=weight)
    check(TEXT, loss_reduction=loss_reduction)
    check_transforms(transforms)
    names = [transform.name for transform in transforms if isinstance(transform, Transform)]
    if loss_reduction == tf.losses.Reduction.SUM and "accumulate" in names:
        raise ValueError("towers.accumulate averages the gradients of its batches, and the loss is a sum over examples, by "
                         "loss_reduction: make it a mean, tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS.")
    known = set(tf.losses.Reduction.all()) - {tf.losses.Reduction.NONE}
    if loss_reduction not in known:
        raise ValueError("loss_reduction is one of tf.losses.Reduction but NONE, %s, not %r." % (sorted(known), loss_reduction))
    if update_ops not in POLICIES:
        raise ValueError("update_ops is one of %s, not %r." % (", ".join(map(repr, POLICIES)), update_ops))
    names = set(inspect.signature(model_fn).parameters)
    if "features" not in names or "mode" not in names:
        raise ValueError("An Estimator's model function takes `features` and `mode`, and any of `labels`, `params` and `config`; "
                         "this one takes %s." % sorted(names))
    if hasattr(model_fn, "converted"):
        raise ValueError("The model function is converted already, which leaves out what its EstimatorSpec holds: hand in the "
                         "model function itself, and convert=tf_syncbn.convert_model.")
    return names


def _check_session(config, devices):
    """Raises ValueError where the Session that Estimator makes would lack CPU devices that towers stand on."""
    if config is None:
        return
    if getattr(config, "train_distribute", None) is not None or getattr(config, "eval_distribute", None) is not None:
        raise ValueError("The RunConfig has a distribution strategy, which replicates the model too: leave it out, or leave out "
                         "towers.replicate_model_fn.")
    there = 1 if config.session_config is None else config.session_config.device_count.get("CPU", 1)
    needed = session_config(devices).device_count["CPU"]
    if there < needed:
        raise ValueError("The towers stand on %d CPU devices, and the Session of this RunConfig has %d. Hand the Estimator "
                         "config=tf.estimator.RunConfig(session_config=towers.session_config(%r))."
                         % (needed, there, devices[:-1]))


def _check_saver(scaffold, before):
    """Raises ValueError where a scaffold's Saver saves all that there was before the optimizer made its variables."""
    saver, made = getattr(scaffold, "saver", None), set(tf.global_variables()) - set(before)
    if saver is None or not made or not getattr(saver, "saver_def", None):
        return
    graph = tf.get_default_graph()
    saves, stack = set(), [graph.get_tensor_by_name(saver.saver_def.save_tensor_name).op]
    while stack:
        op = stack.pop()
        if op.type == "SaveV2":
            saves |= {name.decode() for name in tf.get_static_value(op.inputs[1])}
        else:
            stack.extend(op.control_inputs + [tensor.op for tensor in op.inputs])
    if saves >= {variable.op.name for variable in before}:
        raise ValueError("The Saver of the scaffold was made before the variables of the optimizer, %r among them, and would not "
                         "save them. Make it by tf.train.Saver(defer_build=True)." % sorted(v.op.name for v in made)[0])


def _is_fed(features):
    """Tells whether features are made of placeholders, as those of a serving input receiver."""
    seen, stack = set(), [op_of(leaf) for leaf in tf.nest.flatten(features, expand_composites=True)]
    while stack:
        op = stack.pop()
        if op is None or op in seen or op.type.startswith("Iterator"):
            continue
        if op.type.startswith("Placeholder"):
            return True
        seen.add(op)
        stack.extend(tensor.op for tensor in op.inputs)
    return False


def _pair_of_metric(metric):
    """Returns (value, update) of what stands in `eval_metric_ops`: such a pair, or a Keras metric."""
    if hasattr(metric, "updates") and hasattr(metric, "result"):
        return metric.result(), tf.group(*metric.updates)
    # Of a resource variable an update may be the variable itself, to be read after it.
    return tuple(item if isinstance(item, tf.Operation) else tf.convert_to_tensor(item) for item in metric)


def _terms(loss):
    """Returns the tensors that a loss adds up."""
    found, stack = [], [loss]
    while stack:
        tensor = stack.pop()
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        varying = [each for each in inputs if tf.get_static_value(each) is None]
        if kind in _SUMS:
            stack.extend(inputs)
        elif len(varying) == 1 and (kind in _MULTIPLES or kind in QUOTIENTS and varying[0] is inputs[0]):
            stack.extend(varying)
        else:
            found.append(tensor)
    return found


def _name_without_tower(tower):
    """Lets tensors that the model function named at its top level be found by that name, as hooks of a program look for them."""
    graph, scope = tf.get_default_graph(), tower.name_scope
    there = {op.name for op in graph.get_operations()}
    with tf.name_scope(None), tf.control_dependencies(None), tf.device(tower.context.device):
        for op in tower.ops:
            name = op.name[len(scope):]
            if not op.name.startswith(scope) or "/" in name or len(op.outputs) != 1 or op.type in VARIABLES or name in there:
                continue
            if _is_given(name, op.type) and control_flow_of(op) is None and op.outputs[0].dtype.is_numpy_compatible:
                tf.identity(op.outputs[0], name)


def _is_given(name, kind):
    """Tells whether a name is the program's, not TensorFlow's default for a type of op."""
    plain = name.rstrip("0123456789").rstrip("_").lower()
    return plain != "identity" if kind == "Identity" else len(plain) < 3 or plain not in kind.lower()
