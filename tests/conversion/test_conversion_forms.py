"""convert_model on batch norms that nobody made of tf.nn.moments over all axes but the last, and on what is like them.

Each is held to the law in float64, and in a sweep the unconverted model has to break it. What normalizes each example by
itself, in whatever layout, is left alone without a word.
"""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
from tests.support import build, has_tf_layers
from tests.sweeps import covering
from tests.conversion.test_conversion import by_moments, collect, variables
from towers.testing import assert_equals_one_batch

IS_TF1 = tf.__version__.startswith("1.")
SIZES = [[2, 5], [1, 4, 2]]


def batch_of(*shape):
    return (np.random.RandomState(0).randn(7, *shape),)


def model_of(layer, **kwargs):
    """A model function of two layers; what feeds the second one depends on the whole batch through the first one."""
    def model_fn(x):
        y = x * tf.get_variable("scale", [x.shape[-1]], x.dtype, tf.constant_initializer(1.3)) + 0.2
        for name in ("bn1", "bn2"):
            with tf.name_scope(name):
                y = tf.sin(2 * layer(y, **kwargs)) + x * x
        return tf.reduce_mean(tf.square(y - 0.3 * x))
    return model_fn


@pytest.fixture(params=["law", pytest.param("in full", marks=pytest.mark.sweep)])
def assert_law(request):
    """The law for 2 towers, of which one has one example, in float64; in full for others, and that unconverted ones break it."""
    in_full = request.param == "in full"

    def check(model_fn, batch, scopes=("bn1", "bn2"), kind="moments"):
        for sizes in SIZES if in_full else [[1, 6]]:
            converted = tf_syncbn.convert_model(model_fn)
            assert_equals_one_batch(converted, batch, num_towers=len(sizes), sizes=sizes)
            assert [(layer.scope, layer.kind) for layer in converted.converted] == [(scope, kind) for scope in scopes]
        if in_full:
            with pytest.raises(AssertionError, match="towers do not train as one"):
                assert_equals_one_batch(model_fn, batch, num_towers=2, sizes=SIZES[0])
    return check


def assert_left_alone(model_fn, batch):
    """Asserts that beside another batch norm a model function is left alone, without a warning."""
    def beside(x):
        with tf.name_scope("beside"):
            return {"loss": tf.reduce_mean(by_moments(tf.reshape(x, [-1, x.shape[-1]]), "bn")), "other": model_fn(x)}

    converted = tf_syncbn.convert_model(beside)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(converted, batch)
    assert [layer.scope for layer in converted.converted] == ["beside/bn"]


@pytest.mark.laws
def test_batch_norms_after_a_loop_train_as_one_tower_does(assert_law):
    """What a loop adds up is of the data only by way of the loop's other results, and of variables at once."""
    def model_fn(x):
        kernel = tf.get_variable("kernel", [3, 3], x.dtype, tf.constant_initializer(0.3))

        def body(i, state, total):
            state = tf.tanh(tf.matmul(state, kernel) + total)
            return i + 1, state, total + state * kernel[0]

        _, _, total = tf.while_loop(lambda i, *_: i < 3, body, (0, x, tf.zeros([x.shape[0], 3], x.dtype)))
        return tf.reduce_mean(tf.square(tf.sin(by_moments(total, "after")) - by_moments(x * kernel[1], "beside")))

    assert_law(model_fn, batch_of(3), ["after", "beside"])


@pytest.mark.laws
@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no recurrent cells")
@pytest.mark.parametrize("cell", covering(["GRUCell", "BasicLSTMCell"], one_in=4))
def test_batch_norms_after_a_recurrent_network_train_as_one_tower_does(cell, assert_law):
    def model_fn(x):
        y, state = tf.nn.dynamic_rnn(getattr(tf.nn.rnn_cell, cell)(3), x, dtype=x.dtype)
        last = tf.nest.flatten(state)[0]
        return tf.reduce_mean(tf.sin(by_moments(y, "bn1"))) + tf.reduce_mean(tf.sin(2 * by_moments(last, "bn2")))

    assert_law(model_fn, batch_of(4, 3), ["bn1", "bn2"])


def gathered_rows(x, index):
    """Rows of all examples' positions, by numbers that each example offsets by its own place, as a flow's warp takes them."""
    number, size = tf.shape(x)[0], int(x.shape[1])
    at = index + tf.expand_dims(tf.range(number) * size, 1)
    return tf.reshape(tf.gather(tf.reshape(x, [-1, x.shape[-1]]), at), [-1, size, x.shape[-1]])


def gathered_in_each(x, index):
    return tf.gather(x, index, batch_dims=1)


def gathered_by_coordinates(x, index):
    examples = tf.tile(tf.expand_dims(tf.range(tf.shape(x)[0]), 1), [1, x.shape[1]])
    return tf.gather_nd(x, tf.stack([examples, index], 2))


WARPS = pytest.mark.parametrize("warp", covering([gathered_rows, gathered_in_each, gathered_by_coordinates], one_in=4))


def warped_to_channels(x, warp):
    """Each example's positions at places that it points to itself; blocks of two become channels."""
    size = int(x.shape[1])
    index = tf.clip_by_value(tf.cast(tf.floor(2 * x[:, :, 0]), tf.int32) + tf.range(size), 0, size - 1)
    blocks = tf.reshape(warp(x, index), [-1, size // 2, 2, x.shape[-1]])
    return tf.reshape(tf.transpose(blocks, [0, 1, 3, 2]), [-1, size // 2, 2 * int(x.shape[-1])])


@WARPS
def test_batch_norms_of_what_each_example_takes_of_its_own_train_as_one_tower_does(warp, assert_law):
    def model_fn(x):
        y = x * tf.get_variable("scale", [x.shape[-1]], x.dtype, tf.constant_initializer(1.3)) + 0.2
        y = by_moments(warped_to_channels(by_moments(y, "bn1"), warp), "bn2")
        return tf.reduce_mean(tf.square(tf.sin(y)))

    assert_law(model_fn, batch_of(4, 3), ["bn1", "bn2"])


def last_steps(x):
    """The last step of a sequence that was turned to [time, batch], of each example by its number."""
    size = tf.shape(x)[0]
    last = tf.gather_nd(tf.transpose(x, [1, 0, 2]), tf.stack([tf.fill([size], int(x.shape[1]) - 1), tf.range(size)], 1))
    return tf.reshape(last, [-1, x.shape[-1]])


def fixed_steps(x):
    return tf.transpose(tf.gather_nd(tf.transpose(x, [1, 0, 2]), [[3], [1]]), [1, 0, 2])


def valid_steps(x):
    steps = tf.transpose(x, [1, 0, 2])
    return tf.dynamic_partition(steps, tf.cast(steps[:, :, 0] > 0, tf.int32), 2)[1]


@pytest.mark.parametrize("take", covering([last_steps, fixed_steps, valid_steps], one_in=4))
def test_batch_norms_of_steps_that_are_taken_of_turned_sequences_train_as_one_tower_does(take, assert_law):
    def model_fn(x):
        y = x * tf.get_variable("scale", [x.shape[-1]], x.dtype, tf.constant_initializer(1.3)) + 0.2
        y = by_moments(take(by_moments(y, "bn1")), "bn2")
        return tf.reduce_sum(tf.square(tf.sin(y))) / tf.cast(tf.shape(x)[0], x.dtype)

    assert_law(model_fn, batch_of(4, 3), ["bn1", "bn2"])


def test_a_batch_norm_of_a_first_state_of_zeros_is_converted_as_those_of_later_states_are():
    """It depends on no data, as a standardized weight does, but it has moving averages, which the later ones share."""
    def model_fn(x):
        kernel = tf.get_variable("kernel", [3, 3], x.dtype, tf.constant_initializer(0.3))
        state = tf.zeros([int(x.shape[0]), 3], x.dtype)
        for step in range(3):
            with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
                state = tf.tanh(x[:, step] + by_moments(tf.matmul(state, kernel), "bn"))
        return tf.reduce_mean(tf.square(tf.sin(state)))

    converted = tf_syncbn.convert_model(model_fn)
    assert_equals_one_batch(converted, batch_of(3, 3), 2, SIZES[0], update_ops="none")
    assert len(converted.converted) == 3


@pytest.mark.parametrize("channels", covering([2, 3, 4], one_in=4))
def test_batch_norms_of_correlations_with_each_examples_own_template_train_as_one_tower_does(channels, assert_law):
    """As trackers have it: the templates of all examples are one filter, of as many channels as they have together."""
    def model_fn(x):
        y = by_moments(tf.matmul(tf.reshape(x, [-1, 3]), tf.get_variable("kernel", [3, channels], x.dtype)), "bn1")
        image = tf.transpose(tf.reshape(y, [-1, 4, 4, channels]), [1, 2, 0, 3])
        of_all = tf.shape(x)[0] * channels
        template = tf.reshape(image[1:3, 1:3], [2, 2, of_all, 1])
        y = tf.nn.depthwise_conv2d(tf.reshape(image, [1, 4, 4, of_all]), template, [1, 1, 1, 1], "VALID")
        y = by_moments(tf.transpose(tf.reshape(y, [3, 3, -1, channels]), [2, 0, 1, 3]), "bn2")
        return tf.reduce_mean(tf.square(tf.reduce_mean(tf.sin(y), [1, 2]) - 0.1))

    assert_law(model_fn, batch_of(4, 4, 3), ["bn1"])  # what is correlated is whole in every tower


@pytest.mark.parametrize("sizes", covering([[1, 1, 1], [2, 1]], one_in=4))
def test_one_less_a_learned_share_is_no_number_of_examples(sizes):
    def model_fn(x):
        x = x * tf.get_variable("scale", [x.shape[-1]], x.dtype, tf.constant_initializer(1.3))
        share = tf.sigmoid(tf.get_variable("share", [], x.dtype, tf.zeros_initializer()))
        mean = (1 - share) * tf.reduce_mean(x, 0) + 0.3 * share
        variance = tf.reduce_mean(tf.square(x - mean), 0)
        return tf.reduce_mean(tf.square(tf.sin((x - mean) / tf.sqrt(variance + 1e-3))))

    x = np.random.RandomState(0).randn(3, 4)
    assert_equals_one_batch(tf_syncbn.convert_model(model_fn), (x,), len(sizes), sizes)


@WARPS
def test_fused_batch_norms_of_what_each_example_takes_of_its_own_are_converted(warp):
    def model_fn(x):
        y = tf.expand_dims(warped_to_channels(x, warp), 1)
        with tf.name_scope("bn"):
            return tf.reduce_mean(tf.nn.fused_batch_norm(y, tf.ones([6]), tf.zeros([6]))[0])

    converted = tf_syncbn.convert_model(model_fn)
    build(converted, (tf.constant(batch_of(4, 3)[0], tf.float32),))
    assert [layer.scope for layer in converted.converted] == ["bn"]


def normalize(x, axes, keep_dims=True):
    mean, variance = tf.nn.moments(x, axes, keep_dims=keep_dims)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def transposed(x):
    """Channels along axis 0, examples along the last."""
    return tf.transpose(normalize(tf.transpose(x, [2, 1, 0]), [1, 2]), [2, 1, 0])


def switchable(x):
    """Moments of the batch, of each example and of each position, mixed."""
    weights = tf.nn.softmax(tf.get_variable(tf.get_default_graph().get_name_scope().split("/")[-1], [3], x.dtype))
    moments = zip(*[tf.nn.moments(x, axes, keep_dims=True) for axes in ([0, 1], [1], [2])])
    mean, variance = (sum(w * m for w, m in zip(tf.unstack(weights), several)) for several in moments)
    return (x - mean) * tf.rsqrt(variance + 1e-3)


def matrix_transposed(x):
    return tf.transpose(normalize(tf.transpose(x), [1]))


def time_major(x):
    """Each step of time has moments of its own."""
    return tf.transpose(normalize(tf.transpose(x, [1, 0, 2]), [1]), [1, 0, 2])


def time_major_and_flat(x):
    time, _, channels = tf.transpose(x, [1, 0, 2]).shape
    y = tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, channels])
    y = tf.reshape(2 * y, [time, -1, channels])
    return tf.transpose(normalize(y, [1]), [1, 0, 2])


def of_unknown_sizes(x):
    """As `time_major_and_flat`, where only tf.shape knows the sizes of the batch."""
    size = tf.shape(tf.placeholder_with_default(x, [None] + x.shape.as_list()[1:]))[0]
    y = tf.transpose(tf.reshape(x, tf.stack([size, 4, 3])), [1, 0, 2])
    y = tf.reshape(tf.reshape(y, [4 * size, 3]), tf.stack([4, size, 3]))
    return tf.reshape(tf.transpose(normalize(y, [1]), [1, 0, 2]), tf.shape(x))


def expanded(x):
    return tf.squeeze(normalize(tf.expand_dims(x, 0), [0, 1, 2]), [0])


def each_activation(x):
    return normalize(x, [0])


def each_group(x):
    """Groups of channels, over the batch."""
    grouped = tf.reshape(x, [-1, 2, 2, 2])
    return tf.reshape(normalize(grouped, [0, 1, 3]), tf.shape(x))


def axes_of(x):
    """All axes but the last one, computed as Lingvo's layer does."""
    return tf.range(0, tf.rank(x) - 1)


def of_computed_axes(x):
    mean = tf.reduce_mean(x, axes_of(x))
    return (x - mean) * tf.rsqrt(tf.reduce_mean(tf.math.squared_difference(x, mean), axes_of(x)) + 1e-3)


def all_at_once(x):
    return normalize(x, list(range(x.shape.rank)))


def stacked(x):
    return tf.stack([normalize(part, [0]) for part in tf.unstack(x, axis=1)], 1)


@pytest.mark.parametrize("layer_and_shape", covering([
    (transposed, [4, 3]), (switchable, [4, 3]), (matrix_transposed, [3]), (time_major, [4, 3]), (time_major_and_flat, [4, 3]),
    (of_unknown_sizes, [4, 3]), (expanded, [4, 3]), (each_activation, [4, 3]), (each_group, [2, 4]), (all_at_once, [4, 3]),
    (of_computed_axes, [4, 3])], one_in=4))
def test_examples_are_followed_to_the_axis_that_they_lie_along(layer_and_shape, assert_law):
    layer, shape = layer_and_shape
    assert_law(model_of(layer), batch_of(*shape))


def test_parts_of_examples_are_batch_norms_each(assert_law):
    assert_law(model_of(stacked), batch_of(2, 3), ["bn1", "bn1", "bn2", "bn2"])


def centred(x):
    mean = tf.reduce_mean(x, 0)
    return x - mean, tf.reduce_mean(tf.square(x - mean), 0) + 1e-3


@pytest.mark.parametrize("invert", covering([
    lambda v: tf.exp(-0.5 * tf.log(v)), lambda v: 1 / tf.exp(0.5 * tf.log(v)), lambda v: v ** -0.5, lambda v: tf.pow(v, -0.5),
    lambda v: tf.reciprocal(tf.sqrt(v)), lambda v: tf.sqrt(1 / v), lambda v: 1 / (tf.sqrt(v) + 0.1)], one_in=4))
def test_roots_are_known_however_they_are_written(invert, assert_law):
    def layer(x):
        difference, variance = centred(x)
        return difference * invert(variance)

    assert_law(model_of(layer), batch_of(3))


def test_moments_handed_to_a_fused_op_are_those_of_all_towers():
    def layer(x):
        y = tf.cast(tf.reshape(x, [-1, 2, 2, 3]), tf.float32)
        mean, variance = tf.nn.moments(y, [0, 1, 2])
        y = tf.nn.fused_batch_norm(y, tf.ones([3]), tf.zeros([3]), mean, variance, 1e-3, is_training=False)[0]
        return tf.reshape(y, tf.shape(x))

    def model_fn(x):
        x = tf.cast(x, tf.float32)
        return tf.reduce_mean(tf.square(tf.sin(2 * layer(x * tf.get_variable("scale", [3], tf.float32))) - x))

    converted = tf_syncbn.convert_model(model_fn)
    assert_equals_one_batch(converted, batch_of(4, 3), num_towers=2, sizes=SIZES[0])
    assert [layer.kind for layer in converted.converted] == ["moments"]


def of_squares(x):
    mean = tf.reduce_mean(x, 0)
    variance = tf.reduce_mean(tf.square(x), 0) - tf.square(mean)
    return (x - mean) * tf.rsqrt(variance + 1e-3)


def of_sums(x):
    """Sums, divided by the number of examples."""
    count = tf.cast(tf.shape(x)[0], x.dtype)
    mean = tf.reduce_sum(x, 0) / count
    return (x - mean) / tf.sqrt(tf.reduce_sum((x - mean) ** 2, 0) / count + 1e-3)


def of_sums_with_an_offset(x):
    """The offset is reached by the product of what is divided by the count and of the root."""
    count = tf.cast(tf.shape(x)[0], x.dtype)
    mean = tf.reduce_sum(x, 0) / count
    variance = tf.reduce_sum((x - mean) ** 2, 0) / count
    return tf.nn.batch_normalization(x, mean, variance, tf.constant([0.1, -0.2, 0.3], x.dtype), None, 1e-3)


def of_sums_of_unknown_size_with_an_offset(x):
    return of_sums_with_an_offset(by_unknown_size(x))


def of_sums_by(x, n, total=lambda x: tf.reduce_sum(x, [0, 1])):
    mean = total(x) / n
    return (x - mean) / tf.sqrt(total((x - mean) ** 2) / n + 1e-3)


def of_sums_of_means(x):
    """Divided by how many means there are, not by how many numbers these are of."""
    return of_sums_by(x, tf.cast(tf.shape(x)[0], x.dtype), lambda x: tf.reduce_sum(tf.reduce_mean(x, 1), 0))


def of_sums_by_a_quotient(x):
    return of_sums_by(x, tf.cast(tf.size(x), x.dtype) / 3)


def of_sums_by_a_product(x):
    size, length, _ = tf.unstack(tf.shape(x))
    return of_sums_by(x, tf.cast(size * length, x.dtype))


def of_sums_of_sums_by_a_product(x):
    return of_sums_by(x, tf.cast(tf.shape(x)[0], x.dtype) * 4, lambda x: tf.reduce_sum(tf.reduce_sum(x, 1), 0))


def corrected_by_a_product(x):
    mean, variance = tf.nn.moments(x, [0, 1])
    size, length, _ = tf.unstack(tf.shape(x))
    n = tf.cast(size * length, x.dtype)
    return (x - mean) / tf.sqrt(variance * n / (n - 1) + 1e-3)


def corrected(x):
    """Of a known size `tf.shape` is a constant, and n is computed of it."""
    mean, variance = tf.nn.moments(x, [0, 1])
    n = [tf.cast(tf.reduce_prod(tf.shape(x)[:2]), x.dtype) for _ in range(2)]
    return (x - mean) / tf.sqrt(variance * n[0] / (n[1] - 1) + 1e-3)


def corrected_at_once(x):
    mean, variance = tf.nn.moments(x, [0, 1])
    n = tf.cast(tf.reduce_prod(tf.shape(x)[:2]), x.dtype)
    return (x - mean) / tf.sqrt(variance * (n / tf.maximum(n - 1, 1)) + 1e-3)


def corrected_of_unknown_size(x):
    return corrected(by_unknown_size(x))


def of_sums_by_a_constant(x):
    count = x.shape.as_list()[0]
    mean = tf.reduce_sum(x, 0) / count
    return (x - mean) / tf.sqrt(tf.reduce_sum((x - mean) ** 2, 0) / count + 1e-3)


def of_sums_of_sums(x):
    count = x.shape.as_list()[0] * x.shape.as_list()[1]
    mean = tf.reduce_sum(tf.reduce_sum(x, 1), 0) / count
    return (x - mean) / tf.sqrt(tf.reduce_sum(tf.reduce_sum((x - mean) ** 2, 0), 0) / count + 1e-3)


def by_computing_formula(x):
    count, total = x.shape.as_list()[0], tf.reduce_sum(x, 0)
    variance = (tf.reduce_sum(x * x, 0) - total * total / count) / count
    return (x - total / count) / tf.sqrt(variance + 1e-3)


def unbiased(x):
    count = tf.shape(x)[0] * tf.shape(x)[1]
    mean = tf.reduce_sum(x, [0, 1]) / tf.cast(count, x.dtype)
    return (x - mean) / tf.sqrt(tf.reduce_sum((x - mean) ** 2, [0, 1]) / tf.cast(count - 1, x.dtype) + 1e-3)


def of_sufficient_statistics(x):
    statistics = tf.nn.sufficient_statistics(x, [0, 1])
    mean, variance = tf.nn.normalize_moments(*statistics[:3], shift=None)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def of_sufficient_statistics_of_unknown_size(x):
    x = tf.placeholder_with_default(x, [None] + x.shape.as_list()[1:])
    return of_sufficient_statistics(x)


def weighted(x):
    mean, variance = tf.nn.weighted_moments(x, [0, 1], tf.square(x[:, :, :1]) + 0.1)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def masked(x):
    mask = tf.cast(x[:, :, :1] > -0.5, x.dtype)
    count = tf.reduce_sum(mask)
    mean = tf.reduce_sum(mask * x, [0, 1]) / count
    return (x - mean) / tf.sqrt(tf.reduce_sum(mask * (x - mean) ** 2, [0, 1]) / count + 1e-3)


def of_sums_along_computed_axes(x):
    count = tf.maximum(tf.reduce_sum(tf.ones_like(x[..., :1]), axes_of(x)), 1)
    mean = tf.reduce_sum(x, axes_of(x)) / count
    variance = tf.reduce_sum(tf.math.squared_difference(x, mean), axes_of(x)) / count
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def by_norm(x):
    return tf.nn.l2_normalize(x, 0)


def by_mean_square(x):
    """What is subtracted is no part of what it is divided by."""
    return (x - tf.reduce_mean(x, 0)) * tf.rsqrt(tf.reduce_mean(x ** 2, 0) + 1e-3)


def mean_of_means(x):
    mean = tf.reduce_mean(tf.reduce_mean(x, 1, keepdims=True), 0, keepdims=True)
    variance = tf.reduce_mean(tf.reduce_mean((x - mean) ** 2, 1, keepdims=True), 0, keepdims=True)
    return (x - mean) / tf.sqrt(variance + 1e-3)


def as_in_keras(x):
    """As Keras' synchronized layer has it: sums of values and of squares over a number that all replicas would add up."""
    size = tf.cast(tf.reduce_prod([tf.shape(by_unknown_size(x))[axis] for axis in (0, 1)]), x.dtype)
    mean, of_squares = tf.reduce_sum(x, [0, 1], keepdims=True) / size, tf.reduce_sum(x * x, [0, 1], keepdims=True) / size
    return tf.nn.batch_normalization(x, mean, of_squares - tf.square(mean), None, None, 1e-3)


def of_shifted_statistics(x):
    shift = tf.stop_gradient(tf.get_variable("shift", [3], x.dtype, tf.constant_initializer(0.2), trainable=False))
    counts, sums, squares, _ = tf.nn.sufficient_statistics(x, [0, 1], shift=shift)
    mean, variance = tf.nn.normalize_moments(counts, sums, squares, shift)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def of_squares_and_other_uses(x):
    """The mean of the squares is read by something else than the variance too."""
    mean, of_squares = tf.reduce_mean(x, 0), tf.reduce_mean(x ** 2, 0)
    return (x - mean) * tf.rsqrt(tf.maximum(of_squares - mean ** 2, 0) + 1e-3 * of_squares)


def of_sums_of_squares_and_other_uses(x):
    count = tf.cast(tf.shape(x)[0], x.dtype)
    mean, of_squares = tf.reduce_sum(x, 0) / count, tf.reduce_sum(x ** 2, 0) / count
    return (x - mean) * tf.rsqrt(of_squares - mean ** 2 + 1e-3 * of_squares)


def sums_over_less_than_their_number(x):
    """No variance: the sums are over two axes, the number is of one."""
    count = tf.cast(tf.shape(by_unknown_size(x))[0], x.dtype)
    mean, of_squares = tf.reduce_sum(x, [0, 1]) / count, tf.reduce_sum(x * x, [0, 1]) / count
    return (x - mean) * tf.rsqrt(of_squares - mean ** 2 + 1e3)


def squares_of_another(x):
    """No variance: the mean is of something else than the squares."""
    return x * tf.rsqrt(tf.reduce_mean(x ** 2, 0) - tf.reduce_mean(tf.sin(x), 0) ** 2 + 1e3)


@pytest.mark.parametrize("layer_and_shape", covering([
    (of_sums, [3]), (of_sums_with_an_offset, [3]), (of_sums_of_unknown_size_with_an_offset, [3]), (of_sums_by_a_constant, [3]),
    (of_sums_of_means, [4, 3]), (of_sums_by_a_quotient, [4, 3]), (of_sums_by_a_product, [4, 3]),
    (of_sums_of_sums_by_a_product, [4, 3]), (of_sums_of_sums, [4, 3]), (by_computing_formula, [3]), (unbiased, [4, 3]),
    (weighted, [4, 3]), (masked, [4, 3]), (of_sums_along_computed_axes, [4, 3]), (by_norm, [4, 3]), (by_mean_square, [3]),
    (mean_of_means, [4, 3]), (sums_over_less_than_their_number, [4, 3]), (squares_of_another, [3])], one_in=4))
def test_sums_and_means_over_examples_become_those_of_all_towers(layer_and_shape, assert_law):
    layer, shape = layer_and_shape
    scopes = ["bn1/l2_normalize", "bn2/l2_normalize"] if layer is by_norm else ["bn1", "bn2"]
    assert_law(model_of(layer), batch_of(*shape), scopes, "sums")


@pytest.mark.parametrize("layer,first,sizes", covering(
    [of_sums, of_sums_by_a_constant, of_sums_of_sums, by_computing_formula, masked], [masked, corrected, corrected_at_once],
    SIZES[::-1], one_in=4))
def test_what_follows_a_batch_norm_is_divided_by_its_own_number(sizes, first, layer):
    model = tf_syncbn.convert_model(model_of(lambda x: layer(first(x) + 0.5 * x)))
    assert_equals_one_batch(model, batch_of(4, 3), len(sizes), sizes)


@pytest.mark.laws
@pytest.mark.parametrize("of_each,layer", covering([
    lambda x: tf.stack([tf.sin(row) for row in tf.unstack(x)]), lambda x: tf.stack([tf.sin(x[i]) for i in range(x.shape[0])]),
    lambda x: tf.concat([tf.sin(row) for row in tf.split(x, int(x.shape[0]))], 0), lambda x: tf.map_fn(tf.sin, x),
    lambda x: tf.map_fn(lambda row: row - tf.reduce_mean(row, 0), x)],
    [mean_of_means, of_sums], one_in=2))
def test_a_batch_norm_of_what_was_made_of_each_example_is_found(layer, of_each):
    model = tf_syncbn.convert_model(model_of(lambda x: layer(of_each(mean_of_means(x)))))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="convert_model")
        assert_equals_one_batch(model, batch_of(4, 3), 2, [4, 3])


@pytest.mark.parametrize("layer", covering(
    [corrected, corrected_at_once, corrected_of_unknown_size, corrected_by_a_product], one_in=4))
def test_bessels_correction_is_that_of_all_towers(layer, assert_law):
    assert_law(model_of(layer), batch_of(4, 3))


def of_mean_squares(x):
    mean = tf.reduce_mean(x, [0, 1])
    return mean, tf.reduce_mean(x ** 2, [0, 1]) - mean ** 2


def of_added_squares(x):
    n = tf.cast(tf.shape(x)[0] * tf.shape(x)[1], x.dtype)
    mean = tf.reduce_sum(x, [0, 1]) / n
    return mean, tf.reduce_sum((x - mean) ** 2, [0, 1]) / n


CORRECTIONS = {"factor by factor": lambda v, n: v * n / (n - 1), "times a quotient": lambda v, n: v * (n / (n - 1)),
               "a quotient times": lambda v, n: n / (n - 1) * v, "by a quotient": lambda v, n: v / ((n - 1) / n)}


@pytest.mark.parametrize("correction,moments,is_known", covering(
    sorted(CORRECTIONS), [lambda x: tf.nn.moments(x, [0, 1]), of_mean_squares, of_added_squares], [True, False], one_in=4))
def test_bessels_correction_is_that_of_all_towers_however_it_is_written(correction, moments, is_known):
    def layer(x):
        x = x if is_known else by_unknown_size(x)
        mean, variance = moments(x)
        variance = CORRECTIONS[correction](variance, tf.cast(tf.shape(x)[0] * tf.shape(x)[1], x.dtype))
        return (x - mean) / tf.sqrt(variance + 1e-3)

    assert_equals_one_batch(tf_syncbn.convert_model(model_of(layer)), batch_of(4, 3), num_towers=2, sizes=SIZES[0])


SQUARES = [(of_squares, [3]), (of_sufficient_statistics, [4, 3]), (of_sufficient_statistics_of_unknown_size, [4, 3]),
           (as_in_keras, [4, 3]), (of_shifted_statistics, [4, 3])]


@pytest.mark.parametrize("layer_and_shape", covering(SQUARES + [
    (of_squares_and_other_uses, [3]), (of_sums_of_squares_and_other_uses, [3])], one_in=4))
def test_means_of_squares_less_squared_means_are_those_of_all_towers_and_said_to_be(layer_and_shape, assert_law):
    layer, shape = layer_and_shape

    def layer_in_its_scope(x):
        with tf.variable_scope(tf.get_default_graph().get_name_scope().split("/")[-1], auxiliary_name_scope=False):
            return layer(x)

    assert_law(model_of(layer_in_its_scope), batch_of(*shape), kind="squares")


def by_unknown_size(x):
    return tf.placeholder_with_default(x, [None] + x.shape.as_list()[1:])


def by_moments_and(correct):
    """A layer that corrects its variance for the moving average."""
    def layer(x):
        mean, variance = tf.nn.moments(x, [0, 1])
        return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3), mean, correct(variance, x)
    return layer


def by_sums_and(x):
    count = tf.cast(tf.shape(by_unknown_size(x))[0] * 4, x.dtype)
    mean = tf.reduce_sum(x, [0, 1]) / count
    squares = tf.reduce_sum((x - mean) ** 2, [0, 1])
    return (x - mean) / tf.sqrt(squares / count + 1e-3), mean, squares / (count - 1)


def known_ratio(variance, x):
    count = x.shape.as_list()[0] * 4
    return variance * (count / (count - 1))


def known_count(variance, x):
    count = x.shape.as_list()[0] * 4
    return variance * count / (count - 1)


def known_count_of_a_share(variance, x):
    count = x.shape.as_list()[0] * 4
    return 0.5 * variance * count / (count - 1)


def unknown_count(variance, x):
    count = tf.cast(tf.shape(by_unknown_size(x))[0] * tf.shape(x)[1], x.dtype)
    return variance * count / (count - 1)


def unknown_integer(variance, x):
    count = tf.reduce_prod(tf.shape(by_unknown_size(x))[:2])
    return variance * tf.cast(count / (count - 1), x.dtype)


@pytest.mark.parametrize("layer,update_ops", covering([by_sums_and] + [
    by_moments_and(correct) for correct in (known_ratio, known_count, known_count_of_a_share, unknown_count, unknown_integer)],
    ["first", "all"], one_in=4))
def test_corrections_of_moving_variances_take_the_number_of_all_examples(layer, update_ops):
    def with_averages(x):
        y, *moments = layer(x)
        *_, mean, variance = variables(3, x.dtype, tf.get_default_graph().get_name_scope().split("/")[-1])
        collect([mean, variance], moments)
        return y

    assert_equals_one_batch(tf_syncbn.convert_model(model_of(with_averages)), batch_of(4, 3), 2, SIZES[0], update_ops)


def test_a_correction_by_a_constant_is_by_the_number_of_all_examples():
    def layer(x):
        mean, number = tf.reduce_mean(x, 0), x.shape.as_list()[0]
        variance = tf.reduce_mean(x * x, 0) - mean ** 2
        with tf.variable_scope(tf.get_default_graph().get_name_scope().split("/")[-1], auxiliary_name_scope=False):
            moving = tf.get_variable("moving", [3], x.dtype, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(moving, variance * (number / (number - 1))))
        return (x - mean) * tf.rsqrt(variance + 1e-3)

    assert_equals_one_batch(tf_syncbn.convert_model(model_of(layer)), batch_of(3), 2, SIZES[0], "all")


def test_a_number_of_examples_that_the_loss_is_divided_by_too_stays_the_towers_own(assert_law):
    def model_fn(x):
        x *= tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3))
        share = 1 / tf.cast(tf.shape(by_unknown_size(x))[0], x.dtype)
        with tf.name_scope("bn"):
            mean = tf.reduce_sum(x, 0) * share
            y = (x - mean) * tf.rsqrt(tf.reduce_sum((x - mean) ** 2, 0) * share + 1e-3)
        tf.add_to_collection("summaries", tf.stack([tf.reduce_sum(y) * share, tf.reduce_sum(mean)]))
        return tf.reduce_sum(tf.reduce_mean(tf.square(tf.sin(2 * y) - x), 1)) * share + tf.reduce_sum(mean) ** 2

    assert_law(model_fn, batch_of(3), ["bn"], "sums")


def test_sums_of_different_kinds_in_one_model_are_counted_once(assert_law):
    def layer(x):
        with tf.name_scope("a"):
            y = of_sums_by_a_constant(x)
        with tf.name_scope("b"):
            return of_sums(1.5 * y - 0.1)

    assert_law(model_of(layer), batch_of(3), ["bn1/a", "bn1/b", "bn2/a", "bn2/b"], "sums")


@pytest.mark.parametrize("update_ops", covering(["all", "first", "last", "none"], one_in=4))
def test_moving_averages_of_sums_move_once_a_step(update_ops):
    def layer(x, name="bn"):
        *_, mean_average, variance_average = variables(3, x.dtype, tf.get_default_graph().get_name_scope().split("/")[-1])
        mean = tf.reduce_mean(x, 0)
        variance = tf.reduce_mean(tf.square(x), 0) - tf.square(mean)
        collect([mean_average, variance_average], [mean, variance])
        return (x - mean) * tf.rsqrt(variance + 1e-3)

    assert_equals_one_batch(tf_syncbn.convert_model(model_of(layer)), batch_of(3), 2, SIZES[0], update_ops)


def group_norm(x):
    shape = tf.shape(x)
    grouped = tf.reshape(x, [shape[0], shape[1], shape[2], 2, 2])
    return tf.reshape(normalize(grouped, [1, 2, 4]), shape)


def group_norm_of_channels_first(x):
    x = tf.transpose(x, [0, 3, 1, 2])
    _, channels, height, width = x.shape.as_list()
    return tf.reshape(normalize(tf.reshape(x, [-1, 2, channels // 2, height, width]), [2, 3, 4]), [-1, channels, height, width])


def instance_norm_of_what_is_scattered(x):
    """Positions scattered into a map whose examples lie along its third axis."""
    x = tf.reshape(x, [-1, 5, 3 * 4])
    size = x.shape.as_list()[0] or tf.shape(x)[0]
    places = tf.scatter_nd([[0, 1], [1, 2], [1, 0], [0, 0], [0, 2]], tf.transpose(x, [1, 0, 2]), tf.stack([2, 3, size, 12]))
    return normalize(tf.transpose(tf.reshape(places, [2, 3, -1, 12]), [2, 0, 1, 3]), [1, 2])


def layer_norm_of_time_major(x):
    return normalize(tf.transpose(x[:, :, 0], [1, 0, 2]), [2])


def instance_norm_of_time_major(x):
    return normalize(tf.transpose(x[:, :, 0], [1, 0, 2]), [0])


def instance_norm_in_a_map(x):
    return tf.map_fn(lambda image: normalize(image, [0, 1]), x)


def standardized_images(x):
    return tf.map_fn(tf.image.per_image_standardization, x)


def unit_vectors(x):
    return tf.nn.l2_normalize(tf.reshape(x, [tf.shape(x)[0], -1]), 1)


def attention(x):
    y = tf.reshape(x, [tf.shape(x)[0], -1, 4])
    weights = tf.nn.softmax(tf.matmul(y, y, transpose_b=True))
    return normalize(tf.matmul(weights, y), [-1])


def ghost_batch_norm(x):
    """Groups of consecutive examples, as virtual_batch_size makes them: each is of one tower."""
    virtual = tf.reshape(x[:2], [-1, 1] + x.shape.as_list()[1:])
    return normalize(virtual, [1, 2, 3])


def gradient_penalty(x):
    slope, = tf.gradients(tf.reduce_sum(tf.sin(x)), x)
    return tf.square(tf.sqrt(tf.reduce_sum(tf.square(slope), [1, 2, 3])) - 1)


def root_mean_square_error(x):
    return tf.sqrt(tf.reduce_mean(tf.square(x - 0.5)))


def summary(x):
    mean = tf.reduce_mean(x)
    tf.summary.scalar("stddev", tf.sqrt(tf.reduce_mean(tf.square(x - mean))))
    return tf.reduce_mean(x)


def clipped_gradients(x):
    kernel = tf.get_variable("kernel", [4, 2], x.dtype)
    bias = tf.get_variable("bias", [2], x.dtype)
    gradients = tf.gradients(tf.reduce_mean(tf.square(tf.matmul(tf.reshape(x, [-1, 4]), kernel) + bias)), [kernel, bias])
    return [gradient * tf.rsqrt(tf.square(gradient) + 1e-8) for gradient in gradients] + tf.clip_by_global_norm(gradients, 1)[0]


def weight_norm(x):
    kernel = tf.get_variable("kernel", [4, 2], x.dtype)
    return tf.matmul(tf.reshape(x, [-1, 4]), tf.nn.l2_normalize(kernel, 0))


@pytest.mark.parametrize("model_fn,is_known", covering([
    group_norm, group_norm_of_channels_first, instance_norm_of_what_is_scattered, layer_norm_of_time_major,
    instance_norm_of_time_major, unit_vectors, attention,
    ghost_batch_norm, gradient_penalty, root_mean_square_error, summary, clipped_gradients, weight_norm, standardized_images,
    instance_norm_in_a_map], [True, False], one_in=4))
def test_what_normalizes_each_example_by_itself_is_left_alone_without_a_warning(model_fn, is_known):
    if model_fn is instance_norm_in_a_map and tf.control_flow_v2_enabled():
        pytest.skip("functions are not looked into that far")
    x, = batch_of(5, 3, 4)
    assert_left_alone(model_fn, (x if is_known else tf.placeholder_with_default(x, [None, 5, 3, 4]),))


def minibatch_stddev(x, size=2):
    """As progressive GANs have it: groups of examples that are not neighbours, as a feature."""
    y = tf.reshape(x, [size, -1] + x.shape.as_list()[1:])
    y = tf.sqrt(tf.reduce_mean(tf.square(y - tf.reduce_mean(y, 0, keepdims=True)), 0) + 1e-8)
    y = tf.tile(tf.reduce_mean(y, [1, 2, 3], keepdims=True), [size, *x.shape.as_list()[1:3], 1])
    return tf.concat([x, y], 3)


def softmax_over_examples(x):
    return tf.exp(x - tf.reduce_logsumexp(x, 0, keepdims=True))


def switchable_of_squares(x):
    """Moments of each example, and of the batch by squares, mixed."""
    mean, of_each = tf.nn.moments(x, [1, 2], keep_dims=True)
    of_batch = tf.reduce_mean(x ** 2, [0, 1, 2]) - tf.reduce_mean(x, [0, 1, 2]) ** 2
    return (x - mean) * tf.rsqrt(0.5 * of_batch + 0.5 * of_each + 1e-3)


def by_largest(x):
    return x / tf.sqrt(tf.reduce_max(x ** 2, 0) + tf.reduce_mean(x ** 2, 0))


def minibatch_stddev_of_all(x):
    return minibatch_stddev(x, x.shape.as_list()[0])


@pytest.mark.parametrize("layer", covering(
    [minibatch_stddev, minibatch_stddev_of_all, softmax_over_examples, switchable_of_squares, by_largest], one_in=4))
def test_what_is_of_the_batch_and_no_batch_norm_is_that_of_all_towers(layer):
    def model_fn(x):
        y = layer(x * tf.get_variable("scale", [4], x.dtype, tf.constant_initializer(1.3)))
        return tf.reduce_mean(tf.sin(by_moments(y, "bn")))

    converted = tf_syncbn.convert_model(model_fn)
    assert_equals_one_batch(converted, (np.random.RandomState(0).randn(8, 5, 3, 4),), 2, [2, 6])
    assert "bn" in [layer.scope for layer in converted.converted]


def test_a_fused_batch_norm_of_groups_that_are_no_neighbours_is_that_of_all_towers():
    def model_fn(x):
        x *= tf.get_variable("scale", [4], x.dtype, tf.constant_initializer(1.3))
        groups = tf.transpose(tf.reshape(x, [-1, 2, 1, 3, 4]), [0, 2, 3, 1, 4])
        y = tf.nn.fused_batch_norm(tf.reshape(groups, [-1, 1, 3, 8]), tf.ones([8]), tf.zeros([8]))[0]
        return tf.reduce_mean(tf.sin(2 * y)) + tf.reduce_mean(tf.sin(by_moments(x, "bn")))

    x = np.random.RandomState(0).randn(8, 3, 4).astype(np.float32)
    assert_equals_one_batch(tf_syncbn.convert_model(model_fn), (x,), 2, [2, 6])


@pytest.mark.parametrize("layer", [time_major, of_squares])
def test_a_number_of_steps_may_be_unknown(layer):
    def model_fn(x):
        y = x * tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3))
        return tf.reduce_mean(tf.sin(layer(tf.placeholder_with_default(y, [y.shape[0], None, 3]))))

    assert_equals_one_batch(tf_syncbn.convert_model(model_fn), batch_of(4, 3), 2, SIZES[0])


def test_sums_in_a_loop_are_refused_by_control_flow_1_where_sizes_are_known():
    def model_fn(x):
        x *= tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3))
        return tf.reduce_mean(tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.sin(of_squares(y))), (0, x))[1])

    converted = tf_syncbn.convert_model(model_fn)
    if tf.control_flow_v2_enabled():
        assert_equals_one_batch(converted, batch_of(3), 2, SIZES[0])
        return
    with pytest.raises(ValueError, match=": the state of a tf.while_loop, 'tower_0/while.*has another size"):
        build(converted, batch_of(3))


@pytest.mark.parametrize("divided", covering(["sum", "each", "by class"], one_in=4))
def test_the_number_of_labels_of_a_loss_stays_the_towers_own_where_the_same_weights_weigh_moments(divided, assert_law):
    def model_fn(x, valid):
        y = x * tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3)) + 0.2
        weights = tf.expand_dims(tf.reshape(valid * 1.0, [-1]), 1)
        with tf.name_scope("bn"):
            mean, variance = tf.nn.weighted_moments(y, [0], weights, keep_dims=True)
            y = tf.nn.batch_normalization(y, mean, variance, None, None, 1e-3)
        losses, count = tf.reduce_sum(tf.square(tf.sin(2 * y) - x), 1), tf.reduce_sum(valid)
        loss = {"sum": lambda: tf.reduce_sum(losses * valid) / count, "each": lambda: tf.reduce_sum(losses * valid / count),
                "by class": lambda: tf.reduce_mean(tf.reduce_sum(tf.square(y - x) * valid[:, None], 0) / count)}[divided]()
        return {"loss": loss, "weight": count}

    valid = np.array([1.0, 1, 0.5, 1, 0, 2, 1])
    assert_law(model_fn, batch_of(3) + (valid,), ["bn"], "sums")


@pytest.mark.parametrize("form", covering(["examples", "moments"], one_in=4))
def test_shapes_that_are_computed_of_examples_are_no_examples(form, assert_law):
    def layer(x):
        shape = tf.raw_ops.Shape(input=x)  # tf.shape of what has a known shape is a constant
        y = tf.reshape(x, shape) if form == "examples" else x
        mean = tf.reduce_mean(y, 0, keepdims=True)
        variance = tf.reduce_mean(tf.square(y), 0, keepdims=True) - tf.square(mean)
        if form == "moments":
            mean, variance = (tf.reshape(moment, tf.concat([[1], shape[1:]], 0)) for moment in (mean, variance))
        return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)

    assert_law(model_of(layer), batch_of(3), kind="squares")


def test_class_weights_that_sum_to_the_number_of_classes_which_is_that_of_a_towers_examples():
    """The loss was 2 or 3 times too large without a word: the 10 of 10 classes was taken for the tower's 10 examples."""
    def model_fn(x, labels):
        mean, variance = tf.nn.moments(x, [0])
        y = tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)
        logits = y @ tf.get_variable("w", [4, 10], x.dtype, tf.random_normal_initializer(seed=1))
        weights = tf.rsqrt(tf.maximum(tf.reduce_sum(tf.one_hot(labels, 10, dtype=x.dtype), 0), 1))
        weights *= 10 / tf.reduce_sum(weights)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.reduce_mean(tf.gather(weights, labels) * losses)

    rng = np.random.RandomState(0)
    assert_equals_one_batch(tf_syncbn.convert_model(model_fn), (rng.randn(20, 4), rng.randint(0, 10, 20)), 2)
