"""Towers that differ are named while the graph is built; what may differ by itself, or was said to, is not."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework.function import Defun

import tf_syncbn
import towers
from tests.support import build, cpus, has_tf_layers, run
from tests.sweeps import covering

X = np.random.RandomState(0).randn(6, 4, 4, 3).astype(np.float32)
LABELS = np.arange(6.0, dtype=np.float32)


def index():
    return towers.current_tower().index


def variable(name="w", shape=(3, 3), **kwargs):
    return tf.get_variable(name, shape, **kwargs)


def kernel(name="k"):
    return tf.get_variable(name, [3, 3, 3, 3])


def rows(x):
    return tf.reshape(x, [-1, 3])


def conv(x, stride=1, padding="SAME", dilation=1, name="k"):
    return tf.nn.conv2d(x, kernel(name), [1, stride, stride, 1], padding, dilations=[1, dilation, dilation, 1])


def bn(x, name="bn", **kwargs):
    return tf_syncbn.sync_batch_norm(x, name=name, **kwargs)


def mean(x):
    return tf.reduce_mean(tf.cast(x, tf.float32) ** 2)


def extra_dense(x, last):
    y = tf.tanh(tf.matmul(rows(x), variable()))
    return mean(tf.matmul(y, variable("extra")) if last else y)


def shared(name):
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        return variable(name)


def two_products(x, names):
    variables = {name: shared(name) for name in "ab"}
    return mean(tf.matmul(tf.tanh(tf.matmul(rows(x), variables[names[0]])), variables[names[1]]))


def gradients(x, order):
    y = bn(conv(x))
    made = {factor: tf.gradients(mean(y * factor), x)[0] for factor in order}
    return mean(made[1.0]) + 2 * mean(made[3.0] ** 3)


def branch(x, negative):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: mean(x), lambda: mean(tf.exp(-x) if negative else tf.exp(x)))


def loop(x, times, step=0.5):
    return mean(tf.while_loop(lambda i, _: i < times, lambda i, y: (i + 1, tf.tanh(y) * step), [0, x])[1])


def custom(x, factor):
    @tf.custom_gradient
    def scaled(y):
        return y * factor, lambda dy: dy * factor
    return mean(scaled(x))


@tf.RegisterGradient("ReversedGradient")
def _reverse(_, dy):
    return -dy


def reversed_gradient(x, wanted):
    """As domain-adversarial networks have it: an identity with a gradient of its own."""
    with tf.get_default_graph().gradient_override_map({"Identity": "ReversedGradient"} if wanted else {}):
        return mean(tf.identity(conv(x)))


def penalty(x, wanted):
    y = mean(tf.tanh(conv(x)))
    return y + mean(tf.gradients(y, x)[0]) if wanted else y


def with_update(x, decay):
    moving = tf.get_variable("moving", [], initializer=tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(moving, (moving - tf.reduce_mean(x)) * decay))
    return mean(x)


def clipped(x, rmax):
    return mean(bn(x, renorm=True, renorm_clipping={"rmax": rmax}))


def ordinary(x, epsilon=1e-3, axis=3):
    """A batch norm to convert."""
    kept = [i for i in range(4) if i != axis]
    average, variance = tf.nn.moments(x, kept, keep_dims=True)
    return mean((x - average) / tf.sqrt(variance + epsilon) * 1.5)


def fused(x, epsilon=1e-3):
    return mean(tf.nn.fused_batch_norm(x, tf.ones([3]), tf.zeros([3]), epsilon=epsilon)[0] ** 3)


# Model functions of a batch and the tower's number, and a part of what the error says.
DIFFERENT = {
    "activation": (lambda x, i: mean([tf.nn.relu, tf.nn.elu][i](conv(x))), "type Relu, and in tower 1 .* type Elu"),
    "no activation": (lambda x, i: mean(tf.nn.relu(conv(x)) if i else conv(x)), "Conv2D, .* type Relu"),
    "dense layer of tower 0 alone": (lambda x, i: extra_dense(x, i == 0), "MatMul"),
    "dense layer of a later tower alone": (lambda x, i: extra_dense(x, i == 1), "makes the variable 'extra', which tower 0"),
    "variable of tower 0 alone": (lambda x, i: mean(x) + (tf.reduce_sum(variable("extra")) if i == 0 else 0.0), "type Sum"),
    "stopped gradient": (lambda x, i: mean(bn(tf.stop_gradient(conv(x)) if i else conv(x))), "type StopGradient"),
    "trainable flag": (lambda x, i: mean(x) + mean(variable(trainable=i == 0)),
                       "variable 'w' with trainable=False, and tower 0 with trainable=True"),
    "trainable flag of tf.Variable": (lambda x, i: mean(x) + mean(tf.Variable(1.0, name="v", trainable=i == 0)), "variable 'v'"),
    "gradients in the other order": (lambda x, i: gradients(x, [(1.0, 3.0), (3.0, 1.0)][i]), "value 1.0, .* value 3.0"),
    "group_size": (lambda x, i: mean(bn(x, group_size=[None, 1][i])), "sync_batch_norm 'bn/exchange': group_size is None in"),
    "axis": (lambda x, i: mean(bn(x[..., :1] * tf.ones([4]), axis=[1, 3][i])), "axis is 1 in tower 0 and 3 in tower 1"),
    "epsilon": (lambda x, i: mean(bn(x, epsilon=[1e-3, 1e-5][i])), "epsilon is 0.001 in tower 0 and 1e-05 in tower 1"),
    "scale": (lambda x, i: mean(bn(x, scale=i == 0)), "scale is True in tower 0 and False"),
    "center": (lambda x, i: mean(bn(x, center=i == 0)), "center is True in tower 0 and False"),
    "momentum": (lambda x, i: mean(bn(x, momentum=[0.9, 0.99][i])), "momentum is 0.9 in tower 0 and 0.99"),
    "renorm": (lambda x, i: mean(bn(x, renorm=i == 0)), "renorm is True in tower 0 and False in"),
    "renorm_clipping": (lambda x, i: clipped(x, [2.0, 3.0][i]), "renorm_clipping rmax is 2.0 in tower 0 and 3.0"),
    "unbiased": (lambda x, i: mean(bn(x, unbiased=[None, False][i])), "unbiased is None in tower 0 and False"),
    "updates_collections": (lambda x, i: mean(bn(x, updates_collections=[None, ()][i])), "updates_collections is None in"),
    "training": (lambda x, i: mean(bn(x, training=[True, tf.constant(True)][i])), "training is True in tower 0 and a tensor"),
    "training of another tensor": (lambda x, i: mean(bn(x, training=tf.placeholder_with_default(i == 0, []))), "value True"),
    "mask": (lambda x, i: mean(bn(x, mask=[None, tf.ones([4, 4])][i])), "mask is False in tower 0 and True"),
    "layer in inference": (lambda x, i: mean(bn(x, training=i == 0)), "has 0 exchanges and tower 0 has 1"),
    "constant": (lambda x, i: mean(x * [0.5, 0.25][i]), "value 0.5, and in tower 1 .* has value 0.25"),
    "another reduction": (lambda x, i: mean(towers.all_reduce(x, ["sum", "mean"][i])), "all_reduce sum .* all_reduce mean"),
    "strides": (lambda x, i: mean(conv(x, [1, 2][i])), "strides list"),
    "padding": (lambda x, i: mean(conv(x, padding=["SAME", "VALID"][i])), "padding s: \"SAME\""),
    "dilation": (lambda x, i: mean(conv(x, dilation=[1, 2][i])), "dilation|SpaceToBatch"),
    "pooling": (lambda x, i: mean([tf.nn.max_pool, tf.nn.avg_pool][i](x, [1, 2, 2, 1], [1, 2, 2, 1], "SAME")), "type MaxPool"),
    "transposition": (lambda x, i: mean(tf.matmul(rows(x), variable(), transpose_b=i == 1)), "transpose_b b: "),
    "axis of a sum": (lambda x, i: mean(tf.reduce_sum(x, [1, 2][i])), r"value 1, .* value 2"),
    "another part of the batch": (lambda x, i: mean(x[:, :, :, 0]) + mean([x[:, 0, 0, 0], x[:, 1, 0, 0]][i]), r"value \[0, 0, 0"),
    "variables changed about": (lambda x, i: two_products(x, ["ab", "ba"][i]), "variable '[ab]' is read, .* variable '[ab]'"),
    "precision": (lambda x, i: mean(tf.cast(tf.cast(x, tf.float16), tf.float32) if i else x), "type Cast|tensor 0 of its batch"),
    "dropout": (lambda x, i: mean(tf.nn.dropout(x, rate=[0.2, 0.4][i])), "has value"),
    "dropout of one tower": (lambda x, i: mean(tf.nn.dropout(x, rate=0.2) if i else x), "tensor 0 of its batch"),
    "branch": (lambda x, i: branch(x, i == 1), "Exp|type Neg|branch|type Cond"),
    "loop's length": (lambda x, i: loop(x, [2, 3][i]), "cond|value 2"),
    "loop's body": (lambda x, i: loop(x, 2, [0.5, 0.25][i]), "body|value 0.5"),
    "gradient penalty of one tower": (lambda x, i: penalty(x, i == 0), "type"),
    "one layer twice or two layers": (lambda x, i: two_products(x, ["aa", "ab"][i]), "variable 'a' is read, .* variable 'b'"),
    "order of parts": (lambda x, i: mean(tf.concat([[x, x ** 3], [x ** 3, x]][i], 1) * tf.constant(
        np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1))), "tensor 0 of its batch|type Pow"),
    "gradient of one's own": (lambda x, i: custom(x, [2.0, 3.0][i]), "value 2.0"),
    "reversed gradient": (lambda x, i: reversed_gradient(x, i == 1), "type Conv2D, and in tower 1 .* type Identity"),
    "decay of an update": (lambda x, i: with_update(x, [0.1, 0.2][i]), r"value 0.1\d*, .* value 0.2"),
    "epsilon of a converted layer": (tf_syncbn.convert_model(lambda x, i: ordinary(x, [1e-3, 1e-5][i])), "value 0.001"),
    "axis of a converted layer": (
        tf_syncbn.convert_model(lambda x, i: ordinary(x[..., :1] * tf.ones([4]), axis=[2, 3][i])), "reduction_indices"),
    "a function's": (lambda x, i: mean(tf.function(lambda y: tf.exp(y) if i else tf.tanh(y))(x)), "PartitionedCall"),
    "resizing": (lambda x, i: mean(tf.image.resize_bilinear(x, [7, 7], align_corners=i == 1)), "align_corners b: "),
    "one more output": (lambda x, i: {"loss": mean(x), "y": [tf.tanh(x), tf.sin(x)][i]}, "type Tanh, .* type Sin"),
    "weight": (lambda x, i: {"loss": mean(x), "weight": tf.reduce_sum(tf.cast([x > 0, x < 0][i], tf.float32))}, "type Greater"),
}


@pytest.mark.parametrize("name", covering(sorted(DIFFERENT), one_in=4))
def test_towers_that_differ_are_refused_by_name(name):
    model_fn, words = DIFFERENT[name]
    with pytest.raises(towers.TowerMismatchError, match="(?s)" + words):
        build(lambda x: model_fn(x, index()), (X[:4],), 2)


def test_a_converted_fused_layer_of_another_epsilon_is_refused_by_name():
    model_fn = tf_syncbn.convert_model(lambda x, i: fused(x, [1e-3, 1e-4][i]))
    with pytest.raises(ValueError, match="(?s)tower_1/FusedBatchNorm.*is with 0.001"):
        build(lambda x: model_fn(x, index()), (X[:4],), 2)


@pytest.mark.parametrize("num_towers,kept_at", [(2, 0), (3, 1)])
@pytest.mark.parametrize("keep", [lambda x: x, lambda x: tf.tanh(conv(x))], ids=["batch", "features"])
def test_a_tower_that_takes_what_an_earlier_one_made_of_its_batch_is_refused_by_name(keep, num_towers, kept_at):
    kept = []

    def model_fn(x):
        kept.append(keep(x))
        return mean(kept[min(kept_at, len(kept) - 1)] * 2)

    with pytest.raises(towers.TowerMismatchError, match="Tower %d takes .*which an earlier tower made" % (kept_at + 1)):
        build(model_fn, (X,), num_towers)


def test_a_tower_may_take_what_an_earlier_one_made_of_no_batch():
    kept = []

    def model_fn(x):
        kept.append(tf.tanh(variable()) * tf.random_normal([3]))
        return mean(tf.matmul(rows(x), kept[0]))

    build(model_fn, (X,), 2)


def test_numbers_that_are_others_in_a_whole_batch_model_of_as_many_examples_are_refused_by_name():
    numbers = iter([2.0, 2.0, 3.0])  # of tower 0, of the whole batch, of tower 1

    def model_fn(x):
        return mean(conv(x) * next(numbers))

    with pytest.raises(towers.TowerMismatchError, match=r"examples differ: 'mul/y' has value 2.0, and in tower 1 value 3.0"):
        build(towers.whole_batch(model_fn), (X[:4],), 2)


def test_towers_that_read_other_parts_of_the_batch_are_refused_by_name():
    def model(x, y):
        return mean([x, y][index()])

    with pytest.raises(towers.TowerMismatchError, match="tensor 0 of its batch where tower 1 has tensor 1 of its batch"):
        build(model, (X, X), 2)


def test_the_message_names_the_op_in_both_towers_and_the_mend():
    def model(x):
        with tf.name_scope("block"):
            x = [tf.nn.relu, tf.nn.relu, tf.nn.elu][index()](conv(x), name="act")
        return mean(conv(x, name="k2"))

    with pytest.raises(towers.TowerMismatchError) as error:
        build(model, (X,), 3)
    assert str(error.value) == (
        "Towers 0 and 2 differ: in tower 0 'tower_0/block/act' is of type Relu, and in tower 2 'tower_2/block/act' of type Elu. "
        "Towers have to compute alike: does Python keep something between the calls of the model function (a counter, a list, a "
        "tensor), or go by the tower's index or by chance? What is meant to differ stands under `with towers.may_differ():`, or "
        "is built with alike=False.")


def examples_one_by_one(x):
    return tf.add_n([mean(example) for example in tf.unstack(x)]) / x.shape.as_list()[0]


def examples_joined(x):
    examples, weights = tf.split(rows(x), x.shape.as_list()[0]), variable()
    return mean(tf.tanh(tf.concat([tf.matmul(example, weights) for example in examples], 0)))


def alignments(x):
    """A loss whose loops are functions that call functions, of names that TensorFlow draws."""
    size = tf.shape(x)[0]
    return mean(tf.nn.ctc_loss_v2(tf.ones([size, 2], tf.int32), tf.reshape(conv(x), [-1, 16, 3]), tf.fill([size], 2),
                                  tf.fill([size], 16), logits_time_major=False, blank_index=0))


def added_up(x, last=tf.sin):
    """The losses of each example, added up by a loop of Python's; what tower 1 does with its last one may be another thing."""
    loss, size = 0.0, x.shape.as_list()[0]
    for i in range(size):
        loss += mean((last if index() == 1 and i + 1 == size else tf.sin)(x[i]))
    return loss / size


def chosen_by_labels(x):
    """What has as many rows as there are examples, of which TensorFlow learns beside more than one example alone."""
    labels = tf.one_hot(tf.cast(x[:, 0, 0, 0] > 0, tf.int32), 2, on_value=True, off_value=False)
    y = conv(x)
    y = y[:, 0, 0] + tf.boolean_mask(y[:, :2, 0], labels)
    return mean(tf.reshape(y, tf.concat([tf.shape(y), [1]], 0)))


def shaped_by_size(x):
    size = x.shape.as_list()[0]
    return mean(tf.reshape(x, [size, 48]) + tf.zeros([size, 48])) + size / 6.0 * mean(tf.ones([size]))


def offset(x):
    with towers.may_differ():
        start = tf.constant(float(index()))
    return mean(x + start)


def summed_up(x):
    if index() == 0:
        tf.summary.scalar("mean", tf.reduce_mean(x))
        tf.summary.histogram("values", conv(x))
    return mean(tf.matmul(rows(x), variable()))


def printed(x):
    return mean(tf.Print(x, [tf.shape(x)], "only here") if index() == 0 else x)


def scoped(x):
    with tf.name_scope("replica_%d" % index()):
        return mean(tf.tanh(x))


def asserted(x):
    checks = [tf.Assert(tf.reduce_all(x > -99), [x])] if index() == 0 else []
    with tf.control_dependencies(checks):
        return mean(tf.identity(x) if index() == 0 else x)


def updated(x):
    moving = tf.get_variable("moving", [], initializer=tf.zeros_initializer(), trainable=False)
    if index() == 0:
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(moving, tf.reduce_mean(x)))
    return mean(x)


def stepped(x):
    if index() == 0:
        tf.train.create_global_step()
    return mean(x)


def initialized(x):
    w = tf.get_variable("w", [3, 3], initializer=tf.constant_initializer(1.0 + index()))
    return mean(tf.matmul(rows(x), w))


def regularized(x):
    w = tf.get_variable("w", [3, 3], regularizer=tf.nn.l2_loss)
    return mean(tf.matmul(rows(x), w)) + tf.losses.get_regularization_loss()


def layered(x):
    y = tf.layers.dense(tf.layers.dense(rows(x), 4, kernel_regularizer=tf.nn.l2_loss), 2)
    return mean(tf.layers.batch_normalization(y, training=True)) + tf.losses.get_regularization_loss()


def placed(x):
    with tf.device("/cpu:%d" % index()), tf.colocate_with(x):
        return mean(x)


def unused(x):
    for _ in range(index()):
        tf.tanh(x)
    return mean(x)


def in_any_order(x):
    makers = [lambda: tf.tanh(x), lambda: tf.sin(x)]
    made = [None, None]
    for number in ([0, 1], [1, 0])[index() % 2]:
        made[number] = makers[number]()
    return mean(made[0] + made[1])


CACHE = {}


def cached(x):
    if index() == 0:
        CACHE["table"] = tf.exp(tf.constant([1.0, 2.0, 3.0]))
    return mean(x * CACHE["table"])


def by_numpy(x):
    return mean(tf.py_func(lambda y: y, [x], tf.float32))


def recurrent(x):
    size = 3
    cell = tf.get_variable("cell", [2 * size, size])

    def step(state, now):
        return tf.tanh(tf.matmul(tf.concat([state, now], 1), cell))
    steps = tf.transpose(tf.reshape(x, [-1, 16, 3]), [1, 0, 2])
    return mean(tf.scan(step, steps, tf.zeros_like(steps[0])))


def arrayed(x):
    return mean(tf.map_fn(lambda example: tf.tanh(example), x))


def stateless(x):
    return mean(x + tf.random.stateless_normal([3], [index(), 7]))


def partitioned(x):
    with tf.variable_scope("net", partitioner=tf.fixed_size_partitioner(3)):
        return mean(tf.matmul(rows(x), tf.convert_to_tensor(tf.get_variable("w", [3, 3]))))


def of_nan(x):
    return mean(tf.where(tf.is_nan(x), x * np.float32(np.nan), x))


def on_data(x):
    made = tf.data.Dataset.from_tensors(np.ones(3, np.float32)).map(lambda y: y * 2).repeat()
    return mean(x * tf.data.make_one_shot_iterator(made).get_next())


def twice(x):
    if index():
        return mean(x * tf.constant(2.0)) + mean(x + tf.constant(2.0))
    two = tf.constant(2.0)
    return mean(x * two) + mean(x + two)


def checked(x):
    return mean(tf.check_numerics(x, "finite?") if index() else x)


def embedded(x):
    return mean(tf.nn.embedding_lookup(tf.get_variable("table", [5, 2]), tf.cast(tf.abs(x[:, 0, 0, 0]), tf.int32) % 5))


def hashed(x):
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1], [2.0, 3.0]), 1.0)
    return mean(x * table.lookup(tf.constant([0, 1, 2])))


def stringy(x):
    name = tf.strings.length(tf.constant("mean")) + 0 * tf.shape(x)[0]
    return mean(x) * tf.cast(name, tf.float32)


def several_layers(x):
    y = bn(conv(x), "bn1")
    return mean(tf.nn.relu(bn(conv(y, name="k2"), "bn2", renorm=True)))


def frozen(x):
    return mean(bn(conv(x), training=tf.placeholder_with_default(True, [])))


def masked(x):
    return mean(bn(conv(x), mask=x[..., 0] > 0))


def gathered(x):
    return mean(towers.all_gather(conv(x))) + mean(towers.all_reduce(tf.reduce_mean(x)))


def keras(x):
    return mean(tf.keras.layers.Dense(2)(tf.keras.layers.Flatten()(x)))


ALIKE = {
    "summaries": summed_up, "printing": printed, "name scopes": scoped, "assertions": asserted, "update of tower 0": updated,
    "step of tower 0": stepped, "initializers": initialized, "regularizers": regularized, "devices": placed,
    "ops that nothing needs": unused, "the order of making": in_any_order, "what tower 0 keeps for all": cached,
    "py_func": by_numpy, "scan": recurrent, "map_fn": arrayed, "stateless seeds": stateless, "partitions": partitioned,
    "NaN": of_nan, "datasets": on_data, "constants made twice": twice, "checks": checked, "embeddings": embedded,
    "tables": hashed, "strings": stringy, "layers": several_layers, "training tensor": frozen, "mask": masked,
    "joins": gathered, "examples one by one": examples_one_by_one, "examples joined": examples_joined, "ctc": alignments,
    "rows that labels choose": chosen_by_labels, "a loop of Python's": added_up,
    "shapes by the batch's size": shaped_by_size, "said to differ": offset,
    "custom gradients": lambda x: custom(x, 2.0), "branches": lambda x: branch(x, True),
    "loops": lambda x: loop(x, 2), "gradient penalty": lambda x: penalty(x, True),
    "gradients through layers": lambda x: gradients(x, (1.0, 3.0)), "dropout": lambda x: mean(tf.nn.dropout(x, rate=0.5)),
    "seeds": lambda x: mean(x + tf.random_normal([3], seed=index())),
    "converted layers": tf_syncbn.convert_model(lambda x: ordinary(conv(x))),
    "converted fused layers": tf_syncbn.convert_model(lambda x: fused(conv(x))),
    "functions": lambda x: mean(tf.function(tf.tanh)(x)), "an identity": lambda x: mean(x if index() else tf.identity(x)),
    "variables of tower 0 that nothing needs": lambda x: mean(x) + (0 if index() else 0 * len(variable().shape)),
    "noise layers": lambda x: mean(tf.image.random_flip_left_right(x[0])), "updates": lambda x: with_update(x, 0.1),
}
KERAS2 = {"tf.layers": layered, "Keras": keras}


@pytest.mark.parametrize("name,towers_and_size", covering(sorted(ALIKE) + sorted(KERAS2), [(2, 4), (3, 5)], one_in=4))
def test_towers_that_differ_in_what_is_theirs_are_built(name, towers_and_size):
    num_towers, size = towers_and_size
    if name in KERAS2 and not has_tf_layers():
        pytest.skip("tf.keras is Keras 3 here")
    build(dict(ALIKE, **KERAS2)[name], (X[:size],), num_towers)


@pytest.mark.parametrize("batch", ["split", "given", "made", "placeholders", "from outside"])
def test_batches_of_every_kind_are_no_difference(batch):
    outside = [tf.placeholder(tf.float32, [None, 3]) for _ in range(2)]
    batches = {
        "split": (X, LABELS), "given": towers.PerTower([(X[:2], LABELS[:2]), (X[2:], LABELS[2:])]),
        "made": lambda tower: (tf.constant(X[:2] * tower.index), tf.constant(LABELS[:2] + tower.index)),
        "placeholders": towers.PerTower([(tf.placeholder(tf.float32, X.shape), tf.placeholder(tf.float32, [6]))] * 2),
        "from outside": (X, LABELS)}

    def model(x, labels):
        loss = tf.reduce_mean((tf.matmul(rows(x), variable("w", (3, 1)))[:, 0] - tf.reduce_mean(labels)) ** 2)
        return loss + (mean(outside[index()]) if batch == "from outside" else 0.0)

    build(model, batches[batch], 2)


@pytest.mark.parametrize("sizes", [[2, 2], [3, 2], [2, 3]])
def test_one_of_the_terms_of_a_loop_of_pythons_may_not_be_another(sizes):
    batch = towers.PerTower([(X[:size],) for size in sizes])
    build(added_up, batch, 2)
    with pytest.raises(towers.TowerMismatchError, match="Sin, and in tower 1 .* of type Cos"):
        build(lambda x: added_up(x, tf.cos), batch, 2)


def test_what_towers_read_from_outside_of_a_loop_around_them_is_compared():
    def model(x):
        with tf.variable_scope("", reuse=True):
            variables = [tf.get_variable(name, use_resource=True) for name in "ab"]
        return mean(x) * variables[towers.current_tower().index]

    def body(i, total):
        return i + 1, total + build(model, (tf.constant(X),), 2).loss

    for name in "ab":
        tf.get_variable(name, [], use_resource=True)
    with pytest.raises(towers.TowerMismatchError, match="the variable 'a' is read, and in tower 1 the variable 'b'"):
        tf.while_loop(lambda i, _: i < 2, body, [0, 0.0])


def test_batches_that_a_loop_around_the_towers_takes_in_are_no_difference():
    x = tf.placeholder(tf.float32, X.shape)

    def body(i, total):
        return i + 1, total + build(mean, towers.PerTower([x, x + 1.0]), 2).loss

    total = tf.while_loop(lambda i, _: i < 2, body, [0, 0.0])[1]
    assert run(total, {x: X}) == pytest.approx((X ** 2).mean() + ((X + 1) ** 2).mean(), rel=1e-4)


@pytest.mark.parametrize("dtype", covering([tf.float32, tf.float16, tf.bfloat16], one_in=4))
def test_kernels_that_follow_the_size_of_a_batch_are_no_difference(dtype):
    def model(x):  # a penalty on gradients that the model function takes itself
        x = tf.cast(x * tf.get_variable("w", [64]), dtype)
        slopes, = tf.gradients(tf.reduce_sum(tf.sin(tf_syncbn.sync_batch_norm(x, training=True))), x)
        return tf.reduce_mean(tf.cast(slopes, tf.float32) ** 2)

    build(model, towers.PerTower([tf.zeros([size, 8, 8, 64]) for size in (1, 300)]), 2)


@pytest.mark.parametrize("make,sizes", covering(
    [tf.zeros_like, tf.ones_like, lambda x: tf.zeros(x.shape), lambda x: tf.ones(x.shape, tf.int32)],
    [(5, 500), (500, 5)], one_in=4))
def test_constants_that_are_filled_from_a_thousand_entries_on_are_no_difference(make, sizes):
    batch = towers.PerTower([np.ones([size, 4], np.float32) for size in sizes])
    build(lambda x: mean(x + tf.cast(make(x), tf.float32)), batch, 2)

    for value in (3.0, np.arange(20)):
        def model(x):
            small = tf.constant(value, tf.float32, [5, 4])
            return mean(x + (small if index() == sizes.index(5) else tf.cast(make(x), tf.float32)))
        with tf.Graph().as_default(), pytest.raises(towers.TowerMismatchError, match="Const"):
            build(model, towers.PerTower([np.ones([size, 4], np.float32) for size in sizes]), 2)


@pytest.mark.parametrize("combine,sizes", covering(
    [lambda x, y: x - y, lambda x, y: y * x, lambda x, y: x / y], [[5, 1], [1, 5]], one_in=4))
def test_gradients_of_what_is_broadcast_to_one_example_are_no_difference(combine, sizes):
    def model(x):
        x = x * tf.get_variable("w", [3], x.dtype, tf.ones_initializer())
        of_all = towers.all_reduce(tf.reduce_sum(x, 0, keepdims=True)) / 6 + 2
        y = tf.sin(combine(x, of_all))
        return mean(y) + mean(tf.gradients(tf.reduce_sum(y), x)[0])

    build(model, towers.PerTower([tf.placeholder(tf.float64, [size, 3]) for size in sizes]), 2)


@pytest.mark.parametrize("sizes", [[5, 1], [1, 5], [1, 1]])
def test_products_that_need_no_shape_of_one_example_are_no_difference(sizes):
    def model(x):
        return mean(tf.square(tf.tensordot(tf.transpose(x, [1, 0, 2]), variable(shape=[3], dtype=x.dtype), 1)))

    build(model, towers.PerTower([tf.placeholder(tf.float32, [size, 4, 3]) for size in sizes]), 2)


def test_parts_of_each_example_that_are_joined_are_no_difference():
    def model(x):
        return mean(tf.concat([tf.sin(row)[None] for row in tf.unstack(x)], 0) * variable(shape=[3]))

    build(model, towers.PerTower([tf.placeholder(tf.float32, [size, 3]) for size in (3, 2)]), 2)


@pytest.mark.parametrize("body,is_refused", [(lambda x: tf.sin(x), False), (lambda x: [tf.sin, tf.cos][index()](x), True)])
def test_functions_that_each_tower_makes_are_compared_by_what_they_compute(body, is_refused):
    def model(x):
        return mean(Defun(tf.float32, func_name="made_by_%d" % index())(body)(tf.matmul(x, variable())))

    if is_refused:
        with pytest.raises(towers.TowerMismatchError, match="of type made_by_0, and in tower 1 .* of type made_by_1"):
            build(model, (rows(X),), 2)
    else:
        build(model, (rows(X),), 2)


def test_gradients_that_are_added_up_in_another_order_are_no_difference():
    def model(x):
        x = x * tf.get_variable("w", [3], x.dtype, tf.ones_initializer())
        means = towers.all_reduce(tf.reduce_sum(x, 0)) / 7
        y = bn(x)
        y = bn(tf.sin(y + 0.3 * x), name="bn2", renorm=True)
        y = tf.concat([x - means, y], 1)
        return mean(tf.gradients(tf.reduce_sum(tf.sin(y)), x)[0])

    build(model, towers.PerTower([tf.placeholder(tf.float64, [None, 3]) for _ in range(3)]), 3)


def test_what_is_added_up_another_number_of_times_is_a_difference():
    def model(x):
        y, z = tf.sin(x, name="y"), tf.cos(x, name="z")
        return mean(tf.add_n([y, y, z] if index() == 0 else [y, z, z]))

    with pytest.raises(towers.TowerMismatchError, match="of type (Sin|Cos)"):
        build(model, (X,), 2)


def test_sparse_batches_are_no_difference():
    parts = [tf.SparseTensor([[0, i]], [1.0 + i], [2, 3]) for i in range(2)]
    build(lambda x: {"loss": mean(tf.sparse.to_dense(x)), "weight": 1.0}, towers.PerTower(parts), 2)


def test_what_was_made_of_what_may_differ_is_compared():
    def model(x):
        with towers.may_differ():
            start = tf.constant(float(index()))
        return mean([tf.tanh, tf.sin][index()](x + start))

    with pytest.raises(towers.TowerMismatchError, match="type Tanh"):
        build(model, (X,), 2)


def test_towers_that_are_not_to_be_alike_are_not_compared():
    replicas = build(lambda x: mean([tf.tanh, tf.sin][index()](x)), (X,), 2, alike=False)
    expected = (np.tanh(X[:3]) ** 2).mean() / 2 + (np.sin(X[3:]) ** 2).mean() / 2
    assert run(replicas.loss) == pytest.approx(expected, rel=1e-5)


def test_ops_outside_of_towers_may_differ_for_nobody():
    with towers.may_differ():
        assert run(tf.constant(3.0)) == 3.0


def test_two_builds_are_compared_each_by_itself():
    for activation in (tf.tanh, tf.sin):
        with tf.variable_scope("net", reuse=tf.AUTO_REUSE):
            towers.TowerBuilder(cpus(2)).build(lambda x: mean(activation(conv(x))), (X,))


@pytest.mark.parametrize("combiner,resource", covering(["sum", "mean", "sqrtn"], [False, True], one_in=4))
def test_rows_that_are_looked_up_once_or_each_time_are_alike(combiner, resource):
    """TensorFlow 2.21 looks them up otherwise in the tower on whose device the table stands."""
    tags = tf.SparseTensor([[0, 0], [0, 1], [1, 0], [2, 0], [3, 0], [3, 1]], np.array([1, 2, 3, 1, 2, 2]), [4, 2])

    def model(tags, differs=False):
        table = tf.get_variable("table", [5, 3], tf.float64, tf.ones_initializer(), use_resource=resource)
        if differs and not towers.current_tower().is_first:
            tags = tf.SparseTensor(tags.indices, tags.values + 1, tags.dense_shape)
        return tf.reduce_mean(tf.square(tf.nn.embedding_lookup_sparse([table], tags, None, combiner=combiner)))

    builder = towers.TowerBuilder(cpus(2), variable_placement="first")
    builder.build(model, (tags,))
    with tf.variable_scope("", reuse=True), pytest.raises(towers.TowerMismatchError):
        builder.build(lambda tags: model(tags, True), (tags,))
