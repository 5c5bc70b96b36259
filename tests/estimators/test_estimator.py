"""Estimators whose model function is replicated train, evaluate, predict and export as one without towers does."""
import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import cpus, has_tf_estimator, has_tf_layers, run, session, set_variables
from towers.estimators.gradient_forms import gradient_forms

needs_estimator = pytest.mark.skipif(not has_tf_estimator(), reason="TensorFlow has no tf.estimator from 2.16 on")
needs_layers = pytest.mark.skipif(not has_tf_layers(), reason="needs tf.layers")
TRAIN, EVAL, PREDICT = "train", "eval", "infer"
UPDATE_OPS = tf.GraphKeys.UPDATE_OPS
SGD, Momentum = tf.train.GradientDescentOptimizer, tf.train.MomentumOptimizer
RNG = np.random.RandomState(0)
FEATURES = {"x": RNG.randn(11, 5), "ids": RNG.randint(0, 7, 11)}
LABELS = RNG.randint(0, 3, 11)


def itself(optimizer):
    return optimizer


def loss_of(features, labels):
    """An embedding, a regularizer, an unused variable, and sync batch norm."""
    initializer = tf.glorot_uniform_initializer(seed=1)
    embedding = tf.get_variable("embedding", [7, 5], tf.float64, initializer)
    tf.get_variable("unused", [2], tf.float64, initializer)
    weights = tf.get_variable("weights", [5, 3], tf.float64, initializer, regularizer=lambda w: 0.01 * tf.nn.l2_loss(w))
    logits = tf.matmul(features["x"] + tf.nn.embedding_lookup(embedding, features["ids"]), weights)
    logits = tf_syncbn.sync_batch_norm(logits, training=True, momentum=0.9, name="bn")
    tf.losses.add_loss(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)))
    return tf.losses.get_total_loss()


def plain_minimize(wrap, loss):
    with tf.control_dependencies(tf.get_collection(UPDATE_OPS)):
        return wrap(Momentum(0.1, 0.9)).minimize(loss, tf.train.get_global_step())


def clipped(wrap, loss):
    optimizer = wrap(Momentum(0.1, 0.9))
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    gradients, norm = tf.clip_by_global_norm(gradients, 0.05)
    tf.summary.scalar("norm", norm)
    with tf.control_dependencies([tf.group(*tf.get_collection(UPDATE_OPS))]):
        return optimizer.apply_gradients(zip(gradients, variables), tf.train.get_global_step())


def averaged_and_counted(wrap, loss):
    """An average of the weights after the step, a count beside it, and an optimizer with variables of its own in scopes."""
    with tf.name_scope("optimizer"), tf.variable_scope("of_training"):
        train_op = wrap(tf.train.AdamOptimizer(0.1, epsilon=0.1)).minimize(loss, tf.train.get_global_step())
    average = tf.train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([train_op]):
        averages = average.apply(tf.trainable_variables())
    steps = tf.get_variable("steps", [], tf.float64, tf.zeros_initializer(), trainable=False)
    return tf.group(averages, tf.assign_add(steps, 1.0), *tf.get_collection(UPDATE_OPS))


def decayed_learning_rate(wrap, loss):
    rate = tf.train.exponential_decay(tf.constant(0.1, tf.float64), tf.train.get_global_step(), 2, 0.1)
    with tf.control_dependencies(tf.get_collection(UPDATE_OPS)):
        return wrap(SGD(rate)).minimize(loss, tf.train.get_global_step(), var_list=tf.trainable_variables("weights"))


def one_step_after_another(wrap, loss):
    with tf.control_dependencies(tf.get_collection(UPDATE_OPS)):
        first = wrap(Momentum(0.1, 0.9)).minimize(loss, tf.train.get_global_step())
    with tf.control_dependencies([first]):
        weights, = [v for v in tf.trainable_variables() if v.op.name == "weights"]
        value = weights.read_value()
        shrink = tf.reduce_sum(tf.square(value) * tf.cast([[1], [2], [3], [4], [5]], tf.float64))
        return wrap(SGD(0.01)).minimize(shrink, var_list=[weights])


WAYS = [plain_minimize, clipped, averaged_and_counted, decayed_learning_rate, one_step_after_another]


def model(way, features, labels, mode, wrap=towers.TowerOptimizer):
    loss = loss_of(features, labels)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=way(wrap, loss))


def dynamic(array):
    """A tensor whose number of rows is not known while the graph is built."""
    return tf.placeholder_with_default(array, (None,) + array.shape[1:])


def spec_of(model_fn, mode=TRAIN, num_towers=0, features=FEATURES, labels=LABELS, tensors=tf.constant, **kwargs):
    """The spec of a model function in the default graph, on so many towers; 0 is without."""
    tf.train.get_or_create_global_step()
    features = {key: tensors(value) for key, value in features.items()}
    labels = None if labels is None else tensors(labels)
    if num_towers:
        model_fn = towers.replicate_model_fn(model_fn, devices=cpus(num_towers), **kwargs)
    return model_fn(features=features, labels=labels, mode=mode)


def trained(steps, initial, *args, **kwargs):
    """Trains in a graph of its own: the first loss, and variables by name before and after."""
    with tf.Graph().as_default():
        spec = spec_of(*args, **kwargs)
        variables = {v.op.name: v for v in tf.global_variables()}
        with session() as made:
            set_variables(made, initial or {})
            before, loss = made.run(variables), made.run(spec.loss)
            for _ in range(steps):
                made.run(spec.train_op)
            return loss, before, made.run(variables)


def assert_trains_as_without_towers(model_fn, num_towers, plain_fn=None, tolerance=1e-9, **kwargs):
    plain = {key: value for key, value in kwargs.items() if key in ("features", "labels", "tensors")}
    loss, before, expected = trained(4, None, plain_fn or functools.partial(model_fn, wrap=itself), **plain)
    ours = trained(4, before, model_fn, num_towers=num_towers, **kwargs)
    np.testing.assert_allclose(ours[0], loss, rtol=tolerance)
    assert set(ours[2]) == set(expected)
    assert any(np.abs(expected[name] - before[name]).max() > 1e-3 for name in expected if name != "global_step")
    for name in expected:
        np.testing.assert_allclose(ours[2][name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@needs_estimator
@pytest.mark.parametrize("num_towers,tensors", [(1, tf.constant), (2, tf.constant), (3, dynamic)],
                         ids=["1", "2", "3, unknown size"])
@pytest.mark.parametrize("way", WAYS)
def test_towers_train_as_the_model_function_without_them(way, num_towers, tensors):
    assert_trains_as_without_towers(functools.partial(model, way), num_towers, tensors=tensors)


@needs_estimator
def test_many_averages_after_a_step_are_alike_in_all_towers():
    def model_fn(features, labels, mode, wrap=towers.TowerOptimizer):
        loss = loss_of(features, labels) + tf.add_n([
            tf.reduce_mean(features["x"][:, :2] * tf.get_variable("v%d" % i, [2], tf.float64)) for i in range(24)])
        train_op = wrap(SGD(0.1)).minimize(loss, tf.train.get_global_step())
        with tf.control_dependencies([train_op]):
            averages = tf.train.ExponentialMovingAverage(0.5).apply(tf.trainable_variables())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(averages, *tf.get_collection(UPDATE_OPS)))

    assert_trains_as_without_towers(model_fn, 3)


def averages_of_what_moved(wrap, loss):
    """Averages, after the step, of what the step's update ops moved too."""
    with tf.control_dependencies(tf.get_collection(UPDATE_OPS)):
        train_op = wrap(SGD(0.1)).minimize(loss, tf.train.get_global_step())
    with tf.control_dependencies([train_op]):
        return tf.train.ExponentialMovingAverage(0.5).apply(tf.trainable_variables("weights") + [
            v for v in tf.global_variables() if v.op.name.startswith(("bn/moving", "moved", "counted"))])


def lookahead(wrap, loss):
    """Slow weights that follow after every second step, and weights that go back to them."""
    weights, = [v for v in tf.trainable_variables() if v.op.name == "weights"]
    slow = tf.get_variable("slow", [5, 3], tf.float64, tf.zeros_initializer(), trainable=False)
    step = tf.train.get_global_step()

    def follow():
        with tf.control_dependencies([slow.assign_add(0.5 * (weights - slow))]):
            return tf.group(weights.assign(slow.read_value()))

    with tf.control_dependencies(tf.get_collection(UPDATE_OPS)):
        train_op = wrap(SGD(0.1)).minimize(loss, step)
    with tf.control_dependencies([train_op]):
        return tf.cond(tf.equal(step.read_value() % 2, 0), follow, tf.no_op)


def shrunk_after_the_step(wrap, loss):
    """Weights that are written after the step by what they are then, and an update op that reads them before."""
    weights, = [v for v in tf.trainable_variables() if v.op.name == "weights"]
    largest = tf.get_variable("largest", [], tf.float64, tf.zeros_initializer(), trainable=False)
    updates = tf.get_collection(UPDATE_OPS) + [tf.assign(largest, tf.reduce_max(weights))]
    with tf.control_dependencies(updates):
        train_op = wrap(SGD(0.1)).minimize(loss, tf.train.get_global_step())
    with tf.control_dependencies([train_op]):
        return weights.assign(weights * 0.5 + tf.reduce_sum(weights))


@needs_estimator
@pytest.mark.parametrize("num_towers", [1, 3])
@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("way", [averages_of_what_moved, lookahead, shrunk_after_the_step])
def test_what_runs_behind_a_step_reads_behind_it_and_behind_what_it_waited_for(way, resource, num_towers):
    if tf.control_flow_v2_enabled() and not resource and way is not shrunk_after_the_step:
        pytest.skip("TensorFlow's branches there do not take ref variables, towers or none")

    def model_fn(features, labels, mode, wrap=towers.TowerOptimizer):
        with tf.variable_scope(tf.get_variable_scope(), use_resource=resource):
            loss = loss_of(features, labels)
            moved = tf.get_variable("moved", [], tf.float64, tf.zeros_initializer(), trainable=False)
            counted = tf.get_variable("counted", [], tf.float64, tf.zeros_initializer(), trainable=False)
            tf.add_to_collection(UPDATE_OPS, tf.assign(moved, moved + 1))
            with tf.control_dependencies([tf.assign(counted, counted + 1)]):  # in line
                loss *= tf.identity(tf.ones([], tf.float64))
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=way(wrap, loss))

    assert_trains_as_without_towers(model_fn, num_towers)


def clipped_by_an_average_norm(wrap, loss, in_collection=False):
    """Gradients clipped by a moving average of their norm, which the step waits for."""
    optimizer = wrap(SGD(0.1))
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    norm = tf.global_norm(gradients)
    average = tf.get_variable("average_norm", [], tf.float64, tf.constant_initializer(0.01), trainable=False)
    now = tf.assign(average, 0.9 * average + 0.1 * norm)
    seen = tf.get_variable("largest_norm", [], tf.float64, tf.zeros_initializer(), trainable=False)
    largest = tf.assign(seen, tf.maximum(seen, norm))
    if in_collection:
        tf.add_to_collection(UPDATE_OPS, largest)
    gradients, _ = tf.clip_by_global_norm(gradients, now, use_norm=norm)
    with tf.control_dependencies([now, largest] + tf.get_collection(UPDATE_OPS)):
        return optimizer.apply_gradients(zip(gradients, variables), tf.train.get_global_step())


@needs_estimator
@pytest.mark.parametrize("num_towers", [1, 3])
@pytest.mark.parametrize("in_collection", [False, True])
def test_what_a_step_waits_for_may_be_made_of_averaged_gradients(in_collection, num_towers):
    way = functools.partial(clipped_by_an_average_norm, in_collection=in_collection)
    assert_trains_as_without_towers(functools.partial(model, way), num_towers)


@needs_estimator
def test_batch_smaller_than_the_towers_trains_as_without_them():
    features = {key: value[:2] for key, value in FEATURES.items()}
    assert_trains_as_without_towers(functools.partial(model, clipped), 5, features=features, labels=LABELS[:2], tensors=dynamic)


@needs_estimator
def test_two_optimizers_step_from_the_same_variables():
    def model_fn(features, labels, mode):
        loss = loss_of(features, labels)
        first = towers.TowerOptimizer(SGD(0.125)).minimize(loss, tf.train.get_global_step(), tf.trainable_variables("weights"))
        second = towers.TowerOptimizer(SGD(0.25)).minimize(2 * loss, None, tf.trainable_variables("embedding"))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(first, second))

    # Rates that float32 holds: TensorFlow rounds them for dense gradients and not for sparse ones.
    def plain_fn(features, labels, mode):
        loss, lists = loss_of(features, labels), [tf.trainable_variables(name) for name in ("weights", "embedding")]
        gradients = tf.gradients(loss, lists[0]) + tf.gradients(2 * loss, lists[1])
        gradients = tf.tuple([tf.convert_to_tensor(gradient) for gradient in gradients], control_inputs=[
            op for op in tf.get_collection(UPDATE_OPS)])
        first = SGD(0.125).apply_gradients([(gradients[0], lists[0][0])], tf.train.get_global_step())
        second = SGD(0.25).apply_gradients([(gradients[1], lists[1][0])])
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(first, second))

    assert_trains_as_without_towers(model_fn, 3, plain_fn)


@needs_estimator
def test_sums_over_examples_are_trained_as_sums():
    def model_fn(features, labels, mode, wrap=towers.TowerOptimizer):
        weights = tf.get_variable("weights", [5], tf.float64, tf.ones_initializer())
        loss = 0.5 * tf.reduce_sum(tf.square(tf.tensordot(features["x"], weights, 1) - 1))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=wrap(SGD(0.01)).minimize(loss))

    for tensors in (tf.constant, dynamic):
        assert_trains_as_without_towers(model_fn, 3, loss_reduction=tf.losses.Reduction.SUM, tensors=tensors)


@needs_estimator
def test_weight_says_what_a_loss_is_a_mean_over():
    def model_fn(features, labels, mode, wrap=towers.TowerOptimizer):
        weights = tf.get_variable("weights", [5], tf.float64, tf.ones_initializer())
        losses, valid = tf.square(tf.tensordot(features["x"], weights, 1) - 1), tf.cast(labels > 0, tf.float64)
        loss = tf.div_no_nan(tf.reduce_sum(losses * valid), tf.reduce_sum(valid))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=wrap(SGD(0.01)).minimize(loss))

    assert_trains_as_without_towers(model_fn, 3, weight=lambda features, labels: tf.reduce_sum(tf.cast(labels > 0, tf.float64)))


@needs_estimator
def test_transforms_act_on_averaged_gradients():
    def model_fn(features, labels, mode):
        loss = loss_of(features, labels)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=plain_minimize(towers.TowerOptimizer, loss))

    def plain_fn(features, labels, mode):
        loss = loss_of(features, labels)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=clipped(itself, loss))

    assert_trains_as_without_towers(model_fn, 3, plain_fn, transforms=[towers.clip_by_global_norm(0.05)])


@needs_estimator
def test_count_of_a_train_op_counts_the_examples_of_all_towers():
    def model_fn(features, labels, mode):
        loss = loss_of(features, labels)
        seen = tf.get_variable("seen", [], tf.int32, tf.zeros_initializer(), trainable=False)
        train_op = tf.group(plain_minimize(towers.TowerOptimizer, loss), tf.assign_add(seen, tf.shape(labels)[0]))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    with pytest.warns(UserWarning, match="Each tower writes the variable 'seen'"):
        assert trained(4, None, model_fn, num_towers=3, tensors=dynamic)[2]["seen"] == 44


@needs_estimator
@pytest.mark.parametrize("policy,expected", [("first", 0.1 * 1), ("last", 0.1 * 5), ("all", 0.1 * 5 + 0.9 * 0.1 * 1),
                                             ("none", 0)])
def test_policy_says_whose_update_ops_run(policy, expected):
    def model_fn(features, labels, mode):
        average = tf.get_variable("average", [], tf.float64, tf.zeros_initializer(), trainable=False)
        weights = tf.get_variable("weights", [], tf.float64, tf.ones_initializer())
        tf.add_to_collection(UPDATE_OPS, tf.assign(average, 0.9 * average + 0.1 * tf.reduce_mean(features["x"])))
        loss = tf.reduce_mean(features["x"] * weights)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=towers.TowerOptimizer(SGD(0.1)).minimize(loss))

    features = {"x": np.array([1.0, 1, 5, 5])}
    ours = trained(1, None, model_fn, num_towers=2, features=features, labels=None, update_ops=policy)
    np.testing.assert_allclose(ours[2]["average"], expected, rtol=1e-12)


@needs_estimator
def test_policy_none_leaves_update_ops_to_the_model_function():
    assert_trains_as_without_towers(functools.partial(model, plain_minimize), 3, update_ops="none")
    assert_trains_as_without_towers(functools.partial(model, averaged_and_counted), 3, update_ops="none")


@needs_estimator
def test_assertions_that_a_step_waits_for_run_in_every_tower():
    def model_fn(features, labels, mode):
        loss = loss_of(features, labels)
        with tf.control_dependencies([tf.debugging.assert_less(labels, tf.cast(3, labels.dtype), message="too large")]):
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=plain_minimize(towers.TowerOptimizer, loss))

    labels = LABELS.copy()
    labels[-1] = 3  # in the last tower
    spec = spec_of(model_fn, num_towers=3, labels=labels)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large|outside the valid range"):
        run(spec.train_op)


def spec_with(metrics=None, predictions=None, loss=None, train_op=None, scaffold=None, **kwargs):
    """A model function that returns what functions of features and labels make."""
    def model_fn(features, labels, mode):
        weights = tf.get_variable("weights", [5], tf.float64, tf.ones_initializer())
        mean = tf.reduce_mean(tf.square(tf.tensordot(features["x"], weights, 1) - 1))
        made = mean if loss is None else loss(features, labels)
        return tf.estimator.EstimatorSpec(
            mode, loss=made, eval_metric_ops=None if metrics is None else metrics(features, labels),
            predictions=None if predictions is None else predictions(features),
            train_op=(towers.TowerOptimizer(SGD(0.1)).minimize(made) if train_op is None else train_op(made)),
            scaffold=None if scaffold is None else scaffold(), **kwargs)
    return model_fn


def metrics_of(features, labels):
    guess = tf.cast(tf.abs(features["x"][:, 0]) * 2, tf.int64) % 3
    return {"accuracy": tf.metrics.accuracy(labels, guess), "mean": tf.metrics.mean(features["x"]),
            "auc": tf.metrics.auc(labels > 0, tf.sigmoid(features["x"][:, 0])), "iou": tf.metrics.mean_iou(labels, guess, 3),
            "rms": tf.metrics.root_mean_squared_error(features["x"][:, 0], features["x"][:, 1])}


def evaluated(model_fn, num_towers, batches, tensors=dynamic):
    """Evaluates batches one after the other; the metrics' values and the last updates'."""
    with tf.Graph().as_default():
        spec = spec_of(model_fn, EVAL, num_towers, {key: value[:len(batches[0])] for key, value in FEATURES.items()},
                       LABELS[:len(batches[0])], lambda array: tf.placeholder(
                           array.dtype, ((None if tensors is dynamic else len(array)),) + array.shape[1:], "fed"))
        fed = [op.outputs[0] for op in tf.get_default_graph().get_operations() if op.type == "Placeholder" and "fed" in op.name]
        with session() as made:
            for rows in batches:
                values = [FEATURES[key][rows] for key in FEATURES] + [LABELS[rows]]
                updates = made.run({key: update for key, (_, update) in spec.eval_metric_ops.items()}, dict(zip(fed, values)))
            return made.run({key: value for key, (value, _) in spec.eval_metric_ops.items()}), updates


@needs_estimator
@pytest.mark.parametrize("num_towers", [1, 2, 5])
@pytest.mark.parametrize("tensors,batches", [(dynamic, [np.arange(4), np.arange(4, 9), np.arange(9, 11)]),
                                             (tf.constant, [np.arange(6), np.arange(5, 11)])], ids=["unknown_size", "known_size"])
def test_metrics_are_those_without_towers(num_towers, tensors, batches, recwarn):
    expected = evaluated(spec_with(metrics_of), 0, batches, tensors)
    ours = evaluated(spec_with(metrics_of), num_towers, batches, tensors)
    rows = np.concatenate(batches)
    np.testing.assert_allclose(ours[0]["mean"], FEATURES["x"][rows].mean(), rtol=1e-6)
    for found, wanted in zip(ours, expected):
        assert set(found) == set(wanted)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, err_msg=name)
    assert not [w for w in recwarn if "puts ops of tower" in str(w.message)]


def counter(features, labels, added=None):
    count = tf.get_variable("count", [], tf.int32, tf.zeros_initializer(), trainable=False,
                            collections=[tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES])
    return {"count": (tf.identity(count), tf.assign_add(count, tf.shape(labels)[0] if added is None else added))}


@needs_estimator
@pytest.mark.parametrize("tensors", [dynamic, tf.constant])
def test_metric_that_counts_examples_counts_those_of_all_towers_and_one_that_counts_batches_counts_each_once(tensors):
    batches = [np.arange(6), np.arange(5, 11)]
    assert evaluated(spec_with(counter), 3, batches, tensors)[0]["count"] == 12
    assert evaluated(spec_with(functools.partial(counter, added=1)), 3, batches, tensors)[0]["count"] == 2


@needs_estimator
def test_metric_that_counts_batches_of_sparse_features_alone_counts_each_once():
    def model_fn(features, labels, mode):
        weights = tf.get_variable("weights", [5, 1], tf.float64, tf.ones_initializer())
        loss = tf.reduce_mean(tf.sparse.sparse_dense_matmul(features["rows"], weights))
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=counter(features, labels, added=1))

    rows = tf.sparse.from_dense(FEATURES["x"][:6])
    spec = towers.replicate_model_fn(model_fn, devices=cpus(3))({"rows": rows}, None, EVAL)
    value, update = spec.eval_metric_ops["count"]
    with session() as made:
        assert [made.run(update) for _ in range(2)] == [1, 2] and made.run(value) == 2


@needs_estimator
@pytest.mark.parametrize("tensors", [dynamic, tf.constant])
def test_metric_of_a_mean_over_the_batch_is_refused_unless_it_is_of_all_towers(tensors):
    def own(features, labels):
        return {"loss_again": tf.metrics.mean(tf.reduce_mean(features["x"]))}

    def of_all(features, labels):
        total = towers.all_reduce(tf.reduce_sum(features["x"])) / towers.all_reduce(tf.cast(tf.size(features["x"]), tf.float64))
        return {"mean": tf.metrics.mean(total)}

    batches = [np.arange(6), np.arange(5, 11)]
    with pytest.raises(ValueError, match="The metric 'loss_again' of a model function adds 1.0 to '.*count'"):
        evaluated(spec_with(own), 3, batches, tensors)
    expected = np.mean([FEATURES["x"][rows].mean() for rows in batches])
    np.testing.assert_allclose(evaluated(spec_with(of_all), 3, batches, tensors)[0]["mean"], expected, rtol=1e-5)


@needs_estimator
def test_metric_that_counts_either_batches_or_examples_is_refused_where_a_tower_has_one():
    with pytest.raises(ValueError, match="The metric 'count' of a model function adds 1 to 'count'"):
        evaluated(spec_with(counter), 3, [np.arange(3)], tf.constant)


@needs_estimator
def test_predictions_and_exports_are_joined_in_order_scalars_averaged_and_variables_left_whole():
    kinds = tf.estimator.export

    def model_fn(features, labels, mode):
        table = tf.get_variable("table", [3, 2], tf.float64, tf.ones_initializer())
        x = features["x"]
        predictions = {"x": x, "mean": tf.reduce_mean(x), "table": table.read_value(), "zeros": tf.zeros([tf.shape(x)[0]])}
        return tf.estimator.EstimatorSpec(mode, predictions=predictions, export_outputs={
            "serving_default": kinds.PredictOutput({"x": x}), "regression": kinds.RegressionOutput(x[:, 0]),
            "classes": kinds.ClassificationOutput(scores=x, classes=tf.as_string(x))})

    for tensors in (tf.constant, tf.Variable):  # of an unknown size only where a placeholder is, which is built without towers
        with tf.Graph().as_default():
            spec = spec_of(model_fn, PREDICT, 3, {"x": FEATURES["x"]}, None, tensors)
            exports = {name: (output.outputs if name == "serving_default" else output.value if name == "regression" else
                              output.classes) for name, output in spec.export_outputs.items()}
            found, exports, scores = run([spec.predictions, exports, spec.export_outputs["classes"].scores])
        np.testing.assert_array_equal(found["x"], FEATURES["x"])
        np.testing.assert_array_equal(scores, FEATURES["x"])
        np.testing.assert_array_equal(exports["regression"], FEATURES["x"][:, 0])
        np.testing.assert_array_equal(list(exports["serving_default"].values())[0], FEATURES["x"])
        assert exports["classes"].shape == (11, 5)
        np.testing.assert_allclose(found["mean"], FEATURES["x"].mean(), rtol=1e-12)
        assert found["table"].shape == (3, 2) and found["zeros"].shape == (11,)


@needs_estimator
def test_prediction_that_is_one_integer_for_a_batch_is_refused():
    model_fn = spec_with(predictions=lambda features: {"count": tf.reduce_sum(features["ids"])})
    with pytest.raises(ValueError, match="The prediction .* is one int64 for a whole batch"):
        spec_of(model_fn, EVAL, 2)


@needs_estimator
def test_fields_of_the_spec_are_carried():
    hooks = {name: [tf.train.StepCounterHook()] for name in ("training_hooks", "training_chief_hooks", "evaluation_hooks",
                                                             "prediction_hooks")}
    made = []

    def scaffold():
        made.append(tf.train.Scaffold(init_fn=lambda scaffold, session: None))
        return made[-1]

    spec = spec_of(spec_with(scaffold=scaffold, **hooks), TRAIN, 2)
    assert all(list(getattr(spec, name)) == hooks[name] for name in hooks)
    assert spec.scaffold is made[0] and spec.mode == TRAIN
    assert spec.loss.shape == [] and spec.train_op.type == "NoOp"


@needs_estimator
def test_summaries_are_tower_0s_under_tags_without_a_tower():
    with tf.Graph().as_default():
        spec_of(functools.partial(model, clipped), num_towers=3)
        merged = tf.Summary.FromString(run(tf.summary.merge_all()))
        assert [value.tag for value in merged.value] == ["norm"]


@needs_estimator
def test_tensors_named_at_the_top_of_a_model_function_are_found_without_the_tower():
    def model_fn(features, labels, mode):
        loss = loss_of(features, labels)
        tf.identity(tf.constant(0.5), name="learning_rate")
        tf.nn.softmax(features["x"], name="softmax_tensor")
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=plain_minimize(towers.TowerOptimizer, loss))

    spec_of(model_fn, num_towers=2)
    found = run(["learning_rate:0", "softmax_tensor:0"])
    assert found[0] == 0.5 and found[1].shape == (6, 5)


def raises(words, model_fn, error=ValueError, mode=TRAIN, num_towers=2, **kwargs):
    with tf.Graph().as_default(), pytest.raises(error, match=words):
        spec_of(model_fn, mode, num_towers, **kwargs)


@needs_estimator
def test_train_op_of_no_tower_optimizer_is_refused():
    def beside_one(loss):
        return tf.group(towers.TowerOptimizer(SGD(0.1)).minimize(loss), SGD(0.1).minimize(loss))

    for train_op in (lambda loss: tf.assign_add(tf.train.get_global_step(), 1), beside_one):
        raises("[Oo]ptimizer", spec_with(train_op=train_op))


@needs_estimator
def test_gradients_of_a_towers_own_are_refused():
    def own(loss):
        variables = tf.trainable_variables()
        return towers.TowerOptimizer(SGD(0.1)).apply_gradients(zip(tf.gradients(loss, variables), variables))

    def none_at_all(loss):
        return towers.TowerOptimizer(SGD(0.1)).apply_gradients([(tf.ones([5], tf.float64), tf.trainable_variables()[0])])

    raises("the gradient of 'weights' .* is made of the tower's own part of the batch", spec_with(train_op=own))
    raises("no gradient that compute_gradients of a TowerOptimizer returned", spec_with(train_op=none_at_all))


@needs_estimator
def test_learning_rate_of_a_towers_own_is_refused():
    raises("The optimizer GradientDescentOptimizer is given a learning rate or another argument .* tower 0's own part",
           spec_with(train_op=lambda loss: towers.TowerOptimizer(SGD(0.1 * loss)).minimize(loss)))


@needs_estimator
def test_two_steps_of_one_variable_in_no_order_are_refused():
    raises("train the variable 'weights', and nothing says which comes first", spec_with(train_op=lambda loss: tf.group(
        *[towers.TowerOptimizer(SGD(0.1)).minimize(loss) for _ in range(2)])))


@needs_estimator
def test_gradient_that_is_none_though_the_graph_leads_to_the_variable_is_refused():
    def train_op(loss):
        other = tf.get_variable("other", [], tf.float64, tf.ones_initializer())
        optimizer = towers.TowerOptimizer(SGD(0.1))
        return optimizer.apply_gradients(optimizer.compute_gradients(loss + tf.floor(other)))

    raises("The gradient of 'other' by the loss '.*' turns out to be None, and the model function was told that it is a tensor",
           spec_with(train_op=train_op))


@needs_estimator
def test_what_a_step_can_not_be_made_of_is_refused():
    optimizer = towers.TowerOptimizer(SGD(0.1))
    raises("takes a loss that is a tensor", spec_with(train_op=lambda loss: optimizer.minimize(lambda: loss)), TypeError)
    raises("takes no grad_loss", spec_with(train_op=lambda loss: optimizer.minimize(loss, grad_loss=loss)))
    raises("there are no variables to train", spec_with(train_op=lambda loss: optimizer.minimize(loss, var_list=[])))
    raises("has no variables yet", spec_with(train_op=lambda loss: (optimizer.minimize(loss), optimizer.variables())))
    raises("is made inside a tf.cond", spec_with(train_op=lambda loss: tf.cond(
        loss > 0, lambda: tf.group(optimizer.minimize(loss)), tf.no_op)))
    raises("has to make a tf.train.Optimizer, not 3", spec_with(
        train_op=lambda loss: towers.TowerOptimizer(lambda: 3).minimize(loss)), TypeError)


@needs_estimator
def test_towers_that_ask_for_other_steps_are_refused():
    def train_op(loss):
        optimizer = towers.TowerOptimizer(SGD(0.1))
        return [optimizer.minimize(loss) for _ in range(1 + towers.current_tower().index)][0]

    raises("asks a TowerOptimizer for 2 steps in tower 1 and for 1 in tower 0", spec_with(train_op=train_op),
           towers.TowerMismatchError)


@needs_estimator
def test_sum_that_holds_a_regularization_loss_is_refused():
    def loss(features, labels):
        weights = tf.get_variable("regularized", [5], tf.float64, tf.ones_initializer())
        return tf.reduce_sum(tf.tensordot(features["x"], weights, 1)) + 0.01 * tf.nn.l2_loss(weights)

    raises("adds '.*', which takes nothing of the batch and would count once a tower, 2 times", spec_with(loss=loss),
           loss_reduction=tf.losses.Reduction.SUM)


@needs_estimator
def test_saver_made_before_the_optimizers_variables_is_refused_unless_it_is_deferred():
    def train_op(loss):
        return towers.TowerOptimizer(Momentum(0.1, 0.9)).minimize(loss)

    raises("The Saver of the scaffold was made before the variables of the optimizer, 'weights/Momentum' among them",
           spec_with(train_op=train_op, scaffold=lambda: tf.train.Scaffold(saver=tf.train.Saver())))
    with tf.Graph().as_default():
        spec = spec_of(spec_with(train_op=train_op, scaffold=lambda: tf.train.Scaffold(saver=tf.train.Saver(defer_build=True))),
                       num_towers=2)
        spec.scaffold.finalize()
        assert "weights/Momentum" in [v.op.name for v in tf.global_variables()]


@needs_estimator
def test_session_that_lacks_the_towers_devices_is_refused():
    model_fn = towers.replicate_model_fn(spec_with(), devices=cpus(3))
    words = r"stand on 3 CPU devices, .*session_config=towers.session_config\(\['/cpu:0', '/cpu:1', '/cpu:2'\]\)"
    for config in (tf.estimator.RunConfig(), tf.estimator.RunConfig(session_config=towers.session_config(cpus(2)))):
        with pytest.raises(ValueError, match=words):
            model_fn(FEATURES, LABELS, TRAIN, config=config)
    with pytest.raises(ValueError, match="has a distribution strategy"):
        model_fn(FEATURES, LABELS, TRAIN, config=tf.estimator.RunConfig(train_distribute=tf.distribute.get_strategy()))


@needs_estimator
def test_arguments_that_are_none_are_refused():
    for words, error, kwargs in [
            ("loss_reduction is one of", ValueError, {"loss_reduction": tf.losses.Reduction.NONE}),
            ("update_ops is one of", ValueError, {"update_ops": "some"}),
            ("convert has to be a function", TypeError, {"convert": 3}),
            ("weight has to be a function", TypeError, {"weight": 3}),
            ("A transform is a function of", TypeError, {"transforms": [3]}),
            ("towers.accumulate averages the gradients of its batches, and the loss is a sum", ValueError,
             {"transforms": [towers.accumulate(2)], "loss_reduction": tf.losses.Reduction.SUM})]:
        with pytest.raises(error, match=words):
            towers.replicate_model_fn(spec_with(), devices=cpus(2), **kwargs)
    with pytest.raises(TypeError, match="model_fn has to be a function, not 3"):
        towers.replicate_model_fn(3)
    with pytest.raises(ValueError, match="is converted already.* convert=tf_syncbn.convert_model"):
        towers.replicate_model_fn(tf_syncbn.convert_model(spec_with()), devices=cpus(2))
    with pytest.raises(ValueError, match="takes `features` and `mode`"):
        towers.replicate_model_fn(lambda x: x, devices=cpus(2))
    with pytest.raises(ValueError, match="does not take labels"):
        towers.replicate_model_fn(lambda features, mode: None, devices=cpus(2))(FEATURES, LABELS, TRAIN)
    with pytest.raises(TypeError, match="has to return a tf.estimator.EstimatorSpec, not None"):
        towers.replicate_model_fn(lambda features, mode: None, devices=cpus(2))(FEATURES, None, TRAIN)


@needs_estimator
def test_export_output_of_an_unknown_kind_is_refused():
    class Other(tf.estimator.export.ExportOutput):
        def as_signature_def(self, receiver_tensors):
            return None

    def model_fn(features, labels, mode):
        return tf.estimator.EstimatorSpec(mode, predictions=features["x"], export_outputs={"serving_default": Other()})

    raises("export_outputs hold .*: towers join", model_fn, TypeError, PREDICT, labels=None)


# Estimators.

IMAGES, CLASSES = RNG.randn(10, 8, 8, 3).astype(np.float32), (np.arange(10) % 4).astype(np.int64)


def cifar(features, labels, mode, params):
    """The pattern of TensorFlow's CIFAR-10 Estimators."""
    training, initializer = mode == TRAIN, tf.glorot_uniform_initializer(seed=1)
    x = tf.layers.conv2d(features["image"], 4, 3, kernel_initializer=initializer, name="conv")
    x = tf.nn.relu(tf.layers.batch_normalization(x, training=training, momentum=0.9, name="bn"))
    logits = tf.layers.dense(tf.reduce_mean(x, [1, 2]), 4, kernel_initializer=initializer, name="logits")
    predictions = {"classes": tf.argmax(logits, 1), "probabilities": tf.nn.softmax(logits, name="softmax_tensor")}
    if mode == PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predictions, export_outputs={
            "predict": tf.estimator.export.PredictOutput(predictions)})
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    loss += 1e-3 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])
    accuracy = tf.metrics.accuracy(labels, predictions["classes"])
    train_op = None
    if training:
        rate = tf.train.piecewise_constant(tf.train.get_global_step(), [2], [params["rate"], params["rate"] / 10])
        tf.identity(rate, name="learning_rate")
        tf.summary.scalar("learning_rate", rate)
        tf.identity(accuracy[1], name="train_accuracy")
        with tf.control_dependencies(tf.get_collection(UPDATE_OPS)):
            train_op = towers.TowerOptimizer(Momentum(rate, 0.9)).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, predictions, loss, train_op, {"accuracy": accuracy})


def images(size=10):
    return tf.data.Dataset.from_tensor_slices(({"image": IMAGES}, CLASSES)).batch(size)


def config_of(num_towers):
    return tf.estimator.RunConfig(session_config=towers.session_config(cpus(num_towers)))


def estimators(model_fn, folder, num_towers=2, params=None, **kwargs):
    """The Estimator without towers, and ours."""
    replicated = towers.replicate_model_fn(model_fn, devices=cpus(num_towers), **kwargs)
    return (tf.estimator.Estimator(model_fn, str(folder / "plain"), params=params),
            tf.estimator.Estimator(replicated, str(folder / "ours"), config_of(num_towers), params))


def receiver():
    fed = tf.placeholder(tf.float32, [None, 8, 8, 3])
    return tf.estimator.export.ServingInputReceiver({"image": fed}, {"image": fed})


@needs_estimator
@needs_layers
def test_cifar_pattern_trains_evaluates_predicts_and_exports_as_without_towers(tmp_path):
    plain, ours = estimators(cifar, tmp_path, params={"rate": 0.1}, convert=tf_syncbn.convert_model)
    hook = tf.train.LoggingTensorHook(["learning_rate", "train_accuracy"], every_n_iter=1)
    for estimator in (plain, ours):
        estimator.train(lambda: images().repeat(), [hook], steps=4)
    assert sorted(ours.get_variable_names()) == sorted(plain.get_variable_names())
    for name in plain.get_variable_names():
        np.testing.assert_allclose(ours.get_variable_value(name), plain.get_variable_value(name), rtol=1e-4, atol=1e-6)
    results = [ours.evaluate(lambda: images(4)), plain.evaluate(lambda: images(4), checkpoint_path=ours.latest_checkpoint()),
               ours.evaluate(lambda: images(4), checkpoint_path=plain.latest_checkpoint())]
    for result in results[1:]:
        for name, value in results[0].items():
            np.testing.assert_allclose(result[name], value, rtol=1e-4, err_msg=name)
    expected = np.array([row["probabilities"] for row in plain.predict(
        lambda: images(4), checkpoint_path=ours.latest_checkpoint())])
    found = np.array([row["probabilities"] for row in ours.predict(lambda: images(4))])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    check_export(ours, tmp_path, expected)
    plain.train(lambda: images().repeat(), steps=1)
    ours.train(lambda: images().repeat(), steps=1)
    assert ours.get_variable_value("global_step") == 5


def check_export(estimator, folder, expected):
    path = estimator.export_saved_model(str(folder / "export"), receiver).decode()
    with tf.Graph().as_default() as graph, tf.Session() as made:
        signature = tf.saved_model.loader.load(made, ["serve"], path).signature_def["serving_default"]
        assert not [op.name for op in graph.get_operations() if "tower" in op.name]
        assert not [op.name for op in graph.get_operations() if op.device and "save" not in op.name]
        found = made.run(signature.outputs["probabilities"].name, {signature.inputs["image"].name: IMAGES})
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@needs_estimator
@pytest.mark.parametrize("num_towers", [2, 3, 5])
def test_evaluation_of_1003_examples_in_batches_of_64_counts_1003(tmp_path, num_towers):
    numbers = np.random.RandomState(2).randn(1003)

    def model_fn(features, labels, mode):
        weights = tf.get_variable("weights", [], tf.float64, tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(features * weights))
        train_op = towers.TowerOptimizer(SGD(0.0)).minimize(loss, tf.train.get_global_step())
        count = tf.get_variable("count", [], tf.float64, tf.zeros_initializer(), trainable=False,
                                collections=[tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES])
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops={
            "mean": tf.metrics.mean(features), "positive": tf.metrics.accuracy(labels, tf.cast(features > 0, tf.int64)),
            "count": (tf.identity(count), tf.assign_add(count, tf.cast(tf.size(features), tf.float64)))})

    def input_fn():
        return tf.data.Dataset.from_tensor_slices((numbers, np.ones(1003, np.int64))).batch(64)

    _, ours = estimators(model_fn, tmp_path, num_towers)
    ours.train(input_fn, steps=1)
    found = ours.evaluate(input_fn)
    assert found["count"] == 1003
    np.testing.assert_allclose([found["mean"], found["positive"]], [numbers.mean(), (numbers > 0).mean()], rtol=1e-5, atol=1e-7)
    batches = [np.mean(np.square(numbers[i:i + 64])) for i in range(0, 1003, 64)]
    np.testing.assert_allclose(found["loss"], np.mean(batches), rtol=1e-5)


@needs_estimator
def test_layers_that_follow_the_tower_export_by_their_moving_averages(tmp_path):
    def model_fn(features, labels, mode):
        x = tf_syncbn.sync_batch_norm(features["image"], momentum=0.9)
        spec = {"predictions": {"probabilities": tf.reduce_mean(x, [1, 2])}}
        if mode != PREDICT:
            spec["loss"] = tf.reduce_mean(tf.square(x - 1))
            spec["train_op"] = towers.TowerOptimizer(SGD(0.1)).minimize(spec["loss"], tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, **spec)

    replicated = towers.replicate_model_fn(model_fn, devices=cpus(2))
    ours = tf.estimator.Estimator(replicated, str(tmp_path / "ours"), config_of(2))
    ours.train(images, steps=1)
    moving = [ours.get_variable_value("batch_normalization/" + name) for name in ("moving_mean", "moving_variance")]
    np.testing.assert_allclose(moving[0], 0.1 * IMAGES.mean((0, 1, 2)), rtol=1e-4, atol=1e-7)
    gamma, beta = [ours.get_variable_value("batch_normalization/" + name) for name in ("gamma", "beta")]
    expected = (gamma * (IMAGES - moving[0]) / np.sqrt(moving[1] + 1e-3) + beta).mean((1, 2))
    check_export(ours, tmp_path, expected.astype(np.float32))
    np.testing.assert_allclose([row["probabilities"] for row in ours.predict(images)], expected, rtol=1e-4, atol=1e-6)


@needs_estimator
@needs_layers
def test_canned_estimator_is_replicated(tmp_path):
    columns = [tf.feature_column.numeric_column("x", shape=[5])]
    x, y = RNG.randn(22, 5).astype(np.float32), RNG.randint(0, 2, 22)

    def input_fn():
        return tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(11).repeat(3)

    def canned(optimizer):
        return tf.estimator.LinearClassifier(columns, optimizer=optimizer, loss_reduction=tf.losses.Reduction.SUM).model_fn

    replicated = towers.replicate_model_fn(canned(towers.TowerOptimizer(tf.train.FtrlOptimizer(0.05))),
                                           tf.losses.Reduction.SUM, devices=cpus(3))
    pair = [tf.estimator.Estimator(canned(tf.train.FtrlOptimizer(0.05)), str(tmp_path / "plain")),
            tf.estimator.Estimator(replicated, str(tmp_path / "ours"), config_of(3))]
    expected, found = [estimator.train(input_fn).evaluate(input_fn) for estimator in pair]
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, err_msg=name)
    assert expected["average_loss"] < 0.69


@needs_estimator
def test_initial_values_from_a_checkpoint_reach_all_towers(tmp_path):
    with tf.Graph().as_default(), tf.Session() as made:
        tf.get_variable("old", initializer=np.arange(5.0))
        made.run(tf.global_variables_initializer())
        path = tf.train.Saver().save(made, str(tmp_path / "old"))

    def model_fn(features, labels, mode):
        weights = tf.get_variable("weights", [5], tf.float64, tf.ones_initializer())
        tf.train.init_from_checkpoint(path, {"old": weights})
        return tf.estimator.EstimatorSpec(mode, predictions=tf.tensordot(features["x"], weights, 1))

    spec = spec_of(model_fn, PREDICT, 3, labels=None)
    np.testing.assert_allclose(run(spec.predictions), FEATURES["x"].dot(np.arange(5.0)), rtol=1e-12)


class Clipped(tf.train.Optimizer):
    """An optimizer that clips in its `compute_gradients`, as that of tf.contrib.estimator.clip_gradients_by_norm."""

    def __init__(self, optimizer):
        super(Clipped, self).__init__(False, "Clipped")
        self.compute, self.apply_gradients = optimizer.compute_gradients, optimizer.apply_gradients

    def compute_gradients(self, *args, **kwargs):
        gradients, variables = zip(*self.compute(*args, **kwargs))
        return list(zip(tf.clip_by_global_norm(gradients, 0.05)[0], variables))


@needs_estimator
def test_optimizer_that_clips_is_exact_around_a_tower_optimizer_and_warns_within_one():
    def model_fn(features, labels, mode, wrap):
        loss = loss_of(features, labels)
        with tf.control_dependencies(tf.get_collection(UPDATE_OPS)):
            train_op = wrap(Momentum(0.1, 0.9)).minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    around, within = [functools.partial(model_fn, wrap=wrap) for wrap in (
        lambda optimizer: Clipped(towers.TowerOptimizer(optimizer)), lambda optimizer: towers.TowerOptimizer(Clipped(optimizer)))]
    assert_trains_as_without_towers(around, 3, functools.partial(model_fn, wrap=Clipped))
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="Clipped computes gradients in a way of its own"):
        spec_of(within, num_towers=2)


@needs_estimator
@pytest.mark.skipif(not tf.__version__.startswith("1."), reason="only TensorFlow 1 has slim in tf.contrib")
def test_train_op_of_slim_is_that_of_the_whole_batch():
    from tensorflow.contrib import slim

    def model_fn(features, labels, mode, wrap=towers.TowerOptimizer):
        loss = loss_of(features, labels)
        train_op = slim.learning.create_train_op(loss, wrap(tf.train.AdamOptimizer(0.1, epsilon=0.1)), clip_gradient_norm=0.05,
                                                 summarize_gradients=True)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    assert_trains_as_without_towers(model_fn, 3)


# Without tf.estimator.

def test_without_tf_estimator_there_is_one_clear_error(monkeypatch):
    if has_tf_estimator():
        monkeypatch.setattr(tf.estimator, "Estimator", None)
    with pytest.raises(RuntimeError, match="replicate_model_fn is for tf.estimator, which TensorFlow .* does not have"):
        towers.replicate_model_fn(lambda features, mode: None)


def test_outside_of_towers_a_tower_optimizer_is_the_optimizer_itself():
    weights = tf.get_variable("weights", initializer=np.ones(2))
    for optimizer in (Momentum(0.1, 0.5), lambda: Momentum(0.1, 0.5)):
        ours = towers.TowerOptimizer(optimizer)
        train_op = ours.minimize(tf.reduce_sum(weights * [2.0, 3.0]))
        assert ours.get_name() == "Momentum" and ours.get_slot_names() == ["momentum"]
        assert ours.get_slot(weights, "momentum") is ours.variables()[0]
        with session() as made:
            for _ in range(2):
                made.run(train_op)
            np.testing.assert_allclose(made.run(weights), 1 - 0.1 * 2.5 * np.array([2, 3.0]), rtol=1e-6)
        grads = ours.compute_gradients(tf.reduce_sum(weights))
        assert ours.apply_gradients(grads) is not None


def test_tower_optimizer_in_towers_that_nobody_built_for_it_is_refused():
    def model_fn(x):
        loss = tf.reduce_mean(x * tf.get_variable("w", [], tf.float64, tf.ones_initializer()))
        towers.TowerOptimizer(SGD(0.1)).minimize(loss)
        return loss

    with pytest.raises(RuntimeError, match="hand the optimizer to towers.minimize"):
        towers.TowerBuilder(cpus(2)).build(model_fn, (np.ones(4),))


@pytest.mark.parametrize("wrapped", [3, None, "sgd"])
def test_tower_optimizer_wraps_optimizers_alone(wrapped):
    with pytest.raises(TypeError, match="TowerOptimizer wraps a tf.train.Optimizer"):
        towers.TowerOptimizer(wrapped)


@pytest.mark.parametrize("resource", [False, True])
def test_forms_of_gradients_are_those_that_tf_gradients_returns(resource):
    with tf.variable_scope("", use_resource=resource):
        table, both, dense, unused, stopped, columns, looped = [tf.get_variable(name, [4, 3]) for name in (
            "table", "both", "dense", "unused", "stopped", "columns", "looped")]
    ids = tf.constant([0, 2, 2])
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids)) + tf.reduce_sum(tf.gather(both, ids)) + tf.reduce_sum(both ** 2)
    loss += tf.reduce_sum(tf.sin(dense)) + tf.reduce_sum(tf.stop_gradient(stopped))
    loss += tf.reduce_sum(tf.gather(columns, ids, axis=1))
    loss += tf.cast(tf.cast(tf.reduce_sum(stopped), tf.int32), tf.float32)
    looped_sum = tf.while_loop(lambda i, total: i < 2, lambda i, total: [i + 1, total + tf.reduce_sum(looped)], [0, 0.0])[1]
    loss += looped_sum
    variables = [table, both, dense, unused, stopped, columns, looped]
    expected = ["None" if g is None else "tf.IndexedSlices" if isinstance(g, tf.IndexedSlices) else "a tensor"
                for g in tf.gradients(loss, variables)]
    assert gradient_forms(loss, variables) == expected
    assert set(expected) == {"None", "tf.IndexedSlices", "a tensor"}
