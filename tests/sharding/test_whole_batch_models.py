"""Whole-batch models train as one tower on the whole batch: with few examples or none, with state, with gradients they take."""
import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, session
from towers.graph.walk import ancestors, writes_of
from towers.testing import assert_equals_one_batch

RNG = np.random.RandomState(3)
X, LABELS = RNG.randn(9, 4) + 0.5, np.array([1, 0, 2, 1, 0, 0, 2, 2, 1])
UPDATE_OPS = tf.GraphKeys.UPDATE_OPS


def normal(seed):
    return lambda shape, dtype=tf.float64, partition_info=None: tf.constant(
        np.random.RandomState(seed).randn(*tf.TensorShape(shape).as_list()) / 2, dtype)


def variable(name, shape, **kwargs):
    return tf.get_variable(name, shape, tf.float64, normal(len(name)), **kwargs)


def state(name, shape, value=None):
    return tf.get_variable(name, shape, tf.float64, normal(len(name)) if value is None else tf.constant_initializer(value),
                           trainable=False)


def encoded(x, name="kernel"):
    return tf.tanh(tf.matmul(x, variable(name, [4, 5])))


def centred(h):
    """A batch norm by hand."""
    mean, moment = tf.nn.moments(h, [0])
    return tf.nn.batch_normalization(h, mean, moment, None, None, 1e-3)


def cross_entropy(h, labels, name="weights"):
    """Each example's; not by the fused op of labels, which has no second derivative in TensorFlow 1.15."""
    logits = tf.matmul(h, variable(name, [h.shape[-1], 3]))
    return -tf.reduce_sum(tf.one_hot(labels, 3, dtype=tf.float64) * tf.nn.log_softmax(logits), 1)


def unsized(model_fn):
    """Returns a model function of batches whose sizes are not known while the graph is built."""
    return lambda *batch: model_fn(*[tf.placeholder_with_default(x, [None] + x.shape.as_list()[1:]) for x in batch])


def assert_is_exact(model_fn, sizes=(3, 1, 5), known=True, **kwargs):
    whole, count = towers.whole_batch(model_fn), sum(sizes)
    assert_equals_one_batch(whole if known else unsized(whole), (X[:count], LABELS[:count]), len(sizes), sizes=sizes, **kwargs)


def both(*models):
    """Each model with sizes that are known, and with unknown ones."""
    return [pytest.param(model, known, id="%s, %s" % (model.__name__, "known" if known else "unknown"))
            for model in models for known in (True, False)]


# Few examples, or none.

def moments_by_hand(x, labels):
    return tf.reduce_mean(cross_entropy(centred(encoded(x)), labels))


def a_masked_mean(x, labels):
    mask = tf.cast(labels > 0, tf.float64)
    return tf.reduce_sum(mask * cross_entropy(encoded(x), labels)) / tf.maximum(tf.reduce_sum(mask), 1.0)


def a_mean_over_chosen_rows(x, labels):
    chosen = tf.boolean_mask(cross_entropy(encoded(x), labels), labels > 0)
    return tf.reduce_mean(chosen)


@pytest.mark.parametrize("sizes", [[3, 0, 4], [1, 4], [1, 1]], ids=str)
@pytest.mark.parametrize("model,known", both(moments_by_hand, a_masked_mean, a_mean_over_chosen_rows))
def test_towers_without_examples_or_with_one_train_as_one_tower(model, known, sizes):
    assert_is_exact(model, sizes, known)


def test_rows_and_columns_that_are_chosen_train_as_one_tower():
    def model(x, labels):
        weighed = x * variable("weights", [4])
        rows, columns = tf.unstack(tf.where(x > 0.3), axis=1)
        chosen = tf.gather_nd(weighed, tf.stack([rows, columns], 1))
        return tf.sqrt(tf.reduce_mean(tf.gather(weighed, rows) ** 2)) + tf.reduce_max(chosen) * tf.reduce_mean(
            tf.gather(variable("of_columns", [4]), columns) * chosen)
    for known in (True, False):
        assert_is_exact(model, known=known)


def test_nothing_of_an_empty_tower_is_nan():
    def model(x, labels):
        h = encoded(x)
        return {"loss": moments_by_hand(x, labels), "mean": tf.reduce_mean(h, 0), "moments": tf.nn.moments(h, [0]),
                "masked": a_masked_mean(x, labels), "chosen": a_mean_over_chosen_rows(x, labels)}

    def reusing(x, labels):
        with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
            return model(x, labels)
    parts = [(tf.placeholder_with_default(X[a:b], [None, 4]), tf.placeholder_with_default(LABELS[a:b], [None]))
             for a, b in ((0, 3), (3, 3), (3, 7))]
    replicas = build(towers.whole_batch(reusing), towers.PerTower(parts), 3)
    found, expected = replicas.merged(), reusing(tf.constant(X[:7]), tf.constant(LABELS[:7]))
    with session() as made:
        found, expected = made.run([found, expected])
        for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
            np.testing.assert_allclose(a, b, rtol=1e-9)


# State.

def centers(x, labels):
    h = encoded(x)
    of_class = state("centers", [3, 5])
    own = tf.gather(of_class, labels)
    loss = tf.reduce_mean(cross_entropy(h, labels)) + tf.reduce_mean(tf.square(h - own))
    with tf.control_dependencies([own, loss]):
        tf.add_to_collection(UPDATE_OPS, tf.scatter_sub(of_class, labels, 0.1 * (own - tf.stop_gradient(h))))
    return loss


def codebook(x, labels):
    """A vector quantizer whose words are moving sums."""
    h, decay = encoded(x), 0.8
    words, sums, counts = state("words", [4, 5]), state("sums", [4, 5]), state("counts", [4], 1.0)
    old = tf.identity(words) if not hasattr(words, "read_value") else words.read_value()
    distances = tf.reduce_sum(h ** 2, 1, keepdims=True) - 2 * tf.matmul(h, old, transpose_b=True) + tf.reduce_sum(old ** 2, 1)
    nearest = tf.argmin(distances, 1)
    hot = tf.one_hot(nearest, 4, dtype=tf.float64)
    quantized = tf.gather(old, nearest)
    loss = tf.reduce_mean(cross_entropy(h + tf.stop_gradient(quantized - h), labels)) + 0.25 * tf.reduce_mean(
        tf.square(h - tf.stop_gradient(quantized)))
    with tf.control_dependencies([loss, quantized]):
        count = tf.assign(counts, decay * counts + (1 - decay) * tf.reduce_sum(hot, 0))
        total = tf.assign(sums, decay * sums + (1 - decay) * tf.matmul(hot, tf.stop_gradient(h), transpose_a=True))
        number = tf.reduce_sum(count)
        smooth = (count + 1e-2) / (number + 4e-2) * number
        tf.add_to_collection(UPDATE_OPS, tf.assign(words, total / smooth[:, None]))
    return loss


def queue_of_keys(x, labels):
    """Queries are held against the keys of this batch and of earlier ones; the newest keys go in front."""
    queries, keys = tf.nn.l2_normalize(encoded(x), 1), tf.nn.l2_normalize(encoded(x * 1.1, "keys"), 1)
    keys, queue = tf.stop_gradient(keys), state("queue", [20, 5])
    old = queue.read_value()
    logits = tf.concat([tf.reduce_sum(queries * keys, 1, keepdims=True), tf.matmul(queries, old, transpose_b=True)], 1)
    loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(
        labels=tf.one_hot(tf.zeros_like(labels), 21, dtype=tf.float64), logits=logits / 0.5))
    with tf.control_dependencies([loss]):
        tf.add_to_collection(UPDATE_OPS, tf.assign(queue, tf.concat([keys, old], 0)[:20]))
    return loss + tf.reduce_mean(cross_entropy(queries, labels)) + 0.0 * tf.reduce_sum(variable("keys_are_trained", []))


def moving_averages(x, labels):
    h = encoded(x)
    mean, moment = tf.nn.moments(h, [0])
    for name, value in (("mean", mean), ("variance", moment)):
        moving = state("moving_" + name, [5], 0.0)
        tf.add_to_collection(UPDATE_OPS, tf.assign_sub(moving, 0.1 * (moving - value)))
    return tf.reduce_mean(cross_entropy(tf.nn.batch_normalization(h, mean, moment, None, None, 1e-3), labels))


def moving_averages_in_line(x, labels):
    h = encoded(x)
    mean, moment = tf.nn.moments(h, [0])
    moving_mean, moving_variance = state("moving_mean", [5], 0.0), state("moving_variance", [5], 1.0)
    writes = [tf.assign(moving_mean, 0.9 * moving_mean + 0.1 * mean),
              tf.assign(moving_variance, 0.9 * moving_variance + 0.1 * moment)]
    with tf.control_dependencies(writes):
        mean, moment = tf.identity(mean), tf.identity(moment)
    return tf.reduce_mean(cross_entropy(tf.nn.batch_normalization(h, mean, moment, None, None, 1e-3), labels))


def averages_by_tensorflow(x, labels):
    h = encoded(x)
    mean, moment = tf.nn.moments(h, [0])
    average = tf.train.ExponentialMovingAverage(0.9)
    with tf.control_dependencies([average.apply([mean, moment])]):
        mean, moment = tf.identity(mean), tf.identity(moment)
    return tf.reduce_mean(cross_entropy(tf.nn.batch_normalization(h, mean, moment, None, None, 1e-3), labels))


def an_average_of_variables(x, labels):
    loss = tf.reduce_mean(cross_entropy(centred(encoded(x)), labels))
    with tf.control_dependencies([loss]):
        tf.add_to_collection(UPDATE_OPS, tf.train.ExponentialMovingAverage(0.9).apply(tf.trainable_variables()))
    return loss + 0.1 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])


def a_step_counter(x, labels):
    steps = state("steps", [], 0.0)
    seen = state("seen", [], 0.0)
    with tf.control_dependencies([tf.assign_add(steps, 1.0)]):
        rate = 1.0 / tf.sqrt(1.0 + steps.read_value())
    tf.add_to_collection(UPDATE_OPS, tf.assign_add(seen, tf.cast(tf.shape(x)[0], tf.float64)))
    return rate * tf.reduce_mean(cross_entropy(centred(encoded(x)), labels))


def spectral_normalization(x, labels):
    kernel, u = variable("kernel", [4, 5]), state("u", [1, 5])
    old = u.read_value()
    v = tf.nn.l2_normalize(tf.matmul(old, kernel, transpose_b=True))
    new = tf.nn.l2_normalize(tf.matmul(v, kernel))
    v, new = tf.stop_gradient(v), tf.stop_gradient(new)
    sigma = tf.reduce_sum(tf.matmul(tf.matmul(v, kernel), new, transpose_b=True))
    with tf.control_dependencies([tf.assign(u, new)]):
        return tf.reduce_mean(cross_entropy(centred(tf.matmul(x, kernel / sigma)), labels))


def a_center_moved_twice(x, labels):
    """What is read of a ref variable is what that holds when it is taken, be it read before."""
    h, center = encoded(x), state("center", [5], 1.0)
    for _ in range(2):
        moved = 0.1 * (tf.reduce_sum(h, 0) - center.read_value())
        with tf.control_dependencies([tf.assign_add(center, moved)]):
            h = tf.sin(h) - center.read_value()
    return tf.reduce_mean(cross_entropy(h, labels))


STATES = [centers, codebook, queue_of_keys, moving_averages, moving_averages_in_line, averages_by_tensorflow,
          an_average_of_variables, a_step_counter, spectral_normalization, a_center_moved_twice]


@pytest.mark.parametrize("model,known", both(*STATES))
def test_state_is_what_one_tower_would_write(model, known):
    assert_is_exact(model, known=known)


@pytest.mark.parametrize("model", STATES)
def test_state_is_written_by_one_tower(model):
    def written(num_towers):
        """Returns how often a training step writes each variable."""
        with tf.Graph().as_default():
            replicas = build(towers.whole_batch(model), (X, LABELS), num_towers)
            train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops="all")
            return collections.Counter(v.name for each in writes_of(ancestors([train_op])).values() for v in each)
    found = written(3)
    assert found == written(1)


# Classes that are drawn.

def log_uniform(classes):
    return tf.random.log_uniform_candidate_sampler(classes, 1, 6, True, 20, seed=5)


def learned(classes):
    return tf.random.learned_unigram_candidate_sampler(classes, 1, 6, True, 20, seed=5)


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("sampler", [log_uniform, learned])
@pytest.mark.parametrize("loss", [tf.nn.nce_loss, tf.nn.sampled_softmax_loss])
def test_classes_are_drawn_once_for_all_examples(loss, sampler, known):
    """The learned sampler counts all examples' classes; in float32, expected counts."""
    def model_fn(x, labels):
        classes = tf.cast(labels, tf.int64)[:, None] * 7 + 1
        drawn, *expected = sampler(classes)
        return tf.reduce_mean(loss(
            weights=variable("weights", [20, 5]), biases=variable("biases", [20]), labels=classes, inputs=encoded(x),
            num_sampled=6, num_classes=20, sampled_values=[drawn] + [tf.cast(count, tf.float64) for count in expected]))

    model = towers.whole_batch(model_fn)
    found = assert_equals_one_batch(model if known else unsized(model), (X, LABELS), 3, sizes=(4, 5, 0))
    assert max(found.loss, found.gradients, found.variables) < 1e-9


# Gradients that the model takes.

def a_gradient_penalty(x, labels):
    """WGAN-GP's, through a batch norm by hand."""
    def score(x):
        with tf.variable_scope("critic", reuse=tf.AUTO_REUSE):
            return tf.matmul(centred(encoded(x)), variable("score", [5, 1]))
    between = 0.3 * x + 0.7 * x[:, ::-1]
    slopes, = tf.gradients(score(between), between)
    norms = tf.sqrt(tf.reduce_sum(slopes ** 2, 1) + 1e-6)
    return tf.reduce_mean(score(x)) + tf.reduce_mean(tf.square(norms - 1)) + tf.reduce_mean(tf.square(score(x) - 1))


def an_inner_step(x, labels):
    """MAML's, of the batch's mean."""
    kernel, weights = variable("kernel", [4, 5]), variable("weights", [5, 3])

    def loss(kernel, weights):
        logits = tf.matmul(tf.tanh(tf.matmul(x, kernel)), weights)
        hot = tf.one_hot(labels, 3, dtype=tf.float64)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=hot, logits=logits))
    slopes = tf.gradients(loss(kernel, weights), [kernel, weights])
    return loss(kernel - 0.5 * slopes[0], weights - 0.5 * slopes[1])


def a_hessian_product(x, labels):
    kernel = variable("kernel", [4, 5])
    loss = tf.reduce_mean(cross_entropy(centred(tf.matmul(x, kernel)), labels))
    slope, = tf.gradients(loss, kernel)
    product, = tf.gradients(tf.reduce_sum(slope * tf.stop_gradient(kernel * 2 + 1)), kernel)
    return loss + tf.reduce_sum(tf.square(product))


def an_adversarial_step(x, labels):
    def loss_of(x):
        with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
            return tf.reduce_mean(cross_entropy(centred(encoded(x)), labels))
    loss = loss_of(x)
    slopes, = tf.gradients(loss, x)
    step = 0.3 * slopes / (tf.sqrt(tf.reduce_sum(slopes ** 2)) + 1e-3)  # of the whole batch's length
    return loss + loss_of(x + tf.stop_gradient(step))


def a_slope_of_a_sum(x, labels):
    """Each example's influence on the loss, and a penalty on the sum of gradients."""
    h = encoded(x)
    loss = tf.reduce_sum(cross_entropy(h, labels)) / tf.cast(tf.shape(x)[0], tf.float64)
    slopes, of_variable = tf.gradients(loss, [h, tf.trainable_variables()[0]])
    return loss + tf.reduce_sum(tf.square(slopes)) + tf.reduce_sum(tf.square(of_variable))


@pytest.mark.parametrize("model,known", both(a_gradient_penalty, an_inner_step, an_adversarial_step, a_slope_of_a_sum))
def test_gradients_that_the_model_takes_are_the_whole_batchs(model, known):
    assert_is_exact(model, known=known)


@pytest.mark.laws
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_hessian_product_through_a_batch_norm_is_the_whole_batchs(known):
    if tf.__version__.startswith("1.") and not known:
        # TensorFlow 1.15 knows no rank of the gradient of a broadcast: refused, and not wrong.
        with pytest.raises(ValueError, match="has an unknown rank, and would have to be gathered along axis 0: give it a shape"):
            assert_is_exact(a_hessian_product, known=known)
    else:  # of one known example TensorFlow 1.15 makes other gradients
        assert_is_exact(a_hessian_product, (3, 2, 4), known)
