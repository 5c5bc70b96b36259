"""`tf_syncbn.checkpoints`: names against literal ones, values against what was written, outputs against NumPy."""
import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import given
from hypothesis import strategies as st

import tf_syncbn
from tests.support import has_tf_layers, own_process
from tf_syncbn.checkpoints import assignment_map, convert, rename
from tf_syncbn.checkpoints.__main__ import main

try:
    from tensorflow.contrib import slim as contrib
except ImportError:
    contrib = None

needs_contrib = pytest.mark.skipif(contrib is None, reason="this TensorFlow has no tf.contrib")
needs_tf_layers = pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no tf.layers")
ROOT = Path(__file__).parents[2]

# One model in each dialect, scopes alike, name by name.
NAMES = {
    "layers": ["a/kernel", "a/bias", "a/kernel/Adam_1", "a/bn/gamma", "a/bn/beta", "a/bn/moving_mean",
               "a/bn/moving_variance", "a/bn/moving_mean/ExponentialMovingAverage", "s/depthwise_kernel",
               "s/pointwise_kernel", "r/renorm_mean", "r/moving_mean", "r/renorm_mean/biased", "global_step", "u/own",
               "u/own/Momentum", "rnn/gru_cell/gates/kernel", "rnn/lstm_cell/bias",
               "x_cell/moving_mean", "a/kernel/Adam_1/biased"],
    "slim": ["a/weights", "a/biases", "a/weights/Adam_1", "a/bn/gamma", "a/bn/beta", "a/bn/moving_mean",
             "a/bn/moving_variance", "a/bn/moving_mean/ExponentialMovingAverage", "s/depthwise_weights",
             "s/pointwise_weights", "r/renorm_mean", "r/moving_mean", "r/renorm_mean/biased", "global_step", "u/own",
             "u/own/Momentum", "rnn/gru_cell/gates/kernel", "rnn/lstm_cell/bias",
             "x_cell/moving_mean", "a/weights/Adam_1/biased"],
    "tensorpack": ["a/W", "a/b", "a/W/Adam_1", "a/bn/gamma", "a/bn/beta", "a/bn/mean/EMA",
                   "a/bn/variance/EMA", "a/bn/mean/EMA/ExponentialMovingAverage", "s/depthwise_kernel",
                   "s/pointwise_kernel", "r/renorm_mean", "r/moving_mean", "r/renorm_mean/biased", "global_step", "u/own",
                   "u/own/Momentum", "rnn/gru_cell/gates/kernel", "rnn/lstm_cell/bias",
                   "x_cell/mean/EMA", "a/W/Adam_1/biased"],
}
MOMENTS = {"gamma": [1.5, -2.0, 0.5], "beta": [0.25, 3.0, -1.0], "mean": [1.0, -4.0, 10.0], "variance": [4.0, 0.5, 2.0]}


def write(prefix, values, **kwargs):
    """Writes a checkpoint of these values, by TensorFlow's own saver; returns its prefix as a string."""
    with tf.Graph().as_default():
        variables = {name: tf.Variable(value, name=name, trainable=False) for name, value in values.items()}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return tf.train.Saver(variables, **kwargs).save(session, str(prefix))


def contents(prefix):
    """Returns what a checkpoint holds, values as dtype, shape and bytes."""
    reader = tf.train.load_checkpoint(str(prefix))
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    return {name: (np.asarray(v).dtype, np.shape(v), np.asarray(v).tobytes()) for name, v in values.items()}


def floats(*names):
    """Returns a small value for each name."""
    return {name: np.arange(3, dtype=np.float32) for name in names}


def batch_norm_values(scope, mean, variance):
    """Returns MOMENTS by the names of a batch norm in this scope, with these names for its moving averages."""
    values = zip(["gamma", "beta", mean, variance], ["gamma", "beta", "mean", "variance"])
    return {scope + "/" + name: np.array(MOMENTS[key], np.float32) for name, key in values}


def files(folder):
    """Returns the bytes of each file in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.exists()}


@pytest.mark.parametrize("source,to", itertools.product(NAMES, NAMES))
def test_names_of_each_dialect_become_those_of_each_other(source, to):
    assert rename(NAMES[source], to) == dict(zip(NAMES[source], NAMES[to]))


def test_a_mixture_of_dialects_becomes_one():
    names = ["a/W", "b/kernel", "c/weights", "d/mean/EMA", "e/moving_mean"]
    assert list(rename(names, "slim").values()) == ["a/weights", "b/weights", "c/weights", "d/moving_mean", "e/moving_mean"]


scopes = st.lists(st.sampled_from(["conv1", "bn", "mean", "EMA", "W", "kernel", "x_cell", "BatchNorm_1"]), min_size=1,
                  max_size=3).map("/".join)
endings = {"layers": ["kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance"],
           "slim": ["weights", "biases", "gamma", "beta", "moving_mean", "moving_variance"],
           "tensorpack": ["W", "b", "gamma", "beta", "mean/EMA", "variance/EMA"]}


@given(st.data(), st.sampled_from(sorted(endings)), st.sampled_from(sorted(endings)))
def test_renaming_there_and_back_is_the_identity(data, dialect, other):
    variables = data.draw(st.lists(st.tuples(scopes, st.sampled_from(endings[dialect])).map("/".join), unique=True))
    slots = data.draw(st.lists(st.sampled_from(["Momentum", "Adam", "Adam_1"]), unique=True))
    names = variables + [name + "/" + slot for name in variables for slot in slots]
    there = rename(names, other)
    assert len(set(there.values())) == len(set(names))
    assert {name: rename(there.values(), dialect)[new] for name, new in there.items()} == {name: name for name in names}


def test_scopes_change_by_patterns_in_order_and_not_without():
    names = ["tower/conv1/W", "tower/conv1/W/Momentum", "tower/conv1/bn/mean/EMA", "tower/own", "global_step"]
    assert rename(names, "slim", {"^tower": "net", "^net/": "", "/bn$": "/BatchNorm"}) == {
        "tower/conv1/W": "conv1/weights", "tower/conv1/W/Momentum": "conv1/weights/Momentum",
        "tower/conv1/bn/mean/EMA": "conv1/BatchNorm/moving_mean", "tower/own": "net/own", "global_step": "global_step"}
    assert rename(names, "slim")["tower/conv1/bn/mean/EMA"] == "tower/conv1/bn/moving_mean"
    assert rename(["bn/gamma", "own"], "slim", {"^": "net/"}) == {"bn/gamma": "net/bn/gamma", "own": "own"}
    assert rename(["net/own", "net/bn/gamma"], "slim", {"^net": ""}) == {"net/own": "own", "net/bn/gamma": "bn/gamma"}


def test_names_that_would_become_one_are_refused():
    with pytest.raises(ValueError, match=r"the same name:\n  a/W and a/kernel would be a/weights$"):
        rename(["a/kernel", "a/W", "b/W"], "slim")
    with pytest.raises(ValueError, match=r"\n  a1/gamma and a2/gamma would be a/gamma$"):
        rename(["a1/gamma", "a2/gamma"], "layers", {r"\d": ""})


@pytest.mark.parametrize("patterns,message", [
    ({"bm": "bn"}, "The pattern 'bm' matches no scope"),
    ({"(": "bn"}, r"'\(' with the replacement 'bn' is no regular expression"),
    ({"bn": r"\1"}, "is no regular expression: invalid group reference"),
    ({"bn": r"\g<x>"}, "is no regular expression: unknown group name"),
])
def test_a_pattern_that_can_not_be_meant_is_refused(patterns, message):
    with pytest.raises(ValueError, match=message):
        rename(["bn/gamma"], "slim", patterns)


def test_an_unknown_dialect_is_refused():
    with pytest.raises(ValueError, match="no dialect 'caffe'; there are 'layers', 'slim', 'tensorpack'"):
        rename(["bn/gamma"], "caffe")


@pytest.mark.parametrize("scope,mean,variance,patterns", [
    ("conv1/bn", "mean/EMA", "variance/EMA", None),
    ("conv1/bn", "moving_mean", "moving_variance", None),
    ("conv1/BatchNorm", "moving_mean", "moving_variance", {"BatchNorm$": "bn"}),
    ("batch_normalization_3", "moving_mean", "moving_variance", {"^batch_normalization_3$": "conv1/bn"}),
])
@pytest.mark.parametrize("by_saver", [False, True])
def test_any_dialect_restores_into_sync_batch_norm(tmp_path, scope, mean, variance, patterns, by_saver):
    values = batch_norm_values(scope, mean, variance)
    path = write(tmp_path / "model", values)
    x = np.random.randn(5, 4, 4, 3).astype(np.float32)
    with tf.variable_scope("conv1"):
        y = tf_syncbn.sync_batch_norm(x, epsilon=0.01, training=False, name="bn")
    num_ops = len(tf.get_default_graph().get_operations())
    taken = assignment_map(path, scopes=patterns)
    assert len(tf.get_default_graph().get_operations()) == num_ops
    assert {name: v.op.name for name, v in taken.items()} == {
        scope + "/gamma": "conv1/bn/gamma", scope + "/beta": "conv1/bn/beta",
        scope + "/" + mean: "conv1/bn/moving_mean", scope + "/" + variance: "conv1/bn/moving_variance"}
    if not by_saver:
        tf.train.init_from_checkpoint(path, taken)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        if by_saver:
            tf.train.Saver(taken).restore(session, path)
        for name, variable in taken.items():
            assert session.run(variable).tobytes() == values[name].tobytes()
        gamma, beta, center, spread = (np.array(MOMENTS[k], np.float64) for k in ("gamma", "beta", "mean", "variance"))
        expected = (x - center) / np.sqrt(spread + 0.01) * gamma + beta
        np.testing.assert_allclose(session.run(y), expected, rtol=1e-5, atol=1e-5)


@needs_contrib
def test_a_slim_model_restores_into_one_of_tf_layers_through_tensorpacks_names(tmp_path):
    x = np.random.randn(2, 8, 8, 3).astype(np.float32)
    with tf.Graph().as_default():
        y = contrib.conv2d(x, 4, 3, normalizer_fn=contrib.batch_norm, activation_fn=None, scope="conv1",
                           normalizer_params={"is_training": False, "scale": True})
        y = contrib.fully_connected(contrib.flatten(y), 2, activation_fn=None, scope="fc")
        with tf.Session() as session:
            session.run([v.assign(tf.random.uniform(v.shape, 0.5, 1.5)) for v in tf.global_variables()])
            slim_path = tf.train.Saver().save(session, str(tmp_path / "slim"))
            expected = session.run(y)
    convert(slim_path, tmp_path / "tensorpack", "tensorpack", {"/BatchNorm": "/bn"})
    assert sorted(contents(tmp_path / "tensorpack")) == [
        "conv1/W", "conv1/bn/beta", "conv1/bn/gamma", "conv1/bn/mean/EMA", "conv1/bn/variance/EMA", "fc/W", "fc/b"]
    y = tf.layers.conv2d(x, 4, 3, padding="same", use_bias=False, name="conv1")
    with tf.variable_scope("conv1"):
        y = tf.layers.batch_normalization(y, name="bn")
    y = tf.layers.dense(tf.layers.flatten(y), 2, name="fc")
    tf.train.init_from_checkpoint(str(tmp_path / "tensorpack"), assignment_map(tmp_path / "tensorpack"))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        np.testing.assert_allclose(session.run(y), expected, rtol=1e-5, atol=1e-5)


@needs_tf_layers
@pytest.mark.filterwarnings("ignore:.tf.layers")
def test_sync_batch_norm_takes_what_tf_layers_saved_without_any_scopes(tmp_path):
    x = np.ones([2, 4, 4, 3], np.float32)
    with tf.Graph().as_default():
        for _ in range(2):
            tf.layers.batch_normalization(tf.constant(x))
        with tf.Session() as session:
            session.run([v.assign(tf.random.uniform(v.shape)) for v in tf.global_variables()])
            path = tf.train.Saver().save(session, str(tmp_path / "layers"))
    for _ in range(2):
        tf_syncbn.sync_batch_norm(x, training=False)
    assert {name: v.op.name for name, v in assignment_map(path).items()} == {
        scope + "/" + name: scope + "/" + name for scope in ("batch_normalization", "batch_normalization_1")
        for name in ("gamma", "beta", "moving_mean", "moving_variance")}


def test_optimizer_slots_go_with_their_variable(tmp_path):
    path = write(tmp_path / "model", {name: np.array([1, 2], np.float32) for name in (
        "fc/W", "fc/W/Adam", "fc/W/Adam_1", "fc/W/Momentum")})
    w = tf.get_variable("fc/weights", [2])
    adam = tf.train.AdamOptimizer()
    adam.minimize(tf.reduce_sum(w ** 2))
    slots = [w, adam.get_slot(w, "m"), adam.get_slot(w, "v")]
    assert {name: v.op.name for name, v in assignment_map(path, slots).items()} == {
        "fc/W": "fc/weights", "fc/W/Adam": "fc/weights/Adam", "fc/W/Adam_1": "fc/weights/Adam_1"}
    assert list(assignment_map(path, slots[2:])) == ["fc/W/Adam_1"]
    with pytest.raises(ValueError, match="lacks 2 of 5 variables:\n  beta1_power\n  beta2_power\n"):
        assignment_map(path)


def test_a_graph_without_variables_is_refused(tmp_path):
    with pytest.raises(ValueError, match="The graph has no variables yet to take the checkpoint '.*model': build"):
        assignment_map(write(tmp_path / "model", floats("w")))


def test_missing_and_untaken_names_are_listed(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(tf.logging, "info", lambda message, *args: logged.append(message % args))
    path = write(tmp_path / "model", floats("conv1/b", "fc/b", "own"))
    bias = tf.get_variable("conv1/biases", [3])
    tf.get_variable("conv2/biases", [3])
    with pytest.raises(ValueError) as raised:
        assignment_map(path)
    assert str(raised.value) == (
        "The checkpoint %r lacks 1 of 2 variables:\n  conv2/biases\nIn it, no variable takes:\n  fc/b\n  own\n"
        "Give `scopes` where layers have other scopes in it, and `variables` or `ignore_missing=True` where it need not have "
        "all of them." % path)
    assert not logged
    assert assignment_map(path, ignore_missing=True) == {"conv1/b": bias}
    assert logged == ["Of the checkpoint %r no variable takes:\n  fc/b\n  own" % path,
                      "The checkpoint %r lacks, and they keep their initializers:\n  conv2/biases" % path]
    assert assignment_map(path, [bias]) == {"conv1/b": bias}


def test_a_checkpoint_of_another_model_is_refused_although_missing_names_are_ignored(tmp_path):
    path = write(tmp_path / "model", floats("conv1/b"))
    tf.get_variable("conv2/biases", [3])
    with pytest.raises(ValueError, match="lacks 1 of 1 variables"):
        assignment_map(path, ignore_missing=True)


def test_of_many_missing_names_the_first_are_given(tmp_path):
    path = write(tmp_path / "model", floats(*["there%d" % i for i in range(9)]))
    for i in range(38):
        tf.get_variable("here%02d" % i, [3])
    with pytest.raises(ValueError) as raised:
        assignment_map(path)
    assert str(raised.value).split("\n")[:-1] == (
        ["The checkpoint %r lacks 38 of 38 variables:" % path] + ["  here%02d" % i for i in range(5)] + ["  and 33 more"]
        + ["In it, no variable takes:"] + ["  there%d" % i for i in range(5)] + ["  and 4 more"])


def test_other_shapes_and_dtypes_are_named(tmp_path):
    path = write(tmp_path / "model", floats("fc/W", "fc/b", "bn/gamma"))
    tf.get_variable("fc/kernel", [3, 4])
    tf.get_variable("fc/bias", [3], tf.float16)
    tf.get_variable("bn/gamma", [3])
    with pytest.raises(ValueError) as raised:
        assignment_map(path)
    assert str(raised.value).split("\n") == [
        "2 of 3 variables differ from the checkpoint %r:" % path,
        "  fc/kernel is [3, 4] float32, and fc/W in the checkpoint is [3] float32",
        "  fc/bias is [3] float16, and fc/b in the checkpoint is [3] float32",
        "Give the others as `variables`."]


def test_a_variables_own_name_comes_first_and_any_other_doubt_is_refused(tmp_path):
    path = write(tmp_path / "model", floats("fc/W", "fc/kernel"))
    kernel = tf.get_variable("fc/kernel", [3])
    assert assignment_map(path) == {"fc/kernel": kernel}
    weights = tf.get_variable("fc/weights", [3])
    with pytest.raises(ValueError, match="'fc/weights' may take several names in the checkpoint .*: fc/W, fc/kernel"):
        assignment_map(path, [weights])
    path = write(tmp_path / "one", floats("fc/W"))
    with pytest.raises(ValueError, match="Several variables may take 'fc/W' in the checkpoint .*: fc/kernel, fc/weights"):
        assignment_map(path)


@pytest.mark.parametrize("version", [tf.train.SaverDef.V1, tf.train.SaverDef.V2])
def test_values_of_every_dtype_survive_bit_for_bit(tmp_path, version):
    nans = np.array([0x7fc00001, 0xffc12345, 0x7f800000, 0x80000000, 1], np.uint32).view(np.float32)
    values = {"a/W": np.random.randn(3, 3, 2, 4).astype(np.float32), "a/bn/mean/EMA": nans,
              "a/b": np.array([1 + 2 ** -52, -0.0]), "global_step": np.array(2 ** 60 + 1, np.int64),
              "i": np.array([[-5, 7]], np.int32), "u": np.array([255], np.uint8), "empty": np.zeros([0, 3], np.float32),
              "t": np.array([True, False]), "z": np.array([1 + 2j], np.complex64)}
    if version == tf.train.SaverDef.V2:
        values["h"] = np.array([0x7e01, 0x3c01], np.uint16).view(np.float16)
        values["f"] = np.array([1.5, -2], tf.bfloat16.as_numpy_dtype)
    path = write(tmp_path / "model", values, write_version=version)
    renamed = convert(path, tmp_path / "new", "slim")
    expected = {"a/W": "a/weights", "a/bn/mean/EMA": "a/bn/moving_mean", "a/b": "a/biases"}
    assert renamed == {name: expected.get(name, name) for name in values}
    assert contents(tmp_path / "new") == {
        expected.get(name, name): (v.dtype, v.shape, v.tobytes()) for name, v in values.items()}


def test_parts_of_a_partitioned_variable_become_one(tmp_path):
    with tf.variable_scope("fc", partitioner=tf.fixed_size_partitioner(2)):
        w = tf.get_variable("W", [4, 2])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        value = session.run(tf.convert_to_tensor(w))
        path = tf.train.Saver().save(session, str(tmp_path / "model"))
    convert(path, tmp_path / "new", "layers")
    assert contents(tmp_path / "new") == {"fc/kernel": (np.dtype(np.float32), (4, 2), value.tobytes())}


def test_a_directory_is_its_latest_checkpoint_and_a_file_of_a_checkpoint_the_whole(tmp_path):
    (tmp_path / "train").mkdir()
    write(tmp_path / "train" / "old", floats("old/W"))
    path = write(tmp_path / "train" / "model", floats("fc/W", "fc/b"))
    for number, given_path in enumerate([tmp_path / "train", path, path + ".index", path + ".data-00000-of-00001"]):
        assert convert(given_path, tmp_path / str(number), "slim") == {"fc/W": "fc/weights", "fc/b": "fc/biases"}


def test_a_directory_whose_latest_checkpoint_is_no_more_is_refused_by_that_name(tmp_path):
    (tmp_path / "train").mkdir()
    path = write(tmp_path / "train" / "model", floats("fc/W"))
    os.remove(str(path) + ".index")
    with pytest.raises(ValueError, match="holds no checkpoint that its file 'checkpoint' names, '.*/train/model'"):
        convert(tmp_path / "train", tmp_path / "new", "slim")


@pytest.mark.parametrize("version", [tf.train.SaverDef.V1, tf.train.SaverDef.V2])
def test_nothing_is_ever_written_over(tmp_path, version):
    folder = tmp_path / "train"
    folder.mkdir()
    path = write(folder / "model", floats("fc/W"), write_version=version)
    write(folder / "other", floats("mine"))
    (tmp_path / "link").symlink_to(folder)
    for path_file in list(folder.glob("model*")):
        (folder / path_file.name.replace("model", "alias")).symlink_to(path_file)
    (folder / "dangling.index").symlink_to(folder / "nothing")
    before = files(folder)
    for out in (path, folder / ".." / "train" / "model", tmp_path / "link" / "model", os.path.relpath(path)):
        with pytest.raises(ValueError, match="would be the old one, which is never written over"):
            convert(path, out, "slim")
    with pytest.raises(ValueError, match="would be the old one"):
        convert(folder / "alias", folder / "alias", "slim")
    for out in (folder / "other", folder / "dangling", tmp_path):
        with pytest.raises(ValueError, match="exists, and nothing is written over"):
            convert(path, out, "slim")
    for in_path, out in ((path, folder / "alias"), (folder / "alias", path)):
        with pytest.raises(ValueError, match="would be the old one|exists, and nothing is written over"):
            convert(in_path, out, "slim")
    assert files(folder) == before
    convert(path, folder / "new", "slim")
    after = files(folder)
    assert {name: value for name, value in after.items() if not name.startswith("new")} == before
    assert sorted(set(after) - set(before)) == ["new.data-00000-of-00001", "new.index"]


def test_paths_that_can_not_be_read_or_written_are_refused(tmp_path):
    path = write(tmp_path / "model", floats("fc/W"))
    (tmp_path / "text").write_text("no checkpoint, but long enough to be taken for one" * 10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.index").write_bytes((tmp_path / "model.index").read_bytes()[:20])
    (tmp_path / "folder.index").mkdir()
    for in_path, message in ((tmp_path / "nothing", "There is no checkpoint"), (tmp_path / "empty", "holds no checkpoint"),
                             (tmp_path / "text", "can't be read as a checkpoint: "),
                             (tmp_path / "short", "can't be read as a checkpoint: "),
                             (tmp_path / "folder", "can't be read as a checkpoint: ")):
        with pytest.raises(ValueError, match=message):
            convert(in_path, tmp_path / "new", "slim")
        with pytest.raises(ValueError, match=message):
            assignment_map(in_path)
    with pytest.raises(ValueError, match="There is no directory '.*absent' to write to"):
        convert(path, tmp_path / "absent" / "new", "slim")
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'model_checkpoint_path: ""'])
def test_a_directory_whose_state_file_is_damaged_is_refused(tmp_path, content):
    path = write(tmp_path / "model", floats("fc/W"))
    (tmp_path / "checkpoint").write_bytes(content)
    with pytest.raises(ValueError, match="The file 'checkpoint' in the directory .* is damaged: give a checkpoint's prefix"):
        convert(tmp_path, tmp_path / "new", "slim")
    assert convert(path, tmp_path / "new", "slim") == {"fc/W": "fc/weights"}


@pytest.mark.parametrize("out", ["", "folder/", "folder/.", "folder/..", ".", "new.index", "new.meta",
                                 "folder/new.data-00000-of-00001"])
def test_what_is_no_name_for_a_checkpoint_is_refused(tmp_path, monkeypatch, capsys, out):
    path = write(tmp_path / "model", floats("fc/W"))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["convert", path, out, "--to", "slim"]) == 2
    assert capsys.readouterr() == (
        "", "error: %r is no name for a checkpoint: give its prefix, such as DIRECTORY/model.ckpt.\n" % out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_that_can_not_be_written_is_one_sentence_and_leaves_nothing(tmp_path, capsys):
    path = write(tmp_path / "model", {"fc/W": np.zeros(1000, np.float32)})
    assert main(["convert", path, "/proc/new", "--to", "slim"]) == 2
    assert capsys.readouterr().err.endswith("; No such file or directory\n")
    for size in (10, 1000):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # to a program that is a full disk
        try:
            assert main(["convert", path, str(tmp_path / "new"), "--to", "slim"]) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        error = capsys.readouterr().err
        assert error.startswith("error: TensorFlow could not convert %r: " % path) and error.endswith("; File too large\n")
        assert error.count("\n") == 1 and not list(tmp_path.glob("new*"))


def test_an_object_based_checkpoint_is_refused(tmp_path):
    path = write(tmp_path / "model", floats("layer-0/gamma/.ATTRIBUTES/VARIABLE_VALUE"))
    with pytest.raises(ValueError, match="was saved by tf.train.Checkpoint, whose names are paths of objects"):
        convert(path, tmp_path / "new", "slim")


def test_command_line_lists_what_names_are_recognized_as(tmp_path, capsys):
    path = write(tmp_path / "model", {
        "c/W": np.zeros([3, 3, 1, 2], np.float32), "c/W/Momentum": np.zeros([3, 3, 1, 2], np.float32),
        "bn/gamma": np.ones(2), "bn/moving_mean": np.ones(2), "global_step": np.array(7)})
    assert main(["list", path]) == 0
    assert capsys.readouterr().out == """\
NAME            SHAPE         DTYPE    RECOGNIZED AS
bn/gamma        [2]           float64  gamma
bn/moving_mean  [2]           float64  moving_mean (layers, slim)
c/W             [3, 3, 1, 2]  float32  kernel (tensorpack)
c/W/Momentum    [3, 3, 1, 2]  float32  kernel (tensorpack), its Momentum
global_step     []            int64    unknown
5 names, 1 of them unknown.
"""


def test_command_line_says_what_changed_and_what_is_unknown(tmp_path, capsys):
    path = write(tmp_path / "model", floats("net/c/W", "net/c/bn/mean/EMA", "net/own", "bn/gamma"))
    out = str(tmp_path / "new")
    assert main(["convert", path, out, "--to", "slim", "--scope", "/bn(?=$)=/BatchNorm", "--scope", "^net/="]) == 0
    assert capsys.readouterr().out == """\
Wrote %s: 2 of 4 names changed.
  net/c/W -> c/weights
  net/c/bn/mean/EMA -> c/BatchNorm/moving_mean
Of no known kind, changed by --scope alone (1):
  net/own
""" % out
    assert sorted(contents(out)) == ["bn/gamma", "c/BatchNorm/moving_mean", "c/weights", "net/own"]


def test_users_mistakes_are_told_without_traceback(tmp_path, capsys):
    path = write(tmp_path / "model", floats("fc/W", "fc/kernel"))
    new = str(tmp_path / "new")
    for arguments, message in (
            (["list", str(tmp_path / "nothing")], "There is no checkpoint '%s'." % (tmp_path / "nothing")),
            (["convert", path, new, "--to", "layers", "--scope", "^fc=a", "--scope", "b=c"],
             "The pattern 'b' matches no scope."),
            (["convert", path, new, "--to", "slim"],
             "Different variables would get the same name:\n  fc/W and fc/kernel would be fc/weights")):
        assert main(arguments) == 2
        assert capsys.readouterr() == ("", "error: %s\n" % message)
    for arguments, message in ((["convert", path, new, "--to", "caffe"], "invalid choice: 'caffe'"),
                               (["convert", path, new, "--to", "slim", "--scope", "bn"], "'bn' is not REGEX=REPLACEMENT")):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))


def test_a_broken_checkpoint_is_one_sentence_and_nothing_is_written(tmp_path, capsys):
    path = write(tmp_path / "model", {"fc/W": np.zeros(1000, np.float32)})
    with open(path + ".data-00000-of-00001", "r+b") as file:
        file.truncate(100)
    assert main(["convert", path, str(tmp_path / "new"), "--to", "slim"]) == 2
    error = capsys.readouterr().err
    assert error == "error: TensorFlow could not convert %r: Read less bytes than requested\n" % path
    assert not list(tmp_path.glob("new*"))


@own_process
@pytest.mark.laws
def test_runs_as_a_module_without_a_warning(tmp_path):
    path = write(tmp_path / "model", floats("bn/mean/EMA"))

    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "tf_syncbn.checkpoints"] + list(arguments), cwd=str(ROOT),
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)

    made = run("convert", path, str(tmp_path / "new"), "--to", "layers")
    assert made.returncode == 0 and "bn/mean/EMA -> bn/moving_mean" in made.stdout
    assert "Warning" not in made.stderr
    again = run("convert", path, str(tmp_path / "new"), "--to", "layers")
    assert again.returncode == 2 and again.stdout == ""
    assert again.stderr.rstrip().split("\n")[-1] == (
        "error: '%s.index' exists, and nothing is written over." % (tmp_path / "new"))
    assert "Traceback" not in again.stderr
