"""Threads: several on one session, builds at once, and pools of a single one. Nothing hangs, and no number is another one."""
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, set_variables
from tests.sweeps import covering
from tf_syncbn.kernels import graph_function
from towers.graph.functions import Functions

TIMEOUT = 300  # seconds, of which no test here needs a tenth on a machine that does nothing else
X = np.random.RandomState(0).randn(8, 9, 3)  # a batch for each of eight threads
SIZES = [1, 4, 2, 2]


def in_threads(*functions):
    """Calls functions at once, each in a thread of its own, and returns what they return; none may hang."""
    results, errors, together = [None] * len(functions), [], threading.Barrier(len(functions))

    def call(i):
        try:
            together.wait(TIMEOUT)
            results[i] = functions[i]()
        except BaseException as error:  # pylint: disable=broad-except
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for i, thread in enumerate(threads):
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "Thread %d of %d still runs after %d seconds: it hangs." % (i, len(threads), TIMEOUT)
    if errors:
        raise errors[0]
    return results


def session(pool=None, initializer=None):
    """A session whose pools have `pool` threads, with variables initialized, by an op of a graph that several threads use."""
    config = tf.ConfigProto(intra_op_parallelism_threads=pool or 0, inter_op_parallelism_threads=pool or 0)
    # In a loop of 1.15.5 Grappler orders products otherwise from session to session, see docs/numerics.md.
    config.graph_options.rewrite_options.arithmetic_optimization = 2  # OFF
    made = tf.Session(config=towers.session_config(cpus(4), config))
    made.run(tf.global_variables_initializer() if initializer is None else initializer)
    return made


def normalized(x, name):
    """A batch norm for convert_model to find."""
    with tf.name_scope(name):
        mean, variance = tf.nn.moments(x, [0])
        return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def network(x, depth=2, normalize=tf_syncbn.sync_batch_norm):
    """Returns a loss and features."""
    for i in range(depth):
        kernel = tf.get_variable("kernel%d" % i, [3, 3], x.dtype, tf.glorot_uniform_initializer(seed=i), use_resource=True)
        x = tf.tanh(normalize(tf.matmul(x, kernel), name="bn%d" % i))
    return {"loss": tf.reduce_mean(tf.square(x - 0.5)), "y": x}


def trained(placement="host", sizes=None):
    """Builds four towers and their step in the default graph; returns a dict of what a session fetches."""
    x = tf.placeholder_with_default(X[0], [None, 3])
    batch = x if sizes is None else towers.PerTower(tf.split(x, sizes))
    replicas = towers.TowerBuilder(cpus(4), variable_placement=placement).build(network, batch, training=True)
    step = tf.get_variable("step", [], tf.int64, tf.zeros_initializer(), trainable=False, use_resource=True)
    optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
    grads = towers.average_gradients(replicas, towers.compute_gradients(replicas, optimizer), "first")
    return {"x": x, "loss": replicas.loss, "y": replicas.merged()["y"], "gradients": [gradient for gradient, _ in grads],
            "train_op": optimizer.apply_gradients(grads, step), "step": step}


def test_eight_threads_get_of_one_session_what_one_thread_gets_to_the_bit():
    made = trained()
    gradients = tf.gradients(made["loss"], tf.trainable_variables())  # of no update, so that no variable moves
    fetches = [made["loss"], made["y"], *gradients]
    with session() as shared:
        alone = [shared.run(fetches, {made["x"]: x}) for x in X]
        found = in_threads(*[lambda x=x: [shared.run(fetches, {made["x"]: x}) for _ in range(10)] for x in X])
    for of_thread, expected in zip(found, alone):
        for results in of_thread:
            for ours, wanted in zip(results, expected):
                np.testing.assert_array_equal(ours, wanted)


def in_any_order(x):
    """A model whose slope by `w` does not depend on `w`: what batches train it to does not depend on their order."""
    y = tf_syncbn.sync_batch_norm(x, momentum=0.95, center=False, scale=False, name="bn")
    w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer(), use_resource=True)
    return tf.reduce_mean(tf.reduce_sum(tf.sin(2 * y) * w, 1))


@pytest.mark.laws
@pytest.mark.parametrize("placement", ["host", pytest.param("replicated", marks=pytest.mark.sweep)])
def test_steps_of_eight_threads_on_one_session_train_to_what_they_train_to_one_after_the_other(placement):
    with tf.variable_scope("", use_resource=True):  # TensorFlow does not lock what it adds to ref variables
        x = tf.placeholder(tf.float64, [None, 3])
        builder, step = towers.TowerBuilder(cpus(4), variable_placement=placement), tf.train.get_or_create_global_step()
        replicas = builder.build(in_any_order, x)
        optimizer = tf.train.GradientDescentOptimizer(0.1, use_locking=True)
        train_op = towers.minimize(replicas, optimizer, global_step=step)
    variables = {v.op.name: v for v in tf.global_variables()}
    with session() as shared:
        for _ in range(5):
            for batch in X:
                shared.run(train_op, {x: batch})
        alone = shared.run(variables)
    with session() as shared:
        in_threads(*[lambda batch=batch: [shared.run(train_op, {x: batch}) for _ in range(5)] for batch in X])
        found = shared.run(variables)
    assert found["global_step"] == alone["global_step"] == 40
    np.testing.assert_allclose(found["w"], alone["w"], rtol=1e-13)
    assert np.abs(found["w"] - 1).max() > 1e-3
    # The averages follow the order of the steps, and lie among what they are averages of.
    assert (np.abs(found["bn/moving_mean"]) <= np.abs(X.mean(1)).max(0)).all()
    assert (found["bn/moving_variance"] <= np.maximum(1, X.var(1).max(0))).all() and (found["bn/moving_variance"] > 0).all()


@pytest.mark.laws
@pytest.mark.parametrize("placement", ["replicated"] + [
    pytest.param(placement, marks=pytest.mark.sweep) for placement in ("host", "first", "round_robin")])
def test_training_by_eight_threads_counts_every_step_and_leaves_what_trains_on(placement):
    made = trained(placement, SIZES)
    with session() as shared:
        before = shared.run(made["loss"])
        losses = in_threads(*[lambda: [shared.run([made["loss"], made["train_op"]])[0] for _ in range(10)]] * 8)
        assert shared.run(made["step"]) == 80
        assert np.isfinite(losses).all() and shared.run(made["loss"]) < before
        state = shared.run({v.op.name: v for v in tf.global_variables()})
        after = shared.run(made["loss"])
    with session() as other:  # what the threads have left is a state like any other
        set_variables(other, state)
        assert other.run(made["loss"]) == after


@pytest.mark.laws
def test_loops_of_several_threads_on_one_session_count_every_step():
    made = trained()
    losses, loop = towers.repeat(lambda: (made["loss"], made["train_op"]), 10)
    with session() as shared:
        found = in_threads(*[lambda: shared.run([losses, loop])[0]] * 4)
        assert shared.run(made["step"]) == 40 and np.isfinite(found).all()


@pytest.mark.laws
@pytest.mark.parametrize("in_loop,sizes", covering([False, True], [None, SIZES]))
def test_pools_of_one_thread_train_to_the_bits_of_others(in_loop, sizes):
    made = trained("replicated", sizes)
    fetches = [made["loss"], made["train_op"]]
    loop = towers.repeat(lambda: tuple(fetches), 5) if in_loop else None
    variables, initializer = {v.op.name: v for v in tf.global_variables()}, tf.global_variables_initializer()

    def train(pool):
        with session(pool, initializer) as opened:
            losses = opened.run(loop)[0] if in_loop else [opened.run(fetches)[0] for _ in range(5)]
            return list(losses), opened.run(variables)

    (losses, state), (others, other_state) = in_threads(lambda: with_graph(made, train, 1), lambda: with_graph(made, train, 2))
    assert losses == others
    for name in state:
        np.testing.assert_array_equal(state[name], other_state[name], err_msg=name)


def with_graph(made, function, *args):
    """Calls a function with the graph that `made` is of as the default one: threads begin without."""
    with made["x"].graph.as_default():
        return function(*args)


@pytest.mark.laws
def test_a_pool_of_one_thread_reads_a_data_set_and_trains():
    data = tf.data.Dataset.from_tensor_slices(X.reshape([-1, 3])).shuffle(72, seed=1).repeat().batch(9).prefetch(2)
    replicas = build(network, data, 4)
    train_op = towers.minimize(replicas, tf.train.AdamOptimizer(0.1))

    def train():
        with replicas.loss.graph.as_default(), session(1) as opened:
            return [opened.run([replicas.loss, train_op])[0] for _ in range(20)]

    losses, = in_threads(train)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


def described(graph):
    """Returns what stands in a graph: each op's name, type, device, inputs and attributes, functions by what they compute."""
    functions = Functions(graph)
    return [(op.name, op.type, op.device, [tensor.name for tensor in op.inputs], sorted(c.name for c in op.control_inputs),
             functions.attributes(op.node_def)) for op in graph.get_operations()]


def graph_of(model_fn, depth, builder=None):
    """Builds towers and their step in a graph of its own, and returns what stands in it and what two steps come to."""
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(0)
        x = tf.constant(X[0])
        replicas = (builder or towers.TowerBuilder(cpus(4), variable_placement="balanced")).build(
            lambda x: model_fn(x, depth), towers.PerTower(tf.split(x, SIZES)))
        train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
        found = described(graph)
        with session() as opened:
            return found, [opened.run([replicas.loss, train_op])[0] for _ in range(2)]


def converted():
    return tf_syncbn.convert_model(lambda x, depth: network(x, depth, normalized))


@pytest.mark.laws
@pytest.mark.parametrize("make", [lambda: network, converted], ids=["synced", "converted"])
def test_builds_in_threads_of_their_own_make_the_graphs_that_one_thread_makes(make):
    depths = [1, 2, 1]
    alone = [graph_of(make(), depth) for depth in depths]
    graph_function._trace.cache_clear()  # so that the threads trace the kernels at once
    for found, expected in zip(in_threads(*[lambda depth=depth: graph_of(make(), depth) for depth in depths]), alone):
        assert found == expected


@pytest.mark.laws
def test_a_builder_makes_in_each_graph_what_it_makes_in_the_first():
    builder = towers.TowerBuilder(cpus(3), variable_placement="round_robin", num_towers=4)
    first = graph_of(network, 1, builder)
    for found in in_threads(*[lambda: graph_of(network, 1, builder)] * 2):
        assert found == first


@pytest.mark.laws
def test_a_converted_model_is_built_in_two_threads_at_once():
    """It has other batch norms in each of them: the threads wait for one another in each tower, so that they take turns."""
    together = threading.Barrier(2)

    def model_fn(x, depth):
        together.wait(TIMEOUT)
        return network(x, depth, normalized)

    shared = tf_syncbn.convert_model(model_fn)
    found = in_threads(lambda: graph_of(shared, 1), lambda: graph_of(shared, 2))
    assert found == [graph_of(converted(), 1), graph_of(converted(), 2)]


def test_a_thread_sees_no_tower_that_another_one_builds():
    inside, seen = threading.Event(), threading.Event()

    def model_fn(x):
        inside.set()
        assert seen.wait(TIMEOUT)
        return x

    def build_towers():
        with tf.Graph().as_default():
            build(model_fn, (X[0],), 2)

    def look():
        assert inside.wait(TIMEOUT)
        found = towers.current_tower()
        seen.set()
        return found

    assert in_threads(build_towers, look)[1] is None
