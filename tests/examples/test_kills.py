"""Programs killed by SIGKILL at random moments, and while they write: what they leave is whole, and nothing is done twice.

HYPOTHESIS_CASES is how many kills, 3 by default.
"""
import json
import multiprocessing
import os
import random
import re
import shutil
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.examples import programs_to_kill
from tests.examples.programs_to_kill import STEPS_AN_EPOCH
from tests.checkpoints.test_checkpoints import contents, write

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("kills")]
KILLS = int(os.environ.get("HYPOTHESIS_CASES", 3))
STEPS_A_LIFE = 25  # at the end of 100 kills there have to be steps left
PATIENCE = 300
_UNFINISHED = re.compile(r"\.tempstate|\.tmp|\.converting")


def begin(program, log, *arguments):
    """Starts a program in a process forked from one that has TensorFlow loaded and has not used it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.examples.programs_to_kill"])
    process = context.Process(target=program, args=(str(log), [str(argument) for argument in arguments]))
    process.start()
    return process


def finish(process, log):
    """Waits for a program that is left alone."""
    process.join(PATIENCE)
    assert process.exitcode == 0, log.read_text()


def names(folder):
    return os.listdir(str(folder)) if folder.exists() else []


def wait_and_kill(process, rng, folder, is_reached):
    """Kills a process at a moment that it draws: any, when it has come somewhere, or while it writes.

    Returns whether it was still running.
    """
    how, begun, left = rng.choice(["any moment", "reached", "writing", "writing"]), time.time(), set(names(folder))
    until = begun + (rng.uniform(0.2, 3) if how == "any moment" else PATIENCE)
    while process.is_alive() and time.time() < until:
        if how == "writing" and any(_UNFINISHED.search(name) for name in names(folder) if name not in left):
            break
        if how == "reached" and is_reached():
            break
        time.sleep(0.0005)
    assert how == "any moment" or time.time() < until
    time.sleep(rng.choice([0, rng.uniform(0, 0.002), rng.uniform(0, 0.05)]))
    was_running = process.is_alive()
    process.kill()
    process.join()
    return was_running and process.exitcode < 0


def saved_step(train_dir):
    """The step of the checkpoint that the folder's state names, 0 where there is none; all its tensors can be read."""
    state = tf.train.get_checkpoint_state(str(train_dir))
    if state is None:
        return 0
    values = contents(state.model_checkpoint_path)
    step = int(state.model_checkpoint_path.rsplit("-", 1)[1])
    assert values["global_step"] == (np.dtype(np.int64), (), np.int64(step).tobytes())
    return step


@pytest.mark.laws
def test_training_killed_again_and_again_comes_to_the_bits_of_one_that_never_was(tmp_path):
    rng, killed, log = random.Random(KILLS), tmp_path / "killed", tmp_path / "log"
    steps = STEPS_AN_EPOCH * -(-(KILLS + 1) * STEPS_A_LIFE // STEPS_AN_EPOCH)

    def start(folder):
        return begin(programs_to_kill.training, log, "--steps", steps, "--save-every", 3, "--train-dir", folder)
    kills = step = 0
    while kills < KILLS and step < steps:
        process, wanted = start(killed), step + rng.randint(0, STEPS_A_LIFE)
        was_running = wait_and_kill(process, rng, killed, lambda: any(
            name.startswith("model.ckpt-%d." % each) for name in names(killed) for each in range(wanted, wanted + 9)))
        kills += was_running
        before, step = step, saved_step(killed)
        assert step >= before and (was_running or step == steps), log.read_text()
        for name in names(killed):
            if name.endswith(".json"):
                json.loads((killed / name).read_text())
        assert sum(bool(_UNFINISHED.search(name)) for name in names(killed)) <= 3  # of one process
    finish(start(killed), log)
    finish(start(tmp_path / "whole"), log)
    assert kills >= KILLS // 2 and "Traceback" not in log.read_text()
    assert saved_step(killed) == steps and not [name for name in names(killed) if _UNFINISHED.search(name)]
    newest = "model.ckpt-%d" % steps
    assert contents(killed / newest) == contents(tmp_path / "whole" / newest)
    history = json.loads((killed / "history.json").read_text())
    assert [record["step"] for record in history] == list(range(STEPS_AN_EPOCH, steps + 1, STEPS_AN_EPOCH))
    assert history == json.loads((tmp_path / "whole" / "history.json").read_text())
    print("%d kills of a training of %d steps" % (kills, steps))


@pytest.mark.laws
def test_conversion_killed_again_and_again_leaves_no_checkpoint_or_a_whole_one(tmp_path):
    rng, log, out = random.Random(KILLS), tmp_path / "log", tmp_path / "out"
    (tmp_path / "from").mkdir()
    source = write(tmp_path / "from" / "model", {"layer%d/W" % i: np.random.rand(100, 1000) for i in range(10)})
    before = {path.name: path.read_bytes() for path in (tmp_path / "from").iterdir()}
    whole, kills = None, 0

    def start():
        return begin(programs_to_kill.conversion, log, source, out / "new", "--to", "slim")
    for _ in range(3 * KILLS):
        out.mkdir()
        kills += wait_and_kill(start(), rng, out, lambda: "new.data-00000-of-00001" in names(out))
        if "new.index" in names(out):
            shutil.rmtree(str(out / "new.converting"), ignore_errors=True)
        else:
            finish(start(), log)
        assert sorted(names(out)) == ["new.data-00000-of-00001", "new.index"]
        whole = whole or contents(out / "new")
        assert contents(out / "new") == whole and len(whole) == 10
        assert {path.name: path.read_bytes() for path in (tmp_path / "from").iterdir()} == before
        shutil.rmtree(str(out))
        if kills >= KILLS:
            break
    assert kills >= KILLS // 2 and "Traceback" not in log.read_text()
    print("%d kills of a conversion" % kills)
