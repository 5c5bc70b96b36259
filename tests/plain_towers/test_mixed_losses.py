"""Losses that take a tower's examples together: said where towers train otherwise than one, and nowhere else."""
import itertools
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import SAID, build, cpus
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

B, C = 12, 4
RNG = np.random.RandomState(3)
X, MASK, CLASSES = RNG.randn(B, C), np.array([1., 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0]), RNG.randint(0, 3, B)
BATCH = (X, MASK, CLASSES)

# What comes to a mean over examples by the sum of all its terms alone, or since what it takes together is not used.
SAID_FALSELY = {"a mean whose mean is subtracted", "a sum of each class there is", "an index of its own",
                "as wide as the largest", "rows by a product with one-hot rows",
                "values less rewards without an axis, not squared"}


def weights(dtype=tf.float64):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        return tf.get_variable("w", [C], dtype, tf.ones_initializer())


def features(x):
    return tf.sin(x * weights(x.dtype)) - 0.3


def losses(x):
    return tf.reduce_sum(tf.square(features(x)), 1)


def lengths(x):
    """From 1 to 3 for each example; the largest is another one in each tower."""
    return tf.cast(1.2 * tf.abs(x[:, 1]), tf.int32) + 1


def unsized(x):
    return tf.placeholder_with_default(x, [None] * x.shape.rank)


def sigmoids(x):
    return tf.sigmoid(tf.reduce_sum(features(x), 1))


def distances_to_centres(row):
    """Of an example's own classes, those of its signs: how far its features are from the mean of their class."""
    _, which, counts = tf.unique_with_counts(tf.cast(row > 0, tf.int32))
    centres = tf.unsorted_segment_sum(row, which, tf.size(counts)) / tf.cast(counts, row.dtype)
    return tf.reduce_sum(tf.square(row - tf.gather(centres, which)))


def listed_in_a_loop(x, of_row):
    """What a loop makes of each example, by its number, and writes into a list."""
    made = tf.TensorArray(x.dtype, tf.shape(x)[0], element_shape=[])
    return tf.while_loop(
        lambda i, _: i < tf.shape(x)[0], lambda i, made: (i + 1, made.write(i, of_row(x[i]))), (0, made))[1].stack()


def last_state(x):
    return tf.while_loop(lambda k, _: k < 3, lambda k, state: (k + 1, tf.tanh(state + features(x)[:, k:k + 1])),
                         (0, tf.zeros_like(x)))[1]


def masked(x, mask):
    return masked_of(losses(x), mask)


def distances(x):
    y = features(x)
    return tf.reduce_sum(tf.square(y[:, None] - y[None]), 2)


def products(x):
    y = tf.nn.l2_normalize(features(x), 1)
    return tf.matmul(y, y, transpose_b=True)


def free_bits_of_each(x):
    """The bits that are paid for, the average over the batch, in each example's loss, as in Improved Variational Inference."""
    average = tf.maximum(tf.reduce_mean(tf.square(features(x)), 0, keepdims=True), 0.5)
    return tf.reduce_sum(tf.tile(average, [tf.shape(x)[0], 1]), 1)


def of_minibatch(x):
    """Minibatch discrimination, as in Improved Techniques for Training GANs, with kernels of two numbers each."""
    y = tf.reshape(features(x), [-1, C // 2, 2])
    apart = tf.reduce_sum(tf.abs(y[:, :, :, None] - tf.transpose(y, [1, 2, 0])[None]), 2)
    return tf.reduce_sum(tf.exp(-apart), 2) / 10


def dice(x, mask):
    return 1 - 2 * tf.reduce_sum(sigmoids(x) * mask) / (tf.reduce_sum(sigmoids(x)) + tf.reduce_sum(mask) + 1e-3)


def hardest(x):
    return tf.nn.top_k(losses(x), tf.shape(x)[0] // 2)


def normed(x):
    y = tf.reduce_sum(features(x), 1)
    return (y - tf.reduce_mean(y)) / tf.math.reduce_std(y)


def turned(x):
    """Features [C, batch, 3], as of words in a batch that is time-major, by way of [C * batch, 3]."""
    y = tf.transpose(tf.stack([features(x), x, tf.square(x)], 2), [1, 0, 2])
    return tf.tensordot(y, tf.constant(np.linspace(-1, 1, 9).reshape(3, 3), x.dtype) * weights(x.dtype)[:3], 1)


def words(x):
    """A loss for each word, [C, batch]."""
    labels = tf.cast(tf.transpose(x) > 0, tf.int32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=turned(x))


def of_words(x, mask):
    """A mask of each word, [C, batch]."""
    return tf.transpose(mask[:, None] * tf.cast(x > -1, x.dtype))


def values(x):
    """A value of each example, [batch, 1], as of a layer of one unit."""
    return tf.matmul(features(x), tf.ones([C, 1], x.dtype))


def guarded(loss, mask):
    """A loss where something is to be counted, by tf.cond."""
    return tf.cond(tf.reduce_sum(mask) > 0, loss, lambda: tf.zeros([], mask.dtype))


def number_of(mask):
    """As many as a mask has, counted by the size of what tf.where returns."""
    return tf.cast(tf.shape(tf.where(mask > 0))[0], mask.dtype)


def one_hot(classes):
    return tf.one_hot(classes, 7, dtype=tf.float64)


def rarity(classes):
    """Weights of classes, the fewer of the tower's examples are of one the larger."""
    return 1 / (1 + tf.reduce_sum(one_hot(classes), 0))


def mask_of(classes):
    return tf.cast(classes >= 0, tf.float64)


def centers(x, classes):
    return tf.unsorted_segment_mean(features(x), classes, 7)


def positive(x):
    return tf.cast(x[:, 0] > -1.5, x.dtype) + 0.1


def masked_of(of_each, mask):
    return tf.reduce_sum(of_each * mask) / tf.reduce_sum(mask)


def less_their_mean(x):
    return features(x) - tf.reduce_mean(features(x), 0)


def apart_from(prototypes, x, classes):
    distances_of = tf.reduce_sum(tf.square(features(x)[:, None] - prototypes[None]), 2)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=-distances_of))


def by_product(x, classes):
    """Prototypes of classes, sums over one-hot labels."""
    return tf.matmul(one_hot(classes), features(x), transpose_a=True) / (1 + tf.reduce_sum(one_hot(classes), 0))[:, None]


def by_masks(x, classes):
    return tf.stack([tf.reduce_sum(tf.boolean_mask(features(x), tf.equal(classes, k)), 0) for k in range(3)])


def by_partitions(x, classes):
    return tf.stack([tf.reduce_sum(part, 0) for part in tf.dynamic_partition(features(x), tf.cast(classes, tf.int32), 3)])


def targets(x):
    """What deep embedded clustering trains assignments to."""
    p = tf.nn.softmax(features(x)) ** 2
    p /= tf.reduce_sum(p, 0)
    return p / tf.reduce_sum(p, 1, keepdims=True)


def aligned(x):
    """Guesses as often of each class as the batch's are, as ReMixMatch aligns them."""
    q = tf.nn.softmax(features(x)) / tf.reduce_mean(tf.nn.softmax(features(x)), 0)
    return q / tf.reduce_sum(q, 1, keepdims=True)


def whitened(x):
    y = features(x)
    covariance = tf.matmul(y, y, transpose_a=True) / tf.cast(tf.shape(x)[0], x.dtype)
    return tf.matmul(y, tf.linalg.inv(covariance + tf.eye(C, dtype=x.dtype)))


def normalized_by_hand(x):
    """A batch norm that is the tower's own, and has no averages."""
    return tf.nn.batch_normalization(x, *tf.nn.moments(x, [0]), None, weights(x.dtype), 1e-3)


def beside_others(x):
    """Features of the examples, and behind them rows that all towers have."""
    return tf.concat([features(x), tf.diag(weights(x.dtype))], 0)


MIXED = {
    "a decay of what is looked up once": lambda x, _, classes: tf.reduce_mean(losses(x)) + tf.reduce_sum(tf.square(tf.gather(
        tf.diag(weights()), tf.unique(classes)[0]))) / tf.cast(tf.shape(x)[0], x.dtype),
    "segments of what is looked up once": lambda x, _, classes: tf.reduce_sum(tf.square(tf.math.unsorted_segment_sum(
        losses(x), tf.unique(classes)[1], tf.size(tf.unique(classes)[0])))) / tf.cast(tf.shape(x)[0], x.dtype),
    "a sum over examples and a memory": lambda x, *_: tf.reduce_sum(
        tf.square(beside_others(x))) / tf.cast(tf.shape(x)[0], x.dtype),
    "the first of examples and a memory": lambda x, *_: tf.reduce_mean(tf.square(tf.slice(beside_others(x), [0, 0], [2, -1]))),
    "features less their mean": lambda x, *_: tf.reduce_mean(tf.square(less_their_mean(x))),
    "features over their largest": lambda x, *_: tf.reduce_mean(tf.square(features(x) / tf.reduce_max(x, 0, keepdims=True))),
    "features and their mean": lambda x, *_: tf.reduce_mean(tf.sin(features(x) + tf.matmul(
        tf.reduce_mean(features(x), 0, keepdims=True), tf.diag(weights(x.dtype))))),
    "prototypes by a product": lambda x, _, classes: apart_from(by_product(x, classes), x, classes),
    "prototypes by masks": lambda x, _, classes: apart_from(by_masks(x, classes), x, classes),
    "prototypes by partitions": lambda x, _, classes: apart_from(by_partitions(x, classes), x, classes),
    "prototypes by segments": lambda x, _, classes: apart_from(centers(x, classes), x, classes),
    "targets of clusters": lambda x, *_: -tf.reduce_mean(tf.reduce_sum(
        tf.stop_gradient(targets(x)) * tf.log(tf.nn.softmax(features(x))), 1)),
    "aligned guesses": lambda x, *_: -tf.reduce_mean(tf.reduce_sum(aligned(x) * tf.log(tf.nn.softmax(x)), 1)),
    "whitened features": lambda x, *_: tf.reduce_mean(tf.sin(whitened(x))),
    "a batch norm by hand": lambda x, *_: tf.reduce_mean(tf.sin(normalized_by_hand(x))),
    "features less their mean, beside their number": lambda x, *_: {
        "loss": masked_of(tf.reduce_sum(tf.square(less_their_mean(x)), 1), positive(x)), "weight": tf.reduce_sum(positive(x))},
    "class weights by tf.unique_with_counts": lambda x, _, classes: tf.reduce_mean(losses(x) * tf.gather(
        1 / tf.cast(tf.unique_with_counts(classes)[2], x.dtype), tf.unique_with_counts(classes)[1])),
    "features less their mean, of rows of unknown width": lambda x, *_: tf.reduce_mean(tf.square(less_their_mean(
        tf.reshape(tf.placeholder_with_default(x, [None, None]), [-1, C])))),
    "features less their mean, beside a number": lambda x, mask, _: {
        "loss": tf.reduce_sum(tf.reduce_sum(tf.square(less_their_mean(x)), 1) * mask) / tf.reduce_sum(mask),
        "weight": tf.reduce_sum(mask)},
    "as long as the longest": lambda x, *_: tf.reduce_mean(tf.square(features(x)[:, :tf.reduce_max(lengths(x))])),
    "as long as the longest, of each": lambda x, *_: tf.reduce_mean(tf.exp(tf.reduce_mean(
        tf.slice(features(x), [0, 0], tf.stack([tf.shape(x)[0], tf.reduce_max(lengths(x))])), 1))),
    "tf.sequence_mask": lambda x, *_: tf.reduce_mean(losses(x)[:, None] * tf.sequence_mask(lengths(x), dtype=x.dtype)),
    "class weights, gathered": lambda x, _, classes: tf.reduce_mean(losses(x) * tf.gather(rarity(classes), classes)),
    "class weights by one-hot labels": lambda x, _, classes: tf.reduce_mean(
        losses(x) * tf.reduce_sum(one_hot(classes) * rarity(classes), 1)),
    "class weights by a product": lambda x, _, classes: tf.reduce_mean(
        losses(x)[:, None] * tf.matmul(one_hot(classes), rarity(classes)[:, None])),
    "class weights by a count": lambda x, _, classes: tf.reduce_mean(losses(x) * tf.gather(tf.exp(
        -tf.cast(tf.math.bincount(tf.cast(classes, tf.int32), minlength=3), x.dtype)), classes)),
    "class weights by tf.scatter_nd": lambda x, _, classes: tf.reduce_mean(losses(x) * tf.gather(
        1 / (1 + tf.scatter_nd(classes[:, None], tf.ones_like(mask_of(classes)), [7])), classes)),
    "class weights beside a number": lambda x, mask, classes: {
        "loss": masked(x, mask * tf.gather(rarity(classes), classes)), "weight": tf.reduce_sum(mask)},
    "the mean of each class": lambda x, _, classes: tf.reduce_mean(tf.unsorted_segment_mean(losses(x), classes, 7)),
    "a root for each class": lambda x, _, classes: tf.reduce_mean(tf.sqrt(1 + tf.unsorted_segment_sum(losses(x), classes, 7))),
    "the largest of each class": lambda x, _, classes: tf.reduce_mean(
        tf.nn.relu(tf.unsorted_segment_max(losses(x), classes, 7))),
    "centers of classes": lambda x, _, classes: tf.reduce_mean(tf.square(features(x) - tf.gather(centers(x, classes), classes))),
    "centers of classes by one-hot labels": lambda x, _, classes: tf.reduce_mean(tf.square(
        features(x) - tf.matmul(one_hot(classes), centers(x, classes)))),
    "over the number of tf.where": lambda x, mask, _: tf.reduce_sum(losses(x) * mask) / tf.maximum(number_of(mask), 1),
    "over the size of tf.where": lambda x, mask, _: tf.reduce_sum(losses(x) * mask) / tf.cast(
        tf.size(tf.squeeze(tf.where(mask > 0), 1)), x.dtype),
    "values against rewards without an axis": lambda x, mask, _: tf.reduce_mean(tf.square(mask - values(x))),
    "values times rewards without an axis": lambda x, mask, _: tf.reduce_mean(mask * values(x)),
    "values over rewards without an axis": lambda x, mask, _: tf.reduce_mean(tf.nn.relu(values(x) / (1 + mask))),
    "a covariance by einsum": lambda x, *_: tf.reduce_sum(tf.square(tf.einsum("bi,bj->ij", features(x), features(x)))),
    "a covariance by tensordot": lambda x, *_: tf.reduce_sum(tf.square(tf.tensordot(features(x), features(x), [[0], [0]]))),
    "a covariance, turned twice": lambda x, *_: tf.reduce_sum(tf.square(tf.matmul(
        tf.transpose(features(x)), tf.transpose(features(x)), transpose_b=True))),
    "covariances by batches": lambda x, *_: tf.reduce_sum(tf.square(tf.matmul(
        tf.stack([features(x), x]), tf.stack([features(x), x]), transpose_a=True))),
    "products by einsum": lambda x, *_: tf.reduce_mean(tf.square(tf.einsum("ik,jk->ij", features(x), features(x)))),
    "a mean by einsum, squared": lambda x, mask, _: tf.square(tf.einsum("bk,b->", features(x), mask)),
    "a mask's loss over its size, turned": lambda x, mask, _: tf.reduce_sum(
        words(x) * of_words(x, mask)) / tf.reduce_sum(of_words(x, mask)),
    "each step over its size, turned": lambda x, mask, _: tf.reduce_mean(
        tf.reduce_sum(words(x) * of_words(x, mask), 1) / (1 + tf.reduce_sum(of_words(x, mask), 1))),
    "of tf.losses, turned": lambda x, mask, _: tf.losses.compute_weighted_loss(words(x), of_words(x, mask)),
    "a root, turned": lambda x, *_: tf.sqrt(tf.reduce_mean(words(x))),
    "the largest, turned": lambda x, *_: tf.reduce_mean(tf.reduce_max(words(x), 1)),
    "the hardest, turned": lambda x, *_: tf.reduce_mean(tf.nn.top_k(words(x), 2)[0]),
    "a moment of each, turned": lambda x, *_: tf.reduce_mean(tf.square(tf.reduce_mean(words(x), -1))),
    "products, turned twice": lambda x, *_: tf.reduce_mean(tf.square(
        tf.matmul(tf.transpose(features(x)), tf.transpose(features(x)), transpose_a=True))),
    "distances, both turned": lambda x, *_: tf.reduce_mean(tf.exp(
        -tf.square(words(x)[:, None] - words(x)[:, :, None]))),
    "a mask's loss over its size": lambda x, mask, _: masked(x, mask),
    "over its size and more": lambda x, mask, _: tf.div_no_nan(tf.reduce_sum(losses(x) * mask), 1e-5 + tf.reduce_sum(mask)),
    "each over the size": lambda x, mask, _: tf.reduce_sum(losses(x) * mask / tf.maximum(tf.reduce_sum(mask), 1)),
    "times one over the size": lambda x, mask, _: 1 / tf.reduce_sum(mask) * tf.reduce_sum(losses(x) * mask),
    "beside a mean": lambda x, mask, _: tf.reduce_mean(losses(x)) + 0.1 * masked(x, mask),
    "of tf.losses": lambda x, mask, _: tf.losses.compute_weighted_loss(losses(x), mask),
    "of tf.boolean_mask": lambda x, mask, _: tf.reduce_mean(tf.boolean_mask(losses(x), mask > 0)),
    "of tf.boolean_mask, by its size": lambda x, mask, _: tf.reduce_sum(tf.boolean_mask(losses(x), mask > 0)) / tf.cast(
        tf.size(tf.boolean_mask(mask, mask > 0)), x.dtype),
    "of what tf.boolean_mask chose": lambda x, mask, classes: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.boolean_mask(classes, mask > 0), logits=tf.boolean_mask(features(x), mask > 0))),
    "of what tf.gather chose": lambda x, mask, _: tf.reduce_mean(tf.square(
        tf.gather(features(x), tf.squeeze(tf.where(mask > 0), 1)) - tf.gather(x, tf.squeeze(tf.where(mask > 0), 1)))),
    "of what tf.dynamic_partition chose": lambda x, mask, _: tf.reduce_mean(tf.nn.softplus(
        tf.dynamic_partition(features(x), tf.cast(mask > 0, tf.int32), 2)[1])),
    "of a branch of what tf.boolean_mask chose": lambda x, mask, _: tf.reduce_mean(tf.cond(
        tf.size(tf.boolean_mask(mask, mask > 0)) > 0, lambda: tf.square(tf.boolean_mask(features(x), mask > 0)),
        lambda: tf.zeros([1, C], x.dtype))),
    "a root of a list that a loop makes": lambda x, *_: tf.sqrt(tf.reduce_mean(
        listed_in_a_loop(features(x), distances_to_centres))),
    "of a last state": lambda x, *_: tf.sqrt(tf.reduce_mean(last_state(x) ** 2)),
    "less the mean of last states": lambda x, *_: tf.reduce_mean(tf.square(last_state(x) - tf.reduce_mean(last_state(x), 0) - 1)),
    "of tf.losses of what tf.boolean_mask chose": lambda x, mask, _: tf.losses.mean_squared_error(
        tf.boolean_mask(x, mask > 0), tf.boolean_mask(features(x), mask > 0)),
    "dice": lambda x, mask, _: dice(x, mask),
    "dice of each class": lambda x, _, classes: tf.reduce_mean(
        tf.reduce_sum(tf.nn.softmax(features(x)) * tf.one_hot(classes, C, dtype=x.dtype), 0)
        / (1e-3 + tf.reduce_sum(tf.nn.softmax(features(x)), 0))),
    "a power": lambda x, *_: 0.3 * tf.pow(tf.reduce_mean(losses(x)), 1.5),
    "a root": lambda x, *_: tf.sqrt(tf.reduce_mean(losses(x))),
    "a norm": lambda x, *_: tf.norm(features(x)),
    "a root of an l2_loss": lambda x, *_: tf.sqrt(tf.nn.l2_loss(features(x))),
    "free bits": lambda x, *_: tf.reduce_sum(tf.maximum(tf.reduce_mean(tf.square(features(x)), 0), 0.5)),
    "free bits beside each example's loss": lambda x, *_: tf.reduce_mean(losses(x) + free_bits_of_each(x)),
    "a covariance": lambda x, *_: tf.reduce_sum(tf.square(tf.matmul(features(x), features(x), transpose_a=True))),
    "a covariance, turned": lambda x, *_: tf.reduce_sum(tf.square(tf.matmul(tf.transpose(features(x)), features(x)) - 1)),
    "the largest": lambda x, *_: tf.reduce_max(losses(x)),
    "the hardest": lambda x, *_: tf.reduce_mean(hardest(x)[0]),
    "the hardest by their number": lambda x, *_: tf.reduce_mean(tf.gather(losses(x), hardest(x)[1])),
    "those over the hardest": lambda x, *_: tf.reduce_mean(
        losses(x) * tf.cast(losses(x) >= hardest(x)[0][-1], x.dtype)),
    "distances": lambda x, *_: tf.reduce_mean(tf.reduce_max(distances(x), 1)),
    "products": lambda x, *_: tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(
        labels=tf.eye(tf.shape(x)[0], dtype=x.dtype), logits=products(x))),
    "products, turned": lambda x, *_: tf.reduce_mean(tf.square(tf.matmul(features(x), tf.transpose(features(x))))),
    "distances, turned": lambda x, *_: tf.reduce_mean(tf.exp(-tf.reduce_sum(tf.square(
        features(x)[:, :, None] - tf.transpose(features(x))), 1))),
    "features of a minibatch": lambda x, *_: tf.reduce_mean(tf.square(tf.concat([features(x), of_minibatch(x)], 1) - 1)),
    "of what is standardized": lambda x, *_: tf.reduce_mean(tf.square(normed(x) - 0.2)),
    "in a dict": lambda x, mask, _: {"loss": masked(x, mask), "mask": mask},
    "with the number of examples": lambda x, mask, _: {"loss": masked(x, mask), "weight": tf.shape(x)[0]},
    "a root with its number": lambda x, mask, _: {"loss": tf.sqrt(masked(x, mask)), "weight": tf.reduce_sum(mask)}}


def dice_of(p, labels):
    return (1 + 2 * tf.reduce_sum(p * labels)) / (1 + tf.reduce_sum(p) + tf.reduce_sum(labels))


def parts_of_classes(x, classes):
    return tf.nn.softmax(features(x)), one_hot(classes)[:, :C]


def dice_in_a_map(x, classes):
    p, labels = parts_of_classes(x, classes)
    return tf.reduce_mean(tf.map_fn(lambda k: dice_of(p[:, k], labels[:, k]), tf.range(C), x.dtype))


def dice_in_a_map_of_classes(x, classes):
    p, labels = parts_of_classes(x, classes)
    return tf.reduce_mean(tf.map_fn(lambda both: dice_of(*both), (tf.transpose(p), tf.transpose(labels)), x.dtype))


def dice_in_a_loop(x, classes):
    p, labels = parts_of_classes(x, classes)
    return tf.while_loop(lambda k, _: k < C, lambda k, total: (k + 1, total + dice_of(p[:, k], labels[:, k])),
                         (0, tf.zeros([], x.dtype)))[1]


def of_each_class_there_is(x, classes, of_chosen):
    return tf.map_fn(lambda k: of_chosen(tf.boolean_mask(losses(x), tf.equal(classes, k))), tf.unique(classes)[0], x.dtype)


def steps_of_descent(x):
    """Inner steps by gradients of the tower's own examples."""
    def loss_by(v):
        return tf.reduce_mean(tf.square(tf.sin(tf.matmul(x, v[:, None])) - 0.3))

    slope = weights(x.dtype)[0]
    return loss_by(tf.while_loop(lambda t, _: t < 2, lambda t, v: (t + 1, v - slope * tf.tanh(tf.gradients(loss_by(v), v)[0])),
                                 (0, weights(x.dtype)))[1])


def partial_likelihood(x):
    """Cox': who is still there at the time of each, looked for in a map over times."""
    risks, times = tf.reduce_sum(features(x), 1), x[:, 0]
    return tf.reduce_mean(tf.map_fn(lambda time: tf.log(tf.reduce_sum(
        tf.exp(risks) * tf.cast(times >= time, x.dtype))), times) - risks)


for form, of_chosen in {
        "elu": tf.nn.elu, "a softmax": tf.nn.softmax, "a layer": lambda y: tf.matmul(y, tf.eye(C, dtype=y.dtype)) ** 2,
        "the largest of each": lambda y: tf.reduce_max(y, 1), "columns": lambda y: tf.gather(y, [0, 1], axis=1) ** 2,
        "turned round": lambda y: tf.transpose(y) ** 2, "put side by side": lambda y: tf.tile(y, [1, 2]) ** 2,
        "tf.map_fn": lambda y: tf.map_fn(tf.square, y), "tf.Print": lambda y: tf.Print(y ** 2, [])}.items():
    MIXED["of tf.boolean_mask, by " + form] = lambda x, mask, _, of_chosen=of_chosen: tf.reduce_mean(
        of_chosen(tf.boolean_mask(features(x), mask > 0)))
MIXED_IN_A_BRANCH = {
    "a partial likelihood in a map": lambda x, *_: partial_likelihood(x),
    "dice of each class in a map": lambda x, _, classes: dice_in_a_map(x, classes),
    "dice of each class in a map of these": lambda x, _, classes: dice_in_a_map_of_classes(x, classes),
    "dice of each class in a loop": lambda x, _, classes: dice_in_a_loop(x, classes),
    "a mean of each class there is": lambda x, _, classes: tf.reduce_mean(
        of_each_class_there_is(x, classes, tf.reduce_mean)),
    "a root of each class there is": lambda x, _, classes: tf.reduce_mean(tf.sqrt(
        of_each_class_there_is(x, classes, tf.reduce_sum))),
    "a norm of each step in a loop": lambda x, *_: tf.while_loop(lambda k, _: k < C, lambda k, total: (
        k + 1, total + tf.sqrt(tf.reduce_mean(turned(x)[k] ** 2))), (0, tf.zeros([], x.dtype)))[1],
    "a norm in a loop": lambda x, *_: tf.while_loop(lambda k, _: k < C, lambda k, total: (
        k + 1, total + tf.sqrt(tf.reduce_mean(features(x)[:, k] ** 2))), (0, tf.zeros([], x.dtype)))[1],
    "a root of tf.foldl": lambda x, *_: tf.sqrt(tf.foldl(
        lambda total, row: total + tf.reduce_sum(tf.square(row)), features(x), tf.zeros([], x.dtype))),
    "a root of what a loop adds up": lambda x, mask, _: tf.sqrt(of_each_in_a_loop(
        x, mask, lambda i: tf.reduce_sum(tf.square(features(x)[i])))),
    "steps of descent in a loop": lambda x, *_: steps_of_descent(x),
    "in a branch": lambda x, mask, _: guarded(lambda: masked(x, mask), mask),
    "in a branch, captured": lambda x, mask, _: guarded(lambda y=losses(x): tf.reduce_sum(y * mask) / tf.reduce_sum(mask), mask),
    "in a branch of two": lambda x, mask, _: 2 * tf.cond(
        tf.reduce_sum(mask) > 0, lambda: tf.sqrt(tf.reduce_mean(losses(x))), lambda: tf.reduce_sum(weights())),
    "in a branch, of tf.boolean_mask": lambda x, mask, _: guarded(
        lambda: tf.reduce_mean(tf.boolean_mask(losses(x), mask > 0)), mask),
    "in a branch, of what tf.boolean_mask chose before": lambda x, mask, _: guarded(
        lambda chosen=tf.boolean_mask(losses(x), mask > 0): tf.reduce_mean(chosen), mask),
    "in a branch, by the number of what tf.boolean_mask chose": lambda x, mask, _: guarded(
        lambda total=tf.reduce_sum(losses(x)), chosen=tf.boolean_mask(x, mask > 0): total / tf.cast(
            tf.shape(chosen)[0], x.dtype), mask),
    "a root of a branch": lambda x, mask, _: tf.sqrt(guarded(lambda: tf.reduce_mean(losses(x)), mask)),
    "of features of a branch": lambda x, mask, _: masked(tf.cond(
        tf.reduce_sum(weights()) > 0, lambda: features(x), lambda: 2 * x), mask),
    "the largest of tf.map_fn": lambda x, *_: tf.reduce_max(tf.map_fn(tf.reduce_sum, tf.square(features(x)))),
    "a root of tf.map_fn": lambda x, *_: tf.sqrt(tf.reduce_mean(tf.map_fn(tf.reduce_sum, tf.square(features(x))))),
    "of a recurrent network": lambda x, mask, _: masked(tf.transpose(tf.scan(
        lambda state, step: tf.tanh(state + step), tf.transpose(features(x)), tf.zeros_like(mask))), mask)}
MIXED.update(MIXED_IN_A_BRANCH)


def of_each_in_a_loop(x, mask, of_row):
    """What a loop adds up of each example, by its number."""
    return tf.while_loop(lambda i, _: i < tf.shape(x)[0], lambda i, total: (i + 1, total + of_row(i)),
                         (0, tf.zeros([], x.dtype)))[1] / tf.cast(tf.shape(x)[0], x.dtype)


MEANS_IN_A_LOOP = {
    "of each one's own classes": lambda x, *_: tf.reduce_mean(listed_in_a_loop(features(x), distances_to_centres)),
    "of a last state": lambda x, *_: tf.reduce_mean(tf.sqrt(tf.reduce_sum(last_state(x) ** 2, 1))),
    "of what a branch takes of each": lambda x, *_: tf.reduce_mean(tf.cond(
        tf.reduce_sum(weights()) > 0, lambda: tf.nn.elu(features(x)), lambda: x)),
    "dice of each example": lambda x, mask, _: of_each_in_a_loop(
        x, mask, lambda i: dice_of(tf.sigmoid(features(x))[i], mask[i] * tf.ones([C], x.dtype))),
    "dice of each example, cut out": lambda x, mask, _: of_each_in_a_loop(
        x, mask, lambda i: dice_of(tf.sigmoid(features(x))[i:i + 1], tf.slice(mask, [i], [1])[:, None] * tf.ones([C], x.dtype))),
    "a mean as long as each example says": lambda x, mask, _: of_each_in_a_loop(
        x, mask, lambda i: tf.reduce_mean(tf.square(features(x)[i, :lengths(x)[i]]))),
    "of a map as long as each example says": lambda x, mask, _: tf.reduce_mean(tf.map_fn(
        lambda both: tf.sqrt(tf.reduce_mean(both[0][:both[1]] ** 2)), (features(x), lengths(x)), x.dtype)),
    "a sum of each class there is": lambda x, _, classes: tf.reduce_sum(
        of_each_class_there_is(x, classes, tf.reduce_sum)) / tf.cast(tf.shape(x)[0], x.dtype),
    "of a state that is scaled by weights": lambda x, *_: tf.reduce_mean(tf.square(tf.while_loop(
        lambda k, _: k < 3, lambda k, y: (k + 1, tf.sin(y * weights(x.dtype)) / (1 + tf.norm(weights(x.dtype)))),
        (0, features(x)))[1]))}


def joined(x, join=tf.stack, of_row=tf.square):
    """What a Python loop makes of each example, joined again."""
    return join([of_row(row) for row in tf.unstack(features(x))])


MIXED_OF_KNOWN_SIZE = {
    "a root of what is stacked": lambda x, *_: tf.sqrt(tf.reduce_mean(joined(x))),
    "a mask's loss of what is stacked": lambda x, mask, _: tf.reduce_sum(joined(x) * mask[:, None]) / tf.reduce_sum(mask),
    "the largest of what is stacked twice": lambda x, *_: tf.reduce_max(tf.stack(tf.unstack(joined(x)))),
    "a root of what is joined": lambda x, *_: tf.sqrt(tf.reduce_mean(joined(
        x, lambda rows: tf.concat(rows, 0), lambda row: tf.square(row)[None])))}
MEANS_OF_KNOWN_SIZE = {
    "of what is stacked": lambda x, *_: tf.reduce_mean(tf.sqrt(tf.reduce_sum(joined(x), 1))),
    "of what is stacked, of the largest of each": lambda x, *_: tf.reduce_mean(tf.reduce_max(joined(x), 1)),
    "of what is joined": lambda x, *_: tf.reduce_mean(tf.reduce_max(joined(
        x, lambda rows: tf.concat(rows, 0), lambda row: tf.square(row)[None]), 1))}


def of_each_example(x, mask, _):
    intersection = tf.reduce_sum(tf.nn.softmax(features(x)) * mask[:, None], 1)
    return tf.reduce_mean(tf.sqrt(0.1 + intersection / (1e-3 + tf.reduce_sum(tf.square(features(x)), 1))))


def in_a_loop(x, mask, _):
    def of_one(row):
        return tf.sqrt(tf.reduce_sum(tf.square(row))) / (1 + tf.reduce_max(tf.abs(row)))

    return tf.reduce_mean(tf.map_fn(of_one, features(x)))


def time_major(x, mask, _):
    y = tf.transpose(features(x))
    return tf.reduce_mean(tf.sqrt(tf.reduce_sum(tf.square(y), 0) / (1 + tf.reduce_max(tf.abs(y), 0))))


def of_all(x, mask, _):
    loss = towers.current_tower().num_towers * tf.reduce_sum(losses(x) * mask) / towers.all_reduce(tf.reduce_sum(mask))
    return {"loss": loss, "weight": 1.0}


def against_all(x, *_):
    y = tf.nn.l2_normalize(features(x), 1)
    logits = tf.matmul(y, towers.all_gather(y), transpose_b=True)
    return tf.reduce_mean(tf.reduce_logsumexp(logits, 1))


def divided_slopes(x, *_):
    slopes, = tf.gradients(tf.reduce_sum(losses(x)), x)
    return tf.reduce_mean(tf.square(tf.sqrt(tf.reduce_sum(tf.square(slopes), 1)) - 1))


def printed(x, *_):
    loss = tf.reduce_mean(losses(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tf.Print(loss, [tf.sqrt(loss)], first_n=0)


def of_each_segment(x, mask, _):
    """A loss for each example, which adds up its own parts."""
    numbers = tf.tile(tf.range(tf.shape(x)[0])[:, None], [1, C])
    return tf.reduce_mean(tf.sqrt(1 + tf.unsorted_segment_sum(
        tf.reshape(tf.square(features(x)), [-1]), tf.reshape(numbers, [-1]), tf.shape(x)[0])))


def as_wide_as_the_largest(x, _, classes):
    """Numbers for as many classes as there are, of which each example takes its own's."""
    return tf.reduce_mean(losses(x) * tf.gather(tf.ones([tf.reduce_max(classes) + 1], x.dtype), classes) * tf.cast(
        tf.gather(tf.range(tf.reduce_max(classes) + 1), classes), x.dtype))


def of_candidates(x, classes, loss, sampler=None):
    """A loss over classes of which some are drawn, the same ones for all examples of a tower, or of all."""
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        kernel, bias = (tf.get_variable(name, shape, x.dtype, tf.ones_initializer()) for name, shape in (
            ("kernel", [9, C]), ("bias", [9])))
    drawn = (tf.constant([1, 4, 7], tf.int64), tf.fill([tf.shape(x)[0], 1], tf.constant(0.3, x.dtype)),
             tf.constant([0.3, 0.2, 0.1], x.dtype))
    if sampler is not None:
        drawn = [tf.cast(each, each.dtype if each.dtype == tf.int64 else x.dtype) for each in sampler(
            tf.cast(classes, tf.int64)[:, None], 1, 3, True, 9)]
    return tf.reduce_mean(tf.sqrt(loss(
        kernel, bias, tf.cast(classes, tf.int64)[:, None], features(x), 3, 9, sampled_values=drawn)))


MEANS = {
    "of classes that are drawn": lambda x, _, classes: of_candidates(x, classes, tf.nn.sampled_softmax_loss),
    "of noise against classes": lambda x, _, classes: of_candidates(x, classes, tf.nn.nce_loss),
    "of what is looked up once": lambda x, _, classes: tf.reduce_mean(tf.square(losses(x) - tf.reduce_sum(tf.gather(
        tf.gather(tf.diag(weights()), tf.unique(classes)[0]), tf.unique(classes)[1]), 1))),
    "of a term that is switched off": lambda x, mask, _: tf.reduce_mean(losses(x)) + 0.0 * tf.sqrt(tf.reduce_mean(losses(x))),
    "of each segment": of_each_segment,
    "as wide as the largest": as_wide_as_the_largest,
    "an index of its own": lambda x, *_: tf.reduce_mean(tf.reduce_mean(losses(x)[:, None, None] * unsized(
        tf.ones([3, 5], x.dtype))[None, tf.reduce_max(tf.minimum(lengths(x), 1))], 1)),
    "tf.sequence_mask of a known length": lambda x, *_: tf.reduce_mean(
        losses(x)[:, None] * tf.sequence_mask(lengths(x), 5, x.dtype)),
    "tf.sequence_mask, over each one's length": lambda x, *_: tf.reduce_mean(tf.reduce_sum(
        losses(x)[:, None] * tf.sequence_mask(lengths(x), dtype=x.dtype), 1) / tf.cast(lengths(x), x.dtype)),
    "a mean by class": lambda x, _, classes: tf.reduce_sum(
        tf.unsorted_segment_sum(losses(x), classes, 7) * [1., 2., 3., 4., 5., 6., 7.]) / tf.cast(tf.shape(x)[0], x.dtype),
    "weights of classes": lambda x, _, classes: tf.reduce_mean(losses(x) * (
        tf.gather(weights(), classes) + tf.reduce_sum(one_hot(classes)[:, :C] * weights(), 1))),
    "centers that are trained": lambda x, _, classes: tf.reduce_mean(tf.square(features(x) - tf.gather(
        tf.diag(weights()), classes))),
    "one's own value by its class": lambda x, _, classes: tf.reduce_mean(tf.sqrt(1 + tf.square(
        tf.reduce_sum(tf.one_hot(classes, C, dtype=x.dtype) * features(x), 1)))),
    "importance weights of samples": lambda x, *_: tf.reduce_mean(tf.reduce_logsumexp(
        tf.reshape(losses(tf.tile(x, [3, 1])), [3, -1]) * [[1.], [2.], [3.]], 0)),
    "rows by a product with one-hot rows": lambda x, _, classes: tf.reduce_mean(tf.sqrt(1 + tf.matmul(tf.one_hot(
        tf.minimum(tf.cast(classes, tf.int32), C - 1) + C * tf.range(tf.shape(x)[0]), C * tf.shape(x)[0], dtype=x.dtype),
        tf.reshape(features(x) ** 2, [-1, 1])))),
    "one's own value by tf.boolean_mask": lambda x, _, classes: tf.reduce_mean(tf.sqrt(2 + tf.boolean_mask(
        tf.sin(features(x)), tf.one_hot(tf.minimum(classes, C - 1), C, on_value=True, off_value=False)))),
    "in a branch": lambda x, mask, _: guarded(lambda: tf.reduce_mean(losses(x)), mask),
    "in a branch beside a decay": lambda x, mask, _: guarded(
        lambda y=losses(x): tf.reduce_mean(y * mask), mask) + tf.cond(
            tf.reduce_sum(mask) > 0, lambda z=0.1 * tf.reduce_sum(weights()): tf.sqrt(z), lambda: tf.reduce_sum(weights())),
    "in a branch, counted": lambda x, mask, _: {
        "loss": guarded(lambda: masked(x, mask), mask), "weight": tf.reduce_sum(mask)},
    "over the number of tf.where, counted": lambda x, mask, _: {
        "loss": tf.reduce_sum(losses(x) * mask) / number_of(mask), "weight": number_of(mask)},
    "beside the number of tf.where": lambda x, mask, _: tf.reduce_mean(losses(x)) + 0 * tf.stop_gradient(number_of(mask)),
    "each over a number in a vector, counted": lambda x, mask, _: {
        "loss": tf.reduce_sum(losses(x) * mask / tf.reduce_sum(mask, 0, keepdims=True)), "weight": tf.reduce_sum(mask)},
    "features less the mean of all towers": lambda x, *_: tf.reduce_mean(tf.square(
        features(x) - towers.all_reduce(tf.reduce_sum(features(x), 0)) / towers.all_reduce(tf.ones([], x.dtype) * tf.cast(
            tf.shape(x)[0], x.dtype)))),
    "a power of 1": lambda x, *_: 0.3 * tf.pow(tf.reduce_mean(losses(x)), 1.),
    "values less rewards without an axis, not squared": lambda x, mask, _: tf.reduce_mean(values(x) - mask),
    "values against rewards": lambda x, mask, _: tf.reduce_mean(tf.square(mask[:, None] - values(x))),
    "values against what is the same for all": lambda x, *_: tf.reduce_mean(tf.square(values(x) - weights(x.dtype))),
    "each one's covariance by einsum": lambda x, *_: tf.reduce_mean(tf.square(
        tf.einsum("bi,bj->bij", features(x), features(x)))),
    "products with weights by einsum": lambda x, *_: tf.reduce_mean(tf.square(
        tf.einsum("bi,i->b", features(x), weights(x.dtype)))),
    "a mean of products by einsum": lambda x, mask, _: tf.einsum(
        "bk,b->", features(x), mask) / tf.cast(tf.shape(x)[0], x.dtype),
    "attention by einsum": lambda x, *_: tf.reduce_mean(tf.nn.softmax(tf.einsum(
        "tbk,sbk->bts", turned(x), turned(x))) * tf.transpose(words(x))[:, :, None]),
    "of words, turned": lambda x, *_: tf.reduce_mean(words(x)),
    "of words by step, turned": lambda x, *_: tf.reduce_sum(tf.reduce_mean(words(x), 1) * [1., 2., 3., 4.]),
    "of tf.losses, turned": lambda x, *_: tf.losses.compute_weighted_loss(words(x)),
    "over each one's words, turned": lambda x, mask, _: tf.reduce_mean(
        tf.reduce_sum(words(x) * of_words(x, mask), 0) / (1 + tf.reduce_sum(of_words(x, mask), 0))),
    "of the hardest words, turned": lambda x, *_: tf.reduce_mean(tf.nn.top_k(tf.transpose(words(x)), 2)[0]),
    "of the largest words, turned": lambda x, *_: tf.reduce_mean(tf.sqrt(tf.reduce_max(words(x), 0))),
    "of attention between words, turned": lambda x, *_: tf.reduce_mean(tf.nn.softmax(tf.matmul(
        tf.transpose(turned(x), [1, 0, 2]), tf.transpose(turned(x), [1, 2, 0]))) * tf.transpose(turned(x), [1, 0, 2])[:, :, :1]),
    "of each one's covariance, turned": lambda x, *_: tf.reduce_mean(tf.square(tf.matmul(
        tf.transpose(turned(x), [1, 2, 0]), tf.transpose(turned(x), [1, 0, 2])))),
    "over what is counted, turned": lambda x, mask, _: {
        "loss": tf.reduce_sum(words(x) * of_words(x, mask)) / tf.reduce_sum(of_words(x, mask)),
        "weight": tf.reduce_sum(of_words(x, mask))},
    "a mean": lambda x, *_: tf.reduce_mean(losses(x)),
    "means": lambda x, mask, _: 0.5 * tf.reduce_mean(losses(x)) - tf.reduce_mean(losses(x) * mask),
    "a mean of means": lambda x, *_: tf.reduce_mean(tf.reduce_mean(features(x), 0) * [1., 2., 3., 4.]),
    "a mean whose mean is subtracted": lambda x, *_: tf.reduce_mean(losses(x) - 0.5 * tf.reduce_mean(losses(x))),
    "by their number": lambda x, *_: tf.reduce_sum(losses(x)) / tf.cast(tf.shape(x)[0], x.dtype),
    "of tf.losses": lambda x, *_: tf.losses.compute_weighted_loss(losses(x)),
    "with a decay": lambda x, *_: tf.reduce_mean(losses(x)) + 0.1 * tf.norm(weights()) / tf.reduce_sum(weights()),
    "of each example": of_each_example,
    "in a loop": in_a_loop,
    "of each example, turned": time_major,
    "of the largest of each": lambda x, *_: tf.reduce_mean(tf.nn.top_k(features(x), 2)[0]),
    "over what is counted": lambda x, mask, _: {"loss": masked(x, mask), "weight": tf.reduce_sum(mask)},
    "guarded": lambda x, mask, _: {"weight": tf.reduce_sum(mask), "loss": tf.where(
        tf.reduce_sum(mask) > 0, 1 / tf.maximum(tf.reduce_sum(mask), 1) * tf.reduce_sum(losses(x) * mask), 0.0)},
    "of tf.boolean_mask, counted": lambda x, mask, _: {
        "loss": tf.reduce_mean(tf.boolean_mask(losses(x), mask > 0)), "weight": tf.reduce_sum(mask)},
    "of what tf.boolean_mask chose, counted": lambda x, mask, _: {
        "loss": tf.reduce_mean(tf.square(tf.boolean_mask(features(x), mask > 0) - tf.boolean_mask(x, mask > 0))),
        "weight": tf.reduce_sum(mask)},
    "over the size of all masks": of_all,
    "against all": against_all,
    "of slopes": divided_slopes,
    "printed": printed}


def model_of(table, name, size):
    def model_fn(*batch):
        if size == "unknown":
            batch = [tf.placeholder_with_default(x, [None] + x.shape.as_list()[1:]) for x in batch]
        return table[name](*batch)
    return model_fn


def batch_for(name):
    """Returns the batch, in float32 for what computes in it always."""
    return tuple(x.astype(np.float32) if "tf.losses" in name and x.dtype == float else x for x in BATCH)


def build_uneven(model_fn, batch):
    """Builds two towers, each of as many examples as the other has not, which is known while the graph is built."""
    parts = [tuple(tf.placeholder(x.dtype, (size,) + x.shape[1:]) for x in batch) for size in (5, 7)]
    return build(model_fn, towers.PerTower(parts), 2)


SIZES = ["known", "unknown"]
# Forms are built, whose losses are looked at then. Which of them are those of the whole batch is a matter of the tables.
other_than_one_batch = pytest.mark.sweep


def assert_differs_from_one_batch(model_fn, batch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(AssertionError):
            assert_equals_one_batch(model_fn, batch, 3, sizes=[3, 5, 4], steps=2)


@pytest.mark.parametrize("name,size", covering(sorted(MIXED), SIZES, one_in=4))
def test_what_takes_all_examples_of_a_tower_together_is_said(name, size):
    if (name, size) == ("a norm of each step in a loop", "unknown") and tf.control_flow_v2_enabled():
        pytest.skip("shapes that tf.tensordot is told are not those of a function's ops")
    with pytest.warns(UserWarning, match=SAID):
        build_uneven(model_of(MIXED, name, size), batch_for(name))


@other_than_one_batch
@pytest.mark.parametrize("name", sorted(MIXED))
def test_what_takes_all_examples_of_a_tower_together_is_another_loss(name):
    assert_differs_from_one_batch(MIXED[name], batch_for(name))


@pytest.mark.parametrize("name,size", covering(sorted(set(MEANS) - SAID_FALSELY), SIZES, one_in=4))
def test_means_over_examples_pass_in_silence(name, size, silent):
    build_uneven(model_of(MEANS, name, size), batch_for(name))


@pytest.mark.parametrize("name,size", covering(sorted(set(MEANS_IN_A_LOOP) - SAID_FALSELY), SIZES, one_in=4))
def test_what_a_loop_makes_of_each_example_passes_in_silence(name, size, silent):
    build_uneven(model_of(MEANS_IN_A_LOOP, name, size), BATCH)


@pytest.mark.sweep
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("table,name", [(table, name) for table in (MEANS, MEANS_IN_A_LOOP) for name in sorted(table)])
def test_means_over_examples_are_those_of_the_whole_batch(table, name, size, silent):
    assert_equals_one_batch(model_of(table, name, size), batch_for(name), 3, sizes=[3, 5, 4], steps=2)


def test_a_mean_over_examples_of_classes_that_each_tower_draws_passes_in_silence(silent):
    build_uneven(lambda x, _, classes: of_candidates(
        x, classes, tf.nn.sampled_softmax_loss, tf.random.learned_unigram_candidate_sampler), BATCH)


def by_classes_there_are(of_segments):
    def model_fn(x, _, classes):
        numbers, index = tf.unique(unsized(classes))
        return tf.reduce_mean(of_segments(losses(x), index, tf.size(numbers)))
    return model_fn


OF_SEGMENTS = [tf.math.unsorted_segment_mean, tf.math.unsorted_segment_sum]


@pytest.mark.parametrize("of_segments", covering(OF_SEGMENTS, one_in=4))
def test_a_mean_over_as_many_classes_as_there_are_is_said(of_segments):
    with pytest.warns(UserWarning, match=SAID):
        build_uneven(by_classes_there_are(of_segments), BATCH)


@other_than_one_batch
@pytest.mark.parametrize("of_segments", OF_SEGMENTS)
def test_a_mean_over_as_many_classes_as_there_are_is_another_loss(of_segments):
    assert_differs_from_one_batch(by_classes_there_are(of_segments), BATCH)


@pytest.mark.parametrize("name", covering(sorted(MIXED_OF_KNOWN_SIZE), one_in=4))
def test_what_takes_examples_together_that_were_taken_apart_is_said_too(name):
    with pytest.warns(UserWarning, match=SAID):
        build_uneven(MIXED_OF_KNOWN_SIZE[name], BATCH)


@other_than_one_batch
@pytest.mark.parametrize("name", sorted(MIXED_OF_KNOWN_SIZE))
def test_what_takes_examples_together_that_were_taken_apart_is_another_loss(name):
    assert_differs_from_one_batch(MIXED_OF_KNOWN_SIZE[name], BATCH)


@pytest.mark.parametrize("name", covering(sorted(MEANS_OF_KNOWN_SIZE), one_in=4))
def test_means_over_examples_that_were_taken_apart_pass_in_silence(name, silent):
    assert_equals_one_batch(MEANS_OF_KNOWN_SIZE[name], BATCH, 2, sizes=[5, 7], steps=1)


def of_some_classes(x, classes):
    return tf.cast(classes > 0, x.dtype)


BESIDE = [
    lambda x, _: tf.reduce_mean(losses(x)),
    lambda x, classes: masked(x, of_some_classes(x, classes)),
    lambda x, classes: masked(x, of_some_classes(x, classes) + 1e-6) * 2,
    lambda x, classes: tf.reduce_mean(tf.boolean_mask(losses(x), classes > 0)),
    lambda x, classes: tf.losses.compute_weighted_loss(losses(x), of_some_classes(x, classes))]


def weighed_by_another_number(beside):
    def model_fn(x, mask, classes):
        return {"loss": masked(x, mask) + 0.1 * beside(x, classes), "weight": tf.reduce_sum(mask)}
    return model_fn


@pytest.mark.parametrize("beside", covering(BESIDE, one_in=4))
def test_a_mean_over_examples_beside_what_is_weighed_by_another_number_is_said(beside):
    with pytest.warns(UserWarning, match=SAID):
        build_uneven(weighed_by_another_number(beside), BATCH)


@other_than_one_batch
@pytest.mark.parametrize("beside", BESIDE)
def test_a_mean_over_examples_beside_what_is_weighed_by_another_number_is_another_loss(beside):
    assert_differs_from_one_batch(weighed_by_another_number(beside), BATCH)


FORMS = [
    lambda x, mask: masked(x, mask),
    lambda x, mask: tf.reduce_mean(tf.boolean_mask(losses(x), mask > 0)),
    lambda x, mask: tf.reduce_sum(losses(x) ** 2 * mask) / tf.reduce_sum(
        tf.where(tf.not_equal(mask, 0), tf.ones_like(mask), tf.zeros_like(mask)))]


def weighed(form):
    """Divides twice by the number of one mask, written out each time; the weight is the same number in another form."""
    def model_fn(x, mask, _):
        return {"loss": form(x, mask) + form(x * 2, mask), "weight": tf.cast(tf.math.count_nonzero(mask), x.dtype)}
    return model_fn


def test_what_is_divided_by_the_weight_or_by_1_where_that_is_0_passes_in_silence(silent):
    def model_fn(x, mask, _):
        number = tf.reduce_sum(mask)
        return {"loss": tf.reduce_sum(losses(x) * mask) / tf.maximum(number, 1), "weight": number}
    assert_equals_one_batch(model_fn, BATCH, 3, sizes=[3, 5, 4], steps=2)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_divided_by_the_weight_in_another_form_passes_in_silence(form, silent):
    assert_equals_one_batch(weighed(form), BATCH, 3, sizes=[3, 5, 4], steps=2)


def of_two_masks(one, other, weight=True):
    def model_fn(x, *_):
        masks = tf.cast(x[:, 0] > -1, x.dtype), tf.cast(x[:, 1] > -0.3, x.dtype)
        loss = one(x, masks[0]) + other(x, masks[1])
        return {"loss": loss, "weight": tf.reduce_sum(masks[0])} if weight else loss
    return model_fn


TWO_MASKS = [of_two_masks(*forms) for forms in itertools.product(FORMS, FORMS)] + [of_two_masks(FORMS[1], FORMS[1], False)]


@pytest.mark.parametrize("model_fn", covering(TWO_MASKS, one_in=3))
def test_a_loss_of_the_numbers_of_two_masks_is_said_though_one_is_its_weight(model_fn):
    with pytest.warns(UserWarning, match=SAID):
        build_uneven(model_fn, BATCH)


@other_than_one_batch
@pytest.mark.parametrize("model_fn", TWO_MASKS)
def test_a_loss_of_the_numbers_of_two_masks_is_another_loss(model_fn):
    assert_differs_from_one_batch(model_fn, BATCH)


def of_maps(x):
    """As a generator begins, a vector becomes a map."""
    h = tf.reshape(tf.matmul(x, kernel(C, 64)), [-1, 4, 4, 4])
    return tf.reduce_sum(tf.tanh(h), [1, 2])


def of_points(x):
    """As a neural process encodes the points of each example."""
    batch_size, points, _ = tf.reshape(x, [-1, 2, 2]).shape.as_list()
    h = tf.matmul(tf.reshape(x, [-1, 2]), kernel(2, 4))
    return tf.exp(tf.reduce_mean(tf.reshape(tf.tanh(h), [batch_size or tf.shape(x)[0], points, 4]), 1))


def of_forces(x):
    """As energies of frames and the forces on their atoms are computed."""
    atoms = tf.reshape(x, [-1, 2, 2])
    d = atoms[:, :, None] - atoms[:, None]
    e = tf.tanh(tf.matmul(tf.reshape(1 / (1 + tf.reduce_sum(d * d, 3)), [-1, 2]), kernel(2, 1)))
    energy = tf.reduce_sum(tf.reshape(e, [-1, 2]), 1)
    return tf.reshape(tf.gradients(energy, x)[0], [-1]) - 0.1


def of_samples(x):
    """As an importance-weighted bound is computed of samples of each example."""
    z = tf.sin(x[None] * tf.constant(np.linspace(0.5, 2, 5)[:, None, None], x.dtype))
    z = tf.reshape(tf.matmul(tf.reshape(z, [-1, C]), kernel(C, 2)), [5, -1, 2])
    return tf.reduce_logsumexp(tf.reduce_sum(z, 2), 0)


def kernel(size, channels):
    return tf.get_variable("kernel", [size, channels], tf.float64, tf.glorot_uniform_initializer(seed=4))


@pytest.mark.parametrize("sizes,features_of", covering([[2, 1], [1, 1], [2, 2]], [of_maps, of_points, of_forces, of_samples]))
def test_what_is_joined_with_one_example_and_taken_apart_again_is_none_of_several(features_of, sizes, silent):
    def model_fn(x):
        return tf.reduce_mean(tf.nn.softplus(tf.square(features_of(x))))

    assert_equals_one_batch(model_fn, (X[:sum(sizes)],), len(sizes), sizes=sizes)


def test_one_example_is_no_channel_of_what_it_is_reshaped_to(silent):
    def model_fn(x, *_):
        y = x[:, None, None] * tf.ones([1, 3, 2, 1], x.dtype) + tf.reshape(features(x), [-1, 1, 1, C])
        return tf.reduce_mean(tf.square(tf.matmul(tf.reduce_mean(y, [1, 2]), tf.ones([C, 2], x.dtype))))

    assert_equals_one_batch(model_fn, BATCH, 3, sizes=[1, 1, 10])


def test_one_tower_may_mix_its_examples(silent):
    build(MIXED["dice"], BATCH, 1)


def test_a_quotient_is_no_sum_that_is_divided_by_nothing():
    with pytest.warns(UserWarning) as caught:
        build(MIXED["each over the size"], BATCH, 2)
    assert [w for w in caught if SAID in str(w.message)]
    assert not [w for w in caught if "is a sum over" in str(w.message)]


def test_a_loss_that_is_chosen_later_is_looked_at_when_it_is(silent):
    replicas = build(lambda x, mask, _: {"mean": tf.reduce_mean(losses(x)), "dice": dice(x, mask)}, BATCH, 2)
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    towers.compute_gradients(replicas, optimizer, loss="mean")
    with pytest.warns(UserWarning, match=SAID) as caught:
        warnings.simplefilter("always")
        towers.compute_gradients(replicas, optimizer, loss="dice")
    assert [w.filename for w in caught if SAID in str(w.message)] == [__file__]


def test_the_warning_names_what_mixes():
    line = r".*\n  - 'Sqrt' \(Sqrt\) computes with a mean over the tower's own examples"
    with pytest.warns(UserWarning, match="(?s)2 " + SAID + line) as caught:
        towers.TowerBuilder(cpus(2)).build(MIXED["a root"], BATCH)
    assert [w.filename for w in caught if SAID in str(w.message)] == [__file__]
    with pytest.warns(UserWarning, match=r"'truediv' \(RealDiv\) computes with a sum over .* examples \(its input 'add_1'\)"):
        build(MIXED["dice"], BATCH, 2)


def with_averages(x, moments):
    moving = [tf.get_variable(name, [C], x.dtype, tf.ones_initializer(), trainable=False) for name in ("mean", "variance")]
    return [tf.assign(variable, 0.9 * variable + 0.1 * moment) for variable, moment in zip(moving, moments)]


def in_line(x):
    moments = tf.nn.moments(x, [0])
    with tf.control_dependencies(with_averages(x, moments)):
        return tf.nn.batch_normalization(x, *moments, None, weights(x.dtype), 1e-3)


def by_squares(x):
    mean = tf.reduce_mean(x, 0)
    variance = tf.reduce_mean(tf.square(x), 0) - tf.square(mean)
    for update in with_averages(x, (mean, variance)):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return tf.nn.batch_normalization(x, mean, variance, None, weights(x.dtype), 1e-3)


def by_an_average(x):
    moments = tf.nn.moments(x, [0])
    average = tf.train.ExponentialMovingAverage(0.9)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.apply(list(moments)))
    return tf.nn.batch_normalization(x, *moments, None, weights(x.dtype), 1e-3)


def by_quotients(x, invert):
    mean, variance = moments = tf.nn.moments(x, [0])
    for update in with_averages(x, moments):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    factor = invert(weights(x.dtype), tf.sqrt(variance + 1e-3))
    return x * factor + (0.1 - mean * factor)


OWN_BATCH_NORMS = {
    "over roots": lambda x: by_quotients(x, tf.divide), "times inverses": lambda x: by_quotients(
        x, lambda scale, root: scale * tf.math.reciprocal(root)),
    "in line": in_line, "squares": by_squares, "an average": by_an_average,
    "tf.layers": lambda x: tf.layers.batch_normalization(x * weights(x.dtype), training=True),
    "tf.layers, twice": lambda x: tf.layers.batch_normalization(tf.nn.relu(
        tf.layers.batch_normalization(x * weights(x.dtype), training=True)), training=True),
    "tf.layers by a placeholder": lambda x: tf.layers.batch_normalization(
        x * weights(x.dtype), training=tf.placeholder_with_default(True, [])),
    "tf.layers, not fused": lambda x: tf.layers.batch_normalization(
        (x * weights(x.dtype))[:, None, None], training=True, fused=False)[:, 0, 0],
    "tf.layers, renormalized": lambda x: tf.layers.batch_normalization(
        tf.cast(x, tf.float32) * weights(tf.float32), training=True, renorm=True),
    "synchronized": lambda x: tf_syncbn.sync_batch_norm(x * weights(x.dtype))}


@pytest.mark.parametrize("name,sizes", covering(sorted(OWN_BATCH_NORMS), [[6, 6], [1, 11], None], one_in=4))
def test_batch_norms_that_move_averages_may_be_the_towers_own(name, sizes, silent):
    """Whoever wants them synchronized converts the model."""
    def model_fn(x):
        return tf.reduce_mean(tf.sin(OWN_BATCH_NORMS[name](x)))

    build(model_fn, (unsized(tf.constant(X)),) if sizes is None else towers.PerTower(
        [(part,) for part in np.split(X, np.cumsum(sizes)[:-1])]))


@pytest.mark.parametrize("name,found", [
    ("tf.layers", "1, 'batch_normalization'"), ("tf.layers, not fused", "1, 'batch_normalization'"),
    ("tf.layers, twice", "2, 'batch_normalization', 'batch_normalization_1'"),
    ("tf.layers by a placeholder", "1, 'batch_normalization"), ("synchronized", None)])
def test_batch_norms_of_the_towers_own_are_logged(name, found, monkeypatch):
    """Whoever forgot to convert the model finds it there."""
    logged = []
    monkeypatch.setattr(tf.logging, "info", lambda message, *values: logged.append(message % values))
    build(lambda x: tf.reduce_mean(tf.sin(OWN_BATCH_NORMS[name](x))), (tf.constant(X),), 2)
    said = [line for line in logged if "own moments" in line]
    assert len(said) == (found is not None)
    assert found is None or found in said[0]


def test_nothing_is_said_of_a_converted_model(silent):
    def model_fn(x, *_):
        y = tf.layers.batch_normalization(x * weights(x.dtype), training=True)
        return tf.reduce_mean(tf.square(y - tf.reduce_max(y, 0)))

    build(tf_syncbn.convert_model(model_fn), BATCH, 2)


def test_what_comes_back_to_examples_is_named():
    with pytest.warns(towers.TowersWarning, match=r"(?s)'moments/mean' \(Mean\) is computed from all of .*convert_model"):
        build(MIXED["a batch norm by hand"], BATCH, 2)


def test_a_deep_model_is_followed_without_recursion(silent):
    def model(x, *_):
        for _ in range(1200):  # more than Python's calls may be deep
            x = tf.identity(x)
        return tf.reduce_mean(losses(x))

    build(model, BATCH, 2)


def test_five_places_are_listed_and_the_others_counted():
    def model_fn(x, *_):
        total = 0
        for k in range(7):
            with tf.name_scope("head%d" % k):
                total += tf.sqrt(tf.reduce_mean(losses(x) + k))
        return total

    with pytest.warns(towers.TowersWarning, match=SAID) as caught:
        build(model_fn, BATCH, 2)
    message, = [str(w.message) for w in caught if SAID in str(w.message)]
    assert [line.split("/")[0] for line in message.split("\n  - ")[1:6]] == ["'head%d" % k for k in range(5)]
    assert "\n  - and 2 more\n" in message and "towers.whole_batch(model_fn)" in message
