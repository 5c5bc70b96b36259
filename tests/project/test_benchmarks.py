"""The benchmarks' own arithmetic, and that every variant that is timed trains the very same network."""
import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from benchmarks import (
    conversion, gpu, graph, law, layer, long_run, memory, networks, pictures, pipeline, repeat, report, variants, why,
    workers)
from benchmarks.__main__ import BENCHMARKS as benchmarks
from benchmarks.interleave import geometric_mean, paired_ratio, take_turns
from benchmarks.saved import tensors_saved_for_backward
from benchmarks.unsynced import fused_batch_norm
from examples.cifar10 import data
from tests.processes import run_forks

pytestmark = pytest.mark.once


def test_ratios_are_of_the_same_round():
    seconds = {"a": np.array([1.0, 20.0, 3.0]), "b": np.array([2.0, 10.0, 3.0])}
    assert paired_ratio(seconds, "a", "b") == {"median": 1.0, "lower_quartile": 0.75, "upper_quartile": 1.5}
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_variants_take_turns_and_none_always_follows_the_same_other():
    calls = []
    seconds = take_turns({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=6, warm_ups=2)
    rounds = [tuple(calls[i:i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 8 and all(sorted(names) == list("abc") for names in rounds)
    assert {names.index("b") for names in rounds[2:]} == {0, 1, 2}
    assert all(len(values) == 6 for values in seconds.values())


def test_what_the_fused_op_saves_for_the_backward_pass_is_its_input_and_vectors():
    x, dy = tf.placeholder(tf.float32, [2, 4, 4, 8]), tf.placeholder(tf.float32, [2, 4, 4, 8])
    y = fused_batch_norm(tf.nn.relu(x), "bn")
    before = set(tf.get_default_graph().get_operations())
    tf.gradients(y, [x] + tf.trainable_variables(), dy)
    backward = [op for op in tf.get_default_graph().get_operations() if op not in before]
    shapes = [tensor.shape.as_list() for tensor in tensors_saved_for_backward(backward, given=[dy]) if tensor.shape.rank]
    assert sorted(shapes, key=len) == [[8], [8], [2, 4, 4, 8]]  # the batch's mean and variance


@pytest.fixture
def shallow(monkeypatch):
    """Makes ResNets of one convolution, whatever depth is asked for: what a benchmark does with them is the same."""
    def model_fn(layers, *_, made=networks.model_fn):
        return made(layers, 2)
    for module, name in ((networks, "model_fn"), (networks, "resnet_50"), (conversion, "resnet_50"), (conversion, "model_fn"),
                         (graph, "model_fn")):
        monkeypatch.setattr(module, name, model_fn)


@pytest.mark.laws
def test_every_variant_trains_the_same_network():
    (images, labels), weights = variants.make_batch(6), None
    copies = np.concatenate([images[:3]] * 2), np.concatenate([labels[:3]] * 2)
    losses, of_copies = {}, {}
    for name in (variants.SYNCED, variants.ONE_TOWER, variants.LISTS_ONE_CALL, variants.LISTS_PER_TOWER, variants.UNSYNCED):
        variant = variants.make_variant(name, num_towers=2, batch_size=3, depth=8)
        weights = weights or variant.weights()
        variant.load(weights, images, labels)
        losses[name] = [variant.step() for _ in range(3)]
        if name in (variants.SYNCED, variants.UNSYNCED):
            variant.load(weights, *copies)
            of_copies[name] = [variant.step() for _ in range(3)]
    for name in (variants.ONE_TOWER, variants.LISTS_ONE_CALL, variants.LISTS_PER_TOWER):
        np.testing.assert_allclose(losses[name], losses[variants.SYNCED], rtol=1e-3, err_msg=name)
    assert abs(losses[variants.UNSYNCED][0] / losses[variants.SYNCED][0] - 1) > 1e-3
    np.testing.assert_allclose(*of_copies.values(), rtol=1e-3)


@pytest.mark.laws
@pytest.mark.usefixtures("shallow")
def test_a_benchmark_writes_its_figures_and_the_report_shows_them(tmp_path, capsys):
    path = graph.main(["--towers", "2", "--rounds", "1", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert re.search(r"^\| 2 +\| \d+ \+ \d+ ", out, re.M) and out.endswith("\nwrote %s\n" % path)
    with open(str(path)) as file:
        row, = json.load(file)["rows"]
    synced, unsynced = (row["sizes"][name] for name in ("synced", "unsynced"))
    assert row["towers"] == 2 and synced["nodes"] + synced["function_nodes"] > unsynced["nodes"] > 100 < synced["nodes"]
    report.main([str(tmp_path)])
    assert "nodes" in capsys.readouterr().out
    assert (tmp_path / "report.md").exists() and list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("module,arguments", [
    (layer, []), (memory, []), (conversion, ["--batch-size", "1"]), (repeat, ["--steps", "3", "--towers", "1"]),
    (pipeline, ["--batch-size", "4", "--towers", "1", "--steps", "1"])])
@pytest.mark.usefixtures("shallow")
def test_a_benchmark_alone_prints_its_table_and_where_it_wrote_it(tmp_path, capsys, monkeypatch, module, arguments):
    monkeypatch.setattr(layer, "_CASES", [layer.Case((16, 32, 32, 16))])
    monkeypatch.setattr(layer, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(pipeline, "_DEPTH", 8)
    monkeypatch.setattr(data, "generate", lambda made=data.generate: made(8, 1))
    monkeypatch.setattr(memory, "in_fresh_process", lambda *_, **__: {"peak": 2 << 20, "growth": 1 << 20})
    path = module.main(["--rounds", "1", "--out", str(tmp_path)] + arguments)
    assert_table(capsys.readouterr().out, path)


def assert_table(out, path):
    """Holds what a benchmark printed to a table of its own and where it wrote it."""
    assert re.search(r"^\|-+\|", out, re.M) and re.search(r"^\| .* \d\.\d+ \(\d", out, re.M), out
    assert out.endswith("\nwrote %s\n" % path)


@pytest.mark.laws
@pytest.mark.usefixtures("shallow")
def test_benchmark_of_gpus_runs_on_any_devices_and_is_left_out_without(tmp_path, capsys, monkeypatch):
    if not [device for device in towers.find_devices() if "gpu" in device]:
        assert gpu.main(["--out", str(tmp_path)]) is None and "gpu is left out" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "_LAYERS", [gpu._Layer((2, 8, 8, 16), 1.5)])
    monkeypatch.setattr(gpu, "_SIZES", [(4, 8, 8, 16)])
    monkeypatch.setattr(gpu, "_MEAN", 10.0)  # the fused op on a CPU loses digits of larger ones
    monkeypatch.setattr(gpu, "in_fresh_process", lambda *_, **__: "0")
    path = gpu.main(["--devices", "/cpu:0", "--batch-size", "2", "--image-size", "32", "--axes", "3", "--rounds", "1", "--out",
                     str(tmp_path)])
    assert re.search(r"ResNet-50, float32, channels last +\| \d", capsys.readouterr().out)
    with open(str(path)) as file:
        row, = json.load(file)["rows"]
    assert len(row["steps"]) == 2 and row["exact"]["bits"]["same"] and row["exact"]["variance"][0]["numbers"] == 4 * 8 * 8 * 16
    assert set(row["exact"]["variance"][0]["error"]) == {"1", "2"}
    assert max(row["exact"]["variance"][0]["error"].values()) < 1e-4
    report.main([str(tmp_path)])
    assert (tmp_path / "gpu.png").exists()


@pytest.mark.usefixtures("shallow")
def test_training_for_bits_has_the_same_digest_again_and_another_one_of_other_images(monkeypatch):
    settings = argparse.Namespace(batch_size=2, image_size=32)
    digests = [gpu._digest(["/cpu:0", "/cpu:0"], settings) for _ in range(2)]
    assert digests[0] == digests[1]
    monkeypatch.setattr(variants, "make_batch", lambda *args, made=variants.make_batch, **kwargs: made(*args, 1, **kwargs))
    assert gpu._digest(["/cpu:0", "/cpu:0"], settings) != digests[0]


def test_every_benchmark_has_a_table_and_a_picture():
    assert set(benchmarks) == set(report._TABLES) == set(pictures._DRAWN_BY) == set(pictures._TITLES)
    for name in benchmarks:
        source = (Path(report.__file__).parent / (name + ".py")).read_text()
        assert source.endswith('if __name__ == "__main__":\n    main()\n'), name  # else the command line does nothing


def test_a_pipeline_goes_on_with_the_next_epoch():
    dataset = data.generate(8, 1).train
    step = pipeline.make_step(pipeline.PIPELINE, dataset, 1, 4, 8)
    assert np.isfinite([step() for _ in range(5)]).all()


def test_a_command_runs_once_in_each_environment_and_the_first_one_prints_the_figures():
    program = "import os, sys; print('log', {'of': 1}); print('x {\"rank\": %%s}' %% os.environ['RANK']); sys.exit(%s)"
    environments = [{"RANK": "0"}, {"RANK": "1"}]
    assert workers._run([sys.executable, "-c", program % "0"], environments) == {"rank": 0}
    with pytest.raises(RuntimeError, match="refused"):
        workers._run([sys.executable, "-c", program % "os.environ['RANK'] == '1' and 'refused'"], environments)


def run_in_forks(command, environments):
    """As `workers._run`, of a command that begins with "python -m benchmarks.workers": TensorFlow is imported once."""
    program = "import sys; from benchmarks import workers; workers.main(sys.argv[1:])"
    assert command[:3] == [sys.executable, "-m", "benchmarks.workers"]
    results = run_forks("import benchmarks.workers", [(program, environment, command[3:]) for environment in environments])
    for status, output in results:
        assert status == 0, output
    return json.loads(re.search(r"^\{.*\}$", results[0][1], re.M).group())


@pytest.mark.laws
def test_bytes_that_workers_send_are_those_of_their_collectives(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workers, "_run", run_in_forks)
    path = workers.main(["--workers", "3", "--depth", "2", "--batch-size", "3", "--steps", "1", "--rounds", "1", "--out",
                         str(tmp_path)])
    assert_table(capsys.readouterr().out, path)
    with open(str(path)) as file:
        row, = json.load(file)["rows"]
    assert row["bytes"]["synced"]["a_layer"] == pytest.approx(2 * 4 * (2 * 16 + 1) + 4 / 3 * 4 * 2 * 16)  # to two; in a ring
    assert workers._num_layers(8) == 7
    for name in ("synced", "unsynced"):
        assert row["bytes"][name]["formula"] == pytest.approx(row["bytes"][name]["graph"])
    assert row["bytes"]["synced"]["graph"] > row["bytes"]["unsynced"]["graph"] > 4 / 3 * 4 * 634


def test_the_picture_of_why_has_a_line_and_the_mean_accuracy_of_each_kind(tmp_path, monkeypatch):
    runs = [{"kind": kind, "test_accuracy": 0.25 * number + 0.01 * seed, "curve": [[10, 3.0], [20, 2.0 - number]]}
            for number, kind in enumerate(("unsynced", "one", "synced", "unsynced-all")) for seed in (1, 3)]
    settings = {"model": "A net", "data": "images", "batch_size": 12, "images_a_tower": 3, "steps": 20}
    (tmp_path / "compare.json").write_text(json.dumps({"settings": settings, "runs": runs}))
    drawn = []
    monkeypatch.setattr(why.plt, "close", lambda figure: figure == "all" or drawn.extend(
        text.get_text() for text in figure.axes[0].texts))
    why.main(["--comparison", str(tmp_path / "compare.json"), "--out", str(tmp_path / "why.svg")])
    assert drawn == ["4 towers of 3, unsynced: 2.0 %", "one tower of 12: 27.0 %", "4 towers of 3, synced: 52.0 %"]
    assert (tmp_path / "why.svg").read_text().startswith("<?xml")


def test_differences_of_the_law_are_the_largest_of_each_kind():
    one = law.Run(np.array([4.0, 2.0]), {"w": np.array([[1.0, -8.0]]), "v": np.array([[1.0]])},
                  {"w": np.array([2.0, -10.0]), "v": np.array([5.0])})
    other = law.Run(np.array([4.0, 1.0]), {"w": np.array([[1.0, -8.0]]), "v": np.array([[3.0]])},
                    {"w": np.array([1.0, -10.0]), "v": np.array([6.0])})
    assert law.differences(one, other) == {"loss": 0.25, "gradients": 0.25, "variables": 0.2}


@pytest.mark.laws
def test_the_law_holds_of_synced_towers_in_its_picture_and_of_no_others(tmp_path):
    ones, pairs = ({synced: law.train(count, synced, np.float64, 2, 5) for synced in (True, False)} for count in (1, 2))
    synced, unsynced = (law.differences(ones[synced], pairs[synced]) for synced in (True, False))
    assert all(value < 1e-12 for value in synced.values())
    assert all(value > 1e-3 for value in unsynced.values())
    np.testing.assert_allclose(ones[True].loss, ones[False].loss, rtol=1e-12)  # one tower is the same network in both
    found = {(line[0], line[1].__name__): [synced, unsynced] for line in law.LINES}
    law.draw(found, 2, 5, str(tmp_path / "law.svg"))
    assert "unsynced, float32" in (tmp_path / "law.svg").read_text(encoding="utf-8")


@pytest.mark.laws
def test_a_long_run_is_watched_and_interrupted_as_a_user_would(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(long_run, "_TRAINING", [
        "--depth", "8", "--num-towers", "1", "--batch-size", "4", "--steps", "1000000000", "--save-every", "500"])
    assert long_run.main(["--hours", "0.0008", "--every", "0.1", "--out", str(tmp_path)]) == 0
    said, samples = capsys.readouterr().out, (tmp_path / "samples.csv").read_text().splitlines()
    assert len(samples) > 10 and samples[0].startswith("seconds,step,resident,threads,files,checkpoints,folder")
    assert (tmp_path / "memory.png").stat().st_size and "Interrupted" in (tmp_path / "training.log").read_text()
    most = max(int(line.split(",")[2]) for line in samples[1:])
    assert "memory %.0f MiB at its most" % (most / 2.0 ** 20) in said


def test_the_growth_of_a_long_run_is_that_after_its_first_quarter():
    def grown(bytes_at):
        return long_run.growth([long_run.Sample(60.0 * i, 0, bytes_at(i), 1, 1, 1, 1) for i in range(241)])
    assert grown(lambda i: 500 + 1000 * min(i, 60)) == pytest.approx(0, abs=1e-6)
    assert grown(lambda i: 10 ** 9 + 50 * i) == pytest.approx(3000)
    with pytest.raises(ValueError, match="a line needs 3"):
        long_run.growth([long_run.Sample(0.0, 0, 1, 1, 1, 1, 1)])
