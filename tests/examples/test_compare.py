"""The comparison of one tower, synced and unsynced towers: fair, exact, resumed where it was cut, and its table."""
import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from examples.cifar10 import compare, data
from examples.cifar10 import model as resnets
from examples.cifar10.task import MEASURES
from examples.training import comparison
from examples.training.compare import KINDS, Trainings, curve

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("compare")]  # they share trainings
SMALL = ["--depth", "8", "--batch-size", "4", "--images-a-tower", "2", "--seeds", "1", "--steps", "5"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module", autouse=True, params=["one layer", pytest.param("whole network", marks=pytest.mark.sweep)])
def few_images(request):
    """An epoch has three steps of 4. The network is of one layer; test_train.py holds all of it to the law."""
    patch = pytest.MonkeyPatch()
    if request.param == "one layer":
        patch.setattr(resnets, "_block", lambda x, *_: x[..., :16])
    patch.setattr(data, "generate", lambda made=data.generate(13, 20): made)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a comparison that was cut in its third training, done again, and what both commands wrote and returned."""
    folder, train_one, patch = tmp_path_factory.mktemp("compare"), Trainings.train_one, pytest.MonkeyPatch()
    called = []

    def cut(self, kind, seed, start):
        called.append(kind)
        if len(called) == 3:
            raise KeyboardInterrupt
        return train_one(self, kind, seed, start)

    patch.setattr(Trainings, "train_one", cut)
    first = compare.main(SMALL + ["--out", str(folder)])
    after_cut = json.loads((folder / "compare.json").read_text())
    second = compare.main(SMALL + ["--out", str(folder)])
    patch.undo()
    return folder, (first, second), called, after_cut


@pytest.mark.laws
def test_a_comparison_that_was_cut_goes_on_and_repeats_nothing(finished):
    folder, statuses, called, after_cut = finished
    assert statuses == (130, 0) and called == ["one", "synced", "unsynced", "unsynced", "unsynced-all"]
    found = json.loads((folder / "compare.json").read_text())
    assert [run["kind"] for run in found["runs"]] == list(KINDS)
    assert found["runs"][:2] == after_cut["runs"] and len(after_cut["runs"]) == 2
    assert found["settings"]["data"] == "generated images (not CIFAR-10)"
    assert (folder / "compare.png").read_bytes().startswith(PNG) and len(list(folder.iterdir())) == 2


@pytest.mark.laws
def test_finished_comparison_is_shown_again_and_takes_more_seeds(finished, capsys, monkeypatch):
    folder, _, _, _ = finished
    monkeypatch.setattr(Trainings, "train_one", lambda self, kind, seed, start: pytest.fail("trained again"))
    before = (folder / "compare.json").read_text()
    assert compare.main(SMALL + ["--out", str(folder)]) == 0
    assert comparison.table(json.loads(before), MEASURES[0]) in capsys.readouterr().out
    assert (folder / "compare.json").read_text() == before
    seeds = []
    monkeypatch.setattr(Trainings, "initial_values", lambda self, seed: None)
    monkeypatch.setattr(Trainings, "train_one", lambda self, kind, seed, start: (
        seeds.append(seed), dict(json.loads(before)["runs"][0], kind=kind, seed=seed))[1])
    assert compare.main(SMALL[:-4] + ["--seeds", "2"] + SMALL[-2:] + ["--out", str(folder)]) == 0
    assert seeds == [1] * 4
    (folder / "compare.json").write_text(before)


@pytest.mark.laws
def test_synced_towers_train_as_one_and_unsynced_ones_do_not(finished):
    runs = {run["kind"]: run for run in json.loads((finished[0] / "compare.json").read_text())["runs"]}
    one, synced, unsynced, of_all = (runs[kind] for kind in KINDS)
    assert len(one["first_losses_in_float64"]) == len(one["first_losses"]) == 5
    np.testing.assert_allclose(synced["first_losses_in_float64"], one["first_losses_in_float64"], rtol=1e-10)
    np.testing.assert_allclose(one["first_losses"], one["first_losses_in_float64"], rtol=1e-2)
    assert np.abs(np.subtract(unsynced["first_losses_in_float64"], one["first_losses_in_float64"])).max() > 1e-3
    # Moving averages have no part in training. On a GPU two runs differ by rounding, elsewhere in no bit.
    rounding = 1e-6 if tf.config.experimental.list_physical_devices("GPU") else 0
    np.testing.assert_allclose(of_all["first_losses"], unsynced["first_losses"], rtol=rounding)
    assert [run["curve"][-1] for run in runs.values()] == [[5, round(run["first_losses"][-1], 5)] for run in runs.values()]
    assert all(0 <= run["test_accuracy"] <= 1 for run in runs.values())


@pytest.mark.laws
def test_all_kinds_begin_with_the_same_values_and_see_the_same_batches(monkeypatch):
    made = []
    monkeypatch.setattr(compare.comparing, "compare", lambda settings, described, *functions: made.append(
        Trainings(settings, *functions)))
    compare.main(SMALL)
    trainings, found = made[0], []
    for seed, kinds in ((0, KINDS), (1, ["synced"])):
        start = trainings.initial_values(seed)
        for kind in kinds:
            with trainings.built(kind, seed, start) as (training, session):
                values = session.run({v.op.name: v.read_value() for v in tf.global_variables()})
                training.pipeline.start(session, 1)
                found.append((seed, values, session.run(training.pipeline.batch)))
        seeds_values, seeds_batch = found[-1][1:]
        for _, values, batch in found[-len(kinds):]:
            assert set(values) == set(start) and all(np.array_equal(values[name], start[name]) for name in start)
            assert all(np.array_equal(*each) for each in zip(batch, seeds_batch))
    assert not np.array_equal(found[0][1]["first/kernel"], seeds_values["first/kernel"])
    assert not np.array_equal(found[0][2][0], seeds_batch[0])


def made(kind, seed, accuracy, losses, milliseconds=10.0):
    return {"kind": kind, "seed": seed, "test_accuracy": accuracy, "milliseconds_a_step": milliseconds, "first_losses": losses,
            "first_losses_in_float64": losses, "curve": [[10, 2.5], [20, 2.0]]}


MADE = {"settings": {"model": "ResNet-8", "data": "none", "batch_size": 16, "images_a_tower": 2, "steps": 20,
                     "learning_rate": 0.1, "tensorflow": "3"},
        "runs": [made("one", 0, 0.5, [2.5, 2.0]), made("synced", 0, 0.25, [2.5, 2.125], 30.0), made("one", 1, 0.52, [2.0, 1.0]),
                 made("synced", 1, 0.5, [1.75, 1.0], 20.0), made("unsynced", 2, 0.125, [1.0, 1.0])]}


def test_table_has_the_numbers_of_the_file():
    _, _, one, synced, unsynced = [line.split("  ") for line in comparison.table(MADE, MEASURES[0]).split("\n")]
    assert [word.strip() for word in one if word.strip()] == ["one tower of 16", "51.00 (50.00-52.00)", "-", "-", "10"]
    assert [word.strip() for word in synced if word.strip()] == [
        "8 synced towers of 2", "37.50 (25.00-50.00)", "2.5e-01", "2.5e-01", "25"]
    assert [word.strip() for word in unsynced if word.strip()] == [  # there is no one tower of its seed
        "8 unsynced towers of 2, averages of tower 0", "12.50 (12.50-12.50)", "-", "-", "10"]


def test_picture_of_a_comparison_that_lacks_runs_is_drawn(tmp_path):
    comparison.draw(MADE, MEASURES[0], str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_curve_has_the_means_of_stretches():
    assert curve([1.0, 3.0]) == [[1, 1.0], [2, 3.0]]
    points = curve(list(range(120)))
    assert len(points) == 60 and points[0] == [2, 0.5] and points[-1] == [120, 118.5]


@pytest.mark.parametrize("arguments,message", [
    (["--batch-size", "16", "--images-a-tower", "3"], "A batch of 16 does not make two or more towers of 3 images each"),
    (["--batch-size", "2", "--images-a-tower", "2"], "A batch of 2 does not make two or more towers of 2"),
    (["--batch-size", "16"], "A batch of 16 is larger than the 13 training images"),
    (["--data-dir", "/nonexistent"], "There is no folder /nonexistent"),
    (["--depth", "9"], r"6n + 2"),
    (["--learning-rate", "1e30", "--seeds", "1"], "The loss is "),
    (["--out", "/proc/new"], "The folder /proc/new can't be made")])
def test_bad_input_is_one_sentence_and_status_2(tmp_path, capsys, arguments, message):
    assert compare.main(SMALL + ["--out", str(tmp_path / "new")] + arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error
    assert not (tmp_path / "new").exists() or not json.loads((tmp_path / "new" / "compare.json").read_text())["runs"]


@pytest.mark.parametrize("content,message", [
    ("{", "is damaged"), ("[]", "is damaged"), ("{}", "is damaged"), ('{"settings": {}, "runs": [1]}', "is damaged"),
    ('{"settings": {}, "runs": [{"kind": "one"}]}', "is damaged"),
    (json.dumps(MADE), "holds a comparison with data none, and generated images (not CIFAR-10) was asked for: choose another")])
def test_a_file_that_is_damaged_or_of_other_settings_is_refused_and_stays(tmp_path, capsys, content, message):
    path = tmp_path / "compare.json"
    path.write_text(content)
    assert compare.main(SMALL + ["--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: %s " % path) and message in error and error.count("\n") == 1
    assert path.read_text() == content


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--steps", "x"], ["--images-a-tower", "-1"]])
def test_arguments_that_make_no_sense_are_refused_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        compare.main(arguments)
    assert error.value.code == 2 and "Traceback" not in capsys.readouterr().err
