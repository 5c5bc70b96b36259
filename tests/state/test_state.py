"""What model functions write into variables: as in one tower where its value is the same in all towers, else in their order."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, run, session, train_by
from tests.sweeps import covering
from towers.graph.walk import writes_of
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(0).randn(7, 3)
SGD = tf.train.GradientDescentOptimizer


@pytest.fixture(params=["ref", "resource"])
def resource(request):
    """Runs a test with variables of both kinds."""
    return request.param == "resource"


# Where one kind is enough, it is one or the other in turn; a sweep takes both.
KINDS = [False, True]
REF = pytest.mark.parametrize("resource", [False, pytest.param(True, marks=pytest.mark.sweep)])
RESOURCE = pytest.mark.parametrize("resource", [pytest.param(False, marks=pytest.mark.sweep), True])


def variable(name, shape, resource, trainable=True, value=None, seed=0):
    initializer = tf.constant_initializer(value) if value is not None else tf.glorot_uniform_initializer(seed=seed)
    return tf.get_variable(name, shape, tf.float64, initializer, trainable=trainable, use_resource=resource)


def unit(x):
    return x / (tf.reduce_sum(x ** 2) ** 0.5 + 1e-12)


def power_iteration(w, u, steps=1):
    for _ in range(steps):
        v = unit(tf.matmul(u, w, transpose_b=True))
        u = unit(tf.matmul(v, w))
    u, v = tf.stop_gradient(u), tf.stop_gradient(v)
    return u, tf.matmul(tf.matmul(v, w), u, transpose_b=True)


def under_control(w, u):
    """As in the SAGAN of many repositories."""
    new, sigma = power_iteration(w, u)
    with tf.control_dependencies([tf.assign(u, new)]):
        return w / sigma


def read_anew(w, u):
    """As compare_gan has it: what is assigned is read again."""
    new, sigma = power_iteration(w, u, 2)
    with tf.control_dependencies([tf.assign(u, new)]):
        new = tf.identity(new) + 0 * u.read_value()
    return w / tf.matmul(tf.matmul(tf.stop_gradient(unit(tf.matmul(new, w, transpose_b=True))), w), new, transpose_b=True)


def collected(w, u):
    """As TF-GAN has it: the update is collected."""
    new, sigma = power_iteration(w, u)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(u, new))
    return w / sigma


def in_cond(w, u):
    """Written where a predicate of no data says so."""
    new, sigma = power_iteration(w, u)
    step = tf.cond(tf.reduce_sum(u) < 99, lambda: tf.identity(tf.assign(u, new)), lambda: tf.identity(u))
    with tf.control_dependencies([step]):
        return w / sigma


SPECTRAL = [under_control, read_anew, collected]


def spectral_model(normalize, resource, bn=lambda x, name: x, late=False):
    def model(x):
        for i in range(2):
            w = variable("w%d" % i, [3, 3], resource, seed=i)
            u = variable("u%d" % i, [1, 3], resource, trainable=False, seed=7 + i)
            if late:  # long until the variable is read
                for _ in range(20):
                    x = tf.tanh(x)
            x = tf.tanh(bn(tf.matmul(x, normalize(w, u)), "bn%d" % i))
        return tf.reduce_mean(x ** 2)
    return model


def synced(x, name):
    return tf_syncbn.sync_batch_norm(x, name=name)


def ordinary(x, _):
    mean, variance = tf.nn.moments(x, [0])
    return (x - mean) / tf.sqrt(variance + 1e-3)


@pytest.mark.parametrize("sizes,bn,normalize,resource", covering(
    [[4, 3], [1, 4, 2]], ["plain", "synced", "converted"], SPECTRAL, KINDS, also=lambda sizes, bn, normalize, resource: (
        len(sizes) == 2 and (bn, resource) == ("plain", True) and normalize is not read_anew)))
def test_spectral_normalization_trains_as_one_batch(sizes, bn, normalize, resource):
    model = spectral_model(normalize, resource, {"plain": lambda x, _: x, "synced": synced, "converted": ordinary}[bn])
    model = tf_syncbn.convert_model(model) if bn == "converted" else model
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equals_one_batch(model, (X,), len(sizes), sizes)


@pytest.mark.parametrize("policy,resource", covering(["first", "all", "last"], KINDS))
def test_collected_update_that_is_the_same_in_all_towers_runs_once_under_every_policy(policy, resource):
    assert_equals_one_batch(spectral_model(collected, resource), (X,), 2, update_ops=policy)


@pytest.mark.parametrize("late,resource", covering([False, True], KINDS[::-1]))
def test_spectral_normalization_in_a_cond_trains_as_one_batch(late, resource):
    if not resource and tf.control_flow_v2_enabled():
        pytest.skip("control flow 2 assigns to no ref variable")
    assert_equals_one_batch(spectral_model(in_cond, resource, late=late), (X,), 2)


@RESOURCE
def test_spectral_updates_in_a_collection_of_their_own_run_once(resource):
    def normalize(w, u):
        new, sigma = power_iteration(w, u)
        tf.add_to_collection("spectral", tf.assign(u, new))
        return w / sigma

    after = []
    for count in (1, 3):
        with tf.Graph().as_default():
            replicas = build(spectral_model(normalize, resource), (X,), count)
            train_op = towers.minimize(replicas, SGD(0.1))
            updates = tf.get_collection("spectral")
            assert len(updates) == 2
            with session() as made:
                for _ in range(5):
                    made.run(train_op)
                    made.run(updates)
                after.append(made.run({v.op.name: v for v in tf.global_variables()}))
    for name in after[0]:
        np.testing.assert_allclose(after[1][name], after[0][name], rtol=1e-9)


def counted(resource, kind):
    """A model that counts its steps, and scales its loss by the count."""
    def model(x):
        count = variable("count", [], resource, trainable=False, value=0.0)
        step = {"assign_add": lambda: tf.assign_add(count, 1.0), "assign": lambda: tf.assign(count, count + 1)}[kind]()
        with tf.control_dependencies([step]):
            factor = 1 / (1 + count.read_value())
        return tf.reduce_mean((x * variable("w", [3], resource, value=0.5)) ** 2) * factor
    return model


@pytest.mark.parametrize("kind,resource", covering(["assign_add", "assign"], KINDS))
def test_step_counted_inside_the_model_counts_once_a_step(kind, resource):
    assert_equals_one_batch(counted(resource, kind), (X,), 3)
    replicas = build(counted(resource, kind), (X,), 3)
    _, _, after = train_by(towers.minimize(replicas, SGD(0.1)), replicas.loss, 4)
    assert after["count"] == 4


@REF
def test_step_that_the_output_itself_is_made_of_counts_once(resource):
    def model(x):
        count = variable("count", [], resource, trainable=False, value=0.0)
        factor = tf.convert_to_tensor(tf.assign_add(count, 1.0))
        return tf.reduce_mean((x * variable("w", [3], resource, value=0.5)) ** 2) / factor

    assert_equals_one_batch(model, (X,), 3, [2, 4, 1])


@pytest.mark.parametrize("policy,wanted,resource", [
    pytest.param(policy, wanted, resource, marks=() if resource == (policy in ("all", "none")) else pytest.mark.sweep)
    for policy, wanted in (("first", 4), ("all", 4), ("last", 4), ("none", 0)) for resource in KINDS])
def test_collected_counter_counts_once_under_every_policy(policy, wanted, resource):
    def model(x):
        count = variable("count", [], resource, trainable=False, value=0.0)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(count, 1.0))
        return tf.reduce_mean((x * variable("w", [3], resource, value=0.5)) ** 2)

    replicas = build(model, (X,), 3)
    _, _, after = train_by(towers.minimize(replicas, SGD(0.1), update_ops=policy), replicas.loss, 4)
    assert after["count"] == wanted


@pytest.mark.parametrize("policy,resource", covering(["first", "all", "last"], KINDS))
def test_collected_update_behind_a_layers_update_in_line_runs_once_under_every_policy(policy, resource):
    def model(x):
        y = tf_syncbn.sync_batch_norm(x * variable("w", [3], resource, value=0.5), momentum=0.5, updates_collections=None)
        average = variable("average", [3], resource, trainable=False, value=1.0)
        of_all = towers.all_reduce(tf.reduce_sum(tf.exp(y), 0)) / len(X)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(average, 0.2 * tf.stop_gradient(average - of_all)))
        return tf.reduce_mean(tf.sin(y))

    assert_equals_one_batch(model, (X,), 2, update_ops=policy)


@RESOURCE
def test_moving_average_of_a_weight_inside_the_model_trains_as_one_batch(resource):
    if tf.control_flow_v2_enabled() and not resource:
        pytest.skip("TensorFlow's own tf.cond of control flow 2 reads a ref variable that may hold nothing yet")

    def model(x):
        w = variable("w", [3, 3], resource)
        average = tf.train.ExponentialMovingAverage(0.9)
        with tf.control_dependencies([average.apply([w])]):
            y = tf.matmul(x, tf.identity(w))
        return tf.reduce_mean((y - tf.matmul(x, average.average(w))) ** 2) + tf.reduce_mean(tf.sin(y))

    assert_equals_one_batch(model, (X,), 3, [1, 4, 2])


def trained_in_a_loop(model, sizes, resource, steps=4):
    """Returns the variables after towers were built, and trained, inside a tf.while_loop."""
    if tf.control_flow_v2_enabled() and not resource:
        pytest.skip("TensorFlow writes no ref variable in a loop of control flow 2")
    devices = cpus(len(sizes))

    def body(i):
        with tf.variable_scope("", reuse=True):
            replicas = towers.TowerBuilder(devices).build(model, towers.PerTower(tf.split(x, sizes)))
        with tf.control_dependencies([towers.minimize(replicas, SGD(0.1))]):
            return i + 1

    with tf.Graph().as_default():
        x = tf.placeholder(tf.float64, [None, 3])
        for name in ("state", "w"):  # outside of the loop, as TensorFlow demands
            variable(name, [3], resource, name == "w", float(name == "w"))
        steps = tf.while_loop(lambda i: i < steps, body, [0], parallel_iterations=1)
        with session() as made:
            made.run(steps, {x: X})
            return made.run({v.op.name: v for v in tf.global_variables()})


@pytest.mark.parametrize("value,sizes,resource", covering(["count", "gathered"], [[2, 5], [3, 3, 1]], KINDS))
def test_state_of_towers_inside_a_loop_trains_as_one_batch(resource, sizes, value):
    def model(x):
        state, w = variable("state", [3], resource, trainable=False), variable("w", [3], resource)
        new = state + 1.0 if value == "count" else 0.9 * state + 0.1 * tf.reduce_mean(towers.all_gather(x), 0)
        with tf.control_dependencies([tf.assign(state, new)]):
            return tf.reduce_mean((x * w) ** 2) + tf.reduce_sum(new * w)

    one, several = trained_in_a_loop(model, [7], resource), trained_in_a_loop(model, sizes, resource)
    assert value != "count" or one["state"][0] == 4
    for name, wanted in one.items():
        np.testing.assert_allclose(several[name], wanted, atol=1e-12)


@RESOURCE
def test_own_state_of_towers_inside_a_loop_is_written_in_the_order_of_the_towers(resource):
    def model(x):
        state = variable("state", [3], resource, trainable=False)
        with tf.control_dependencies([tf.assign(state, 0.9 * state + 0.1 * tf.reduce_mean(x, 0))]):
            return tf.reduce_mean((x * variable("w", [3], resource)) ** 2)

    with pytest.warns(UserWarning, match="Each tower writes the variable 'state'"):
        found = trained_in_a_loop(model, [2, 5], resource)["state"]
    wanted = np.zeros(3)
    for _ in range(4):
        wanted = 0.9 * (0.9 * wanted + 0.1 * X[:2].mean(0)) + 0.1 * X[2:].mean(0)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.skipif(not tf.control_flow_v2_enabled(), reason="of branches and loops that are functions")
def test_a_call_writes_what_its_functions_write_and_no_other_variable_that_it_is_given():
    a, b, c, d = (tf.get_variable(name, [], initializer=tf.zeros_initializer(), use_resource=True) for name in "abcd")

    def body(i):
        chosen = tf.cond(i < 2, lambda: tf.identity(a.assign_add(1.0)), lambda: b + 1.0)
        with tf.control_dependencies([c.assign(chosen + d)]):
            return i + 1

    loop = tf.while_loop(lambda i: i < 3, body, [0])
    writing = writes_of([op for op in tf.get_default_graph().get_operations() if op.type != "AssignVariableOp"])
    assert [[v.name for v in variables] for variables in writing.values()] == [["a", "c"]] and run(loop) == 3


@pytest.mark.skipif(not tf.control_flow_v2_enabled(), reason="of branches and loops that are functions")
def test_a_loop_that_writes_is_differentiated_in_the_order_of_the_towers():
    def model(x):
        w, state = variable("w", [3], True, value=0.5), variable("state", [3], True, False, 0.0)

        def body(i, y):
            with tf.control_dependencies([tf.assign(state, 0.9 * state + 0.1 * tf.reduce_mean(x, 0))]):
                return i + 1, tf.tanh(y * w)
        return tf.reduce_mean(tf.while_loop(lambda i, _: i < 2, body, (0, x))[1])

    with pytest.warns(UserWarning, match="Each tower writes the variable 'state'"):
        replicas = build(model, towers.PerTower([(X[:2],), (X[2:],)]), 2)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
    with session() as made:
        loss = made.run([replicas.loss, train_op])[0]
        found = made.run([v for v in tf.global_variables() if v.op.name == "state"])[0]
    np.testing.assert_allclose(loss, np.tanh(np.tanh(X * 0.5) * 0.5).mean(), atol=1e-12)  # each tower's own examples
    wanted = np.zeros(3)
    for part in (X[:2], X[:2], X[2:], X[2:]):
        wanted = 0.9 * wanted + 0.1 * part.mean(0)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_placeholders_of_two_towers_are_not_the_same_value(resource):
    fed = []

    def model(x):
        fed.append(tf.placeholder(tf.float64, []))
        with tf.control_dependencies([tf.assign(variable("state", [], resource, False, 0.0), fed[-1])]):
            return tf.reduce_mean(x * variable("w", [3], resource))

    with pytest.warns(UserWarning, match="Each tower writes the variable 'state'"):
        replicas = build(model, (X,), 2)
    with session() as made:
        made.run(replicas.loss, dict(zip(fed, (1.0, 2.0))))
        assert made.run(tf.global_variables()[0]) == 2.0


@REF
def test_moving_average_of_what_all_towers_gathered_trains_as_one_batch(resource):
    def model(x):
        center = variable("center", [3], resource, trainable=False, value=0.1)
        new = 0.9 * center + 0.1 * tf.reduce_mean(towers.all_gather(x), 0)
        with tf.control_dependencies([tf.assign(center, new)]):
            return tf.reduce_mean((x * variable("w", [3], resource, value=0.5) - center) ** 2)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equals_one_batch(model, (X,), 3, [1, 4, 2])


def test_moving_average_of_a_towers_own_batch_moves_in_their_order_and_is_warned_of(resource):
    def model(x):
        center = variable("center", [3], resource, trainable=False, value=0.1)
        with tf.control_dependencies([tf.assign(center, 0.9 * center + 0.1 * tf.reduce_mean(x, 0))]):
            return tf.reduce_mean((x * variable("w", [3], resource, value=0.5)) ** 2)

    with pytest.warns(UserWarning, match=r"writes the variable 'center' .*all_gather\(...\) first.*add_update\(op, shared=True"):
        replicas = build(model, (X,), 3)
    train_op = towers.minimize(replicas, SGD(0.1))
    expected = np.full(3, 0.1)
    for _ in range(4):
        for part in np.array_split(X, 3):
            expected = 0.9 * expected + 0.1 * part.mean(0)
    for _ in range(3):
        after = train_by(train_op, replicas.loss, 4)[2]
        np.testing.assert_allclose(after["center"], expected, rtol=1e-12)


def center_loss(resource):
    """As facenet has it: what is subtracted of the centers depends on the towers' own features."""
    def model(x, labels):
        features = tf.tanh(tf.matmul(x, variable("w", [3, 2], resource)))
        centers = variable("centers", [4, 2], resource, trainable=False, value=0.3)
        of_batch = tf.gather(centers, labels)
        update = tf.scatter_sub(centers, labels, 0.05 * (of_batch - features))
        with tf.control_dependencies([update]):
            return tf.reduce_mean((features - of_batch) ** 2) + tf.reduce_mean(tf.sin(features))
    return model


@pytest.mark.filterwarnings("ignore:Each tower writes")
@pytest.mark.parametrize("sizes,resource", covering([[4, 3], [1, 4, 2]], KINDS))
def test_center_loss_trains_as_one_batch_since_its_writes_add_up(sizes, resource):
    batch = X, np.array([0, 1, 1, 2, 3, 0, 1])
    assert_equals_one_batch(center_loss(resource), batch, len(sizes), sizes, steps=15)


def test_center_loss_is_warned_of_once_a_build(resource):
    with pytest.warns(UserWarning, match="writes the variable 'centers'") as said:
        build(center_loss(resource), (X, np.zeros(7, np.int32)), 3)
    assert len([w for w in said if "centers" in str(w.message)]) == 1


@pytest.mark.parametrize("count, words", [
    (2, r"'s0' \(and 's1'\) by"), (7, r"'s0' \(and 's1', 's2', 's3', 's4' and 2 more\) by")])
def test_all_variables_that_towers_write_by_their_own_data_are_named_in_one_warning(count, words, resource):
    def model(x):
        written = [tf.assign(variable("s%d" % i, [3], resource, trainable=False), tf.reduce_mean(x, 0)) for i in range(count)]
        with tf.control_dependencies(written):
            return tf.reduce_mean((x * variable("w", [3], resource)) ** 2)

    with pytest.warns(UserWarning, match="writes the variable " + words) as said:
        build(model, (X,), 3)
    assert len([w for w in said if "writes the variable" in str(w.message)]) == 1


def queue_model(resource, own):
    """A memory of keys, as MoCo has it: it is contrasted with, and then takes the batch's keys in."""
    def model(x):
        keys = tf.stop_gradient(tf.tanh(tf.matmul(x, variable("k", [3, 2], resource, trainable=False))))
        queries = tf.tanh(tf.matmul(x, variable("w", [3, 2], resource)))
        queue = variable("queue", [20, 2], resource, trainable=False, seed=5)
        logits = tf.matmul(queries, queue, transpose_b=True)
        new = keys if own else towers.all_gather(keys)
        with tf.control_dependencies([logits]):
            update = tf.assign(queue, tf.concat([queue[tf.shape(new)[0]:], new], 0))
        with tf.control_dependencies([update]):
            return tf.reduce_mean(tf.reduce_logsumexp(logits, 1)) + tf.reduce_mean(tf.sin(queries))
    return model


@pytest.mark.parametrize("own,sizes,resource", covering(
    [False, True], [[4, 3], [1, 4, 2]], KINDS, also=lambda own, sizes, resource: own and len(sizes) == 2 and not resource))
def test_memory_queue_trains_as_one_batch(own, sizes, resource):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if own else "error", UserWarning)
        assert_equals_one_batch(queue_model(resource, own), (X,), len(sizes), sizes)


def test_memory_queue_of_a_towers_own_keys_is_warned_of(resource):
    with pytest.warns(UserWarning, match="writes the variable 'queue'"):
        build(queue_model(resource, True), (X,), 2)


def initialized_by_data(resource, gather):
    """Weight normalization that takes its scale and offset from the first batch."""
    def model(x):
        v = variable("v", [3, 2], resource)
        g, b = variable("g", [2], resource, value=1.0), variable("b", [2], resource, value=0.0)
        done = variable("done", [], resource, trainable=False, value=0.0)
        direction = v / tf.sqrt(tf.reduce_sum(v ** 2, 0))
        whole = tf.matmul(gather(x), tf.stop_gradient(direction))
        mean, variance = tf.nn.moments(whole, [0])
        first = tf.stop_gradient(tf.where(done < 0.5, 1 / tf.sqrt(variance + 1e-8), g))
        offset = tf.stop_gradient(tf.where(done < 0.5, -mean / tf.sqrt(variance + 1e-8), b))
        with tf.control_dependencies([tf.assign(g, first), tf.assign(b, offset)]):
            with tf.control_dependencies([tf.assign(done, 1.0)]):
                scaled = tf.matmul(x, direction) * g.read_value() + b.read_value()
        return tf.reduce_mean(tf.sin(scaled) ** 2)
    return model


@RESOURCE
def test_weight_normalization_initialized_by_all_data_trains_as_one_batch(resource):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equals_one_batch(initialized_by_data(resource, towers.all_gather), (X,), 3, [1, 4, 2])


@REF
def test_weight_normalization_initialized_by_a_towers_own_data_is_warned_of_and_the_same_from_run_to_run(resource):
    with pytest.warns(UserWarning, match="writes the variable 'g'"):
        replicas = build(initialized_by_data(resource, tf.identity), (X,), 3)
    train_op = towers.minimize(replicas, SGD(0.1))
    runs = {tuple(float(np.sum(v)) for _, v in sorted(train_by(train_op, replicas.loss, 3)[2].items())) for _ in range(5)}
    assert len(runs) == 1


def test_reads_of_averages_come_before_any_towers_update(resource):
    """As batch renormalization reads the averages that its update moves."""
    def model(x):
        moving = variable("moving", [3], resource, trainable=False, value=0.2)
        for _ in range(0 if towers.current_tower().is_first else 50):  # later towers come late
            x = tf.identity(x)
        y = tf.tanh(x * variable("w", [3], resource, value=0.5) - moving)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(
            moving, 0.5 * moving + 0.5 * towers.all_reduce(tf.reduce_sum(x, 0))))
        return tf.reduce_mean(y ** 2)

    assert_equals_one_batch(model, (X,), 3, [1, 4, 2])


@pytest.mark.parametrize("policy,chosen,resource", [
    pytest.param(policy, chosen, resource, marks=() if resource == (policy == "all") else pytest.mark.sweep)
    for policy, chosen in (("first", [0]), ("all", [0, 1, 2]), ("last", [2])) for resource in KINDS])
def test_updates_of_a_towers_own_data_are_left_to_the_policy_and_write_after_all_reads(policy, chosen, resource):
    def model(x):
        moving = variable("moving", [3], resource, trainable=False, value=0.2)
        y = tf.tanh(x * variable("w", [3], resource, value=0.5) - moving)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(moving, 0.5 * moving + 0.5 * tf.reduce_mean(x, 0)))
        return tf.reduce_mean(y ** 2)

    replicas = build(model, (X,), 3)
    losses, _, after = train_by(towers.minimize(replicas, SGD(0.0), update_ops=policy), replicas.loss, 4)
    moving = np.full(3, 0.2)
    for loss in losses:
        assert loss == pytest.approx((np.tanh(X * 0.5 - moving) ** 2).mean(), rel=1e-12)
        for i in chosen:
            moving = 0.5 * moving + 0.5 * np.array_split(X, 3)[i].mean(0)
    np.testing.assert_allclose(after["moving"], moving, rtol=1e-12)


def test_a_write_of_tower_0_alone_is_read_by_all_towers_as_it_reads_it(resource):
    def model(x):
        count = variable("count", [], resource, trainable=False, value=0.0)
        before = tf.identity(count)
        if towers.current_tower().is_first:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(count, 1.0))
        return tf.reduce_mean((x * variable("w", [3], resource, value=0.5)) ** 2) + before

    replicas = build(model, (X,), 3)
    losses, _, after = train_by(towers.minimize(replicas, SGD(0.0)), replicas.loss, 4)
    np.testing.assert_allclose(np.diff(losses), 1, rtol=1e-12)
    assert after["count"] == 4


def test_towers_that_write_another_number_of_times_are_refused(resource):
    def model(x):
        count = variable("count", [], resource, trainable=False, value=0.0)
        for _ in range(1 + towers.current_tower().index):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(count, 1.0))
        return tf.reduce_mean(x)

    with pytest.raises(towers.TowerMismatchError, match="write the variable 'count' another number of times each: 1, 2"):
        build(model, (X,), 2)


def test_metrics_sum_over_all_towers_without_a_warning(resource):
    def model(x):
        with tf.variable_scope("metrics", use_resource=resource):
            value, update = tf.metrics.mean(x)
        with tf.control_dependencies([update]):
            return {"loss": tf.reduce_mean(x), "value": value}

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        replicas = build(model, (X,), 3)
    with session() as made:
        made.run([tower.loss for tower in replicas])
        assert made.run(replicas[0].outputs["value"]) == pytest.approx(X.mean(), rel=1e-5)


def test_one_tower_reads_before_it_writes_too(resource):
    """Of a ref variable TensorFlow itself may hand out memory that the write then changes."""
    replicas = build(queue_model(resource, True), (X,), 1)
    grads, _ = zip(*towers.compute_gradients(replicas, SGD(0.1))[0])
    with session() as made:
        queue, w, k = (made.run(v) for name in ("queue", "w", "k") for v in tf.global_variables() if v.op.name == name)
        gradient = made.run(grads[0])
    queries = np.tanh(X @ w)
    logits = queries @ queue.T
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    d_queries = (share @ queue) / len(X) + np.cos(queries) / queries.size
    np.testing.assert_allclose(gradient, X.T @ (d_queries * (1 - queries ** 2)), rtol=1e-9)


def test_ops_that_nobody_needs_write_nothing_and_are_left_alone(resource):
    def model(x):
        count = variable("count", [], resource, trainable=False, value=0.0)
        tf.assign(count, tf.reduce_sum(x))
        return tf.reduce_mean(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert np.isfinite(run(build(model, (X,), 2).loss))


def test_random_writes_are_each_towers_own(resource):
    def model(x):
        noise = variable("noise", [], resource, trainable=False, value=0.0)
        with tf.control_dependencies([tf.assign(noise, tf.random_normal([], dtype=tf.float64))]):
            return tf.reduce_mean(tf.identity(x))

    with pytest.warns(UserWarning, match="writes the variable 'noise'"):
        build(model, (X,), 2)


def test_towers_on_one_device_do_the_same():
    with pytest.warns(UserWarning, match="centers"):
        replicas = towers.TowerBuilder(cpus(1) * 3).build(center_loss(True), (X, np.zeros(7, np.int32)))
    assert np.isfinite(run(replicas.loss))
