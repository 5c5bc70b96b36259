"""More than one process: the towers of several workers trained as one, on TensorFlow's own distributed runtime.

    workers = towers.workers.connect()                            # TF_CONFIG, as `python -m towers.launch -n 2 script.py` sets it
    builder = towers.TowerBuilder(devices, workers=workers)
    replicas = builder.build(model_fn, batch)                     # this worker's part of the batch
    train_op = towers.minimize(replicas, optimizer)
    broadcast = workers.broadcast_variables()
    with workers.session() as session:
        session.run(tf.global_variables_initializer())
        session.run(broadcast)
"""
from towers.workers.connection import Workers, connect
from towers.workers.one_client import watched_session

__all__ = ["Workers", "connect", "watched_session"]
