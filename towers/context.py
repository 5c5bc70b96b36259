"""Which tower is being built.

The one global of the library lives here: the tower whose model function is running. Layers ask for it with
`current_tower()`. It is set by the builder alone, per thread, and restored whatever the model function raises.
"""
import contextlib
import threading

import tensorflow.compat.v1 as tf

__all__ = ["TowerContext", "current_tower", "differentiate", "enter_tower", "is_differentiating"]

_building = threading.local()


class TowerContext:
    """The tower being built, as a model function and its layers see it.

    Attributes:
      index: int, 0 for the first tower.
      num_towers: int, how many towers are built together.
      device: str, the device of the tower's ops.
      aggregation_device: str, the device on which towers meet.
      training: bool or scalar bool tensor, the builder's `training`.
      name_scope: str, the name scope of the tower's ops, ending in "/".
      meetings: the build's record of exchanges; `towers.exchange` is its only reader.
      shared_updates: list of ops, the updates added with `shared=True` so far. One list for all towers of the build.
    """

    def __init__(self, index, num_towers, device, aggregation_device, training, name_scope, meetings, shared_updates):
        self.index = index
        self.num_towers = num_towers
        self.device = device
        self.aggregation_device = aggregation_device
        self.training = training
        self.name_scope = name_scope
        self.meetings = meetings
        self.shared_updates = shared_updates

    def __repr__(self):
        return "TowerContext(index=%d, num_towers=%d, device=%r)" % (self.index, self.num_towers, self.device)

    @property
    def is_first(self):
        """True in tower 0, which makes what is needed once a step: variables, summaries, shared updates."""
        return self.index == 0

    def relative(self, name):
        """Returns the name of an op or scope without the tower's."""
        return name[len(self.name_scope):] if name.startswith(self.name_scope) else name

    def add_update(self, op, shared=False):
        """Adds an op that a training step has to run to `tf.GraphKeys.UPDATE_OPS`.

        Args:
          op: an operation or tensor that changes state, a moving average's assignment say.
          shared: True for an update that is the same whichever tower runs it, because it reads what all towers have in
            common. It then runs once a step under the policies "first", "all" and "last", and never under "none".
            Only tower 0's op is kept; the other towers need not build one, and what they hand in is left out.
        """
        if shared and not self.is_first:
            return
        if shared:
            self.shared_updates.append(op)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, op)


def is_differentiating():
    """Tells whether this thread is inside a gradient pass over towers that are built already."""
    return getattr(_building, "differentiating", False)


@contextlib.contextmanager
def differentiate():
    """Marks a gradient pass for the duration of a `with` block."""
    outer = is_differentiating()
    _building.differentiating = True
    try:
        yield
    finally:
        _building.differentiating = outer


def current_tower():
    """Returns the `TowerContext` of the tower being built in this thread, or None outside of towers."""
    return getattr(_building, "tower", None)


@contextlib.contextmanager
def enter_tower(context):
    """Makes `context` the current tower for the duration of a `with` block; None stands for 'outside of towers'."""
    outer = current_tower()
    _building.tower = context
    try:
        yield context
    finally:
        _building.tower = outer
