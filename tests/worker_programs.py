"""What worker processes of tests run under a TF_CONFIG: a function of this module, by its name and arguments."""
import contextlib
import json
import os
import socket
import sys
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import tf_syncbn  # noqa: E402
import towers  # noqa: E402
from tests.conftest import BEHAVIOUR  # noqa: E402, F401  which chooses TensorFlow's behaviour
from tests.kernel_machines import running_on  # noqa: E402
from tests.support import cpus  # noqa: E402
from towers.workers.step_numbers import StepNumbers  # noqa: E402

CLASSES, STEPS = 3, 4


def examples(count):
    """Returns inputs float64 [count, 6] and labels."""
    rng = np.random.RandomState(3)
    return rng.randn(count, 6) * 2 + 5, rng.randint(0, CLASSES, count)


def normal(seed):
    """Returns an initializer that draws by NumPy, alike in every process and graph."""
    return lambda shape, dtype=tf.float64, partition_info=None: tf.constant(
        np.random.RandomState(seed).randn(*tf.TensorShape(shape).as_list()) / 2, dtype)


def model(seed=0):
    """Returns a model function that meets in every way that one tower knows too; `seed` begins its variables."""
    def variable(name, shape):
        return tf.get_variable(name, shape, tf.float64, normal(seed + len(name)))

    def model_fn(x, labels):
        h = tf.matmul(x, variable("first", [6, 8]))
        h = tf.nn.relu(tf_syncbn.sync_batch_norm(h, momentum=0.9, mask=x[:, 0] > 4, training=True))
        h = tf_syncbn.sync_batch_norm(tf.matmul(h, variable("second", [8, 8])), momentum=0.9, renorm=True, name="renormed",
                                      training=True)
        h *= tf.nn.embedding_lookup(variable("rows", [CLASSES + 2, 8]), labels)
        mean, variance = tf.nn.moments(h, [0])  # convert_model's
        h = tf.nn.batch_normalization(h, mean, variance, None, variable("beta", [8]), 1e-3)
        # The gradient of what is used three times is a sum of three, whose order TensorFlow does not fix.
        one, other = tf.identity(h), tf.identity(h)
        similar = tf.matmul(one, towers.all_gather(one), transpose_b=True)
        penalty = towers.all_reduce(tf.reduce_sum(tf.abs(other))) / towers.all_reduce(tf.cast(tf.size(h), tf.float64))
        loss = tf.reduce_mean(tf.tanh(similar)) + tf.reduce_mean(tf.square(tf.sin(other))) + penalty ** 2
        return {"loss": loss, "h": h}
    return tf_syncbn.convert_model(model_fn)


def mixing_model(x, labels):
    """A model that mixes examples in most ways and knows nothing of towers: sums, gathers, rows, sizes and state meet."""
    def variable(name, shape):
        return tf.get_variable(name, shape, tf.float64, normal(len(name)))

    h = tf.matmul(x, variable("first", [6, 8]))
    mean, variance = tf.nn.moments(h, [0])
    average = tf.get_variable("average", [8], tf.float64, tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(average, 0.1 * (average - mean)))
    h = tf.tanh(tf.nn.batch_normalization(h, mean, variance, None, variable("beta", [8]), 1e-3))
    unit = tf.nn.l2_normalize(h, 1)
    similar = tf.reduce_logsumexp(tf.matmul(unit, unit, transpose_b=True), 1)
    chosen = tf.boolean_mask(h, labels > 0)
    logits = tf.matmul(h, variable("weights", [8, CLASSES]))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    weights = tf.cast(1 + labels, tf.float64)
    count = tf.cast(tf.shape(x)[0], tf.float64)
    return (tf.reduce_sum(weights * losses) / tf.reduce_sum(weights) + 0.1 * tf.reduce_mean(similar)
            + tf.reduce_sum(chosen * tf.reduce_mean(chosen, 0)) / count + 0.01 * tf.reduce_mean(losses ** 2))


def train_whole_batch(folder, cases):
    """Trains `mixing_model` as each case says, and saves what it comes to."""
    workers = towers.workers.connect(devices=cpus(2), time_limit=60)
    for name, (sizes, known) in json.loads(cases).items():
        with tf.Graph().as_default():
            builder = towers.TowerBuilder(cpus(len(sizes[workers.rank])), workers=workers)
            replicas = builder.build(towers.whole_batch(mixing_model), batches(workers, sizes, known))
            train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.05, 0.9))
            broadcast, variables = workers.broadcast_variables(), {v.op.name: v for v in tf.global_variables()}
            with workers.session() as session:
                session.run(tf.global_variables_initializer())
                session.run(broadcast)
                losses = [session.run([replicas.loss, train_op])[0] for _ in range(3)]
                end = dict(session.run(variables), losses=losses)
        np.savez("%s/%s_%d" % (folder, name, workers.rank), **{key.replace("/", "|"): value for key, value in end.items()})


def split_model(momentum=0.7):
    """Returns a model function that one tower knows nothing of: groups of towers, a batch norm of each tower, a state."""
    def model_fn(x, labels):
        h = tf_syncbn.sync_batch_norm(x, momentum=0.9, group_size=2)
        w = tf.get_variable("w", [6, 6], tf.float64, tf.initializers.identity())
        u = tf.get_variable("u", [6, 1], tf.float64, tf.ones_initializer(), trainable=False)
        turned = tf.matmul(w, u.read_value())
        with tf.control_dependencies([tf.assign(u, turned / tf.norm(turned))]):  # of no data: alike in all towers
            h = tf.matmul(h, w / tf.norm(turned))
        mean = tf.reduce_mean(h, 0)
        average = tf.get_variable("average", [6], tf.float64, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(average, momentum * average + (1 - momentum) * mean))
        return tf.reduce_mean(tf.square(tf.cos(h - mean)))
    return model_fn


def batches(workers, sizes, known):
    """Returns this worker's towers' batches; `sizes` is a list over workers of lists of each tower's number of examples."""
    before = sum(sum(of_worker) for of_worker in sizes[:workers.rank])
    ends = np.cumsum([before] + sizes[workers.rank])
    x, labels = examples(sum(map(sum, sizes)))
    rows = [slice(begin, end) for begin, end in zip(ends, ends[1:])]
    if known:
        return towers.PerTower([(tf.constant(x[of]), tf.constant(labels[of])) for of in rows])
    return towers.PerTower([(tf.placeholder_with_default(x[of], [None, 6]), tf.placeholder_with_default(labels[of], [None]))
                            for of in rows])


LATE = 3  # seconds


def several(folder, programs):
    """Runs functions one after the other, with the same workers, each in a graph of its own; of three workers two come late."""
    config = json.loads(os.environ["TF_CONFIG"])
    time.sleep(LATE if config["task"]["index"] and len(config["cluster"]["worker"]) == 3 else 0)
    began = time.monotonic()
    workers = towers.workers.connect(devices=cpus(4), time_limit=120)
    print("waited %f" % (time.monotonic() - began))
    for name, *arguments in json.loads(programs):
        with tf.Graph().as_default():
            globals()[name](workers, folder, *arguments)


def train(workers, folder, cases):
    """Trains what each case says twice from the same beginning, and some once in one call, and saves the ends."""
    for name, (which, sizes, known, update_ops) in cases.items():
        ends = [end for many in ((False, True) if which == "whole" and known else (False,)) for end in _ends(
            workers, which, sizes, known, update_ops, many)]
        for turn, end in enumerate(ends):
            np.savez("%s/%s_%d_%d" % (folder, name, workers.rank, turn), **{
                name.replace("/", "|"): value for name, value in end.items()})


def _ends(workers, which, sizes, known, update_ops, many):
    """Returns the ends of two trainings of `STEPS` steps, of one if `many` steps are taken in one call."""
    def step():
        model_fn = model(seed=10 * workers.rank) if which == "whole" else split_model()
        replicas = towers.TowerBuilder(cpus(len(sizes[workers.rank])), workers=workers).build(
            model_fn, batches(workers, sizes, known))
        train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.01, 0.9), update_ops=update_ops)
        with tf.control_dependencies([train_op]):
            return {"loss": tf.identity(replicas.loss), "weight": tf.identity(replicas.weight),
                    "index": tf.constant([tower.context.index for tower in replicas])}

    ends = []
    with tf.Graph().as_default():
        fetches = towers.repeat(step, STEPS) if many else step()
        broadcast, variables = workers.broadcast_variables(), {v.op.name: v for v in tf.global_variables()}
        for _ in range(1 if many else 2):
            with workers.session() as session:
                assert len(session.run(tf.report_uninitialized_variables())) == len(variables)  # none is left of the last session
                session.run(tf.global_variables_initializer())
                session.run(broadcast)
                steps = session.run(fetches) if many else [session.run(fetches) for _ in range(STEPS)]
                losses = steps["loss"] if many else [step["loss"] for step in steps]
                last = {name: value[-1] for name, value in steps.items()} if many else steps[-1]
                workers.check_variables(session)
                ends.append(dict(session.run(variables), losses=np.array(losses), weight=last["weight"], index=last["index"]))
    return ends


GPU_SIZES = [[3, 2], [4, 3]]


def images_and_slopes():
    """Returns images and slopes by a layer's output, float32 [12, 4, 4, 6]."""
    rng = np.random.RandomState(0)
    return [(rng.randn(12, 4, 4, 6) + offset).astype(np.float32) for offset in (1, 0.5)]


def gpu_layer(workers, folder):
    """Saves of this worker's towers a layer's output by a GPU's kernels, and its gradients."""
    ends = np.cumsum([sum(map(sum, GPU_SIZES[:workers.rank]))] + GPU_SIZES[workers.rank])
    x, dy = images_and_slopes()
    batch = towers.PerTower([(tf.constant(x[a:b]), tf.constant(dy[a:b])) for a, b in zip(ends, ends[1:])])

    def model_fn(x, dy):
        y = tf_syncbn.sync_batch_norm(x, name="bn")
        return [y] + tf.gradients(y, [x] + tf.trainable_variables(), dy)

    with running_on("gpu", True):
        replicas = towers.TowerBuilder(cpus(2), workers=workers).build(model_fn, batch)
    with workers.session() as session:
        session.run(tf.global_variables_initializer())
        y, dx, d_gamma, d_beta = zip(*session.run([tower.outputs for tower in replicas]))
    np.savez("%s/gpu_%d" % (folder, workers.rank), y=np.concatenate(y), dx=np.concatenate(dx),
             d_gamma=np.sum(d_gamma, 0, np.float64), d_beta=np.sum(d_beta, 0, np.float64))


def plain(workers, folder, averaged):
    """A graph without towers, written as for one process; each worker has another number of examples."""
    x = examples(12)[0][[slice(0, 3), slice(3, 12)][workers.rank] if workers.size > 1 else slice(None)]
    optimizer, weight = tf.train.AdamOptimizer(0.01), tf.constant(len(x))
    loss = plain_loss(tf.constant(x), seed=workers.rank)
    step = tf.train.get_or_create_global_step()
    if averaged == "compute":
        optimizer = workers.optimizer(optimizer, weight)
        pairs = optimizer.compute_gradients(loss)
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.05)
        train_op = optimizer.apply_gradients(zip(clipped, [variable for _, variable in pairs]), step)
    else:  # gradients that compute_gradients never saw
        optimizer = workers.optimizer(optimizer, weight)
        train_op = optimizer.apply_gradients(zip(tf.gradients(loss, tf.trainable_variables()), tf.trainable_variables()), step)
    with tf.train.MonitoredTrainingSession(
            master=workers.target, config=workers.session_config(), hooks=[workers.hook()], save_checkpoint_steps=3,
            checkpoint_dir="%s/%s" % (folder, averaged) if workers.is_chief else None) as session:
        for _ in range(3):
            session.run(train_op)
        end = session.run({v.op.name: v for v in tf.global_variables()})
    np.savez("%s/%s_%d" % (folder, averaged, workers.rank), **{name.replace("/", "|"): value for name, value in end.items()})


def plain_loss(x, seed=0):
    """Returns a mean over examples of dense and of sparse variables."""
    h = tf.matmul(x, tf.get_variable("w", [6, 5], tf.float64, normal(seed)))
    rows = tf.get_variable("rows", [9, 5], tf.float64, normal(seed + 1))
    return tf.reduce_mean(tf.square(tf.tanh(h) - tf.gather(rows, tf.cast(tf.abs(x[:, 1]) / 2, tf.int32))))


def reductions(workers, folder):
    """Sums of every dtype, their gradients, and what each has of what differs in shape."""
    found, mine = {}, workers.rank + 1
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8):
        found[dtype.name] = tf.cast(workers.all_reduce(tf.cast([mine, 2 * mine], dtype)), tf.float64)
    x = tf.constant(float(mine))
    found["mean"] = workers.all_reduce(x, "mean")
    # Worker w's loss is (w + 1) (sum x)^2: its gradient by every x is 2 (w + 1) sum x.
    found["gradient"], = tf.gradients(mine * workers.all_reduce(x) ** 2, x)
    for reduction in ("max", "min"):
        found[reduction] = workers.all_reduce(tf.stack([x, 4 - x, 1.0]), reduction)
        # Worker w's loss is (w + 1) y . y, and y's third number is the same in all workers.
        found[reduction + " gradient"], = tf.gradients(
            mine * workers.all_reduce(tf.stack([x, 4 - x, 0 * x + 1]), reduction) ** 2, x)
    found["second"], = tf.gradients(tf.gradients(workers.all_reduce(x) ** 3, x), x)
    fed = tf.placeholder(tf.float64, [None, None])
    of_fed = workers.all_reduce(fed)
    told = json.dumps(workers.tell_all({"rank": workers.rank, "long": "x" * mine * 5}))
    with workers.session() as session:
        values = session.run(found)
        values["of_fed"] = session.run(of_fed, {fed: np.full([2, 3], mine)})
        values["of_other"] = session.run(of_fed, {fed: np.full([3, 3], mine)})
        try:
            session.run(of_fed, {fed: np.full([3, 2] if mine == 3 else [2, 3], mine)})
        except tf.errors.InvalidArgumentError as error:
            values["refused"] = error.message
    np.savez("%s/reductions_%d" % (folder, workers.rank), told=told, **values)


def fail(workers, _, cases):
    """Workers that differ, or forget: what each case is refused by."""
    for what in cases:
        with tf.Graph().as_default():
            _fail(workers, what)


def _fail(workers, what):
    builder = towers.TowerBuilder(["/cpu:0"], workers=workers)
    second = workers.rank == 1

    def model_fn(x):
        x *= tf.get_variable("scale", [6], tf.float64)
        if what == "exchange" and second:
            x = towers.all_reduce(x)
        if what == "gradients":
            x *= tf.get_variable("other", [6], tf.float64)
        if what == "variable":
            x *= tf.get_variable("b%d" % workers.rank, [6], tf.float64)
        if what == "momentum":
            x = tf_syncbn.sync_batch_norm(x, momentum=0.9 + 0.01 * workers.rank)
        if what in ("state", "random"):
            v = tf.get_variable("state", [], tf.float64, trainable=False)
            x *= tf.assign(v, tf.reduce_sum(x) if what == "state" else tf.truncated_normal([], dtype=tf.float64))
        if what == "all":
            v = tf.get_variable("average", [], tf.float64, trainable=False)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(v, tf.reduce_mean(x)))
        return tf.reduce_mean(x ** 2)

    try:
        replicas = builder.build(model_fn, tf.constant(examples(4)[0]))
        variables = tf.trainable_variables()
        if what == "loss":
            tf.gradients(replicas.loss, variables)
        policy = "all" if what == "all" else "first"
        train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops=policy,
                                   var_list=variables[:1] if what == "gradients" and second else None)
        broadcast = workers.broadcast_variables()
        with workers.session() as session:
            session.run(tf.global_variables_initializer())
            if what != "forget":
                session.run(broadcast)
            session.run(train_op)
    except (ValueError, tf.errors.OpError) as error:
        print("%s is refused: %s" % (what, " ".join(str(error).split())))


def drift(workers, _):
    """Variables that are made equal, and then written in one worker; draws that are the same in all workers, and not."""
    found = []
    for seed in (7, 7 + workers.rank, None):
        with tf.Graph().as_default(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tf.set_random_seed(seed)
            builder = towers.TowerBuilder(["/cpu:0"], workers=workers)
            builder.build(lambda x: tf.reduce_mean(tf.nn.dropout(x, rate=0.5)), tf.ones([4, 6]))
        found.append([str(each.message) for each in caught if "draw" in str(each.message)])
    print("warned %r" % (found,))
    v = tf.get_variable("v", [2], initializer=tf.zeros_initializer())
    broadcast = workers.broadcast_variables()
    with workers.session() as session:
        session.run(tf.global_variables_initializer())
        session.run(broadcast)
        workers.check_variables(session)
        session.run(tf.assign(v, [0.0, float(workers.rank)]))
        try:
            workers.check_variables(session)
        except ValueError as error:
            print("refused: %s" % error)


def connect_in_vain():
    """Connects where the port of this worker is taken, and where no other one comes."""
    config = json.loads(os.environ["TF_CONFIG"])
    port = int(config["cluster"]["worker"][config["task"]["index"]].rpartition(":")[2])
    with contextlib.closing(socket.socket(socket.AF_INET6)) as taken:
        taken.bind(("::", port))
        taken.listen(1)
        _connect_in_vain()
    _connect_in_vain()


def _connect_in_vain():
    try:
        towers.workers.connect(time_limit=1)
    except RuntimeError as error:
        print("refused: %s" % error)


def steps():
    """Trains by a session and by a monitored one, and says when each sequence of numbers was drawn, late, or first used.

    Worker 0 says when it began to serve the others, too. Of a third graph it runs alone what meets in a branch that is not taken.
    """
    times, draw, run, start = {}, StepNumbers._draw, tf.Session.run, tf.train.Server.start

    def late(self, key):
        time.sleep(0.3)
        draw(self, key)
        times[key] = time.monotonic()

    def watched(self, fetches, feed_dict=None, options=None, run_metadata=None):
        key = options.experimental.collective_graph_key if options else 0
        if key:
            times.setdefault(key, time.monotonic())
        return run(self, fetches, feed_dict, options, run_metadata)

    def started(self):
        times["started"] = time.monotonic()
        start(self)

    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        StepNumbers._draw, tf.train.Server.start = late, started
    else:
        tf.Session.run = watched
    workers = towers.workers.connect(devices=cpus(1), time_limit=60)
    for monitored in (False, True):
        with tf.Graph().as_default():
            x = tf.get_variable("x", [], initializer=tf.ones_initializer())
            tf.train.get_or_create_global_step()
            step = x.assign_add(workers.all_reduce(x)).op
            if monitored:
                with tf.train.MonitoredTrainingSession(workers.target, config=workers.session_config(),
                                                       hooks=[workers.hook()]) as session:
                    for _ in range(2):
                        session.run(step)
                    assert session.run(x) == 9
            else:
                broadcast = workers.broadcast_variables()
                with workers.session() as session:
                    session.run(tf.global_variables_initializer())
                    session.run(broadcast)
                    session.run(step)
                    session.make_callable(step)()
                    assert session.run(x) == 9
    with tf.Graph().as_default(), workers.session() as session:
        fed, every = tf.placeholder(tf.float32, []), tf.placeholder(tf.bool, [])
        total = tf.cond(every, lambda: workers.all_reduce(fed), lambda: fed)
        if workers.rank == 0:
            assert session.run(total, {fed: 3, every: False}) == 3  # no other has to run what meets in a branch
        both = [total, workers.all_reduce(tf.constant(1.0))]
        of_both = session.make_callable(both, [fed, every])
        assert of_both(2, False) == [2, 2] and of_both(2, True) == [4, 2]
        assert session.run(both[1], options=tf.RunOptions()) == 2 == session.make_callable(both[1], accept_options=True)(
            tf.RunOptions(), tf.RunMetadata())
    print("times %s" % json.dumps(times))


def main():
    """Calls the function that the first argument names with the others."""
    globals()[sys.argv[1]](*sys.argv[2:])
