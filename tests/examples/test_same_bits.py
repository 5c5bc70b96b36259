"""The command that holds digests of trainings on several numbers of devices side by side."""
import os
import re
import signal

import pytest

from examples.cifar10 import data, model, same_bits

SMALL = ["--depth", "8", "--batch-size", "4", "--num-towers", "2", "--devices", "1", "2", "--steps", "4"]
DIGESTS, GENERATE = same_bits.digests, data.generate


@pytest.fixture(scope="module", autouse=True)
def few_images():
    """In this process; another one that the command starts has all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "generate", lambda made=GENERATE(20, 10): made)
        yield


def of_one_layer(settings, part):
    """A training of a network of one layer on few images, whichever process it is in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_block", lambda x, *_: x[..., :16])
        patch.setattr(data, "generate", lambda made=GENERATE(20, 10): made)
        return DIGESTS(settings, part)


@pytest.mark.laws
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_two_towers_have_the_same_bits_on_one_and_two_devices_and_over_a_checkpoint(capsys, monkeypatch, whole):
    """Of the training with one layer only the first part is in a process of its own."""
    if not whole:
        in_a_process = same_bits.in_a_process
        monkeypatch.setattr(same_bits, "digests", of_one_layer)
        monkeypatch.setattr(same_bits, "in_a_process", lambda settings, part: (
            of_one_layer if part.num_devices == 2 or part.begin else in_a_process)(settings, part))
    assert same_bits.main(SMALL) == 0
    out = capsys.readouterr().out
    lines = re.findall(r"^(\d device.*?)  +([0-9a-f]{64})$", out, re.M)
    assert [name for name, _ in lines] == ["1 device", "2 devices", "2 devices, after 2 steps 1 device"]
    assert len({digest for _, digest in lines}) == 1 and out.endswith("The same bits.\n")


def in_this_process(change):
    """A training in this process, of settings that a function of the part may change."""
    def train(settings, part):
        changed = same_bits.parse_arguments(SMALL)
        vars(changed).update(change(part))
        return of_one_layer(changed, part)
    return train


@pytest.mark.once
@pytest.mark.laws
def test_trainings_with_other_bits_have_status_1_and_are_named(capsys, monkeypatch):
    monkeypatch.setattr(same_bits, "in_a_process", in_this_process(lambda part: {"seed": int(part.begin is not None)}))
    assert same_bits.main(SMALL) == 1  # the part after the checkpoint sees other images
    out = capsys.readouterr().out
    digests = re.findall(r"  ([0-9a-f]{64})$", out, re.M)
    assert digests[0] == digests[1] != digests[2]
    assert re.search(r"^Different bits: in \d+ of \d+ variables, \S+ among them\.\n$", out, re.M)


def killed(settings, part):
    """A training that the system kills."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.laws
@pytest.mark.once
def test_a_training_that_is_killed_is_one_sentence_and_status_2(capsys, monkeypatch):
    monkeypatch.setattr(same_bits, "digests", killed)
    assert same_bits.main(SMALL) == 2
    assert capsys.readouterr().err.startswith("error: A training's process was killed, for want of memory maybe")


@pytest.mark.parametrize("other,status,words", [
    ({"a": "1", "b": "2"}, 0, "The same bits"),
    ({"a": "1", "b": "3"}, 1, "Different bits: in 1 of 2 variables, b among them"),
    ({"a": "1"}, 1, "Different bits: in 1 of 2 variables, b among them"),
    ({"a": "1", "b": "2", "c": "3"}, 1, "Different bits: in 1 of 3 variables, c among them")])
def test_every_variable_counts(capsys, monkeypatch, other, status, words):
    monkeypatch.setattr(same_bits, "in_a_process", lambda settings, part: (
        other if part.num_devices == 2 and not part.end else {"a": "1", "b": "2"}))
    assert same_bits.main(SMALL) == status
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("arguments,message", [
    (["--devices", "2"], "There is nothing to compare"),
    (["--devices", "2", "2"], "There is nothing to compare"),
    (["--steps", "1"], "There is nothing to compare"),
    (["--devices", "1", "3"], "2 towers leave some of 3 devices without one"),
    (["--batch-size", "1"], "A batch of 1 is too small for 2 towers"),
    (["--data-dir", "/nonexistent"], "There is no folder /nonexistent"),
    (["--depth", "9"], "6n + 2"),
    (["--batch-size", "5001"], "A batch of 5001 is larger than the 5000 training images")])  # as its process says
def test_bad_input_is_one_sentence_and_status_2(capsys, arguments, message):
    assert same_bits.main(SMALL + arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error
