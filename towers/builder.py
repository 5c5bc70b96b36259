"""Builds a model function once for each device, as towers that share variables and train as one.

The model function stays as it is: it gets its share of the batch and returns its loss. What belongs to a tower is what
the call of the model function made, never what matches a name prefix.
"""
import os
import re
from typing import Any, List, Optional, Sequence, Union

import numpy as np
import tensorflow.compat.v1 as tf

from towers.api.annotations import ConfigProto, ModelFn, Tensor, VariablePlacement
from towers.api.arguments import DEVICE, FLAG, FUNCTION, check, optional
from towers.batches.batch import PerTower, check_batch, known_sizes, split_batch
from towers.batches.empty_batches import survive_empty_batches
from towers.batches.input import is_input, next_batches
from towers.batches.shares import by_name, checked_loss, count, scalar_loss, shares
from towers.context import TowerContext, current_tower, enter_tower
from towers.devices.graph_collections import TowerCollections
from towers.devices.placement import (HOST, check_device, check_devices, find_devices, in_turn, name_the_cure, on_machine_of,
                                      session_config, warn_of_absent_devices)
from towers.devices.sharing import VariableSharing
from towers.devices.variable_copies import read_once
from towers.devices.variable_placement import TowerDevices, placement_of, warn_of_other_devices
from towers.graph.draws import warn_of_same_draws
from towers.graph.inner_training import refuse_training
from towers.graph.keras3 import explained
from towers.graph.private import take_in
from towers.meeting.meetings import Meetings
from towers.meeting.turns import TowerMismatchError
from towers.replicas import Tower, Towers
from towers.sharding.own_examples import warn_of_own_examples
from towers.state.likeness import check_alike
from towers.state.tower_writes import settle_state
from towers.workers.connection import Workers

_OTHER_ARGUMENTS = re.compile(r"\(\) (missing|takes|got) .*argument")  # of Python's words where a function is called

__all__ = ["TowerBuilder"]


class TowerBuilder:
    """Replicates a model function across devices.

    Args:
      devices: list of str, one tower each, a device as often as wanted: `["/gpu:0", "/gpu:1"]`. None is every local GPU,
        or the CPU where there is none, with a warning.
      aggregation_device: str, where towers meet and gradients are averaged. None is the first tower's device.
      variable_placement: where variables stand that the model function puts nowhere itself.

        - "host": in the CPU's memory. "first": on the first tower's device.
        - "replicated": on the first tower's device, and each tower reads them once a step, into a copy on its own device.
        - "round_robin": on the towers' devices in turn. "balanced": each on the one that holds the fewest bytes so far.
        - A function of a variable's op that returns a device's name.
      num_towers: int, so many towers are put on the devices in turn; None is one on each. On however many devices the same
        towers train to the same bits.
      workers: from `towers.workers.connect`, where several processes train together. The towers are then part of one ring with
        those of the other workers, which have to build the same; see `towers.workers`. None is this process alone.

    Attributes:
      devices: list of str, each tower's device.
      aggregation_device: str.

    Raises:
      TypeError, ValueError: for devices, a placement or a number that are none, or more devices than towers.

    Warns:
      TowersWarning: if `devices` is None and there is no GPU, or if it names GPUs that this machine lacks, which TensorFlow would
        replace by the CPU in silence. Devices of a job or task are not looked for.

    Every Session of the graph has to be made by `builder.session_config()`: another one lacks the devices that
    CPU towers stand on, and TensorFlow's error ("Cannot assign a device for operation") then names an op called
    `make_the_Session_by_towers.session_config`, which the build adds for this.

    Example:

        builder = towers.TowerBuilder(devices=["/gpu:0", "/gpu:1"])
        replicas = builder.build(model_fn, (images, labels))
        train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
    """

    def __init__(self, devices: Optional[Sequence[str]] = None, aggregation_device: Optional[str] = None,
                 variable_placement: VariablePlacement = "host", num_towers: Optional[int] = None,
                 workers: Optional[Workers] = None) -> None:
        check(optional(DEVICE), aggregation_device=aggregation_device)
        self.devices: List[str] = in_turn(find_devices() if devices is None else check_devices(devices), num_towers)
        self.aggregation_device: str = check_device(aggregation_device or self.devices[0])
        self.place_variable = placement_of(variable_placement, self.devices)
        self._is_replicated = variable_placement == "replicated"
        warn_of_absent_devices(devices, self.devices + [self.aggregation_device])
        self.workers: Optional[Workers] = _check_workers(workers)

    def session_config(self, config: Optional[ConfigProto] = None) -> ConfigProto:
        """Returns the `ConfigProto` of sessions in which the towers run: `towers.session_config(builder.devices, config)`.

        With several workers it is that of this worker's sessions too, see `Workers.session_config`.

        Args:
          config: optional `tf.ConfigProto` to start from; it is copied, not changed.
        """
        result = session_config(self.devices, config)
        return result if self.workers is None else self.workers.session_config(result)

    def build(self, model_fn: ModelFn, batch: Any, training: Union[bool, Tensor] = True, alike: bool = True) -> Towers:
        """Builds one tower for each device.

        Variables are made in tower 0 and used by all; their names have no tower in them, so checkpoints of a model built
        without towers load. Ops stand in the name scopes `tower_0`, `tower_1`, and so on. Collections: see
        `towers.devices.graph_collections`; of summaries tower 0's are kept. Variables that the surrounding variable scope reuses
        are reused, so a second build under `reuse=True` shares those of the first that `tf.get_variable` made. What `tf.Variable`
        makes, it makes anew, as TensorFlow does without towers.

        Args:
          model_fn: a function of the tower's batch, which a tuple reaches as positional arguments, anything else as the one
            argument. It returns

            - its scalar loss, a mean over its examples;
            - or a dict or NamedTuple with a "loss" and anything else. A "weight" in it, a scalar, replaces the number of examples
              as the tower's share: the number of valid pixels, say. It is finite and 0 or more, else its tower is named, now or
              when it runs. Where it is 0 in a tower that has examples, the loss has to be finite (`tf.div_no_nan`): the
              derivative of 0 / 0 is NaN, and would reach every tower that this one meets. That fails by the tower's name too;
            - or any structure of tensors, if there is nothing to train.
          batch: a nested structure of tensors or arrays, split along axis 0, scalars given to all, sparse and ragged tensors by
            their rows; or a `tf.data` data set or iterator of such batches, see `towers.batches.input`; or `towers.PerTower`; or
            a function of the tower's `TowerContext` that makes its batch, on the host's CPU.
          training: bool or scalar bool tensor, for layers that ask `current_tower().training`.
          alike: whether to hold the towers against tower 0, op by op, see `towers.state.likeness`. False leaves out that check,
            for model functions that compute other things in other towers; `towers.may_differ` says so of some ops alone.

        Returns:
          `Towers`.

        Raises:
          RuntimeError: under eager execution, inside a tower, or where the model function fails in Keras 3.
          TypeError, ValueError: for a model function or batch that can't be used, one that applies gradients itself, or a loss
            that is no scalar.
          TowerMismatchError: (a ValueError) where towers differ in exchanges, variables or outputs, or in what they compute.

        Warns:
          TowersWarning: where the model function puts ops on another tower's device, or writes state by a tower's own data; and
            once, of what its loss takes of a tower's own examples where one tower would take the whole batch.

        Example:

            replicas = builder.build(model_fn, (images, labels))
            with tf.variable_scope(tf.get_variable_scope(), reuse=True):
                evaluated = builder.build(model_fn, (images, labels), training=False).merged()
        """
        check(FUNCTION, model_fn=model_fn)
        check(FLAG, alike=alike)
        _check_call()
        name_the_cure(self.devices + [self.aggregation_device])
        batches = self._divide(batch)
        build = _Build(self, training)
        with build.collections.restored_if_it_fails():
            build.note_sizes(batches)
            towers = [build.add_tower(model_fn, index, batch) for index, batch in enumerate(batches)]
            _check_outputs(towers)
            weights, total = shares([tower.weight for tower in towers], self.aggregation_device, build.peers)
            if build.peers is not None:
                build.peers.check_alike("exchanges", build.described_exchanges())
                build.peers.warn_of_same_draws(towers)
            warn_of_same_draws(towers)
            losses = [tower.loss for tower in towers]
            if losses[0] is not None and not towers[0].context.placements:  # no whole-batch model
                warn_of_own_examples(losses, towers, is_divided=callable(batch) or isinstance(batch, PerTower))
            if alike and len(towers) > 1:
                check_alike(towers, build.arguments, build.contributions())
            towers = settle_state(towers, build.arguments, build.added)
            if self._is_replicated:
                read_once(towers)
        return Towers([tower._replace(weight=weight) for tower, weight in zip(towers, weights)], self.aggregation_device, total,
                      build.added[0].get(tf.GraphKeys.SUMMARIES, ()))

    def _divide(self, batch):
        num_towers = len(self.devices)
        if is_input(batch):
            return next_batches(batch, num_towers)
        if callable(batch):
            return [batch] * num_towers
        if not isinstance(batch, PerTower):
            with tf.device(on_machine_of(self.devices[0])):
                return split_batch(batch, num_towers)
        if len(batch.batches) != num_towers:
            raise ValueError("PerTower holds %d batches for %d towers: one for each is needed."
                             % (len(batch.batches), num_towers))
        return batch.batches


class _Build:
    """What the towers of one call of `TowerBuilder.build` have in common."""

    def __init__(self, builder, training):
        self._builder, self._training = builder, training
        self.peers = None if builder.workers is None else builder.workers.peers(len(builder.devices))
        self._meetings = Meetings(builder.devices, builder.aggregation_device, self.peers)
        self.collections, self._shared_updates = TowerCollections(), []
        self._sharing = VariableSharing(self.collections.reveal)
        self.arguments = []  # what each tower's model function was called with
        self.added = []  # what each tower added to the graph's collections, by key
        self._sizes = None  # of what a batch holds, a list over towers each
        self._has_warned = False

    def described_exchanges(self):
        """Returns a str for each exchange, alike in workers that build the same."""
        return self._meetings.turns.described()

    def contributions(self):
        """Returns what towers left where they met, a list over meetings of lists over towers."""
        num_towers = len(self._builder.devices)
        return [[left[i] for i in range(num_towers)] for left in self._meetings.contributions.values() if len(left) == num_towers]

    def note_sizes(self, batches):
        """Notes what is known of the sizes of all towers' batches before any of them is built."""
        self._sizes = None if callable(batches[0]) else known_sizes(batches)
        if self.peers is not None:
            told = self.peers.tell([self._sizes])
            self._sizes = None if None in told else [
                None if None in of_leaf else sum(of_leaf, []) for of_leaf in zip(*told)]

    def add_tower(self, model_fn, index, batch):
        """Builds one tower and returns it, with the number of its examples where its weight belongs."""
        graph, devices = tf.get_default_graph(), self._builder.devices
        with tf.name_scope("tower_%d" % index) as name_scope, tf.device(on_machine_of(devices[index])):
            first, num_towers = (0, len(devices)) if self.peers is None else (self.peers.first, self.peers.num_towers)
            context = TowerContext(first + index, num_towers, devices[index], self._builder.aggregation_device, self._training,
                                   name_scope, self._meetings, self._shared_updates, index)
            args = context.batch = _arguments(batch, context)
            context.batch_sizes = self._sizes_of(args)
            self.arguments.append(args)
            first_op = len(graph.get_operations())
            place = TowerDevices(devices[index], self._builder.place_variable)
            with self.collections.tower(index, name_scope) as added, self._sharing.scope(index, name_scope):
                with enter_tower(context), tf.device(place), explained(index):
                    outputs = _called(model_fn, args)
                    outputs = survive_empty_batches(outputs, args, context, graph.get_operations()[first_op:])
        if place.elsewhere and not self._has_warned:
            aggregated = self._meetings.aggregated()
            self._has_warned = warn_of_other_devices([op for op in place.elsewhere if op not in aggregated], context)
        train_ops = added.get(tf.GraphKeys.TRAIN_OP, ()) if context.asked is None else ()
        refuse_training(graph.get_operations()[first_op:], train_ops)
        self._meetings.turns.check_complete(index)
        self.added.append(added)
        weight, updates = count(outputs, args, context), added.get(tf.GraphKeys.UPDATE_OPS, [])
        loss, ops = _loss_of(outputs, index), graph.get_operations()[first_op:]
        loss = None if loss is None else checked_loss(loss, weight, outputs, context)
        return Tower(context, outputs, loss, weight, updates, ops)

    def _sizes_of(self, args):
        """Returns `TowerContext.batch_sizes` of what a model function is called with."""
        leaves = tf.nest.flatten(args)
        if self._sizes is None or len(self._sizes) != len(leaves):
            return {}
        return {(leaf.op, leaf.value_index): sizes for leaf, sizes in zip(leaves, self._sizes)
                if sizes is not None and isinstance(leaf, tf.Tensor)}


def _check_workers(workers):
    """Returns `workers` where there is more than one, else None; a TypeError if it is nothing that `connect` returned."""
    if workers is not None and not hasattr(workers, "tell_all"):
        raise TypeError("workers has to be what towers.workers.connect() returned, not %r." % (workers,))
    return workers if workers is not None and workers.size > 1 else None


def _check_call():
    if tf.executing_eagerly():
        raise RuntimeError("towers builds TensorFlow 1 graphs, and eager execution is on: call "
                           "tf.compat.v1.disable_eager_execution() when the program starts, or build within "
                           "`with tf.Graph().as_default():`.")
    if current_tower() is not None:
        raise RuntimeError("TowerBuilder.build was called by a model function, inside tower %d: towers can't be nested."
                           % current_tower().index)


def _arguments(batch, context):
    if callable(batch):
        with tf.device(HOST), tf.name_scope("batch"):
            batch = batch(context)
    check_batch(batch)
    # Sparse and ragged tensors stay what they are.
    batch = tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf) if isinstance(
        leaf, (np.ndarray, np.generic, bool, int, float)) else leaf, batch)
    batch = tf.nest.map_structure(lambda leaf: take_in(leaf) if isinstance(leaf, tf.Tensor) else leaf, batch,
                                  expand_composites=True)
    return batch if isinstance(batch, tuple) and not hasattr(batch, "_fields") else (batch,)


def _called(model_fn, args):
    """Returns what a model function returns; a TypeError says how a batch reaches one that takes other arguments."""
    try:
        return model_fn(*args)
    except TypeError as error:
        if not _OTHER_ARGUMENTS.search(str(error)) or not _is_raised_here(error):
            raise
        cure = " A tuple reaches it as several arguments, a list or anything else as one: hand in (x, y) for [x, y]." if (
            len(args) == 1) else ""
        raise TypeError("The batch hands the model function %d argument%s: %s.%s" % (
            len(args), "s" * (len(args) != 1), error, cure)) from error


def _is_raised_here(error):
    """Tells whether an error was raised where the library calls a function, not within that."""
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return os.path.dirname(__file__) in last.tb_frame.f_code.co_filename


def _loss_of(outputs, index):
    if "loss" in by_name(outputs):
        return scalar_loss(by_name(outputs)["loss"], index)
    is_loss = tf.is_tensor(outputs) and outputs.dtype.is_floating and outputs.shape.rank == 0
    return outputs if is_loss else None


def _check_outputs(towers):
    first = towers[0]
    for tower in towers[1:]:
        index = tower.context.index
        try:
            tf.nest.assert_same_structure(first.outputs, tower.outputs)
        except (TypeError, ValueError) as error:
            raise TowerMismatchError("The model function returned another structure in tower %d than in tower 0: %s"
                                     % (index, error)) from error
        if (first.loss is None) != (tower.loss is None):
            raise TowerMismatchError("The model function returned a scalar loss in only one of the towers 0 and %d." % index)
