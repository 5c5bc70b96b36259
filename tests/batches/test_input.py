"""Batches from tf.data, and sparse and ragged ones: what each tower gets, and that it trains as one tower on the whole batch."""
import collections
import itertools
import threading
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

import tf_syncbn
import towers
from tests.support import build, cpus, session, set_variables, train_by
from tests.sweeps import covering
from towers.batches.rows import split_rows

Pair = collections.namedtuple("Pair", "images labels")
RNG = np.random.RandomState(0)
X = RNG.randn(22, 3)
Y = RNG.randint(0, 4, 22)
SPARSE = RNG.randn(22, 5) * (RNG.rand(22, 5) < 0.3)
SPARSE[3:6] = 0  # rows of nothing
SGD = tf.train.GradientDescentOptimizer
DATASETS = [tf.data.Dataset, tf2.data.Dataset]


@pytest.fixture(params=[DATASETS[0], pytest.param(DATASETS[1], marks=pytest.mark.sweep)], ids=["v1", "v2"])
def Dataset(request):
    """The data set class of both versions of tf.data."""
    return request.param


def synced(images, labels):
    y = tf.matmul(images, tf.get_variable("w", [3, 4], tf.float64, tf.glorot_uniform_initializer(seed=0)))
    return loss_of(tf.tanh(tf_syncbn.sync_batch_norm(y, momentum=0.9)), labels)


def plain(images, labels):
    return loss_of(tf.matmul(images, tf.get_variable("w", [3, 4], tf.float64, tf.glorot_uniform_initializer(seed=0))), labels)


def loss_of(logits, labels):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def train(model, num_towers, batch, initial=None, run=None, **kwargs):
    """Trains till the data end; returns losses, and variables by name before and after."""
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        replicas = build(model, batch(), num_towers, **kwargs)
        train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
        variables, losses = {v.op.name: v for v in tf.global_variables()}, []
        with session() as made:
            made.run(tf.tables_initializer())
            set_variables(made, initial or {})
            before = made.run(variables)
            try:
                while len(losses) < 100:
                    losses.append(made.run([replicas.loss, train_op])[0])
            except tf.errors.OutOfRangeError:
                pass
            return losses, before, made.run(variables)


def assert_trains_as_one_tower(model, num_towers, batch, batch_of_one=None, steps=None):
    """Holds towers against one tower that gets the tensors of the whole batches."""
    losses, initial, expected = train(model, 1, batch_of_one or batch)
    got_losses, _, got = train(model, num_towers, batch, initial)
    assert len(losses) == steps if steps else len(losses) > 1
    np.testing.assert_allclose(got_losses, losses, rtol=1e-9)
    assert set(got) == set(expected) and any(np.abs(got[name] - initial[name]).max() > 1e-3 for name in got)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


def next_of(dataset):
    return tf.data.make_one_shot_iterator(dataset).get_next()


@pytest.mark.parametrize("Dataset,model,num_towers", covering(DATASETS, [plain, synced], [2, 5]))
def test_data_set_with_a_last_batch_smaller_than_the_towers_trains_as_one_tower_for_two_epochs(Dataset, model, num_towers):
    def make():
        return Dataset.from_tensor_slices((X, Y)).batch(10).repeat(2)  # of 10, 10 and 2

    assert_trains_as_one_tower(model, num_towers, make, lambda: next_of(make()), steps=6)


def test_data_set_of_whole_batches_is_divided_while_the_graph_is_built(Dataset):
    replicas = build(plain, Dataset.from_tensor_slices((X, Y)).batch(11, drop_remainder=True), 3)
    assert [tower.weight for tower in replicas] == [4 / 11, 4 / 11, 3 / 11]


@pytest.mark.parametrize("Dataset,num_towers,element_and_seen", covering(DATASETS, [3, 1], [
    (X, lambda x: x), ((X, Y), lambda x, y: x), ((X,), lambda x: x), (Pair(X, Y), lambda pair: pair.images),
    ({"images": X, "labels": Y}, lambda batch: batch["images"]), (({"a": X}, (Y, Y)), lambda first, second: first["a"])]))
def test_structures_of_elements_reach_the_model_as_tensors_would(Dataset, num_towers, element_and_seen):
    element, seen = element_and_seen
    replicas = build(seen, Dataset.from_tensor_slices(element).batch(10), num_towers)
    with session() as made:
        for rows in (X[:10], X[10:20], X[20:]):
            np.testing.assert_array_equal(made.run(replicas.merged()), rows)


def test_a_batch_is_taken_once_and_each_example_goes_to_one_tower():
    taken = []

    def count(x):
        taken.append(x)
        return x

    dataset = tf.data.Dataset.range(12).map(lambda x: tf.py_func(count, [x], tf.int64)).map(
        lambda x: tf.ensure_shape(x, [])).batch(4)
    replicas = build(lambda x: x, dataset, 3)
    with session() as made:
        assert [made.run([tower.outputs for tower in replicas])[i].tolist() for i in range(3)] == [[0, 1], [6], [11]]
    assert sorted(taken) == list(range(12))


def test_the_next_batch_is_made_before_it_is_asked_for():
    second_was_made = threading.Event()

    def watch(x):
        if x == 1:
            second_was_made.set()
        return x

    def make(x):
        return tf.fill([4], tf.ensure_shape(tf.py_func(watch, [x], tf.int64), []))

    replicas = build(lambda x: x, tf.data.Dataset.range(3).map(make), 2)
    with session() as made:
        assert made.run(replicas.merged()).tolist() == [0, 0, 0, 0]
        assert second_was_made.wait(20)


def test_batches_are_taken_and_divided_on_the_host(Dataset):
    iterator = tf.data.make_one_shot_iterator(Dataset.from_tensor_slices(X).batch(9))  # its maker's choice where it stands
    of_data_set = ["IteratorGetNext", "OneShotIterator"]
    for source, kinds in ((Dataset.from_tensor_slices(X).batch(10), of_data_set), (iterator, ["SplitV"])):
        before = len(tf.get_default_graph().get_operations())
        towers.TowerBuilder(["/cpu:1", "/cpu:2"]).build(tf.reduce_mean, source)
        ops = [op for op in tf.get_default_graph().get_operations()[before:] if op.type in kinds]
        assert ops and all(op.device.lower().endswith("cpu:0") for op in ops)


KINDS = ["one_shot", "initializable", "reinitializable", "feedable"]


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=() if kind in ("initializable", "feedable") else pytest.mark.sweep) for kind in KINDS])
def test_iterators_train_as_one_tower(kind):
    def make():
        iterator, _, initializers = iterator_of(kind)
        for initializer in initializers:
            tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, initializer)
        return iterator

    if kind != "feedable":
        assert_trains_as_one_tower(synced, 3, make, lambda: make().get_next(), steps=3)
        return
    losses = [train_fed(num_towers) for num_towers in (1, 3)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)


def iterator_of(kind):
    """Returns an iterator, what it may be fed with, and initializers to be run."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    types, shapes = tf.data.get_output_types(dataset), tf.data.get_output_shapes(dataset)
    if kind == "one_shot":
        return tf.data.make_one_shot_iterator(dataset), None, []
    if kind == "initializable":
        iterator = tf.data.make_initializable_iterator(dataset)
        return iterator, None, [iterator.initializer]
    if kind == "reinitializable":
        iterator = tf.data.Iterator.from_structure(types, shapes)
        return iterator, None, [iterator.make_initializer(dataset)]
    handle = tf.placeholder(tf.string, [])
    return tf.data.Iterator.from_string_handle(handle, types, shapes), handle, []


def train_fed(num_towers):
    """Trains on a feedable iterator, handed two data sets in turn."""
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        iterator, handle, _ = iterator_of("feedable")
        others = [tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(rows).batch(size))
                  for rows, size in (((X, Y), 10), ((X[::-1], Y), 7))]
        w = tf.get_variable("w", initializer=np.linspace(-1, 1, 12).reshape(3, 4))

        def model(images, labels):
            return loss_of(tf_syncbn.sync_batch_norm(tf.matmul(images, w)), labels)

        replicas = build(model, iterator if num_towers > 1 else iterator.get_next(), num_towers)
        train_op = towers.minimize(replicas, SGD(0.1))
        with session() as made:
            handles = made.run([other.string_handle() for other in others])
            return [made.run([replicas.loss, train_op], {handle: handles[i]})[0] for i in (0, 1, 0, 1)]


def test_reinitialized_iterator_runs_through_two_epochs():
    iterator, _, (initializer,) = iterator_of("reinitializable")
    replicas = build(lambda x, y: y, iterator, 5)
    with session() as made:
        for _ in range(2):
            made.run(initializer)
            assert np.concatenate([made.run(replicas.merged()) for _ in range(3)]).tolist() == Y.tolist()
            with pytest.raises(tf.errors.OutOfRangeError):
                made.run(replicas.merged())


def looked_up():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], np.array([1, 2], np.int64)), -1)
    return tf.data.Dataset.from_tensor_slices(np.array(["b", "a", "c", "b"])).map(table.lookup).batch(4)


def random():
    return tf.data.Dataset.from_tensor_slices(tf.random_uniform([4], 5, 6)).batch(4)


@pytest.mark.parametrize("dataset,expected", [(looked_up, [2, 1, -1, 2]), (random, [5, 5, 5, 5])])
def test_data_set_that_needs_initializing_is_initialized_by_monitored_sessions_and_tables_initializer(dataset, expected):
    replicas = build(lambda x: tf.floor(tf.cast(x, tf.float32)), dataset(), 3)
    with tf.Session(config=towers.session_config(cpus(3))) as made:
        for _ in range(2):
            made.run(tf.tables_initializer())
            assert made.run(replicas.merged()).tolist() == expected
            with pytest.raises(tf.errors.OutOfRangeError):
                made.run(replicas.merged())
    tf.train.get_or_create_global_step()
    creator = tf.train.ChiefSessionCreator(config=towers.session_config(cpus(3)))
    with tf.train.MonitoredSession(creator) as monitored:
        assert monitored.run(replicas.merged()).tolist() == expected


def test_data_set_that_needs_no_initializing_adds_no_initializer(Dataset):
    build(tf.reduce_mean, Dataset.from_tensor_slices(X).shuffle(5).batch(4), 2)
    assert not tf.get_collection(tf.GraphKeys.TABLE_INITIALIZERS)


def test_placeholders_are_batches_and_feed_initializable_iterators():
    images, labels = tf.placeholder(tf.float64, [None, 3]), tf.placeholder(tf.int64, [None])
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices((images, labels)).batch(10))
    of_iterator, of_placeholders = build(plain, iterator, 5), None
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        of_placeholders = build(plain, (images, labels), 5)
    with session() as made:
        made.run(iterator.initializer, {images: X[:2], labels: Y[:2]})
        loss = made.run(of_iterator.loss)
        assert loss == pytest.approx(made.run(of_placeholders.loss, {images: X[:2], labels: Y[:2]}), rel=1e-12)


def test_training_and_evaluation_data_set_in_one_graph_are_apart(Dataset):
    trained = build(plain, Dataset.from_tensor_slices((X, Y)).batch(10), 3)
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        evaluated = build(lambda x, y: {"loss": plain(x, y), "y": y}, Dataset.from_tensor_slices((X[::-1], Y[::-1])).batch(4), 2)
    train_op = towers.minimize(trained, SGD(0.1))
    assert len(tf.trainable_variables()) == 1
    with session() as made:
        for _ in range(3):
            made.run(train_op)
        assert np.concatenate([made.run(evaluated.merged()["y"]) for _ in range(6)]).tolist() == Y[::-1].tolist()


def sparse_of(array, known=True):
    indices = np.argwhere(array)
    shape = np.array(array.shape, np.int64)
    if not known:
        shape = tf.placeholder_with_default(shape, [array.ndim])
    return tf.SparseTensor(indices, array[tuple(indices.T)], shape)


@pytest.mark.parametrize("known,size_and_towers,shape", covering(
    [True, False], [(22, 4), (7, 2), (6, 3), (2, 5)], [(22, 5), (22,), (22, 2, 3)]))
def test_sparse_tensors_are_split_by_rows(known, size_and_towers, shape):
    size, num_towers = size_and_towers
    if known and size < num_towers:
        pytest.skip("a batch that is known to be too small is an error")
    array = (np.arange(np.prod(shape)).reshape(shape) % 3 == 1) * np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    replicas = build(lambda x: tf.sparse.to_dense(x), sparse_of(array[:size], known), num_towers)
    with session() as made:
        got = made.run([tower.outputs for tower in replicas])
        weights = made.run([tf.convert_to_tensor(tower.weight) for tower in replicas])
    for ours, rows, weight in zip(got, np.array_split(array[:size], num_towers), weights):
        np.testing.assert_array_equal(ours, rows)
        assert weight == pytest.approx(len(rows) / size)


def test_static_shape_of_sparse_and_ragged_parts_is_known():
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(6), [1, 2, 3])
    parts = split_rows(sparse_of(SPARSE), [20, 2], 2) + split_rows(ragged, [2, 1], 2)
    assert [tf.TensorShape(part.shape).as_list() for part in parts] == [[20, 5], [2, 5], [2, None], [1, None]]


def test_parts_of_other_sizes_are_no_difference_where_the_batch_is_sparse_alone():
    replicas = build(lambda x: tf.reshape(tf.sparse.to_dense(x), [x.shape[0], -1]), sparse_of(SPARSE[:7]), 2)
    with session() as made:
        np.testing.assert_array_equal(made.run(replicas.merged()), SPARSE[:7])


def looked_up(tags, table):
    return tf.nn.safe_embedding_lookup_sparse([table], tags, combiner="mean")


def looked_up_as_rows(tags, table):
    ids = tf.RaggedTensor.from_row_lengths(tags.values, tf.sparse.reduce_sum(
        tf.SparseTensor(tags.indices, tf.ones_like(tags.values), tags.dense_shape), 1))
    return tf.reduce_sum(tf.ragged.map_flat_values(tf.nn.embedding_lookup, table, ids), 1)


@pytest.mark.parametrize("look_up,is_converted", covering([looked_up, looked_up_as_rows], [True, False]))
def test_what_is_looked_up_by_sparse_tags_is_one_towers_and_passes_in_silence(look_up, is_converted):
    """The slices and products of a sparse tensor's shape are none of the examples."""
    def model_fn(tags, y):
        x = look_up(tags, tf.get_variable("table", [9, 3], tf.float64, tf.glorot_uniform_initializer(seed=1)))
        if is_converted:
            x = tf.nn.batch_normalization(x, *tf.nn.moments(x, [0]), None, None, 1e-3)
        return tf.reduce_mean(tf.square(tf.reduce_sum(tf.sin(x), 1) - y))

    def losses(num_towers):
        with tf.Graph().as_default(), warnings.catch_warnings():
            warnings.filterwarnings("error", message="The (model function|loss)")
            tags = sparse_of(np.array([[1, 2, 0], [3, 0, 0], [4, 5, 6], [7, 0, 0], [8, 1, 0], [2, 2, 2], [3, 8, 0]]))
            replicas = build(tf_syncbn.convert_model(model_fn) if is_converted else model_fn, (tags, np.arange(7.0)), num_towers)
            return train_by(towers.minimize(replicas, SGD(0.1)), replicas.loss, 3)[0]

    np.testing.assert_allclose(losses(3), losses(1), rtol=1e-9)


def ragged_of(lengths, known=True):
    lengths = np.array(lengths, np.int64)
    flat = tf.range(int(sum(lengths)))
    return tf.RaggedTensor.from_row_lengths(flat, lengths if known else tf.placeholder_with_default(lengths, [None]))


@pytest.mark.parametrize("known,lengths_and_towers", covering(
    [False, True], [([2, 0, 3, 1, 0, 4, 1], 3), ([0, 0, 0, 5], 2), ([3, 1], 5)]))
def test_ragged_tensors_are_split_by_rows(known, lengths_and_towers):
    lengths, num_towers = lengths_and_towers
    if known and len(lengths) < num_towers:
        pytest.skip("a batch that is known to be too small is an error")
    replicas = build(lambda x: {"flat": x.flat_values, "lengths": x.row_lengths()}, ragged_of(lengths, known), num_towers)
    with session() as made:
        got = made.run([tower.outputs for tower in replicas])
    ends = np.cumsum(lengths)
    rows = [list(range(end - n, end)) for n, end in zip(lengths, ends)]
    for ours, part in zip(got, np.array_split(np.arange(len(lengths)), num_towers)):
        assert ours["lengths"].tolist() == [lengths[i] for i in part]
        assert ours["flat"].tolist() == list(itertools.chain(*[rows[i] for i in part]))


def test_ragged_tensors_of_two_ragged_axes_are_split_by_rows():
    nested = tf.RaggedTensor.from_nested_row_lengths(tf.range(6), [[2, 0, 1], [1, 3, 2]])
    replicas = build(lambda x: x, nested, 2)
    with session() as made:
        assert [ragged.to_list() for ragged in made.run([tower.outputs for tower in replicas])] == [
            [[[0], [1, 2, 3]], []], [[[4, 5]]]]


def of_words(batch):
    table = tf.get_variable("table", [5, 4], tf.float64, tf.glorot_uniform_initializer(seed=0))
    bias = tf.get_variable("bias", [4], tf.float64, tf.zeros_initializer())
    y = tf.sparse.sparse_dense_matmul(batch["words"], table)
    return loss_of(tf_syncbn.sync_batch_norm(y + bias + tf.reduce_sum(batch["images"], 1, keepdims=True)), batch["labels"])


def test_data_set_with_sparse_tensors_trains_as_one_tower(Dataset):
    def make():
        words = tf.SparseTensor(np.argwhere(SPARSE), SPARSE[SPARSE != 0], [22, 5])
        return Dataset.from_tensor_slices({"words": words, "images": X, "labels": Y}).batch(10).repeat(2)

    assert_trains_as_one_tower(of_words, 5, make, lambda: next_of(make()), steps=6)


def of_sequences(tokens, labels):
    table = tf.get_variable("table", [9, 4], tf.float64, tf.glorot_uniform_initializer(seed=0))
    of_rows = tf.math.unsorted_segment_sum(tf.gather(table, tokens.flat_values), tokens.value_rowids(), tokens.nrows())
    return loss_of(tf_syncbn.sync_batch_norm(of_rows), labels)


@pytest.mark.laws
def test_data_set_with_ragged_tensors_trains_as_one_tower(Dataset):
    lengths = RNG.randint(0, 5, 22)
    tokens = RNG.randint(0, 9, lengths.sum())

    def make():
        ragged = tf.RaggedTensor.from_row_lengths(tokens, lengths)
        return Dataset.from_tensor_slices((ragged, Y)).batch(10)

    assert_trains_as_one_tower(of_sequences, 5, make, lambda: next_of(make()), steps=3)


@pytest.mark.parametrize("leaf", [lambda: sparse_of(SPARSE[:7], False), lambda: ragged_of(range(7), False)])
def test_rows_that_disagree_when_they_are_run_are_named(leaf):
    replicas = build(lambda x, y: tf.reduce_sum(x), (tf.placeholder_with_default(X, [None, 3]), leaf()), 2)
    with session() as made, pytest.raises(tf.errors.InvalidArgumentError, match="have to agree in axis 0: this is the number"):
        made.run(replicas.loss)


def test_sizes_of_a_data_set_that_disagree_when_they_are_run_are_named(Dataset):
    dataset = Dataset.from_tensors({"images": X, "labels": Y[:7]}).map(lambda d: {
        key: tf.placeholder_with_default(d[key], [None] + d[key].shape.as_list()[1:]) for key in d})
    replicas = build(lambda batch: tf.reduce_mean(batch["images"]), dataset, 2)
    with session() as made, pytest.raises(tf.errors.InvalidArgumentError, match="split_batch/tensor_"):
        made.run(replicas.loss)


def unknown_rank(Dataset):
    return Dataset.from_generator(lambda: iter([X]), tf.float64)


@pytest.mark.parametrize("Dataset,refused", covering(DATASETS, [
    (lambda D: D.from_tensor_slices((X, Y)), ValueError, r"hold a scalar, .*make batches by dataset.batch\(...\)"),
    (lambda D: D.from_tensors({"a": X, "rate": 0.5}), ValueError, "If the scalar is meant for every tower"),
    (unknown_rank, ValueError, "has unknown rank"),
    (lambda D: D.from_tensors({"a": X, "b": Y[:4]}), ValueError, "agree in axis 0; these do not: 'tensor_b.*' has 4, 'tensor_a"),
    (lambda D: D.from_tensors((X[:2], Y[:2])), ValueError, "A batch of 2 .*tensor_[01].* is too small for 3 towers"),
    (lambda D: D.from_tensor_slices(X).window(4), TypeError, "hold .*: towers can divide tensors, sparse and ragged"),
]))
def test_elements_that_hold_no_batch_are_refused(Dataset, refused):
    make, error, message = refused
    with pytest.raises(error, match=message):
        build(lambda *x: tf.zeros([]), make(Dataset), 3)
    if make(Dataset).element_spec.__class__.__name__ != "DatasetSpec":
        with pytest.raises(error, match=message.replace("tensor_", ".*")):
            build(lambda *x: tf.zeros([]), tf.data.make_one_shot_iterator(make(Dataset)), 3)


def test_data_set_of_a_placeholder_is_refused_by_name(Dataset):
    images = tf.placeholder(tf.float64, [None, 3], "fed_images")
    with pytest.raises(ValueError, match=r"reads the placeholder 'fed_images', .*make_initializable_iterator\(dataset\), hand"):
        build(tf.reduce_mean, Dataset.from_tensor_slices(images).batch(4), 2)


def test_data_set_of_single_examples_is_a_warning(Dataset):
    with pytest.warns(UserWarning, match=r"hands out single examples, .*dataset.batch\(...\)") as warned:
        towers.TowerBuilder(cpus(2)).build(tf.reduce_mean, Dataset.from_tensor_slices(X).shuffle(9).repeat())
    assert __file__ in {warning.filename for warning in warned}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(tf.reduce_mean, Dataset.from_tensor_slices(X).batch(4).repeat(), 2)
        build(tf.reduce_mean, Dataset.from_tensors(X), 2)


def test_data_set_in_a_loop_is_refused_and_an_iterator_hands_out_a_batch_a_turn(Dataset):
    dataset = Dataset.from_tensor_slices(X).batch(10)

    def total(batch):
        return tf.while_loop(lambda i, _: i < 3, lambda i, total: (
            i + 1, total + build(lambda x: tf.reduce_sum(tf.concat([x, x], 0)), batch, 2).loss), [0, np.float64(0)])[1]

    with pytest.raises(ValueError, match="built in a tf.while_loop.* make an iterator outside"):
        total(dataset)
    of_iterator = total(tf.data.make_one_shot_iterator(dataset))
    parts = [part.sum() * len(part) / len(rows) for rows in (X[:10], X[10:20], X[20:]) for part in np.array_split(rows, 2)]
    with session() as made:
        assert made.run(of_iterator) == pytest.approx(2 * sum(parts), rel=1e-12)
