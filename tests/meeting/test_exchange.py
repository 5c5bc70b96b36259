"""Where towers meet: exchanges, sums and joins over towers, their gradients, and what differs between towers."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.conftest import BEHAVIOUR
from tests.support import build, run, session

X = np.random.RandomState(0).randn(6, 3)


def test_every_tower_gets_the_aggregate_of_all_contributions():
    def model(x):
        def aggregate(parts):
            return [[tf.reduce_max([part for part, in parts], 0)]] * len(parts)
        return towers.exchange([tf.reduce_max(x, 0)], aggregate, [(tf.float64, [3])], kind="max")[0]

    for outputs in run([tower.outputs for tower in build(model, (X,), 3)]):
        np.testing.assert_array_equal(outputs, X.max(0))


@pytest.mark.parametrize("dtype, values", [
    ("float16", [-0.0, np.nan, np.inf, 6e-8]), ("bfloat16", [-0.0, np.nan, np.inf, 1e-40]),
    ("float32", [-0.0, np.nan, np.inf, 1e-45]), ("float64", [-0.0, np.nan, np.inf, 5e-324]),
    ("complex64", [1j, 2, 3, 4]), ("int32", [-1, 2, 3, 4]), ("int64", [-1, 2, 3, 4]), ("bool", [True, False, True, True])])
def test_what_towers_get_is_bit_for_bit_the_aggregate(dtype, values):
    values = np.array(values, tf.as_dtype(dtype).as_numpy_dtype)

    def model(_):
        return towers.exchange([tf.constant(values)], lambda parts: [parts[0]] * len(parts), [(dtype, [4])])[0]

    for outputs in run([tower.outputs for tower in build(model, (X,), 2)]):
        assert outputs.dtype == values.dtype and outputs.tobytes() == values.tobytes()


def test_aggregate_of_another_dtype_than_its_result_is_refused():
    def model(x):
        return towers.exchange([x], lambda parts: [[tf.cast(parts[0][0], tf.float32)]] * 2, [(tf.float64, [3, 3])], name="top")[0]

    with pytest.raises(TypeError, match="aggregate of 'top' returned 'cross_tower/top/.* of float32 where .* to be of float64"):
        build(model, (X,), 2)


def test_gradient_of_one_tower_looks_for_variables_in_its_own_ops_alone():
    """`tf.gradients` walks back from the loss as far as floating point numbers come from the variables."""
    def model(x):
        w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())
        x = tf_syncbn.sync_batch_norm(x * w, name="bn")
        return tf.reduce_mean(towers.all_gather(towers.all_reduce(x)) ** 3)

    replicas = build(model, (X,), 3)
    towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
    for tower in replicas:
        elsewhere = tuple({"cross_tower/", *(other.name_scope for other in replicas)} - {tower.name_scope})
        reached, ops = set(), [tower.loss.op]
        while ops:
            op = ops.pop()
            if op not in reached:
                reached.add(op)
                ops.extend(tensor.op for tensor in op.inputs if tensor.dtype.is_floating)
        assert len(reached) > 10 and not [op.name for op in reached if op.name.startswith(elsewhere)]


def test_exchange_outside_of_towers_is_the_aggregate_of_one():
    y, = towers.exchange([tf.constant(3.0)], lambda parts: [[2 * parts[0][0]]], [(tf.float32, [])])
    assert run(y) == 6.0


def test_no_gradient_passes_a_bare_exchange():
    x = tf.constant(X)

    def model(part):
        y, = towers.exchange([part], lambda parts: [parts[0]] * len(parts), [(tf.float64, [3, 3])])
        return y

    replicas = build(model, (x,), 2)
    assert tf.gradients(replicas[1].outputs, x)[0] is None


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_all_reduce_equals_numpy(reduction):
    replicas = build(lambda x: towers.all_reduce(x, reduction), (X,), 3)
    expected = X.reshape(3, 2, 3).sum(0) / (3 if reduction == "mean" else 1)
    for outputs in run([tower.outputs for tower in replicas]):
        np.testing.assert_allclose(outputs, expected, rtol=1e-14)


@pytest.mark.parametrize("reduction,dtype", [("max", tf.float64), ("min", tf.float64), ("max", tf.int32)])
def test_all_reduce_takes_the_largest_and_the_smallest(reduction, dtype):
    values = np.array([[1, -2, 5, np.inf], [4, -2, 5, 0], [3, -1, 5, -1]])
    values[0, 3] = np.inf if dtype.is_floating else 7
    replicas = build(lambda x: towers.all_reduce(x[0], reduction), (tf.constant(values, dtype),), 3)
    for outputs in run([tower.outputs for tower in replicas]):
        np.testing.assert_array_equal(outputs, getattr(values, reduction)(0))


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_gradients_of_an_extreme_to_second_order_are_those_of_one_batch_ties_too(reduction):
    values = np.array([[1., -2, 5], [4, -2, 5], [3, -1, 5]])
    weights = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())

    def energy(y, extreme):
        return tf.reduce_sum(tf.sin(y) * extreme ** 2)

    def model(x):
        y = x * weights
        return energy(y, towers.all_reduce(y[0], reduction))

    ours = sum(tower.loss for tower in build(model, (values,), 3))
    y = values * weights
    expected, results = energy(y, getattr(tf, "reduce_" + reduction)(y, 0)), []
    for _ in range(2):
        ours, expected = (tf.reduce_sum(tf.gradients(value, weights)[0] ** 2) for value in (ours, expected))
        results.append((ours, expected))
    for ours, expected in run(results):
        np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_all_reduce_of_integers_sums():
    replicas = build(lambda x: towers.all_reduce(tf.reduce_sum(x)), (tf.range(5),), 2)
    assert run(replicas[1].outputs) == 10


def test_all_gather_joins_uneven_towers_in_order():
    for outputs in run([tower.outputs for tower in build(towers.all_gather, (X[:5],), 3)]):
        np.testing.assert_array_equal(outputs, X[:5])


@pytest.mark.laws
def test_gradients_of_all_gather_and_all_reduce_to_third_order_equal_one_batch():
    weights = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())

    def energy(x, everything, total):
        return tf.reduce_sum(tf.sin(tf.matmul(x, everything, transpose_b=True))) + tf.reduce_sum(x ** 3 * total)

    def model(x):
        y = x * weights
        return energy(y, towers.all_gather(tf.tanh(y)), towers.all_reduce(tf.reduce_sum(y ** 2, 0)))

    replicas = build(model, (X[:5],), 3)
    y = X[:5] * weights
    ours, expected = replicas[0].loss + replicas[1].loss + replicas[2].loss, energy(y, tf.tanh(y), tf.reduce_sum(y ** 2, 0))
    results = []
    for _ in range(3):
        ours, expected = (tf.reduce_sum(tf.gradients(value, weights)[0] ** 2) for value in (ours, expected))
        results.append((ours, expected))
    for ours, expected in run(results):
        np.testing.assert_allclose(ours, expected, rtol=1e-10)


def test_all_reduce_and_all_gather_outside_of_towers_give_their_argument():
    x = tf.constant(X)
    assert towers.all_reduce(x) is x and towers.all_gather(x) is x


@pytest.mark.parametrize("call,error,message", [
    (lambda: towers.all_reduce(X, "product"), ValueError, "knows the reductions 'sum', 'mean', 'max', 'min', not 'product'"),
    (lambda: towers.all_reduce([1, 2], "mean"), TypeError, "takes no mean of int32"),
    (lambda: towers.all_reduce([True]), TypeError, "takes no sum of bool"),
    (lambda: towers.all_gather(1.0), ValueError, "rank of 1 or more"),
])
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def index():
    return towers.current_tower().index


def named(name, x):
    with tf.name_scope(name):
        return towers.all_reduce(tf.reduce_sum(x, 0))


@pytest.mark.parametrize("model,message", [
    (lambda x: named("a", x) if index() == 0 else x, "Tower 1 has 0 exchanges and tower 0 has 1.*'a/all_reduce' of float64"),
    (lambda x: named("a", x) if index() == 1 else x, "Tower 1 has an exchange that tower 0 has not: .*'a/all_reduce'"),
    (lambda x: named("a" if index() == 0 else "b", x),
     "exchange 0: tower 0 has .*'a/all_reduce'.* tower 1 has .*'b/all_reduce'"),
    (lambda x: [named(n, x) for n in ("ab" if index() == 0 else "ba")], "exchange 0: tower 0 has .*'a/all_reduce'"),
    (lambda x: [named(n, x) for n in (["l_1", "l_2"] if index() == 0 else ["l_2", "l_1"])], "exchange 0"),
    (lambda x: towers.all_reduce(x if index() == 0 else tf.cast(x, tf.float32)), "float64.*float32"),
    (lambda x: towers.all_reduce(tf.reduce_sum(x, 0)[:2 + index()]), r"\(2,\).*\(3,\)"),
    (lambda x: (towers.all_reduce if index() == 0 else towers.all_gather)(x), "all_reduce sum.*all_gather"),
])
def test_towers_that_differ_are_named_while_the_graph_is_built(model, message):
    with pytest.raises(towers.TowerMismatchError, match=message):
        build(model, (X,), 2)


def test_layers_numbered_through_the_graph_still_meet():
    def model(x):
        with tf.name_scope("dense" if index() == 0 else "dense_%d" % index()):
            return towers.all_reduce(tf.reduce_sum(x))

    assert run(build(model, (X,), 3)[0].outputs) == pytest.approx(X.sum())


def test_gradients_of_one_tower_only_fail_at_run_and_name_the_forward_layer():
    def model(x):
        with tf.name_scope("block1"):
            return tf.reduce_mean(tf_syncbn.sync_batch_norm(x, name="bn") ** 3)

    x = tf.constant(X)
    gradient = tf.gradients(build(model, (x,), 2)[0].loss, x)[0]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"tower_0/block1/bn/.*unmet_exchange"):
        run(gradient)


def test_gradient_taken_of_tower_0_for_a_summary_does_not_mix_into_training():
    def model(x):
        w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())
        return tf.reduce_mean(tf.sin(tf_syncbn.sync_batch_norm(x * w)) ** 3)

    replicas = build(model, (X,), 2)
    w = tf.trainable_variables()[0]
    stray = tf.gradients(7 * replicas[0].loss, w)[0]
    grads = towers.average_gradients(replicas, towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(1.0), [w]))
    with tf.variable_scope("", reuse=True):
        expected = tf.gradients(tf.reduce_mean(tf.sin(tf_syncbn.sync_batch_norm(X * w, training=True)) ** 3), w)[0]
    with session() as made:
        np.testing.assert_allclose(*made.run([grads[0][0], expected]), atol=1e-14)
        with pytest.raises(tf.errors.InvalidArgumentError, match="unmet_exchange"):
            made.run(stray)


def test_gradient_that_passes_an_exchange_in_one_tower_only_is_refused_at_build():
    def model(x):
        w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())
        total = towers.all_reduce(tf.reduce_sum(x * w, 0), name="total")
        return tf.reduce_mean(x * w * (total if index() == 0 else 1.0))

    replicas = build(model, (X,), 2, alike=False)
    with pytest.raises(towers.TowerMismatchError, match="through all_reduce sum 'total'.* in tower 0 and not in tower 1"):
        towers.minimize(replicas, tf.train.GradientDescentOptimizer(1.0))


def test_layer_that_no_output_needs_does_not_hang():
    def model(x):
        unused = tf_syncbn.sync_batch_norm(x, name="unused")
        del unused
        w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())
        return tf.reduce_mean(tf_syncbn.sync_batch_norm(x * w, name="used") ** 2)

    replicas = build(model, (X,), 2)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
    run(train_op)


def test_exchange_inside_cond_or_while_is_refused_by_name():
    def in_cond(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf_syncbn.sync_batch_norm(x, name="bn"), lambda: x)

    def in_while(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, towers.all_reduce(y, name="total")), [0, x])[1]

    for model, name in ((in_cond, "sync_batch_norm '.*bn/exchange'"), (in_while, "all_reduce sum '.*total'")):
        with tf.Graph().as_default(), pytest.raises(ValueError, match=name + " stands inside a tf.cond"):
            build(model, (X,), 2)


def test_towers_built_inside_a_while_loop_meet_there():
    weights = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())

    def model(x):
        return tf.reduce_mean(tf.sin(tf_syncbn.sync_batch_norm(x * weights, updates_collections=(), name="bn")) ** 3)

    def body(i, total):
        replicas = build(model, (tf.constant(X) * tf.cast(i + 1, tf.float64),), 2)
        grads = towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(1.0), [weights])
        return i + 1, total + towers.average_gradients(replicas, grads)[0][0]

    # The layer's variables are made outside of the loop, as TensorFlow demands.
    with tf.variable_scope(""):
        tf_syncbn.sync_batch_norm(tf.constant(X), training=False, name="bn")
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        looped = tf.while_loop(lambda i, _: i < 2, body, [tf.constant(0), tf.zeros([3], tf.float64)])[1]
        plain = [tf.gradients(tf.reduce_mean(tf.sin(tf_syncbn.sync_batch_norm(
            X * k * weights, training=True, updates_collections=(), name="bn")) ** 3), weights)[0] for k in (1.0, 2.0)]
    looped, plain = run([looped, tf.add_n(plain)])
    np.testing.assert_allclose(looped, plain, atol=1e-12)


def test_exported_graph_runs_and_refuses_gradients_by_name():
    x = tf.placeholder(tf.float64, [6, 3], name="x")
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, training=True, name="bn"), (x,), 2)
    merged = tf.identity(replicas.merged(), name="result")
    expected = run(merged, {x: X})
    exported = tf.train.export_meta_graph()
    with tf.Graph().as_default() as graph:
        tf.train.import_meta_graph(exported)
        np.testing.assert_allclose(run("result:0", {"x:0": X}), expected)
        with pytest.raises(ValueError, match="its graph was imported.*Build the towers anew"):
            tf.gradients(graph.get_tensor_by_name("result:0"), graph.get_tensor_by_name("x:0"))


def powers(x):
    w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())
    return tf.reduce_mean(tf.sin(towers.all_reduce(tf.reduce_sum(x * w + x ** 2, 0)) * w) ** 3)


def powers_with_hessian(x):
    loss = powers(x)
    with tf.variable_scope("", reuse=True):
        return {"loss": loss, "hessian": tf.hessians(loss, tf.get_variable("w", dtype=tf.float64))}


@pytest.mark.parametrize("build_and_take", [
    lambda: [tf.hessians(tower.loss, tf.trainable_variables()) for tower in build(powers, (X,))],
    lambda: build(powers_with_hessian, (X,))])
def test_hessians_of_one_tower_after_the_other_are_refused_with_the_cure(build_and_take):
    with pytest.raises(towers.TowerMismatchError, match="Towers meet at 'all_reduce/gradient/gradient', and tower 1's part lies "
                                                        "in another loop.*tf.hessians.*call it once, outside of the model"):
        build_and_take()


def test_hessians_of_the_global_loss_and_of_all_towers_losses_are_those_of_one_tower():
    results = []
    for num_towers in (1, 2):
        with tf.Graph().as_default():
            replicas = build(powers, (X,), num_towers)
            hessians = [tf.hessians(replicas.loss, tf.trainable_variables()),
                        tf.hessians([tower.loss for tower in replicas], tf.trainable_variables())]
            results.append(run(hessians))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-9)
    np.testing.assert_allclose(np.array(results[1][1]) / 2, results[0][1], rtol=1e-9)


def test_current_tower_is_restored_after_an_error():
    def broken(_):
        raise KeyError("mine")

    tf.add_to_collection(tf.GraphKeys.LOSSES, tf.constant(1.0))
    with pytest.raises(KeyError, match="mine"):
        build(broken, (X,), 2)
    assert towers.current_tower() is None
    assert len(tf.get_collection(tf.GraphKeys.LOSSES)) == 1


def test_behaviour_is_the_one_asked_for():
    v = tf.get_variable("v", [])
    is_resource = v.op.type == "VarHandleOp"
    assert is_resource == (BEHAVIOUR == "graph")
