"""An optimizer for model functions that hold one, as Estimator's do.

Outside of towers it is the optimizer that it wraps. In a tower it only notes what it is asked for, and returns what stands for
that: an op for the step, and for gradients those of the whole batch, averaged over towers. When all towers are built
`towers.estimators.steps` carries it out, once, by tower 0's account. So what a model function does between
`compute_gradients` and `apply_gradients`, clipping say, it does to the averaged gradients, and whatever waits for its train op
waits for the real one.
"""
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Union

import tensorflow.compat.v1 as tf

from towers.api.annotations import GradsAndVars, Operation, Optimizer, Tensor, Variable
from towers.context import current_tower, outside_of_tower
from towers.estimators.gradient_forms import DENSE, NONE, gradient_forms
from towers.graph.private import control_flow_now
from towers.graph.walk import ancestors, descendants, op_of
from towers.meeting.slices import ops_of
from towers.state.own_data import of_own_data

__all__ = ["Asked", "TowerOptimizer"]


class Pass(NamedTuple):
    """A loss that was to be differentiated.

    Attributes:
      optimizer: `tf.train.Optimizer`.
      loss: scalar tensor.
      variables: list of variables.
      gradients: list over variables of what stands for the averaged gradient: a tensor, `tf.IndexedSlices`, or None; None in
        place of the list where `minimize` was called, and nobody saw them.
    """
    optimizer: Any
    loss: Any
    variables: list
    gradients: Any


class Step(NamedTuple):
    """Gradients that were to be applied.

    Attributes:
      optimizer: `tf.train.Optimizer`.
      passes: list of int, the numbers of the passes that the gradients come of.
      gradients: list of (gradient, variable); None where `minimize` was called.
      global_step: variable or None.
      name: str or None.
      done: the op that stands for the step.
      waits: list of the ops that the step was to wait for.
      name_scope: str, the name scope of the call without the tower, ending in "/", or "".
      variable_scope: `tf.VariableScope` of the call.
    """
    optimizer: Any
    passes: list
    gradients: Any
    global_step: Any
    name: Any
    done: Any
    waits: list
    name_scope: str
    variable_scope: Any


class Asked:
    """What optimizers were asked for in one tower.

    Attributes:
      passes: list of `Pass`.
      steps: list of `Step`.
      quiet_waits: list over steps of lists of what they wait for that writes no variable, an assertion say.
      quiet_after: list of such ops that the train op runs besides.
    """

    def __init__(self):
        self.passes, self.steps = [], []
        self.quiet_waits, self.quiet_after = [], []

    def add_pass(self, optimizer, loss, var_list, grad_loss, seen):
        """Notes a loss and returns the pass's number; `seen` tells whether the model function gets its gradients."""
        if callable(loss) or not tf.is_tensor(loss):
            raise TypeError("TowerOptimizer takes a loss that is a tensor, not %r." % (loss,))
        if grad_loss is not None:
            raise ValueError("TowerOptimizer takes no grad_loss in a tower: multiply the loss %r by it." % loss.name)
        variables = tf.nest.flatten(var_list) if var_list is not None else (
            tf.trainable_variables() + tf.get_collection(tf.GraphKeys.TRAINABLE_RESOURCE_VARIABLES))
        if not variables:
            raise ValueError("TowerOptimizer: there are no variables to train by the loss %r." % loss.name)
        gradients = _stand_ins(loss, variables) if seen else None
        self.passes.append(Pass(optimizer, loss, variables, gradients))
        return len(self.passes) - 1

    def add_step(self, optimizer, passes, gradients, global_step, name):
        """Notes a step and returns the op that stands for it."""
        graph, tower = tf.get_default_graph(), current_tower()
        if graph is not tower.meetings.graph or control_flow_now(graph) is not None:
            raise ValueError("TowerOptimizer: the train op is made inside a tf.cond, tf.while_loop or tf.function, where towers "
                             "can't meet. Make it outside of that.")
        waits = list(tf.no_op("waits_of_step").control_inputs)
        with tf.control_dependencies(None):
            done = tf.no_op(name or "train_step")
        scope = graph.get_name_scope()
        scope = outside_of_tower(scope + "/", tower.name_scope) if scope else ""
        self.steps.append(Step(optimizer, passes, gradients, global_step, name, done, waits, scope, tf.get_variable_scope()))
        return done

    def steps_and_before(self, updates):
        """Returns for each step the op that stands for it, and the set of ops that run before it.

        Args:
          updates: list of the tower's update ops: those that come after no step run before all of them.
        """
        before, behind = {}, descendants([step.done for step in self.steps])
        updates = [update for update in updates if op_of(update) not in behind]
        for step in self.steps:
            losses = [self.passes[number].loss for number in step.passes]
            first = step.waits + losses + ops_of(gradient for gradient, _ in step.gradients or ())
            before[step.done] = ancestors(first + updates)
            before[step.done].update(*[before[done] for done in before if done in before[step.done]])
        return list(before.items())

    def passes_of(self, grads):
        """Returns the numbers of the passes that gradients, a list of (gradient, variable), are made of.

        Raises:
          ValueError: where they are made of anything that is one tower's own.
        """
        stand_ins = {op: number for number, of_pass in enumerate(self.passes) for op in ops_of(of_pass.gradients or ())}
        found, of_own = set(), of_own_data(current_tower(), stop=stand_ins)
        for gradient, variable in grads:
            ops = ops_of([gradient])
            if of_own.intersection(ops):
                raise ValueError(
                    "TowerOptimizer.apply_gradients: the gradient of %r (%r) is made of the tower's own part of the batch, so it "
                    "is no gradient of the whole batch. Take gradients by compute_gradients of the TowerOptimizer, not by "
                    "tf.gradients, and change them by variables, constants, or what all towers have in common."
                    % (variable.op.name, ops[0].name))
            found.update(_reached(ops, stand_ins))
        if not found:
            raise ValueError("TowerOptimizer.apply_gradients was given no gradient that compute_gradients of a TowerOptimizer "
                             "returned in this tower: it got %r." % (grads,))
        return sorted(found)


class TowerOptimizer(tf.train.Optimizer):
    """Wraps the optimizer of a model function for `towers.replicate_model_fn`, as `tf.contrib.estimator.TowerOptimizer` did.

    Without `replicate_model_fn` it is the optimizer itself, so one model function serves both. In a tower

    - `minimize` returns an op that stands for the training step of all towers;
    - `compute_gradients` returns what stands for the gradients of the whole batch. They may be clipped, scaled, or summarized
      before `apply_gradients`. A gradient is a tensor, or `tf.IndexedSlices` where the variable is read by `tf.gather` or
      `tf.nn.embedding_lookup` alone, or None where the loss does not depend on the variable.
    - Arguments that only say how gradients are computed (`gate_gradients`, `aggregation_method`,
      `colocate_gradients_with_ops`) are left to towers.
    - Slots and other variables of the optimizer are made after the model function has returned.

    Args:
      optimizer_or_optimizer_fn: a `tf.train.Optimizer`, or a function without arguments that makes one when it is needed.

    Raises:
      TypeError: if it is neither.

    Warns:
      TowersWarning: in one of several towers, for an optimizer with a `compute_gradients` of its own: one that clips there would
        clip each tower's gradients. Wrap the other way round, `clip_gradients_by_norm(TowerOptimizer(optimizer), 5.0)`.

    Example:

        optimizer = towers.TowerOptimizer(tf.train.MomentumOptimizer(0.1, 0.9))
        train_op = optimizer.minimize(loss, tf.train.get_global_step())
    """

    def __init__(self, optimizer_or_optimizer_fn: Union[Optimizer, Callable[[], Optimizer]]) -> None:
        super(TowerOptimizer, self).__init__(use_locking=False, name="TowerOptimizer")
        is_optimizer = isinstance(optimizer_or_optimizer_fn, tf.train.Optimizer)
        if not is_optimizer and (not callable(optimizer_or_optimizer_fn) or hasattr(optimizer_or_optimizer_fn, "get_config")):
            raise TypeError("TowerOptimizer wraps a tf.train.Optimizer, or a function that makes one, not %r."
                            % (optimizer_or_optimizer_fn,))
        self._optimizer = optimizer_or_optimizer_fn

    def minimize(self, loss: Tensor, global_step: Optional[Variable] = None, var_list: Optional[Sequence[Variable]] = None,
                 gate_gradients: int = tf.train.Optimizer.GATE_OP, aggregation_method: Optional[int] = None,
                 colocate_gradients_with_ops: bool = False, name: Optional[str] = None,
                 grad_loss: Optional[Tensor] = None) -> Operation:
        """As `tf.train.Optimizer.minimize`; in a tower it returns an op that stands for the step of all towers."""
        asked, optimizer = _asked("minimize"), self._wrapped()
        if asked is None:
            return optimizer.minimize(loss, global_step, var_list, gate_gradients, aggregation_method,
                                      colocate_gradients_with_ops, name, grad_loss)
        number = asked.add_pass(optimizer, loss, var_list, grad_loss, seen=False)
        return asked.add_step(optimizer, [number], None, global_step, name)

    def compute_gradients(self, loss: Tensor, var_list: Optional[Sequence[Variable]] = None,
                          gate_gradients: int = tf.train.Optimizer.GATE_OP, aggregation_method: Optional[int] = None,
                          colocate_gradients_with_ops: bool = False, grad_loss: Optional[Tensor] = None) -> GradsAndVars:
        """As `tf.train.Optimizer.compute_gradients`; in a tower the gradients are those of the whole batch."""
        asked, optimizer = _asked("compute_gradients"), self._wrapped()
        if asked is None:
            return optimizer.compute_gradients(loss, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops,
                                               grad_loss)
        made = asked.passes[asked.add_pass(optimizer, loss, var_list, grad_loss, seen=True)]
        return list(zip(made.gradients, made.variables))

    def apply_gradients(self, grads_and_vars: GradsAndVars, global_step: Optional[Variable] = None,
                        name: Optional[str] = None) -> Operation:
        """As `tf.train.Optimizer.apply_gradients`; in a tower it returns an op that stands for the step of all towers."""
        asked, optimizer = _asked("apply_gradients"), self._wrapped()
        if asked is None:
            return optimizer.apply_gradients(grads_and_vars, global_step, name)
        grads = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        return asked.add_step(optimizer, asked.passes_of(grads), grads, global_step, name)

    def get_slot(self, var: Variable, name: str) -> Optional[Variable]:
        """As `tf.train.Optimizer.get_slot`, of the wrapped optimizer."""
        return self._with_variables("get_slot").get_slot(var, name)

    def get_slot_names(self) -> List[str]:
        """As `tf.train.Optimizer.get_slot_names`, of the wrapped optimizer."""
        return self._with_variables("get_slot_names").get_slot_names()

    def variables(self) -> List[Variable]:
        """As `tf.train.Optimizer.variables`, of the wrapped optimizer."""
        return self._with_variables("variables").variables()

    def get_name(self) -> str:
        """As `tf.train.Optimizer.get_name`, of the wrapped optimizer."""
        return self._wrapped().get_name()

    def _wrapped(self):
        if not isinstance(self._optimizer, tf.train.Optimizer):
            made = self._optimizer()
            if not isinstance(made, tf.train.Optimizer):
                raise TypeError("The function that TowerOptimizer was given has to make a tf.train.Optimizer, not %r." % (made,))
            self._optimizer = made
        return self._optimizer

    def _with_variables(self, what):
        if current_tower() is not None:
            raise ValueError("TowerOptimizer.%s: in a model function the optimizer has no variables yet, since they are made "
                             "once all towers are built. Ask for them in a hook's `begin`." % what)
        return self._wrapped()


def _asked(what):
    """Returns the present tower's `Asked`, None outside of towers; refuses towers in which nobody carries it out."""
    tower = current_tower()
    if tower is not None and tower.asked is None:
        raise RuntimeError("TowerOptimizer.%s is called in a model function that towers.replicate_model_fn did not build, so "
                           "nobody would carry it out: return the loss, and hand the optimizer to towers.minimize." % what)
    return None if tower is None else tower.asked


def _stand_ins(loss, variables):
    """Returns what stands for the averaged gradients of a loss, to be wired when they exist."""
    found = []
    with tf.name_scope("averaged_gradients"), tf.control_dependencies(None):
        for variable, form in zip(variables, gradient_forms(loss, variables)):
            dtype, shape = variable.dtype.base_dtype, variable.shape
            if form == NONE:
                found.append(None)
            elif form == DENSE:
                found.append(_stand_in(dtype, shape, variable))
            else:
                rows = tf.TensorShape([None]).concatenate(shape[1:])
                whole = tf.constant(shape.as_list(), tf.int64) if shape.is_fully_defined() else None
                indices = _stand_in(tf.int64, tf.TensorShape([None]), variable)
                found.append(tf.IndexedSlices(_stand_in(dtype, rows, variable), indices, whole))
    return found


def _stand_in(dtype, shape, variable):
    # No plain placeholder: tf_syncbn.convert_model would take it for data of the tower. Unwired it is not a number.
    name = variable.op.name + "/not_yet_computed"
    value = tf.zeros([], dtype) if dtype.is_integer else tf.constant(float("nan"), dtype)
    filled = tf.fill([size or 1 for size in shape.as_list()] if shape.rank is not None else [], value, name + "/value")
    return tf.identity(tf.placeholder_with_default(filled, shape, name), name=variable.op.name)


def _reached(ops, stand_ins):
    """Returns the numbers of the passes whose stand-ins `ops` take."""
    found, seen, stack = set(), set(), list(ops)
    while stack:
        op = stack.pop()
        if op in stand_ins:
            found.add(stand_ins[op])
        elif op not in seen:
            seen.add(op)
            stack.extend(tensor.op for tensor in op.inputs)
    return found
