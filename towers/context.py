"""Which tower is being built.

The one global of the library lives here: the tower whose model function is running. Layers ask for it with
`current_tower()`. It is set by the builder alone, per thread, and restored whatever the model function raises.
"""
import contextlib
import copy
import threading
from typing import Any, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple, Union

import tensorflow.compat.v1 as tf

from towers.api.annotations import Operation, Tensor

__all__ = ["TowerContext", "check_graph", "current_tower", "differentiate", "each_example", "enter_tower", "is_differentiating",
           "may_differ", "outside_of_tower", "span"]

_building = threading.local()


class Span(NamedTuple):
    """Ops of a tower that were made together and stand for one thing.

    Attributes:
      first, last: int, positions in the graph: the first op's, and that after the last one's.
      key: what they stand for, alike in every tower; None for what may differ.
      inputs: what they were made of, a tuple of structures of tensors.
    """
    first: int
    last: int
    key: Any
    inputs: tuple


class TowerContext:
    """The tower being built, as a model function and its layers see it.

    Attributes:
      index: int, 0 for the first tower; of several workers' towers, 0 for the first one's first.
      num_towers: int, how many towers train together, those of all workers.
      local_index: int, the tower's number among those of this process.
      device: str, the device of the tower's ops.
      aggregation_device: str, the device on which towers meet.
      training: bool or scalar bool tensor, the builder's `training`.
      name_scope: str, the name scope of the tower's ops, ending in "/".
      meetings: the build's record of exchanges, see `towers.meeting.meetings`, and its `graph`.
      shared_updates: list of ops, the updates added with `shared=True` so far. One list for all towers of the build.
      batch: tuple, what the model function is called with.
      spans: list of `Span`, ops that `span` and `may_differ` hold together.
      asked: `towers.estimators.tower_optimizer.Asked`, what optimizers of the model function were asked for; None where nobody
        carries it out.
      examined: set of ops in which what takes all examples together and comes back to each was looked for already.
      own_examples: list of pairs of int, positions in the graph of the first op and behind the last one of what `each_example`
        made.
      all_towers: the tower's `TowerContext` as it is, where this one is that of a whole-batch model, which sees one tower
        alone: it is none of several, and what it exchanges comes back to it. None elsewhere.
      alike_writes: set of ops of a whole-batch model (`towers.whole_batch`) that write what is the same in all towers.
      placements: dict from (op, number of its output) to `towers.sharding.placements.Placement`, of outputs of whole-batch
        models.
      handed_on: dict from ops that the library put into the tower, and that hand on a tensor where it has examples, to that.
      batch_sizes: dict from (op, number of its output) to the sizes along axis 0 that a part of the batch has in each tower, a
        list of int, for those whose sizes are known while the graph is built.
    """

    def __init__(self, index: int, num_towers: int, device: str, aggregation_device: str, training: Union[bool, Tensor],
                 name_scope: str, meetings: Any, shared_updates: List[Operation], local_index: Optional[int] = None) -> None:
        self.index = index
        self.local_index = index if local_index is None else local_index
        self.num_towers = num_towers
        self.device = device
        self.aggregation_device = aggregation_device
        self.training = training
        self.name_scope = name_scope
        self.meetings = meetings
        self.shared_updates = shared_updates
        self.batch: tuple = ()
        self.spans: List[Span] = []
        self.asked: Any = None
        self.examined: Set[Operation] = set()
        self.own_examples: List[Tuple[int, int]] = []
        self.all_towers: Optional["TowerContext"] = None
        self.alike_writes: Set[Operation] = set()
        self.placements: Dict[Any, Any] = {}
        self.handed_on: Dict[Operation, Tensor] = {}
        self.batch_sizes: Dict[Any, List[int]] = {}

    def __repr__(self) -> str:
        return "TowerContext(index=%d, num_towers=%d, device=%r)" % (self.index, self.num_towers, self.device)

    def alone(self) -> "TowerContext":
        """Returns the tower as a whole-batch model sees it: the only one, with the whole batch."""
        found = copy.copy(self)
        found.num_towers, found.all_towers = 1, self
        return found

    def sizes_of(self, leaf: Tensor) -> Optional[List[int]]:
        """Returns the sizes that a part of the batch has along axis 0 in each tower; None where they are not all known."""
        return self.batch_sizes.get((leaf.op, leaf.value_index))

    @property
    def is_first(self) -> bool:
        """True in the first tower of a process, which makes what is needed once a step: variables, summaries, shared updates."""
        return self.local_index == 0

    def relative(self, name: str) -> str:
        """Returns the name of an op or scope without the tower's."""
        return name[len(self.name_scope):] if name.startswith(self.name_scope) else name

    def add_update(self, op: Union[Operation, Tensor], shared: bool = False) -> None:
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


@contextlib.contextmanager
def span(key, *inputs):
    """Holds together what is made in a `with` block of a tower: it counts as one thing, alike in all towers of one key.

    Args:
      key: hashable, alike in every tower; None for what may differ.
      *inputs: structures of tensors that the ops are made of, alike in every tower.
    """
    tower, graph = current_tower(), tf.get_default_graph()
    if tower is None or graph is not tower.meetings.graph:
        yield
        return
    first = graph.version  # the number of ops
    yield
    tower.spans.append(Span(first, graph.version, key, inputs))


@contextlib.contextmanager
def each_example() -> Iterator[None]:
    """Says in a `with` block of a whole-batch model that each op made there computes each example by itself, along axis 0.

    For ops of which `towers.whole_batch` can't know it: `tf.py_func`, say. Whatever has one axis or more and is made there of a
    tower's examples counts as theirs. Elsewhere it does nothing.

    Example:

        with towers.each_example():
            parsed = tf.py_func(parse, [x], tf.float32)
        parsed.set_shape([None, 10])
    """
    tower, graph = current_tower(), tf.get_default_graph()
    first = graph.version
    yield
    if tower is not None and graph is tower.meetings.graph:
        tower.own_examples.append((first, graph.version))


def may_differ() -> ContextManager[None]:
    """Returns a context manager: ops made under it in a model function may differ between towers.

    What else a model function makes has to compute the same in every tower, or `TowerBuilder.build` refuses it. What was made
    of what differs is compared again. Outside of towers it does nothing.

    Example:

        with towers.may_differ():
            offset = tf.constant(towers.current_tower().index * batch_size)
    """
    return span(None)


def check_graph(graph, caller):
    """Raises ValueError where ops of towers are about to be made outside of their graph.

    Args:
      graph: `tf.Graph` that the towers were built in.
      caller: str, what is about to make ops, for the message.
    """
    here = tf.get_default_graph()
    while here is not graph:
        here = getattr(here, "outer_graph", None)  # of a tf.cond, tf.while_loop or tf.function
        if here is None:
            raise ValueError("%s: the towers were built in another graph than the default one, which holds none of their "
                             "variables. Call it where they were built, or within `with graph.as_default():` of that graph."
                             % caller)


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


def current_tower() -> Optional[TowerContext]:
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


def outside_of_tower(name, name_scope):
    """Returns a name without the tower's component of `name_scope`; the scope around the towers stays."""
    outer = name_scope[:name_scope.rstrip("/").rfind("/") + 1]
    if name.startswith(name_scope):
        return outer + name[len(name_scope):]
    return name.replace("/" + name_scope, "/" + outer, 1)  # an average's name, within a variable scope
