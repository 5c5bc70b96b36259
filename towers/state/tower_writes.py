"""What model functions write into variables while they compute, made to happen as in one tower.

A write whose value depends on no data of its tower is the same in every tower: tower 0's is the one that runs, once a step, and
all towers read what tower 0 read; what else of a tower's own it waited for, or stands beside it in a tf.cond, happens in every
tower. Writes of a tower's own data run in the order of the towers, each upon what the one before wrote, and a warning says so,
since one tower would write something else. What outputs are made of reads a variable where it did in tower 0: what was read
before the write there is read before any tower's write. Updates of a tower's own data in `tf.GraphKeys.UPDATE_OPS` are left to
the policy of `towers.collect_update_ops`; they too write after all such reads. Sums of `tf.metrics` count each example once:
whatever runs one tower's update runs all of them, and reads what they came to.
"""
import warnings

import tensorflow.compat.v1 as tf

from towers.api.wording import TowersWarning, some_of
from towers.graph.functions import Functions
from towers.graph.op_types import CALLS, LOOKS_UP, READS
from towers.graph.ordering import copy_before_writes, read_after, read_written, run_after_in, take_instead, take_twin, takers_of
from towers.graph.private import control_flow_now, control_flow_of, rewire
from towers.graph.walk import ancestors, descendants, in_circles, is_variable, op_of, variable_of, writes_of, written_variables
from towers.meeting.turns import TowerMismatchError
from towers.state.asked_steps import AskedSteps
from towers.state.equal_ops import find_twins
from towers.state.initial_values import warn_of_initial_values
from towers.state.own_data import own_leaves
from towers.state.own_effects import OwnEffects
from towers.state.reads_and_writes import View

__all__ = ["settle_state"]

_FEW = 2000  # ops that are soon walked through
# Reads of a few rows of what may be large: not worth a copy of all of it.


def settle_state(towers, batches, collections):
    """Makes the towers' writes of variables happen as in one tower, and returns the towers with what stands for their outputs.

    Args:
      towers: list of `towers.Tower`, all built.
      batches: list over towers of what each model function was called with, nested structures.
      collections: list over towers of dicts from keys to what the tower added to the graph's collections.

    Returns:
      A list of `towers.Tower`. Of an update that is the same in all of them, tower 0's is among the shared ones.

    Raises:
      TowerMismatchError: (a ValueError) where towers write a variable another number of times.
      ValueError: where towers can't write one after the other, because they meet between two writes of one variable.

    Warns:
      TowersWarning: where an output waits for a write of a tower's own data, or a variable starts from such.
    """
    warn_of_initial_values(towers, batches, collections[0])
    writes = [writes_of(tower.ops) for tower in towers]
    if not any(writes):
        return towers
    aggregated = towers[0].context.meetings.aggregated()
    peers = towers[0].context.meetings.peers
    views = [View(*each, aggregated) for each in zip(towers, own_leaves(batches, peers), collections, writes)]
    state = _State(views)
    if peers is not None:
        state.refuse_writes_of_own_data()
    for variable in state.variables:
        state.settle(variable)
    return state.result()


class _State:
    """The towers' variables that are written, settled one after the other."""

    def __init__(self, views):
        self._views, self._first = views, views[0]
        self.variables = list(dict.fromkeys(v for view in views for variables in view.writes.values() for v in variables))
        self._writes = {op for view in views for op in view.writes}
        self._of_metrics = set(map(op_of, tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)))
        self._metrics = {v for v in self.variables if _outer(v) in self._of_metrics and not self._counts_batches(v)}
        self._steps = AskedSteps(views)
        self._twins = self._find_twins()
        self._shared, self._own = self._find_shared()
        self._stands_for = {}  # op of a later tower -> the op of tower 0 that runs in its place
        self._left = []  # (tower 0's op, what the op that it stands for waited for, those that take that op, the tower's view)
        self._waits = []  # (a tower's write, the results of an earlier tower's that it waits for, the variable)
        self._of_own_data = []  # names of a variable, and of the last tower's write
        self._last = {}  # a tower's write -> the last tower's, whose result stands for its own in what is handed out

    def refuse_writes_of_own_data(self):
        """Raises ValueError where an output waits for a write that other workers make another one of."""
        for view in self._views:
            own = view.of_batch | view.drawn
            for variable in self.variables:
                for op in view.writes_to(variable) if _outer(variable) not in self._of_metrics else ():
                    if op in view.needed and op in own:
                        raise ValueError(
                            "Every worker would write another value into the variable %r (%r): it is computed of the worker's "
                            "own batch, or drawn at random. Compute it of all towers' data, by towers.all_reduce or all_gather."
                            % (_outer(variable).name, op.name))

    def _find_twins(self):
        """Returns a dict from ops of later towers to tower 0's, of all that concerns writes of no tower's own data."""
        functions, found = Functions(tf.get_default_graph()), {}
        # What tower 0 writes alone, a layer's averages say, takes reads of other variables there that later towers do not have.
        shareable = [v for v in self.variables if any(view.writes_to(v) for view in self._views[1:]) and not any(
            op in view.of_batch for view in self._views for op in view.writes_to(v))]
        of_views = []
        for view in self._views if shareable else ():
            wanted = [op for v in shareable for op in self._results_and_reads(v, view)]
            needed = ancestors(wanted, within=view.made)
            of_views.append([op for op in view.ops if op in needed])
        results = {result for view in self._views for op in view.writes for result in view.results(op)} if of_views else set()
        for ops in of_views[1:]:
            found.update(find_twins(of_views[0], ops, functions, self._writes | results, self._steps.numbers_before))
        for view in self._views[1:]:
            for variable in self.variables:
                pairs = list(zip(view.writes_to(variable), self._first.writes_to(variable)))
                if all(op in view.alike and twin in self._first.alike for op, twin in pairs):
                    found.update(pairs)
        return found

    def _find_shared(self):
        """Returns the set of variables that tower 0's writes stand for all writes of, and what is own to each later tower."""
        shared = {v for v in self.variables if v not in self._metrics and all(
            {op, *view.results(op)} <= self._twins.keys() for view in self._views[1:] for op in view.writes_to(v))}
        while True:
            own = {view: OwnEffects(view, shared) for view in self._views[1:]}
            apart = {v for v in shared for view, of_view in own.items() for op in view.writes_to(v)
                     if of_view.holds(op) and not of_view.can_leave_out(op, view.writes_to(v))}
            if not apart:
                return shared, own
            shared -= apart

    def _results_and_reads(self, variable, view):
        results = [result for op in view.writes_to(variable) for result in view.results(op)]
        return results + [use for use, _ in view.uses(variable) if use.type in READS | LOOKS_UP]

    def settle(self, variable):
        writes = [view.writes_to(variable) for view in self._views]
        later = [of_tower for of_tower in writes[1:] if of_tower]
        if any(len(of_tower) != len(writes[0]) for of_tower in later):
            raise TowerMismatchError(
                "The towers write the variable %r another number of times each: %s. Write it alike in every tower, or in tower 0 "
                "alone." % (_outer(variable).name, ", ".join(str(len(of_tower)) for of_tower in writes)))
        # Sums and counts of examples, by TensorFlow's own definition: whoever runs one tower's update means all examples. Even
        # towers of a known size add the same number.
        is_metric = variable in self._metrics
        if variable in self._shared:
            self._share(variable)
            self._protect(variable, writes[0])
            return
        if later and (is_metric or any(op in view.needed for view, of_tower in zip(self._views, writes) for op in of_tower)):
            self._run_in_order(variable, writes, is_metric)
            if not is_metric:
                self._of_own_data.append((_outer(variable).name, writes[-1][0].name))
        self._protect(variable, [op for of_tower in writes for op in of_tower])

    def _counts_batches(self, variable):
        """Tells whether the metric that a variable belongs to adds the same in every tower, and no number of examples."""
        scope = _outer(variable).name.rpartition("/")[0]
        of_metric = [v for v in self.variables if _outer(v) in self._of_metrics and _outer(v).name.rpartition("/")[0] == scope]
        writes = [(op, view) for view in self._views for v in of_metric for op in view.writes_to(v)]
        if any(op in view.of_batch for op, view in writes):
            return False
        sizes = [tf.dimension_value(leaf.shape[0]) for leaf in tf.nest.flatten(self._first.tower.context.batch)
                 if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
        added = [tf.get_static_value(op.inputs[1]) for op, _ in writes if len(op.inputs) > 1]
        return not any(number is not None and size and not (number % size).any() for number in added for size in sizes[:1])

    def _share(self, variable):
        """Lets tower 0's writes of a variable, and its reads, stand for those of all towers."""
        for view, own in self._own.items():
            for op in self._results_and_reads(variable, view):
                if op in self._twins and control_flow_of(op) is control_flow_now(op.graph) and not own.is_result(op):
                    before = own.before(op)
                    self._left += [(self._twins[op], before, own.takers(op), view)] if before else []
                    take_twin(op, self._twins[op])
                    self._stands_for[op] = self._twins[op]
            for op in view.writes_to(variable):
                if own.holds(op):
                    own.leave_out(op, self._first.results(self._twins[op]))

    def _wait_for_own(self):
        """Makes what stands for ops of later towers wait for the towers' own effects that those waited for.

        That is tower 0's op, or where these effects come after it, what takes it in the later tower.
        """
        behind = descendants([twin for twin, *_ in self._left])
        for twin, earlier, takers, view in self._left:
            is_first = not behind.isdisjoint(earlier) and not descendants([twin]).isdisjoint(earlier)
            before = ancestors(earlier) if is_first else ()
            for op in takers if is_first else [twin]:
                if op not in before:
                    run_after_in(op, earlier, view.ops)

    def _run_in_order(self, variable, writes, is_metric):
        """Makes the towers write one after the other, each upon what the one before wrote.

        What the outputs hand out of a write waits for the last one; of a metric so does what stands in collections.
        """
        earlier, takers = {}, takers_of(variable)
        for view, of_tower in zip(self._views, writes):
            if earlier:
                movable = dict.fromkeys(
                    op for op in takers if op in view.made and view.leads_to(op, of_tower, is_metric) == "writes")
                for op in movable:
                    read_after(op, earlier, movable, view.ops)
                for op in of_tower:
                    self._waits.append((op, earlier[variable.name], variable))
                    run_after_in(op, earlier[variable.name], view.ops)
            earlier = {variable.name: [result for op in of_tower for result in view.results(op)]}
        self._read_after_all(variable, writes, is_metric)

    def _read_after_all(self, variable, writes, is_metric):
        """Lets what reads a variable after its tower's one write read it after the last tower's.

        So does what takes the value that was written; a call also returns what it computed of its tower's examples.
        """
        last, behind, taken = writes[-1][-1], [], []
        results = self._views[-1].results(last)
        hands_it_out = results == [last] and last.type not in CALLS
        for view, write in ((view, of_tower[0]) for view, of_tower in zip(self._views, writes) if len(of_tower) == 1):
            if write is not last:
                if hands_it_out:
                    self._last[write] = last
                behind += [(op, view) for op, _ in view.uses(variable, of_items=is_metric)
                           if write in ancestors([op], within=view.made)]
                taken += [(op, *pair) for pair in zip(write.outputs, last.outputs) for op in pair[0].consumers()
                          if hands_it_out and op in view.made and view.leads_to(op, [write], is_metric) == "outputs"]
        before_last = ancestors(results) if behind or taken else ()
        for op, view in behind:
            if op not in before_last:
                run_after_in(op, results, view.ops)
        for op, tensor, of_last in taken:
            if op not in before_last:
                take_instead([op], tensor, of_last)

    def _refuse_circles(self):
        """Raises ValueError where a tower's write waits for an earlier tower's, which comes after it."""
        left = in_circles(tf.get_default_graph()) if self._waits else ()
        for op, earlier, variable in self._waits if left else ():
            if op in ancestors(earlier, within=left):
                raise ValueError(
                    "The towers can't write the variable %r one after the other: they meet between %r and an earlier "
                    "tower's write. Write it once in a model function, or compute it of all towers' data."
                    % (_outer(variable).name, op.name))

    def _protect(self, variable, writes):
        """Makes writes wait for what reads the variable before them, in every tower."""
        uses = [(view, *use) for view in self._views for use in view.uses(variable)]
        if not uses or not writes:
            return
        snapshots, outer, is_after = {}, control_flow_now(variable.graph), _is_after(writes + self._steps.after(writes))
        for view, use, index in uses:
            copied = index is not None and use.type not in LOOKS_UP and control_flow_of(use.inputs[index].op) is outer
            results = [use] if copied else view.results(use)
            if use in self._stands_for or self._stands_for.keys() >= set(results) or is_after(results):
                continue
            if copied:
                steps = self._steps.before(use)
                if steps not in snapshots:
                    with tf.control_dependencies(steps):
                        snapshots[steps] = copy_before_writes(variable)
                rewire(use, index, snapshots[steps])
            else:
                for write in writes:
                    run_after_in(write, [result for result in results if result is not write], self._ops_beside(write))
        for write in writes if snapshots else ():
            run_after_in(write, [snapshot.op for snapshot in snapshots.values()], self._ops_beside(write))

    def _ops_beside(self, op):
        return next(view.ops for view in self._views if op in view.made)

    def result(self):
        """Returns the towers with what stands for their outputs and updates now, and replaces what stands in collections."""
        self._wait_for_own()
        self._refuse_circles()
        if self._of_own_data:
            _warn(self._of_own_data)
        graph, first = tf.get_default_graph(), self._first
        for key in graph.collections if self._stands_for or self._last else ():
            if isinstance(key, str):
                items = graph.get_collection_ref(key)
                items[:] = self._now(items)
        same = set(self._stands_for.values())
        if len(self._views) == 1 < first.tower.context.num_towers:  # other workers may have more towers than this one
            same = set(first.writes) - first.of_batch - first.drawn
        shared = first.tower.context.shared_updates
        run_anyway = first.needed | ancestors(shared, within=first.made)  # a layer's update in line, say, which others wait for
        of_all, apart = (descendants(ops, first.made) for ops in (
            same.intersection(first.writes), set(first.writes) - same - run_anyway))
        shared.extend(
            update for update in first.tower.own_updates if op_of(update) in of_all and op_of(update) not in apart)
        return [view.tower._replace(
            outputs=tf.nest.map_structure(self._stand_in, view.tower.outputs, expand_composites=True),
            loss=self._stand_in(view.tower.loss), update_ops=self._now(view.tower.update_ops)) for view in self._views]

    def _now(self, items):
        """Returns the items of a collection without those that tower 0's stand for, and those of metrics after all towers."""
        return [self._stand_in(item) if self._is_of_metric(item) else item for item in items
                if is_variable(item) or op_of(item) not in self._stands_for]

    def _is_of_metric(self, item):
        return op_of(item) in self._last and not is_variable(item) and not self._of_metrics.isdisjoint(
            map(_outer, written_variables(op_of(item))))

    def _stand_in(self, item):
        op = None if item is None or is_variable(item) else op_of(item)
        twin = self._stands_for.get(op, self._last.get(op))
        if twin is None or isinstance(item, tf.Operation):
            return item if twin is None else twin
        return twin.outputs[item.value_index] if isinstance(item, tf.Tensor) else read_written(twin)


def _is_after(writes):
    """Returns a function of ops that tells whether any of them depends on one of `writes`."""
    later = descendants(writes, most=_FEW)  # few of an update, which no output waits for

    def is_after(ops):
        nonlocal later
        earlier = None if later is not None else ancestors(ops, most=_FEW)  # few of what is made of variables alone
        if earlier is not None:
            return bool(earlier.intersection(writes))
        if later is None:
            later = descendants(writes)
        return bool(later.intersection(ops))
    return is_after


def _outer(variable):
    """Returns the op of a variable as the model knows it, not what stands for it in a loop's body."""
    return variable_of(variable) or variable  # what else is handed out by reference, a barrier say, stands for itself


def _warn(writes):
    (variable, write), others = writes[0], [name for name, _ in writes[1:]]
    more = " (and %s)" % some_of(others) if others else ""
    warnings.warn(
        "Each tower writes the variable %r%s by what it computed of its own batch (%r in the last one), and the outputs wait for "
        "it. The towers write it one after the other, in their order, which may not be what one tower would write on the whole "
        "batch. To make it exact, compute it of all towers' data, towers.all_gather(...) first; or hand an update that is the "
        "same in all towers to towers.current_tower().add_update(op, shared=True)." % (variable, more, write),
        TowersWarning, stacklevel=5)
