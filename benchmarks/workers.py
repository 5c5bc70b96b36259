"""Training steps of a ResNet over several workers on loopback, synced and unsynced, and the bytes that cross.

    python -m benchmarks.workers --workers 1 2 4 --rounds 10

The global batch stays, so each of W workers has one W-th of it, and all share the machine's cores: what the step loses is what
workers cost. Bytes are counted three ways: by formula; by the sizes of the tensors that the graph's collectives take; and by
the kernel's counter of the loopback interface, over what it counts while nothing runs: other processes that
talk over loopback spoil it, unless all of this runs in a network of its own (`unshare -n`, then `ip link set lo up`). Where
Horovod is installed, it trains the unsynced network beside these.
"""
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import tensorflow.compat.v1 as tf

import towers
from benchmarks import networks, record
from benchmarks.command import parse, positive_int
from benchmarks.interleave import paired_ratio, spread, take_turns
from benchmarks.variants import make_batch

__all__ = ["main"]

SYNCED, UNSYNCED, HOROVOD = "synced", "unsynced", "Horovod, unsynced"
_LAYERS = {SYNCED: networks.synced_layers, UNSYNCED: networks.fused_layers}


def main(argv=None):
    """Runs the command line and returns the path of the JSON that it wrote."""
    settings = parse("Times training steps of a ResNet over workers on loopback.", argv, 10, _add_arguments)
    if settings.child == HOROVOD:
        _print_of_first(*_measure_horovod(settings))
        return None
    if settings.child:
        _print_of_first(*_measure(settings))
        return None
    has_horovod = _horovodrun() is not None
    rows = [_measure_apart(size, has_horovod, settings) for size in settings.workers]
    described = {"network": "ResNet-%d" % settings.depth, "batch": settings.batch_size, "rounds": settings.rounds,
                 "steps_of_a_turn": settings.steps, "horovod": has_horovod}
    return record.write(settings.out, "workers", described, rows, [
        record.target("workers, synced step of %d / unsynced" % row["workers"], row["ratio"]["median"], None,
                      row["ratio"]["lower_quartile"], row["ratio"]["upper_quartile"]) for row in rows])


def _add_arguments(parser):
    parser.add_argument("--workers", type=positive_int, nargs="+", default=[1, 2, 4], help="numbers of workers")
    parser.add_argument("--depth", type=positive_int, default=20, help="of the ResNet, 6n + 2")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="images of all workers together")
    parser.add_argument("--steps", type=positive_int, default=4, help="training steps of a turn")


def _measure_apart(size, has_horovod, settings):
    addresses = ["localhost:%d" % port for port in _free_ports(size)]
    environments = [{"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})}
                    for rank in range(size)] if size > 1 else [{"TF_CONFIG": ""}]
    row = _run(_command("workers", settings), environments)
    if has_horovod:
        command = [_horovodrun(), "--gloo", "-np", str(size), "-H", "localhost:%d" % size] + _command(HOROVOD, settings)
        row["milliseconds"][HOROVOD] = _run(command, [{}])["milliseconds"]
    return row


def _command(child, settings):
    command = [sys.executable, "-m", "benchmarks.workers", "--child", child]
    for name in ("rounds", "depth", "batch_size", "steps"):
        command += ["--" + name.replace("_", "-"), str(getattr(settings, name))]
    return command + (["--v1-behaviour"] if settings.v1_behaviour else [])


def _run(command, environments):
    """Runs a command once in each environment, at the same time; returns the JSON that the first one prints."""
    processes = [subprocess.Popen(command, env=dict(os.environ, **environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  universal_newlines=True) for environment in environments]
    try:
        outputs = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs):
        if process.returncode:
            raise RuntimeError("%s failed.\n%s" % (" ".join(command), errors))
    return json.loads(re.search(r"\{.*\}", outputs[0][0].strip().split("\n")[-1]).group())


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(contextlib.closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]


def _print_of_first(rank, row):
    if rank == 0:
        print(json.dumps(row))


def _measure(settings):
    """Measures as one of the workers; returns its rank and the figures."""
    workers = towers.workers.connect()
    steps, crossing = {}, {}
    for name in (SYNCED, UNSYNCED):
        steps[name], crossing[name] = _make_step(name, workers, settings)
    seconds = take_turns(steps, settings.rounds, 2)
    for name, step in steps.items():
        crossing[name]["wire"] = _bytes_on_loopback(step, workers) / (settings.steps * workers.size)
    return workers.rank, {
        "workers": workers.size, "ratio": paired_ratio(seconds, SYNCED, UNSYNCED), "bytes": crossing,
        "milliseconds": {name: spread(1e3 * seconds[name] / settings.steps) for name in steps}}


def _make_step(name, workers, settings):
    """Returns a function that trains a turn of steps, and a dict of the bytes that a worker sends in one step."""
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(0)
        builder = towers.TowerBuilder(["/cpu:0"], workers=workers)
        replicas = builder.build(networks.model_fn(_LAYERS[name](), settings.depth), _part(workers.rank, workers.size, settings))
        train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
        crossing = {"formula": _bytes_by_formula(name, workers.size), "graph": _bytes_in_graph(graph, workers.size),
                    "a_layer": _bytes_in_graph(graph, workers.size, "/exchange/") / _num_layers(settings.depth)}
        broadcast, session = workers.broadcast_variables(), workers.session(graph)
        session.run(tf.global_variables_initializer())
        session.run(broadcast)
    return lambda: [session.run([replicas.loss, train_op]) for _ in range(settings.steps)], crossing


def _part(rank, size, settings):
    images, labels = make_batch(settings.batch_size)
    return tf.constant(images[rank::size]), tf.constant(labels[rank::size])


def _bytes_by_formula(name, size):
    """Returns what a worker sends in a step. In a ring, 2 (W - 1) / W of: gradients, the loss, and 2C numbers a layer.

    Those are the sums of a synced layer's backward pass, whose forward pass sends 2C + 1 numbers to each other worker; or the
    moving averages of an unsynced one, which are those of worker 0.
    """
    channels = [v.shape.num_elements() for v in tf.trainable_variables() if v.op.name.endswith("gamma")]
    in_ring = 1 + sum(v.shape.num_elements() for v in tf.trainable_variables()) + 2 * sum(channels)
    to_each = sum(2 * c + 1 for c in channels) if name == SYNCED else 0
    return 4 * (2 * (size - 1) / size * in_ring + (size - 1) * to_each)


def _bytes_in_graph(graph, size, within=""):
    """Returns what a worker sends in a step, by the sizes of what those collectives take that have `within` in their names."""
    sent = 0
    for op in graph.get_operations():
        share = {"CollectiveReduce": 2 * (size - 1) / size, "CollectiveGather": size - 1}.get(re.sub(r"V\d$", "", op.type), 0)
        if share and within in op.name:
            sent += share * op.inputs[0].shape.num_elements() * op.inputs[0].dtype.size
    return sent


def _bytes_on_loopback(turn, workers):
    """Returns the bytes that cross the loopback interface in a turn, less what crosses it in that time while nothing runs."""
    turn()
    before, begun = _sent_on_loopback(), time.monotonic()
    turn()
    crossed, elapsed = _sent_on_loopback() - before, time.monotonic() - begun
    workers.tell_all(0)
    before = _sent_on_loopback()
    time.sleep(elapsed)
    idle = _sent_on_loopback() - before
    workers.tell_all(0)
    return max(crossed - idle, 0)


def _sent_on_loopback():
    with open("/proc/net/dev") as f:
        for line in f:
            device, _, counters = line.partition(":")
            if device.strip() == "lo":
                return int(counters.split()[8])
    return 0


def _num_layers(depth):
    return 1 + 2 * ((depth - 2) // 2)


def _horovodrun():
    """Returns the path of this Python's horovodrun, or None."""
    return shutil.which("horovodrun", path=os.path.dirname(sys.executable))


def _measure_horovod(settings):
    """Measures as one of Horovod's processes; returns its rank and the figures."""
    import horovod.tensorflow as hvd
    hvd.init()
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        loss = networks.model_fn(networks.fused_layers(), settings.depth)(*_part(hvd.rank(), hvd.size(), settings))
        optimizer = hvd.DistributedOptimizer(tf.train.MomentumOptimizer(0.1, 0.9))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train_op = optimizer.minimize(loss)
        broadcast = hvd.broadcast_global_variables(0)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(broadcast)
            seconds = take_turns({HOROVOD: lambda: [session.run([loss, train_op]) for _ in range(settings.steps)]},
                                 settings.rounds, 2)
    return hvd.rank(), {"milliseconds": spread(1e3 * seconds[HOROVOD] / settings.steps)}


if __name__ == "__main__":
    main()
