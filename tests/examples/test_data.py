"""CIFAR-10's files, right and wrong, and the pipeline."""
import errno
import os
import pickle

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from examples.cifar10 import data

RECORD = 3073


@pytest.fixture(scope="module")
def records():
    """Six files of 10,000 records."""
    rng = np.random.RandomState(0)
    made = rng.randint(0, 256, (10000, RECORD)).astype(np.uint8)
    made[:, 0] = np.arange(10000) % 10
    return made


@pytest.fixture(scope="module")
def binary(records, tmp_path_factory):
    """A folder with the binary files; tests that damage one write it back."""
    root = tmp_path_factory.mktemp("binary")
    folder = root / data.BINARY_FOLDER
    folder.mkdir()
    for name in ["data_batch_%d" % i for i in range(1, 6)] + ["test_batch"]:
        records.tofile(str(folder / (name + ".bin")))
    return root


@pytest.mark.laws
def test_binary_files_are_read_plane_by_plane(binary, records):
    dataset = data.load(str(binary))
    assert dataset.train.images.shape == (50000, 32, 32, 3) and dataset.test.images.dtype == np.uint8
    assert dataset.name == "CIFAR-10" and dataset.train.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    pixel = 1 + 3 * 32 + 5
    np.testing.assert_array_equal(dataset.test.images[7, 3, 5], records[7, [pixel, pixel + 1024, pixel + 2048]])
    inside = data.load(str(binary / data.BINARY_FOLDER))
    np.testing.assert_array_equal(inside.test.labels, dataset.test.labels)


@pytest.mark.laws
def test_python_files_hold_the_same(binary, records, tmp_path):
    folder = tmp_path / data.PICKLE_FOLDER
    folder.mkdir()
    for name in ["data_batch_%d" % i for i in range(1, 6)] + ["test_batch"]:
        with open(str(folder / name), "wb") as f:
            pickle.dump({b"data": records[:, 1:], b"labels": records[:, 0].tolist()}, f, protocol=2)
    ours, theirs = data.load(str(tmp_path)), data.load(str(binary))
    np.testing.assert_array_equal(ours.test.images, theirs.test.images)
    np.testing.assert_array_equal(ours.train.labels, theirs.train.labels)


def damaged(path, content):
    """Writes bytes over a file and gives back what was there."""
    with open(path, "rb") as f:
        before = f.read()
    with open(path, "wb") as f:
        f.write(content(before))
    return before


@pytest.mark.parametrize("content,message", [
    (lambda b: b[:-1], "is truncated: it has 30729999 bytes where 30730000 were expected"),
    (lambda b: b + b"x", "is too long: it has 30730001 bytes"),
    (lambda b: b[:5 * RECORD] + b"\x0b" + b[5 * RECORD + 1:],
     "has the label 11 in record 5; labels are whole numbers from 0 to 9"),
])
def test_damaged_binary_file_is_refused(binary, content, message):
    path = str(binary / data.BINARY_FOLDER / "data_batch_3.bin")
    before = damaged(path, content)
    try:
        with pytest.raises(data.DataError, match="data_batch_3.bin " + message):
            data.load(str(binary))
    finally:
        damaged(path, lambda _: before)


def test_missing_files_are_refused(binary, tmp_path):
    with pytest.raises(data.DataError, match="There is no folder"):
        data.load(str(tmp_path / "nowhere"))
    with pytest.raises(data.DataError, match="There is no CIFAR-10 in"):
        data.load(str(tmp_path))
    path = str(binary / data.BINARY_FOLDER / "test_batch.bin")
    os.rename(path, path + ".away")
    try:
        with pytest.raises(data.DataError, match="test_batch.bin is missing"):
            data.load(str(binary))
    finally:
        os.rename(path + ".away", path)


class Hostile:
    """A pickle that would run code."""

    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("content,message", [
    (b"not a pickle", "can't be read"),
    (pickle.dumps(Hostile()), "can't be read: it refers to .*mkdir"),
    (pickle.dumps({b"data": np.zeros([3, 3072], np.uint8), b"labels": [0, 1, 2]}, 2),
     "can't be read: it holds 9216 bytes as uint8 .* and 3 labels where"),
    (pickle.dumps({b"data": np.zeros([10000, 3072], np.uint8), b"labels": [0, 2.5] * 5000}, 2),
     "can't be read: it has the label 2.5 in record 1; labels are whole numbers from 0 to 9"),
], ids=["no pickle", "code", "other images", "other labels"])
def test_damaged_pickle_is_refused_and_runs_nothing(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(data.DataError, match="data_batch_1 " + message):
        data.load(str(tmp_path))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["data_batch_1.bin", "data_batch_1"])
def test_a_data_file_that_can_not_be_read_is_named(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    with pytest.raises(data.DataError, match="%s can't be read: Is a directory" % name):
        data.load(str(tmp_path))
    (tmp_path / name).rmdir()
    (tmp_path / name).write_bytes(b"")

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(data.DataError, match="%s can't be read: Permission denied" % name):
        data.load(str(tmp_path))


def test_generated_images_are_reproducible_and_said_not_to_be_cifar10():
    one, two = data.generate(50, 20), data.generate(50, 20)
    np.testing.assert_array_equal(one.train.images, two.train.images)
    assert "not CIFAR-10" in one.name and sorted(np.bincount(one.train.labels)) == [5] * 10
    assert one.test.images.shape == (20, 32, 32, 3) and one.test.images.dtype == np.uint8


def batches(pipeline, session, *start):
    pipeline.start(session, *start)
    found = []
    while True:
        try:
            found.append(session.run(pipeline.batch))
        except tf.errors.OutOfRangeError:
            return found


def test_training_pipeline_shuffles_augments_and_goes_on_where_it_was():
    source = data.generate(50, 10).train
    pipeline = data.Pipeline(source, 16, True, seed=1)
    with tf.Session() as session:
        first, again, second, rest = (batches(pipeline, session, *start) for start in ((0,), (0,), (1,), (0, 2)))
    assert pipeline.steps_an_epoch == len(first) == 3 and first[0][0].shape == (16, 32, 32, 3)
    np.testing.assert_array_equal(first[0][0], again[0][0])
    assert (first[0][1] != second[0][1]).any()
    np.testing.assert_array_equal(rest[0][0], first[2][0])


def test_test_pipeline_gives_every_image_once_in_order():
    source = data.generate(50, 23).test
    pipeline = data.Pipeline(source, 10, False)
    with tf.Session() as session:
        found = batches(pipeline, session)
    assert pipeline.steps_an_epoch == len(found) == 3
    np.testing.assert_array_equal(np.concatenate([labels for _, labels in found]), source.labels)
    pixels = np.concatenate([images for images, _ in found])
    assert abs(pixels.mean()) < 0.5 and 0.5 < pixels.std() < 1.5


def test_augmented_image_is_a_crop_of_the_padded_one_or_its_mirror():
    source = data.generate(10, 10).train
    pipeline = data.Pipeline(source, 10, True)
    with tf.Session() as session:
        (images, labels), = batches(pipeline, session)
    order = np.arange(10)
    np.random.RandomState(0).shuffle(order)
    assert labels.tolist() == source.labels[order].tolist()
    kinds = set()
    for image, index in zip(images, order):
        padded = np.pad(source.images[index], ((4, 4), (4, 4), (0, 0)), "constant")
        pixels = np.rint(image * data._STD + data._MEAN)
        found = [(y, x, flip) for y in range(9) for x in range(9) for flip in (False, True)
                 if (pixels[:, ::-1] if flip else pixels)[0, 0].tolist() == padded[y, x].tolist()
                 and np.array_equal(pixels[:, ::-1] if flip else pixels, padded[y:y + 32, x:x + 32])]
        assert found, "no crop"
        kinds.add(found[0][2])
    assert kinds == {False, True}


@pytest.mark.parametrize("side", [1, 6, 15, 100])
def test_cutout_blanks_a_square_of_an_image_and_changes_nothing_else(side):
    source = data.generate(60, 10).train
    pipelines = [data.Pipeline(source, 60, True, 3, cutout=cutout) for cutout in (0, side)]
    with tf.Session() as session:
        (whole, labels), (cut, same_labels) = [batches(pipeline, session)[0] for pipeline in pipelines]
    np.testing.assert_array_equal(labels, same_labels)
    centers = set()
    for image, changed in zip(whole, cut):
        blank = (changed == 0).all(2) & (image != 0).any(2)
        np.testing.assert_array_equal(changed[~blank], image[~blank])
        tall, wide = [np.flatnonzero(blank.any(axis)) for axis in (1, 0)]
        assert blank.sum() == len(tall) * len(wide) == (np.ptp(tall) + 1) * (np.ptp(wide) + 1)
        for along in (tall, wide):  # the square may reach beyond an edge
            assert len(along) == side or len(along) < side and (along[0] == 0 or along[-1] == 31)
        centers.add((tall[0], wide[0]))
    assert len(centers) > 30 or side == 100
