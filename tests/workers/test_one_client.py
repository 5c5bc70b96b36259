"""One client, many machines: towers on the devices of TensorFlow servers, each a process of its own, driven by one session here.

The authority is one tower on the whole batch, in this process and without any server.
"""
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import set_variables
from towers.launch import free_ports
from towers.workers.one_client import _MEND, _Servers
from towers.workers.watchdog import Watchdog

WORKER_0, WORKER_1, PS = "/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0", "/job:ps/task:0/cpu:0"
# TensorFlow is imported once: the servers are forks.
SERVERS = """
import json, os, sys
import tensorflow.compat.v1 as tf
cluster = json.loads(sys.argv[1])
for job in cluster:
    for task in range(len(cluster[job])):
        if not os.fork():
            tf.train.Server(cluster, job_name=job, task_index=task, config=tf.ConfigProto(device_count={"CPU": 2}))
            os.write(1, b"is up\\n")  # at once, beside others that do
            sys.stdin.read()  # until whoever began it ends, in whatever way
            os._exit(0)
sys.stdin.read()
"""
X = np.random.RandomState(1).randn(11, 6)
STEPS = 4


@pytest.fixture(scope="module")
def cluster():
    """The target of a session on two workers and a parameter server."""
    addresses = {job: ["localhost:%d" % port for port in free_ports(size)] for job, size in (("worker", 2), ("ps", 1))}
    process = subprocess.Popen([sys.executable, "-c", SERVERS, json.dumps(addresses)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert [process.stdout.readline() for _ in range(3)] == [b"is up\n"] * 3
        yield "grpc://" + addresses["worker"][0]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(autouse=True)
def no_variables_left(request):
    """Variables live in the servers, and stay there when a session ends."""
    yield
    if "cluster" in request.fixturenames:
        tf.Session.reset(request.getfixturevalue("cluster"))


def model(x):
    w = tf.get_variable("w", [6, 5], tf.float64, tf.random_normal_initializer(seed=1))
    hidden = tf_syncbn.sync_batch_norm(tf.matmul(x, w), momentum=0.9, training=True)
    v = tf.get_variable("v", [5, 3], tf.float64, tf.random_normal_initializer(seed=2))
    rows = tf.gather(tf.get_variable("table", [4, 3], tf.float64, tf.random_normal_initializer(seed=3)),
                     tf.cast(tf.abs(x[:, 0]) * 2, tf.int32) % 4)
    return tf.reduce_mean(tf.square(tf.sin(tf.matmul(tf.nn.relu(hidden), v) + rows)))


def training(devices, placement="host", batch=(X,)):
    """Builds towers in the default graph; returns the loss, the train op and the session's config."""
    builder = towers.TowerBuilder(devices, variable_placement=placement)
    replicas = builder.build(model, batch)
    train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
    return replicas.loss, train_op, towers.session_config(builder.devices)


def trained(devices, target="", initial=None, **kwargs):
    """Trains in a graph of its own; returns of two sessions the losses, and all variables by name before and after."""
    with tf.Graph().as_default():
        loss, train_op, config = training(devices, **kwargs)
        variables, ends = {v.op.name: v for v in tf.global_variables()}, []
        initializer = [tf.global_variables_initializer(), tf.tables_initializer()]
        for _ in range(2):
            with tf.Session(target, config=config) as session:
                session.run(initializer)
                set_variables(session, initial or {})
                before = session.run(variables)
                losses = [session.run([loss, train_op])[0] for _ in range(STEPS)]
                ends.append((losses, before, session.run(variables)))
        return ends


@pytest.fixture(scope="module")
def one_tower():
    return trained(["/cpu:0"])[0]


CASES = {
    "three servers, variables on all": dict(devices=[PS, WORKER_1, WORKER_0], placement="balanced"),
    "variables on a parameter server": dict(devices=[WORKER_0, WORKER_1, WORKER_1.replace("cpu:0", "cpu:1")],
                                            placement=lambda op: PS),
    "replicated variables": dict(devices=[WORKER_1, WORKER_0], placement="replicated"),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_towers_on_servers_train_as_one_tower_on_the_whole_batch(cluster, one_tower, case):
    losses, before, after = one_tower
    assert np.abs(after["batch_normalization/moving_mean"]).max() > 0.01
    found, again = trained(target=cluster, initial=before, **CASES[case])
    np.testing.assert_allclose(found[0], losses, rtol=1e-9)
    assert set(found[2]) == set(after)
    for name, value in after.items():
        np.testing.assert_allclose(found[2][name], value, rtol=1e-9, atol=1e-9, err_msg=name)
    assert found[0] == again[0]
    for name, value in found[2].items():
        np.testing.assert_array_equal(again[2][name], value, err_msg=name)


def test_data_set_is_divided_over_servers(cluster, one_tower):
    losses, before, after = one_tower
    with tf.Graph().as_default():
        batch = tf.data.Dataset.from_tensor_slices(X).repeat().batch(len(X))
        loss, train_op, config = training([WORKER_1, WORKER_0], batch=batch)
        with tf.Session(cluster, config=config) as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            set_variables(session, before)
            np.testing.assert_allclose([session.run([loss, train_op])[0] for _ in range(STEPS)], losses, rtol=1e-9)


@pytest.mark.laws
def test_many_steps_in_one_call_are_those_of_many_calls_on_servers_too(cluster, one_tower):
    devices = [WORKER_0, WORKER_1]
    (losses, before, after), _ = trained(devices, cluster, one_tower[1])
    np.testing.assert_allclose(losses, one_tower[0], rtol=1e-9)
    step = []

    def step_fn():
        step.extend(training(devices))
        return step[:2]

    repeated = towers.repeat(step_fn, STEPS)
    with tf.Session(cluster, config=step[2]) as session:
        session.run(tf.global_variables_initializer())
        set_variables(session, before)
        assert session.run(repeated)[0].tolist() == losses
        for variable in tf.global_variables():
            np.testing.assert_array_equal(session.run(variable), after[variable.op.name])


@pytest.mark.laws
def test_each_server_computes_its_own_tower(cluster):
    loss, train_op, config = training([WORKER_0, WORKER_1, WORKER_1.replace("cpu:0", "cpu:1")], lambda op: PS)
    metadata = tf.RunMetadata()
    with tf.Session(cluster, config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op, options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    nodes = [(node.name, node.op, tf.DeviceSpec.from_string(node.device))
             for graph in metadata.partition_graphs for node in graph.node]
    for tower, place in enumerate([("worker", 0, 0), ("worker", 1, 0), ("worker", 1, 1)]):
        products = {(spec.job, spec.task, spec.device_index) for name, op, spec in nodes
                    if name.startswith("tower_%d/" % tower) and op.endswith("MatMul")}
        assert products == {place}
    variables = {spec.job for _, op, spec in nodes if op in ("VariableV2", "VarHandleOp")}
    assert variables == {"ps"}


def test_what_stands_on_the_host_stands_on_the_towers_own_machine():
    def with_own_devices(x):
        with tf.device("/cpu:0"):
            table = tf.get_variable("table", [4, 2], tf.float64)
            rows = tf.gather(table, tf.cast(tf.abs(x[:, 0]), tf.int32) % 4, name="rows")
        with tf.device("/job:ps/cpu:0"):
            rows = tf.identity(rows, name="at_a_job")
        return tf.reduce_mean(rows * tf.get_variable("w", [2], tf.float64))

    replicas = towers.TowerBuilder(["/job:worker/task:1/gpu:0", "/job:worker/task:2/gpu:0"]).build(with_own_devices, (X,))
    places = {name: tf.DeviceSpec.from_string(device) for name, device in [(v.op.name, v.device) for v in tf.global_variables()]}
    assert {(spec.job, spec.task, spec.device_type) for spec in places.values()} == {("worker", 1, "CPU")}
    for tower, task in zip(replicas, (1, 2)):
        device, = [op.device for op in tower.ops if "Gather" in op.type]
        assert tf.DeviceSpec.from_string(device) == tf.DeviceSpec.from_string("/job:worker/task:%d/device:CPU:0" % task)
        device, = [op.device for op in tower.ops if op.name.endswith("at_a_job")]
        assert tf.DeviceSpec.from_string(device) == tf.DeviceSpec.from_string("/job:ps/device:CPU:0")


def test_devices_without_a_job_stay_as_they_are():
    towers.TowerBuilder(["/cpu:0", "/cpu:1"]).build(model, (X,))
    assert not [op for op in tf.get_default_graph().get_operations() if "job" in op.device or "task" in op.device]
    assert {tf.DeviceSpec.from_string(v.device).to_string() for v in tf.global_variables()} == {"/device:CPU:0"}


def test_session_config_counts_the_cpu_devices_of_the_task_with_the_most():
    config = towers.session_config([WORKER_0, WORKER_1, "/job:worker/task:1/cpu:2", "/job:ps/task:7/gpu:5"])
    assert config.device_count["CPU"] == 3


CLIENT = """
import os, sys, time
import tensorflow.compat.v1 as tf
import towers
tf.disable_eager_execution()
addresses, client = sys.argv[1:], os.getpid()
for task in (0, 1):
    server = os.fork()
    if not server:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        tf.train.Server({"worker": addresses}, job_name="worker", task_index=task)
        while os.getppid() == client:
            time.sleep(0.1)
        os._exit(0)
builder = towers.TowerBuilder(["/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"])
replicas = builder.build(lambda x: tf.reduce_mean(tf.square(x - tf.get_variable("w", [3]))), (tf.ones([4, 3]),))
train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
config = towers.session_config(builder.devices)
with towers.workers.watched_session(addresses, config=config, time_limit=6) as session:
    session.run(tf.global_variables_initializer())
    session.run(train_op)
    print(server, flush=True)
    try:
        while True:
            session.run(train_op)
    except tf.errors.UnavailableError as error:
        sys.stderr.write("TensorFlow itself found it\\n")
        sys.exit(70)
"""


@pytest.mark.laws
@pytest.mark.parametrize("how,words", [
    (signal.SIGKILL, r"server 1 \(localhost:\d+\), which has ended|TensorFlow itself found it"),
    (signal.SIGSTOP, r"server 1 \(localhost:\d+\), which does not answer: it is stopped, or hangs")])
def test_client_whose_server_has_died_ends_within_seconds_and_says_which(how, words):
    command = [sys.executable, "-c", CLIENT] + ["localhost:%d" % port for port in free_ports(2)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
                              start_new_session=True)
    try:
        os.kill(int(client.stdout.readline()), how)
        begun = time.monotonic()
        _, written = client.communicate(timeout=30)
        assert client.returncode == 70 and re.search(words, written), written
        assert time.monotonic() - begun < 20
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)
        client.communicate()


def test_watch_ends_a_run_that_takes_too_long_though_all_servers_answer():
    said = []
    with contextlib.closing(socket.socket()) as listening:
        listening.bind(("localhost", 0))
        listening.listen(8)
        address = "localhost:%d" % listening.getsockname()[1]

        def answer():
            while not said:
                connection, _ = listening.accept()
                connection.recv(64)
                connection.sendall(b"any")
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        watchdog = Watchdog(_Servers((address,)), 0.5, end=said.append, mend=_MEND)
        with watchdog.waiting("run 1 of its session"):
            for _ in range(100):
                time.sleep(0 if said else 0.1)
    assert re.match(r"This client waited \d+ seconds in run 1 of its session, the time limit\. All of them answer "
                    r"\(server 0 \(localhost:\d+\)\), so one was started anew meanwhile, or the step is slow", said[0])


def test_servers_that_never_began_are_named():
    address = "localhost:%d" % free_ports(1)[0]
    with pytest.raises(RuntimeError, match=r"waited 0 seconds for server 0 \(%s\), which has ended, or never began" % address):
        towers.workers.watched_session([address], time_limit=0.2)


@pytest.mark.parametrize("servers,time_limit,words", [
    ("localhost:2222", 1.0, "servers has to be a list of addresses 'host:port', not 'localhost:2222'"),
    ([], 1.0, r"servers has to be a list of addresses .*, not \[\]"),
    (["localhost"], 1.0, "'localhost' is no address"),
    (["localhost:2222"], 0, "time_limit is a number of seconds, more than 0, not 0"),
])
def test_what_is_no_list_of_servers_is_refused(servers, time_limit, words):
    with pytest.raises(ValueError, match=words):
        towers.workers.watched_session(servers, time_limit=time_limit)
