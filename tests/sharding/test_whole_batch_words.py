"""What `towers.whole_batch` says: where towers meet, what is left alone, and what is refused, by which words."""
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, run
from towers.sharding import Meeting
from towers.sharding.rules import RULES

RNG = np.random.RandomState(5)
X, LABELS = RNG.randn(9, 4) + 0.3, np.array([1, 0, 2, 1, 0, 0, 2, 2, 1])
SIZES = [3, 1, 5]
KNOWN = pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])


def parts(*arrays, known=True):
    """Returns arrays, or tensors of unknown sizes, divided among towers."""
    ends = np.cumsum([0] + SIZES)
    return towers.PerTower([tuple(
        array[a:b] if known else tf.placeholder_with_default(array[a:b], (None,) + array.shape[1:]) for array in arrays)
        for a, b in zip(ends, ends[1:])])


def centred_and_masked(x, labels):
    """Statistics in one scope, and a masked mean in another."""
    with tf.name_scope("norm"):
        y = x - tf.reduce_mean(x, 0)
    with tf.name_scope("loss"):
        mask = tf.cast(labels >= 0, tf.float64)
        largest = tf.identity(x[:, 0] / tf.reduce_max(x[:, 0]))
        loss = tf.reduce_sum(mask * x[:, 0] ** 2) / tf.reduce_sum(mask)
    return {"loss": loss, "y": y, "largest": largest}


# `only`.

@KNOWN
@pytest.mark.parametrize("only", ["^norm", re.compile("norm"), lambda scope: scope.split("/")[0] == "norm"],
                         ids=["pattern", "compiled", "function"])
def test_what_is_not_chosen_stays_each_towers_own(only, known):
    whole = towers.whole_batch(centred_and_masked, only)
    replicas = build(whole, parts(X, LABELS, known=known), 3)
    outputs = run([tower.outputs for tower in replicas])
    begin = 0
    for found, size in zip(outputs, SIZES):
        own = X[begin:begin + size]
        np.testing.assert_allclose(found["y"], own - X.mean(0), rtol=1e-9)
        np.testing.assert_allclose(found["largest"], own[:, 0] / own[:, 0].max(), rtol=1e-9)
        np.testing.assert_allclose(found["loss"], np.mean(own[:, 0] ** 2), rtol=1e-9)
        begin += size
    assert {meeting.scope.split("/")[0] for meeting in whole.meetings if meeting.conversion != "rows"} == {"norm"}


@KNOWN
def test_what_is_left_alone_is_averaged_where_it_meets_what_is_chosen(known):
    def model(x, labels):
        with tf.name_scope("norm"):
            y = x - tf.reduce_mean(x, 0)
            share = tf.reduce_sum(x[:, 0]) / tf.reduce_sum(x[:, 1] ** 2)
        with tf.name_scope("loss"):
            return {"loss": tf.reduce_sum(y ** 4 * share) / tf.reduce_sum(y ** 2), "share": share, "y": y,
                    "places": tf.argmax(x[:, 1] + share)}
    replicas = build(towers.whole_batch(model, "^loss"), parts(X, LABELS, known=known), 3)
    own = np.split(X, [3, 4])
    y = np.concatenate([part - part.mean(0) for part in own])
    shares = np.repeat([part[:, 0].sum() / (part[:, 1] ** 2).sum() for part in own], SIZES)
    found, loss = run([replicas.merged(), replicas.loss])
    np.testing.assert_allclose(found["y"], y, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found["share"], shares.mean(), rtol=1e-9)
    np.testing.assert_allclose([loss, found["loss"]], np.sum(y ** 4) * shares.mean() / np.sum(y ** 2), rtol=1e-9)
    assert found["places"] == X[:, 1].argmax()


def test_what_is_left_alone_and_is_no_average_is_nothing_of_the_whole_batch():
    def model(x):
        with tf.name_scope("norm"):
            place = tf.argmax(x[:, 0])
        with tf.name_scope("loss"):
            return tf.reduce_mean(tf.gather(tf.ones([20], tf.float64), place) * x)
    with pytest.raises(ValueError, match="computed of 'tower_0/norm/ArgMax.*', which each tower has for itself, is nothing"):
        build(towers.whole_batch(model, "^loss"), parts(X), 3)


@pytest.mark.parametrize("only,error,words", [(3, TypeError, "has to be a pattern, or a function of a scope, not 3"),
                                              ("(", ValueError, "`only` is no regular expression: '\\('")])
def test_what_chooses_nothing_is_refused(only, error, words):
    with pytest.raises(error, match=words):
        towers.whole_batch(centred_and_masked, only)


def test_a_model_function_that_is_none_is_refused():
    with pytest.raises(TypeError, match="has to be a model function, not 3"):
        towers.whole_batch(3)


def test_a_model_function_keeps_its_name_and_is_called_as_it_is_without_towers():
    whole = towers.whole_batch(centred_and_masked)
    assert whole.__name__ == "centred_and_masked" and whole.__doc__ == centred_and_masked.__doc__ and whole.meetings == []
    graph = tf.get_default_graph()
    whole(tf.constant(X), tf.constant(LABELS))
    count = len(graph.get_operations())
    centred_and_masked(tf.constant(X), tf.constant(LABELS))
    assert len(graph.get_operations()) == 2 * count
    build(whole, (X, LABELS), 1)
    assert whole.meetings == [] and "PlaceholderWithDefault" not in {op.type for op in graph.get_operations()}


# Meetings.

@KNOWN
def test_meetings_say_where_and_what_for_and_how_many_bytes(known):
    def model(x, labels):
        with tf.name_scope("a"):
            mean = tf.reduce_mean(x, 0)
        with tf.name_scope("b"):
            order = tf.argsort(x[:, 0] - mean[0]) if hasattr(tf, "argsort") else tf.nn.top_k(x[:, 0], 9)[1]
            share = tf.random_uniform([], dtype=tf.float64)
        return {"order": order, "share": share, "y": x - mean}

    whole = towers.whole_batch(model)
    build(whole, parts(X, LABELS, known=known), 3)
    assert all(type(each) is Meeting for each in whole.meetings)
    found = {each.conversion: each for each in whole.meetings}
    assert set(found) == {"sum", "gather", "first"} | ({"rows"} if not known else set())
    assert found["sum"] == ("a/Mean", "Mean", "sum", tf.TensorShape([4]), 32)
    assert found["gather"].scope.startswith("b") and found["gather"].shape.rank == 1
    assert found["gather"].bytes == (3 * 8 if known else None)
    assert found["first"] == ("b/random_uniform/RandomUniform", "RandomUniform", "first", tf.TensorShape([]), 8)
    if not known:
        assert found["rows"].bytes == 4


@KNOWN
def test_towers_meet_once_about_a_sum_that_several_results_are_computed_of(known):
    def model(x):
        total = tf.reduce_sum(tf.tanh(x), 0)
        return {"y": tf.sin(2.0 * total), "z": tf.cos(3.0 * total)}

    whole = towers.whole_batch(model)
    found = run(build(whole, parts(X, known=known), 3)[0].outputs)
    assert [(meeting.op, meeting.conversion) for meeting in whole.meetings] == [("Sum", "sum")]
    total = np.tanh(X).sum(0)
    for key, expected in (("y", np.sin(2 * total)), ("z", np.cos(3 * total))):
        np.testing.assert_allclose(found[key], expected, rtol=1e-12)


def test_meetings_are_logged_once_as_a_table(monkeypatch):
    said = []
    monkeypatch.setattr(tf.logging, "info", lambda message, *args: said.append(message % args if args else message))
    whole = towers.whole_batch(centred_and_masked)
    build(whole, parts(X, LABELS), 3)
    build(towers.whole_batch(lambda x: tf.reduce_mean(x)), parts(X), 3)
    tables = [message for message in said if message.startswith("towers.whole_batch: the towers")]
    assert len(tables) == 2 and tables[1] == "towers.whole_batch: the towers need not meet."
    first, *lines = tables[0].split("\n")
    assert "meet %d times a step" % len(whole.meetings) in first and len(lines) == len(whole.meetings)
    for line, meeting in zip(lines, whole.meetings):
        assert line.split()[:3] == [meeting.scope, meeting.op, meeting.conversion]


# What is refused.

def refused(model_fn, words, batch=None, error=ValueError, known=True):
    with pytest.raises(error, match=words):
        build(towers.whole_batch(model_fn), parts(X, known=known) if batch is None else batch, 3)


def by_numpy(x, stateful=True):
    y = tf.py_func(lambda rows: rows - rows.max(0), [x], tf.float64, stateful=stateful)
    y.set_shape(x.shape)
    return {"y": y}


@KNOWN
def test_an_op_without_a_rule_is_refused_by_name_with_the_mend(known):
    refused(by_numpy, "the op 'tower_0/PyFunc' is a PyFunc, for which there is no rule.*sharded along axis 0.*"
            "@towers.placement_rule\\('PyFunc'\\)", known=known)


@KNOWN
@pytest.mark.parametrize("is_whole", [True, False])
def test_an_op_with_a_users_rule_computes_as_the_rule_says(is_whole, known, monkeypatch):
    monkeypatch.delitem(RULES, "PyFunc", raising=False)
    towers.placement_rule("PyFunc")(lambda node: node.replicated() if is_whole else node.each_row())
    try:
        replicas = build(towers.whole_batch(by_numpy), parts(X, known=known), 3, alike=False)
        found = run([tower.outputs["y"] for tower in replicas])
    finally:
        RULES.pop("PyFunc")
    expected = [rows - (X if is_whole else rows).max(0) for rows in np.split(X, [3, 4])]
    if is_whole:
        expected = [X - X.max(0)] * 3
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@KNOWN
def test_ops_of_each_example_need_no_rule(known):
    def model(x):
        with towers.each_example():
            y = tf.py_func(lambda rows: np.sort(rows, 1), [x], tf.float64)
            y.set_shape(x.shape)
        return {"y": y, "centred": y - tf.reduce_mean(y, 0)}
    found = run(build(towers.whole_batch(model), parts(X, known=known), 3, alike=False).merged())
    np.testing.assert_array_equal(found["y"], np.sort(X, 1))
    np.testing.assert_allclose(found["centred"], np.sort(X, 1) - np.sort(X, 1).mean(0), rtol=1e-9)


@KNOWN
def test_means_reach_ops_of_each_example_whole(known):
    def model(x):
        mean = tf.reduce_mean(x, 0)
        with towers.each_example():
            y = tf.py_func(lambda rows, mean: rows - mean, [x, mean], tf.float64)
        y.set_shape(x.shape)
        return {"y": y}
    found = run(build(towers.whole_batch(model), parts(X, known=known), 3, alike=False).merged())
    np.testing.assert_allclose(found["y"], X - X.mean(0), rtol=1e-12)


def test_examples_along_another_axis_are_none_to_an_op_of_each_example():
    def model(x):
        x = tf.transpose(x)
        with towers.each_example():
            y = tf.py_func(lambda rows: np.sin(rows), [x], tf.float64)
        y.set_shape(x.shape)
        return {"y": y}
    refused(model, "'tower_0/.*', made under towers.each_example\\(\\), takes 'tower_0/.*', which is sharded along axis 1")


def test_a_users_rule_that_returns_nothing_is_refused_by_its_name(monkeypatch):
    monkeypatch.delitem(RULES, "PyFunc", raising=False)
    towers.placement_rule("PyFunc")(lambda node: None)
    try:
        with pytest.raises(TypeError, match="The placement rule of 'PyFunc' has to return .* for 'tower_0/.*' it returned None"):
            build(towers.whole_batch(by_numpy), parts(X), 3, alike=False)
    finally:
        RULES.pop("PyFunc")


def test_a_scalar_is_no_example():
    def model(x):
        with towers.each_example():
            return {"y": tf.reduce_sum(x)}
    refused(model, "'tower_0/.*' is a scalar, made under towers.each_example\\(\\)")


@KNOWN
def test_what_a_model_exchanges_itself_comes_back_as_to_one_tower(known):
    def model(x):
        tower = towers.current_tower()
        assert tower is None or tower.num_towers == 1
        total = towers.all_reduce(tf.reduce_sum(x, 0), "sum")
        return {"total": total, "y": x - towers.all_reduce(tf.reduce_mean(x, 0), "mean"),
                "pairs": tf.matmul(x, towers.all_gather(x), transpose_b=True)}
    whole = towers.whole_batch(model)
    found = run(build(whole, parts(X, known=known), 3).merged())
    for name, value in {"total": X.sum(0), "y": X - X.mean(0), "pairs": np.matmul(X, X.T)}.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_python_loop_over_pairs_of_examples_is_refused():
    refused(lambda x: tf.add_n([tf.reduce_sum(a * b) for a in tf.unstack(x) for b in tf.unstack(x)]),
            "makes other ops of a batch of another size: 'tower_0/.*Hand the batch in with an unknown size")


def test_another_structure_for_the_whole_batch_is_refused():
    refused(lambda x: {"rows": [x[i] for i in range(int(x.shape[0]))]}, "returns another structure for the whole batch")


def test_a_model_that_the_whole_batch_is_too_large_for_is_refused():
    def model(x):
        if int(x.shape[0]) > 5:
            raise RuntimeError("Too many.")
        return tf.reduce_mean(x)
    refused(model, "can't be called with the whole batch, as one tower calls it: Too many.")


def test_more_examples_than_a_known_tower_has_are_refused_with_the_mend():
    def model(x):
        return {"best": tf.nn.top_k(x[:, 0], 4).values}
    refused(model, "can't be called with the examples of tower 0: .*k = 4 but is 3.*hand the batch in with an unknown size")
    found = run(build(towers.whole_batch(model), parts(X, known=False), 3).merged())
    np.testing.assert_array_equal(found["best"], np.sort(X[:, 0])[:-5:-1])


def test_what_small_batches_alone_have_is_refused():
    def model(x):
        if int(x.shape[0]) < 6:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.reduce_max(x, name="largest"))
        return tf.reduce_mean(x)
    refused(model, "makes 'tower_0/.*largest.*' in a tower, and nothing like it for the whole batch")


def test_parts_of_the_batch_of_unknown_ranks_are_refused():
    def dense():
        return tf.placeholder_with_default(X[:3], None)

    def sparse():
        return tf.SparseTensor(tf.placeholder(tf.int64, [None, None]), tf.placeholder(tf.float64, [None]),
                               tf.placeholder(tf.int64, [None]))
    refused(tf.reduce_mean, "a part of the batch, 'Placeholder.*', has an unknown rank: give it a shape",
            towers.PerTower([(dense(),) for _ in range(3)]))
    refused(lambda x: tf.reduce_mean(tf.sparse.to_dense(x)), "a sparse part of the batch, .* has an unknown rank",
            towers.PerTower([(sparse(),) for _ in range(3)]))


def test_a_ragged_part_of_the_batch_is_refused():
    ragged = [tf.RaggedTensor.from_row_lengths(tf.ones([3]), [1, 2]) for _ in range(3)]
    refused(lambda x: tf.reduce_mean(x.to_tensor()), "a part of the batch is ragged.*each row's length", towers.PerTower(ragged))


@pytest.mark.parametrize("make_batch", [
    lambda begin, end: X[begin:end], lambda begin, end: tf.constant(X[begin:end]),
    lambda begin, end: tf.placeholder_with_default(X[begin:end], [None, 4])], ids=["array", "constant", "unknown"])
def test_a_batch_that_a_function_makes_shows_no_size_of_its_own(make_batch):
    ends = np.cumsum([0] + SIZES)

    def model(x):
        assert x.shape.as_list() == [None, 4]
        return {"sum": tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float64), "y": x - tf.reduce_mean(x, 0)}
    replicas = build(towers.whole_batch(model), lambda tower: make_batch(ends[tower.index], ends[tower.index + 1]), 3)
    found = run(replicas.merged())
    np.testing.assert_allclose(found["sum"], X.sum() / 9, rtol=1e-12)
    np.testing.assert_allclose(found["y"], X - X.mean(0), rtol=1e-9)


def test_parts_handed_in_by_keyword_are_the_batch():
    whole = towers.whole_batch(lambda x, labels, scale: {"y": scale * (x - tf.reduce_mean(x, 0)), "labels": labels})
    found = run(build(lambda x, labels: whole(x, labels=labels, scale=2.0), parts(X, LABELS), 3).merged())
    np.testing.assert_allclose(found["y"], 2 * (X - X.mean(0)), rtol=1e-9)
    np.testing.assert_array_equal(found["labels"], LABELS)


def test_a_batch_that_is_sparse_alone_is_counted():
    rows = np.where(X > 0.3, X, 0.0)
    indices = np.argwhere(rows)

    def model(x):
        x = tf.reshape(tf.sparse.to_dense(x), [-1, 4])
        weights = tf.abs(x[:, 1])
        return {"loss": tf.reduce_sum(weights * x[:, 0]) / tf.reduce_sum(weights), "mean": tf.reduce_mean(x ** 2)}
    replicas = build(towers.whole_batch(model), tf.SparseTensor(indices, rows[tuple(indices.T)], rows.shape), 2)
    loss, found = run([replicas.loss, replicas.merged()])
    expected = np.sum(np.abs(rows[:, 1]) * rows[:, 0]) / np.abs(rows[:, 1]).sum()
    np.testing.assert_allclose([loss, found["loss"], found["mean"]], [expected, expected, np.mean(rows ** 2)], rtol=1e-9)


def test_towers_that_would_meet_otherwise_are_refused():
    def model(x):
        tower = towers.current_tower()
        return {"y": x - (tf.reduce_mean(x, 0) if tower is None or tower.index != 1 else tf.reduce_max(x, 0))}
    refused(model, "towers would meet otherwise than tower 0: in tower 0 Sub 'sub' .*, in tower 1 Max 'Max' takes its input 0",
            error=towers.TowerMismatchError, known=False)


def test_data_from_outside_without_examples_is_refused():
    def model(x):
        queue = tf.FIFOQueue(10, [tf.float64], [[]])
        return tf.reduce_mean(x * queue.dequeue())
    refused(model, "takes 'tower_0/.*' from outside, and whether it holds examples is not to be told")


@KNOWN
def test_a_draw_in_a_loop_is_refused(known):
    def model(x):
        def turn(i, y):
            return i + 1, y + tf.random_uniform([], dtype=tf.float64)
        return {"y": tf.while_loop(lambda i, y: i < 3, turn, [0, x])[1]}
    refused(model, "towers would have to meet about '.*andom.*", known=known)


def test_memory_as_it_is_is_refused():
    refused(lambda x: tf.raw_ops.Empty(shape=tf.shape(x), dtype=tf.float64), "'tower_0/.*' leaves memory as it is",
            known=False)


def test_a_synchronized_layer_of_what_is_no_examples_is_refused():
    refused(lambda x: tf.reduce_mean(tf_syncbn.sync_batch_norm(tf.matmul(x, x, transpose_a=True), training=True)),
            "the input of a synchronized layer, is a sum's parts, and not the tower's examples", known=False)


def test_lists_of_examples_are_refused_where_they_are_no_ones():
    def joined(x):
        return {"y": tf.TensorArray(tf.float64, 2, infer_shape=False).write(0, x).write(1, 2 * x).concat()}

    def mixed(x):
        return {"y": tf.TensorArray(tf.float64, 2, infer_shape=False).write(0, x).write(1, tf.ones([3, 4], tf.float64)).read(0)}
    refused(joined, "joins a list of the towers' own examples along their axis: stack it, and reshape", known=False)
    refused(mixed, "writes what is alike in all towers into a list of the towers' own examples", known=False)


def test_a_list_is_no_output():
    refused(lambda x: {"y": tf.TensorArray(tf.float64, 2).write(0, x).flow}, "returns a list, '.*': stack it", known=False)
