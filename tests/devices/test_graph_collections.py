"""What a tower sees of the graph's collections while it is built, and what they hold afterwards."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, has_tf_layers, run
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(0).randn(7, 3)
KEYS = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES, tf.GraphKeys.MODEL_VARIABLES,
        tf.GraphKeys.MOVING_AVERAGE_VARIABLES, tf.GraphKeys.LOCAL_VARIABLES]


@pytest.fixture(params=["ref", "resource"])
def resource(request):
    """Runs a test with variables of both kinds."""
    return request.param == "resource"


def names(key):
    return [variable.op.name for variable in tf.get_collection(key)]


def test_every_tower_sees_the_variables_it_has_asked_for_so_far(resource):
    tf.get_variable("before", [], use_resource=resource)
    seen = []

    def model(x):
        for name, collections in [("a", None), ("b", KEYS[:1] + KEYS[2:4]), ("c", KEYS[4:])]:
            tf.get_variable(name, [3], tf.float64, collections=collections, use_resource=resource)
            seen.append([names(key) for key in KEYS])
        tf.Variable(np.ones(3), name="d", use_resource=resource)
        seen.append([names(key) for key in KEYS])
        return tf.reduce_mean(x)

    build(model, (X,), 3)
    assert seen[:4] == seen[4:8] == seen[8:]
    assert seen[3][0] == ["before", "a", "b", "d"] and seen[0][0] == ["before", "a"]
    assert [names(key) for key in KEYS] == seen[3]


def decayed(resource, decay):
    def model(x, labels):
        with tf.variable_scope("net", dtype=tf.float64, use_resource=resource):
            w = tf.get_variable("w", [3, 4], initializer=tf.glorot_uniform_initializer(seed=0))
            penalty = decay()
            head = tf.get_variable("head", [4, 1], initializer=tf.glorot_uniform_initializer(seed=1))
        return tf.reduce_mean(tf.square(tf.matmul(tf.tanh(tf.matmul(x, w)), head)[:, 0] - labels)) + penalty
    return model


@pytest.mark.parametrize("decay,sizes,resource", covering([
    lambda: 0.1 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()]),
    lambda: 0.1 * tf.add_n([tf.nn.l2_loss(v) for v in tf.global_variables("net")]),
    lambda: 0.1 * len(tf.trainable_variables()) * tf.nn.l2_loss(tf.trainable_variables()[-1])],
    [[4, 3], [1, 4, 2]], [False, True]))
def test_weight_decay_of_the_variables_so_far_trains_as_one_batch(decay, sizes, resource):
    assert_equals_one_batch(decayed(resource, decay), (X, X[:, 0]), len(sizes), sizes)


def test_regularization_losses_of_the_variables_so_far_train_as_one_batch(resource):
    def model(x):
        with tf.variable_scope("net", dtype=tf.float64, use_resource=resource, regularizer=tf.nn.l2_loss):
            w = tf.get_variable("w", [3, 4], initializer=tf.glorot_uniform_initializer(seed=0))
            penalty = tf.losses.get_regularization_loss()
            head = tf.get_variable("head", [4, 1], initializer=tf.glorot_uniform_initializer(seed=1))
        return tf.reduce_mean(tf.square(tf.matmul(tf.tanh(tf.matmul(x, w)), head))) + penalty

    assert_equals_one_batch(model, (X,), 2, [1, 6])


def test_regularization_losses_of_tf_layers_train_as_one_batch_and_are_kept_once():
    if not has_tf_layers():
        pytest.skip("this TensorFlow has no tf.layers")

    def model(x):
        regularized = {"kernel_regularizer": tf.nn.l2_loss, "kernel_initializer": tf.glorot_uniform_initializer(seed=0)}
        x = tf.tanh(tf.layers.dense(x, 4, **regularized))
        penalty = tf.losses.get_regularization_loss()
        return tf.reduce_mean(tf.square(tf.layers.dense(x, 1, **regularized))) + tf.cast(penalty, tf.float64)

    assert_equals_one_batch(model, (X,), 2)
    build(model, (X,), 3)
    assert len(tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)) == 2


def test_a_collection_of_the_models_own_holds_a_towers_own_items_and_all_of_them_afterwards():
    def model(x):
        for _ in range(2):
            tf.add_to_collection("my_losses", tf.reduce_mean(x ** 2))
        return tf.add_n(tf.get_collection("my_losses"))

    replicas = build(model, (X,), 3)
    assert run(replicas.loss) == pytest.approx(2 * (X ** 2).mean())
    assert len(tf.get_collection("my_losses")) == 6
    again = build(model, (X,), 2)  # nor does a later build see them
    assert run(again.loss) == pytest.approx(2 * (X ** 2).mean())


def scoped(find):
    def model(x):
        for scope in ("policy", "value"):
            with tf.variable_scope(scope, dtype=tf.float64, regularizer=tf.nn.l2_loss):
                y = tf.tanh(x * tf.get_variable("w", [3], initializer=tf.ones_initializer()))
                tf.losses.add_loss(tf.reduce_mean(y ** 2))
                tf.add_to_collection("mine", tf.reduce_mean(y, name="mean"))
        return tf.reduce_mean(tf.square(y - x)) + tf.add_n(find())
    return model


@pytest.mark.parametrize("find,count", [
    (lambda: tf.get_collection("mine", "policy"), 1),
    (lambda: tf.get_collection("mine", "policy/"), 1),
    (lambda: tf.get_collection("mine", ".*mean"), 2),
    (lambda: tf.get_collection("mine", "(?!policy)"), 1),
    (lambda: tf.get_default_graph().get_collection("mine", scope="value"), 1),
    (lambda: tf.get_collection("mine", tf.get_default_graph().get_name_scope()), 2),
    (lambda: tf.losses.get_losses("policy"), 1),
    (lambda: [tf.losses.get_total_loss(scope="policy")], 1),
    (lambda: tf.losses.get_regularization_losses("policy"), 1),
    (lambda: [tf.nn.l2_loss(v) for v in tf.trainable_variables("policy")], 1)])
def test_what_is_asked_for_by_scope_is_found_as_in_one_tower(find, count):
    found = []

    def counted():
        found.append(find())
        return found[-1]

    assert_equals_one_batch(scoped(counted), (X,), 2, [1, 6], steps=1)
    assert {len(items) for items in found} == {count}


@pytest.mark.parametrize("is_there", [False, True])
def test_an_average_is_called_what_it_is_called_without_towers(is_there):
    """As tf.train.Saver(average.variables_to_restore()) of an evaluation asks for it."""
    def model(x):
        with tf.variable_scope("net"):
            w, average = tf.get_variable("w", [3], tf.float64), tf.train.ExponentialMovingAverage(0.9)
        updates = [average.apply([w])] if is_there else []
        with tf.name_scope("inner"):
            inside = average.average_name(w)
        named.append([inside, average.average_name(w), sorted(average.variables_to_restore([w]))])
        with tf.control_dependencies(updates):
            return tf.reduce_mean(x * w)

    named = []
    with tf.Graph().as_default():
        model(tf.constant(X))
    build(model, (X,), 3)
    assert named[1:] == [named[0]] * 3
    assert tf.get_default_graph().unique_name("mine", mark_as_used=False) == "mine"


def test_no_scope_finds_what_has_no_name_or_is_of_another():
    def model(x):
        tf.add_to_collection("mine", "policy")
        tf.add_to_collection("mine", tf.reduce_mean(x, name="policies"))
        assert not tf.get_collection("mine", "policy$") and not tf.get_collection("mine", "tower_0/policy")
        assert not tf.get_collection("nobody's", "policy") and len(tf.get_collection("mine", "poli")) == 1
        return tf.reduce_mean(x)

    with tf.name_scope("poli"):  # which a model without towers would have in its names too
        build(model, (X,), 2)


def test_afterwards_a_scope_is_asked_for_by_the_names_that_are():
    before = tf.get_default_graph().get_collection
    for fails in (False, True):
        def model(x):
            tf.add_to_collection("mine", tf.reduce_mean(x, name="policy"))
            if fails:
                raise KeyError("the model's own")
            return tf.reduce_mean(x)

        try:
            build(model, (X,), 2)
        except KeyError:
            pass
        assert len(tf.get_collection("mine", "tower_1/policy")) == 1 and not tf.get_collection("mine", "policy")
        assert tf.get_default_graph().get_collection == before


def test_a_saver_made_by_the_model_saves_the_variables_so_far_in_every_tower():
    saved = []

    def model(x):
        w = tf.get_variable("w", [3], tf.float64)
        saved.append(sorted(v.op.name for v in tf.train.Saver()._var_list or tf.global_variables()))
        head = tf.get_variable("head", [3], tf.float64)
        return tf.reduce_mean(x * w * head)

    build(model, (X,), 2)
    assert saved == [["w"], ["w"]]


def test_the_parts_of_a_partitioned_variable_are_seen_as_in_one_tower():
    seen = []

    def model(x):
        with tf.variable_scope("net", partitioner=tf.fixed_size_partitioner(2)):
            w = tf.get_variable("w", [4, 3], tf.float64)
        seen.append(names(tf.GraphKeys.TRAINABLE_VARIABLES))
        return tf.reduce_mean(tf.matmul(x, tf.convert_to_tensor(w), transpose_b=True))

    build(model, (X,), 2)
    assert seen[0] == seen[1] == ["net/w/part_0", "net/w/part_1"]


def test_global_step_of_tower_0_is_seen_by_all_and_kept_once():
    steps = []

    def model(x):
        steps.append(tf.train.get_or_create_global_step())
        return tf.reduce_mean(x) + tf.cast(steps[-1], tf.float64)

    build(model, (X,), 3)
    assert steps[0] is steps[1] is steps[2] and len(tf.get_collection(tf.GraphKeys.GLOBAL_STEP)) == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_a_model_function_that_raises_leaves_the_collections_as_they_were(failing):
    tf.add_to_collection(tf.GraphKeys.LOSSES, tf.constant(1.0))
    tf.add_to_collection("mine", "before")

    def model(x):
        w = tf.get_variable("w", [3], tf.float64)
        tf.losses.add_loss(tf.reduce_mean(x))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.no_op())
        tf.add_to_collection("mine", "during")
        tf.summary.scalar("mean", tf.reduce_mean(x))
        if towers.current_tower().index == failing:
            raise KeyError("the model's own")
        return tf.reduce_mean(x * w)

    with pytest.raises(KeyError, match="the model's own"):
        build(model, (X,), 3)
    assert len(tf.get_collection(tf.GraphKeys.LOSSES)) == 1 and tf.get_collection("mine") == ["before"]
    assert not tf.get_collection(tf.GraphKeys.UPDATE_OPS) and not tf.get_collection(tf.GraphKeys.SUMMARIES)
    assert names(tf.GraphKeys.TRAINABLE_VARIABLES) == ["w"]  # made, and so to be initialized


@pytest.mark.parametrize("times,resource", covering([1, 2], [False, True]))
def test_what_a_model_puts_into_a_collection_of_its_own_is_there_as_often_as_in_one_tower(times, resource):
    def model(x):
        for name in ("a", "b"):
            w = tf.get_variable(name, [3], tf.float64, tf.ones_initializer(), use_resource=resource)
            assert w not in tf.get_collection("decayed") or not towers.current_tower().is_first
            for _ in range(times):
                tf.add_to_collection("decayed", w)
            x = tf.sin(x * w)
        assert [w.op.name for w in tf.get_collection("decayed")] == ["a"] * times + ["b"] * times
        return tf.reduce_mean(tf.square(x)) + tf.add_n([tf.nn.l2_loss(w) for w in tf.get_collection("decayed")])

    assert_equals_one_batch(model, (X,), 2)
    build(model, (X,), 3)
    assert {w.op.name for w in tf.get_collection("decayed")} == {"a", "b"}


def test_variables_that_a_model_looks_for_in_a_collection_of_its_own_are_made_once():
    """As columns that share an embedding do."""
    def model(x):
        for part in tf.unstack(x, axis=1):
            found = tf.get_collection("shared")
            assert len(found) <= 1
            if not found:
                tf.add_to_collection("shared", tf.get_variable("w", [], tf.float64, tf.ones_initializer()))
            x = tf.sin(x * tf.get_collection("shared")[0]) + part[:, None]
        return tf.reduce_mean(x)

    assert_equals_one_batch(model, (X,), 2)


def test_what_fails_after_the_model_function_leaves_the_collections_as_they_were():
    def model(x):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.no_op())
        return {"loss": tf.reduce_mean(x)} if towers.current_tower().is_first else tf.reduce_mean(x)

    with pytest.raises(towers.TowerMismatchError):
        build(model, (X,), 2)
    assert not tf.get_collection(tf.GraphKeys.UPDATE_OPS)


def test_a_graph_is_imported_into_a_tower_with_what_its_collections_name():
    """As a module of TensorFlow Hub does where it is called, of which another made the variables."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float64, [None, 3], name="x")
        tf.multiply(x, tf.placeholder(tf.float64, [3], name="w"), name="y")
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, tf.nn.l2_loss(tf.tanh(x), name="penalty"))
        module = tf.train.export_meta_graph()
    penalties = []

    def model(x):
        w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())
        tf.train.import_meta_graph(module, input_map={"x:0": x, "w:0": tf.identity(w)}, import_scope="applied")
        penalty, = tf.losses.get_regularization_losses()
        penalties.append(penalty.op.name)
        outputs = tf.get_default_graph().get_tensor_by_name(penalty.op.name.replace("penalty", "y:0"))
        return tf.reduce_mean(tf.square(outputs - 1)) + penalty / tf.cast(tf.shape(x)[0], x.dtype)

    assert_equals_one_batch(model, (X,), 2)
    assert {"tower_0/applied/penalty", "tower_1/applied/penalty"} <= set(penalties)
