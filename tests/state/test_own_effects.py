"""What a tower does by its own data, beside writes that are the same in all towers: sums of examples and a counter, say."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, session, train_by
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(0).randn(7, 3)
SIZES = [[2, 5], [1, 4, 2]]


@pytest.fixture(params=["ref", "resource"])
def resource(request):
    """Runs a test with variables of both kinds."""
    return request.param == "resource"


def variable(name, resource, value=0.0, shape=()):
    return tf.get_variable(name, shape, tf.float64, tf.constant_initializer(value), trainable=name == "w", use_resource=resource)


def after(op, write):
    """Makes a write after an op."""
    with tf.control_dependencies([op]):
        return write()


def if_wanted(step, branch):
    """Takes a branch by what all towers know."""
    return tf.cond(step < 99, branch, tf.no_op)


def read_in_branch(total, step, add, count):
    def branch():
        with tf.control_dependencies([tf.group(add(), count())]):
            return tf.identity(step.read_value())
    return tf.cond(step < 99, branch, lambda: tf.identity(step))


BESIDE = {
    "beside in a branch": lambda total, step, add, count: if_wanted(step, lambda: tf.group(add(), count())),
    "counted after in a branch": lambda total, step, add, count: if_wanted(step, lambda: tf.group(after(add(), count))),
    "counted before in a branch": lambda total, step, add, count: if_wanted(step, lambda: tf.group(after(count(), add))),
    "read in the branch": read_in_branch,
    "two branches": lambda total, step, add, count: after(if_wanted(step, lambda: tf.group(add())),
                                                          lambda: if_wanted(step, lambda: tf.group(count()))),
    "counted after": lambda total, step, add, count: after(add(), count),
    "counted before": lambda total, step, add, count: after(count(), add),
    "counted before and after": lambda total, step, add, count: after(after(count(), add), lambda: tf.assign_add(step, 2.0)),
    "a branch before and one after": lambda total, step, add, count: after(
        after(if_wanted(total, lambda: tf.group(count())), add), lambda: if_wanted(total, lambda: tf.group(count()))),
    "read after": lambda total, step, add, count: after(
        after(add(), lambda: tf.identity(step)), lambda: tf.assign(step, tf.identity(step) + 1.0)),
    "a sum is read": lambda total, step, add, count: after(add(), lambda: tf.assign_add(step, 0.1 * total.read_value())),
}
IN_BRANCHES = {form for form in BESIDE if "branch" in form}


def summing(form, resource, of_all=False):
    """A model that sums its examples and counts its steps, and scales its loss by both."""
    def model(x):
        total, step, w = variable("total", resource), variable("step", resource, 1.0), variable("w", resource, 0.5)
        summed = tf.reduce_sum(tf.stop_gradient(x * w) ** 2)
        summed = towers.all_reduce(summed) if of_all else summed
        done = BESIDE[form](total, step, lambda: tf.assign_add(total, summed), lambda: tf.assign_add(step, 1.0))
        with tf.control_dependencies([done]):
            return tf.reduce_mean((x * w) ** 2) * (1 + total.read_value() / step.read_value())
    return model


@pytest.mark.parametrize("form,sizes,resource", covering(sorted(BESIDE), SIZES, [False, True], one_in=4))
def test_sums_of_own_examples_add_up_beside_a_counter_that_counts_once_and_are_warned_of(form, sizes, resource):
    if form in IN_BRANCHES and tf.control_flow_v2_enabled():
        pytest.skip("a branch of control flow 2 is one op")
    with pytest.warns(UserWarning, match="writes the variable 'total' by"):
        assert_equals_one_batch(summing(form, resource), (X,), len(sizes), sizes)


@pytest.mark.parametrize("form,resource", covering(sorted(BESIDE)[1:] + sorted(BESIDE)[:1], [True, False], one_in=4))
def test_sums_of_all_examples_beside_a_counter_pass_in_silence(form, resource):
    if form in IN_BRANCHES and tf.control_flow_v2_enabled() and not resource:
        pytest.skip("control flow 2 assigns to no ref variable")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equals_one_batch(summing(form, resource, of_all=True), (X,), 2, [2, 5])


def in_a_loop(total, step, add, count):
    return tf.while_loop(lambda i: i < 1, lambda i: after(tf.group(add(), count()), lambda: i + 1), [0])


def in_nested_branches(total, step, add, count):
    return if_wanted(step, lambda: tf.group(if_wanted(step, lambda: tf.group(add(), count()))))


@pytest.mark.parametrize("form", [BESIDE["beside in a branch"], in_a_loop, in_nested_branches])
def test_a_counter_that_cannot_be_told_from_sums_beside_it_is_warned_of_with_them(form, resource, monkeypatch):
    if tf.control_flow_v2_enabled() and not resource:
        pytest.skip("control flow 2 assigns to no ref variable")
    if not tf.control_flow_v2_enabled() and form is BESIDE["beside in a branch"]:
        pytest.skip("a branch of control flow 1 is many ops")
    monkeypatch.setitem(BESIDE, "form", form)
    with pytest.warns(UserWarning, match=r"writes the variable '(total' \(and 'step|step' \(and 'total)'\) by"):
        replicas = build(summing("form", resource), (X,), 3)
    with session() as made:
        made.run(replicas.loss)
        total, step = (made.run(v) for name in ("total", "step") for v in tf.global_variables() if v.op.name == name)
    np.testing.assert_allclose([total, step], [((0.5 * X) ** 2).sum(), 1 + 3], rtol=1e-12)


@pytest.mark.parametrize("form,resource", covering([in_a_loop, in_nested_branches], [False, True]))
def test_sums_of_all_examples_in_loops_and_nested_branches_pass_in_silence(form, resource, monkeypatch):
    if tf.control_flow_v2_enabled() and not resource:
        pytest.skip("control flow 2 assigns to no ref variable")
    monkeypatch.setitem(BESIDE, "form", form)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equals_one_batch(summing("form", resource, of_all=True), (X,), 2, [2, 5])


def test_a_counter_that_is_handed_out_waits_for_the_sums_of_all_towers(resource):
    def model(x):
        total, step = variable("total", resource), variable("step", resource)
        with tf.control_dependencies([tf.assign_add(total, tf.reduce_sum(x))]):
            return {"step": tf.assign_add(step, 1.0)}

    with pytest.warns(UserWarning, match="writes the variable 'total' by"):
        replicas = build(model, (X,), 3)
    for tower in replicas:
        with session() as made:
            assert made.run(tower.outputs["step"]) == 1
            np.testing.assert_allclose(made.run(tf.global_variables()[0]), X.sum(), rtol=1e-12)


def test_an_assertion_on_a_later_towers_data_is_made_before_a_counter_counts(resource):
    def model(x):
        with tf.control_dependencies([tf.assert_less(x, tf.constant(9.0, x.dtype), message="too large")]):
            step = tf.assign_add(variable("step", resource), 1.0)
        with tf.control_dependencies([step]):
            return tf.reduce_mean(x ** 2)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        replicas = build(model, (np.where(np.arange(7) < 5, 1.0, 10.0)[:, None],), 3)
    with session() as made:
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            made.run(replicas[0].loss)
        assert made.run(tf.global_variables()[0]) == 0


def test_a_branch_in_the_update_collection_is_left_to_the_policy(resource):
    if tf.control_flow_v2_enabled() and not resource:
        pytest.skip("control flow 2 assigns to no ref variable")

    def model(x):
        total, step = variable("total", resource), variable("step", resource)
        add, count = (lambda: tf.assign_add(total, tf.reduce_sum(x))), (lambda: tf.assign_add(step, 1.0))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, BESIDE["beside in a branch"](total, step, add, count))
        return tf.reduce_mean((x * variable("w", resource)) ** 2)

    for policy, chosen in [("first", 0), ("last", 2)]:
        with tf.Graph().as_default():
            replicas = build(model, (X,), 3)
            train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops=policy)
            _, _, found = train_by(train_op, replicas.loss, 1)
        np.testing.assert_allclose([found["total"], found["step"]], [np.array_split(X, 3)[chosen].sum(), 1], rtol=1e-12)


def test_what_only_tower_0_reads_before_a_sum_waits_for_no_later_towers_sum(resource):
    def model(x):
        total, step = variable("total", resource), variable("step", resource)
        with towers.may_differ():
            summed = tf.reduce_sum(x) + (step.read_value() if towers.current_tower().is_first else 0)
        with tf.control_dependencies([tf.assign_add(total, summed)]):
            now = step.read_value()
        with tf.control_dependencies([now, tf.assign_add(step, 1.0)]):
            return tf.reduce_mean(x)

    with pytest.warns(UserWarning, match="writes the variable 'total' by"):
        replicas = build(model, (X,), 3)
    with session() as made:
        made.run(replicas.loss)
        np.testing.assert_allclose(made.run(tf.global_variables()), [X.sum(), 1], rtol=1e-12)


def test_a_read_that_all_towers_take_of_tower_0_is_no_twin_of_their_own_reads(resource):
    def model(x):
        center = tf.get_variable("center", [3], tf.float64, tf.ones_initializer(), trainable=False, use_resource=resource)
        y = x * variable("w", resource, 0.5) - center  # by the read that a ref variable is made with
        for _ in range(2):
            moved = 0.1 * (towers.all_reduce(tf.reduce_sum(y, 0)) - center.read_value())
            with tf.control_dependencies([tf.assign_add(center, moved)]):
                y = tf.sin(y) - center.read_value()
        return tf.reduce_mean(y ** 2)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equals_one_batch(model, (X,), 3, [1, 4, 2])
