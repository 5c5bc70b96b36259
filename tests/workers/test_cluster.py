"""Which workers there are: TF_CONFIG, resolvers and lists, well-formed and not."""
import json

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.workers.cluster import find_cluster

WORKERS = ["a:2222", "b:2222", "b:2223"]


def of_environment(monkeypatch, config):
    monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))
    return find_cluster()


def test_no_tf_config_or_one_without_a_cluster_is_one_worker_alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for found in (find_cluster(), of_environment(monkeypatch, ""), of_environment(monkeypatch, {"task": {}})):
        assert (found.size, found.rank, found.local_rank, found.is_evaluator) == (1, 0, 0, False)


def test_the_chief_comes_before_the_workers_and_servers_and_evaluators_have_no_part(monkeypatch):
    jobs = {"worker": WORKERS[1:], "chief": WORKERS[:1], "ps": ["p:1"], "evaluator": ["e:1"]}
    for number, task in enumerate([("chief", 0), ("worker", 0), ("worker", 1)]):
        found = of_environment(monkeypatch, {"cluster": jobs, "task": {"type": task[0], "index": task[1]}})
        assert found.addresses == tuple(WORKERS) and (found.rank, found.local_rank) == (number, [0, 0, 1][number])
    evaluator = of_environment(monkeypatch, {"cluster": jobs, "task": {"type": "evaluator", "index": 0}})
    assert evaluator.is_evaluator and evaluator.size == 1
    workers = towers.workers.connect()  # alone: no server is started
    assert workers.is_evaluator and not workers.is_chief


def test_the_index_may_be_a_string_and_tasks_a_dict(monkeypatch):
    found = of_environment(monkeypatch, {"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": "2"}})
    assert found.rank == 2
    spec = tf.train.ClusterSpec({"worker": {0: "a:2222", 1: "b:2222"}})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=1)
    assert find_cluster(resolver).addresses == ("a:2222", "b:2222")


def test_slurm_is_read_by_tensorflows_resolver(monkeypatch):
    for name, value in {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "4",
                        "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}.items():
        monkeypatch.setenv(name, value)
    kind = tf.distribute.cluster_resolver.SlurmClusterResolver
    monkeypatch.setattr(kind, "_resolve_hostnames", lambda self: ["n1", "n2"], raising=False)  # 1.15 asks a program of Slurm's
    found = find_cluster(kind({"worker": 4}, gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False))
    assert found.addresses == ("n1:8888", "n1:8889", "n2:8888", "n2:8889") and (found.rank, found.local_rank) == (2, 0)


@pytest.mark.parametrize("config,message", [
    ("{", "TF_CONFIG is no JSON"),
    ("[1]", "TF_CONFIG has to hold"),
    ({"cluster": WORKERS, "task": {"type": "worker", "index": 0}}, "TF_CONFIG has to hold"),
    ({"cluster": {"worker": 3}, "task": {"type": "worker", "index": 0}}, "TF_CONFIG's cluster is none that TensorFlow takes"),
    ({"cluster": {"worker": WORKERS}}, "TF_CONFIG does not say which task this process is"),
    ({"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": -1}}, "this process is task -1 of"),
    ({"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 3}}, "this process is task 3 of 'worker', which has 3"),
    ({"cluster": {"worker": WORKERS}, "task": {"type": "chief", "index": 0}}, "task 0 of 'chief', which has 0"),
    ({"cluster": {"worker": WORKERS, "ps": ["p:1"]}, "task": {"type": "ps", "index": 0}}, "this process is a 'ps': only"),
    ({"cluster": {"worker": WORKERS, "helper": ["p:1"]}, "task": {"type": "worker", "index": 0}}, "has a job 'helper'"),
    ({"cluster": {"worker": ["a:1", "b"]}, "task": {"type": "worker", "index": 0}}, "'b' is no address of a worker"),
    ({"cluster": {"worker": ["a:1", "b:x"]}, "task": {"type": "worker", "index": 0}}, "'b:x' is no address"),
    ({"cluster": {"worker": ["a:1", "b:70000"]}, "task": {"type": "worker", "index": 0}}, "'b:70000' is no address"),
    ({"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}, "the address 'a:1' to more than one"),
])
def test_a_malformed_tf_config_is_one_clear_sentence(monkeypatch, config, message):
    with pytest.raises(ValueError, match=message) as caught:
        of_environment(monkeypatch, config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments,kind,message", [
    ({"cluster": WORKERS}, ValueError, "rank has to say which of the 3 addresses"),
    ({"cluster": WORKERS, "rank": 3}, ValueError, "cluster has 3 workers, and this one's rank is 3"),
    ({"rank": 0}, ValueError, "rank belongs to a list of addresses"),
    ({"cluster": "a:1"}, TypeError, "cluster has to be a list of addresses"),
    ({"time_limit": 0}, ValueError, "time_limit has to be a number of seconds"),
])
def test_bad_arguments_are_refused_before_anything_is_started(arguments, kind, message):
    with pytest.raises(kind, match=message):
        towers.workers.connect(**arguments)


def test_the_config_of_a_worker_may_follow_its_local_rank(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    given = tf.ConfigProto(inter_op_parallelism_threads=3)
    for config in (given, lambda local_rank: given if local_rank == 0 else None):
        assert towers.workers.connect(config=config, devices=["/cpu:1"]).session_config().inter_op_parallelism_threads == 3
    assert given.device_count == {}  # copied, not changed


def test_a_builder_takes_no_other_workers():
    with pytest.raises(TypeError, match="workers has to be what towers.workers.connect"):
        towers.TowerBuilder(["/cpu:0"], workers=2)
