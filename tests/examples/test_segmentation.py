"""The segmentation example from the command line: it trains, goes on, is evaluated, drawn and compared, and refuses bad input."""
import contextlib
import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from examples.segmentation import arguments, compare, evaluate, model, predict, scenes, task, train
from examples.training import batch_norm
from examples.training.compare import KINDS
from tests.examples.test_scenes import write_png

pytestmark = [pytest.mark.xdist_group("segmentation"), pytest.mark.skipif(  # they share trainings
    tf.__version__.startswith("1."), reason="Grappler of TensorFlow 1.15 takes minutes for the graph of a step")]
SMALL = ["--width", "8", "--crop", "24", "32", "--batch-size", "4"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module", autouse=True, params=["few layers", pytest.param("all parts", marks=pytest.mark.sweep)])
def few_scenes(request, tmp_path_factory):
    """An epoch has three steps of 4; a stage of the network has no block, which test_pspnet.py has, and the pyramid one bin."""
    patch = pytest.MonkeyPatch()
    patch.setitem(model.BLOCKS, 18, (1, 1, 1, 1))
    if request.param == "few layers":
        patch.setattr(model, "BINS", (1,))
        patch.setattr(model._Network, "_block", lambda self, x, channels, stride, dilation: x[:, ::stride, ::stride])
    made = scenes.generate(str(tmp_path_factory.mktemp("scenes")), 13, 5)
    patch.setattr(arguments, "generate", lambda folder: made)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a finished training of seven steps on one tower, three of them after it went on."""
    folder = tmp_path_factory.mktemp("trained")
    for steps in ("4", "7"):
        assert train.main(SMALL + ["--steps", steps, "--num-towers", "1", "--evaluate-every", "2",
                                   "--train-dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def evaluated(trained):
    """What the evaluation by images says."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert evaluate.main(["--train-dir", str(trained), "--batch-size", "3", "--num-towers", "3"]) == 0
    return out.getvalue()


def test_training_goes_on_and_leaves_checkpoint_history_results_and_curve(trained):
    results = json.loads((trained / "results.json").read_text())
    assert results["step"] == 7 and results["data"] == "scenes made here (not CamVid)"
    assert 0 <= results["test_mean_iou"] <= results["test_accuracy"] <= 1
    assert [record["step"] for record in results["history"]] == [4, 6, 7]  # every second epoch, and where a training ended
    assert all(set(record) == {"step", "epoch", "train_loss", "train_accuracy", "test_mean_iou", "test_accuracy"}
               for record in results["history"])
    assert (trained / "curve.png").read_bytes().startswith(PNG)
    tags = {value.tag for path in trained.glob("events*") for event in tf.train.summary_iterator(str(path))
            for value in event.summary.value}
    assert {"loss", "accuracy", "learning_rate", "test_mean_iou", "test_accuracy"} <= tags


def test_evaluation_finds_what_the_training_found_and_says_it_of_each_class(trained, evaluated):
    results = json.loads((trained / "results.json").read_text())
    assert "Test mean IoU %.2f %%, pixel accuracy %.2f %% on scenes made here" % (
        100 * results["test_mean_iou"], 100 * results["test_accuracy"]) in evaluated
    each = re.findall(r"^(sky|ground|box|ball) +(?:([\d.]+) %|in no image)$", evaluated, re.M)
    assert len(each) == 4
    found = [float(value) for _, value in each if value]
    assert np.mean(found) == pytest.approx(100 * results["test_mean_iou"], abs=0.01)


@pytest.mark.laws
def test_evaluation_by_windows_as_large_as_the_image_is_that_of_the_image(trained, evaluated, capsys):
    assert evaluate.main(["--train-dir", str(trained), "--window", "48", "64"]) == 0
    assert capsys.readouterr().out == evaluated
    assert evaluate.main(["--train-dir", str(trained), "--window", "24", "40", "--batch-size", "5"]) == 0
    assert "Test mean IoU" in capsys.readouterr().out


@pytest.mark.parametrize("size,window", [
    ((10, 14), (6, 6)), ((6, 6), (6, 6)), ((4, 20), (6, 5)), ((3, 3), (6, 5)), ((7, 6), (6, 5))])
def test_windows_cover_every_pixel_and_are_averaged(size, window):
    image, seen = np.random.RandomState(0).randn(*size, 3), []

    def logits_of(batch):
        seen.extend(batch)
        return np.stack([batch.sum(-1), np.full(batch.shape[:-1], len(seen))], -1)
    found = evaluate.classify(image, window, logits_of, 2)
    assert found.shape == size + (2,)
    np.testing.assert_allclose(found[..., 0], image.sum(-1), atol=1e-12)
    assert found[..., 1].min() >= 1 and all(one.shape == window + (3,) for one in seen)
    for length, of in zip(size, window):
        begins = evaluate.begins(max(length, of), of)
        assert begins[0] == 0 and begins[-1] + of == max(length, of) and all(0 < d <= of / 3 + 1 for d in np.diff(begins))


def test_predictions_are_drawn_beside_images_and_labels(trained, tmp_path, capsys):
    path = tmp_path / "predictions.png"
    assert predict.main(["--train-dir", str(trained), "--count", "2", "--out", str(path)]) == 0
    assert path.read_bytes().startswith(PNG) and "2 test images of scenes made here" in capsys.readouterr().out
    colours = np.array([[255, 0, 0], [0, 51, 0]], np.uint8)
    np.testing.assert_allclose(predict.coloured(np.array([[0, 1, 255]]), colours), [[[1, 0, 0], [0, 0.2, 0], [0, 0, 0]]])


@pytest.mark.laws
@pytest.mark.parametrize("kinds", [["one", "synced"], pytest.param(list(KINDS), marks=pytest.mark.sweep)])
def test_comparison_holds_synced_towers_to_one(tmp_path, capsys, monkeypatch, kinds):
    for kind in set(KINDS) - set(kinds):
        monkeypatch.delitem(KINDS, kind)
    assert compare.main(SMALL + ["--steps", "2", "--seeds", "1", "--out", str(tmp_path)]) == 0
    assert "test mean IoU in %," in capsys.readouterr().out
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["settings"]["model"] == "PSPNet-18" and found["settings"]["crop"] == [24, 32]
    one, synced, *unsynced = (run["first_losses_in_float64"] for run in found["runs"])
    np.testing.assert_allclose(synced, one, rtol=1e-10)
    assert len(unsynced) == len(kinds) - 2 and all(np.abs(np.subtract(losses, one)).max() > 1e-3 for losses in unsynced)
    assert all(0 <= run["test_mean_iou"] <= 1 for run in found["runs"]) and (tmp_path / "compare.png").exists()


@pytest.mark.parametrize("given,chosen", [("--sync-bn", batch_norm.synced), ("--no-sync-bn", batch_norm.per_tower)])
def test_the_command_line_chooses_the_batch_norm_of_the_network(monkeypatch, given, chosen):
    monkeypatch.setattr(task, "pspnet", lambda *arguments: arguments)
    assert chosen in task.network_of(train.parse_arguments([given]), SimpleNamespace(classes=["sky", "ground"]))


def refuse(capsys, command, arguments, message):
    """Runs a command line: status 2, one sentence, no traceback."""
    assert command(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(message, error), error


@pytest.mark.parametrize("given,message", [
    (["--batch-size", "1"], "A batch of 1 is too small for 2 towers"),
    (["--batch-size", "14"], "larger than the 13 training images"),
    (["--depth", "50"], "18 or 34, not 50"), (["--width", "12"], "a multiple of 8, not 12"),
    (["--output-stride", "3"], "8 or 4, not 3"), (["--data-dir", "/nonexistent"], "There is no folder /nonexistent"),
    (["--learning-rate", "1e30", "--steps", "5", "--num-towers", "1"],
     "The loss is .* The checkpoints in .* are those of earlier steps")])
def test_bad_input_is_one_sentence_and_status_2(tmp_path, capsys, given, message):
    refuse(capsys, train.main, SMALL + ["--train-dir", str(tmp_path / "new")] + given, message)
    assert not list(tmp_path.glob("new/*.index"))


def test_what_was_not_trained_so_is_refused(trained, tmp_path, capsys):
    refuse(capsys, evaluate.main, ["--train-dir", str(tmp_path)], "There is no checkpoint in")
    for given, message in ((["--width", "16"], "holds a training with width 8, and 16 was asked for"),
                           (["--output-stride", "4"], "holds a training with output_stride 8, and 4 was asked for")):
        refuse(capsys, train.main, SMALL + ["--train-dir", str(trained)] + given, message)


@pytest.mark.laws
def test_a_damaged_file_is_named_whatever_command_meets_it(trained, tmp_path, capsys):
    rng = np.random.RandomState(0)
    for split in ("train", "test"):
        for number in range(4):
            write_png(tmp_path / split / ("%d.png" % number), rng.randint(0, 256, [30, 40, 3]).astype(np.uint8))
            write_png(tmp_path / (split + "annot") / ("%d.png" % number), rng.randint(0, 12, [30, 40, 1]).astype(np.uint8))
    damaged = tmp_path / "train" / "2.png"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    refuse(capsys, train.main, SMALL + ["--data-dir", str(tmp_path), "--steps", "2", "--num-towers", "1", "--train-dir",
                                        str(tmp_path / "new")], "The data file .*train/2.png is damaged: it is no whole PNG file")
    refuse(capsys, evaluate.main, ["--data-dir", str(tmp_path), "--train-dir", str(trained)],
           "was trained on scenes made here .*, and this is CamVid: name its --data-dir")
