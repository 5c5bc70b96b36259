"""What users get of `towers.whole_batch`: outputs, losses that cost nothing, draws, what it says, and what it refuses."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, run, session

RNG = np.random.RandomState(5)
X, LABELS = RNG.randn(9, 4) + 0.3, np.array([1, 0, 2, 1, 0, 0, 2, 2, 1])
SIZES = [3, 1, 5]
KNOWN = pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])


def parts(*arrays, known=True, sizes=SIZES):
    """Returns arrays, or tensors of unknown sizes, divided among towers."""
    ends = np.cumsum([0] + sizes)
    return towers.PerTower([tuple(
        array[a:b] if known else tf.placeholder_with_default(array[a:b], (None,) + array.shape[1:]) for array in arrays)
        for a, b in zip(ends, ends[1:])])


def variable(name, shape, seed=0):
    return tf.get_variable(name, shape, tf.float64, tf.random_normal_initializer(seed=seed))


def reusing(model_fn):
    """Returns a model function that makes its variables where it is called first."""
    def model(*batch):
        with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
            return model_fn(*batch)
    return model


def merged(model_fn, *arrays, known=True):
    """Returns the outputs of towers, put together, and those of the model function on the whole batch."""
    model = reusing(model_fn)
    replicas = build(towers.whole_batch(model), parts(*arrays, known=known), len(SIZES))
    return run([replicas.merged(), tf.nest.map_structure(tf.convert_to_tensor, model(*map(tf.constant, arrays)))])


def assert_alike(found, expected):
    tf.nest.assert_same_structure(found, expected)
    for name in expected:
        for a, b in zip(tf.nest.flatten(found[name]), tf.nest.flatten(expected[name])):
            assert a.shape == b.shape, name
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=name)


# Outputs.

def outputs(x, labels):
    h = tf.matmul(x, variable("kernel", [4, 3]))
    chosen, counted = tf.argmax(h, 1), tf.cast(labels, tf.float64)
    right = tf.cast(tf.equal(chosen, tf.cast(labels, tf.int64)), tf.float64)
    n = tf.shape(x)[0]
    return {
        "each": h, "time_major": tf.stack([h, 2 * h]), "last": tf.transpose(h), "twice": tf.concat([h, -h], 0),
        "merged": tf.reshape(tf.stack([h, 2 * h], 1), [-1, 3]), "classes": chosen, "flags": labels > 0,
        "confusion": tf.math.confusion_matrix(labels, chosen, 3), "sum": tf.reduce_sum(h, 0), "mean": tf.reduce_mean(h, 0),
        "largest": tf.reduce_max(h, 0), "product": tf.matmul(h, h, transpose_a=True), "pairs": tf.matmul(h, h, transpose_b=True),
        "kernel": variable("other", [2]), "number_of_classes": 3, "array": np.array([1.5, 2.0]),
        "constant": tf.constant([1, 2]), "size": n, "shape": tf.shape(h), "half": n // 2,
        "numbers": tf.range(n), "where": tf.where(labels > 0), "rows": tf.boolean_mask(h, labels > 0),
        "best": tf.nn.top_k(h[:, 0], 1),
        "accuracy": tf.reduce_mean(right), "number": tf.reduce_sum(tf.cast(right, tf.int32)), "any": tf.reduce_any(labels > 1),
        "all": tf.reduce_all(labels > 1), "ratio": tf.reduce_sum(right * counted) / tf.reduce_sum(counted),
        "int_mean": tf.reduce_mean(labels), "worst": tf.argmax(h[:, 1]), "nested": [h[:, 0], (tf.reduce_sum(h), h[0])]}


@KNOWN
def test_outputs_of_towers_put_together_are_those_of_one_tower(known):
    assert_alike(*merged(outputs, X, LABELS, known=known))


@KNOWN
def test_each_tower_hands_out_what_its_placement_says(known):
    replicas = build(towers.whole_batch(outputs), parts(X, LABELS, known=known), 3)
    names = ["each", "last", "pairs", "size"]
    for tower, size in zip(run([{name: tower.outputs[name] for name in names} for tower in replicas]), SIZES):
        assert tower["each"].shape == (size, 3) and tower["last"].shape == (3, size)
        assert tower["pairs"].shape == (size, 9) and tower["size"] == 9


@KNOWN
@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_under_reuse_takes_what_training_left(known, training):
    def model(x, labels):
        with tf.variable_scope("norm"):
            moving = [tf.get_variable(name, [4], tf.float64, tf.ones_initializer(), trainable=False) for name in "ab"]
            if towers.current_tower().training:
                moments = tf.nn.moments(x, [0])
                for old, new in zip(moving, moments):
                    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(old, 0.9 * old + 0.1 * new))
            else:
                moments = [each.read_value() for each in moving]
        h = tf.nn.batch_normalization(x, moments[0], moments[1], None, None, 1e-3)
        return {"loss": tf.reduce_mean(tf.square(tf.matmul(h, variable("kernel", [4, 1])))), "h": h,
                "confusion": tf.math.confusion_matrix(labels, tf.cast(h[:, 0] > 0, tf.int32), 3)}

    def trained(num_towers):
        with tf.Graph().as_default():
            batch = parts(X, LABELS, known=known) if num_towers > 1 else (X, LABELS)
            replicas = build(towers.whole_batch(model), batch, num_towers)
            train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
            with tf.variable_scope(tf.get_variable_scope(), reuse=True):
                evaluated = build(towers.whole_batch(model), batch, num_towers, training=training).merged()
            with session() as made:
                for _ in range(3):
                    made.run(train_op)
                return made.run(evaluated)
    assert_alike(trained(3), trained(1))


@KNOWN
def test_metrics_count_each_example_once(known):
    def model(x, labels):
        h = tf.matmul(x, variable("kernel", [4, 3]))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=h)
        return {"loss": tf.reduce_mean(losses), "mean": tf.metrics.mean(tf.cast(losses, tf.float32)),
                "recall": tf.metrics.recall(labels > 0, h[:, 0] > 0), "accuracy": tf.metrics.accuracy(labels, tf.argmax(h, 1)),
                "auc": tf.metrics.auc(labels > 0, tf.nn.sigmoid(h[:, 0]), num_thresholds=20)}

    def evaluated(num_towers):
        with tf.Graph().as_default():
            batch = parts(X, LABELS, known=known) if num_towers > 1 else (X, LABELS)
            found = build(towers.whole_batch(model), batch, num_towers).merged()
            updates = [found[name][1] for name in ("mean", "recall", "accuracy", "auc")]
            with session() as made:
                for _ in range(2):
                    made.run(updates)
                return made.run({"values": [found[name][0] for name in ("mean", "recall", "accuracy", "auc")],
                                 "state": {v.op.name: v for v in tf.local_variables()}})
    found, expected = evaluated(3), evaluated(1)
    assert 18 in list(expected["state"].values())[1:4:2]
    assert set(found["state"]) == set(expected["state"])
    for name in expected["state"]:
        np.testing.assert_allclose(found["state"][name], expected["state"][name], rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(found["values"], expected["values"], rtol=1e-6)


def masked(x, labels):
    mask = tf.cast(labels > 0, tf.float64)
    return tf.reduce_sum(mask * tf.square(tf.matmul(x, variable("kernel", [4, 1]))[:, 0])) / tf.reduce_sum(mask)


@KNOWN
def test_a_weight_beside_the_loss_is_not_looked_at_and_that_is_said_once(known, monkeypatch):
    said = []
    monkeypatch.setattr(tf.logging, "warning", lambda message, *args: said.append(message % args if args else message))
    model = reusing(lambda x, labels: {"loss": masked(x, labels), "weight": tf.reduce_sum(tf.cast(labels > 0, tf.float64))})
    replicas = build(towers.whole_batch(model), parts(X, LABELS, known=known), 3)
    one = model(tf.constant(X), tf.constant(LABELS))
    found, expected, weight = run([replicas.loss, one["loss"], replicas.merged()["weight"]])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert weight == 9  # what stands for it are the examples
    assert len(said) == 1 and "returns a \"weight\", which is not needed" in said[0]


# Losses that are means.

def ordinary(x, labels):
    h = tf.nn.relu(tf.matmul(x, variable("kernel", [4, 8])))
    logits = tf.matmul(h, variable("weights", [8, 3], 1))
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    return loss + 0.01 * tf.nn.l2_loss(tf.trainable_variables()[0])


@pytest.mark.parametrize("sizes,known", [([3, 3, 3], True), (SIZES, True), (SIZES, False)], ids=["even", "uneven", "unknown"])
def test_an_ordinary_loss_takes_not_an_op_more_and_has_the_same_bits(sizes, known):
    def trained(model_fn):
        with tf.Graph().as_default() as graph:
            tf.set_random_seed(1)
            replicas = build(model_fn, parts(X, LABELS, known=known, sizes=sizes), 3)
            train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
            types = sorted(op.type for op in graph.get_operations())
            with session() as made:
                losses = [made.run([replicas.loss, train_op])[0] for _ in range(4)]
                return types, losses, made.run(tf.global_variables())
    whole = towers.whole_batch(ordinary)
    (types, losses, after), (of_whole, their_losses, their_after) = trained(ordinary), trained(whole)
    assert of_whole == types and whole.meetings == []
    assert their_losses == losses
    for a, b in zip(after, their_after):
        np.testing.assert_array_equal(a, b)


@KNOWN
@pytest.mark.parametrize("rank", [2, 4])
def test_a_softmax_loss_of_one_hot_labels_meets_about_nothing(rank, known):
    def model(x, labels):
        shape = [-1] + [1] * (rank - 2) + [3]
        logits = tf.reshape(tf.matmul(x, variable("kernel", [4, 3])), shape)
        labels = tf.reshape(tf.one_hot(labels, 3, dtype=logits.dtype), shape)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=labels, logits=logits))

    whole = towers.whole_batch(model)
    loss = build(whole, parts(X, LABELS, known=known), 3).loss
    assert whole.meetings == []
    expected = reusing(model)(tf.constant(X), tf.constant(LABELS))
    np.testing.assert_allclose(*run([loss, expected]), rtol=1e-12)


def test_collections_of_variables_hold_for_the_whole_batch_what_they_hold_in_a_tower():
    def model(x):
        kept = tf.get_variable("kept", [4, 3], x.dtype, collections=[tf.GraphKeys.GLOBAL_VARIABLES, "mine"])
        made = tf.Variable(tf.ones([3], x.dtype), collections=[tf.GraphKeys.GLOBAL_VARIABLES, "mine"])
        tf.summary.histogram("kept", kept)
        tf.summary.scalar("largest", tf.reduce_max(x))
        penalty = tf.add_n([tf.nn.l2_loss(item) for item in tf.get_collection("mine")])
        return tf.reduce_mean(tf.square(tf.matmul(x, kept) + made)) + penalty

    replicas = build(towers.whole_batch(model), parts(X), 3)
    assert [variable.op.name for variable in tf.get_collection("mine")] == ["kept", "Variable"]
    assert len(tf.get_collection(tf.GraphKeys.SUMMARIES)) == 2 and replicas.loss.dtype == tf.float64


# Draws.

@KNOWN
def test_noise_with_the_batch_in_its_shape_is_each_towers_own(known):
    def model(x):
        noise = tf.random_normal(tf.shape(x), dtype=tf.float64)
        dropped = tf.nn.dropout(tf.ones_like(x), rate=0.5)
        return {"noise": noise, "y": x + noise, "dropped": dropped, "mean": tf.reduce_mean(noise, 0)}
    found = run(build(towers.whole_batch(model), parts(X, known=known), 3).merged())
    np.testing.assert_allclose(found["y"], X + found["noise"], rtol=1e-12)
    np.testing.assert_allclose(found["mean"], found["noise"].mean(0), rtol=1e-12)
    assert len(np.unique(found["noise"])) == X.size and found["dropped"].shape == X.shape
    assert len(np.unique(found["dropped"], axis=0)) > 3


def beta():
    """A number of Beta(0.4, 0.4)."""
    first, second = tf.random_gamma([], 0.4, dtype=tf.float64), tf.random_gamma([], 0.4, dtype=tf.float64)
    return first / (first + second)


@KNOWN
@pytest.mark.parametrize("draw", [lambda: tf.random_uniform([], dtype=tf.float64), beta], ids=["uniform", "beta"])
def test_mixup_takes_one_number_and_one_permutation_of_the_whole_batch(draw, known):
    def model(x):
        share, order = draw(), tf.random_shuffle(tf.range(tf.shape(x)[0]))
        mask = tf.nn.dropout(tf.ones_like(x), rate=0.5, noise_shape=[1, 4])
        return {"share": share, "order": order, "y": share * x + (1 - share) * tf.gather(x, order),
                "shuffled": tf.random_shuffle(x), "mask": mask}
    replicas = build(towers.whole_batch(model), parts(X, known=known), 3)
    with session() as made:
        for _ in range(2):
            found, shares = made.run([replicas.merged(), [tower.outputs["share"] for tower in replicas]])
            assert len(set(shares)) == 1 and found["share"] == shares[0]
            assert sorted(found["order"]) == list(range(9))
            np.testing.assert_allclose(found["y"], shares[0] * X + (1 - shares[0]) * X[found["order"]], rtol=1e-12)
            assert sorted(found["shuffled"][:, 0]) == sorted(X[:, 0])
            assert len(np.unique(found["mask"], axis=0)) == 1


@KNOWN
def test_what_is_drawn_without_state_is_what_one_tower_draws(known):
    def model(x):
        n = tf.shape(x)[0]
        return {"each": tf.random.stateless_uniform([n, 4], [1, 2], dtype=tf.float64),
                "one": tf.random.stateless_normal([3], [3, 4], dtype=tf.float64),
                "half": tf.random.stateless_uniform([n // 2], [1, 2], dtype=tf.float64)}
    assert_alike(*merged(model, X, known=known))


# Batches of other kinds.

def ratio(x):
    return tf.reduce_sum(x[:, 1]) / tf.reduce_sum(x[:, 2] ** 2)


@pytest.mark.parametrize("drop_remainder", [True, False], ids=["known", "unknown"])
def test_a_data_set_is_the_whole_batch(drop_remainder):
    data = tf.data.Dataset.from_tensor_slices(X).batch(9, drop_remainder=drop_remainder)
    replicas = build(towers.whole_batch(lambda x: {"loss": ratio(x), "y": x - tf.reduce_mean(x, 0)}), data, 3)
    loss, found = run([replicas.loss, replicas.merged()])
    np.testing.assert_allclose(loss, X[:, 1].sum() / (X[:, 2] ** 2).sum(), rtol=1e-12)
    np.testing.assert_allclose(found["y"], X - X.mean(0), rtol=1e-9, atol=1e-12)


def test_data_that_each_tower_takes_from_outside_are_its_examples():
    def model(scalar):
        x = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(X).batch(3)).get_next()
        return {"loss": ratio(x), "y": x - tf.reduce_mean(x, 0), "mean": tf.reduce_mean(x[:, 0])}
    replicas = build(towers.whole_batch(model), towers.PerTower([1.0, 1.0]), 2)
    loss, found = run([replicas.loss, replicas.merged()])
    taken = np.concatenate([X[:3], X[:3]])
    np.testing.assert_allclose([loss, found["loss"]], taken[:, 1].sum() / (taken[:, 2] ** 2).sum(), rtol=1e-12)
    np.testing.assert_allclose(found["mean"], taken[:, 0].mean(), rtol=1e-12)
    np.testing.assert_allclose(found["y"], taken - taken.mean(0), rtol=1e-9, atol=1e-12)


@KNOWN
def test_scalars_strings_and_nothing_may_stand_in_a_batch(known):
    names = np.array([b"a", b"b", b"c", b"a", b"b", b"c", b"a", b"b", b"c"])

    def model(batch):
        share = batch["rate"] * tf.reduce_mean(batch["x"], 0)
        codes = tf.strings.to_hash_bucket_fast(tf.strings.join([batch["names"], batch["names"]]), 5)
        return {"y": batch["x"] - share, "names": batch["names"], "codes": tf.unique(codes)[1], "rate": batch["rate"]}

    def divided(tensors):
        ends = [0, 3, 4, 9]
        return towers.PerTower([{"x": tensors(X[a:b]), "names": tensors(names[a:b]), "rate": np.float64(0.5), "none": None}
                                for a, b in zip(ends, ends[1:])])
    batch = divided(tf.constant if known else lambda x: tf.placeholder_with_default(x, (None,) + x.shape[1:]))
    replicas = build(towers.whole_batch(model), batch, 3)
    whole = {"x": tf.constant(X), "names": tf.constant(names), "rate": tf.constant(0.5, tf.float64)}
    found, expected = run([replicas.merged(), model(whole)])
    np.testing.assert_array_equal(found.pop("names"), expected.pop("names"))
    assert_alike(found, expected)


@KNOWN
def test_a_model_may_assert_what_it_is_given(known):
    def model(x):
        with tf.control_dependencies([tf.Assert(tf.reduce_all(x < 1e9), [x])]):
            return {"y": tf.identity(x) - tf.reduce_mean(x, 0)}
    found, expected = merged(model, X, known=known)
    np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-9, atol=1e-12)


@KNOWN
def test_a_whole_batch_model_may_be_called_several_times(known):
    model = reusing(lambda x: {"loss": tf.reduce_mean(tf.matmul(x, variable("kernel", [4, 2]))) ** 2 + ratio(x), "y": 2 * x})
    whole = towers.whole_batch(model)

    def sum_of_two(model, x):
        first, second = model(x), model(x ** 2)
        return {"loss": first["loss"] + second["loss"], "y": first["y"] + second["y"]}
    replicas = build(lambda x: sum_of_two(whole, x), parts(X, known=known), 3)
    loss, expected = run([replicas.loss, sum_of_two(model, tf.constant(X))["loss"]])
    np.testing.assert_allclose(loss, expected, rtol=1e-9)
    replicas = build(towers.whole_batch(whole), parts(X, known=known), 3)  # one within the other is one
    np.testing.assert_allclose(*run([replicas.loss, model(tf.constant(X))["loss"]]), rtol=1e-9)


def test_parts_of_several_known_sizes_are_counted_each_for_itself():
    boxes, divided = RNG.randn(12, 2), [0, 5, 6, 12]

    def model(x, boxes):
        kernel = variable("kernel", [4])
        loss = tf.reduce_sum(x * kernel) / tf.reduce_sum(boxes ** 2) + tf.reduce_mean(boxes) + tf.reduce_mean(x * kernel)
        return {"loss": loss, "weight": tf.shape(boxes)[0], "y": boxes - tf.reduce_mean(boxes, 0), "z": x - tf.reduce_mean(x, 0),
                "count": tf.shape(boxes)[0] + tf.shape(x)[0]}

    def trained(batch, num_towers):
        with tf.Graph().as_default():
            tf.set_random_seed(3)
            replicas = build(towers.whole_batch(model), batch, num_towers)
            train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
            with session() as made:
                found = made.run([replicas.loss, {name: replicas.merged()[name] for name in ("y", "z", "count")}, train_op])
                return dict(found[1], loss=found[0], kernel=made.run(tf.trainable_variables()[0]))
    parts_of_both = [(X[a:b], boxes[c:d]) for a, b, c, d in zip([0, 3, 4], [3, 4, 9], divided, divided[1:])]
    assert_alike(trained(towers.PerTower(parts_of_both), 3), trained(towers.PerTower([(X, boxes)]), 1))


def test_parts_of_several_unknown_sizes_fail_when_they_are_run():
    def model(x, boxes):
        return {"loss": tf.reduce_mean(x) + tf.reduce_mean(boxes), "weight": 1.0}
    batch = towers.PerTower([(tf.placeholder_with_default(X[:size], [None, 4]), tf.placeholder_with_default(X[:2], [None, 4]))
                             for size in (2, 3)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="tensors in the batch of tower 1 disagree in size along axis 0"):
        run(build(towers.whole_batch(model), batch, 2).loss)
