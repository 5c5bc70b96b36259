"""A user's program as a type checker sees it: `make types` checks it, and nothing runs it.

`assert_type` fails where a type is another one, or was lost and is `Any`. Where an error is ignored there has to be one.
"""
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow.compat.v1 as tf
from typing_extensions import assert_type

import tf_syncbn
import towers
import towers.testing
from towers.launch import free_ports, launch, main


def model_fn(images: Any, labels: Any) -> Dict[str, Any]:
    tower = towers.current_tower()
    assert_type(tower, Optional[towers.TowerContext])
    tower.index  # type: ignore[union-attr]  # None outside of towers
    if tower is not None:
        assert_type(tower.index, int)
        assert_type(tower.is_first, bool)
        assert_type(tower.device, str)
        tower.add_update(tf.no_op(), shared=True)
    with towers.may_differ():
        x = tf_syncbn.sync_batch_norm(images, momentum=0.9, mask=labels, updates_collections=None)
    return {"loss": towers.softmax_cross_entropy(x, labels), "sum": towers.all_reduce(x, "mean")}


def largest(per_tower: List[List[Any]]) -> Sequence[Sequence[Any]]:
    return [[tf.reduce_max([value for value, in per_tower])]] * len(per_tower)


def train(batch: Any) -> None:
    towers.exchange([np.ones(3)], largest, [(tf.float32, [])])
    towers.TowerBuilder("/cpu:0", num_towers="two")  # type: ignore[arg-type]
    towers.TowerBuilder(["/gpu:0"]).session_config(tf.ConfigProto())
    builder = towers.TowerBuilder(["/gpu:0", "/gpu:1"], variable_placement=lambda op: "/gpu:0", workers=towers.workers.connect())
    assert_type(builder.devices, List[str])
    replicas = builder.build(tf_syncbn.convert_model(model_fn, only="block1/"), batch, training=True)
    assert_type(replicas, towers.Towers)
    assert_type(replicas[0], towers.Tower)
    assert_type(replicas[:1], Tuple[towers.Tower, ...])
    assert_type([tower.context for tower in replicas], List[towers.TowerContext])
    assert_type(replicas[0].name_scope, str)
    optimizer = tf.train.AdamOptimizer()
    transforms = [towers.accumulate(4), towers.clip_by_global_norm(5.0), lambda grads: grads[:1],
                  towers.mask_gradients({"kernel": np.ones(3)}), towers.scale_loss(128)]
    towers.minimize(replicas, optimizer, transforms=transforms, loss=lambda tower: tower.outputs["loss"], pack=True)
    towers.minimize(replicas, optimizer, update_ops=towers.collect_update_ops(replicas, "all"), loss="loss")
    towers.minimize(replicas, optimizer, pack="yes")  # type: ignore[arg-type]
    grads = towers.compute_gradients(replicas, optimizer)
    assert_type(towers.average_gradients(replicas, grads), List[Tuple[Any, Any]])
    towers.repeat([lambda: replicas.loss, lambda: None], 100)
    config = towers.session_config(builder.devices)
    with towers.workers.watched_session(["host:2222"], config=config, time_limit=60) as session:
        assert_type(tf_syncbn.recalibrate(session, replicas, 10), "Dict[str, np.ndarray]")
        tf_syncbn.recalibrate(session, replicas, "ten")  # type: ignore[arg-type]


def of_workers(workers: towers.workers.Workers) -> None:
    assert_type((workers.rank, workers.size, workers.local_rank, workers.is_chief), Tuple[int, int, int, bool])
    assert_type(workers.target, str)
    assert_type(workers.tell_all({"step": 1}), List[Any])
    workers.optimizer(tf.train.AdamOptimizer(), weight=32)


def of_estimators() -> Any:
    towers.TowerOptimizer(lambda: tf.train.AdamOptimizer()).get_name()
    return tf.estimator.Estimator(towers.replicate_model_fn(model_fn, convert=tf_syncbn.convert_model))


def around(path: str) -> Union[int, float]:
    assert_type(tf_syncbn.checkpoints.convert(path, path + "-slim", "slim", {"/bn$": "/BatchNorm"}), Dict[str, str])
    assert_type(tf_syncbn.checkpoints.rename(["conv1/W"], to="slim"), Dict[str, str])
    tf_syncbn.checkpoints.assignment_map(path, scopes=["/bn$"])  # type: ignore[arg-type]
    towers.testing.assert_equals_one_batch(model_fn, np.ones(3), sizes=(1, 2)).bound.values()
    assert_type(free_ports(2), List[int])
    return main(["-n", "2", "script.py"]) or launch(["true"], 2)
