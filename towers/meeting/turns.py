"""The exchanges of a build in the turn in which every tower has to come to them."""
import re
from typing import NamedTuple

__all__ = ["Exchange", "TowerMismatchError", "Turns", "have_to_be_alike", "without_numbers"]


class TowerMismatchError(ValueError):
    """Towers that have to be alike differ: in their exchanges, variables, outputs or gradients."""


class Exchange(NamedTuple):
    """What a tower came to a forward exchange with, for later towers to be held against."""
    name: str
    kind: str
    dtypes: tuple
    shapes: tuple
    arguments: dict

    def __str__(self):
        contributions = ["%s%s" % (dtype.name, shape) for dtype, shape in zip(self.dtypes, self.shapes)]
        return "%s %r of %s" % (self.kind, self.name, ", ".join(contributions))

    def is_like(self, other):
        """Tells whether two towers' contributions can be aggregated as one exchange."""
        return (self.kind, self.dtypes) == (other.kind, other.dtypes) and all(
            shape.is_compatible_with(of_other) for shape, of_other in zip(self.shapes, other.shapes))

    def differing_argument(self, other):
        """Returns the name of an argument that two layers have other values of, or None."""
        names = [*self.arguments, *(name for name in other.arguments if name not in self.arguments)]
        return next((name for name in names if self.arguments.get(name) != other.arguments.get(name)), None)


class Turns:
    """The exchanges of tower 0, which the others have to make in its order.

    Args:
      num_towers: int.
    """

    def __init__(self, num_towers):
        self._exchanges = []
        self._left = [0] * num_towers  # how many exchanges each tower has left so far

    def __len__(self):
        return len(self._exchanges)

    def __getitem__(self, turn):
        return self._exchanges[turn]

    def described(self):
        """Returns a str for each exchange that says all of it that has to be alike, without the numbers of names."""
        return ["%s %r of %s%s" % (
            each.kind, without_numbers(each.name), ", ".join("%s%s" % pair for pair in zip(
                [dtype.name for dtype in each.dtypes], each.shapes)),
            "".join(", %s %s" % (name, each.arguments[name]) for name in sorted(each.arguments))) for each in self._exchanges]

    def next_of(self, tower):
        """Returns the number of a tower's next exchange."""
        return self._left[tower]

    def take(self, tower, came):
        """Returns the number of the `Exchange` that a tower came with; raises where it is not tower 0's of that turn."""
        turn = self._left[tower]
        if tower == 0:
            self._exchanges.append(came)
        elif turn == len(self._exchanges):
            raise TowerMismatchError("Tower %d has an exchange that tower 0 has not: %s, its number %d. %s"
                                     % (tower, came, turn, have_to_be_alike(came)))
        else:
            self._check_alike(tower, turn, came)
        self._left[tower] += 1
        return turn

    def _check_alike(self, tower, turn, came):
        expected = self._exchanges[turn]
        # Keras numbers its layers through the graph ('dense_3' in tower 1 where tower 0 has 'dense'). Such a name counts
        # as the same only if tower 0 has no exchange of that very name, which would mean another order.
        name = _of_op(came.name)
        elsewhere = any(name == _of_op(other.name) for other in self._exchanges)
        same_name = name == _of_op(expected.name) or not elsewhere and without_numbers(name) == without_numbers(expected.name)
        if not (came.is_like(expected) and same_name):
            raise TowerMismatchError("Towers differ at exchange %d: tower 0 has %s, tower %d has %s. %s"
                                     % (turn, expected, tower, came, have_to_be_alike(expected)))
        argument = expected.differing_argument(came)
        if argument is not None:
            raise TowerMismatchError(
                "Towers differ at exchange %d, %s %r: %s is %s in tower 0 and %s in tower %d. %s"
                % (turn, came.kind, came.name, argument, expected.arguments.get(argument), came.arguments.get(argument), tower,
                   have_to_be_alike(expected)))

    def check_complete(self, tower):
        """Raises `TowerMismatchError` if a tower whose model function returned left fewer exchanges than tower 0."""
        if self._left[tower] < len(self._exchanges):
            raise TowerMismatchError(
                "Tower %d has %d exchanges and tower 0 has %d; the first that tower %d lacks is %s. %s"
                % (tower, self._left[tower], len(self._exchanges), tower, self._exchanges[self._left[tower]],
                   have_to_be_alike(self._exchanges[self._left[tower]])))


def have_to_be_alike(exchange):
    """Returns what to say where not every tower makes an `Exchange`: of one that the model function asks for, or of others."""
    if "/whole_batch" in exchange.name:
        return "Towers meet there for the whole batch's sake: the model function has to compute the same in every tower."
    return "The model function has to build the same exchanges (synchronized layers, all_reduce, ...) in every tower."


def without_numbers(name):
    """Returns a name without the numbers that TensorFlow and Keras add to names that were taken, or the tower's within it."""
    name = re.sub(r"tower(_\d+)+(?=_)", "tower", name)  # of a scope's whole name with other marks for "/"
    return re.sub(r"_\d+(?=/|$)", "", name)


def _of_op(name):
    """Returns the name of an exchange without the number of the op that it is made for: a loop before it made more of them."""
    return re.sub(r"_\d+(?=/whole_batch(/|$))", "", name)
