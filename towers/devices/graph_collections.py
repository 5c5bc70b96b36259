"""What each tower sees of the graph's collections, and what they hold in the end.

While a tower is built the collections hold what was there before the build and what this tower has put in or asked for, as
though it were alone: `get_total_loss()` in a model function sums its own tower's losses, and `tf.trainable_variables()`
ends at the variable made last, in every tower. What asks for the items of a scope, `tf.get_collection(key, "policy")`, finds
those whose names begin so without the tower's. Afterwards they hold every tower's items, each variable once, and of
summaries, whose tags have no tower in them, tower 0's. If the model function raises they hold what they held before, and
the variables made so far.
"""
import contextlib
import re

import tensorflow.compat.v1 as tf

from towers.context import outside_of_tower
from towers.graph.private import rewire
from towers.graph.walk import is_variable

__all__ = ["TowerCollections"]

_KEYS = tf.GraphKeys
# What TensorFlow keeps of a graph once: a tower that did not find it would make another, or refuse to.
_OF_THE_GRAPH = frozenset([
    _KEYS.GLOBAL_STEP, "global_step_read_op_cache", _KEYS.EVAL_STEP, _KEYS.SAVERS, _KEYS.INIT_OP, _KEYS.LOCAL_INIT_OP,
    _KEYS.READY_OP, _KEYS.READY_FOR_LOCAL_INIT_OP, _KEYS.SUMMARY_OP, _KEYS.COND_CONTEXT, _KEYS.WHILE_CONTEXT])
_PART = re.compile(r"/part_\d+$")  # of a partitioned variable
_OWNED = "_towers_collection_items"  # attribute of a graph: ids of what towers, of any build, added to its collections


class TowerCollections:
    """Keeps apart what towers add to the graph's collections; to be made before the first tower is built."""

    def __init__(self):
        self._graph = tf.get_default_graph()
        self._before = self._now()
        self._added = {}  # key -> what finished towers added
        self._of_first = {}  # name of a variable -> what belongs to it of what tower 0 added
        self._present = None  # key -> ids of what the present tower sees and has not added
        self._revealed = set()  # (key, id) of what is shown to it, and was not put there by it
        if not hasattr(self._graph, _OWNED):
            setattr(self._graph, _OWNED, {})  # id -> item, so that no id is given out again

    @contextlib.contextmanager
    def restored_if_it_fails(self):
        """Makes the collections what they were if the `with` block raises, but for variables: those exist from now on."""
        try:
            yield
        except BaseException:
            now = self._now()
            for key in set(self._before) | set(self._added) | set(now):
                before = self._before.get(key, [])
                made = {id(item): item for item in before + self._added.get(key, []) + now.get(key, []) if is_variable(item)}
                for item in before:
                    made.pop(id(item), None)
                self._graph.get_collection_ref(key)[:] = before + list(made.values())
            raise

    @contextlib.contextmanager
    def tower(self, index, name_scope):
        """Shows one tower its own items and yields a dict that afterwards maps each collection to what it added."""
        owned = getattr(self._graph, _OWNED)
        self._present = {}
        for key in set(self._before) | set(self._added):
            in_sight = [item for item in self._before.get(key, []) if id(item) not in owned or is_variable(item)]
            self._present[key] = set(map(id, in_sight))
            self._graph.get_collection_ref(key)[:] = in_sight
        added, self._revealed = {}, set()
        with _names_as_in_one_tower(self._graph, name_scope), self._put_once():
            yield added
        for key, items in self._now().items():
            added[key] = [item for item in items if id(item) not in self._present.get(key, ())]
            owned.update((id(item), item) for item in added[key])
        self._keep(index, added)
        if index == 0:
            self._of_first = _by_variable(added)
            _strip_tags(added.get(_KEYS.SUMMARIES, []), name_scope, self._before.get(_KEYS.SUMMARIES, []))
        for key in set(self._before) | set(self._added):
            self._graph.get_collection_ref(key)[:] = self._before.get(key, []) + self._added.get(key, [])

    def reveal(self, name):
        """Shows the present tower the variable of a name, which it asks for, where tower 0 had put it, and its regularization."""
        for key, item in self._of_first.get(name, ()):
            present = self._present.setdefault(key, set())
            if id(item) not in present:
                present.add(id(item))
                self._revealed.add((key, id(item)))
                self._graph.get_collection_ref(key).append(item)

    @contextlib.contextmanager
    def _put_once(self):
        """Takes what the model function itself puts into a collection for what was shown there already, where it was."""
        add, graph = self._graph.add_to_collection, self._graph

        def add_to_collection(name, value):
            if (name, id(value)) in self._revealed:
                self._revealed.discard((name, id(value)))
                items = graph.get_collection_ref(name)
                items[:] = [item for item in items if item is not value]
            add(name, value)

        with _in_place_of(graph, {"add_to_collection": (add, add_to_collection)}):
            yield

    def _now(self):
        """Returns what the collections that tell towers apart hold now."""
        return {key: self._graph.get_collection(key) for key in self._graph.collections
                if isinstance(key, str) and key not in _OF_THE_GRAPH}

    def _keep(self, index, added):
        for key, items in added.items():
            kept = self._added.setdefault(key, [])
            there = set(map(id, self._before.get(key, []) + kept)) if index else ()
            kept.extend(item for item in items if id(item) not in there and not (index and _stands_for_all(key, item)))


@contextlib.contextmanager
def _names_as_in_one_tower(graph, name_scope):
    """Lets a `with` block ask for a tower's items by names that have no tower in them, as those of variables have none."""
    get_all, get_name = graph.get_collection, graph.unique_name

    def get_collection(name, scope=None):
        if scope is None or isinstance(scope, str) and (scope + "/").startswith(name_scope):
            return get_all(name, scope)
        return [item for item in get_all(name) if isinstance(getattr(item, "name", None), str)
                and re.match(scope, outside_of_tower(item.name, name_scope))]

    def unique_name(name, mark_as_used=True):
        made = get_name(name, mark_as_used)
        # What an average would be called, of which variable or tensor; else a scope to import a graph into.
        is_of_average = not mark_as_used and _is_op(graph, name.rpartition("/")[0])
        return outside_of_tower(made, name_scope) if is_of_average else made

    # What TensorFlow itself looks up, tf.losses.get_total_loss for one, it asks the graph for; the name of an average too.
    with _in_place_of(graph, {"get_collection": (get_all, get_collection), "unique_name": (get_name, unique_name)}):
        yield


@contextlib.contextmanager
def _in_place_of(graph, methods):
    """Puts functions in the place of a graph's methods, a dict from names to (the method, what takes its place)."""
    for name, (_, ours) in methods.items():
        setattr(graph, name, ours)
    try:
        yield
    finally:
        for name, (before, _) in methods.items():
            delattr(graph, name)
            if getattr(graph, name) != before:  # which somebody else put there
                setattr(graph, name, before)


def _is_op(graph, name):
    try:
        return graph.get_operation_by_name(name) is not None
    except KeyError:
        return False


def _by_variable(added):
    """Returns a dict from names of variables to what belongs to them of what tower 0 added, a list of (key, item)."""
    found = {}
    for key, items in added.items():
        for item in items:
            name = item.op.name if is_variable(item) else ""
            if key == _KEYS.REGULARIZATION_LOSSES:  # as tf.get_variable names what it makes of a regularizer
                name = getattr(item, "name", "").partition("/Regularizer/")[0]
            for of_whole in {name, _PART.sub("", name)} - {""}:
                found.setdefault(of_whole, []).append((key, item))
    return found


def _stands_for_all(key, item):
    """Tells whether tower 0's items of this kind are those of all towers."""
    # TensorFlow's own scope for what a variable's regularizer makes: tf.layers makes it anew in each tower.
    return key == _KEYS.SUMMARIES or key == _KEYS.REGULARIZATION_LOSSES and "/Regularizer/" in getattr(item, "name", "")


def _strip_tags(summaries, name_scope, others):
    """Takes the tower out of the tags, the first inputs of summary ops, and keeps each tag the only one of its name."""
    taken = {_tag_of(summary) for summary in others}
    for summary in summaries:
        tag = _tag_of(summary)
        if tag and tag.startswith(name_scope):
            plain = free = outside_of_tower(tag, name_scope)
            number = 0
            while free in taken:
                number += 1
                free = "%s_%d" % (plain, number)
            taken.add(free)
            with tf.name_scope(None):
                rewire(summary.op, 0, tf.constant(free, name=summary.op.name + "/tag"))


def _tag_of(summary):
    op = getattr(summary, "op", None)
    tag = op.inputs[0] if op is not None and op.inputs else None
    if tag is None or tag.dtype != tf.string or tag.op.type != "Const":
        return None
    return tag.op.get_attr("value").string_val[0].decode()
