"""Model functions at random: programs of a few ops that Hypothesis draws, and what they come to on towers and on one.

A program is a list of `Step`, each an op and some numbers that choose its inputs, axes and form. Choices go by symbolic shapes,
in which the number of examples is a letter, so a program makes the same ops for any number of examples, known or not.
"""
import functools
import itertools
import warnings
from typing import Any, NamedTuple, Tuple, Union

import numpy as np
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

import towers
from tests.support import SAID, build, cpus

Dim = Union[int, Tuple[str, int]]  # a number, or a letter times a number
N = ("n", 1)
SPLITS = [(3, 2), (2, 1, 3), (3, 0, 4), (1, 4)]
SCALE = 0.3  # keeps what is multiplied and added up again and again near 1
OPS = {}
# Of tf.gather with batch_dims earlier ones fail for a batch without examples.
GRADIENTS_OF_NO_ROWS = tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 16)


class Made(NamedTuple):
    """A tensor with its symbolic shape. Kind is "real", "truth" or "number"; numbers are below `bound`, a `Dim`."""
    tensor: Any
    dims: Tuple[Dim, ...]
    kind: str = "real"
    bound: Any = None


class Step(NamedTuple):
    op: str
    choices: Tuple[int, ...]


class Choice:
    """What the numbers of a step choose; where there are no more of them, the first of what there is."""

    def __init__(self, numbers):
        self._numbers = iter(numbers)

    def of(self, options):
        options = list(options)
        return options[next(self._numbers, 0) % len(options)]

    def from_here(self, options):
        """Returns the options, beginning with the one that is chosen."""
        options = list(options)
        start = next(self._numbers, 0) % len(options) if options else 0
        return options[start:] + options[:start]

    def flag(self):
        return self.of([False, True])


def op(*kinds):
    """Registers a function of a `Choice`, the values made so far, and one of each of these kinds; it may return None."""
    def register(function):
        OPS[function.__name__] = functools.partial(_first_that_fits, function, kinds)
        return function
    return register


def _first_that_fits(function, kinds, choice, values):
    for given in itertools.product(*(choice.from_here(v for v in reversed(values) if v.kind == kind) for kind in kinds)):
        found = function(choice, values, *given)
        if found is not None:
            return found
    return None


def times(dims):
    """Returns the product of dims, None where letters meet."""
    letters = [dim for dim in dims if not isinstance(dim, int)]
    number = int(np.prod([dim if isinstance(dim, int) else dim[1] for dim in dims], dtype=int))
    return None if len(letters) > 1 else (letters[0][0], number) if letters else number


def total(mine, theirs):
    """Returns the sum of two dims."""
    if isinstance(mine, int) and isinstance(theirs, int):
        return mine + theirs
    is_alike = not isinstance(mine, int) and not isinstance(theirs, int) and mine[0] == theirs[0]
    return (mine[0], mine[1] + theirs[1]) if is_alike else ("(%s+%s)" % (mine, theirs), 1)


def static(dims):
    return [dim if isinstance(dim, int) else -1 for dim in dims]


def size(made, axis):
    """Returns a dimension as a number where it is one, else as a scalar tensor."""
    return made.dims[axis] if isinstance(made.dims[axis], int) else tf.shape(made.tensor)[axis]


def letters_of(made):
    return [dim for dim in made.dims if not isinstance(dim, int)]


def is_long(made):
    """Tells whether a tensor has the examples along more than two axes, or more than four axes."""
    return len(letters_of(made)) > 2 or len(made.dims) > 4


def broadcast(a, b):
    dims = []
    for mine, theirs in itertools.zip_longest(reversed(a.dims), reversed(b.dims), fillvalue=1):
        if mine != theirs and 1 not in (mine, theirs):
            return None
        dims.append(theirs if mine == 1 else mine)
    return tuple(reversed(dims))


UNARY = [tf.sin, tf.tanh, tf.square, tf.sigmoid, tf.abs, lambda x: tf.exp(-tf.square(x)), tf.nn.relu, tf.nn.softplus, tf.negative,
         lambda x: 1.0 / (1.5 + tf.sin(x)), lambda x: tf.log(1.5 + tf.sin(x)), lambda x: tf.sqrt(0.1 + tf.square(x)),
         lambda x: tf.clip_by_value(x, -0.4, 0.6), tf.stop_gradient, tf.identity, lambda x: x + 0.25, lambda x: SCALE * x,
         tf.zeros_like, tf.ones_like, lambda x: tf.check_numerics(x, "x")]
BINARY = [tf.add, tf.subtract, tf.multiply, tf.maximum, tf.minimum, lambda a, b: a / (1.0 + tf.abs(b)), tf.squared_difference,
          lambda a, b: tf.div_no_nan(a, 1.0 + tf.square(b)), lambda a, b: tf.add_n([a, a]) * b]


@op("real")
def unary(choice, values, a):
    return a._replace(tensor=choice.of(UNARY)(a.tensor))


@op("real", "real")
def binary(choice, values, a, b):
    dims = broadcast(a, b)
    made = None if dims is None else Made(None, dims)
    return None if made is None or is_long(made) else made._replace(tensor=choice.of(BINARY)(a.tensor, b.tensor))


REDUCTIONS = [
    lambda x, axis, keep: SCALE * tf.reduce_sum(x, axis, keepdims=keep), tf.reduce_mean, tf.reduce_max, tf.reduce_min,
    tf.reduce_logsumexp,
    lambda x, axis, keep: tf.reduce_prod(1.0 + SCALE * tf.sin(x), axis, keepdims=keep),
    lambda x, axis, keep: tf.sqrt(0.1 + tf.math.reduce_variance(x, axis, keepdims=keep)),
    lambda x, axis, keep: tf.sqrt(0.1 + tf.reduce_sum(tf.square(x), axis, keepdims=keep)),
    lambda x, axis, keep: tf.nn.moments(x, axis, keep_dims=keep)[1]]


def axes_of(choice, made):
    axes = [axis for axis in range(len(made.dims)) if choice.flag()]
    return axes or [choice.of(range(len(made.dims)))]


@op("real")
def reduce(choice, values, a):
    if not a.dims:
        return None
    axes, keep = axes_of(choice, a), choice.flag()
    dims = tuple(1 if axis in axes else dim for axis, dim in enumerate(a.dims) if keep or axis not in axes)
    return Made(choice.of(REDUCTIONS)(a.tensor, axes, keep), dims)


ALONG = [lambda x, axis: tf.nn.softmax(x, axis), lambda x, axis: SCALE * tf.nn.log_softmax(x, axis),
         lambda x, axis: SCALE * tf.cumsum(x, axis), lambda x, axis: SCALE * tf.cumsum(x, axis, exclusive=True, reverse=True),
         lambda x, axis: tf.cumprod(1.0 + SCALE * tf.sin(x), axis), lambda x, axis: tf.nn.l2_normalize(x, axis, epsilon=0.1),
         lambda x, axis: tf.reverse(x, [axis]), lambda x, axis: tf.roll(x, 1, axis), lambda x, axis: tf.roll(x, -2, axis),
         lambda x, axis: tf.sort(x, axis), lambda x, axis: x - tf.reduce_mean(x, axis, keepdims=True)]


@op("real")
def along(choice, values, a):
    return None if not a.dims else a._replace(tensor=choice.of(ALONG)(a.tensor, choice.of(range(len(a.dims)))))


@op("real", "real")
def matmul(choice, values, a, b):
    if len(a.dims) != len(b.dims) or len(a.dims) not in (2, 3) or a.dims[:-2] != b.dims[:-2]:
        return None
    for turn_a, turn_b in choice.from_here(itertools.product([False, True], repeat=2)):
        rows, inner = a.dims[-2:][::-1] if turn_a else a.dims[-2:]
        same, columns = b.dims[-2:][::-1] if turn_b else b.dims[-2:]
        if inner == same:
            made = Made(SCALE * tf.matmul(a.tensor, b.tensor, transpose_a=turn_a, transpose_b=turn_b),
                        a.dims[:-2] + (rows, columns))
            return None if is_long(made) else made
    return None


@op("real", "real")
def einsum(choice, values, a, b):
    if not a.dims or not b.dims or len(a.dims) + len(b.dims) > 5:
        return None
    for mine, theirs in choice.from_here(itertools.product(range(len(a.dims)), range(len(b.dims)))):
        if a.dims[mine] == b.dims[theirs]:
            left, right = list("abcd"[:len(a.dims)]), list("wxyz"[:len(b.dims)])
            right[theirs] = left[mine]
            kept = [letter for letter in left + right if letter != left[mine]]
            dims = tuple(dict(zip(left + right, a.dims + b.dims))[letter] for letter in kept)
            found = tf.einsum("%s,%s->%s" % ("".join(left), "".join(right), "".join(kept)), a.tensor, b.tensor)
            return None if is_long(Made(None, dims)) else Made(SCALE * found, dims)
    return None


@op("real")
def transpose(choice, values, a):
    perm = choice.of(itertools.permutations(range(len(a.dims))))
    return None if len(a.dims) < 2 else Made(tf.transpose(a.tensor, perm), tuple(a.dims[axis] for axis in perm))


@op("real")
def reshape(choice, values, a):
    found = [a.dims[:axis] + (times(a.dims[axis:axis + 2]),) + a.dims[axis + 2:] for axis in range(len(a.dims) - 1)]
    found.append((times(a.dims),))
    for axis, dim in enumerate(a.dims):
        number, rest = (dim, 1) if isinstance(dim, int) else (dim[1], (dim[0], 1))
        for factor in (2, 3, 4):
            if number % factor == 0 and number:
                left = number // factor if isinstance(dim, int) else (rest[0], number // factor)
                found.append(a.dims[:axis] + (left, factor) + a.dims[axis + 1:])
    for dims in choice.from_here(found):
        if None in dims or sum(not isinstance(dim, int) for dim in dims) > 1:
            continue
        shape = static(dims)
        if -1 in shape and N in dims and N in a.dims and choice.flag():
            shape = [tf.shape(a.tensor)[a.dims.index(N)] if dim == -1 else dim for dim in shape]
        return Made(tf.reshape(a.tensor, shape), dims)
    return None


@op("real")
def expand(choice, values, a):
    axis = choice.of(range(len(a.dims) + 1))
    made = Made(tf.expand_dims(a.tensor, axis), a.dims[:axis] + (1,) + a.dims[axis:])
    return None if is_long(made) else made


@op("real")
def squeeze(choice, values, a):
    axes = [axis for axis, dim in enumerate(a.dims) if dim == 1]
    if not axes:
        return None
    axis = choice.of(axes)
    return Made(tf.squeeze(a.tensor, axis), a.dims[:axis] + a.dims[axis + 1:])


@op("real")
def tile(choice, values, a):
    if not a.dims:
        return None
    axis = choice.of(range(len(a.dims)))
    if a.dims[axis] == 1 and choice.flag() and len(letters_of(a)) < 2:  # repeated for each example
        like = next(v for v in values if v.dims and v.dims[0] == N)
        multiples = [tf.shape(like.tensor)[0] if k == axis else 1 for k in range(len(a.dims))]
        return Made(tf.tile(a.tensor, multiples), a.dims[:axis] + (N,) + a.dims[axis + 1:])
    return Made(tf.tile(a.tensor, [2 if k == axis else 1 for k in range(len(a.dims))]),
                a.dims[:axis] + (times((a.dims[axis], 2)),) + a.dims[axis + 1:])


@op("real", "real")
def concat(choice, values, a, b):
    if len(a.dims) != len(b.dims) or not a.dims:
        return None
    for axis in choice.from_here(range(len(a.dims))):
        others = [k for k in range(len(a.dims)) if k != axis]
        if all(a.dims[k] == b.dims[k] for k in others):
            dims = a.dims[:axis] + (total(a.dims[axis], b.dims[axis]),) + a.dims[axis + 1:]
            return Made(tf.concat([a.tensor, b.tensor], axis), dims)
    return None


@op("real", "real")
def stack(choice, values, a, b):
    axis = choice.of(range(len(a.dims) + 1))
    made = Made(None, a.dims[:axis] + (2,) + a.dims[axis:])
    return None if a.dims != b.dims or is_long(made) else made._replace(tensor=tf.stack([a.tensor, b.tensor], axis))


@op("real")
def unstack(choice, values, a):
    axes = [axis for axis, dim in enumerate(a.dims) if isinstance(dim, int)]
    if not axes:
        return None
    axis = choice.of(axes)
    part = choice.of(range(a.dims[axis])) if a.dims[axis] else None
    return None if part is None else Made(tf.unstack(a.tensor, a.dims[axis], axis)[part], a.dims[:axis] + a.dims[axis + 1:])


CUTS = [(slice(1, None), "%s-1"), (slice(None, -1), "%s-1"), (slice(None, None, 2), "%s/2"), (slice(None, None, -1), "%s"),
        (slice(None, 2), 2), (slice(-2, None), 2), (0, None), (-1, None)]


@op("real")
def cut(choice, values, a):
    """Parts along any axis; every batch here has two examples or more."""
    if not a.dims:
        return None
    axis = choice.of(range(len(a.dims)))
    taken, name = choice.of(CUTS)
    dim = a.dims[axis]
    if isinstance(dim, int):
        if dim < 2:
            return None
        left = len(range(dim)[taken]) if isinstance(taken, slice) else None
    elif dim[0] != "n":
        return None
    else:
        left = dim if name == "%s" else name if not isinstance(name, str) else (name % (dim,), 1)
    key = tuple(taken if k == axis else slice(None) for k in range(len(a.dims)))
    return Made(a.tensor[key], a.dims[:axis] + ((left,) if left is not None else ()) + a.dims[axis + 1:])


@op("real")
def pad(choice, values, a):
    axes = [axis for axis, dim in enumerate(a.dims) if isinstance(dim, int)]
    if not axes:
        return None
    axis, before = choice.of(axes), choice.of([0, 1])
    found = tf.pad(a.tensor, [[before, 1] if k == axis else [0, 0] for k in range(len(a.dims))], constant_values=0.5)
    return Made(found, a.dims[:axis] + (a.dims[axis] + before + 1,) + a.dims[axis + 1:])


@op("real")
def top_k(choice, values, a):
    if not a.dims or isinstance(a.dims[-1], int) and a.dims[-1] < 2 or not isinstance(a.dims[-1], int) and a.dims[-1][0] != "n":
        return None
    found = tf.nn.top_k(a.tensor, 2)
    if choice.flag():
        return Made(found.indices, a.dims[:-1] + (2,), "number", a.dims[-1])
    return Made(found.values, a.dims[:-1] + (2,))


@op("real")
def argument(choice, values, a):
    if not a.dims or 0 in a.dims:
        return None
    axis = choice.of(range(len(a.dims)))
    if choice.flag() and a.dims[axis] == N:
        return Made(tf.argsort(a.tensor, axis), a.dims, "number", a.dims[axis])
    found = choice.of([tf.argmax, tf.argmin])(a.tensor, axis, output_type=choice.of([tf.int32, tf.int64]))
    return Made(found, a.dims[:axis] + a.dims[axis + 1:], "number", a.dims[axis])


@op("real", "number")
def gather(choice, values, a, numbers):
    for axis in choice.from_here(range(len(a.dims))):
        if a.dims[axis] == numbers.bound:
            made = Made(None, a.dims[:axis] + numbers.dims + a.dims[axis + 1:])
            return None if is_long(made) else made._replace(tensor=tf.gather(a.tensor, numbers.tensor, axis=axis))
    return None


@op("real", "number")
def gather_of_each(choice, values, a, numbers):
    """A row of each example, by its own number."""
    if not GRADIENTS_OF_NO_ROWS or len(a.dims) < 2 or numbers.dims != a.dims[:1] or a.dims[1] != numbers.bound:
        return None
    return Made(tf.squeeze(tf.gather(a.tensor, numbers.tensor[:, None], batch_dims=1, axis=1), 1), a.dims[:1] + a.dims[2:])


@op("number")
def one_hot(choice, values, numbers):
    bound = numbers.bound
    if isinstance(bound, int):
        depth = bound
    else:
        like = [(v, axis) for v in values for axis, dim in enumerate(v.dims) if dim == bound]
        if not like:
            return None
        depth = tf.shape(like[0][0].tensor)[like[0][1]]
    made = Made(tf.one_hot(numbers.tensor, depth, dtype=tf.float64), numbers.dims + (bound,))
    return None if is_long(made) else made


@op("number")
def as_real(choice, values, numbers):
    return Made(SCALE * tf.cast(numbers.tensor, tf.float64), numbers.dims)


@op("real", "number")
def segments(choice, values, a, numbers):
    if not a.dims or numbers.dims != a.dims[:1] or not isinstance(numbers.bound, int) or not numbers.bound:
        return None
    reduction = choice.of([tf.math.unsorted_segment_sum, tf.math.unsorted_segment_mean, tf.math.unsorted_segment_max])
    found = reduction(a.tensor, numbers.tensor, numbers.bound)
    return Made(tf.clip_by_value(SCALE * found, -9.0, 9.0), (numbers.bound,) + a.dims[1:])


@op("real", "real")
def compare(choice, values, a, b):
    dims = broadcast(a, b)
    if dims is None or is_long(Made(None, dims)) or a is b:
        return None
    return Made(choice.of([tf.greater, tf.less, tf.greater_equal])(a.tensor, b.tensor), dims, "truth")


@op("real")
def above_its_mean(choice, values, a):
    return None if not a.dims else Made(a.tensor > tf.reduce_mean(a.tensor) + 0.03, a.dims, "truth")


@op("truth")
def truths(choice, values, a):
    if choice.flag() or not a.dims:
        return a._replace(tensor=tf.logical_not(a.tensor))
    axes = axes_of(choice, a)
    found = choice.of([tf.reduce_any, tf.reduce_all])(a.tensor, axes)
    return Made(found, tuple(dim for axis, dim in enumerate(a.dims) if axis not in axes), "truth")


@op("truth")
def mask(choice, values, a):
    return Made(tf.cast(a.tensor, tf.float64), a.dims)


@op("truth", "real")
def where(choice, values, truth, a):
    if broadcast(truth, a) != a.dims:
        return None
    return a._replace(tensor=tf.where_v2(truth.tensor, tf.sin(a.tensor), 0.2 - a.tensor))


@op("truth", "real")
def boolean_mask(choice, values, truth, a):
    if len(truth.dims) != 1 or truth.dims != a.dims[:1]:
        return None
    return Made(tf.boolean_mask(a.tensor, truth.tensor), (("%s of %d" % (truth.tensor.op.type, len(values)), 1),) + a.dims[1:])


@op("truth")
def places(choice, values, truth):
    if len(truth.dims) != 1:
        return None
    return Made(tf.where_v2(truth.tensor)[:, 0], (("places of %d" % len(values), 1),), "number", truth.dims[0])


@op("truth", "real")
def conditional(choice, values, truth, a):
    if truth.dims:
        return None
    return a._replace(tensor=tf.cond(truth.tensor, lambda: tf.sin(a.tensor), lambda: 0.5 * a.tensor))


@op("real")
def number_of(choice, values, a):
    if not letters_of(a):
        return None
    axis = choice.of(axis for axis, dim in enumerate(a.dims) if not isinstance(dim, int))
    number = choice.of([tf.shape(a.tensor)[axis], tf.size(a.tensor)])
    return Made(1.0 / (1.0 + tf.cast(number, tf.float64)) if choice.flag() else 0.05 * tf.cast(number, tf.float64), ())


@op("real")
def made_for_each(choice, values, a):
    axes = [axis for axis, dim in enumerate(a.dims) if dim == N]
    if not axes:
        return None
    number, form = tf.shape(a.tensor)[axes[0]], choice.of(range(4))
    if form == 0:
        return Made(tf.range(number), (N,), "number", N)
    if form == 1:
        return Made(tf.ones(tf.stack([number, 4]), tf.float64), (N, 4))
    if form == 2:
        return Made(tf.eye(number, dtype=tf.float64), (N, N))
    return Made(tf.linspace(tf.constant(0.0, tf.float64), 1.0, number), (N,))


@op("real")
def pairs(choice, values, a):
    """How far each two rows are apart."""
    if len(a.dims) != 2 or is_long(Made(None, (a.dims[0],) + a.dims)):
        return None
    return Made(tf.reduce_sum(tf.square(a.tensor[:, None] - a.tensor[None]), 2), (a.dims[0], a.dims[0]))


@op("real", "real")
def gradient(choice, values, a, b):
    """The gradient of what is made by what was made before."""
    if a is b:
        return None
    found = tf.gradients(choice.of([tf.reduce_mean, tf.reduce_sum])(tf.sin(a.tensor)), b.tensor)[0]
    return None if found is None else Made(tf.convert_to_tensor(found), b.dims)


@op("real")
def batch_norm(choice, values, a):
    if len(a.dims) < 2:
        return None
    mean, variance = tf.nn.moments(a.tensor, list(range(len(a.dims) - 1)), keep_dims=choice.flag())
    return a._replace(tensor=tf.nn.batch_normalization(a.tensor, mean, variance, None, None, 0.1))


@op("real")
def covariance(choice, values, a):
    """A product of a matrix with itself, and what matrices have."""
    if len(a.dims) != 2 or not isinstance(a.dims[1], int) or not 0 < a.dims[1] < 5:
        return None
    product = SCALE * tf.matmul(a.tensor, a.tensor, transpose_a=True) + tf.eye(a.dims[1], dtype=tf.float64)
    form = choice.of(range(4))
    if form == 3:
        return Made(tf.linalg.logdet(product), ())
    return Made([tf.linalg.cholesky, tf.linalg.inv, tf.linalg.diag_part][form](product), (a.dims[1],) * (1 if form == 2 else 2))


@op("real")
def convolution(choice, values, a):
    if len(a.dims) != 3 or not all(isinstance(dim, int) and dim > 1 for dim in a.dims[1:]):
        return None
    image = a.tensor[:, None]
    if choice.flag():
        return Made(tf.nn.avg_pool2d(image, (1, 2), (1, 1), "SAME")[:, 0], a.dims)
    filters = tf.reshape(tf.linspace(tf.constant(-0.4, tf.float64), 0.6, 2 * a.dims[2] * 3), [1, 2, a.dims[2], 3])
    return Made(tf.nn.conv2d(image, filters, (1, 1), "SAME")[:, 0], a.dims[:2] + (3,))


@op("real", "real")
def loss_of(choice, values, a, b):
    """A masked mean, as tf.losses computes it in float32."""
    if a.dims != b.dims or not a.dims or a is b:
        return None
    weights = tf.cast(b.tensor > 0.1, tf.float64) if choice.flag() else tf.ones_like(b.tensor)
    squares = tf.squared_difference(tf.stop_gradient(tf.sin(b.tensor)), a.tensor)
    return Made(tf.div_no_nan(tf.reduce_sum(squares * weights), tf.reduce_sum(weights)), ())


@op("real", "number")
def cross_entropy(choice, values, a, numbers):
    if len(a.dims) != 2 or numbers.dims != a.dims[:1] or a.dims[1] != numbers.bound or not isinstance(numbers.bound, int):
        return None
    return Made(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=numbers.tensor, logits=a.tensor), a.dims[:1])


@op("real")
def mapped(choice, values, a):
    if not a.dims or a.dims[0] == 0:
        return None
    return a._replace(tensor=tf.map_fn(lambda row: tf.sin(row) - SCALE * tf.reduce_sum(row), a.tensor))


@op("real")
def looped(choice, values, a):
    """A few turns, each of which needs something of all rows."""
    if len(a.dims) != 2 or not isinstance(a.dims[1], int):
        return None

    def turn(i, v):
        return i + 1, tf.nn.l2_normalize(tf.linalg.matvec(a.tensor, tf.linalg.matvec(a.tensor, v), transpose_a=True) + 0.1)

    return Made(tf.while_loop(lambda i, v: i < 3, turn, [0, tf.ones([a.dims[1]], tf.float64)])[1], (a.dims[1],))


@op("real", "number")
def scatter(choice, values, a, numbers):
    """Rows put where their numbers say, added up where they meet."""
    if not a.dims or numbers.dims != a.dims[:1] or not isinstance(numbers.bound, int):
        return None
    if not all(isinstance(dim, int) for dim in a.dims[1:]):
        return None
    shape = tf.constant((numbers.bound,) + a.dims[1:], numbers.tensor.dtype)
    return Made(SCALE * tf.scatter_nd(numbers.tensor[:, None], a.tensor, shape), (numbers.bound,) + a.dims[1:])


@op("real", "number")
def gather_nd(choice, values, a, numbers):
    """An entry of each row, by pairs of numbers."""
    if len(a.dims) < 2 or a.dims[0] != N or numbers.dims != (N,) or a.dims[1] != numbers.bound:
        return None
    own = tf.cast(tf.range(tf.shape(a.tensor)[0]), numbers.tensor.dtype)
    return Made(tf.gather_nd(a.tensor, tf.stack([own, numbers.tensor], 1)), (N,) + a.dims[2:])


@op("real", "truth")
def partition(choice, values, a, truth):
    """Rows by what is true of them, one part or both in another order."""
    if len(truth.dims) != 1 or truth.dims != a.dims[:1]:
        return None
    parts = tf.dynamic_partition(a.tensor, tf.cast(truth.tensor, tf.int32), 2)
    if choice.flag():
        return Made(tf.concat(parts, 0), a.dims)
    return Made(parts[choice.of([0, 1])], (("part of %d" % len(values), 1),) + a.dims[1:])


@op("real", "number")
def masked_by_length(choice, values, a, numbers):
    """Sequences as long as numbers say, masked or turned round."""
    if len(a.dims) < 2 or numbers.dims != a.dims[:1] or a.dims[1] != numbers.bound or not isinstance(numbers.bound, int):
        return None
    if choice.flag():
        return a._replace(tensor=tf.reverse_sequence(a.tensor, numbers.tensor, seq_axis=1, batch_axis=0))
    mask = tf.sequence_mask(numbers.tensor, numbers.bound, tf.float64)
    return a._replace(tensor=a.tensor * tf.reshape(mask, tf.concat([tf.shape(mask), [1] * (len(a.dims) - 2)], 0)))


@op("real", "number")
def counted(choice, values, a, numbers):
    """How many rows, or what of them, have each number."""
    if a.dims != numbers.dims or len(a.dims) != 1 or not isinstance(numbers.bound, int):
        return None
    weights = tf.stop_gradient(a.tensor) if choice.flag() else None
    found = tf.math.bincount(tf.cast(numbers.tensor, tf.int32), weights, numbers.bound, numbers.bound, dtype=tf.float64)
    return Made(SCALE * tf.stop_gradient(found), (numbers.bound,))


@op("real")
def scanned(choice, values, a):
    """A loop over rows, each turn of which goes on from the one before."""
    if not a.dims or a.dims[0] == 0:
        return None

    def turn(state, row):
        return 0.5 * state + tf.sin(row)

    start = tf.zeros(tf.shape(a.tensor)[1:], tf.float64)
    if choice.flag():
        return Made(tf.foldl(turn, a.tensor, start), a.dims[1:])
    return a._replace(tensor=tf.scan(turn, a.tensor, start))


@op("real")
def with_its_own_gradient(choice, values, a):
    @tf.custom_gradient
    def doubled(x):
        return tf.sin(x), lambda dy: 2.0 * dy * tf.cos(x)
    return a._replace(tensor=doubled(a.tensor))


@op("real")
def of_each_matrix(choice, values, a):
    """What a small matrix of each row has."""
    if len(a.dims) < 2 or not isinstance(a.dims[-1], int) or not 0 < a.dims[-1] < 5 or is_long(Made(None, a.dims + (1,))):
        return None
    product = SCALE * tf.sin(a.tensor[..., None]) * tf.sin(a.tensor[..., None, :]) + tf.eye(a.dims[-1], dtype=tf.float64)
    if choice.flag():
        return Made(tf.linalg.logdet(product), a.dims[:-1])
    return a._replace(tensor=tf.linalg.solve(product, a.tensor[..., None])[..., 0])


@op("real", "real")
def searched(choice, values, a, b):
    """Where values would stand among sorted ones."""
    if len(a.dims) != 1 or len(b.dims) != 1 or a is b:
        return None
    return Made(0.1 * tf.cast(tf.searchsorted(tf.sort(a.tensor), b.tensor), tf.float64), b.dims)


@op("real")
def written(choice, values, a):
    """What is written to a variable, and is compared after a step."""
    if a.dims != (4,):
        return None
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        state = tf.get_variable("state%d" % len(values), [4], tf.float64, tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(state, a.tensor))
    return a._replace(tensor=tf.sin(a.tensor))


def programs(ops=tuple(OPS)):
    """Draws lists of `Step`, of these ops."""
    step = st.builds(Step, st.sampled_from(sorted(ops)), st.lists(st.integers(0, 30), max_size=6).map(tuple))
    return st.lists(step, min_size=2, max_size=12)


def model_of(program):
    """Returns a model function that makes a program's ops, as far as each finds inputs that fit."""
    def model_fn(x, y, labels):
        with tf.variable_scope("", reuse=tf.AUTO_REUSE):
            w, matrix = (tf.get_variable(name, shape, tf.float64, tf.constant_initializer(
                np.linspace(-0.5, 0.9, int(np.prod(shape))).reshape(shape))) for name, shape in (("w", [4]), ("matrix", [4, 4])))
        values = [Made(w * 1.0, (4,)), Made(matrix * 1.0, (4, 4)), Made(labels, (N,), "number", 4), Made(y * w, (N, 4)),
                  Made(x * w, (N, 3, 4))]
        given = len(values)
        for step in program:
            made = OPS[step.op](Choice(step.choices), values)
            if made is not None:
                values.append(made)
        last = [v for v in values[given - 1:] if v.kind == "real"][-3:]
        loss = sum((tf.reduce_mean if k % 2 else tf.reduce_sum)(tf.sin(v.tensor)) / (k + 2) for k, v in enumerate(last))
        return {"loss": loss, "last": [v.tensor for v in values[given - 1:][-3:]]}
    return model_fn


def mean_model_of(program):
    """Returns a model function whose loss is made of means of what `model_of` makes last."""
    def model_fn(x, y, labels):
        last = model_of(program)(x, y, labels)["last"]
        return {"loss": sum(tf.reduce_mean(tf.sin(v)) / (k + 2) for k, v in enumerate(last) if v.dtype.is_floating)}
    return model_fn


def batch_of(total):
    """Returns arrays for x, y and labels."""
    rng = np.random.RandomState(3)
    return [rng.randn(total, 3, 4), rng.randn(total, 4), rng.randint(0, 4, total).astype(np.int32)]


def moved(value):
    """Returns an array whose last digits are others."""
    return value if value.dtype == np.int32 else value * (1 + 1e-13 * np.sin(1e3 * value))


class Ran(NamedTuple):
    loss: Any
    last: Any
    gradients: Any
    state: Any


def _run(replicas, last, feeds, times=1):
    """Returns a list of `Ran`, the first of the batch in `feeds`, the second of one whose last digits are others."""
    made = tf.train.GradientDescentOptimizer(0.1)
    grads = towers.average_gradients(replicas, towers.compute_gradients(replicas, made), "first")
    train_op = made.apply_gradients(grads)
    dense = {variable.op.name: tf.convert_to_tensor(gradient) for gradient, variable in grads}
    state = {variable.op.name: variable for variable in tf.global_variables()}
    options = tf.GraphOptions(optimizer_options=tf.OptimizerOptions(opt_level=tf.OptimizerOptions.L0))
    options.rewrite_options.disable_meta_optimizer = True
    config = towers.session_config(cpus(3))
    config.graph_options.CopyFrom(options)
    with tf.Session(config=config) as session:
        found = []
        for change in (np.asarray, moved)[:times]:
            session.run(tf.global_variables_initializer())
            for variable in tf.trainable_variables():
                variable.load(change(session.run(variable)), session)
            feeds = {holder: change(value) for holder, value in feeds.items()}
            loss, values, gradients = session.run([replicas.loss, last, dense], feeds)
            session.run(train_op, feeds)  # by itself: what it writes others would read, now before and now after
            found.append(Ran(loss, values, gradients, session.run(state)))
    return found


def on_one(program, total, is_known):
    """Returns `Ran` of one tower on the whole batch, and that of a batch and variables whose last digits are others."""
    with tf.Graph().as_default():
        given = [tf.placeholder(value.dtype, (total if is_known else None,) + value.shape[1:]) for value in batch_of(total)]
        replicas = build(model_of(program), tuple(given), 1)
        return _run(replicas, replicas[0].outputs["last"], dict(zip(given, batch_of(total))), 2)


def on_towers(program, split, is_known):
    """Returns `Ran` of towers with these numbers of examples, which the graph knows or not."""
    total, ends = sum(split), np.cumsum((0,) + split)
    with tf.Graph().as_default():
        parts, feeds = [], {}
        for start, end in zip(ends, ends[1:]):
            part = [tf.placeholder(value.dtype, (end - start if is_known else None,) + value.shape[1:])
                    for value in batch_of(total)]
            feeds.update((holder, value[start:end]) for holder, value in zip(part, batch_of(total)))
            parts.append(tuple(part))
        replicas = build(towers.whole_batch(model_of(program)), towers.PerTower(parts), len(split))
        return _run(replicas, replicas.merged()["last"], feeds)[0]


def on_plain_towers(program, num_towers, total, is_known):
    """Returns `Ran` of plain towers of `mean_model_of`, among which a batch is divided, and what was said meanwhile."""
    with tf.Graph().as_default():
        given = [tf.placeholder(value.dtype, (total if is_known else None,) + value.shape[1:]) for value in batch_of(total)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            replicas = build(mean_model_of(program), tuple(given), num_towers)
        said = [str(warning.message) for warning in caught if SAID in str(warning.message)]
        return _run(replicas, [], dict(zip(given, batch_of(total))))[0]._replace(state=None), said


def difference(one, other):
    """Returns how far two `Ran` are apart, as a share of the larger, or infinity for other shapes."""
    largest = 0.0
    for mine, theirs in zip(tf.nest.flatten(tuple(one)), tf.nest.flatten(tuple(other))):
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        if mine.shape != theirs.shape:
            return np.inf
        if mine.size and not np.array_equal(mine, theirs):
            with np.errstate(invalid="ignore"):
                largest = max(largest, np.max(np.abs(mine - theirs)) / max(1.0, np.max(np.abs(mine))))
            if not np.isfinite(largest):
                return np.inf
    return largest
