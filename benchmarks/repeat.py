"""100 training steps in one call by `towers.repeat`, against 100 calls of `session.run`.

    python -m benchmarks.repeat --rounds 30

What the loop saves is the call, so models are small: softmax regression, a perceptron, and one with sync batch norm, each on a
shuffled `tf.data` pipeline with prefetching. Beside `session.run` stands a callable of the session, the fastest way to call.
Before anything is timed, the loop has to give the losses of separate calls, to the bit.
"""
import numpy as np
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from benchmarks import record
from benchmarks.command import parse, positive_int
from benchmarks.interleave import paired_ratio, spread, take_turns

__all__ = ["main"]

REPEATED, CALLED, CALLABLE = "towers.repeat", "session.run", "session.make_callable"
_BATCH_SIZE, _FEATURES, _CLASSES, _TARGET, _TARGET_MODEL = 32, 32, 10, 1 / 3, "softmax regression"


def main(argv=None):
    """Runs the command line and returns the path of the JSON that it wrote."""
    settings = parse("Times many training steps in one call.", argv, 30, _add_arguments)
    rows = [_measure(name, num_towers, settings) for name in _MODELS for num_towers in settings.towers]
    described = {"batch": _BATCH_SIZE, "features": _FEATURES, "steps": settings.steps, "rounds": settings.rounds,
                 "optimizer": "momentum SGD"}
    targets = [record.target("repeat, %d steps of %s on %d towers / %s" % (settings.steps, row["model"], row["towers"], CALLED),
                             row["ratios"][CALLED]["median"], _TARGET if row["model"] == _TARGET_MODEL else None,
                             row["ratios"][CALLED]["lower_quartile"], row["ratios"][CALLED]["upper_quartile"]) for row in rows]
    return record.write(settings.out, "repeat", described, rows, targets)


def _add_arguments(parser):
    parser.add_argument("--towers", type=positive_int, nargs="+", default=[1, 2], help="numbers of towers")
    parser.add_argument("--steps", type=positive_int, default=100, help="steps of one call")


def _measure(name, num_towers, settings):
    """Returns a row: microseconds a step of each way, and the ratio of the loop's time to each."""
    devices = ["/cpu:%d" % i for i in range(num_towers)]
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        step = _build_step(_MODELS[name], devices)
        repeated = towers.repeat(lambda: step, settings.steps)
        initializer = tf.global_variables_initializer()

        def open_session():
            session = tf.Session(config=towers.session_config(devices))
            session.run(initializer)
            return session

        with open_session() as one, open_session() as other:
            _check_losses(one.run(repeated)[0], [other.run(step)[0] for _ in range(settings.steps)])
        with open_session() as session:
            call = session.make_callable(list(step))
            seconds = take_turns({REPEATED: lambda: session.run(repeated),
                                  CALLED: lambda: [session.run(step) for _ in range(settings.steps)],
                                  CALLABLE: lambda: [call() for _ in range(settings.steps)]},
                                 settings.rounds, label="%s, %d towers" % (name, num_towers))
    return {"model": name, "towers": num_towers,
            "microseconds": {way: spread(1e6 * seconds[way] / settings.steps) for way in seconds},
            "ratios": {way: paired_ratio(seconds, REPEATED, way) for way in (CALLED, CALLABLE)}}


def _build_step(model_fn, devices):
    rng = np.random.RandomState(0)
    examples = rng.randn(1024, _FEATURES).astype(np.float32), rng.randint(0, _CLASSES, 1024)
    data = tf.data.Dataset.from_tensor_slices(examples).shuffle(1024, seed=0).repeat().batch(_BATCH_SIZE, drop_remainder=True)
    batch = tf.data.make_one_shot_iterator(data.prefetch(16)).get_next()
    replicas = towers.TowerBuilder(devices).build(model_fn, batch)
    train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.01, 0.9), global_step=tf.train.get_or_create_global_step())
    return replicas.loss, train_op


def _check_losses(losses, expected):
    if not np.array_equal(losses, expected):
        raise RuntimeError("towers.repeat does not train as session.run does: its losses are %s, not %s." % (losses, expected))


def _perceptron(hidden):
    """Returns a model function whose hidden layers' matrix products go through each function of the list `hidden`."""
    def model_fn(x, labels):
        for i, activation in enumerate(hidden):
            x = activation(tf.matmul(x, tf.get_variable("hidden%d" % i, [x.shape[-1], 32])))
        logits = tf.matmul(x, tf.get_variable("weights", [x.shape[-1], _CLASSES]))
        logits += tf.get_variable("bias", [_CLASSES], initializer=tf.zeros_initializer())
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    return model_fn


def _normalized(x):
    return tf.nn.relu(tf_syncbn.sync_batch_norm(x, training=True))


_MODELS = {_TARGET_MODEL: _perceptron([]), "3 layers": _perceptron([tf.nn.relu] * 2),
           "3 layers, sync batch norm": _perceptron([_normalized] * 2)}

if __name__ == "__main__":
    main()
