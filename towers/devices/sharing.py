"""One set of variables for all towers, however the model function makes them.

`tf.get_variable` is shared by a reused variable scope. `tf.Variable`, and layers that make their variables by it, are
shared by a creator scope that hands a later tower the variable that tower 0 made under the same relative name, with the same
shape, dtype and trainable flag. Keras numbers its layers through the graph, so names that agree but for such numbers are
matched by turn. A match by turn alone gave wrong variables in silence where towers made theirs in another order.
"""
import contextlib
import re

import tensorflow.compat.v1 as tf

from towers.context import outside_of_tower
from towers.meeting.turns import TowerMismatchError, without_numbers

__all__ = ["VariableSharing"]


class VariableSharing:
    """The variables of one build: made in tower 0, handed out again in every later tower.

    Args:
      reveal: a function of a variable's name, called where a later tower asks for one.
    """

    def __init__(self, reveal):
        self._reveal = reveal
        self._by_get_variable = {}  # full name -> variable
        self._trainable = {}  # full name -> whether tower 0 asked for it as trainable, each time in turn
        self._created = []  # _Creation of tower 0, in order
        self._by_base_name = {}  # the name that a variable was asked for by -> indices into _created
        self._claimed = set()  # indices into _created that the present tower has taken
        self._scopes = {}  # a name scope that tower 0 opened, without the tower's -> the graph's own, as without towers
        self._in_get_variable = False

    @contextlib.contextmanager
    def scope(self, tower, name_scope):
        """Shares what is made in the `with` block of a tower's model function.

        The variable scope is entered anew for each tower, for tower 0 too, so that default layer names begin alike in
        each: after `reuse_variables()` they would go on counting.

        Args:
          tower: int, the tower's index.
          name_scope: str, the tower's name scope, which variables' names must not carry.
        """
        self._claimed, self._by_turn, self._asked = set(), [], {}

        def shared_getter(getter, name, *args, **kwargs):
            # tf.train.ExponentialMovingAverage names its variables by the tensors' ops.
            return self._get(tower, getter, outside_of_tower(name, name_scope), args, kwargs)

        def creator(next_creator, **kwargs):
            return self._create(tower, name_scope, next_creator, kwargs)

        with tf.variable_scope(tf.get_variable_scope(), reuse=True if tower else None, custom_getter=shared_getter,
                               auxiliary_name_scope=False), tf.variable_creator_scope(creator):
            yield
        self._check_turns(tower)

    def _check_trainable(self, tower, name, trainable):
        """Refuses a later tower's flag that is not tower 0's of the same turn; TensorFlow would take no notice of it."""
        turn = self._asked[name] = self._asked.get(name, -1) + 1
        if tower == 0:
            self._trainable.setdefault(name, []).append(trainable)
        elif turn < len(self._trainable.get(name, ())) and self._trainable[name][turn] != trainable:
            raise TowerMismatchError("Tower %d asks for the variable %r with trainable=%s, and tower 0 with trainable=%s. Ask "
                                     "for it alike in every tower." % (tower, name, trainable, self._trainable[name][turn]))

    def _get(self, tower, getter, name, args, kwargs):
        self._check_trainable(tower, name, kwargs.get("trainable") is not False)
        if tower == 0:
            self._in_get_variable = True
            try:
                variable = getter(name, *args, **kwargs)
            finally:
                self._in_get_variable = False
            self._by_get_variable[name] = variable
            return variable
        kwargs["reuse"] = True  # an inner AUTO_REUSE would make a variable that tower 0 does not know
        known = self._by_get_variable.get(name)
        if known is not None:
            if kwargs.get("initializer") is not None and not callable(kwargs["initializer"]):
                # Under reuse TensorFlow asks for float32 whatever the dtype of an initializer that is a value.
                kwargs["dtype"] = known.dtype.base_dtype
        try:
            variable = getter(name, *args, **kwargs)
        except ValueError as error:
            if known is not None:
                raise
            raise _only_later(name, tower) from error
        self._reveal(name)
        return variable

    def _create(self, tower, name_scope, next_creator, kwargs):
        if self._in_get_variable:
            return next_creator(**kwargs)
        scope = tf.get_default_graph().get_name_scope()
        relative = outside_of_tower(scope + "/" if scope else "", name_scope)
        if (kwargs.get("name") or "").endswith("/"):  # a whole name scope, as some of tf.metrics' variables have
            relative, kwargs = "", dict(kwargs, name=outside_of_tower(kwargs["name"], name_scope).rstrip("/"))
        creation = _Creation(relative, kwargs)
        if tower == 0:
            outer = outside_of_tower(name_scope, name_scope)
            if relative:
                relative = self._beside_earlier_builds(relative, outer)
            else:
                kwargs = dict(kwargs, name=self._beside_earlier_builds(creation.base_name, outer))
            with tf.name_scope(relative or None):
                creation.variable = next_creator(**kwargs)
            self._by_base_name.setdefault(creation.base_name, []).append(len(self._created))
            self._created.append(creation)
            return creation.variable
        return self._claim(tower, creation)

    def _beside_earlier_builds(self, name, outer):
        """Returns a name whose outermost scope in the model function no earlier build's variables have, as without towers."""
        if not name.startswith(outer) or "/" not in name[len(outer):]:
            return name
        scope, _, rest = name[len(outer):].partition("/")
        if scope not in self._scopes:
            graph, base = tf.get_default_graph(), re.sub(r"_\d+$", "", scope)
            with tf.name_scope(None):
                taken = graph.unique_name(outer + scope, mark_as_used=False) != outer + scope
                self._scopes[scope] = graph.unique_name(outer + (base if taken and base in self._scopes else scope))
        return self._scopes[scope] + "/" + rest

    def _claim(self, tower, creation):
        alike, form = self._by_base_name.get(creation.base_name, []), creation.form()
        free = [i for i in alike if i not in self._claimed and self._created[i].is_of(form)]
        chosen = next((i for i in free if self._created[i].full_name == creation.full_name), None)
        if chosen is None and all(self._created[i].full_name != creation.full_name for i in alike):
            plain = without_numbers(creation.full_name)
            chosen = next((i for i in free if without_numbers(self._created[i].full_name) == plain), None)
            self._by_turn.append(plain)
        if chosen is None:
            raise _only_later(creation.full_name, tower, self._created[alike[0]].variable if alike else None)
        self._claimed.add(chosen)
        self._reveal(self._created[chosen].variable.op.name)
        return self._created[chosen].variable

    def _check_turns(self, tower):
        """Refuses a match by turn where the tower left out one of tower 0's variables: which one, nobody knows."""
        for i, made in enumerate(self._created):
            if tower and i not in self._claimed and without_numbers(made.full_name) in self._by_turn:
                raise TowerMismatchError(
                    "Tower 0 makes the variable %r and tower %d makes fewer of that kind, so it is unknown which of them it "
                    "left out. Make the same variables in every tower." % (made.variable.op.name, tower))


class _Creation:
    """What a call of `tf.Variable` asks for."""

    def __init__(self, scope, kwargs):
        self.base_name = kwargs.get("name") or "Variable"
        self.full_name = scope + self.base_name
        self._kwargs = kwargs
        self.variable = None

    def form(self):
        """Returns what is asked for besides a name: shape, dtype, trainable. An initial value that is a function is called."""
        value, dtype = self._kwargs.get("initial_value"), self._kwargs.get("dtype")
        shape = self._kwargs.get("shape")
        if shape is None or dtype is None:
            value = tf.convert_to_tensor(value() if callable(value) else value, dtype=dtype)
            shape = value.shape if shape is None else shape
        return tf.TensorShape(shape), tf.as_dtype(dtype or value.dtype).base_dtype, self._is_trainable()

    def is_of(self, form):
        """Tells whether tower 0's variable has a form."""
        shape, dtype, is_trainable = form
        return (self.variable.shape.is_compatible_with(shape) and self.variable.dtype.base_dtype == dtype
                and self._is_trainable() == is_trainable)

    def _is_trainable(self):
        return self._kwargs.get("trainable") is not False


def _only_later(name, tower, nearest=None):
    hint = "" if nearest is None else " Tower 0's %r has shape %s and dtype %s." % (
        nearest.op.name, nearest.shape, nearest.dtype.base_dtype.name)
    return TowerMismatchError(
        "Tower %d makes the variable %r, which tower 0 does not make: it would be trained apart from the others.%s "
        "Make the same variables in every tower." % (tower, name, hint))
