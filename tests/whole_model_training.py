"""Trains the models that `tests.whole_models` describes, on towers and without them, and says how far they are apart."""
import functools
import warnings
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

import towers
from tests.support import cpus
from tests.whole_model_layers import model_fn_of
from tests.whole_models import divided, make_batches

STEPS = 3
HEAD = "net/head/kernel"
MASK = np.arange(9).reshape([3, 3]) % 2
CLIP_NORM = 0.5
ACCUMULATED = 2
# The warnings of what is another thing in towers, which no model may get.
NOT_EXACT = ("convert_model: ", "Each tower writes the variable", "The loss of a tower", "The model function", "The update op")
OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.05),
    "momentum": lambda: tf.train.MomentumOptimizer(0.05, 0.9),
    # A larger epsilon than usual: a gradient that is 0 but for rounding would else take whole steps.
    "adam": lambda: tf.train.AdamOptimizer(0.02, epsilon=1e-3),
    "rms_prop": lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.5, epsilon=1e-3),
}


class Trained(NamedTuple):
    """What a training came to, in arrays by name."""
    losses: dict
    gradients: dict  # none of a loop
    initial: dict
    final: dict


class Step(NamedTuple):
    """One of the steps that are run in turn."""
    loss: tf.Tensor
    gradients: dict
    train_op: tf.Operation


def difference(one, other):
    """Returns how far two trainings are apart, and where most.

    Losses and gradients are held against the largest of them, variables against themselves or the largest step of any.
    """
    assert set(one.final) == set(other.final) and all((one.initial[name] == other.initial[name]).all() for name in one.final)
    largest_step = max(_largest(one.final[name] - one.initial[name]) for name in one.final)
    found = [(0.0, "nothing")]
    for kind in ("losses", "gradients", "final"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        scale = max([_largest(value) for value in ours.values()] or [0.0])
        for name in set(ours).intersection(theirs) if kind == "gradients" and {} in (ours, theirs) else ours:
            by = _largest(ours[name] - theirs[name])
            held_against = max(_largest(ours[name]), largest_step) if kind == "final" else scale
            found.append((np.inf if not np.isfinite(by) else by / held_against if by else 0.0, kind + " " + name))
    return max(found)


def _largest(array):
    return float(np.max(np.abs(array)))


def on_towers(case, sizes=None, batches=None):
    """Trains on towers, of other `sizes` if given; returns what `towers.testing` compares."""
    with tf.Graph().as_default(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for message in NOT_EXACT:
            warnings.filterwarnings("error", message)
        training = case.training
        sizes = sizes or training.sizes
        batch, feed = _placeholders(case, sizes)
        builder = towers.TowerBuilder(cpus(min(training.num_devices, len(sizes))), variable_placement=training.placement,
                                      num_towers=len(sizes))
        replicas = builder.build(model_fn_of(case.model, training.resource, False), batch)
        steps = [_tower_step(case, replicas, key, left_out) for key, left_out in _losses(case.model)]
        return _run(case, steps, feed, builder.devices, in_loop=training.repeated and batches is None, batches=batches)


def without_towers(case, batches=None):
    """Trains in a graph without towers, on batches of one's own if given."""
    if "accumulate" in case.training.transforms:
        return on_towers(case, [sum(case.training.sizes)], batches=batches)  # there is no plain way to accumulate in a graph
    with tf.Graph().as_default(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch, feed = _placeholders(case, [sum(case.training.sizes)])
        batch = batch.batches[0] if isinstance(batch, towers.PerTower) else batch
        outputs = model_fn_of(case.model, case.training.resource, True)(batch)
        steps = [_plain_step(case, outputs if key is None else outputs[key], name) for key, name in _losses(case.model, True)]
        return _run(case, steps, feed, cpus(1), batches=batches)


def rounding(case, one):
    """Returns how far a training without towers moves where its batches do by a last digit: what no sum can be held to."""
    rng, moved = np.random.RandomState(0), []
    for _ in range(3):
        batches = [dict(batch, x=batch["x"] * (1 + rng.choice([-1, 1], batch["x"].shape) * 2.0 ** -52))
                   for batch in make_batches(case, STEPS)]
        moved.append(difference(one, without_towers(case, batches))[0])
    return max(moved)


def _placeholders(case, sizes):
    """Returns a batch for the builder, and a function that feeds it the whole batch's arrays."""
    example, split = make_batches(case, 1)[0], case.training.split

    def placeholder(value):
        # What is known to be empty is refused by some layers.
        rows = [None if split == "unknown" or 0 in sizes else len(value)] if value.ndim else []
        return tf.placeholder(value.dtype, rows + list(value.shape[1:]))

    if split == "given":
        given = [{key: placeholder(value) for key, value in part.items()} for part in divided(example, sizes)]
        return towers.PerTower(given), lambda batch: {
            tensor: value[key] for part, value in zip(given, divided(batch, sizes)) for key, tensor in part.items()}
    given = {key: placeholder(value) for key, value in example.items()}
    return given, lambda batch: {given[key]: batch[key] for key in given}


def _losses(model, plain=False):
    """Returns (key of a loss, which variables train by it) for each step in turn."""
    if model.loss == "two":
        return [("first_loss", "second_head"), ("second_loss", "first")]
    return [("loss" if plain and model.loss != "scalar" else None, None)]


def _variables(left_out):
    if left_out is None:
        return None
    return [v for v in tf.trainable_variables() if not v.op.name.startswith("net/" + left_out.replace("first", "head"))]


def _tower_step(case, replicas, key, left_out):
    seen, training = [], case.training

    def note(grads):
        seen.extend(grads)
        return grads

    transforms = {
        "clip_by_global_norm": lambda: towers.clip_by_global_norm(CLIP_NORM),
        "accumulate": lambda: towers.accumulate(ACCUMULATED),
        "mask_gradients": lambda: towers.mask_gradients({HEAD: MASK})}
    chosen = [transforms[name]() for name in _transforms(case, left_out)]
    train_op = towers.minimize(replicas, OPTIMIZERS[training.optimizer](), update_ops=training.policy, transforms=[note] + chosen,
                               var_list=_variables(left_out), loss=key)
    return Step(replicas.loss if key is None else replicas.merged()[key], _dense(seen), train_op)


def _transforms(case, left_out):
    """Returns the names of the transforms of a step, those alone that apply to its variables, masks last."""
    names = [name for name in case.training.transforms if name != "mask_gradients" or left_out != "first"]
    return sorted(names, key=lambda name: name == "mask_gradients")


def _plain_step(case, loss, left_out):
    optimizer = OPTIMIZERS[case.training.optimizer]()
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS) if case.training.policy != "none" else []
    with tf.control_dependencies(updates + [loss]):
        grads = optimizer.compute_gradients(loss, _variables(left_out), gate_gradients=optimizer.GATE_GRAPH)
        grads = seen = [(gradient, variable) for gradient, variable in grads if gradient is not None]
        for name in _transforms(case, left_out):
            gradients, variables = zip(*grads)
            if name == "clip_by_global_norm":
                gradients, _ = tf.clip_by_global_norm(gradients, CLIP_NORM)
            else:
                gradients = [g * MASK if v.op.name == HEAD else g for g, v in grads]
            grads = list(zip(gradients, variables))
    with tf.control_dependencies(updates + [loss]):
        return Step(loss, _dense(seen), optimizer.apply_gradients(grads))


def _dense(grads):
    return {variable.op.name: tf.convert_to_tensor(gradient) for gradient, variable in grads}


def _run(case, steps, feed, devices, in_loop=False, batches=None):
    """Runs steps in turn, and returns what they came to."""
    batches = make_batches(case, STEPS) if batches is None else batches
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    config.graph_options.rewrite_options.disable_meta_optimizer = not case.training.rewritten
    if in_loop:
        looped = towers.repeat([functools.partial(lambda step: (step.loss, step.train_op), step) for step in steps], STEPS)
    variables, initializer = {v.op.name: v for v in tf.global_variables()}, tf.global_variables_initializer()
    with tf.Session(config=towers.session_config(devices, config)) as session:
        session.run(initializer)
        initial, gradients = session.run(variables), {}
        if in_loop:
            losses = session.run([loss for loss, _ in looped], feed(batches[0]))
        else:
            ran = [[session.run(step, feed(batch)) for step in steps] for batch in batches]
            losses = [[turn[i].loss for turn in ran] for i in range(len(steps))]
            gradients = {"%s in step %d" % (name, i): np.array([turn[i].gradients[name] for turn in ran])
                         for i, step in enumerate(steps) for name in step.gradients}
        losses = {"of step %d" % i: np.array(values) for i, values in enumerate(losses)}
        return Trained(losses, gradients, initial, session.run(variables))
