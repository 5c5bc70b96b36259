"""What tests share: CPU towers, sessions, and training without towers as the authority."""
import contextlib
import importlib
import inspect
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph.assignment import assign

# Whose `__all__` is the public API.
PUBLIC_MODULES = ("towers", "towers.workers", "towers.testing", "towers.launch", "tf_syncbn", "tf_syncbn.slim",
                  "tf_syncbn.checkpoints")

# What the warning of what towers compute by themselves begins with, and what it says of a loss that is a sum.
SAID = "towers computes this from its own part of the batch, where one tower would use the whole batch"
SUM_IS_SAID = "(?s)" + SAID + ".*is a sum over the tower's own examples that no number of them divides"


def public_functions(module):
    """Yields (name, function) of a module's public functions, of the public methods of its classes, and of their `__init__`."""
    module = importlib.import_module(module)
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isfunction(found):
            yield name, found
        for key, member in vars(found).items() if inspect.isclass(found) else ():
            member = member.fget if isinstance(member, property) else member
            if inspect.isfunction(member) and (not key.startswith("_") or key in ("__init__", "__getitem__", "__iter__")):
                yield "%s.%s" % (name, key), member


# In a process of its own, which chooses a behaviour of TensorFlow itself.
own_process = pytest.mark.skipif(os.environ.get("TOWERS_TEST_BEHAVIOUR") == "graph", reason="runs in the other behaviour")


def has_tf_layers():
    """Tells whether this TensorFlow has tf.layers: 1.15 and 2.15 do, later ones only with Keras 2 (tf-keras)."""
    try:
        return callable(tf.layers.batch_normalization)
    except Exception:  # Keras 3 raises when the attribute is read
        return False


def has_tf_estimator():
    """Tells whether this TensorFlow has tf.estimator, as those before 2.16 have."""
    try:
        return callable(tf.estimator.Estimator)
    except (AttributeError, ImportError):
        return False


@contextlib.contextmanager
def control_flow_2():
    """Control flow 2 and the resource variables that it wants, whatever the process has."""
    has_control_flow, has_variables = tf.control_flow_v2_enabled(), tf.resource_variables_enabled()
    tf.enable_control_flow_v2()
    tf.enable_resource_variables()
    try:
        yield
    finally:
        if not has_control_flow:
            tf.disable_control_flow_v2()
        if not has_variables:
            tf.disable_resource_variables()


def cpus(count):
    """Returns `count` CPU devices."""
    return ["/cpu:%d" % i for i in range(count)]


def build(model_fn, batch, num_towers=2, **kwargs):
    """Builds towers on CPU devices."""
    return towers.TowerBuilder(cpus(num_towers)).build(model_fn, batch, **kwargs)


def session():
    """A session with eight CPU devices, variables initialized."""
    made = tf.Session(config=towers.session_config(cpus(8)))
    made.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    return made


def session_as_written():
    """A session that runs a graph as it was written, without TensorFlow's optimizers, which takes less; variables initialized."""
    config = towers.session_config(cpus(4))
    config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    made = tf.Session(config=config)
    made.run(tf.global_variables_initializer())
    return made


def run(fetches, feed_dict=None):
    """Initializes the variables and runs `fetches` once."""
    with session() as made:
        return made.run(fetches, feed_dict)


def set_variables(made, values):
    """Gives variables, by name, the values of a dict."""
    assign(made, [(variable, values[variable.op.name]) for variable in tf.global_variables() if variable.op.name in values])


def train_plainly(loss, optimizer, steps):
    """Trains without any of our code: returns losses, and variables by name before and after."""
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS) + [loss]):
        train_op = optimizer.minimize(loss, gate_gradients=optimizer.GATE_GRAPH)
    return train_by(train_op, loss, steps)


def train_by(train_op, loss, steps, initial=None):
    """Runs a train op; returns losses, and variables by name before and after."""
    variables = {v.op.name: v for v in tf.global_variables()}
    with session() as made:
        set_variables(made, initial or {})
        before = made.run(variables)
        losses = [made.run([loss, train_op])[0] for _ in range(steps)]
        return np.array(losses), before, made.run(variables)


def images_and_labels(dtype, count=12):
    """Returns random images [count, 6, 6, 3] and labels of four classes."""
    rng = np.random.RandomState(1)
    return rng.randn(count, 6, 6, 3).astype(dtype), rng.randint(0, 4, count).astype(np.int32)


def loss_and_gradients(model_fn, batch, sizes):
    """Returns the loss and the gradients of towers whose batches' sizes are known only when they run.

    Args:
      model_fn: a model function, of which the loss is taken.
      batch: tuple of arrays.
      sizes: list of int, the examples of each tower.
    """
    feeds, parts, first = {}, [], 0
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        for size in sizes:
            given = [tf.placeholder(leaf.dtype, (None,) + leaf.shape[1:]) for leaf in batch]
            feeds.update((one, leaf[first:first + size]) for one, leaf in zip(given, batch))
            parts.append(tuple(given))
            first += size
        replicas = towers.TowerBuilder(["/cpu:0"] * len(sizes)).build(model_fn, towers.PerTower(parts))
        tower_grads = towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(0.1))
        found = towers.average_gradients(replicas, tower_grads, "first")
        with session_as_written() as made:
            return made.run([replicas.loss] + [tf.convert_to_tensor(gradient) for gradient, _ in found], feeds)
