"""The private TensorFlow functions that towers/graph/private.py calls: each still there, and doing what we need of it."""
import re
from pathlib import Path

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import config
from tensorflow.python.ops import control_flow_util_v2

from benchmarks.record import session_runs_onednn
from tests.support import run
from towers.graph.gradient_hook import with_gradient
from towers.graph.private import (branches_of, called_graph, choose_by, chooses_by, chosen_by, condition_of, control_flow_now,
                                  control_flow_of, forward_op_of, is_deterministic, is_differentiable, is_recorded, not_recorded,
                                  outer_control_flow, rewire, run_after, runs_onednn, set_shape_attribute, take_in,
                                  taken_from_outside, wait_only_for, waiting_for, waits_for_branch_alone, within_control_flow,
                                  without_intermediates)
from towers.graph.walk import ancestors

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(r"\b(?!self\b)\w+\._(update_input|add_control_inputs?|control_outputs|remove_all_control_inputs|set_device|"
                     r"set_attr|[gs]et_control_flow_context|original_op)\b|"
                     r"\.Is(Cond|While)Context|\.(Enter|Exit)\(|\.(loop_exits|outer_context|pivot|pred|branch)\b|"
                     r"tensorflow\.python|tensorflow_core")


def test_update_input_changes_what_an_op_computes():
    x = tf.identity(tf.constant(1.0))
    rewire(x.op, 0, tf.constant(2.0))
    with tf.Session() as session:
        assert session.run(x) == 2.0


def test_update_input_reaches_the_inputs_that_gradients_see():
    a, b = tf.constant(1.0), tf.constant(2.0)
    x = tf.identity(a)
    assert x.op.inputs[0] is a  # fills TensorFlow's cache
    rewire(x.op, 0, b)
    assert tf.gradients(x, [a, b])[0] is None and tf.gradients(x, [a, b])[1] is not None


def test_added_control_inputs_run_first():
    v = tf.get_variable("v", [], initializer=tf.zeros_initializer())
    assign, after = tf.assign(v, 3.0), tf.no_op()
    run_after(after, [assign.op])
    with tf.Session() as session:
        session.run(v.initializer)
        session.run(after)
        assert session.run(v) == 3.0


def test_ops_that_gradients_go_through_are_told_from_those_they_do_not():
    x = tf.constant(1.0)
    with tf.get_default_graph().gradient_override_map({"Identity": "NoSuchGradient"}):
        unregistered = tf.identity(x)
    for op in (tf.sin(x).op, unregistered.op):
        assert is_differentiable(op)
    for op in (tf.stop_gradient(x).op, tf.equal(x, x).op):
        assert not is_differentiable(op)


def test_ops_that_wait_for_another_are_known():
    first = tf.constant(1.0)
    with tf.control_dependencies([first]):
        waiting = tf.no_op()
    other = tf.no_op()
    assert waiting_for(first.op) == [waiting] and not waiting_for(other)
    run_after(other, [first.op])
    assert set(waiting_for(first.op)) == {waiting, other}


def test_an_op_that_is_to_wait_only_for_others_waits_for_them_alone():
    v, w = (tf.get_variable(name, [], initializer=tf.zeros_initializer()) for name in "vw")
    assigns = [tf.assign(v, 3.0).op, tf.assign(w, 3.0).op]
    with tf.control_dependencies(assigns):
        after = tf.no_op()
    wait_only_for(after, assigns[1:])
    assert after.control_inputs == assigns[1:]
    with tf.Session() as session:
        session.run([v.initializer, w.initializer])
        session.run(after)
        assert session.run([v, w]) == [0.0, 3.0]


def test_control_flow_context_is_none_outside_and_seen_inside():
    assert control_flow_now(tf.get_default_graph()) is None
    assert control_flow_of(tf.constant(1.0).op) is None
    seen = []

    def branch():
        seen.append((tf.get_default_graph(), control_flow_now(tf.get_default_graph())))
        return tf.constant(1.0)

    graph = tf.get_default_graph()
    tf.cond(tf.placeholder(tf.bool, []), branch, branch)
    assert all(inside is not graph or flow is not None for inside, flow in seen)


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="control flow 2 has no contexts")
def test_the_result_of_a_loop_belongs_to_what_the_loop_stands_in():
    inside = []

    def body(depth):
        def build(i, y):
            inside.append(y.op)
            if depth == 0:
                inside.append(tf.while_loop(lambda i, _: i < 2, body(1), [tf.constant(0), y])[1].op)
            return i + 1, tf.sin(y)
        return build

    x = tf.placeholder(tf.float32, [])
    result = tf.while_loop(lambda i, _: i < 2, body(0), [tf.constant(0), x])[1]
    outer, inner, inner_result = (control_flow_of(op) for op in inside)
    assert outer_control_flow(inner) is outer and outer_control_flow(outer) is None
    assert control_flow_of(result.op) is None and inner_result is outer and inner is not outer and outer is not None
    assert all(control_flow_of(op) is None for op in tf.gradients(result, x)[0].consumers() + [tf.gradients(result, x)[0].op])


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="control flow 2 has no contexts")
def test_ops_are_added_to_a_loop_from_within_another_and_to_none_from_within_a_loop():
    graph, made = tf.get_default_graph(), []

    def body(i):
        outer = control_flow_now(graph)
        with tf.control_dependencies([i]), within_control_flow(None):
            made.append((tf.constant(1.0).op, None))
        assert control_flow_now(graph) is outer

        def inner(j):
            with within_control_flow(outer):
                made.append((tf.identity(i).op, outer))
            return j + 1

        return tf.while_loop(lambda j: j < 3, inner, [i])

    loop = tf.while_loop(lambda i: i < 3, body, [tf.constant(0)])
    assert len(made) == 2 and all(control_flow_of(op) is flow for op, flow in made) and not made[0][0].control_inputs
    assert run(loop) == 3


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="control flow 2 has no contexts")
def test_the_branch_of_a_cond_and_its_predicate_are_known():
    predicate, made = tf.placeholder(tf.bool, []), {0: [], 1: []}

    def branch(depth):
        def build():
            made[depth].append(tf.identity(1.0))
            return tf.cond(predicate, branch(1), branch(1)) if depth == 0 else tf.constant(1.0)
        return build

    tf.cond(predicate, branch(0), branch(0))
    assert branches_of(predicate.op) == []
    found = [branches_of(tensor.op) for tensor in made[0]]
    assert [[number for _, number in branches] for branches in found] == [[1], [0]]
    assert all(of_branch is predicate or of_branch.op.inputs[0] is predicate for (of_branch, _), in found)
    assert [[number for _, number in branches_of(tensor.op)] for tensor in made[1]] == [[1, 1], [0, 1], [1, 0], [0, 0]]


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="control flow 2 has no contexts")
def test_what_is_made_in_a_branch_and_its_gradient_choose_by_the_predicate_that_they_are_told():
    x, made = tf.constant(3.0), []

    def branch():
        made.append(tf.square(x))
        return made[0]

    y = tf.cond(tf.placeholder_with_default(False, []), branch, lambda: x)
    flow, switches = control_flow_of(made[0].op), [op for op in y.graph.get_operations() if op.type == "Switch"]
    chosen = tf.placeholder_with_default(True, [])
    assert all(chooses_by(flow, switch) for switch in switches) and len(switches) > 1
    for switch in switches:
        rewire(switch, 1, chosen)
        flows = {control_flow_of(op) for op in y.graph.get_operations()} - {None}
        for flow in flows:
            choose_by(flow, chosen)
    with within_control_flow(control_flow_of(made[0].op)):
        again = tf.identity(x + 1)
    assert again.op.inputs[0].op.inputs[0].op.inputs[1] is chosen
    assert run([y, tf.gradients(y, x)[0]]) == [9, 6]


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="control flow 2 has no contexts")
def test_what_a_cond_goes_by_and_what_a_loop_goes_on_by_is_known():
    predicate, made = tf.placeholder(tf.bool, []), []

    def condition(i):
        made.append(i < 3)
        return made[0]

    def turn(i):
        made.append(i)
        return tf.cond(predicate, lambda: i + 1, lambda: i + 2)

    tf.while_loop(condition, turn, [tf.constant(0)])
    assert condition_of(control_flow_of(made[1].op)) is made[0]
    merges = [op for op in tf.get_default_graph().get_operations() if op.type == "Merge"]
    inner, = [op for op in merges if chosen_by(op) is not None]
    sources = ancestors([chosen_by(inner).op])
    assert predicate.op in sources and len(merges) == 2


def test_the_shape_that_an_op_is_told_is_that_of_what_it_makes_of_nothing():
    array = tf.raw_ops.TensorArrayV3(size=0, dtype=tf.float32)
    found = tf.raw_ops.TensorArrayGatherV3(handle=array[0], indices=tf.zeros([0], tf.int32), flow_in=array[1], dtype=tf.float32)
    with pytest.raises(tf.errors.UnimplementedError, match="element shape"):
        run(found)
    again = tf.raw_ops.TensorArrayGatherV3(handle=array[0], indices=tf.zeros([0], tf.int32), flow_in=array[1], dtype=tf.float32)
    set_shape_attribute(again.op, "element_shape", [3, 2])
    assert run(again).shape == (0, 3, 2)


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="control flow 2 has no contexts")
def test_an_op_of_a_branch_that_waits_for_more_than_its_choice_is_known():
    made = []

    def branch():
        first = tf.constant(1.0)  # waits for the choice, as it takes nothing from the branch
        with tf.control_dependencies([first]):
            made.extend([first, tf.constant(2.0)])
        return first

    tf.cond(tf.placeholder(tf.bool, []), branch, lambda: 0.0)
    assert [waits_for_branch_alone(tensor.op) for tensor in made] == [True, False]
    assert [bool(tensor.op.control_inputs) for tensor in made] == [True, True]


def test_what_the_body_of_a_loop_takes_in_is_known():
    x, seen = tf.constant(2.0), []

    def body(i, y):
        def inner():
            taken = take_in(x)
            is_here = taken.graph is tf.get_default_graph()
            seen.extend([is_here, taken_from_outside(taken.op), taken_from_outside((taken + 1.0).op)])
            return taken * y
        return i + 1, tf.cond(i < 5, inner, lambda: y)

    loop = tf.while_loop(lambda i, _: i < 3, body, [0, 1.0])
    is_here, outside, of_a_sum = seen[:3]
    assert of_a_sum is None and outside is (x if tf.control_flow_v2_enabled() else None)
    assert is_here and take_in(x) is x
    with tf.Session() as session:
        assert session.run(loop[1]) == 8.0


def test_the_graphs_of_functions_that_ops_call_are_known_and_made_anew():
    if not tf.control_flow_v2_enabled():
        pytest.skip("of control flow 2")
    x = tf.placeholder_with_default(3.0, [])
    op = tf.cond(x > 2, lambda: x * 5, lambda: x - 1).op.inputs[0].op
    name = op.get_attr("then_branch").name
    graph, other = called_graph(op, name), called_graph(op, name, anew=True)
    assert graph is called_graph(op, name) and other is not graph
    assert len(graph.inputs) == len(other.inputs) == len(op.inputs) - 1
    assert [[each.type for each in found.get_operations()].count("Mul") for found in (graph, other)] == [1, 1]
    with pytest.raises(KeyError):
        called_graph(op, "nothing")


def test_keras_layers_hand_out_nothing_for_gradients_where_they_are_told_not_to():
    if not tf.control_flow_v2_enabled():
        pytest.skip("of control flow 2")
    x = tf.placeholder_with_default(3.0, [])

    def outputs():
        return len(tf.cond(x > 2, lambda: tf.sin(x * 5), lambda: x - 1).op.inputs[0].op.outputs)
    control_flow_util_v2.set_output_all_intermediates(True)
    try:
        assert outputs() > 1
        with without_intermediates():
            assert outputs() == 1
        assert outputs() > 1
    finally:
        control_flow_util_v2.set_output_all_intermediates(None)


def test_ops_of_a_gradient_know_the_op_that_they_are_the_gradient_of():
    x = tf.placeholder(tf.float32, [])
    y = tf.sin(x)
    before = set(tf.get_default_graph().get_operations())
    tf.gradients(y * 2, x)
    made = [op for op in tf.get_default_graph().get_operations() if op not in before]
    assert forward_op_of(y.op) is None
    assert any(op.type == "Cos" and forward_op_of(op) is y.op for op in made)


def test_that_ops_are_to_be_deterministic_is_known(monkeypatch):
    assert not is_deterministic()
    monkeypatch.setenv("TF_DETERMINISTIC_OPS", "1")
    switch = getattr(config, "enable_op_determinism", lambda: None)  # TensorFlow 2 has read the environment already
    switch()
    try:
        assert is_deterministic()
    finally:
        getattr(config, "disable_op_determinism", lambda: None)()


def test_onednn_is_known_without_a_session():
    assert runs_onednn() == session_runs_onednn()


def test_gradient_override_map_reaches_identity_n():
    @tf.RegisterGradient("CanaryTenfold")
    def _tenfold(_, dy, *__):
        return 10 * dy, None

    a = tf.constant(1.0)
    with tf.get_default_graph().gradient_override_map({"IdentityN": "CanaryTenfold"}):
        b, _ = tf.identity_n([a, a])
    with tf.Session() as session:
        assert session.run(tf.gradients(b, a)[0]) == 10.0


def test_a_tape_records_what_it_is_told_and_nothing_else():
    @tf.RegisterGradient("CanaryHundredfold")
    def _hundredfold(op, dy):
        assert op.type == "Sin" and op.inputs[0] is a
        return [100 * dy]

    a = tf.constant(1.0)
    assert not is_recorded()
    with tf.GradientTape(persistent=True) as outer, tf.GradientTape() as tape:
        outer.watch(a)
        tape.watch(a)
        b, = with_gradient("CanaryHundredfold", lambda: [tf.sin(a)], "Sin")
        assert is_recorded()
        with not_recorded():
            assert not is_recorded()
            c = tf.cos(a)
        slope = tape.gradient(b * b, a)  # 200 sin a
    with tf.Session() as session:
        assert session.run([slope, outer.gradient(slope, a)]) == session.run([200 * b, 200 * tf.constant(100.0)])
    assert outer.gradient(c, a) is None


@pytest.mark.parametrize("package", ["towers", "tf_syncbn", "examples", "benchmarks"])
def test_private_tensorflow_is_called_in_one_file_alone(package):
    for path in (ROOT / package).rglob("*.py"):
        if path != ROOT / "towers" / "graph" / "private.py":
            assert not PRIVATE.search(path.read_text()), path
