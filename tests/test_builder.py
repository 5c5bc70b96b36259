"""Towers: how a batch is divided, what stands where in the graph, what the collections hold, what comes out."""
import collections
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, has_tf_layers, run, session
from tests.sweeps import covering

X = np.random.RandomState(0).randn(10, 3).astype(np.float32)


def layered(images):
    """Three layers with ordinary variables, losses, summaries and update ops."""
    x = images
    for i in range(3):
        with tf.variable_scope("layer%d" % i):
            w = tf.get_variable("w", [3, 3], initializer=tf.glorot_uniform_initializer(seed=i))
            x = tf_syncbn.sync_batch_norm(tf.matmul(x, w), name="bn")
    tf.summary.scalar("mean", tf.reduce_mean(x))
    loss = tf.reduce_mean(x ** 2)
    tf.losses.add_loss(loss)
    return loss


def sizes_of(replicas, feed=None):
    return [len(o) for o in run([tower.outputs for tower in replicas], feed)]


def test_rest_of_a_batch_is_spread_over_the_first_towers():
    assert sizes_of(build(lambda x: x, (X,), 4)) == [3, 3, 2, 2]
    assert [tower.weight for tower in build(lambda x: x, (X,), 4)] == [0.3, 0.3, 0.2, 0.2]


def test_batch_of_unknown_size_is_split_alike_and_weighs_alike():
    x = tf.placeholder(tf.float32, [None, 3])
    replicas = build(lambda x: x, (x,), 4)
    assert sizes_of(replicas, {x: X}) == [3, 3, 2, 2]
    assert sizes_of(replicas, {x: X[:2]}) == [1, 1, 0, 0]
    np.testing.assert_allclose(run([tower.weight for tower in replicas], {x: X}), [0.3, 0.3, 0.2, 0.2])


def test_sizes_that_disagree_when_they_are_run_are_named():
    images, labels = tf.placeholder(tf.float32, [None, 3], "images"), tf.placeholder(tf.float32, [None], "labels")
    replicas = build(lambda x, y: tf.reduce_mean(x) + tf.reduce_mean(y), (images, labels), 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="split_batch/labels"):
        run(replicas.loss, {images: X[:8], labels: X[:7, 0]})


def test_structure_of_the_batch_reaches_the_model_and_scalars_go_to_all():
    seen = []

    def model(batch):
        seen.append(batch)
        return batch["rate"]

    replicas = build(model, {"images": X, "pair": (X[:, 0], tf.constant(np.arange(10))), "rate": 0.5}, 2)
    assert run([tower.outputs for tower in replicas]) == [0.5, 0.5]
    assert [batch["pair"][1].shape.as_list() for batch in seen] == [[5], [5]]
    np.testing.assert_array_equal(run(seen[1]["images"]), X[5:])


def test_tuple_reaches_the_model_as_positional_arguments_and_a_named_tuple_as_one():
    Pair = collections.namedtuple("Pair", "images labels")
    build(lambda images, labels: images, (X, X))
    build(lambda pair: pair.labels, Pair(X, X))


def test_per_tower_batches_and_a_callable_reach_their_towers():
    replicas = build(lambda x: x, towers.PerTower([X[:7], X[7:]]), 2)
    assert sizes_of(replicas) == [7, 3] and [t.weight for t in replicas] == [0.7, 0.3]
    replicas = build(lambda x: x, lambda context: tf.fill([2], context.index), 3)
    assert run(replicas.merged()).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("batch,error,message", [
    ((X[:1],), ValueError, "A batch of 1 .* is too small for 2 towers"),
    ((X, X[:4]), ValueError, "agree in axis 0; these do not: .* has 4, .* has 10"),
    ((1.0,), ValueError, "no tensor of rank 1 or more"),
    (towers.PerTower([X]), ValueError, "PerTower holds 1 batches for 2 towers"),
    (towers.PerTower([X[:0], X[:0]]), ValueError, "batches of all towers are empty"),
])
def test_batches_that_can_not_be_divided_are_refused(batch, error, message):
    with pytest.raises(error, match=message):
        build(lambda *x: x[0], batch, 2)


def test_batches_of_which_only_some_have_a_size_are_refused():
    with pytest.raises(towers.TowerMismatchError, match="shares of the global batch are unknown"):
        build(tf.reduce_sum, towers.PerTower([X, 1.0]))


def test_tensors_of_unknown_rank_are_refused():
    unknown = tf.placeholder(tf.float32, name="unknown")
    with pytest.raises(ValueError, match="'unknown:0' has unknown rank"):
        build(lambda x: x, (unknown,))
    with pytest.raises(ValueError, match=r"'values:0 \(sparse\)' has unknown rank"):
        build(lambda x: x, (tf.SparseTensor(tf.placeholder(tf.int64), tf.placeholder(tf.float32, name="values"),
                                            tf.placeholder(tf.int64)),))


@pytest.mark.parametrize("model,error,message", [
    (3, TypeError, "model_fn has to be a function"),
    (lambda x: {"loss": x}, ValueError, r"loss of tower 0 has to be a floating point scalar;.* shape \(5, 3\)"),
    (lambda x: {"loss": tf.constant(1)}, ValueError, "int32"),
    (lambda x: {"loss": tf.reduce_mean(x), "weight": x}, ValueError, "\"weight\" of a tower has to be a scalar"),
    (lambda x: {"a" if towers.current_tower().is_first else "b": x}, towers.TowerMismatchError,
     "another structure in tower 1"),
    (lambda x: x if towers.current_tower().is_first else tf.reduce_mean(x), towers.TowerMismatchError,
     "only one of the towers"),
    (lambda x: build(lambda y: y, (x,)), RuntimeError, "towers can't be nested"),
])
def test_model_functions_that_can_not_be_used_are_refused(model, error, message):
    with pytest.raises(error, match=message):
        build(model, (X,), 2)


def test_variables_have_no_tower_in_their_name_and_are_made_once():
    replicas = build(layered, (X,), 4)
    towers.minimize(replicas, tf.train.AdamOptimizer())
    names = [v.op.name for v in tf.global_variables()]
    assert len(names) == len(set(names)) and not [n for n in names if "tower" in n]
    assert len(tf.trainable_variables()) == 3 * 3
    with tf.Graph().as_default():
        build(layered, (X,), 1)
        assert [v.op.name for v in tf.global_variables()] == names[:3 * 5]


def test_checkpoint_of_a_model_without_towers_loads(tmp_path):
    with tf.Graph().as_default():
        w = tf.get_variable("scope/w", [3], initializer=tf.random_normal_initializer())
        v = tf.Variable(tf.random_normal([2]), name="v")
        with session() as made:
            path, values = tf.train.Saver().save(made, str(tmp_path / "model")), made.run([w, v])

    def model(x):
        w = tf.get_variable("scope/w", [3])
        v = tf.Variable(tf.random_normal([2]), name="v")
        return tf.reduce_sum(x * w) + tf.reduce_sum(v)

    build(model, (X,), 2)
    with session() as made:
        tf.train.Saver().restore(made, path)
        for ours, saved in zip(made.run(tf.global_variables()), values):
            np.testing.assert_array_equal(ours, saved)


def test_name_scopes_and_devices_are_those_of_the_towers():
    builder = towers.TowerBuilder(cpus(3), aggregation_device="/cpu:2")
    replicas = builder.build(layered, (X,))
    assert [tower.name_scope for tower in replicas] == ["tower_0/", "tower_1/", "tower_2/"]
    for i, tower in enumerate(replicas):
        products = [op for op in tower.ops if op.type == "MatMul"]
        assert len(products) == 3
        assert all(op.name.startswith("tower_%d/" % i) and op.device.lower().endswith("cpu:%d" % i) for op in products)
    aggregates = [op for op in tf.get_default_graph().get_operations() if op.name.startswith("cross_tower/")]
    assert aggregates and all(op.device.lower().endswith("cpu:2") for op in aggregates)


def test_batch_is_split_on_the_host_and_no_collective_op_is_built():
    replicas = towers.TowerBuilder(["/cpu:1", "/cpu:2"]).build(layered, (tf.placeholder(tf.float32, [None, 3]),))
    towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops="all")
    ops = tf.get_default_graph().get_operations()
    splits = [op for op in ops if op.name.startswith("split_batch/")]
    assert splits and all(op.device.lower().endswith("cpu:0") for op in splits)
    assert not [op.type for op in ops if "nccl" in op.type.lower() or "collective" in op.type.lower()]


def test_several_towers_may_share_a_device():
    replicas = towers.TowerBuilder(["/cpu:0"] * 3).build(layered, (X,))
    assert np.isfinite(run(replicas.loss))


def test_losses_of_earlier_towers_are_out_of_sight_and_there_afterwards():
    seen = []
    tf.add_to_collection(tf.GraphKeys.LOSSES, tf.constant(5.0, name="before"))

    def model(x):
        tf.losses.add_loss(tf.reduce_mean(x))
        seen.append(len(tf.losses.get_losses()))
        return tf.losses.get_total_loss()

    build(model, (X,), 3)
    assert seen == [2, 2, 2]
    assert [loss.op.name.split("/")[0] for loss in tf.losses.get_losses()] == ["before", "tower_0", "tower_1", "tower_2"]


def regularized(x):
    """Regularization by variables and by hand: in the loss once, whatever the number of towers."""
    w = tf.get_variable("w", [3, 2], initializer=tf.glorot_uniform_initializer(seed=0), regularizer=tf.nn.l2_loss)
    tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, tf.reduce_sum(tf.abs(w), name="by_hand"))
    tf.losses.add_loss(tf.reduce_mean(tf.matmul(x, w) ** 2))
    return tf.losses.get_total_loss()


def test_total_loss_counts_regularization_once():
    with tf.Graph().as_default():
        regularized(tf.constant(X))  # the authority is TensorFlow without towers
        expected = run(tf.losses.get_total_loss())
    for count in (1, 2, 3):
        with tf.Graph().as_default():
            assert run(build(regularized, (X,), count).loss) == pytest.approx(expected, rel=1e-6)


def test_total_loss_counts_regularization_of_tf_layers_once():
    if not has_tf_layers():
        pytest.skip("this TensorFlow has no tf.layers")

    def model(x):
        y = tf.layers.dense(x, 2, kernel_initializer=tf.glorot_uniform_initializer(seed=0), kernel_regularizer=tf.nn.l2_loss)
        tf.losses.add_loss(tf.reduce_mean(y ** 2))
        return tf.losses.get_total_loss()

    values = []
    for count in (1, 3):
        with tf.Graph().as_default():
            values.append(run(build(model, (X,), count).loss))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_summaries_are_tower_0s_and_update_ops_are_all_towers():
    def model(x):
        tf.summary.scalar("average", tf.reduce_mean(x))
        with tf.name_scope("block"):
            tf.summary.histogram("values", x)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.no_op())
        return tf.reduce_mean(x)

    replicas = build(model, (X,), 3)
    assert len(tf.get_collection(tf.GraphKeys.SUMMARIES)) == 2
    values = tf.Summary.FromString(run(tf.summary.merge_all())).value
    assert [value.tag for value in values] == ["average", "block/values"]
    assert values[0].simple_value == pytest.approx(X[:4].mean(), rel=1e-5)
    assert [len(tower.update_ops) for tower in replicas] == [1, 1, 1]
    assert len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)) == 3


def test_eleven_towers_are_not_taken_for_one_another():
    def model(x):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.no_op())
        return tf.reduce_mean(x)

    replicas = build(model, (np.ones([22, 1], np.float32),), 11)
    assert [len(tower.update_ops) for tower in replicas] == [1] * 11


def test_merged_joins_batches_and_averages_scalars_by_weight():
    replicas = build(lambda x: {"rows": x, "mean": tf.reduce_mean(x), "count": tf.shape(x)[0], "yes": True}, (X,), 3)
    merged = run(replicas.merged())
    np.testing.assert_array_equal(merged["rows"], X)
    assert merged["mean"] == pytest.approx(X.mean(), rel=1e-5)
    assert merged["count"] == pytest.approx(0.4 * 4 + 0.3 * 3 + 0.3 * 3) and merged["yes"] == 1.0
    assert replicas.merged() is replicas.merged()


def test_none_goes_to_every_tower_and_stays_none():
    def model_fn(x, labels, more):
        assert labels is None and more["there"] is None
        return {"loss": tf.reduce_mean(x), "labels": labels, "x": x}

    merged = build(model_fn, (X, None, {"there": None}), 3).merged()
    assert merged["labels"] is None
    np.testing.assert_array_equal(run(merged["x"]), X)


def test_a_loss_of_none_and_an_operation_among_merged_outputs_are_refused_by_what_to_do():
    with pytest.raises(ValueError, match="The loss of tower 0 is None: return a scalar"):
        build(lambda x: {"loss": None}, (X,))
    replicas = build(lambda x: {"loss": tf.reduce_mean(x), "train": tf.no_op()}, (X,))
    with pytest.raises(TypeError, match="joins and averages tensors, and the model function returned .*NoOp"):
        replicas.merged()


@pytest.mark.parametrize("num_towers,weighted", covering([1, 2, 3], [False, True]))
def test_the_loss_and_merged_outputs_are_named_alike_for_any_number_of_towers(num_towers, weighted):
    def model(x):
        outputs = {"loss": tf.reduce_mean(x * tf.get_variable("w", [3])), "rows/of it": {"b": x, "a": tf.shape(x)[0]}, "7": x}
        return dict(outputs, weight=tf.reduce_sum(x)) if weighted else outputs

    replicas = build(model, (X,), num_towers)
    merged, average = replicas.merged(), tf.train.ExponentialMovingAverage(0.9)
    assert replicas.loss.op.name == "global_loss/loss"
    assert {key: merged[key].op.name for key in ("loss", "7")} == {"loss": "merged/loss", "7": "merged/7"}
    assert (merged["rows/of it"]["a"].op.name, merged["rows/of it"]["b"].op.name) == ("merged/rows_of_it", "merged/rows_of_it_1")
    average.apply([merged["loss"], replicas.loss])
    assert [v.op.name for v in tf.global_variables()][1:] == ["merged/loss/ExponentialMovingAverage",
                                                              "global_loss/loss/ExponentialMovingAverage"]
    assert build(lambda x: (x, [x]), (X,), num_towers).merged()[1][0].op.name == "merged_1/output_1"


def test_merged_outputs_are_built_outside_of_the_callers_loop_and_control_dependencies():
    replicas, ran = build(lambda x: {"rows": x}, (X,), 2), tf.get_variable("ran", [], initializer=tf.zeros_initializer())

    def body(i, total):
        return i + 1, total + tf.reduce_sum(replicas.merged()["rows"])

    with tf.control_dependencies([tf.assign_add(ran, 1.0)]):
        total = tf.while_loop(lambda i, _: i < 3, body, [0, 0.0])[1]
    with session() as made:
        np.testing.assert_array_equal(made.run(replicas.merged()["rows"]), X)
        assert made.run(ran) == 0.0
        assert made.run(total) == pytest.approx(3 * X.sum(), rel=1e-4)


def test_outputs_of_towers_in_a_loop_are_merged_there():
    def body(i, total):
        replicas = build(lambda x: x, (tf.constant(X) * tf.cast(i, tf.float32),), 2)
        return i + 1, total + tf.reduce_sum(replicas.merged())

    assert run(tf.while_loop(lambda i, _: i < 3, body, [0, 0.0])[1]) == pytest.approx(3 * X.sum(), rel=1e-4)


def test_loss_is_that_of_the_global_batch():
    assert run(build(lambda x: tf.reduce_mean(x ** 2), (X,), 4).loss) == pytest.approx((X ** 2).mean(), rel=1e-5)


def test_towers_are_a_sequence():
    replicas = build(lambda x: x, (X,), 3)
    assert len(replicas) == 3 and replicas[-1] is list(replicas)[2] and "cpu:1" in repr(replicas)
    assert "index=1" in repr(replicas[1].context)


def test_second_build_under_reuse_shares_the_variables():
    build(layered, (X,), 2)
    count = len(tf.global_variables())
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        again = build(layered, (X,), 3, training=False)
    assert len(tf.global_variables()) == count
    assert again[0].name_scope == "tower_0_1/"


def metrics_and_variables(x):
    """Twice a scope, and variables that `tf.get_variable` knows nothing of."""
    with tf.variable_scope("inner"):
        tf.metrics.mean(x)
        with tf.name_scope("numbers"):
            tf.Variable(tf.zeros([3]), name="v")
    with tf.variable_scope("inner"):
        tf.metrics.mean_iou(tf.cast(x[:, 0] > 0, tf.int32), tf.cast(x[:, 1] > 0, tf.int32), 2)
    return tf.reduce_mean(x * tf.get_variable("w", [3]) * tf.Variable(1.0, name="scale"))


@pytest.mark.parametrize("scope", [None, "model"])
def test_variables_of_a_second_and_a_third_build_are_named_as_without_towers(scope):
    def names(built):
        with tf.Graph().as_default():
            for turn in range(3):
                with tf.variable_scope(scope or tf.get_variable_scope(), reuse=turn > 0):
                    built()
            return [v.op.name for v in tf.global_variables() + tf.local_variables()]

    assert names(lambda: build(metrics_and_variables, (X,), 2)) == names(lambda: metrics_and_variables(tf.constant(X)))


def test_builder_inside_a_variable_scope_makes_variables_there():
    with tf.variable_scope("model"):
        build(layered, (X,), 2)
    assert {v.op.name.split("/")[0] for v in tf.global_variables()} == {"model"}


def exchanges_and_nodes(num_towers):
    with tf.Graph().as_default() as graph:
        replicas = build(layered, (np.ones([num_towers, 3], np.float32),), num_towers)
        towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
        stand_ins = [op for op in graph.get_operations() if op.type == "Bitcast" and re.search(r"/met(_\d+)?$", op.name)]
        assert all(op.inputs[0].op.type != "Placeholder" for op in stand_ins)
        return len(stand_ins), len(graph.get_operations())


@pytest.mark.laws
def test_exchanges_a_layer_and_tower_are_constant_and_the_graph_grows_linearly():
    counts = {n: exchanges_and_nodes(n) for n in (3, 6, 12, 24)}  # of two towers sums take fewer ops
    assert {stand_ins / n for n, (stand_ins, _) in counts.items()} == {3 * 2}  # layers, forward and backward
    a_tower = [(counts[2 * n][1] - counts[n][1]) / n for n in (3, 6, 12)]
    assert max(a_tower) <= 1.02 * min(a_tower)


def test_eager_execution_is_one_clear_error():
    with tf.Graph().as_default():
        builder = towers.TowerBuilder(cpus(1))
    import unittest.mock
    with unittest.mock.patch.object(tf, "executing_eagerly", lambda: True):
        with pytest.raises(RuntimeError, match="eager execution is on: call tf.compat.v1.disable_eager_execution"):
            builder.build(layered, (X,))


def test_later_build_does_not_see_the_losses_of_an_earlier_one():
    def model(x):
        tf.losses.add_loss(tf.reduce_mean(x ** 2))
        return tf.losses.get_total_loss()

    build(model, (X,), 2)
    assert run(build(model, (X,), 2, training=False).loss) == pytest.approx((X ** 2).mean(), rel=1e-5)
    assert len(tf.losses.get_losses()) == 4


def test_summary_tags_of_two_builds_do_not_collide_and_keep_the_scope_around_them():
    build(lambda x: [tf.summary.scalar("average", tf.reduce_mean(x)), x][1], (X,), 2)
    build(lambda x: [tf.summary.scalar("average", tf.reduce_mean(x)), x][1], (X,), 2)
    with tf.name_scope("outer"):
        build(lambda x: [tf.summary.scalar("average", tf.reduce_mean(x)), x][1], (X,), 2)
    values = tf.Summary.FromString(run(tf.summary.merge_all())).value
    assert [value.tag for value in values] == ["average", "average_1", "outer/average"]


def test_device_that_the_model_itself_names_is_kept():
    def model(x):
        with tf.device("/cpu:3"):
            return tf.identity(x)

    assert {tower.outputs.op.device.lower()[-5:] for tower in build(model, (X,), 2)} == {"cpu:3"}


def test_batch_whose_tensors_disagree_in_size_needs_a_weight():
    def part(rows):
        return {"class_weights": np.ones(10, np.float32), "images": X[:rows]}

    batch = towers.PerTower([part(7), part(1)])
    with pytest.raises(ValueError, match=r"sizes \[7, 10\] along axis 0.*return a \"weight\""):
        build(lambda batch: tf.reduce_mean(batch["images"]), batch)
    replicas = build(lambda batch: {"loss": tf.reduce_mean(batch["images"]), "weight": tf.shape(batch["images"])[0]}, batch)
    assert run([tower.weight for tower in replicas]) == [7 / 8, 1 / 8]


def test_outputs_are_merged_before_the_graph_is_finalized():
    replicas = build(lambda x: {"y": 2 * x}, (X,))
    before = build(lambda x: {"y": 2 * x}, (X,)).merged()
    tf.get_default_graph().finalize()
    with pytest.raises(RuntimeError, match="the graph is finalized, as a monitored session does it: call it before the session"):
        replicas.merged()
    np.testing.assert_array_equal(tf.Session(config=towers.session_config(["/cpu:1"])).run(before["y"]), 2 * X)
