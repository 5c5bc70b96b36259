"""On which devices towers, their variables and their meeting point stand.

Devices are found without starting a runtime that takes the GPUs' memory, and nothing here makes a Session.
"""
import re
import warnings
from typing import List, Optional, Sequence

import tensorflow.compat.v1 as tf

from towers.api.annotations import ConfigProto
from towers.api.arguments import CONFIG, LIST, check, optional
from towers.api.wording import TowersWarning

__all__ = ["find_devices", "session_config"]

# TensorFlow's own kinds; those of plug-ins are known where they are installed.
_KINDS = frozenset(["CPU", "GPU", "TPU", "TPU_SYSTEM", "XLA_CPU", "XLA_GPU"])
_NUMBER = re.compile(r"\*|0|[1-9][0-9]*")
HOST = "/cpu:0"


def find_devices() -> List[str]:
    """Returns the devices that towers stand on by default: every local GPU, else the one CPU.

    Returns:
      A list of str, of each local GPU or of the CPU.

    Example:

        towers.find_devices()       # ['/gpu:0', '/gpu:1'], or ['/cpu:0'] where there is no GPU
    """
    # device_lib.list_local_devices() would start a runtime that takes all memory of every GPU.
    gpus = tf.config.experimental.list_physical_devices("GPU")
    return ["/gpu:%d" % i for i in range(len(gpus))] or [HOST]


def check_devices(devices):
    """Returns `devices` as a list of str.

    Raises:
      TypeError: if it is not a list or tuple of strings.
      ValueError: if it is empty or holds what is no device name.
    """
    if not LIST.holds(devices):
        raise TypeError("devices has to be a list of device names, one for each tower, not %r." % (devices,))
    devices = list(devices)
    if not devices:
        raise ValueError("devices is empty: name one device for each tower, or leave it None for all local GPUs.")
    for device in devices:
        check_device(device)
    return devices


def in_turn(devices, num_towers):
    """Returns the device of each tower, where they are put on the devices in turn.

    Args:
      devices: list of str.
      num_towers: int; None is one tower a device.

    Raises:
      TypeError, ValueError: if `num_towers` is no integer, or less than there are devices.
    """
    if num_towers is None:
        return devices
    if isinstance(num_towers, bool) or not hasattr(num_towers, "__index__"):
        raise TypeError("num_towers has to be an integer, not %r." % (num_towers,))
    if num_towers < len(devices):
        raise ValueError("%d towers leave some of the %d devices without one: name as many devices as are to be used."
                         % (num_towers, len(devices)))
    return [devices[i % len(devices)] for i in range(num_towers)]


def check_device(device):
    """Returns `device`, a device name; raises TypeError or ValueError where it is none."""
    if not isinstance(device, str):
        raise TypeError("A device is named by a string such as '/gpu:0', not %r." % (device,))
    try:
        parsed = tf.DeviceSpec.from_string(device)
    except ValueError as error:
        raise ValueError("%r is no device name; '/gpu:0' and '/cpu:0' are." % device) from error
    if not parsed.device_type or not device.startswith("/"):
        raise ValueError("%r names no device; '/gpu:0' and '/cpu:0' do." % device)
    # TensorFlow takes -1 and 01 for numbers, and fails when it places the op.
    for part in device[1:].split("/"):
        kind, *fields = part.split(":")
        if fields and kind != "job" and not _NUMBER.fullmatch(fields[-1]):
            raise ValueError("%r is no device name: %r is no number of a device or task, which count from 0."
                             % (device, fields[-1]))
    if parsed.job is None and parsed.device_type not in _KINDS:
        there = {found.device_type for found in tf.config.experimental.list_physical_devices()}
        if parsed.device_type not in there:
            raise ValueError("%r is no device: TensorFlow knows no kind %r here; '/gpu:0' and '/cpu:0' are devices."
                             % (device, parsed.device_type))
    return device


def on_machine_of(device):
    """Returns a device function that puts ops of no job or task on a device's machine.

    One session may run towers on several servers. What is said to stand on "/cpu:0" there, variables and what is made for a
    tower by the host, would else stand on whichever machine TensorFlow takes first.

    Args:
      device: str, of a tower.
    """
    machine = tf.DeviceSpec.from_string(device)
    machine = tf.DeviceSpec(job=machine.job, replica=machine.replica, task=machine.task)

    def place(op):
        named = tf.DeviceSpec.from_string(op.device or "")
        if named.job is not None or named.task is not None or not machine.to_string():
            return op.device or ""
        return tf.DeviceSpec(machine.job, machine.replica, machine.task, named.device_type, named.device_index).to_string()
    return place


def warn_of_absent_devices(given, devices):
    """Warns where towers will not stand on the GPUs that were meant: TensorFlow itself moves them to the CPU in silence.

    Args:
      given: what `TowerBuilder` was given as its devices, or None.
      devices: list of str, where towers stand and meet. What names a job or task is another machine's, and not looked for.

    Warns:
      TowersWarning: if `given` is None and there is no GPU, or if `devices` names GPUs that this machine lacks.
    """
    if given is None and devices[0] == HOST:
        warnings.warn("TowerBuilder was given no devices and TensorFlow sees no GPU, so towers stand on the CPU. If that "
                      "is meant, say devices=[\"/cpu:0\"]; else see that this TensorFlow is built for GPUs and that "
                      "CUDA_VISIBLE_DEVICES shows them.", TowersWarning, stacklevel=3)
    specs = {device: tf.DeviceSpec.from_string(device) for device in devices}
    gpus = {device: spec.device_index or 0 for device, spec in specs.items()
            if spec.device_type == "GPU" and spec.job is None and spec.task is None}
    if not gpus:
        return
    found = tf.config.experimental.list_physical_devices("GPU")
    there = len(found)
    if max(gpus.values()) >= there:  # TensorFlow may have been told to divide them, and counts the parts
        there = sum(len(tf.config.experimental.get_virtual_device_configuration(gpu) or [gpu]) for gpu in found)
    absent = sorted(device for device, index in gpus.items() if index >= there)
    if absent:
        warnings.warn("TowerBuilder was given %s, and TensorFlow sees %s on this machine: what stands there will run on the "
                      "CPU. Name devices that exist, [\"/cpu:0\", \"/cpu:1\"] say; or see that this TensorFlow is built for "
                      "GPUs and that CUDA_VISIBLE_DEVICES shows them. A graph for another machine may say so, as in "
                      "\"/job:worker/task:0/gpu:0\", or be built with this warning ignored."
                      % (", ".join(map(repr, absent)), "%d GPU%s" % (there, "" if there == 1 else "s") if there else "no GPU"),
                      TowersWarning, stacklevel=3)


def name_the_cure(devices):
    """Adds ops that do nothing, which TensorFlow's own error names where a Session lacks the devices of towers.

    A Session places all ops of the graph, in their order, when it runs for the first time, and names the first that stands
    on a device which it lacks. So this comes before any op of a tower. Nothing waits for these ops and none ever runs. There is
    one where none is needed too: TensorFlow 1.15 draws by the number of ops before, which is not to follow the devices.

    Args:
      devices: list of str, the towers' devices.
    """
    graph, last = tf.get_default_graph(), {}
    for spec in sorted(map(tf.DeviceSpec.from_string, devices), key=lambda spec: spec.device_index or 0):
        if spec.job is None and spec.task is None and (spec.device_type, spec.device_index or 0) != ("CPU", 0):
            last[spec.device_type] = spec  # a Session that has the one of the highest number has them all
    last = last or {"CPU": tf.DeviceSpec.from_string(HOST)}
    for kind, spec in sorted(last.items()):
        name = "make_the_Session_by_towers.session_config/%s_%d" % (kind.lower(), spec.device_index or 0)
        try:
            graph.get_operation_by_name(name)
        except KeyError:
            with tf.name_scope(None), tf.control_dependencies(None), tf.device(spec.to_string()):
                tf.no_op(name)


def session_config(devices: Optional[Sequence[str]] = None, config: Optional[ConfigProto] = None) -> ConfigProto:
    """Returns a `ConfigProto` under which the towers' devices exist.

    With devices "/cpu:0" to "/cpu:3" a Session has four CPU devices, which share the machine's cores. Ops that a tower's
    device has no kernel for fall back to the CPU (`allow_soft_placement`).

    Args:
      devices: list of str, `TowerBuilder.devices`. None stands for what `find_devices` finds.
      config: optional `tf.ConfigProto` to start from; it is copied, not changed.

    Returns:
      A `tf.ConfigProto`.

    Raises:
      TypeError, ValueError: for devices that are no list of device names.
    """
    check(optional(CONFIG), config=config)
    devices = find_devices() if devices is None else check_devices(devices)
    result = tf.ConfigProto()
    if config is not None:
        result.CopyFrom(config)
    result.allow_soft_placement = True
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    num_cpus = 1 + max([spec.device_index or 0 for spec in specs if spec.device_type == "CPU"] or [0])
    result.device_count["CPU"] = max(num_cpus, result.device_count.get("CPU", 0))
    return result
