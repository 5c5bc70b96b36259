"""The training steps that model functions asked for by `towers.TowerOptimizer`, built once for all towers.

Every loss is differentiated and averaged over towers before any step of the same train op is applied, unless the model function
computes it after a step. The op that stands for a step then waits for the real one, in every tower. A train op of one step may
have transforms that hold it back: these take the place of both, the averaging's end and the step.
"""
import tensorflow.compat.v1 as tf

from towers.estimators.gradient_forms import DENSE, NONE, SPARSE
from towers.graph.private import control_flow_of, rewire, run_after
from towers.graph.walk import ancestors, descendants, op_of
from towers.meeting.slices import ops_of
from towers.state.own_data import of_own_data
from towers.state.update_ops import collect_update_ops
from towers.training.gradients import average_gradients, scaled_gradients
from towers.training.transforms import Step, Transform, begin, mapped

__all__ = ["build_train_op", "leaves_of_group"]


def build_train_op(replicas, asked, train_ops, update_ops, transforms):
    """Builds the steps that the towers asked for, and the op that runs those of them that the model functions' train ops run.

    Args:
      replicas: `Towers`, whose outputs hold, by name, "losses", a list of the loss of each pass; "waits", a list of what each
        step waits for that writes variables, besides update ops; and "after", a list of what else of that kind the train op runs.
      asked: list over towers of `towers.estimators.tower_optimizer.Asked`.
      train_ops: list over towers of what the model functions returned as their train op.
      update_ops: "first", "all", "last" or "none", see `collect_update_ops`. Under "none" those of tower 0 run that its step or
        train op waits for.
      transforms: functions of a list of averaged (gradient, variable) that return such a list, and `Transform`s.

    Returns:
      An operation.

    Raises:
      ValueError: where gradients are of another form than a model function was told; where two steps of a train op train one
        variable in no order; where an optimizer's arguments are made of one tower's own data; for a `Transform` where there is
        more than one step, or where the model function was handed gradients that it makes in some steps only.
    """
    build = _Steps(replicas, asked, train_ops, collect_update_ops(replicas, update_ops), transforms)
    if update_ops == "none":
        build.updates = build.updates_waited_for(train_ops[0])
    build.check_steps()
    for number in range(len(build.first.passes)):
        build.average(number)
    for number in range(len(build.first.steps)):
        build.apply(number)
    return build.train_op()


def leaves_of_group(items, steps):
    """Returns the ops that a train op runs, in the order in which they were made.

    Groups are taken apart, what stands for a step is left whole.
    """
    # TensorFlow keeps no order among control inputs: what it hands out follows addresses in memory, another in every tower.
    found, seen, stack = set(), set(), [op_of(item) for item in items]
    while stack:
        op = stack.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type == "NoOp" and op not in steps:
            stack.extend(op.control_inputs)
        else:
            found.add(op)
    return [op for op in tf.get_default_graph().get_operations() if op in found] if len(found) > 1 else list(found)


class _Steps:
    """The passes and steps of one model function, as they are carried out."""

    def __init__(self, replicas, asked, train_ops, updates, transforms):
        self._replicas, self._asked, self._transforms = replicas, asked, transforms
        self.first, self.updates, self._waited = asked[0], updates, set()
        self._averaged = {}  # number of a pass -> list of averaged (gradient, variable)
        self._finish = None  # of transforms that hold back the step, see `towers.training.transforms.begin`
        self._holding = ", ".join("towers." + each.name for each in transforms if isinstance(each, Transform))
        dones = [[of_tower.steps[i].done for of_tower in asked] for i in range(len(self.first.steps))]
        self._behind = [descendants(of_step) for of_step in dones]  # what runs after a step, by the model functions' account
        stand_ins = [op for of_tower in asked for of_pass in of_tower.passes for op in ops_of(of_pass.gradients or ())]
        self._of_gradients = descendants(stand_ins)  # what is made of averaged gradients, in the towers
        reached = ancestors([op_of(train_ops[0])], within=set(replicas[0].ops) | {op_of(train_ops[0])})
        self._runs = [i for i, step in enumerate(self.first.steps) if step.done in reached]
        self._dones = {done for of_step in dones for done in of_step}

    def updates_waited_for(self, train_op):
        """Returns the update ops of tower 0 that its train op runs or its steps wait for."""
        own = {op_of(update) for update in self._replicas[0].update_ops}
        items = [train_op] + [op for step in self.first.steps for op in step.waits]
        return [op for op in leaves_of_group(items, self._dones) if op in own]

    def _after(self, item):
        """Returns the numbers of the steps that an op or tensor comes after."""
        return {i for i, behind in enumerate(self._behind) if op_of(item) in behind}

    def _after_losses(self, number):
        return {i for tower in self._replicas for i in self._after(tower.outputs["losses"][number])}

    def check_steps(self):
        """Refuses two steps of one train op that train the same variable in no order, and two that are held back."""
        if self._holding and len(self.first.passes) + len(self.first.steps) > 2:
            raise ValueError(
                "replicate_model_fn: %s among the transforms hold back a step, and the model function asks its TowerOptimizers "
                "for %d steps by %d losses, where one is known: make it one, or train by towers.minimize, which takes "
                "transforms for each step." % (self._holding, len(self.first.steps), len(self.first.passes)))
        for later in self._runs:
            step, trained = self.first.steps[later], self._trained(later)
            before = {i for op in step.waits for i in self._after(op)}
            before |= {i for number in step.passes for i in self._after_losses(number)}
            for earlier in self._runs:
                both = [name for name in self._trained(earlier) if name in trained]
                if earlier < later and both and earlier not in before:
                    raise ValueError(
                        "Two steps of a TowerOptimizer, %r and %r, train the variable %r, and nothing says which comes first. "
                        "Make the second within `with tf.control_dependencies([first]):`, or add up the losses."
                        % (self.first.steps[earlier].done.name, step.done.name, both[0]))

    def _trained(self, number):
        step = self.first.steps[number]
        variables = [v for _, v in step.gradients] if step.gradients is not None else self.first.passes[step.passes[0]].variables
        return [v.op.name for v in variables]

    def average(self, number):
        """Differentiates the loss of a pass in every tower, and averages the gradients."""
        made = self.first.passes[number]
        losses = [tower.outputs["losses"][number] for tower in self._replicas]
        may_wait = self._after_losses(number)
        steps = [i for i, step in enumerate(self.first.steps) if number in step.passes]
        waits = [op for i in steps for op in self._waits(i) if self._after(op) <= may_wait and op not in self._of_gradients]
        updates = [update for update in self.updates
                   if self._after(update) <= may_wait and op_of(update) not in self._of_gradients]
        self._waited.update(map(op_of, updates))
        factors = []
        if self._holding:
            factors, self._finish = begin(self._transforms, Step(self._replicas, updates))
        tower_grads = scaled_gradients(self._replicas, made.optimizer, made.variables, losses, factors)
        grads = average_gradients(self._replicas, tower_grads, updates + waits, losses)
        self._averaged[number] = grads = grads if self._holding else mapped(self._transforms, grads)
        if made.gradients is not None and not self._holding:
            self._wire(number, grads)

    def _waits(self, number):
        """Returns what of all towers a step waits for, besides update ops and other steps."""
        return [op for tower, asked in zip(self._replicas, self._asked)
                for op in tower.outputs["waits"][number] + asked.quiet_waits[number]]

    def _wire(self, number, grads):
        """Gives the stand-ins of every tower the averaged gradients."""
        by_name = {variable.op.name: gradient for gradient, variable in grads}
        for asked in self._asked:
            made = asked.passes[number]
            for stand_in, variable in zip(made.gradients, made.variables):
                gradient = by_name.get(variable.op.name)
                if _form(stand_in) != _form(gradient):
                    raise ValueError(
                        "The gradient of %r by the loss %r turns out to be %s, and the model function was told that it is %s. "
                        "Hand compute_gradients a var_list of what the loss depends on, or use minimize, and transforms= of "
                        "towers.replicate_model_fn." % (variable.op.name, made.loss.name, _form(gradient), _form(stand_in)))
                if isinstance(gradient, tf.IndexedSlices):
                    rewire(stand_in.values.op, 0, gradient.values)
                    rewire(stand_in.indices.op, 0, tf.cast(gradient.indices, tf.int64))
                elif gradient is not None:
                    rewire(stand_in.op, 0, gradient)

    def apply(self, number):
        """Applies the gradients of a step, and lets what stands for it in the towers wait for that."""
        step = self.first.steps[number]
        grads = self._averaged[step.passes[0]] if step.gradients is None else step.gradients
        first_op = len(tf.get_default_graph().get_operations())
        if self._holding:
            averaged = self._averaged[step.passes[0]]
            applied = self._finish(averaged, lambda transformed: self._apply_held_back(step, transformed))
            handed_in = ops_of(gradient for gradient, _ in averaged + grads) + [op_of(self._replicas.weight)]
        else:
            with tf.control_dependencies(self._before(number, grads)):
                applied = _applied(step, grads)
            handed_in = ops_of(gradient for gradient, _ in grads)
        self._check_arguments(step, set(handed_in), first_op)
        for asked in self._asked:
            run_after(asked.steps[number].done, [op_of(applied)])

    def _before(self, number, grads):
        """Returns the ops that the step that applies `grads` waits for."""
        step = self.first.steps[number]
        waits = ops_of(gradient for gradient, _ in grads)
        for other, averaged in self._averaged.items():
            uses = other in step.passes
            together = number in self._runs and any(other in self.first.steps[i].passes for i in self._runs)
            if uses or together and number not in self._after_losses(other):
                waits += ops_of(gradient for gradient, _ in averaged)
        waits += self._waits_behind(number)
        return waits + [op for op in leaves_of_group(step.waits, self._dones) if op in self._dones]

    def _waits_behind(self, number):
        """Returns what a step waits for that can't run before gradients are averaged: it is made of them, or behind a step."""
        waits = [op for op in self._waits(number) if self._after(op) or op in self._of_gradients]
        asked_for = set(leaves_of_group(self.first.steps[number].waits, self._dones))
        return waits + [op_of(update) for update in self.updates
                        if op_of(update) in self._of_gradients and op_of(update) in asked_for]

    def _apply_held_back(self, step, grads):
        """Applies the gradients of the one step where its transforms let it happen, in a tf.cond of theirs maybe."""
        if step.gradients is not None:
            with tf.init_scope():
                self._check_outside(grads)
                self._wire(step.passes[0], grads)
                gradients, variables = zip(*step.gradients)
                grads = list(zip(tf.tuple(gradients, control_inputs=self._waits_behind(0)), variables))
        gradients, variables = zip(*grads)
        return _applied(step, zip(tf.tuple(gradients), variables))  # none is applied before all are there

    def _check_outside(self, grads):
        """Refuses gradients that are made in a tf.cond only, where what the model function does to them stands outside."""
        graph = tf.get_default_graph()
        for op in ops_of(gradient for gradient, _ in grads):
            if op.graph is not graph or control_flow_of(op) is not None:
                raise ValueError(
                    "replicate_model_fn: the model function takes gradients by compute_gradients, in every step, and transforms "
                    "(%s) make them only in the steps that train. Let it call minimize of the TowerOptimizer, and hand what it "
                    "does to gradients in as transforms, behind these." % self._holding)

    def _check_arguments(self, step, handed_in, first_op):
        """Refuses an optimizer whose learning rate, say, is made of tower 0's own data."""
        tower = self._replicas[0]
        made = tf.get_default_graph().get_operations()[first_op:]
        left_out = handed_in.union(made)
        taken = [op for op in dict.fromkeys(tensor.op for op in made for tensor in op.inputs) if op not in left_out]
        of_own = of_own_data(tower.context, stop=handed_in)
        own = next((op.name for op in taken if op in of_own), None)
        if own is not None:
            raise ValueError(
                "The optimizer %s is given a learning rate or another argument (%r) that is made of tower 0's own part of the "
                "batch: make it of all towers' by towers.all_reduce." % (type(step.optimizer).__name__, own))

    def train_op(self):
        """Returns the op that runs all that the model functions' train ops run."""
        steps = [self.first.steps[i].done for i in self._runs]
        left = [update for update in self.updates if op_of(update) not in self._waited]
        after = [op for tower, asked in zip(self._replicas, self._asked) for op in tower.outputs["after"] + asked.quiet_after]
        return tf.group(*(steps + left + after), name="train_op")


def _form(gradient):
    return NONE if gradient is None else SPARSE if isinstance(gradient, tf.IndexedSlices) else DENSE


def _applied(step, grads):
    """Lets the optimizer of a step apply gradients, in the scopes of the model function's call."""
    scope = step.variable_scope
    scope = tf.VariableScope(reuse=scope.reuse, name=scope.name, use_resource=scope.use_resource)
    with tf.variable_scope(scope, auxiliary_name_scope=False), tf.name_scope(step.name_scope or None):
        return step.optimizer.apply_gradients(grads, step.global_step, step.name)
