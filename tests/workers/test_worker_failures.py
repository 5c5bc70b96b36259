"""What ends a worker that waits for another one: it names who is missing, and nothing hangs.

The scripts train on two workers without towers.
"""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import tensorflow.compat.v1 as tf

from tests.processes import ROOT, cluster
from towers.workers.cluster import ALONE
from towers.workers.sessions import Hook
from towers.workers.watchdog import DEAD, Watchdog

# The process is the worker that will wait, and its fork the other one, which says nothing.
CONNECTED = """
import os, signal, sys, time
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
import towers
other = os.fork()
if other:
    print(other, flush=True)
else:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
os.environ["TF_CONFIG"] = sys.argv[1 if other else 2]
workers = towers.workers.connect(time_limit=%d)
"""
STEPS = CONNECTED + """
x = tf.get_variable("x", [], initializer=tf.ones_initializer())
with tf.control_dependencies([x.assign_add(workers.all_reduce(x))]):
    step = tf.train.get_or_create_global_step().assign_add(1)
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
with tf.control_dependencies([x.assign_add(workers.all_reduce(x))]):
    step = tf.train.get_or_create_global_step().assign_add(1)
with tf.train.MonitoredTrainingSession(workers.target, config=workers.session_config(), hooks=[workers.hook()]) as session:
    session.run(step)
    if workers.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        session.run(step)
"""


@contextlib.contextmanager
def started(script, waiting):
    """Starts two workers, and kills both at the end; yields the process of the one of them whose number is `waiting`."""
    configs = [json.dumps(config) for config in cluster(2)]
    worker = subprocess.Popen(
        [sys.executable, "-c", script, configs[waiting], configs[1 - waiting]], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3"))
    other = worker.stdout.readline()
    try:
        yield worker
    finally:
        worker.kill()
        worker.communicate()
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(other), signal.SIGKILL)


@pytest.mark.laws
@pytest.mark.parametrize("wrong,time_limit,message", [
    ("os.kill(os.getpid(), signal.SIGKILL)", 300, " for worker 1 .*, which has ended, .* its data were fewer"),
    pytest.param("sys.exit(0)", 300, " for worker 1 .*, which has ended, or never began", marks=pytest.mark.sweep),
    ("os.kill(os.getpid(), signal.SIGSTOP)", 5, " for worker 1 .*, which does not answer: it is stopped, or hangs"),
    ("time.sleep(60)", 5, r", the time limit\. All others answer \(worker 1 .*\), so one of them comes to no such step"),
])
def test_a_worker_that_waits_in_vain_ends_and_says_for_whom(wrong, time_limit, message):
    with started(STEPS.replace("WRONG", wrong) % time_limit, 0) as worker:
        assert any(line == "step 2\n" for line in worker.stdout)
        worker.stdin.write("\n")  # worker 0 has its last step whole, and worker 1 may go on
        worker.stdin.flush()
        began = time.time()
        _, err = worker.communicate(timeout=60)
        assert time.time() - began < 40
    assert worker.returncode == DEAD, err
    last = err.strip().split("\n")[-1]
    found = re.search(r"^error: Worker 0 \(localhost:\d+\) waited (\d+) seconds in the run after global step 3" + message, last)
    assert found, err
    assert int(found.group(1)) <= (5 if time_limit == 5 else 30)
    assert "Traceback" not in err


@pytest.mark.laws
@pytest.mark.parametrize("script,what", [(BUILDING, "(what they have to tell|its start)"),
                                         (MONITORED, "(the run after|run [12] of its session, which began at) global step [01]")])
def test_whatever_finds_it_first_the_end_of_the_chief_is_one_sentence(script, what):
    with started(script, 1) as worker:
        _, err = worker.communicate(timeout=60)
    assert worker.returncode == DEAD, err
    assert re.search(r"^error: Worker 1 \(localhost:\d+\) waited \d+ seconds in %s for worker 0 .*, which has ended" % what,
                     err.strip().split("\n")[-1]), err


def test_a_lost_connection_to_workers_that_answer_is_an_error_after_which_no_session_is_made_anew():
    class Lost:
        def run(self, _):
            raise tf.errors.UnavailableError(None, None, "Socket closed")
    with pytest.raises(RuntimeError, match=r"The connection between workers was lost, .* last checkpoint \(Socket closed\)"):
        Hook(None, Watchdog(ALONE, 300.0)).after_create_session(Lost(), None)
