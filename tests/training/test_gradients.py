"""Gradients of towers, their average, and the train op."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, cpus, run, session, train_by, train_plainly
from towers.graph.private import rewire
from towers.graph.walk import ancestors

X = np.random.RandomState(0).randn(6, 3).astype(np.float32)
SGD = tf.train.GradientDescentOptimizer


def variable(name, shape=(3,)):
    return tf.get_variable(name, shape, initializer=tf.ones_initializer())


def average(tower_grads):
    """Averages gradients that no model function led to."""
    return towers.average_gradients(build(tf.reduce_mean, (tf.ones([len(tower_grads), 1]),), len(tower_grads)), tower_grads)


def test_a_step_has_the_name_that_is_asked_for():
    replicas = build(lambda x: tf.reduce_mean(x * tf.get_variable("w", [3])), (tf.ones([4, 3]),), 2)
    assert towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), name="train").name == "train"


def test_gradient_that_is_none_in_every_tower_is_left_out():
    def model(x):
        variable("unused")
        return tf.reduce_mean(x * variable("w"))

    replicas = build(model, (X,), 2)
    tower_grads = towers.compute_gradients(replicas, SGD(1.0))
    assert [[g is None for g, _ in grads] for grads in tower_grads] == [[True, False]] * 2
    assert [v.op.name for _, v in towers.average_gradients(replicas, tower_grads)] == ["w"]


def test_gradient_that_is_none_in_some_towers_counts_as_zero_there():
    def model(x):
        extra = variable("extra")
        loss = tf.reduce_mean(x * variable("w"))
        return loss + tf.reduce_sum(extra) if towers.current_tower().is_first else loss

    replicas = build(model, (X,), 3, alike=False)
    grads = dict((v.op.name, g) for g, v in towers.average_gradients(replicas, towers.compute_gradients(replicas, SGD(1.0))))
    np.testing.assert_allclose(run(grads["extra"]), np.full(3, 1 / 3), rtol=1e-6)


def test_indexed_slices_stay_sparse_and_are_divided_by_the_number_of_towers():
    ids = np.array([0, 2, 2, 4, 0, 0])

    def model(ids):
        return tf.reduce_mean(tf.nn.embedding_lookup(variable("table", (5, 2)), ids) ** 2)

    replicas = build(model, (ids,), 3)
    (gradient, table), = towers.average_gradients(replicas, towers.compute_gradients(replicas, SGD(1.0)))
    assert isinstance(gradient, tf.IndexedSlices)
    expected = np.zeros([5, 2])
    np.add.at(expected, ids, 2 * np.ones([6, 2]) / 12 * 2)
    np.testing.assert_allclose(run(tf.convert_to_tensor(gradient)), expected / 2, rtol=1e-6)


def test_sparse_and_dense_gradients_of_one_variable_become_dense():
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))
    table = variable("table", (3, 2))
    (gradient, _), = average([[(slices, table)], [(tf.ones([3, 2]), table)]])
    np.testing.assert_allclose(run(gradient), [[0.5, 0.5], [1, 1], [0.5, 0.5]])


def test_average_is_the_plain_mean():
    w = variable("w")
    values = np.random.RandomState(1).randn(5, 3).astype(np.float32)
    (gradient, v), = average([[(tf.constant(value), w)] for value in values])
    assert v is w
    np.testing.assert_allclose(run(gradient), values.mean(0, dtype=np.float64), rtol=1e-5)


@pytest.mark.parametrize("optimizer", [
    lambda: tf.train.AdamOptimizer(0.01), lambda: tf.train.RMSPropOptimizer(0.01),
    lambda: tf.train.AdagradOptimizer(0.1), lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True)])
def test_training_with_any_optimizer_equals_training_without_towers(optimizer):
    def model(x):
        return tf.reduce_mean(tf.square(tf.sin(x * variable("w")) - tf.reduce_sum(variable("b")) + 1))

    with tf.Graph().as_default():
        losses, before, after = train_plainly(model(tf.constant(X)), optimizer(), 4)
    replicas = build(model, (X,), 4)
    ours = train_by(towers.minimize(replicas, optimizer()), replicas.loss, 4, before)
    np.testing.assert_allclose(ours[0], losses, rtol=1e-5)
    for name in after:
        np.testing.assert_allclose(ours[2][name], after[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_loss_of_a_step_never_sees_the_steps_own_update():
    def model(x):
        w = variable("w", (3, 2))
        return tf.reduce_mean(tf.sin(tf.matmul(x, w)) ** 2) * variable("scale", ())  # reads a variable last of all

    replicas = build(model, towers.PerTower([(X[:2],), (X[2:2],), (X[2:],)]), 3)
    train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
    with session() as made:
        before = made.run(replicas.loss)
        for _ in range(200):
            made.run([v.initializer for v in tf.global_variables()])
            assert made.run([replicas.loss, train_op])[0] == pytest.approx(before, rel=1e-5)


def waited_for(graphs, name):
    """Returns the names of the nodes that a node waits for, in the graphs that TensorFlow made for the devices."""
    nodes = {node.name: node for graph in graphs for node in graph.node}
    sent = {node.attr["tensor_name"].s: node.name for node in nodes.values() if node.op in ("_Send", "_HostSend")}
    found, stack = set(), [name]
    while stack:
        node = nodes[stack.pop().lstrip("^").split(":")[0]]
        if node.name not in found:
            found.add(node.name)
            stack += list(node.input) + ([sent[node.attr["tensor_name"].s]] if node.op in ("_Recv", "_HostRecv") else [])
    return found


def test_the_update_waits_for_a_loss_that_is_a_product_with_a_constant():
    def model(x):
        w = variable("w", (3,))
        return 0.25 * ((0.01 * tf.reduce_sum(tf.square(w)) + tf.reduce_sum(tf.sin(x * w))) / 7.0)

    replicas = build(model, towers.PerTower([(X[:2],), (X[2:3],), (X[3:],)]), 3)
    train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
    ran = tf.RunMetadata()
    with session() as made:
        made.run([replicas.loss, train_op], options=tf.RunOptions(output_partition_graphs=True), run_metadata=ran)
    nodes = [node for graph in ran.partition_graphs for node in graph.node]
    update, = [node.name for node in nodes if "ApplyMomentum" in node.op]
    waits = waited_for(ran.partition_graphs, update)
    squares = [node.name for node in nodes if node.op == "Square"]
    assert len(squares) == 3 and set(squares) <= waits


def test_transforms_act_on_averaged_gradients_in_their_order():
    seen = []

    def double(grads):
        seen.append("double")
        return [(2 * g, v) for g, v in grads]

    def note(grads):
        seen.append(len(grads))
        return grads

    replicas = build(lambda x: tf.reduce_mean(x * variable("w")), (X,), 2)
    train_op = towers.minimize(replicas, SGD(1.0), transforms=[double, note])
    _, before, after = train_by(train_op, replicas.loss, 1)
    np.testing.assert_allclose(before["w"] - after["w"], 2 * X.mean(0) / 3, rtol=1e-5)
    assert seen == ["double", 1]


def test_global_step_grows_by_one_a_step_and_var_list_chooses():
    replicas = build(lambda x: tf.reduce_mean(x * variable("w") * variable("frozen")), (X,), 2)
    w = [v for v in tf.trainable_variables() if v.op.name == "w"]
    train_op = towers.minimize(replicas, SGD(1.0), global_step=tf.train.get_or_create_global_step(), var_list=w)
    _, before, after = train_by(train_op, replicas.loss, 3)
    assert after["global_step"] == 3
    assert (after["w"] != before["w"]).all() and (after["frozen"] == before["frozen"]).all()


def test_gradients_stand_on_the_towers_devices():
    replicas = towers.TowerBuilder(cpus(3)).build(lambda x: tf.reduce_mean(tf.matmul(x, variable("w", (3, 2))) ** 2), (X,))
    first = len(tf.get_default_graph().get_operations())
    towers.compute_gradients(replicas, SGD(1.0))
    products = [op for op in tf.get_default_graph().get_operations()[first:] if op.type == "MatMul"]
    assert {op.device.lower()[-5:] for op in products} == {"cpu:0", "cpu:1", "cpu:2"}


@pytest.mark.parametrize("model,message", [
    (lambda x: {"logits": x}, "model function returned no loss"),
    (lambda x: x, r"has to return a scalar, or a dict"),
    (lambda x: [variable("w"), tf.reduce_mean(x)][1], r"No gradient reaches any of the variables \['w'\]"),
])
def test_minimize_without_loss_or_gradients_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        towers.minimize(build(model, (X,), 2), SGD(1.0))


def test_minimize_refuses_what_is_no_optimizer_or_transform():
    replicas = build(lambda x: tf.reduce_mean(x * variable("w")), (X,), 2)
    with pytest.raises(TypeError, match="has to be a tf.train.Optimizer, not 'adam'"):
        towers.minimize(replicas, "adam")
    with pytest.raises(TypeError, match="A transform is a function.*not 5"):
        towers.minimize(replicas, SGD(1.0), transforms=[5])


def test_average_gradients_refuses_lists_that_do_not_agree():
    v, w = variable("v"), variable("w")
    with pytest.raises(towers.TowerMismatchError, match=r"Tower 1 has gradients of \['w'\] and tower 0 of \['v'\]"):
        average([[(v + 0, v)], [(w + 0, w)]])
    with pytest.raises(ValueError, match="no gradient to average"):
        average([[(None, v)]])
    with pytest.raises(towers.TowerMismatchError, match="for each of the 2 towers; it holds 1"):
        towers.average_gradients(build(tf.reduce_mean, (X,), 2), [[(v + 0, v)]])


@pytest.mark.parametrize("listed", [list, lambda tower_grads: [list(grads) for grads in tower_grads]])
def test_gradients_in_lists_made_by_hand_wait_for_the_losses_too(listed):
    replicas = build(lambda x: tf.reduce_mean(x * variable("w")), (X,), 2)
    (gradient, _), = towers.average_gradients(replicas, listed(towers.compute_gradients(replicas, SGD(1.0))))
    assert {tower.loss.op for tower in replicas} <= ancestors([gradient])


def test_no_averaged_gradient_is_there_before_all_towers_gradients_are():
    def model(ids):
        return tf.reduce_mean(tf.nn.embedding_lookup(variable("table", (5, 3)), ids) * variable("w") ** 2)

    replicas = build(model, (np.array([0, 2, 2, 4]),), 2)
    tower_grads = towers.compute_gradients(replicas, SGD(1.0))
    grads = towers.average_gradients(replicas, tower_grads)
    every = {getattr(gradient, "values", gradient).op for pairs in tower_grads for gradient, _ in pairs}
    assert len(grads) == 2 and isinstance(dict((v.op.name, g) for g, v in grads)["table"], tf.IndexedSlices)
    for gradient, _ in grads:
        assert every <= ancestors([getattr(gradient, "values", gradient)])


@pytest.mark.parametrize("num_towers,meet,gate", [(2, True, SGD.GATE_NONE), (2, False, SGD.GATE_OP), (1, True, SGD.GATE_OP)])
def test_gradients_by_inputs_wait_for_those_by_variables_only_where_no_tower_waits(monkeypatch, num_towers, meet, gate):
    seen = []
    optimizer = SGD(1.0)
    original = optimizer.compute_gradients

    def spy(*args, **kwargs):
        seen.append((kwargs["gate_gradients"], kwargs["colocate_gradients_with_ops"]))
        return original(*args, **kwargs)

    def model(x):
        loss = tf.reduce_mean(x * variable("w"))
        return towers.all_reduce(loss) if meet else loss

    monkeypatch.setattr(optimizer, "compute_gradients", spy)
    towers.compute_gradients(build(model, (X,), num_towers), optimizer)
    assert seen == [(gate, True)] * num_towers


class Wrapper(tf.train.Optimizer):
    """An optimizer around another one, as models bring their own."""

    def __init__(self):
        super().__init__(False, "Wrapper")
        self.inner, self.calls = SGD(1.0), 0

    def apply_gradients(self, *args, **kwargs):
        return self.inner.apply_gradients(*args, **kwargs)


class WithoutGradLoss(Wrapper):
    """Hands on the loss and its variables alone."""

    def compute_gradients(self, loss, var_list=None, **_):
        return self.inner.compute_gradients(loss, var_list)


class ByHand(Wrapper):
    """Calls tf.gradients itself, and leaves out none."""

    def compute_gradients(self, loss, var_list=None, grad_loss=None, **_):
        variables = var_list or tf.trainable_variables()
        gradients = tf.gradients(loss, variables)
        return [(tf.zeros_like(v) if g is None else g + 0 * v, v) for g, v in zip(gradients, variables)]


class LossScaling(Wrapper):
    """Scales the loss, and gradients back, with a grad_loss of its own."""

    def compute_gradients(self, loss, var_list=None, grad_loss=None, **kwargs):
        pairs = self.inner.compute_gradients(loss, var_list, grad_loss=tf.constant(1024.0), **kwargs)
        return [(g if g is None else g / 1024, v) for g, v in pairs]


class Penalized(Wrapper):
    """Trains by the loss and by the square of its gradient: second derivatives."""

    def compute_gradients(self, loss, var_list=None, **_):
        variables = var_list or tf.trainable_variables()
        gradient, = tf.gradients(loss, variables)
        return [(gradient + 0.01 * tf.gradients(tf.reduce_sum(gradient), variables)[0], v) for v in variables]


class OfAnotherLoss(Wrapper):
    """Differentiates what it was made for, not what it is handed."""

    def compute_gradients(self, loss, var_list=None, **_):
        variable, = tf.trainable_variables()
        return [(tf.gradients(tf.reduce_sum(variable ** 2), variable)[0], variable)]


def uneven(how):
    """Batches whose towers have other shares: 4, 1 and 1 examples, or weights, known or not."""
    if how == "known":
        return towers.PerTower([(X[:4],), (X[4:5],), (X[5:],)])
    parts = [X[:4], X[4:5], X[5:]]
    return towers.PerTower([(tf.placeholder_with_default(part, [None, 3]),) for part in parts])


@pytest.mark.parametrize("how", ["known", "when it runs"])
@pytest.mark.parametrize("optimizer", [WithoutGradLoss, ByHand, LossScaling])
def test_uneven_towers_are_exact_with_optimizers_that_ignore_or_scale_grad_loss(optimizer, how):
    def model(x):
        return tf.reduce_mean(tf.sin(towers.all_reduce(tf.reduce_sum(x, 0)) + x * variable("w")) ** 2)

    results = []
    for batch, count in ((X,), 1), (None, 3):
        with tf.Graph().as_default():
            replicas = build(model, uneven(how) if batch is None else batch, count)
            results.append(train_by(towers.minimize(replicas, optimizer()), replicas.loss, 3))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5)
    np.testing.assert_allclose(results[1][2]["w"], results[0][2]["w"], rtol=1e-4)


def test_share_is_in_second_derivatives_as_in_first_ones():
    def model(x):
        return tf.reduce_mean(tf.sin(x * variable("w")) ** 3)

    results = []
    for batch, count in ((X,), 1), (None, 3):
        with tf.Graph().as_default():
            replicas = build(model, uneven("known") if batch is None else batch, count)
            results.append(train_by(towers.minimize(replicas, Penalized()), replicas.loss, 3)[2]["w"])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)


@pytest.mark.parametrize("how", ["known", "when it runs"])
def test_optimizer_that_differentiates_another_loss_is_refused_where_towers_are_uneven(how):
    replicas = build(lambda x: tf.reduce_mean(x * variable("w")), uneven(how), 3)
    with pytest.raises(ValueError, match=r"OfAnotherLoss.compute_gradients returns gradients that are not of the loss.*in tower "
                                         r"0, 'tower_0/loss.*has to differentiate its argument `loss`"):
        towers.minimize(replicas, OfAnotherLoss())


@pytest.mark.parametrize("num_towers", [1, 2, 3, 49])
def test_even_towers_hand_the_optimizer_their_loss_as_it_is(num_towers):
    handed = []

    class Spy(WithoutGradLoss):
        def compute_gradients(self, loss, var_list=None, **kwargs):
            handed.append((loss, kwargs.get("grad_loss")))
            return super().compute_gradients(loss, var_list)

    devices = ["/cpu:0"] * num_towers
    replicas = towers.TowerBuilder(devices).build(lambda x: tf.reduce_mean(x * variable("w")), (tf.ones([2 * num_towers, 3]),))
    towers.compute_gradients(replicas, Spy())
    assert [(loss is tower.loss, grad_loss) for tower, (loss, grad_loss) in zip(replicas, handed)] == [(True, None)] * num_towers


def test_towers_of_another_graph_are_named():
    with tf.Graph().as_default() as graph:
        replicas = build(lambda x: tf.reduce_mean(x * variable("w")), (X,), 2)
        tower_grads = towers.compute_gradients(replicas, SGD(1.0))
    for call in (lambda: towers.minimize(replicas, SGD(1.0)), lambda: towers.compute_gradients(replicas, SGD(1.0)),
                 lambda: towers.collect_update_ops(replicas), lambda: towers.average_gradients(replicas, tower_grads),
                 lambda: replicas.merged()):
        with pytest.raises(ValueError, match=r": the towers were built in another graph than the default one.*as_default\(\)"):
            call()
        with graph.as_default():
            call()


def test_towers_train_within_a_loop_around_them():
    replicas = build(lambda x: tf.reduce_mean(x * variable("w") ** 2), (X,), 2)
    variable_, = tf.trainable_variables()

    def body(i):
        (gradient, _), = towers.average_gradients(replicas, towers.compute_gradients(replicas, SGD(1.0)), [])
        with tf.control_dependencies([gradient]):
            return i + tf.reduce_sum(gradient)

    total = tf.while_loop(lambda i: i < 1e9, body, [0.0], maximum_iterations=2)
    assert run(total) == pytest.approx(2 * 2 * X.mean(0).sum() / 3, rel=1e-4) and variable_.shape == [3]


class Clipping(Wrapper):
    """Clips what it computes."""

    def compute_gradients(self, *args, **kwargs):
        return [(tf.clip_by_value(gradient, -1, 1), variable) for gradient, variable in
                self.inner.compute_gradients(*args, **kwargs)]


@pytest.mark.parametrize("num_towers", [1, 2])
def test_an_optimizer_that_changes_the_gradients_of_each_tower_is_named(num_towers, recwarn):
    def model(x):
        return tf.reduce_mean(x * tf.get_variable("w", [], tf.float64))

    towers.minimize(build(model, (np.ones(4),), num_towers), Clipping())
    named = [w for w in recwarn if "Clipping computes gradients in a way of its own, and does so in each tower" in str(w.message)]
    assert len(named) == num_towers - 1


@pytest.mark.parametrize("num_towers", [1, 2])
def test_what_rewrites_the_towers_after_they_were_built_is_named(num_towers, recwarn):
    replicas = build(lambda x: tf.reduce_mean(tf.square(x * tf.get_variable("w", [3]), name="square")), (np.ones([4, 3], "f"),),
                     num_towers)
    for tower in replicas:
        square = next(op for op in tower.ops if op.name.endswith("/square"))
        with tf.name_scope("rewriter"):
            rewire(square, 0, tf.tanh(square.inputs[0]))
    towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(0.1))
    named = [w for w in recwarn if "'rewriter/Tanh', which something put in after the towers were built" in str(w.message)]
    assert len(named) == num_towers - 1 and all(w.filename == __file__ for w in named)
