"""Which towers' update ops a training step runs, and in what order.

Ordinary batch norm in N towers makes N updates of one and the same moving average. Whose are kept is an argument here,
and where several are kept they run one tower after the other, so that the result is the same from run to run.
"""
import re
import warnings
from typing import List

import tensorflow.compat.v1 as tf

from towers.api.annotations import Operation
from towers.api.arguments import check
from towers.api.wording import TowersWarning
from towers.context import check_graph
from towers.graph.keras3 import CURE, made_by_keras3
from towers.graph.op_types import BRANCHES, EXITS, MERGES, READS
from towers.graph.ordering import read_after
from towers.graph.private import control_flow_now, control_flow_of, flows_around
from towers.graph.walk import ancestors, is_variable, op_of, writes_of, written_variable, written_variables
from towers.meeting.exchanges import stands_at_exchange
from towers.replicas import TOWERS, Towers
from towers.state.own_data import of_own_data

__all__ = ["chosen_update_ops", "collect_update_ops"]

POLICIES = ("first", "all", "last", "none")
_OF_TOWER = re.compile(r"(^|/)tower_\d+(_\d+)?/")  # of an earlier build's too
_CHOICES = MERGES | BRANCHES  # behind which stands the evaluation's value


def collect_update_ops(replicas: Towers, policy: str = "first") -> List[Operation]:
    """Returns the update ops that a training step has to run before gradients are averaged.

    Update ops are what the model function added to `tf.GraphKeys.UPDATE_OPS` in each tower. Those that were added with
    `current_tower().add_update(op, shared=True)`, as sync batch norm's, belong to all towers and are returned once under
    every policy but "none".

    - "first": tower 0's. "last": the last tower's. "none": none at all.
    - "all": every tower's, those of one variable in the order of the towers, each reading what the one before wrote: a moving
      average `m` with decay `d` and batch moments `b_i` becomes `m <- d m + (1 - d) b_i` for i = 0 ... N-1. To that end reads
      of the variable by updates that exist already are moved behind the earlier tower's write; a Session that ran those ops
      before must not be used on.

    Args:
      replicas: `Towers`.
      policy: "first", "all", "last" or "none".

    Returns:
      A list of operations and tensors.

    Raises:
      ValueError: for another policy; under another graph than the towers'; for an update op inside a tf.cond or tf.while_loop,
        where what runs it is not the result of that; under "all" where updates of one variable in several towers can't be
        ordered, because they stand inside a tf.cond, or an earlier tower's waits for a later one's.

    Warns:
      TowersWarning: where the model function made an op that writes a moving statistic and nothing will run it; where the
        collection holds an update that was made outside of towers, which is not returned; where only one
        of several towers' updates is kept, of its own part of the batch, and its loss reads what that writes.
    """
    if policy not in POLICIES:
        raise ValueError("The policy for update ops is one of %s, not %r."
                         % (", ".join(repr(p) for p in POLICIES), policy))
    check(TOWERS, replicas=replicas)
    check_graph(replicas[0].context.meetings.graph, "collect_update_ops")
    shared = replicas[0].context.shared_updates
    own = [tower.own_updates for tower in replicas]
    if policy == "none":
        return []
    chosen = {"first": own[:1], "last": own[-1:], "all": own}[policy]
    updates = [update for updates_of_tower in chosen for update in updates_of_tower] + list(shared)
    _check_control_flow(updates, [op for tower in replicas for op in tower.ops])
    _warn_of_unreached(replicas[0])
    _warn_of_no_towers(replicas)
    if policy != "all" and replicas[0].context.num_towers > 1:
        _warn_of_own_state(replicas[0 if policy == "first" else -1], policy)
    if policy == "all" and len(replicas) > 1:
        _order(replicas, own)
    if replicas.peers is not None:
        return _of_one_worker(replicas, updates[:len(updates) - len(shared)], policy) + list(shared)
    return updates


def chosen_update_ops(replicas, update_ops):
    """Returns what the argument `update_ops` names wherever it stands: those of a policy, or those of a list as they are."""
    if is_variable(update_ops):
        raise TypeError("update_ops is a policy or a list of operations, not the variable %r. Was it meant as global_step=?"
                        % update_ops.name)
    if isinstance(update_ops, (list, tuple)):
        for update in update_ops:
            if is_variable(update):
                raise TypeError("An update op is an operation or a tensor, not the variable %r. Were variables to train meant, "
                                "var_list=?" % update.name)
            if not isinstance(op_of(update), tf.Operation):
                raise TypeError("An update op is an operation or a tensor, not %r." % (update,))
        if replicas.peers is None:
            own = [[update for update in update_ops if op_of(update) in ops] for ops in (set(tower.ops) for tower in replicas)]
            if sum(map(bool, own)) > 1:
                _order(replicas, own)
            return list(update_ops)
        shared = set(map(id, replicas[0].context.shared_updates))
        own, of_all = ([update for update in update_ops if (id(update) in shared) == is_shared] for is_shared in (False, True))
        return _of_one_worker(replicas, own, "first") + of_all
    return collect_update_ops(replicas, update_ops)


def _of_one_worker(replicas, updates, policy):
    """Returns ops that run one worker's own updates there, and give the others what they wrote."""
    written = {variable.name: variable for op in ancestors(updates, within={op for tower in replicas for op in tower.ops})
               for variable in written_variables(op)}
    variables = {variable.op.name: variable for variable in tf.global_variables()}
    if policy == "all" and written:
        raise ValueError("The updates of several workers' towers can't run one after the other, and %r is updated by each tower "
                         "alone: use the policy 'first' or 'last', or convert_model." % min(written))
    losses = [tower.loss for tower in replicas if tower.loss is not None]
    return replicas.peers.update_alike(updates, [variables[name] for name in sorted(written) if name in variables], losses,
                                       is_of_last=policy == "last")


def _check_control_flow(updates, made):
    """Raises where running `updates` would wait for an update inside a tf.cond or tf.while_loop, not for the result of that.

    Args:
      updates: list of operations and tensors.
      made: list of operations, in which such updates are looked for.
    """
    graph, reached = tf.get_default_graph(), ancestors(updates)
    for op in map(op_of, updates):
        if op.graph is not graph or control_flow_of(op) is not control_flow_now(graph):
            _refuse(op)
    for op in made:
        if op in reached and op.type not in _RESULTS:
            for source in [tensor.op for tensor in op.inputs] + op.control_inputs:
                if control_flow_of(source) not in flows_around(op) + [None]:
                    _refuse(source)


_RESULTS = MERGES | EXITS


def _refuse(op):
    raise ValueError(
        "The update op %r stands inside a tf.cond or tf.while_loop. Ops that wait for it would silently not run, or fail: "
        "make the update outside and choose its value inside, or wait for the result of the tf.cond." % op.name)


def _order(replicas, updates):
    """Makes each tower's update of a variable read it, and write it, after the writes of the towers before."""
    # Writes that outputs wait for run in the order of the towers already, see `towers.state.tower_writes`.
    needed = ancestors([leaf for tower in replicas for leaf in tf.nest.flatten(tower.outputs) if hasattr(leaf, "op")])
    last_writers = {}  # name of a variable's op -> the ops that wrote it in the last tower so far
    for tower, updates_of_tower in zip(replicas, updates):
        own = set(tower.ops)
        ops = [op for op in ancestors(updates_of_tower) if op in own and op not in needed]
        writers = {}
        for op in ops:
            variable = written_variable(op)
            if written_variables(op) and (variable is None or control_flow_of(op) is not control_flow_now(op.graph)):
                raise ValueError("The updates of the towers can't run one after the other: %r stands inside a tf.cond. Use the "
                                 "policy 'first' or 'last'." % op.name)
            if variable is not None:
                writers.setdefault(variable.name, []).append(op)
        earlier = {name: last_writers[name] for name in writers if name in last_writers}
        before = ancestors([op for ops_of_variable in earlier.values() for op in ops_of_variable])
        for op in ops:
            if op in before and _reads(op, earlier):
                raise ValueError("The updates of the towers can't run one after the other: an earlier tower's update waits "
                                 "for %r. Use the policy 'first' or 'last'." % op.name)
            read_after(op, earlier, set(ops), tower.ops)
        last_writers.update(writers)


def _reads(op, variables):
    sources = [tensor.op for tensor in op.inputs]
    return any(source.name in variables or source.type in READS and source.inputs[0].op.name in variables for source in sources)


def _warn_of_unreached(tower):
    graph = tf.get_default_graph()
    variables = {v.op.name for v in tf.global_variables()} - {v.op.name for v in tf.trainable_variables()}
    initializers = {v.initializer for v in tf.global_variables() + tf.local_variables()}
    items = [item for key in graph.collections for item in graph.get_collection(key)] + tf.nest.flatten(tower.outputs)
    reached = ancestors([i for i in items if isinstance(op_of(i), tf.Operation) and op_of(i).graph is graph])
    writers = {}  # name of a variable -> the ops that write it
    for op in tower.ops:
        written = written_variable(op)
        if written is not None and written.name in variables and op not in initializers and not any(
                tensor.op.type in ("Placeholder", "RestoreV2") for tensor in op.inputs):  # an assignment of loaded weights
            writers.setdefault(written.name, []).append(op)
    # A Keras model calls its layers twice, once on placeholders: one of the two updates is enough.
    lost = [name for name, ops in writers.items() if not reached.intersection(ops)]
    if lost:
        cure = ("Keras layers keep theirs in layer.updates; call tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update) for each."
                if not any(made_by_keras3(op) for name in lost for op in writers[name]) else CURE)
        warnings.warn("The model function makes ops that update %s, and nothing runs them: they are not in "
                      "tf.GraphKeys.UPDATE_OPS. %s" % (", ".join(sorted(lost)), cure), TowersWarning, stacklevel=3)


def _warn_of_no_towers(replicas):
    """Warns of an update op that was made outside of towers, an average of all weights say, and that a step would leave out."""
    made = {op for tower in replicas for op in tower.ops}
    for update in tf.get_collection(tf.GraphKeys.UPDATE_OPS):
        op = op_of(update)
        if op is not None and op not in made and not _OF_TOWER.search(op.name):
            warnings.warn(
                "tf.GraphKeys.UPDATE_OPS holds %r, which no tower made, and the training step does not run it. Run it beside the "
                "step, or hand it in: update_ops=towers.collect_update_ops(replicas) + [update]." % op.name, TowersWarning,
                stacklevel=3)
            return


def _warn_of_own_state(tower, policy):
    """Warns where one tower's update alone, of its own part of the batch, writes what the loss reads."""
    made = set(tower.ops)
    run_anyway = ancestors([leaf for leaf in tf.nest.flatten(tower.outputs) if hasattr(leaf, "op")], within=made)
    of_own = of_own_data(tower.context)
    writes = {variable.name: op for op, variables in writes_of(ancestors(
        tower.own_updates, within=made) - run_anyway).items() for variable in variables if op in of_own}
    variable = _first_read(tower, writes) if writes else None
    if variable is not None:
        warnings.warn(
            "The update op %r writes the variable %r by what the tower computed of its own part of the batch, under the policy "
            "%r no other tower's update runs, and the loss reads it: the towers train otherwise than one tower on the whole "
            "batch would. Compute the update of all towers' data, by towers.all_reduce or towers.all_gather."
            % (writes[variable].name, variable, policy), TowersWarning, stacklevel=3)


def _first_read(tower, names):
    """Returns the name of one of some variables that the tower's loss is computed of, or None."""
    losses = [tower.loss] if tower.loss is not None else [
        leaf for leaf in tf.nest.flatten(tower.outputs) if tf.is_tensor(leaf) and leaf.shape.rank == 0]
    seen, stack = set(), [loss.op for loss in losses]
    while stack:
        op = stack.pop()
        if op.name in names:
            return op.name
        is_choice = op.type in _CHOICES or op.type.startswith("Select") and op.inputs[0].shape.rank == 0
        if op not in seen and not is_choice and op not in tower.context.meetings.stand_ins and not stands_at_exchange(op):
            stack.extend(tensor.op for tensor in op.inputs)
        seen.add(op)
    return None
