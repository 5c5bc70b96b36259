"""Evaluation, export and summaries: each example counts once, and a served model needs nothing of ours."""
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, has_tf_layers, session
from tests.sweeps import covering

NUM = 1003
RNG = np.random.RandomState(0)
X = RNG.randn(NUM, 3)
LABELS = RNG.randint(0, 4, NUM)
PREDICTIONS = np.where(RNG.rand(NUM) < 0.7, LABELS, RNG.randint(0, 4, NUM))


def data():
    return tf.data.Dataset.from_tensor_slices((X, LABELS, PREDICTIONS)).batch(64)  # the last one of 43


def run_to_the_end(made, fetches):
    """Runs fetches until the data end; returns how often."""
    steps = 0
    try:
        while True:
            made.run(fetches)
            steps += 1
    except tf.errors.OutOfRangeError:
        return steps


@pytest.mark.parametrize("num_towers", [3, pytest.param(2, marks=pytest.mark.sweep), pytest.param(5, marks=pytest.mark.sweep)])
def test_metrics_of_merged_outputs_count_each_example_once(num_towers):
    merged = build(lambda x, labels, predictions: {"x": x, "labels": labels, "predictions": predictions}, data(), num_towers,
                   training=False).merged()
    accuracy, update_accuracy = tf.metrics.accuracy(merged["labels"], merged["predictions"])
    mean, update_mean = tf.metrics.mean(merged["x"])
    counts = [v for v in tf.local_variables() if v.op.name.endswith("/count")]
    with session() as made:
        assert run_to_the_end(made, [update_accuracy, update_mean]) == 16
        assert made.run(accuracy) == np.float32((LABELS == PREDICTIONS).sum()) / np.float32(NUM)
        assert made.run(mean) == pytest.approx(X.mean(), rel=1e-5)
        assert made.run(counts) == [NUM, 3 * NUM]


def confusion(labels, predictions):
    matrix = np.zeros([4, 4])
    np.add.at(matrix, (labels, predictions), 1)
    return matrix


def mean_iou():
    matrix = confusion(LABELS, PREDICTIONS)
    hits = np.diag(matrix)
    return (hits / (matrix.sum(0) + matrix.sum(1) - hits)).mean()


METRICS = {  # of the model function's arguments, and by NumPy
    "accuracy": (lambda x, y, p: tf.metrics.accuracy(y, p), lambda: (LABELS == PREDICTIONS).mean()),
    "mean": (lambda x, y, p: tf.metrics.mean(x), X.mean),
    "rmse": (lambda x, y, p: tf.metrics.root_mean_squared_error(x, tf.zeros_like(x)), lambda: np.sqrt((X ** 2).mean())),
    "mean_iou": (lambda x, y, p: tf.metrics.mean_iou(y, p, 4), mean_iou),
    "per_class": (lambda x, y, p: tf.metrics.mean_per_class_accuracy(y, p, 4), lambda: np.mean(
        [(PREDICTIONS[LABELS == i] == i).mean() for i in range(4)])),
    "misses": (lambda x, y, p: tf.metrics.false_negatives(y > 1, p > 1), lambda: ((LABELS > 1) & (PREDICTIONS <= 1)).sum()),
    "recall_at_k": (lambda x, y, p: tf.metrics.recall_at_k(y[:, None] % 3, tf.cast(x, tf.float32), 2),
                    lambda: np.mean((X > X[np.arange(NUM), LABELS % 3][:, None]).sum(1) < 2)),
    "precision": (lambda x, y, p: tf.metrics.precision(y > 1, p > 1), lambda: (LABELS[PREDICTIONS > 1] > 1).mean()),
}


@pytest.fixture(params=["ref", "resource"])
def resource(request):
    return request.param == "resource"


def in_model(name, resource, **kwargs):
    def model(x, labels, predictions):
        with tf.variable_scope("metrics", use_resource=resource):
            value, update = METRICS[name][0](x, labels, predictions)
        tf.add_to_collection("updates", update)
        return {"value": value, "update": update}
    return model


@pytest.mark.parametrize("name,run,resource", covering(
    sorted(METRICS), ["tower 0's", "the last tower's", "all towers'", "merged", "collected"], [False, True]))
def test_metrics_inside_of_the_model_count_each_example_once_whatever_runs_them(name, run, resource):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        replicas = build(in_model(name, resource), data(), 3, training=False)
    updates = [tower.outputs["update"] for tower in replicas]
    fetches = {"tower 0's": updates[0], "the last tower's": updates[-1], "all towers'": updates,
               "merged": replicas.merged()["update"], "collected": tf.get_collection("updates")}[run]
    with session() as made:
        assert run_to_the_end(made, fetches) == 16
        for tower in replicas:
            assert made.run(tower.outputs["value"]) == pytest.approx(METRICS[name][1](), rel=1e-5)


@pytest.mark.parametrize("name,policy,resource", covering(
    ["accuracy", "misses", "mean_iou"], ["first", "last", "all"], [False, True]))
def test_metrics_among_the_update_ops_count_each_example_once_under_every_policy(name, policy, resource):
    def model(x, labels, predictions):
        with tf.variable_scope("metrics", use_resource=resource):
            value, update = METRICS[name][0](x, labels, predictions)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        tf.add_to_collection("values", value)
        return tf.reduce_mean(x * tf.get_variable("w", [3], tf.float64))

    replicas = build(model, data(), 3)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops=policy)
    with session() as made:
        assert run_to_the_end(made, train_op) == 16
        assert made.run(tf.get_collection("values")[0]) == pytest.approx(METRICS[name][1](), rel=1e-5)


def test_update_of_a_metric_gives_what_all_towers_came_to(resource):
    for name in ("accuracy", "misses"):
        with tf.Graph().as_default():
            replicas = build(in_model(name, resource), (X, LABELS, PREDICTIONS), 3, training=False)
            with session() as made:
                got = made.run([tower.outputs["update"] for tower in replicas])
            np.testing.assert_allclose(got, METRICS[name][1](), rtol=1e-5)


def test_variables_of_metrics_have_no_tower_in_their_names():
    with tf.Graph().as_default():
        METRICS["recall_at_k"][0](tf.constant(X), tf.constant(LABELS), None)
        expected = [variable.op.name for variable in tf.local_variables()]
    build(METRICS["recall_at_k"][0], (X, LABELS, PREDICTIONS), 3)
    assert [variable.op.name for variable in tf.local_variables()] == expected
    build(METRICS["recall_at_k"][0], (X, LABELS, PREDICTIONS), 3)
    names = [variable.op.name for variable in tf.local_variables()]
    assert len(set(names)) == 4 and not [name for name in names if "tower" in name]


def classifier(x):
    """A model with synced layers, and ops of several kinds."""
    with tf.variable_scope("net", dtype=tf.float32):
        y = tf.nn.conv2d(x, tf.get_variable("kernel", [3, 3, 2, 4], initializer=tf.glorot_uniform_initializer(seed=0)),
                         [1, 1, 1, 1], "SAME")
        y = tf.nn.relu(tf_syncbn.sync_batch_norm(y, momentum=0.5, name="bn"))
        y = tf.reduce_mean(y, [1, 2])
        y = tf_syncbn.sync_batch_norm(y, momentum=0.5, name="bn2")
        logits = tf.matmul(y, tf.get_variable("head", [4, 3], initializer=tf.glorot_uniform_initializer(seed=1)))
    return {"loss": tf.reduce_mean(tf.square(logits - 1)), "logits": logits}


def converted(x):
    y = tf.layers.conv2d(x, 4, 3, padding="same", name="conv")
    y = tf.layers.batch_normalization(y, training=towers.current_tower().training, momentum=0.5, name="bn")
    logits = tf.layers.dense(tf.reduce_mean(tf.nn.relu(y), [1, 2]), 3, name="head")
    return {"loss": tf.reduce_mean(tf.square(logits - 1)), "logits": logits}


SERVE = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
with tf.Session(graph=tf.Graph()) as session:
    meta = tf.saved_model.load(session, [tf.saved_model.tag_constants.SERVING], sys.argv[1])
    signature = meta.signature_def["serving_default"]
    logits = session.run(signature.outputs["logits"].name, {signature.inputs["x"].name: np.load(sys.argv[2])})
np.save(sys.argv[3], logits)
assert not [name for name in sys.modules if name.split(".")[0] in ("towers", "tf_syncbn")]
"""


@pytest.mark.laws
@pytest.mark.parametrize("kind", ["synced", pytest.param("converted", marks=pytest.mark.sweep)])
def test_saved_model_is_served_without_our_packages_as_towers_evaluate(kind, tmp_path):
    if kind == "converted" and not has_tf_layers():
        pytest.skip("this TensorFlow has no tf.layers")
    model = classifier if kind == "synced" else tf_syncbn.convert_model(converted)
    x, path = (RNG.randn(7, 6, 6, 2) * 2 + 1).astype(np.float32), str(tmp_path / "model")
    replicas = build(model, (x,), 3)
    train_op = towers.minimize(replicas, tf.train.AdamOptimizer(0.01))
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        evaluated = build(model, (x,), 3, training=False).merged()["logits"]
    with session() as made:
        for _ in range(5):
            made.run(train_op)
        expected = made.run(evaluated)
        tf.train.Saver().save(made, path)
    with tf.Graph().as_default():
        fed = tf.placeholder(tf.float32, [None, 6, 6, 2], "x")
        logits = towers.TowerBuilder(["/cpu:0"]).build(model, (fed,), training=False)[0].outputs["logits"]
        with tf.Session() as made:
            tf.train.Saver().restore(made, path)
            tf.saved_model.simple_save(made, str(tmp_path / "export"), {"x": fed}, {"logits": logits})
    np.save(str(tmp_path / "x.npy"), x)
    done = subprocess.run([sys.executable, "-c", SERVE] + [str(tmp_path / name) for name in ("export", "x.npy", "logits.npy")],
                          cwd=str(tmp_path), env={"PATH": ""}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    np.testing.assert_allclose(np.load(str(tmp_path / "logits.npy")), expected, rtol=1e-5, atol=1e-6)


def summarized(x):
    tf.summary.scalar("average", tf.reduce_mean(x))
    with tf.name_scope("block"):
        tf.summary.histogram("values", x)
    return tf.reduce_mean(x * tf.get_variable("w", [3], tf.float64, tf.ones_initializer()))


def tags_and_scalars(serialized):
    values = tf.Summary.FromString(serialized).value
    return [value.tag for value in values], [value.simple_value for value in values if value.HasField("simple_value")]


def test_summaries_of_a_build_are_its_own_tower_0s_under_tags_without_a_tower():
    trained = build(summarized, (X[:10],), 3)
    with tf.name_scope("evaluation"), tf.variable_scope(tf.get_variable_scope(), reuse=True):
        evaluated = build(summarized, (X[10:20],), 2, training=False)
    with session() as made:
        of_both = [tags_and_scalars(made.run(tf.summary.merge(towers_of.summaries))) for towers_of in (trained, evaluated)]
    assert [tags for tags, _ in of_both] == [["average", "block/values"], ["evaluation/average", "evaluation/block/values"]]
    np.testing.assert_allclose(of_both[0][1] + of_both[1][1], [X[:4].mean(), X[10:15].mean()], rtol=1e-6)
    assert len(tf.get_collection(tf.GraphKeys.SUMMARIES)) == 4


def test_builds_without_summaries_have_none():
    tf.summary.scalar("outside", 1.0)
    assert build(lambda x: tf.reduce_mean(x), (X,), 2).summaries == []


def test_a_hook_saves_the_summaries_of_one_build(tmp_path):
    trained = build(summarized, (X[:10],), 2)
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        build(summarized, (X[10:20],), 2, training=False)
    train_op = towers.minimize(trained, tf.train.GradientDescentOptimizer(0.1), global_step=tf.train.get_or_create_global_step())
    hook = tf.train.SummarySaverHook(save_steps=1, output_dir=str(tmp_path), summary_op=tf.summary.merge(trained.summaries))
    creator = tf.train.ChiefSessionCreator(config=towers.session_config(cpus(2)))
    with tf.train.MonitoredSession(creator, [hook]) as made:
        for _ in range(3):
            made.run(train_op)
    events = [event for path in tmp_path.glob("events*") for event in tf.train.summary_iterator(str(path))]
    steps = {event.step: [value.tag for value in event.summary.value] for event in events if event.summary.value}
    assert sorted(steps) == [1, 2, 3] and set(map(tuple, steps.values())) == {("average", "block/values")}


@pytest.mark.parametrize("num_towers,resource", covering([2, 3], [False, True]))
def test_towers_of_one_known_size_add_the_same_count_once_each(num_towers, resource):
    def model(x):
        with tf.variable_scope("metrics", use_resource=resource):
            value, update = tf.metrics.mean(x, updates_collections=["updates"])
        return {"value": value, "update": update}

    x = np.arange(6, dtype=np.float32)
    replicas = build(model, (x,), num_towers)
    with session() as made:
        assert made.run(replicas.merged()["update"]) == x.mean()
        assert sorted(made.run(tf.get_collection(tf.GraphKeys.METRIC_VARIABLES))) == [6, x.sum()]
        made.run(tf.get_collection("updates"))
        assert sorted(made.run(tf.get_collection(tf.GraphKeys.METRIC_VARIABLES))) == [12, 2 * x.sum()]


@pytest.mark.parametrize("size", [6, None])
def test_a_metric_that_counts_batches_counts_each_once(size):
    def model(x):
        count = tf.get_variable("batches", [], tf.float64, tf.zeros_initializer(), trainable=False, collections=[
            tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES])
        return {"x": x, "update": tf.assign_add(count, 1)}

    replicas = build(model, (tf.placeholder_with_default(np.arange(6.0), [size]),), 3)
    with session() as made:
        for _ in range(2):
            made.run([tower.outputs["update"] for tower in replicas])
        assert made.run(tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)) == [2.0]


@pytest.mark.parametrize("size", [6, None])
def test_a_mean_of_towers_means_is_divided_by_their_number(size):
    def model(x):
        value, update = tf.metrics.mean(tf.reduce_mean(x))
        return {"value": value, "update": update}

    replicas = build(model, (tf.placeholder_with_default(np.arange(6, dtype=np.float32), [size]),), 3)
    with session() as made:
        assert made.run(replicas[0].outputs["update"]) == 2.5
