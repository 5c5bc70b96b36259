"""Devices: found, given, refused; and the session that makes them exist."""
import subprocess
import sys
from unittest import mock

import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, cpus, own_process, run


@pytest.mark.parametrize("devices,error,message", [
    ([], ValueError, "devices is empty"),
    ("/gpu:0", TypeError, "list of device names"),
    (3, TypeError, "list of device names"),
    ([0, 1], TypeError, "named by a string"),
    (["gpu zero"], ValueError, "no device"),
    (["/job:worker"], ValueError, "names no device"),
    (["cpu:0"], ValueError, "'cpu:0' names no device; '/gpu:0' and '/cpu:0' do"),
    (["/cpu:0", "/cpu:-1"], ValueError, "'/cpu:-1' is no device name: '-1' is no number of a device or task"),
    (["/device:CPU:01"], ValueError, "'/device:CPU:01' is no device name: '01' is no number"),
    (["/gpu:1_0"], ValueError, "'1_0' is no number"),
    (["/cpu:0 "], ValueError, "'0 ' is no number"),
    (["/job:worker/task:-1/cpu:0"], ValueError, "'-1' is no number"),
    (["/cpu:x"], ValueError, "'/cpu:x' is no device name; '/gpu:0' and '/cpu:0' are"),
    (["/xyz:0"], ValueError, "'/xyz:0' is no device name"),
    (["/device:XYZ:0"], ValueError, "'/device:XYZ:0' is no device: TensorFlow knows no kind 'XYZ' here"),
])
def test_bad_devices_are_refused(devices, error, message):
    with pytest.raises(error, match=message):
        towers.TowerBuilder(devices)


def test_bad_aggregation_device_and_placement_are_refused():
    with pytest.raises(ValueError, match="names no device"):
        towers.TowerBuilder(["/cpu:0"], aggregation_device="/job:worker")
    with pytest.raises(ValueError, match="'balanced' or a function of a variable's op, not 'somewhere'"):
        towers.TowerBuilder(["/cpu:0"], variable_placement="somewhere")


def test_aggregation_device_is_the_first_towers_unless_given():
    assert towers.TowerBuilder(["/cpu:1", "/cpu:2"]).aggregation_device == "/cpu:1"
    assert towers.TowerBuilder(["/cpu:1"], aggregation_device="/cpu:0").aggregation_device == "/cpu:0"


@pytest.mark.parametrize("device", ["/cpu:0", "/CPU:1", "/device:CPU:12", "/cpu", "/cpu:*", "/device:TPU:0",
                                    "/job:worker/replica:0/task:10/device:GPU:3", "/job:worker/device:XYZ:0", "/job:a-1/cpu:0"])
def test_device_names_of_tensorflow_are_taken(device, recwarn):
    assert towers.TowerBuilder([device]).devices == [device] and not recwarn


@pytest.fixture
def gpus(monkeypatch):
    """A function that makes TensorFlow say that the machine has so many GPUs."""
    def have(count, virtual=None):
        monkeypatch.setattr(tf.config.experimental, "list_physical_devices", lambda kind=None: list(range(count)))
        monkeypatch.setattr(tf.config.experimental, "get_virtual_device_configuration", lambda gpu: virtual)
    return have


def test_without_gpus_there_is_one_tower_on_the_cpu_and_that_is_said(gpus):
    gpus(0)
    with pytest.warns(UserWarning, match=r"sees no GPU, so towers stand on the CPU.*say devices=\[\"/cpu:0\"\]") as warned:
        assert towers.TowerBuilder().devices == towers.find_devices() == ["/cpu:0"]
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("devices,count,words", [
    (["/gpu:0", "/gpu:1"], 0, "given '/gpu:0', '/gpu:1', and TensorFlow sees no GPU on this machine.*run on the CPU"),
    (["/gpu:0", "/device:GPU:5"], 1, "given '/device:GPU:5', and TensorFlow sees 1 GPU on"),
    (["/cpu:0", "/GPU"], 0, "given '/GPU', .*/job:worker/task:0/gpu:0"),
    (["/gpu:0", "/gpu:2"], 2, "given '/gpu:2', and TensorFlow sees 2 GPUs"),
])
def test_gpus_that_the_machine_lacks_are_named(gpus, devices, count, words):
    gpus(count)
    with pytest.warns(UserWarning, match=words) as warned:
        towers.TowerBuilder(devices)
    assert [warning.filename for warning in warned] == [__file__]
    with pytest.warns(UserWarning, match="given '%s', and" % devices[-1]):
        towers.TowerBuilder(["/cpu:0"], aggregation_device=devices[-1])


@pytest.mark.parametrize("devices", [
    None, ["/gpu:0", "/gpu:1"], ["/gpu"], ["/cpu:7"], ["/job:worker/task:1/gpu:7"], ["/job:worker/gpu:7", "/task:1/gpu:7"]])
def test_devices_that_exist_and_other_machines_are_taken_without_a_word(gpus, devices, recwarn):
    gpus(2)
    towers.TowerBuilder(devices)
    assert not recwarn


def test_gpu_that_is_divided_counts_as_many(gpus, recwarn):
    gpus(1, virtual=["half", "half"])
    towers.TowerBuilder(["/gpu:0", "/gpu:1"])
    assert not recwarn


@pytest.mark.parametrize("devices,cured", [
    (["/cpu:0"], ["cpu_0"]), (["/cpu:0", "/cpu:1", "/cpu:0", "/cpu:2"], ["cpu_2"]),
    (["/job:worker/task:1/gpu:0", "/cpu"], ["cpu_0"]),
    (["/gpu:1", "/gpu:0", "/cpu:3"], ["cpu_3", "gpu_1"]), (["/gpu"], ["gpu_0"])])
@pytest.mark.filterwarnings("ignore:TowerBuilder was given")
def test_builds_add_one_op_a_kind_of_device_that_names_the_cure(devices, cured):
    builder = towers.TowerBuilder(devices, aggregation_device=devices[0])
    for _ in range(2):
        builder.build(tf.reduce_mean, (tf.ones([8, 3]),))
    names = [op.name for op in tf.get_default_graph().get_operations() if op.type == "NoOp"]
    assert names == ["make_the_Session_by_towers.session_config/" + name for name in cured]


@own_process
@pytest.mark.laws
def test_session_without_the_towers_devices_fails_by_the_name_of_the_cure():
    program = """
import tensorflow.compat.v1 as tf, towers
tf.disable_eager_execution()
x = tf.placeholder_with_default(tf.ones([4, 3]), [None, 3])
builder = towers.TowerBuilder(["/cpu:1", "/cpu:0", "/cpu:2"], variable_placement="first")
replicas = builder.build(lambda x: tf.reduce_mean(x * tf.get_variable("w", [3])), (x,))
train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
for fetch in (tf.global_variables_initializer(), x, replicas.loss, train_op):
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
        try:
            session.run(fetch)
        except tf.errors.InvalidArgumentError as error:
            assert "for operation make_the_Session_by_towers.session_config/cpu_2: " in str(error), error
        else:
            raise AssertionError(fetch)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("surroundings", ["device", "loop"])
def test_op_that_names_the_cure_stands_alone_wherever_towers_are_built(surroundings):
    graph = tf.get_default_graph()

    def body(i):
        return i + tf.reduce_mean(build(tf.reduce_mean, (tf.ones([4, 3]),)).loss)

    if surroundings == "loop":
        total = tf.while_loop(lambda i: i < 3, body, [0.0])
    else:
        with tf.device("/cpu:0"), tf.name_scope("outer"), tf.control_dependencies([tf.constant(0)]):
            total = body(2.0)
    found = [op for op in graph.get_operations() if "session_config" in op.name]
    assert all(op.name.startswith("make_the_Session") and not op.control_inputs for op in found)
    assert run(total) == 3


def test_a_builders_sessions_have_its_devices_and_those_of_its_worker():
    base = tf.ConfigProto(inter_op_parallelism_threads=3)
    assert towers.TowerBuilder(cpus(3)).session_config(base) == towers.session_config(cpus(3), base)
    workers = mock.Mock(size=2, session_config=lambda config: (config, "of the worker"))
    found, words = towers.TowerBuilder(cpus(2), workers=workers).session_config()
    assert found == towers.session_config(cpus(2)) and words == "of the worker"


def test_session_config_makes_the_cpu_devices_exist_and_keeps_what_it_was_given():
    base = tf.ConfigProto(intra_op_parallelism_threads=1)
    config = towers.session_config(cpus(3), base)
    assert config.device_count["CPU"] == 3 and config.allow_soft_placement and config.intra_op_parallelism_threads == 1
    assert base.device_count == {}
    assert towers.session_config(["/gpu:0", "/gpu:7"]).device_count["CPU"] == 1


@own_process
@pytest.mark.laws
def test_looking_for_devices_starts_no_runtime_and_cpu_devices_exist_in_the_first_session():
    # Once a runtime has started, which takes the GPUs' memory, visible devices can't be set any more; the first session of a
    # process fixes its CPU devices.
    program = ("import tensorflow.compat.v1 as tf, towers; tf.disable_eager_execution(); towers.TowerBuilder(); "
               "towers.session_config(); tf.config.experimental.set_visible_devices([], 'GPU'); "
               "s = tf.Session(config=towers.session_config(['/cpu:0', '/cpu:4'])); "
               "print(len([d for d in s.list_devices() if d.device_type == 'CPU']))")
    out = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert out.stdout.split()[-1] == b"5"
