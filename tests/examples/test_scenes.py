"""The segmentation example's data: the layouts of CamVid and Cityscapes, what is damaged in them, and the pipeline."""
import shutil
import struct
import zlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from examples.segmentation import scenes
from examples.segmentation.model import VOID
from examples.segmentation.pipeline import Pipeline
from examples.segmentation.task import accuracy, batch_of_test, intersections_over_unions


def write_png(path, values):
    """Writes uint8 [h, w, 1 or 3] as a PNG file, without TensorFlow."""
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def scene(seed, labels, height=6, width=8):
    rng = np.random.RandomState(seed)
    return (rng.randint(0, 256, [height, width, 3]).astype(np.uint8),
            np.array(labels, np.uint8)[rng.randint(0, len(labels), [height, width, 1])])


@pytest.fixture
def camvid(tmp_path):
    """Four images to train on and two to test on, in CamVid's layout."""
    for split, count in (("train", 4), ("test", 2)):
        for number in range(count):
            image, labels = scene(number, range(12))
            write_png(tmp_path / split / ("%d.png" % number), image)
            write_png(tmp_path / (split + "annot") / ("%d.png" % number), labels)
    return tmp_path


@pytest.fixture
def cityscapes(tmp_path):
    for split in ("train", "val"):
        for number in range(2):
            image, labels = scene(number, range(34))
            write_png(tmp_path / "leftImg8bit" / split / "ulm" / ("ulm_%d_leftImg8bit.png" % number), image)
            write_png(tmp_path / "gtFine" / split / "ulm" / ("ulm_%d_gtFine_labelIds.png" % number), labels)
    return tmp_path


def batches(pipeline, epoch=0, skip=0):
    with tf.Session() as session:
        pipeline.start(session, epoch, skip)
        return [session.run(pipeline.batch) for _ in range(pipeline.steps_an_epoch - skip)]


def test_camvid_is_found_in_its_folder_and_in_one_that_holds_it(camvid, tmp_path_factory):
    dataset = scenes.load(str(camvid))
    assert [len(dataset.train.images), len(dataset.test.labels)] == [4, 2]
    assert (dataset.name, len(dataset.classes), dataset.colours.shape) == ("CamVid", 11, (11, 3))
    assert dataset.table[:12].tolist() == list(range(11)) + [VOID] and set(dataset.table[12:255]) == {scenes.WRONG}
    around = tmp_path_factory.mktemp("around")
    shutil.copytree(str(camvid), str(around / "camvid"))
    assert len(scenes.load(str(around)).train.images) == 4


def test_cityscapes_is_tested_on_its_validation_images_by_its_19_classes(cityscapes):
    dataset = scenes.load(str(cityscapes))
    assert (dataset.name, len(dataset.classes)) == ("Cityscapes", 19)
    assert dataset.test.images[1].endswith("val/ulm/ulm_1_leftImg8bit.png")
    assert dataset.test.labels[1].endswith("gtFine/val/ulm/ulm_1_gtFine_labelIds.png")
    table = dict(enumerate(dataset.table.tolist()))
    assert [table[label] for label in (7, 8, 11, 26, 33)] == [0, 1, 2, 13, 18]
    assert sum(number < 19 for number in table.values()) == 19
    assert [table[label] for label in (0, 6, 9, 30, 255)] == [VOID] * 5 and table[34] == scenes.WRONG


def test_test_images_are_read_as_they_are(camvid):
    dataset = scenes.load(str(camvid))
    (images, labels), = batches(Pipeline(dataset.test, dataset.table, 8, False))
    for number in range(2):
        pixels, stored = scene(number, range(12))
        np.testing.assert_allclose(images[number], (pixels - [123.7, 116.3, 103.5]) / [58.4, 57.1, 57.4], rtol=1e-5)
        np.testing.assert_array_equal(labels[number], np.where(stored == 11, VOID, stored)[..., 0])


def scenes_that_tell(folder, size=(12, 16)):
    """Images whose red and green say where a pixel was, and whose labels are their red, in parts."""
    rows, columns = np.mgrid[:size[0], :size[1]]
    image = np.stack([rows * 10, columns * 10, 0 * rows], -1).astype(np.uint8)
    for number in range(6):
        write_png(folder / "train" / ("%d.png" % number), image)
        write_png(folder / "trainannot" / ("%d.png" % number), (rows[..., None] // 2).astype(np.uint8))
    shutil.copytree(str(folder / "train"), str(folder / "test"))
    shutil.copytree(str(folder / "trainannot"), str(folder / "testannot"))
    return scenes.load(str(folder))


@pytest.mark.parametrize("crop", [(8, 8), (20, 30)])
def test_training_images_are_scaled_cropped_and_flipped_with_their_labels(tmp_path, crop):
    dataset = scenes_that_tell(tmp_path)
    pipeline = Pipeline(dataset.train, dataset.table, 2, True, 5, crop=crop)
    images, labels = map(np.concatenate, zip(*(batch for epoch in range(4) for batch in batches(pipeline, epoch))))
    assert images.shape == (24,) + crop + (3,) and labels.shape == (24,) + crop
    rows, columns = (images[..., channel] * scale + mean for channel, scale, mean in ((0, 58.4, 123.7), (1, 57.1, 116.3)))
    inside = labels != VOID
    assert np.abs(images[~inside]).max() == 0 if (~inside).any() else crop == (8, 8)
    # A label is the half of its row, up to what lies between two pixels.
    assert np.abs(rows[inside] / 20 - 0.25 - labels[inside]).max() <= 0.75
    steps = np.array([np.median((row[:, 1:] - row[:, :-1])[of[:, 1:] & of[:, :-1]]) for row, of in zip(columns, inside)])
    assert 6 < (steps < 0).sum() < 18  # flipped
    factors = 10 / np.abs(steps)
    assert 0.45 < factors.min() < 0.8 and 1.3 < factors.max() < 2.2


@pytest.mark.laws
def test_recoloured_images_have_another_saturation_contrast_and_brightness_and_are_the_same_else(camvid):
    dataset, factors = scenes.load(str(camvid)), []

    def of(epoch, recolour):
        (images, labels), = batches(Pipeline(dataset.train, dataset.table, 4, True, 3, None, (5, 7), recolour), epoch)
        return images.astype(np.float64), labels
    for epoch in range(6):
        (plain, labels), (found, same) = of(epoch, 0.0), of(epoch, 0.4)
        np.testing.assert_array_equal(labels, same)
        for before, after, inside in zip(plain, found, labels != VOID):
            before, after = before[inside], after[inside]
            colour = before - before.mean(-1, keepdims=True)
            columns = np.stack([colour.ravel(), (before - colour).ravel(), np.ones(before.size)], -1)
            (of_colour, contrast, brightness), _, rank, _ = np.linalg.lstsq(columns, after.ravel(), rcond=None)
            np.testing.assert_allclose(columns @ [of_colour, contrast, brightness], after.ravel(), atol=1e-5)
            factors += [(of_colour / contrast - 1, contrast - 1, brightness)] * int(rank == 3)
    assert len(factors) > 12 and (np.abs(factors) <= 0.4001).all() and (np.ptp(factors, 0) > 0.3).all()


def test_parts_of_a_training_have_the_rows_of_the_whole_batches_augmented_alike(camvid):
    dataset = scenes.load(str(camvid))

    def pipeline(rows=None):
        return Pipeline(dataset.train, dataset.table, 4, True, 3, rows, (5, 7))
    whole, parts = batches(pipeline(), 2), [batches(pipeline(rows), 2) for rows in ((0, 3), (3, 4))]
    for kind in range(2):
        np.testing.assert_array_equal(whole[0][kind], np.concatenate([part[0][kind] for part in parts]))
    assert any(not np.array_equal(*pair) for pair in zip(whole[0], batches(pipeline(), 1)[0]))


def test_images_that_differ_in_size_are_tested_one_by_one(camvid):
    dataset = scenes.load(str(camvid))
    assert batch_of_test(dataset.test, 8) == 8
    image, labels = scene(9, range(12), 5, 9)
    write_png(camvid / "test" / "9.png", image)
    write_png(camvid / "testannot" / "9.png", labels)
    dataset = scenes.load(str(camvid))
    assert batch_of_test(dataset.test, 8) == 1
    assert [images.shape for images, _ in batches(Pipeline(dataset.test, dataset.table, 1, False))] == [
        (1, 6, 8, 3), (1, 6, 8, 3), (1, 5, 9, 3)]


@pytest.mark.parametrize("damage,message", [
    (lambda root: shutil.rmtree(str(root / "train")), "There are no PNG files in the folder .*train, nor is there"),
    (lambda root: (root / "trainannot" / "2.png").unlink(), "The image .*2.png has no labels: there is no file .*trainannot"),
    (lambda root: (root / "train" / "1.png").write_bytes(b"no picture at all, but long"), "train/1.png is not a PNG file"),
    (lambda root: (root / "test" / "1.png").write_bytes(b""), "test/1.png is not a PNG file"),
    (lambda root: write_png(root / "testannot" / "0.png", scene(0, [1], 8, 6)[1]),
     "The label image .*testannot/0.png has 6 x 8 pixels where its image .*test/0.png has 8 x 6")])
def test_folders_that_are_not_whole_are_refused(camvid, damage, message):
    damage(camvid)
    with pytest.raises(scenes.DataError, match=message):
        scenes.load(str(camvid))


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(scenes.DataError, match="There is no folder"):
        scenes.load(str(tmp_path / "none"))


def test_cityscapes_without_images_or_labels_is_refused(cityscapes):
    shutil.rmtree(str(cityscapes / "gtFine" / "val"))
    with pytest.raises(scenes.DataError, match="ulm_0_leftImg8bit.png has no labels: there is no file .*gtFine/val/ulm/ulm_0_"):
        scenes.load(str(cityscapes))
    shutil.rmtree(str(cityscapes / "leftImg8bit" / "val"))
    with pytest.raises(scenes.DataError, match="There are no files .*_leftImg8bit.png in the folders of .*leftImg8bit/val"):
        scenes.load(str(cityscapes))


@pytest.mark.parametrize("damage,message", [
    (lambda path: path.write_bytes(path.read_bytes()[:-40]), "trainannot/3.png is damaged: it is no whole PNG file"),
    (lambda path: write_png(path, scene(0, [3, 77])[1]), "trainannot/3.png has the label 77, and CamVid has no such class")])
def test_damage_that_only_decoding_shows_ends_the_pipeline_and_is_named(camvid, damage, message):
    dataset = scenes.load(str(camvid))
    assert scenes.find_damage(dataset) is None
    damage(camvid / "trainannot" / "3.png")
    with pytest.raises(tf.errors.InvalidArgumentError):
        batches(Pipeline(dataset.train, dataset.table, 2, True, crop=(4, 4)))
    assert message in str(scenes.find_damage(dataset))


def test_scenes_made_here_are_the_same_again_and_have_all_classes_and_void(tmp_path):
    found = []
    for name in "ab":
        (tmp_path / name).mkdir()
        dataset = scenes.generate(str(tmp_path / name), 6, 4)
        assert scenes.find_damage(dataset) is None and len(dataset.train.images) == 6
        found.append(batches(Pipeline(dataset.test, dataset.table, 4, False))[0])
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)
    assert found[0][0].shape == (4, 48, 64, 3) and set(np.unique(found[0][1])) == {0, 1, 2, 3, VOID}


def test_intersections_over_unions_are_those_of_sets_of_pixels():
    rng = np.random.RandomState(0)
    labels, predictions = rng.randint(0, 3, 200), rng.randint(0, 3, 200)
    confusion = np.zeros([5, 5], np.int64)
    np.add.at(confusion, (labels, predictions), 1)
    confusion[3, 0] = 4  # of a class that is never predicted
    labels, predictions = np.append(labels, [3] * 4), np.append(predictions, [0] * 4)
    found = intersections_over_unions(confusion)
    for number in range(4):
        of_labels, of_predictions = set(np.flatnonzero(labels == number)), set(np.flatnonzero(predictions == number))
        assert found[number] == pytest.approx(len(of_labels & of_predictions) / len(of_labels | of_predictions))
    assert np.isnan(found[4]) and found[3] == 0
    assert accuracy(confusion) == pytest.approx((labels == predictions).mean())
