"""The example's recipes: their rates, what overrides them, and folders that were trained before there were any."""
import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from examples.cifar10 import data, evaluate, model, train
from examples.cifar10.recipes import RECIPES
from examples.cifar10.task import cifar10
from examples.training.graph import Training, alone
from examples.training.schedule import learning_rate


@pytest.fixture
def one_layer(monkeypatch):
    """What a recipe does is the same with a network of one layer."""
    monkeypatch.setattr(model, "_block", lambda x, *_: x[..., :16])


def rates(recipe, steps, num_steps, **given):
    recipe = RECIPES[recipe]
    chosen = dict({"peak": recipe.learning_rate, "warmup_steps": recipe.warmup_steps}, **given)
    with tf.Session() as session:
        return session.run(learning_rate(tf.constant(steps), num_steps, decay=recipe.decay, **chosen))


def test_cosine_warms_up_and_falls_to_zero():
    np.testing.assert_allclose(rates("cosine", [0, 5, 10, 55, 100], 100, peak=0.4, warmup_steps=10), [0.04, 0.24, 0.4, 0.2, 0],
                               atol=1e-6)
    np.testing.assert_allclose(rates("cosine", [0, 199, 200], 23400), [0.0005, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rates("cosine", [0, 9], 100), [0.01, 0.1], rtol=1e-6)  # a tenth of the steps at most


def test_he_drops_to_a_tenth_at_32k_and_at_48k_of_64k_steps():
    found = rates("he", [0, 1, 31990, 32010, 47990, 48010, 63999], 64000)
    np.testing.assert_allclose(found, [0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001], rtol=1e-6)
    steps_an_epoch = 50000 // 128
    assert abs(RECIPES["he"].epochs * steps_an_epoch - 64000) < steps_an_epoch


def test_plain_command_is_the_cosine_recipe_and_options_override_a_recipe():
    plain = vars(train.parse_arguments([]))
    assert plain["recipe"] == "cosine" and plain["batch_size"] == 128 and plain["depth"] == 20 and plain["label_smoothing"] == 0
    assert [plain[name] for name in ("epochs", "learning_rate", "warmup_steps", "weight_decay")] == [60, 0.1, 200, 5e-4]
    he = vars(train.parse_arguments(["--recipe", "he"]))
    assert [he[name] for name in ("epochs", "learning_rate", "warmup_steps", "weight_decay")] == [164, 0.1, 0, 1e-4]
    he = vars(train.parse_arguments("--recipe he --epochs 3 --learning-rate 0 --warmup-steps 400 --weight-decay 0".split()))
    assert [he[name] for name in ("epochs", "learning_rate", "warmup_steps", "weight_decay")] == [3, 0, 400, 0]


@pytest.mark.parametrize("recipe,nesterov", [("cosine", True), ("he", False)])
def test_only_the_cosine_recipe_has_nesterovs_momentum(one_layer, recipe, nesterov):
    settings = train.parse_arguments(["--recipe", recipe, "--depth", "8", "--batch-size", "4", "--steps", "2"])
    Training(settings, cifar10(settings, data.generate(20, 10)), alone(["/cpu:0", "/cpu:1"]), ["/cpu:0", "/cpu:1"])
    found = {op.get_attr("use_nesterov") for op in tf.get_default_graph().get_operations() if op.type.endswith("ApplyMomentum")}
    assert found == {nesterov}


def test_smoothed_labels_have_the_cross_entropy_of_the_formula():
    rng = np.random.RandomState(0)
    logits, labels = rng.randn(6, 10), rng.randint(0, 10, 6)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    with tf.Session() as session:
        for smoothing in (0, 0.1, 0.9):
            found = session.run(model._cross_entropies(tf.constant(labels), tf.constant(logits), smoothing))
            expected = -(1 - smoothing) * log_p[np.arange(6), labels] - smoothing * log_p.mean(1)
            np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("smoothing", ["1", "-0.1", "nan"])
def test_a_label_smoothing_that_is_no_share_is_one_sentence_and_status_2(tmp_path, capsys, monkeypatch, smoothing):
    monkeypatch.setattr(data, "generate", lambda made=data.generate(150, 20): made)
    assert train.main(["--label-smoothing", smoothing, "--depth", "8", "--train-dir", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: The label smoothing is a share from 0 to less than 1, not ") and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.laws
def test_a_folder_from_before_there_were_recipes_goes_on_and_says_what_changes(one_layer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "generate", lambda made=data.generate(32, 20): made)
    command = ["--depth", "8", "--batch-size", "8", "--num-towers", "1", "--train-dir", str(tmp_path)]
    assert train.main(command + ["--epochs", "1", "--weight-decay", "1e-4"]) == 0
    path = tmp_path / "settings.json"
    settings = json.loads(path.read_text())
    for name in ("recipe", "label_smoothing", "cutout"):
        del settings[name]
    path.write_text(json.dumps(settings))
    capsys.readouterr()
    assert train.main(command + ["--epochs", "1", "--weight-decay", "1e-4"]) == 0
    assert "other settings" not in capsys.readouterr().out
    path.write_text(json.dumps(settings))
    assert train.main(command + ["--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert "Going on from step 4" in out and "after 8 steps" in out
    assert "From here on with other settings: epochs 2, not 1, weight_decay 0.0005, not 0.0001.\n" in out
    path.write_text(json.dumps(settings))
    assert evaluate.main(["--train-dir", str(tmp_path)]) == 0
