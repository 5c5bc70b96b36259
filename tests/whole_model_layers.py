"""Builds the models that `tests.whole_models` describes, on towers or without.

Without towers no layer of ours is in them: `sync_batch_norm` is written out there by TensorFlow's own means and sums.
"""
import copy
import zlib

import numpy as np
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.laws.test_recurrent import Gru
from tests.whole_models import CHANNELS, CLASSES, INPUTS, SYNC, TIME, WORDS, is_converted


def _in_loop(net, x, normalize):
    return tf.while_loop(lambda turn, _: turn < 2, lambda turn, y: (turn + 1, normalize(y)), (0, x))[1]


def _in_cond(net, x, normalize):
    return tf.cond(net.batch["rate"] > 0.5, lambda: normalize(x), lambda: tf.identity(x))


def _last_of(net, x, change):
    tower = towers.current_tower()
    return change(x) if tower and tower.index == tower.num_towers - 1 else x


def _by_sync(net):
    return lambda x: net._synced(x, dict(SYNC))


def _by_moments(net):
    return lambda x: net._plainly_normalized(x, dict(momentum=0.9, epsilon=1e-3, center=False, scale=False, form="moments"))


# What the library can't make exact, and what it says, by names; the model is to have batch norms of its own, or none, or either.
REFUSED = {
    "sync in loop": (lambda net, x: _in_loop(net, x, _by_sync(net)), None, "control flow|tf.while_loop"),
    "sync in cond": (lambda net, x: _in_cond(net, x, _by_sync(net)), None, "control flow|tf.cond"),
    "by hand in loop": (lambda net, x: _in_loop(net, x, _by_moments(net)), True, "tf.while_loop|can't meet in a function, loop"),
    "by hand in cond": (lambda net, x: _in_cond(net, x, _by_moments(net)), True, "tf.cond|can't meet in a function, loop"),
    "slopes through what is by hand": (
        lambda net, x: x + tf.gradients(tf.sin(_by_moments(net)(x)), x)[0], True, "takes gradients through the batch norm"),
    "other constant": (lambda net, x: x * (1 + (towers.current_tower().index if towers.current_tower() else 0)), None,
                       "Towers have to compute alike"),
    "other layer": (lambda net, x: _last_of(net, x, tf.sin), None, "Towers have to compute alike"),
    "other variable": (lambda net, x: _last_of(net, x, lambda y: y * variable("late", [])), None, "which tower 0 does not make"),
    "other exchange": (lambda net, x: _last_of(net, x, _by_sync(net)), None, "that tower 0 has not|does not make|Towers differ"),
    "other argument": (lambda net, x: net._synced(x, dict(SYNC, epsilon=_last_of(net, 0.001, lambda _: 0.1))), None,
                       "epsilon is 0.001 in tower 0 and 0.1 in tower"),
    "training within": (lambda net, x: _trains(x), None, "The model function applies gradients"),
}


def _trains(x):
    w = variable("w", [])
    with tf.control_dependencies([tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(x) * w, var_list=[w])]):
        return tf.identity(x)


POINT = {"vectors": [], "sequences": [1], "images": [1, 1], "images, channels first": [1, 1]}


def model_fn_of(model, resource, plain):
    """Returns a model function of one batch, a dict of tensors; `plain` is for graphs without towers."""
    def model_fn(batch):
        with tf.variable_scope("net", dtype=tf.float64, use_resource=resource):
            return _Network(model, batch, plain).outputs()
    return tf_syncbn.convert_model(model_fn) if is_converted(model) and not plain else model_fn


def variable(name, shape, trainable=True, value=None, regularizer=None):
    """Returns a variable that starts from values that follow its name, or from one value everywhere."""
    seed = zlib.crc32((tf.get_variable_scope().name + name).encode())
    values = np.random.RandomState(seed).randn(*shape) / max(1.0, np.prod(shape[:-1])) ** 0.5 if value is None else value
    return tf.get_variable(name, shape, initializer=tf.constant_initializer(values), trainable=trainable, regularizer=regularizer)


def _decay(weights):
    return 0.1 * tf.nn.l2_loss(weights)


class _Network:
    """A model being built."""

    def __init__(self, model, batch, plain):
        self.model, self.batch, self.plain = model, batch, plain
        self.is_first_channels = model.inputs == "images, channels first"
        self.rank = len(INPUTS[model.inputs]) + 1
        self.axis = 1 if self.is_first_channels else self.rank - 1
        self.axes = [i for i in range(self.rank) if i != self.axis]
        self.batch_axis = 0
        self.updates = {}  # name of a variable -> its last update
        self.total = None

    def outputs(self):
        x = y = self.batch["x"]
        y = self.through(self.model.layers, y, "layer")
        features = tf.reduce_mean(y, self.axes[1:]) if self.rank > 2 else y
        self.steps = tf.reduce_sum(tf.square(y), 2) if self.model.loss == "steps" else None
        with tf.variable_scope("head"):
            logits = tf.matmul(features, variable("kernel", [CHANNELS, CLASSES])) + variable("bias", [CLASSES], value=0.0)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self.batch["labels"], logits=logits)
        decay = tf.nn.l2_loss(variable("decayed", [2], regularizer=_decay))
        added = tf.losses.get_regularization_loss() if self.model.regularized else 0.1 * decay
        if self.model.penalty:
            slopes = tf.gradients(tf.reduce_sum(tf.sin(features), 1), x)[0]
            losses += tf.reduce_sum(tf.square(tf.reshape(slopes, [-1, np.prod(INPUTS[self.model.inputs])])), 1)
        return self.losses(losses, features, added)

    def losses(self, losses, features, added):
        kind, valid = self.model.loss, self.batch["valid"]
        if kind == "weighted":
            count = self.num_valid()
            return {"loss": tf.div_no_nan(tf.reduce_sum(losses * valid), count) + added, "weight": count}
        if kind == "steps":
            mask = tf.cast(tf.sequence_mask(self.batch["lengths"], TIME), tf.float64)
            count = tf.reduce_sum(mask)
            return {"loss": tf.reduce_sum(self.steps * mask + losses[:, None] * mask) / tf.maximum(count, 1) + added,
                    "weight": count}
        if kind == "weighted by all":
            num_towers = towers.all_reduce(tf.ones([], tf.float64))
            mean = tf.reduce_sum(losses * valid) / towers.all_reduce(tf.reduce_sum(valid))
            return {"loss": num_towers * mean + added, "weight": 1.0}
        loss = tf.reduce_mean(losses) + added
        if kind == "two":
            with tf.variable_scope("second_head"):
                scores = tf.matmul(features, variable("kernel", [CHANNELS, 1]))
            return {"first_loss": loss, "second_loss": tf.reduce_mean(tf.nn.softplus(scores) ** 2)}
        return {"loss": loss, "features": features} if kind == "dict" else loss

    def through(self, layers, x, name):
        """Returns what layers make of `x`, under names of their own."""
        for number, layer in enumerate(layers):
            with tf.variable_scope("%s%d" % (name, number)):
                x = getattr(self, "_" + layer.kind.replace(" ", "_"))(x, layer)
        return x

    def of_channels(self, vector):
        """Returns a vector of channels in a shape that broadcasts to the inputs."""
        return tf.reshape(vector, [1] * self.axis + [CHANNELS] + [1] * (self.rank - self.axis - 1))

    def channels_last(self, x, function):
        if not self.is_first_channels:
            return function(x)
        return tf.transpose(function(tf.transpose(x, [0, 2, 3, 1])), [0, 3, 1, 2])

    def _mixed(self, x, kernel):
        """Multiplies the channels of each position by a matrix."""
        def multiply(y):
            return tf.nn.convolution(y, tf.reshape(kernel, POINT[self.model.inputs] + [-1, CHANNELS]), "SAME")
        return tf.matmul(x, kernel) if self.rank == 2 else self.channels_last(x, multiply)

    def _dense(self, x, layer):
        kernel = variable("kernel", [CHANNELS, CHANNELS], regularizer=_decay)
        x = self._mixed(x, kernel) + self.of_channels(variable("bias", [CHANNELS], value=0.1))
        return self._mixed(tf.tanh(x), kernel) if layer.options["twice"] else x

    def _conv(self, x, layer):
        kernel = variable("kernel", [3] * (self.rank - 2) + [CHANNELS, CHANNELS])
        return self.channels_last(x, lambda y: tf.nn.convolution(y, kernel, "SAME"))

    def _depthwise(self, x, layer):
        kernel = variable("kernel", [3, 3, CHANNELS, 1])
        return self.channels_last(x, lambda y: tf.nn.depthwise_conv2d(y, kernel, [1, 1, 1, 1], "SAME"))

    def _pool(self, x, layer):
        pool = tf.nn.max_pool if layer.options["largest"] else tf.nn.avg_pool
        return self.channels_last(x, lambda y: pool(y, [1, 2, 2, 1], [1, 1, 1, 1], "SAME"))

    def _nonlinearity(self, x, layer):
        return getattr(tf if layer.options["function"] in ("tanh", "sin") else tf.nn, layer.options["function"])(x)

    def _residual(self, x, layer):
        return x + self.through(layer.branches[0], x, "branch")

    def _concatenated(self, x, layer):
        parts = [self.through(branch, x, "branch%d_" % i) for i, branch in enumerate(layer.branches)]
        if self.rank > 2:
            return sum(self._mixed(part, variable("kernel%d" % i, [CHANNELS, CHANNELS])) for i, part in enumerate(parts))
        return self._mixed(tf.concat(parts, 1), variable("kernel", [2 * CHANNELS, CHANNELS]))

    def _embedding(self, x, layer):
        return x + self.of_ids("table")

    def of_ids(self, name):
        """Returns a vector of channels for each example, in a shape that broadcasts to the inputs."""
        return self.of_examples(tf.nn.embedding_lookup(variable(name, [WORDS, CHANNELS]), self.batch["ids"]))

    def of_examples(self, rows):
        return tf.reshape(rows, [-1] + [CHANNELS if i == self.axis else 1 for i in range(1, self.rank)])

    def _norm_of_examples(self, x, layer):
        """Moments of each example alone, which are none of the batch's."""
        axes = [i for i in range(1, self.rank) if layer.options["of"] == "layers" or self.rank == 2 or i != self.axis]
        mean, variance = tf.nn.moments(x, axes, keep_dims=True)
        scale, offset = (self.of_channels(variable(name, [CHANNELS])) for name in ("scale", "offset"))
        return tf.nn.batch_normalization(x, mean, variance, offset, scale, 0.1)

    def _gate(self, x, layer):
        features = tf.reduce_mean(x, self.axes[1:]) if self.rank > 2 else x
        return x * self.of_examples(tf.sigmoid(tf.matmul(features, variable("kernel", [CHANNELS, CHANNELS]))))

    def _mixed_by(self, x, layer):
        """A product with a kernel that is computed of variables."""
        kernel = variable("kernel", [CHANNELS, CHANNELS])
        if layer.options["kernel"] == "weight norm":
            kernel = kernel * variable("length", [CHANNELS], value=1.5) * tf.rsqrt(tf.reduce_sum(tf.square(kernel), 0))
        elif layer.options["kernel"] == "standardized":
            mean, variance = tf.nn.moments(kernel, [0], keep_dims=True)
            kernel = (kernel - mean) * tf.rsqrt(variance + 0.1)
        else:
            kernel = kernel + tf.transpose(kernel)
        return self._mixed(x, kernel)

    def _turned_channels(self, x, layer):
        parts = tf.split(x, CHANNELS, self.axis)
        return tf.concat(parts[1:] + parts[:1], self.axis)

    def _largest_channels(self, x, layer):
        def kept(y):
            return y * tf.cast(y >= tf.nn.top_k(y, 2).values[..., -1:], y.dtype)
        return self.channels_last(x, kept)

    def _attention(self, x, layer):
        queries, keys = (self._mixed(x, variable(name, [CHANNELS, CHANNELS])) for name in ("queries", "keys"))
        return x + tf.matmul(tf.nn.softmax(tf.matmul(queries, keys, transpose_b=True)), x)

    def _unstacked(self, x, layer):
        states, scale = [], variable("scale", [CHANNELS])
        for step in tf.unstack(x, axis=1):
            states.append(tf.tanh(step + scale * states[-1]) if states else step)
        return tf.stack(states, 1)

    def _resized(self, x, layer):
        def larger_and_back(y):
            large = tf.image.resize_nearest_neighbor(y, [size * 2 for size in y.shape.as_list()[1:3]])
            return tf.nn.avg_pool(tf.sin(large), [1, 3, 2, 1], [1, 2, 2, 1], "SAME")
        return self.channels_last(x, larger_and_back)

    def _reshaped(self, x, layer):
        """Lets layers see examples in another shape, in which they may lie along another axis."""
        def through(y):
            shape, inner = layer.options["shape"], copy.copy(self)
            inner.is_first_channels, inner.rank = False, 2 if shape == "rows" else 3
            inner.model = self.model._replace(inputs="vectors" if shape == "rows" else "sequences")
            inner.axis, inner.axes = inner.rank - 1, list(range(inner.rank - 1))
            inner.batch_axis = 1 if shape == "time first" else 0
            if shape == "time first":
                return tf.transpose(inner.through(layer.branches[0], tf.transpose(y, [1, 0, 2]), "in_turn"), [1, 0, 2])
            positions = [int(np.prod(y.shape.as_list()[1:-1]))] if shape == "positions" else []
            z = inner.through(layer.branches[0], tf.reshape(y, [-1] + positions + [CHANNELS]), "reshaped")
            return tf.reshape(z, [-1] + y.shape.as_list()[1:])
        return self.channels_last(x, through)

    def _unused(self, x, layer):
        variable("unused", [2])
        return x

    def _all_reduce(self, x, layer):
        return x - 0.5 * self.of_channels(self.mean_of_all(x))

    def mean_of_all(self, x):
        """Returns the means of the channels over all towers."""
        count = tf.cast(tf.size(x), x.dtype) / CHANNELS
        return towers.all_reduce(tf.reduce_sum(x, self.axes)) / towers.all_reduce(count)

    def _state(self, x, layer):
        form, inline = layer.options["form"], layer.options["inline"]
        if form == "average of weights":
            return self._by_average_of_weights(x, inline)
        shape = {"counter": [], "running mean": [CHANNELS], "power iteration": [1, CHANNELS]}[form]
        state = variable("state", shape, trainable=False, value=0.0 if form == "counter" else 0.5)
        before = state.read_value() * 1.0
        if form == "counter":
            new = before + 1.0
        elif form == "running mean":
            new = 0.8 * before + 0.2 * tf.stop_gradient(self.mean_of_all(x))
        else:
            kernel = variable("kernel", [CHANNELS, CHANNELS])
            new = tf.stop_gradient(tf.nn.l2_normalize(tf.matmul(before, tf.matmul(kernel, kernel, transpose_b=True))))
        with tf.control_dependencies([before, new]):
            update = tf.assign(state, new)
        if inline:
            with tf.control_dependencies([update]):
                now = state.read_value() * 1.0
        else:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
            now = before
        if form == "power iteration":
            return self._mixed(x, kernel / tf.norm(tf.matmul(now, kernel)))
        return x * (1 + 0.1 * now) if form == "counter" else x - 0.5 * self.of_channels(now)

    def _by_average_of_weights(self, x, inline):
        kernel, average = variable("kernel", [CHANNELS, CHANNELS]), tf.train.ExponentialMovingAverage(0.8)
        update = average.apply([kernel])
        if inline:
            with tf.control_dependencies([update]):
                mean = average.average(kernel).read_value() * 1.0
        else:
            mean = average.average(kernel).read_value() * 1.0
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        return self._mixed(x, kernel) + 0.3 * self._mixed(x, mean)

    def _while_loop(self, x, layer):
        scale = self.of_channels(variable("scale", [CHANNELS]))
        return tf.while_loop(lambda turn, _: turn < 2, lambda turn, y: (turn + 1, tf.tanh(y * scale + 0.1)), (0, x))[1]

    def _cond(self, x, layer):
        scales = [self.of_channels(variable("scale%d" % i, [CHANNELS])) for i in range(2)]
        y = tf.cond(self.batch["rate"] > 0.5, lambda: tf.tanh(x * scales[0]), lambda: x * scales[1])
        y.set_shape(x.shape)
        return y

    def _dynamic_rnn(self, x, layer):
        y = tf.nn.dynamic_rnn(Gru(), x, self.batch["lengths"], dtype=x.dtype)[0]
        return x + y

    def _sync(self, x, layer):
        by_hand = self.plain and not layer.options["renorm"]
        return self._once_or_twice(x, layer, self._plainly_normalized if by_hand else self._synced)

    def _by_hand(self, x, layer):
        by_tf_layers = layer.options["form"] == "tf.layers"
        return self._once_or_twice(x, layer, self._by_tf_layers if by_tf_layers else self._plainly_normalized)

    _local = _by_hand  # where nothing converts it

    def _refused(self, x, layer):
        return REFUSED[layer.options["why"]][0](self, x)

    def _once_or_twice(self, x, layer, normalize):
        y = normalize(x, layer.options)
        if layer.options["twice"]:
            with tf.variable_scope(tf.get_variable_scope(), reuse=True):
                y = normalize(tf.sin(y + 0.3 * x), layer.options)
        return y

    def mask_of(self, kind):
        """Returns weights of positions, or None."""
        if kind is None:
            return None
        if kind == "steps":
            return tf.cast(tf.sequence_mask(self.batch["lengths"], TIME), tf.float64)
        weights = self.batch["valid"] * (1.0 if kind == "examples" else 0.5 + tf.cast(self.batch["labels"], tf.float64))
        return tf.reshape(weights, [-1] + [1] * (self.rank - 2))

    def _synced(self, x, options):
        mask, training = self.mask_of(options["mask"]), options["training"]
        training = True if training is None and self.plain else training
        return tf_syncbn.sync_batch_norm(
            x, self.axis if options["positive_axis"] else self.axis - self.rank, options["momentum"], options["epsilon"],
            options["center"], options["scale"], name="bn", renorm=options["renorm"], fused=options["fused"],
            training=tf.placeholder_with_default(True, []) if training == "fed" else training, trainable=options["trainable"],
            mask=mask if mask is None or options["mask"] != "examples" else tf.cast(mask, tf.bool), unbiased=options["unbiased"],
            updates_collections={"collected": tf.GraphKeys.UPDATE_OPS, "inline": None, "left alone": ()}[options["updates"]],
            renorm_clipping={"rmax": 1.5, "rmin": 0.7, "dmax": 0.5} if options["renorm"] else None, renorm_momentum=0.8)

    def _by_tf_layers(self, x, options):
        y = tf.layers.batch_normalization(x, self.axis, options["momentum"], options["epsilon"], options["center"],
                                          options["scale"], training=True, name="bn", fused=False)
        return y

    def _plainly_normalized(self, x, options):
        """Batch norm as one writes it by hand."""
        trainable, form = options.get("trainable", True), options.get("form", "weighted")
        with tf.variable_scope("bn", reuse=tf.AUTO_REUSE):
            gamma = variable("gamma", [CHANNELS], trainable, 1.0) if options["scale"] else None
            beta = variable("beta", [CHANNELS], trainable, 0.0) if options["center"] else None
            moving = [variable("moving_mean", [CHANNELS], False, 0.0), variable("moving_variance", [CHANNELS], False, 1.0)]
            if options.get("training") is False:
                moments = moving
            else:
                moments, count = self._moments(x, form, options.get("mask"))
                batch = [tf.reshape(moment, [CHANNELS]) for moment in moments]
                if options.get("unbiased"):
                    batch[1] *= count / tf.maximum(count - 1, 1)
                updates = self._moved(moving, batch, options["momentum"], options.get("updates", "collected"))
            moments = [self.of_channels(moment) for moment in moments]
            gamma, beta = (v if v is None else self.of_channels(v) for v in (gamma, beta))
            if form == "conditional":
                gamma, beta = self.of_ids("gammas"), self.of_ids("betas")
            y = tf.nn.batch_normalization(x, moments[0], moments[1], beta, gamma, options["epsilon"])
            if options.get("updates") == "inline" and options["training"] is not False:
                with tf.control_dependencies(updates):
                    y = tf.identity(y)
        return y

    def _moments(self, x, form, mask):
        """Returns mean and variance, and their count where weights make one."""
        weights = None if mask is None else tf.expand_dims(self.mask_of(mask), self.axis)
        if form in ("moments", "conditional"):
            return tf.nn.moments(x, self.axes, keep_dims=True), None
        if form == "squares":
            mean = tf.reduce_mean(x, self.axes, keepdims=True)
            return (mean, tf.reduce_mean(tf.square(x), self.axes, keepdims=True) - tf.square(mean)), None
        of_each = [size for axis, size in enumerate(x.shape.as_list()) if axis not in (self.axis, self.batch_axis)]
        count = tf.cast(tf.shape(x)[self.batch_axis] * int(np.prod(of_each)), tf.float64)
        if form == "corrected":
            mean, variance = tf.nn.moments(x, self.axes, keep_dims=True)
            return (mean, variance * count / (count - 1)), None
        if form == "sums":
            mean = tf.reduce_sum(x, self.axes, keepdims=True) / count
            return (mean, tf.reduce_sum(tf.square(x - mean), self.axes, keepdims=True) / count), None
        if form == "masked":
            count = self.num_valid() * float(np.prod(INPUTS[self.model.inputs]) / CHANNELS)
            mean = tf.div_no_nan(tf.reduce_sum(x * weights, self.axes, keepdims=True), count)
            return (mean, tf.div_no_nan(tf.reduce_sum(weights * tf.square(x - mean), self.axes, keepdims=True), count)), None
        weights = tf.ones_like(x) if weights is None else weights
        mean, variance = tf.nn.weighted_moments(x, self.axes, weights, keep_dims=True)
        return (mean, variance), tf.reduce_sum(weights * tf.ones_like(x)) / CHANNELS

    def num_valid(self):
        """Returns the number of valid examples: one tensor, by which moments and a loss are divided."""
        self.total = tf.reduce_sum(self.batch["valid"]) if self.total is None else self.total
        return self.total

    def _moved(self, moving, batch, momentum, collect):
        """Returns updates of moving averages, each after an earlier one of the same variable."""
        if collect == "left alone":
            return []
        updates = []
        for average, moment in zip(moving, batch):
            with tf.control_dependencies(self.updates.get(average.op.name, [])):
                step = (average.read_value() - moment) * tf.constant(1 - momentum, tf.float64)
            with tf.control_dependencies([step]):
                updates.append(tf.assign_sub(average, step))
            self.updates[average.op.name] = updates[-1:]
            if collect == "collected":
                tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, updates[-1])
        return updates
