"""On which devices towers, their variables and their meeting point stand.

Devices are found without starting a runtime that takes the GPUs' memory, and nothing here makes graph or Session.
"""
import tensorflow.compat.v1 as tf

__all__ = ["find_devices", "session_config"]

_VARIABLE_OPS = frozenset(["Variable", "VariableV2", "AutoReloadVariable", "VarHandleOp", "VarIsInitializedOp"])
HOST = "/cpu:0"


def find_devices():
    """Returns the devices that towers stand on by default: every local GPU, else the one CPU.

    Returns:
      A list of str, ["/gpu:0", "/gpu:1", ...] or ["/cpu:0"].
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
    if isinstance(devices, str) or not hasattr(devices, "__iter__"):
        raise TypeError("devices has to be a list of device names, one for each tower, not %r." % (devices,))
    devices = list(devices)
    if not devices:
        raise ValueError("devices is empty: name one device for each tower, or leave it None for all local GPUs.")
    for device in devices:
        check_device(device)
    return devices


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
    return device


def variable_device(placement, devices):
    """Returns the device of the variables for a `variable_placement`.

    Args:
      placement: "host" (the CPU) or "first" (the first tower's device).
      devices: list of str, the towers' devices.

    Raises:
      ValueError: for another placement.
    """
    if placement == "host":
        return HOST
    if placement == "first":
        return devices[0]
    raise ValueError("variable_placement has to be 'host' or 'first', not %r." % (placement,))


def tower_device_function(tower_device, variables_device):
    """Returns a device function that puts variables on one device and all other ops of a tower on another.

    What the model function itself puts on a device by `tf.device` stays there.
    """
    def choose(op):
        if op.device and tf.DeviceSpec.from_string(op.device).device_type:
            return op.device
        return variables_device if op.type in _VARIABLE_OPS else tower_device
    return choose


def session_config(devices=None, config=None):
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
    devices = find_devices() if devices is None else check_devices(devices)
    result = tf.ConfigProto()
    if config is not None:
        result.CopyFrom(config)
    result.allow_soft_placement = True
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    num_cpus = 1 + max([spec.device_index or 0 for spec in specs if spec.device_type == "CPU"] or [0])
    result.device_count["CPU"] = max(num_cpus, result.device_count.get("CPU", 0))
    return result
