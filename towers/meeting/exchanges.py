"""Where towers meet, without waiting for one another.

Each tower that comes to an exchange leaves its contribution and takes a stand-in: a tensor with the dtype and shape of the
result that fails when it is run, until the last tower has come; see `towers.meeting.meetings`. What ties towers together are data
edges alone: there is no rendezvous by name, so nothing can hang, and each model function stays plain sequential code.

No gradient passes an exchange. Functions that want one (`towers.meeting.cross_tower`) hang it on an op of their own by
`pass_with_gradient`, and meet again from its gradient function at `gradient_place`.
"""
from typing import Callable, List, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from towers.api.annotations import DType, Shape, Tensor, TensorLike
from towers.context import current_tower, is_differentiating
from towers.graph.gradient_hook import detail_of, with_gradient

__all__ = ["exchange", "gradient_place", "meet_at", "next_place", "others_here", "pass_with_gradient", "stands_at_exchange",
           "tower_here"]


def exchange(contributions: Sequence[TensorLike], aggregate: Callable[[List[List[Tensor]]], Sequence[Sequence[Tensor]]],
             results: Sequence[Tuple[DType, Shape]], kind: str = "exchange", name: Optional[str] = None) -> List[Tensor]:
    """Leaves this tower's contributions and returns what the aggregate of all towers' holds for it.

    Towers meet here. Outside of towers `aggregate` gets the one list of contributions and is computed where it stands.
    Gradients do not pass: what is returned is a constant to `tf.gradients`. `towers.all_reduce` and
    `towers.all_gather` are exchanges with gradients.

    Args:
      contributions: list of tensors, this tower's; the same number and dtypes in every tower.
      aggregate: a function of a list over towers of lists of contributions. Returns a list over towers of lists of
        tensors, what each tower gets. It is called once, with the aggregation device in force, when the last tower
        has come; the call that the last tower made is the one that counts.
      results: list of (dtype, shape) pairs, one for each tensor that a tower gets. Shapes may be partially known.
      kind: str, what this is, for messages.
      name: str, the name scope of the ops and the name in messages.

    Returns:
      A list of tensors, one for each pair in `results`.

    Raises:
      TowerMismatchError: (a ValueError) if this is not the exchange that tower 0 made in this turn. Towers that left
        fewer are found when the tower is complete.
      ValueError: inside control flow or in another graph than the towers'.

    Example:

        def largest(per_tower):
            return [[tf.reduce_max([value for value, in per_tower])]] * len(per_tower)

        of_all, = towers.exchange([tf.reduce_max(x)], largest, [(x.dtype, [])])
    """
    tower = others_here(kind)
    with tf.name_scope(name, kind.replace(" ", "_")):
        contributions = [tf.convert_to_tensor(c) for c in contributions]
        if tower is None:
            return [tf.stop_gradient(r) for r in aggregate([contributions])[0]]
        return meet_at(next_place(kind, contributions), contributions, aggregate, results)


def others_here(kind):
    """Returns what `tower_here` does, and None in a whole-batch model, which exchanges nothing by itself: it sees one tower."""
    tower = tower_here(kind)
    return None if current_tower() is not tower else tower


def tower_here(kind):
    """Returns the current tower, None outside of towers; refuses a forward pass that is built anew in a gradient pass."""
    if is_differentiating() and current_tower() is None:
        raise ValueError(
            "%s (in %r) is called while gradients of towers are built, as tf.contrib.layers.recompute_grad does: the towers "
            "can't meet there, and local statistics would be wrong. Recompute only what stands between such layers."
            % (kind, tf.get_default_graph().get_name_scope()))
    tower = current_tower()
    return tower if tower is None or tower.all_towers is None else tower.all_towers


def next_place(kind, contributions, shapes=None, arguments=None):
    """Returns the place in the current tower that stands for the exchange about to be made, checked against tower 0.

    Args:
      kind: str, for messages.
      contributions: list of tensors; their dtypes have to be those of tower 0.
      shapes: list of `tf.TensorShape` that have to be compatible with tower 0's; None is the contributions' own.
      arguments: dict of what else makes the exchange what it is, which has to be as in tower 0.
    """
    tower = tower_here(kind)
    name = tower.relative(tf.get_default_graph().get_name_scope() + "/")
    given = {key: _comparable(value, tower) for key, value in (arguments or {}).items()}
    return tower.meetings.forward_place(tower.local_index, name.rstrip("/"), kind, [c.dtype.base_dtype for c in contributions],
                                        shapes or [c.shape for c in contributions], given)


def _comparable(value, tower):
    """Returns an argument as towers compare it: a tensor of the tower's own by its kind, one from outside by its name."""
    op = getattr(value, "op", None)
    if isinstance(op, tf.Operation):
        return "a tensor" if op.name.startswith(tower.name_scope) else op.name
    return list(value) if isinstance(value, tuple) else value


def meet_at(place, contributions, aggregate, results, known=(), across=None):
    """Leaves contributions at a place, as `exchange` does, and returns the stand-ins of its results.

    Args:
      place: from `next_place` or `gradient_place`.
      contributions, aggregate, results: as for `exchange`.
      known: list of Python values, which the aggregate gets behind the tower's contributions.
      across: `towers.meeting.meetings.Across`, what of several workers' towers crosses between the workers; None is all
        contributions.
    """
    name = place.meetings.name_of(place) + ("/gradient" * (len(place.key) - 1))
    return place.meetings.meet(place, contributions, aggregate, results, name, known, across)


def pass_with_gradient(gradient, tensors, place, detail=None, name=None):
    """Passes tensors on by an op whose gradient may meet the other towers' at a place that belongs to `place`.

    Args:
      gradient: str, see `with_gradient`; the gradient function gets at `place` and `detail` by `gradient_place`.
      tensors: list of tensors.
      place: from `next_place` or `gradient_place`; None outside of towers.
      detail: anything that the gradient function wants back.
      name: str, of the op.

    Returns:
      A list of tensors.
    """
    return with_gradient(gradient, lambda: tf.identity_n(tensors, name), "IdentityN", _Origin(place, detail))


class _Origin:
    """What an op of `pass_with_gradient` hands its gradient function.

    Attributes:
      place: from `next_place` or `gradient_place`, or None.
      detail: see `pass_with_gradient`.
      calls: dict from labels of gradients to the number of their last call.
    """

    def __init__(self, place, detail):
        self.place, self.detail, self.calls = place, detail, {}


def gradient_place(op):
    """Returns where the gradient of `op` meets those of the other towers, and the detail that was noted with `op`.

    Returns:
      (place, detail): the place is a new one for each gradient call, and None for an op outside of towers.

    Raises:
      ValueError: if `op` was not made by this process's towers, as in a graph imported from a MetaGraph.
    """
    origin = detail_of(op)
    if origin is None:
        raise ValueError("No gradient passes the exchange %r: its graph was imported, and only the graph that "
                         "TowerBuilder.build made knows which towers meet there. Build the towers anew." % op.name)
    place = origin.place
    if place is not None:
        label = place.meetings.label_gradient()
        number = origin.calls[label] = origin.calls.get(label, -1) + 1
        place = place._replace(key=place.key + ((label, number),))
    return place, origin.detail


def stands_at_exchange(op):
    """Tells whether `op` hands on what towers exchanged itself, beside what this tower left perhaps."""
    tower, place = current_tower(), getattr(detail_of(op), "place", None)
    if tower is not None and op in tower.meetings.stand_ins:
        return True
    return place is not None and op.inputs[0].op in place.meetings.stand_ins
