"""Many steps in one `session.run` are, to the last bit, so many calls of `session.run`."""
import time
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, run, session, train_plainly

SGD = tf.train.GradientDescentOptimizer
RNG = np.random.RandomState(0)
X, LABELS = RNG.randn(50, 6, 6, 3).astype(np.float32), RNG.randint(0, 4, 50)
OPTIMIZERS = {"adam": tf.train.AdamOptimizer, "momentum": lambda rate: tf.train.MomentumOptimizer(rate, 0.9),
              "adagrad": tf.train.AdagradOptimizer, "rmsprop": tf.train.RMSPropOptimizer}


def batches(batch_size):
    """Returns the tensors of the next batch of shuffled images and labels; the last one of an epoch is smaller."""
    data = tf.data.Dataset.from_tensor_slices((X, LABELS)).shuffle(50, seed=5).batch(batch_size).repeat()
    return tf.data.make_one_shot_iterator(data).get_next()


def next_number(end=1000):
    return tf.data.make_one_shot_iterator(tf.data.Dataset.range(end)).get_next()


def counter(name="counter"):
    return tf.get_variable(name, [], tf.int64, tf.zeros_initializer(), trainable=False)


def dense_table():
    """Returns a table, state that is made of inputs."""
    return tf.raw_ops.MutableDenseHashTableV2(empty_key=tf.constant(-1, tf.int64), deleted_key=tf.constant(-2, tf.int64),
                                              value_dtype=tf.int64, value_shape=[])


def logits_of(x):
    weights = tf.Variable(tf.random_normal([4, 4], seed=2), name="weights")
    return tf.matmul(tf.reduce_mean(tf.nn.relu(x), [1, 2]), weights)


def cross_entropy(labels, logits):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def convolution(images):
    kernel = tf.get_variable("kernel", [3, 3, 3, 4], initializer=tf.glorot_uniform_initializer(seed=1))
    return tf.nn.conv2d(images, kernel, [1, 2, 2, 1], "SAME")


def synced(images, labels):
    x = tf_syncbn.sync_batch_norm(convolution(images), momentum=0.9)
    return cross_entropy(labels, logits_of(tf.nn.dropout(x, rate=0.3)))


@tf_syncbn.convert_model
def converted(images, labels):
    scale, offset = (tf.get_variable(name, [4], initializer=tf.ones_initializer()) for name in ("scale", "offset"))
    return cross_entropy(labels, logits_of(tf.nn.fused_batch_norm(convolution(images), scale, offset)[0]))


def with_control_flow(images, labels):
    """A loop that is differentiated, with arrays in it, and a branch that changes from step to step."""
    weights = tf.get_variable("w", [9, 6], initializer=tf.glorot_uniform_initializer(seed=1))
    rows = tf.transpose(tf.reduce_mean(images, 2), [1, 0, 2])
    given, found = tf.TensorArray(tf.float32, 6).unstack(rows), tf.TensorArray(tf.float32, 6)

    def body(i, state, found):
        state = tf.tanh(tf.matmul(tf.concat([given.read(i), state], 1), weights))
        return i + 1, state, found.write(i, state)

    _, state, found = tf.while_loop(lambda i, *_: i < 6, body, [0, tf.zeros([tf.shape(images)[0], 6]), found])
    is_even = tf.equal(tf.train.get_or_create_global_step() % 2, 0)
    state = tf.cond(is_even, lambda: state * 2, lambda: tf.matmul(state, weights[:6]))
    return cross_entropy(labels, state) + tf.reduce_mean(found.stack() ** 2)


def training(model=synced, num_towers=2, optimizer=tf.train.AdamOptimizer):
    """Returns a step function with all that trainings have: a shuffled input, a rate that falls, a global step."""
    def step():
        global_step = tf.train.get_or_create_global_step()
        replicas = build(model, batches(7), num_towers)
        rate = tf.train.exponential_decay(0.1, global_step, 2, 0.7)
        train_op = towers.minimize(replicas, optimizer(rate), global_step=global_step)
        return {"loss": replicas.loss, "rate": rate, "train_op": train_op}
    return step


def run_apart(step_fn, num_steps, feed_dict=None):
    """Runs a step by calls of session.run, without our loop: returns each call's results, and variables by name."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        fetches = step_fn()
        with session() as made:
            results = [made.run(fetches, feed_dict) for _ in range(num_steps)]
            return results, made.run({v.op.name: v for v in tf.global_variables()})


def run_together(step_fn, num_steps, feed_dict=None, calls=1):
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        fetches = towers.repeat(step_fn, num_steps)
        with session() as made:
            results = [made.run(fetches, feed_dict) for _ in range(calls)]
            return results, made.run({v.op.name: v for v in tf.global_variables()})


def assert_same_variables(ours, expected):
    assert list(ours) == list(expected)
    for name in expected:
        np.testing.assert_array_equal(ours[name], expected[name], err_msg=name)


def assert_same(step_fn, num_steps=6, calls=1, feed_dict=None):
    """Asserts that results and variables are the very bits of as many calls of session.run; returns the first call's results."""
    apart, expected = run_apart(step_fn, num_steps * calls, feed_dict)
    together, ours = run_together(step_fn, num_steps, feed_dict, calls)
    assert_same_variables(ours, expected)
    of_steps, of_calls = [tf.nest.flatten(results) for results in apart], [tf.nest.flatten(results) for results in together]
    for number, leaf in enumerate(of_steps[0]):
        if leaf is not None:  # of an operation
            joined = np.concatenate([results[number] for results in of_calls])
            np.testing.assert_array_equal(joined, [results[number] for results in of_steps])
    return together[0]


@pytest.mark.parametrize("num_towers,optimizer", [(3, "momentum"), (1, "rmsprop")] + [
    pytest.param(*case, marks=pytest.mark.sweep) for case in [(1, "adam"), (2, "adam"), (3, "adam"), (2, "adagrad")]])
def test_training_is_that_of_separate_calls_to_the_bit(num_towers, optimizer):
    results = assert_same(training(num_towers=num_towers, optimizer=OPTIMIZERS[optimizer]), num_steps=9)  # an epoch has 8 batches
    assert results["loss"].shape == (9,) and len(set(results["loss"])) == 9
    np.testing.assert_allclose(results["rate"], 0.1 * 0.7 ** (np.arange(9) / 2), rtol=1e-5)


@pytest.mark.laws
@pytest.mark.parametrize("model", [converted, with_control_flow])
def test_converted_models_and_control_flow_within_the_step_train_as_in_separate_calls(model):
    assert_same(training(model, num_towers=3))


@pytest.mark.laws
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("momentum", marks=pytest.mark.sweep)])
def test_transforms_that_hold_steps_back_repeat_as_in_separate_calls(optimizer):
    """A step that overflows, one in two that trains, a part that is frozen; input as a data set, gradients in packs."""
    def step():
        global_step, calls = tf.train.get_or_create_global_step(), counter("calls")

        def model(images, labels):
            with tf.control_dependencies([tf.assign_add(calls, 1)] if towers.current_tower().is_first else []):
                overflow = tf.where_v2(tf.equal(calls.read_value(), 3), np.float32(1e38), np.float32(1))
            return synced(images, labels) * overflow

        data = tf.data.Dataset.from_tensor_slices((X, LABELS)).shuffle(50, seed=5).batch(7).repeat()
        replicas = build(model, data, 2, alike=False)
        mask = np.arange(36).reshape([3, 3, 1, 4]) % 2 > 0
        train_op = towers.minimize(replicas, OPTIMIZERS[optimizer](0.1), global_step=global_step, pack=True, transforms=[
            towers.scale_loss("dynamic"), towers.accumulate(2), towers.mask_gradients({"kernel": mask})])
        return {"train_op": train_op, "loss": replicas.loss}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accumulate names the synced layer, and the counter is named
        assert_same(step, num_steps=9)


@pytest.mark.sweep
def test_many_steps_train_as_many_separate_calls():
    assert_same(training(num_towers=3, optimizer=OPTIMIZERS["momentum"]), num_steps=50)


def test_a_second_call_goes_on_where_the_first_one_ended():
    assert_same(training(), num_steps=3, calls=3)


@pytest.mark.parametrize("sizes", [pytest.param([9], marks=pytest.mark.sweep), [1, 6, 2]])
def test_towers_in_a_loop_train_as_one_tower_on_the_whole_batch(sizes):
    x = np.random.RandomState(0).randn(9, 3)

    def model(x):
        weights = tf.get_variable("weights", [3, 2], tf.float64, tf.glorot_uniform_initializer(seed=1))
        return tf.reduce_mean(tf.square(tf.sin(tf_syncbn.sync_batch_norm(tf.matmul(x, weights), training=True)) - x[:, :2]))

    def step():
        replicas = build(model, towers.PerTower([(part,) for part in np.split(x, np.cumsum(sizes)[:-1])]), len(sizes))
        return replicas.loss, towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))

    with tf.Graph().as_default():
        tf.set_random_seed(3)
        losses, _, after = train_plainly(model(tf.constant(x)), tf.train.MomentumOptimizer(0.1, 0.9), 5)
    ((ours, _),), variables = run_together(step, 5)
    np.testing.assert_allclose(ours, losses, rtol=1e-9)
    assert set(variables) == set(after)
    for name in after:
        np.testing.assert_allclose(variables[name], after[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.laws
def test_checkpoints_of_loops_load_where_there_is_none_and_the_other_way_round(tmp_path):
    graphs, savers, found = [tf.Graph(), tf.Graph()], [], []
    for number, (graph, repeat) in enumerate(zip(graphs, (lambda step_fn: towers.repeat(step_fn, 2), lambda step_fn: step_fn()))):
        with graph.as_default():
            fetches = repeat(training())
            savers.append(tf.train.Saver())
            with session() as made:
                made.run(fetches)
                savers[-1].save(made, str(tmp_path / str(number)))
                found.append(made.run({v.op.name: v for v in tf.global_variables()}))
    for number, graph in enumerate(graphs):
        with graph.as_default(), session() as made:
            savers[number].restore(made, str(tmp_path / str(1 - number)))
            assert_same_variables(made.run({v.op.name: v for v in tf.global_variables()}), found[1 - number])


def test_a_step_begins_when_the_one_before_has_finished_on_all_devices():
    events = []

    def waiting(device, seconds):
        def wait():
            events.append(device)
            time.sleep(seconds)
            events.append(device)
            return np.float32(0)
        with tf.device(device):
            return tf.identity(tf.py_func(wait, [], tf.float32))

    run_together(lambda: [waiting(device, 0.004 * index) for index, device in enumerate(cpus(3))], 10)
    assert len(events) == 60
    for first in range(0, 60, 6):
        assert sorted(events[first:first + 6]) == sorted(2 * cpus(3))


def test_a_step_takes_one_element_of_the_data_and_the_loop_no_more():
    iterator = tf.data.make_one_shot_iterator(tf.data.Dataset.range(1000))
    number, afterwards = iterator.get_next(), iterator.get_next()
    numbers = towers.repeat(lambda: number, 7)  # made before: it is taken anew in each step all the same
    with session() as made:
        assert list(made.run(numbers)) == list(range(7)) and made.run(afterwards) == 7
        assert list(made.run(numbers)) == list(range(8, 15)) and made.run(afterwards) == 15


@pytest.mark.laws
def test_what_was_trained_when_the_data_ends_stays_trained():
    def step():
        data = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(10)).get_next()
        global_step = tf.train.get_or_create_global_step()
        return towers.minimize(build(synced, data, 3), tf.train.AdamOptimizer(), global_step=global_step)

    _, expected = run_apart(step, 5)
    tf.set_random_seed(3)
    train_op = towers.repeat(step, 8)
    with session() as made:
        with pytest.raises(tf.errors.OutOfRangeError):
            made.run(train_op)
        assert_same_variables(made.run({v.op.name: v for v in tf.global_variables()}), expected)
    assert expected["global_step"] == 5


def test_state_of_any_kind_is_the_one_that_it_is_without_the_loop():
    def step():
        number, table = tf.assign_add(counter(), 1), dense_table()
        found = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=number - 1, default_value=tf.constant(-1, tf.int64))
        queue = tf.FIFOQueue(100, tf.int64, shapes=[[]])
        with tf.control_dependencies([found]):
            inserted = tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=[number], values=[10 * number])
        with tf.control_dependencies([inserted, queue.enqueue_many([[number, number]])]):
            temporary = tf.raw_ops.TemporaryVariable(shape=[], dtype=tf.int64, var_name="temporary")
        taken = tf.raw_ops.DestroyTemporaryVariable(ref=tf.assign(temporary, queue.dequeue()), var_name="temporary")
        return {"found": found, "taken": taken, "square": tf.py_func(lambda n: n * n, [number], tf.int64),
                "words": tf.as_string(number), "draw": tf.random_normal([2])}

    results = assert_same(step, num_steps=4, calls=2)
    np.testing.assert_array_equal(results["found"], [-1, 10, 20, 30])
    np.testing.assert_array_equal(results["taken"], [1, 1, 2, 2])
    np.testing.assert_array_equal(results["square"], [1, 4, 9, 16])
    assert list(results["words"]) == [b"1", b"2", b"3", b"4"] and len(np.unique(results["draw"])) == 8


def test_results_that_are_variables_or_assignments_are_those_of_their_own_step():
    def step():
        count = tf.assign_add(counter(), 1)
        vector = tf.get_variable("vector", [2], initializer=tf.zeros_initializer())
        word = tf.get_variable("word", [], tf.string, initializer=tf.constant_initializer("a"), trainable=False)
        with tf.control_dependencies([tf.assign(word, tf.strings.join([word.read_value(), "b"]))]):
            return {"count": count, "vector": tf.assign_add(vector, [1.0, 2.0]), "read": word.read_value()}

    results = assert_same(step, num_steps=3)
    assert list(results["count"]) == [1, 2, 3] and list(results["read"]) == [b"ab", b"abb", b"abbb"]
    np.testing.assert_array_equal(results["vector"], [[1, 2], [2, 4], [3, 6]])


def test_a_table_that_is_filled_outside_of_the_loop_is_read_in_it():
    table, number = dense_table(), next_number()
    keys = tf.range(3, dtype=tf.int64)
    fill = tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=keys, values=keys + 5)
    found = towers.repeat(lambda: tf.raw_ops.LookupTableFindV2(table_handle=table, keys=number, default_value=number), 3)
    with session() as made:
        made.run(fill)
        np.testing.assert_array_equal(made.run(found), [5, 6, 7])


def test_functions_that_a_step_calls_write_variables_in_it():
    def step():
        variable = tf.get_variable("v", [], initializer=tf.ones_initializer(), use_resource=True)

        @tf.function
        def move(x):
            variable.assign_add(tf.reduce_mean(x))
            return variable.read_value()

        return move(batches(7)[0])

    assert_same(step)


def test_what_waits_for_a_loop_of_the_step_waits_for_it_in_the_copy():
    def step():
        variable = counter()

        def body(i):
            with tf.control_dependencies([tf.assign_add(variable, 1)]):
                return i + 1

        looped = tf.while_loop(lambda i: i < 20, body, [0])
        with tf.control_dependencies([looped]):
            return tf.add(variable.read_value(), 0), looped

    read, looped = assert_same(step, num_steps=10)
    np.testing.assert_array_equal(read, 20 * np.arange(1, 11))
    np.testing.assert_array_equal(looped, [20] * 10)


def test_loops_of_one_step_and_the_step_itself_run_in_one_call():
    variable = counter()
    with tf.control_dependencies([tf.assign_add(variable, 1, use_locking=True)]):
        step = tf.while_loop(lambda i: i < 3, lambda i: i + 1, [0])
    loops = [towers.repeat(lambda: step, 5), towers.repeat(lambda: step, 7)]
    with session() as made:
        alone, of_five, of_seven = made.run([step] + loops)
        assert alone == 3 and list(of_five) == [3] * 5 and list(of_seven) == [3] * 7 and made.run(variable) == 13


@pytest.mark.laws
def test_an_exported_graph_holds_the_loop():
    tf.set_random_seed(3)
    names = {name: result.name for name, result in towers.repeat(training(with_control_flow), 4).items()}
    expected, exported = run(names), tf.train.export_meta_graph()
    with tf.Graph().as_default():
        tf.train.import_meta_graph(exported)
        np.testing.assert_array_equal(run(names)["loss"], expected["loss"])


@pytest.mark.parametrize("num_steps", [4, np.int64(4), "constant", tf.int32, tf.int64])
def test_the_number_of_steps_is_an_int_or_an_integer_tensor(num_steps):
    number = next_number()
    is_fed = isinstance(num_steps, tf.DType)
    given = tf.placeholder(num_steps, []) if is_fed else tf.constant(4) if num_steps == "constant" else num_steps
    numbers = towers.repeat(lambda: number, given)
    assert numbers.shape.as_list() == [None if is_fed else 4]
    np.testing.assert_array_equal(run(numbers, {given: 4} if is_fed else None), np.arange(4))


def test_results_have_the_structure_that_the_step_returned_and_the_shapes_joined():
    def step():
        variable = counter()
        update = tf.assign_add(variable, 1)
        return {"a": (tf.zeros([2, 3]), update.op), "b": [variable]}

    results = towers.repeat(step, 5)
    assert results["a"][0].shape.as_list() == [5, 2, 3] and isinstance(results["a"][1], tf.Operation)
    assert results["b"][0].shape.as_list() == [5]
    with session() as made:
        made.run(results["a"][1])
        assert made.run(tf.global_variables()) == [5]
        made.run(results["b"])  # everything that was returned runs, whatever is fetched of it
        assert made.run(tf.global_variables()) == [10]


def test_no_gradient_passes_the_loop():
    variable = tf.get_variable("v", [], initializer=tf.ones_initializer())
    assert tf.gradients(towers.repeat(lambda: variable * 2, 3), variable) == [None]


def test_what_is_fed_stands_for_all_steps():
    rate, offset = tf.placeholder(tf.int64, []), tf.placeholder_with_default(tf.constant(7, tf.int64) * 2, [])
    number = next_number()
    results = towers.repeat(lambda: number * rate + offset, 3)
    np.testing.assert_array_equal(run(results, {rate: 10}), [14, 24, 34])
    with session() as made:
        np.testing.assert_array_equal(made.run(results, {rate: 10, offset: 1}), [1, 11, 21])


def test_control_dependencies_around_the_loop_run_once_and_before_it():
    before, of_step = counter("before"), counter("of_step")

    def step():
        with tf.control_dependencies([tf.assign_add(of_step, 1)]):
            return tf.add(before.read_value(), 0)

    with tf.control_dependencies([tf.assign_add(before, 1)]):
        seen = towers.repeat(step, 4)
    with session() as made:
        assert list(made.run(seen)) == [1] * 4 and made.run([before, of_step]) == [1, 4]


def test_large_constants_are_not_copied():
    images = tf.constant(np.zeros([600, 600], np.float32))
    before = tf.get_default_graph().as_graph_def().ByteSize()
    result = towers.repeat(lambda: images[:1, :1] + 1, 2)
    assert tf.get_default_graph().as_graph_def().ByteSize() < before + 100000 < 2 * before
    assert run(result).sum() == 2


def test_a_step_whose_result_has_another_shape_is_named_when_it_runs():
    rows = tf.data.make_one_shot_iterator(tf.data.Dataset.range(10).batch(4)).get_next()
    results = towers.repeat(lambda: tf.identity(rows, name="rows"), 3)
    words = r"result rows:0 of towers.repeat has to have the same shape in every step.*\[2\].*\[4\].*2"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        run(results)


def test_a_fed_number_of_steps_below_1_fails_when_it_runs():
    number, num_steps = next_number(), tf.placeholder(tf.int32, [])
    results = towers.repeat(lambda: number, num_steps)
    with pytest.raises(tf.errors.InvalidArgumentError, match="num_steps of towers.repeat has to be 1 or more.*It is.*0"):
        run(results, {num_steps: 0})


@pytest.mark.parametrize("num_steps,error,words", [
    (0, ValueError, "num_steps has to be 1 or more and less than 2.31, not 0"), (-3, ValueError, "not -3"),
    (2 ** 31, ValueError, "not 2147483648"), (2.0, TypeError, "int or a scalar integer tensor; 2.0 is float32"),
    ([2, 3], TypeError, r"is int32 of shape \(2,\)"), (True, TypeError, "integer tensor, not True"),
    ("ten", TypeError, "'ten' is string")])
def test_what_is_no_number_of_steps_is_refused(num_steps, error, words):
    with pytest.raises(error, match=words):
        towers.repeat(next_number, num_steps)


def test_a_constant_number_of_steps_below_1_is_refused_while_the_graph_is_built():
    with pytest.raises(ValueError, match="num_steps has to be 1 or more and less than 2.31, not 0"):
        towers.repeat(next_number, tf.constant(0))


@pytest.mark.parametrize("returned,error,words", [
    (lambda: None, TypeError, "tensors, variables and operations; None in None is none of them"),
    (lambda: (tf.constant(1), 0.5), TypeError, r"0.5 in \(.*\) is none of them"),
    (lambda: [], TypeError, r"step_fn returned \[\], which holds nothing to run"),
    (lambda: tf.SparseTensor([[0]], [1], [2]), TypeError, "SparseTensor.* is none of them"),
    (lambda: tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[]), TypeError, "of resource, which can't be joined over the steps")])
def test_what_is_no_result_is_refused(returned, error, words):
    with pytest.raises(error, match=words):
        towers.repeat(returned, 2)


def test_a_step_that_is_no_function_is_refused_with_the_cure():
    with pytest.raises(TypeError, match="that builds a step, or a list of .*, not .*: for what is built already `lambda: "):
        towers.repeat(tf.constant(1), 2)


def test_results_of_another_graph_are_refused():
    with tf.Graph().as_default():
        elsewhere = tf.constant(1, name="elsewhere")
    with pytest.raises(ValueError, match="'elsewhere:0' of another graph than the default one"):
        towers.repeat(lambda: elsewhere, 2)


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="there a branch is a graph of its own")
def test_results_from_inside_a_branch_are_refused():
    inside = []
    tf.cond(tf.placeholder(tf.bool, []), lambda: inside.append(tf.constant(1)) or inside[0], lambda: tf.constant(2))
    with pytest.raises(ValueError, match="'cond/Const.*', which stands inside a tf.cond or tf.while_loop"):
        towers.repeat(lambda: inside[0], 2)


def test_a_loop_within_a_model_function_branch_loop_or_function_is_refused():
    def looped(*_):
        return tf.reduce_sum(tf.cast(towers.repeat(lambda: tf.constant(1), 2), tf.float32))

    for call in (lambda: build(looped, (X,)), lambda: tf.cond(tf.placeholder(tf.bool, []), looped, lambda: 1.0),
                 lambda: tf.while_loop(lambda x: x < 1, looped, [0.0]), lambda: tf.function(looped)()):
        with pytest.raises(ValueError, match="repeat was called inside a model function, tf.cond, tf.while_loop or tf.func"):
            call()


def test_a_changing_default_of_a_placeholder_is_refused_by_name():
    image = tf.placeholder_with_default(next_number(), [], name="image")
    with pytest.raises(ValueError, match="tf.placeholder_with_default 'image' changes from step to step, as '.*' does"):
        towers.repeat(lambda: image + 1, 2)


@pytest.mark.skipif(not tf.control_flow_v2_enabled(), reason="loops of control flow v1 take ref variables in")
def test_ref_variables_are_refused_by_loops_of_control_flow_v2():
    variable = tf.get_variable("v", [], use_resource=False)
    with pytest.raises(ValueError, match="ref variable 'v' can't be taken into a tf.while_loop of control flow v2"):
        towers.repeat(lambda: tf.assign_add(variable, 1.0), 2)


def test_a_step_that_does_not_wait_for_its_train_op_is_a_warning():
    with pytest.warns(UserWarning, match="step_fn makes '.*Apply.*', which trains, and what it returns does not wait"):
        towers.repeat(lambda: training()()["loss"], 2)


def test_eager_execution_is_an_error(monkeypatch):
    monkeypatch.setattr(tf, "executing_eagerly", lambda: True)
    with pytest.raises(RuntimeError, match="towers.repeat builds a loop in a TensorFlow 1 graph, and eager execution is on"):
        towers.repeat(next_number, 2)
