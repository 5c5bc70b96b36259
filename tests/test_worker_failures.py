"""What ends a worker that waits for another one: it names who is missing, and nothing hangs.

The scripts train on two workers without towers.
"""
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorflow.compat.v1 as tf

from towers.launch import free_ports
from towers.workers.cluster import ALONE
from towers.workers.sessions import Hook
from towers.workers.watchdog import DEAD, Watchdog

ROOT = str(Path(__file__).parent.parent)
CONNECTED = """
import os, signal, sys, time
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
import towers
print("imported", flush=True)
sys.stdin.readline()
workers = towers.workers.connect(time_limit=%d)
"""
STEPS = CONNECTED + """
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
        sys.stdin.readline()
        WRONG
    run(session, 100000)
"""
BUILDING = CONNECTED % 300 + """
if workers.rank == 0:
    sys.exit("refused")
workers.tell_all("built")
"""
MONITORED = CONNECTED % 300 + """
x = tf.get_variable("x", [], initializer=tf.ones_initializer())
step = x.assign_add(workers.all_reduce(x))
with tf.train.MonitoredTrainingSession(workers.target, config=workers.session_config(), hooks=[workers.hook()]) as session:
    session.run(step)
    if workers.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        session.run(step)
"""


def two_workers(script):
    """Starts two workers, which connect when both have imported TensorFlow: on a busy machine one may take seconds longer."""
    addresses = ["localhost:%d" % port for port in free_ports(2)]
    workers = [subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        universal_newlines=True, env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", TF_CONFIG=json.dumps(
            {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}))) for rank in (0, 1)]
    for worker in workers:
        assert worker.stdout.readline() == "imported\n"
    for worker in workers:
        go_on(worker)
    return workers


def go_on(worker):
    worker.stdin.write("\n")
    worker.stdin.flush()


@pytest.mark.parametrize("wrong,time_limit,message", [
    ("os.kill(os.getpid(), signal.SIGKILL)", 300, "for worker 1 .*, which has ended, or never began"),
    ("sys.exit(0)", 300, "for worker 1 .*, which has ended, or never began"),
    ("os.kill(os.getpid(), signal.SIGSTOP)", 5, "for worker 1 .*, which does not answer: it is stopped, or hangs"),
    ("time.sleep(60)", 5, r"the time limit\. All others answer \(worker 1 .*\), so one of them comes to no such step"),
])
def test_a_worker_that_waits_in_vain_ends_and_says_for_whom(wrong, time_limit, message):
    workers = two_workers(STEPS.replace("WRONG", wrong) % time_limit)
    try:
        assert any(line == "step 2\n" for line in workers[0].stdout)
        go_on(workers[1])  # worker 0 has its last step whole
        began = time.time()
        _, err = workers[0].communicate(timeout=60)
        assert time.time() - began < 40
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert workers[0].returncode == DEAD, err
    last = err.strip().split("\n")[-1]
    assert re.search(r"^error: Worker 0 \(localhost:\d+\) waited \d+ seconds in run \d+ of its session.*" + message, last), err
    assert "Traceback" not in err


@pytest.mark.parametrize("script,what", [(BUILDING, "(what they have to tell|its start)"),
                                         (MONITORED, r"(run \d+ of its session|its start)")])
def test_whatever_finds_it_first_the_end_of_the_chief_is_one_sentence(script, what):
    workers = two_workers(script)
    try:
        _, err = workers[1].communicate(timeout=60)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert workers[1].returncode == DEAD, err
    assert re.search(r"^error: Worker 1 \(localhost:\d+\) waited \d+ seconds in %s for worker 0 .*, which has ended" % what,
                     err.strip().split("\n")[-1]), err


def test_a_lost_connection_to_workers_that_answer_is_an_error_after_which_no_session_is_made_anew():
    class Lost:
        def run(self, _):
            raise tf.errors.UnavailableError(None, None, "Socket closed")
    with pytest.raises(RuntimeError, match=r"The connection between workers was lost, .* last checkpoint \(Socket closed\)"):
        Hook(None, Watchdog(ALONE, 300.0)).after_create_session(Lost(), None)
