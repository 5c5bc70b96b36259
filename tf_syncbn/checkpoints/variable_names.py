"""Variable names of tf.layers, slim and tensorpack, mapped onto one another.

    kind             layers           slim             tensorpack
    moving_mean      moving_mean      moving_mean      mean/EMA
    moving_variance  moving_variance  moving_variance  variance/EMA
    kernel           kernel           weights          W
    bias             bias             biases           b

`gamma`, `beta` and the variables of batch renormalization have the same name in all; Keras 2 and `sync_batch_norm` name as
tf.layers does. A name's dialect is told by its own end, so a checkpoint may mix them. Optimizer slots and shadows of moving
averages (`conv1/W/Momentum`) go with their variable. A scope is its author's choice (`conv1/BatchNorm` in slim, `conv1/bn` in
tensorpack, `batch_normalization_3` in tf.layers), so scopes change only by patterns that are given.
"""
import re
from typing import Dict, Iterable, NamedTuple, Optional

__all__ = ["DIALECTS", "invert", "lines", "move", "recognize", "rename", "spell"]

# The same kinds in the same order; the names of tf.layers name the kinds. tensorpack has no separable convolution of its own.
DIALECTS = {
    "layers": ("kernel", "bias", "depthwise_kernel", "pointwise_kernel", "moving_mean", "moving_variance"),
    "slim": ("weights", "biases", "depthwise_weights", "pointwise_weights", "moving_mean", "moving_variance"),
    "tensorpack": ("W", "b", "depthwise_kernel", "pointwise_kernel", "mean/EMA", "variance/EMA"),
}
_SAME_IN_ALL = ("gamma", "beta", "moving_stddev", "renorm_mean", "renorm_stddev", "renorm_mean_weight",
                "renorm_stddev_weight")
_KINDS = {leaf: kind for leaves in DIALECTS.values() for leaf, kind in zip(leaves, DIALECTS["layers"])}
_KINDS.update((leaf, leaf) for leaf in _SAME_IN_ALL)
_KNOWN = re.compile("(.+)/(%s)$" % "|".join(_KINDS))
# The kernel and bias of tf.nn's RNN cells keep these names, whatever dialect the layers around them speak.
_CELL = re.compile(r"(_cell(_\d+)?|/gates|/candidate)$")


class _Name(NamedTuple):
    """A name in its parts. `dialects` are those that spell `leaf` so; where it is none, `kind` is None."""
    scope: str
    leaf: str
    slot: str
    kind: Optional[str]
    dialects: tuple


def rename(names: Iterable[str], to: str, scopes: Optional[Dict[str, str]] = None) -> Dict[str, str]:
    """Returns the names of variables in another dialect.

    Args:
      names: the names of all variables of a checkpoint or model; a slot is known by its variable being among them.
      to: "layers", "slim" or "tensorpack".
      scopes: dict {regular expression: replacement}, applied in order by `re.sub` to each scope.

    Returns:
      A dict from names to new names. Names of no known kind keep all but their scope.

    Raises:
      ValueError: for another dialect, two names that become one, or a pattern that matches no scope.
    """
    if to not in DIALECTS:
        raise ValueError("There is no dialect %r; there are %s." % (to, ", ".join(map(repr, DIALECTS))))
    new_names = {name: spell(parts, to) for name, parts in move(recognize(names), scopes).items()}
    clashes = {new: olds for new, olds in invert(new_names).items() if len(olds) > 1}
    if clashes:
        raise ValueError("Different variables would get the same name:" + lines(
            "%s would be %s" % (" and ".join(olds), new) for new, olds in sorted(clashes.items())))
    return new_names


def recognize(names):
    """Returns {name: its parts}."""
    names = set(names)
    return {name: _parts(name, names) for name in sorted(names)}


def _parts(name, names):
    base, slot = name, ""
    while True:
        match = _KNOWN.match(base)
        if match:
            scope, leaf = match.groups()
            kind = _KINDS[leaf]
            if not (kind in ("kernel", "bias") and _CELL.search(scope)):
                return _Name(scope, leaf, slot, kind, _dialects_of(scope, leaf, names))
        parent, _, last = base.rpartition("/")
        if parent not in names:
            return _Name(parent, last, slot, None, ())
        base, slot = parent, "/" + last + slot


def _dialects_of(scope, leaf, names):
    # tensorpack's BatchRenorm, unlike its BatchNorm, leaves tf.layers' names alone.
    if leaf in _SAME_IN_ALL or leaf.startswith("moving_") and scope + "/renorm_mean" in names:
        return tuple(DIALECTS)
    return tuple(dialect for dialect, leaves in DIALECTS.items() if leaf in leaves)


def spell(parts, to=None):
    """Returns the whole name in a dialect; None is its own."""
    leaf = parts.leaf
    if to and parts.kind and to not in parts.dialects:
        leaf = DIALECTS[to][DIALECTS["layers"].index(parts.kind)]
    return (parts.scope + "/" if parts.scope else "") + leaf + parts.slot


def move(recognized, scopes):
    """Returns `recognized` with other scopes. What has none stays where it is."""
    for pattern, replacement in dict(scopes or {}).items():
        scoped = {name: parts for name, parts in recognized.items() if parts.scope}
        try:
            if not any(re.search(pattern, parts.scope) for parts in scoped.values()):
                raise ValueError("The pattern %r matches no scope." % pattern)
            moved = {name: parts._replace(scope=re.sub(pattern, replacement, parts.scope).strip("/"))
                     for name, parts in scoped.items()}
        except (re.error, IndexError) as error:
            raise ValueError("%r with the replacement %r is no regular expression: %s." % (pattern, replacement, error))
        recognized = dict(recognized, **moved)
    return recognized


def invert(names):
    """Returns {value: list of its keys}."""
    inverted = {}
    for name, value in names.items():
        inverted.setdefault(value, []).append(name)
    return inverted


def lines(items):
    return "".join("\n  " + item for item in items)
