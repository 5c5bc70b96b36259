"""What ends a worker that waits for another one: it names who is missing, and nothing hangs.

The scripts train on two workers without towers. What they do wrong stands in the middle of each.
"""
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from towers.launch import free_ports
from towers.workers.watchdog import DEAD

ROOT = str(Path(__file__).parent.parent)
SCRIPT = """
import os, signal, sys, time
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
import towers
workers = towers.workers.connect(time_limit=3)
x = tf.get_variable("x", [], initializer=tf.ones_initializer())
step = x.assign_add(workers.all_reduce(x))
def run(session, steps):
    for number in range(steps):
        session.run(step)
        print("step", number, flush=True)
with workers.session() as session:
    session.run(tf.global_variables_initializer())
    session.run(workers.broadcast_variables())
    run(session, 3)
    if workers.rank == 1:
        %s
    run(session, 100000)
"""


def two_workers(wrong):
    """Starts two workers, the second of which does `wrong` after three steps."""
    addresses = ["localhost:%d" % port for port in free_ports(2)]
    return [subprocess.Popen(
        [sys.executable, "-c", SCRIPT % wrong], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
        env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", TF_CONFIG=json.dumps(
            {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}))) for rank in (0, 1)]


@pytest.mark.parametrize("wrong,within,message", [
    ("os.kill(os.getpid(), signal.SIGKILL)", 30, "for worker 1 .*, which has ended, or never began"),
    ("sys.exit(0)", 30, "for worker 1 .*, which has ended, or never began"),
    ("os.kill(os.getpid(), signal.SIGSTOP)", 40, "for worker 1 .*, which does not answer: it is stopped, or hangs"),
    ("time.sleep(60)", 40, r"the time limit\. All others answer \(worker 1 .*\), so one of them comes to no such step"),
])
def test_a_worker_that_waits_in_vain_ends_and_says_for_whom(wrong, within, message):
    workers = two_workers(wrong)
    try:
        assert any(line == "step 2\n" for line in workers[0].stdout)
        began = time.time()
        _, err = workers[0].communicate(timeout=60)
        assert time.time() - began < within
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert workers[0].returncode == DEAD, err
    last = err.strip().split("\n")[-1]
    assert re.search(r"^error: Worker 0 \(localhost:\d+\) waited \d+ seconds in run \d+ of its session.*" + message, last), err
    assert "Traceback" not in err
