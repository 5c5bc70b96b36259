"""Devices: found, given, refused; and the session that makes them exist."""
import subprocess
import sys

import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import cpus


@pytest.mark.parametrize("devices,error,message", [
    ([], ValueError, "devices is empty"),
    ("/gpu:0", TypeError, "list of device names"),
    (3, TypeError, "list of device names"),
    ([0, 1], TypeError, "named by a string"),
    (["gpu zero"], ValueError, "no device"),
    (["/job:worker"], ValueError, "names no device"),
    (["cpu:0"], ValueError, "'cpu:0' names no device; '/gpu:0' and '/cpu:0' do"),
])
def test_bad_devices_are_refused(devices, error, message):
    with pytest.raises(error, match=message):
        towers.TowerBuilder(devices)


def test_bad_aggregation_device_and_placement_are_refused():
    with pytest.raises(ValueError, match="names no device"):
        towers.TowerBuilder(["/cpu:0"], aggregation_device="/job:worker")
    with pytest.raises(ValueError, match="'host' or 'first', not 'somewhere'"):
        towers.TowerBuilder(["/cpu:0"], variable_placement="somewhere")


def test_aggregation_device_is_the_first_towers_unless_given():
    assert towers.TowerBuilder(["/cpu:1", "/cpu:2"]).aggregation_device == "/cpu:1"
    assert towers.TowerBuilder(["/cpu:1"], aggregation_device="/cpu:0").aggregation_device == "/cpu:0"


def test_without_gpus_there_is_one_tower_on_the_cpu():
    if tf.config.experimental.list_physical_devices("GPU"):
        pytest.skip("this machine has GPUs")
    assert towers.TowerBuilder().devices == ["/cpu:0"]


def test_session_config_makes_the_cpu_devices_exist_and_keeps_what_it_was_given():
    base = tf.ConfigProto(intra_op_parallelism_threads=1)
    config = towers.session_config(cpus(3), base)
    assert config.device_count["CPU"] == 3 and config.allow_soft_placement and config.intra_op_parallelism_threads == 1
    assert base.device_count == {}
    assert towers.session_config(["/gpu:0", "/gpu:7"]).device_count["CPU"] == 1


def test_looking_for_devices_starts_no_runtime():
    # Once a runtime has started, which takes the GPUs' memory, visible devices can't be set any more.
    program = ("import tensorflow.compat.v1 as tf, towers; tf.disable_eager_execution(); towers.TowerBuilder(); "
               "towers.session_config(); tf.config.experimental.set_visible_devices([], 'GPU')")
    subprocess.run([sys.executable, "-c", program], check=True)


def test_cpu_devices_exist_in_a_fresh_process():
    # The first session of a process fixes its CPU devices, so this one is a process of its own.
    program = ("import tensorflow.compat.v1 as tf, towers; tf.disable_eager_execution(); "
               "s = tf.Session(config=towers.session_config(['/cpu:0', '/cpu:4'])); "
               "print(len([d for d in s.list_devices() if d.device_type == 'CPU']))")
    out = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert out.stdout.split()[-1] == b"5"
