"""Steps of all workers have one number: without it two workers that begin at the same time may wait for each other forever."""
import contextlib
import json
import re

import pytest
import tensorflow.compat.v1 as tf

from tests.processes import run_workers
from tests.support import control_flow_2
from towers.workers.step_numbers import StepNumbers

pytestmark = pytest.mark.xdist_group("workers")


@pytest.mark.laws
def test_no_worker_asks_for_a_number_before_the_first_one_has_drawn():
    results = run_workers(2, "steps")
    for status, output in results:
        assert status == 0, output
    drawn, begun = (json.loads(re.search("^times (.*)$", output, re.MULTILINE).group(1)) for _, output in results)
    of_told, started, _ = drawn.pop("1"), drawn.pop("started"), begun.pop("1")
    assert of_told < started, "Worker 0 served others before it had drawn the number of what they tell."
    assert set(drawn) == set(begun) and len(drawn) == 5  # of two graphs' broadcast and steps, and of the third one's
    for key, time in drawn.items():
        assert begun[key] > time, "The other worker began a step before the first one had drawn its number."


def key_of(fetches, feed_dict=None):
    return StepNumbers.key(tf.get_default_graph(), fetches, feed_dict)


def collective(x, number):
    return tf.raw_ops.CollectiveReduce(input=x, group_size=2, group_key=1, instance_key=number, merge_op="Add", final_op="Id",
                                       subdiv_offsets=[0])


def test_a_step_is_known_by_its_collectives_however_they_are_fetched():
    x = tf.placeholder_with_default([1.0], [1])
    one, other = collective(x, 7), collective(2 * x, 9)
    after = one + 1
    with tf.control_dependencies([other]):
        waiting = tf.no_op("waiting")
    assert key_of(after) == key_of(one) == key_of([{object(): (after,), object(): after}]) != key_of(other)
    assert key_of(waiting) == key_of("waiting") == key_of(tf.IndexedSlices(other, tf.constant([0])))
    assert key_of({object(): after, "all": [waiting]}) == key_of([other, one]) not in (key_of(one), key_of(other))
    assert key_of(x) is None and key_of([]) is None
    assert key_of(after, {one: [1.0]}) is None  # fed, it is not run
    assert key_of([after, "nowhere"]) is None  # the run says so


@pytest.mark.parametrize("flow", [contextlib.suppress, control_flow_2])
def test_a_collective_in_a_loop_is_one_of_the_step(flow):
    with tf.Graph().as_default(), flow():
        _, end = tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, collective(x, 7)), [0, tf.constant([1.0])])
        assert key_of(end) == key_of(collective(tf.constant([1.0]), 7))


@pytest.mark.parametrize("flow", [contextlib.suppress, control_flow_2])
def test_a_collective_in_a_branch_is_not_sure_to_run(flow):
    with tf.Graph().as_default(), flow():
        x, chosen = tf.constant([1.0]), tf.placeholder(tf.bool, [])
        in_branch = tf.cond(chosen, lambda: collective(x, 7), lambda: x)
        _, end = tf.while_loop(lambda i, _: i < 2, lambda i, x: (
            i + 1, tf.cond(chosen, lambda: collective(x, 7), lambda: x)), [0, x])
        assert key_of(in_branch) is None and key_of(end) is None
        assert key_of([in_branch, collective(x, 9)]) == key_of(collective(x, 9))


def test_options_that_were_given_stay():
    numbers = StepNumbers(1, "", None)
    graph, met = tf.get_default_graph(), []
    one = collective(tf.constant([1.0]), 7)
    given = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    options = numbers.options(graph, one, None, given, met.append)
    assert options.trace_level == given.trace_level and options.experimental.collective_graph_key == key_of(one)
    assert numbers.options(graph, [one], {}, None, met.append).experimental == options.experimental
    assert met == [key_of(one)]  # once
    given.experimental.collective_graph_key = 5
    assert numbers.options(graph, one, None, given, met.append) is given
    assert numbers.options(graph, tf.constant(1), None, None, met.append) is None
