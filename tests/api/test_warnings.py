"""What the library makes Python or TensorFlow warn of: nothing, in a process that shows every warning."""
import ast
import warnings
from pathlib import Path

import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.processes import ROOT, run_forks
from tests.support import build, own_process

# TensorFlow warns when it is imported, and of its own code later: it is imported before warnings are noted, and those count that
# stand by one of our files, or are logged of one. What is deprecated TensorFlow logs by the file that calls it.
PROGRAM = """
import logging, os, sys, warnings
from pathlib import Path
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
ours = (os.path.join(os.getcwd(), "towers") + os.sep, os.path.join(os.getcwd(), "tf_syncbn") + os.sep, __file__)
logged = []

class Noted(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())

tf.get_logger().addHandler(Noted())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    %s
    warnings.warn("the end is reached")
with open(sys.argv[1], "w") as found:
    for warning in caught:
        if warning.filename.startswith(ours):
            print("%%s: %%s" %% (os.path.basename(warning.filename), warning.message), file=found)
    for line in logged:
        if any(folder in line for folder in ours):
            print(line, file=found)
"""

IMPORT = """
    for folder in ours[:2]:
        for path in Path(folder).rglob("*.py"):
            compile(path.read_bytes(), str(path), "exec")  # of what was compiled before nothing would be said
    import tf_syncbn, tf_syncbn.checkpoints, towers, towers.launch, towers.testing, towers.workers
"""

BUILD = """
    import tf_syncbn, towers
    def model_fn(images, labels):
        x = tf.nn.conv2d(images, tf.get_variable("kernel", [3, 3, 3, 4]), [1, 1, 1, 1], "SAME")
        x = tf.nn.relu(tf_syncbn.sync_batch_norm(x))
        x = tf_syncbn.slim.batch_norm(x, scale=True, activation_fn=tf.nn.relu)
        logits = tf.matmul(tf.reduce_mean(x, [1, 2]), tf.get_variable("weights", [4, 5]))
        return {"loss": towers.softmax_cross_entropy(logits, labels), "correct": tf.equal(tf.argmax(logits, 1), labels)}
    def plain(images):
        mean, variance = tf.nn.moments(images, [0, 1, 2])
        return tf.reduce_mean(tf.nn.batch_normalization(images, mean, variance, None, tf.get_variable("s", [3]), 1e-3) ** 3)
    images, labels = np.random.rand(7, 6, 6, 3).astype(np.float32), np.arange(7, dtype=np.int64) % 5
    builder = towers.TowerBuilder(["/cpu:0", "/cpu:1"])
    replicas = builder.build(model_fn, (images, labels))
    step = tf.train.get_or_create_global_step()
    transforms = [towers.accumulate(1), towers.clip_by_global_norm(5.0), towers.check_finite()]
    train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9), update_ops="all", transforms=transforms,
                               global_step=step)
    converted = builder.build(tf_syncbn.convert_model(plain), (images,))
    steps = towers.repeat(lambda: (converted.loss, towers.minimize(converted, tf.train.AdamOptimizer())), 2)
    fetches = [replicas.merged(), replicas.loss, train_op, steps]
    with tf.Session(config=towers.session_config(builder.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(fetches)
        tf_syncbn.recalibrate(session, replicas, 2)
"""


@own_process
@pytest.mark.laws
def test_importing_and_training_a_synced_model_warns_of_nothing(tmp_path):
    programs = []
    for name, program in (("import", IMPORT), ("build", BUILD)):
        (tmp_path / (name + ".py")).write_text(PROGRAM % program.strip())
        programs.append(("import runpy, sys; runpy.run_path(sys.argv[2], run_name='__main__')", {},
                         [tmp_path / name, tmp_path / (name + ".py")]))
    for status, output in run_forks("import tensorflow.compat.v1", programs):
        assert status == 0, output
    for name in ("import", "build"):
        assert (tmp_path / name).read_text() == "%s.py: the end is reached\n" % name


def test_all_that_is_warned_of_is_of_a_category_of_its_own():
    calls = [call for folder in ("towers", "tf_syncbn") for path in Path(ROOT, folder).rglob("*.py")
             for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "warn"
             and getattr(call.func.value, "id", None) == "warnings"]
    assert len(calls) > 10 and {getattr(call.args[1], "id", None) for call in calls} == {"TowersWarning"}


def test_that_category_may_be_made_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", towers.TowersWarning)
        with pytest.raises(towers.TowersWarning, match="is a sum over the tower's own examples"):
            build(lambda x: tf.reduce_sum(x * tf.get_variable("w", [3])), tf.ones([4, 3]))
