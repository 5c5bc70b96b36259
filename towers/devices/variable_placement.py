"""On which devices the variables of a build stand, and which devices its towers' other ops get."""
import warnings
import weakref

import tensorflow.compat.v1 as tf

from towers.api.wording import TowersWarning
from towers.devices.placement import HOST, check_device
from towers.graph.op_types import VARIABLES
from towers.graph.private import is_in_loop
from towers.graph.walk import is_ref

__all__ = ["TowerDevices", "placement_of", "warn_of_other_devices", "warn_of_stale_reads"]

# What goes to where a variable stands, whoever asks for it, and what has no cost anywhere. RestoreV2 is what
# tf.train.init_from_checkpoint puts on the host itself, and runs when variables are initialized; of a tf.cond its branches count.
_BESIDES = frozenset(["ReadVariableOp", "Identity", "Assign", "AssignVariableOp", "Const", "NoOp", "RestoreV2",
                      "IsVariableInitialized", "VarIsInitializedOp", "Switch", "RefSwitch", "Merge", "RefMerge", "If",
                      "StatelessIf", "Placeholder"])


def placement_of(placement, devices):
    """Returns a function of a variable's op that returns the device on which the variable is to stand.

    Args:
      placement: "host", the CPU's memory; "first" and "replicated", the first tower's device; "round_robin", the towers' devices
        in turn; "balanced", that of the towers' devices which holds the fewest bytes so far, both of the variable's graph; or a
        function of a variable's op that returns a device's name.
      devices: list of str, the towers' devices.

    Raises:
      ValueError: for another placement.
    """
    devices = list(dict.fromkeys(devices))
    if callable(placement):
        return lambda op: check_device(placement(op))
    if placement == "host":
        return lambda op: HOST
    if placement in ("first", "replicated"):
        return lambda op: devices[0]
    if placement == "round_robin":
        return _least(devices, lambda op: 1)
    if placement == "balanced":
        return _least(devices, _bytes_of)
    raise ValueError("variable_placement has to be 'host', 'first', 'replicated', 'round_robin', 'balanced' or a function of a "
                     "variable's op, not %r." % (placement,))


def _least(devices, load_of):
    loads_of = weakref.WeakKeyDictionary()  # a builder may build in several graphs, in threads of their own

    def choose(op):
        loads = loads_of.setdefault(op.graph, dict.fromkeys(devices, 0))
        device = min(devices, key=loads.get)  # of several the first
        loads[device] += load_of(op)
        return device
    return choose


def _bytes_of(op):
    shape = tf.TensorShape(op.get_attr("shape"))
    return (shape.num_elements() or 1) * tf.as_dtype(op.get_attr("dtype")).size


class TowerDevices:
    """A device function for the ops of one tower: variables go where their placement says, all others to the tower's device.

    What the model function itself puts on a device by `tf.device` stays there.

    Args:
      tower_device: str.
      place: see `placement_of`.

    Attributes:
      elsewhere: list of ops that the model function put on another device of the tower's kind, no variables among them.
    """

    def __init__(self, tower_device, place):
        self._device, self._place, self.elsewhere = tower_device, place, []
        self._spec = tf.DeviceSpec.from_string(tower_device)

    def __call__(self, op):
        kind = getattr(op, "type", None)  # Keras asks for the present device by something that is no op
        named = tf.DeviceSpec.from_string(op.device) if op.device else None
        if named is not None and named.device_type:
            is_beside = kind is None or kind in VARIABLES or kind in _BESIDES
            if not is_beside and named.device_type == self._spec.device_type and named.device_index != self._spec.device_index:
                self.elsewhere.append(op)
            return op.device
        if kind in VARIABLES:
            return self._place(op)
        return op.inputs[0].op.device if kind == "VarIsInitializedOp" else self._device


def warn_of_other_devices(ops, tower):
    """Warns, and tells whether it did, of ops of a `TowerContext` that its model function put on another tower's device.

    Whole numbers are let be: TensorFlow's own gradient of tf.reduce_prod computes shapes on the first CPU.
    """
    ops = [op for op in ops if not op.outputs or not all(output.dtype.is_integer for output in op.outputs)]
    if not ops:
        return False
    warnings.warn(
        "The model function puts ops of tower %d on %s, by `with tf.device(...)`, while that tower stands on %s: %r among them. "
        "All towers' work is done there. Leave devices out of the model function, or name towers.current_tower().device."
        % (tower.index, ops[0].device, tower.device, ops[0].name), TowersWarning, stacklevel=4)
    return True


def warn_of_stale_reads(gradients, towers):
    """Warns where towers are trained in a `tf.while_loop` and one of them takes a copy of a variable for all of the loop's steps.

    A ref variable that was made outside is read when the loop begins. On its own device that is the variable's memory, which the
    steps write; on another, unless CPUs of one process share it, a copy.

    Args:
      gradients: list of (gradient, variable) that are to be applied.
      towers: list of `TowerContext`.
    """
    for _, variable in [pair for pair in gradients if is_in_loop(pair[0].op)]:
        place = tf.DeviceSpec.from_string(variable.device)
        for tower in towers:
            own = tf.DeviceSpec.from_string(tower.device)
            kinds = {place.device_type or own.device_type, own.device_type}
            is_its = kinds == {"CPU"} or len(kinds) == 1 and place.device_index in (None, own.device_index)
            if is_ref(variable.op.outputs[0]) and not is_its:
                warnings.warn(
                    "Tower %d on %s reads the variable %r, of %s, once for all steps of the tf.while_loop: it trains on what the "
                    "variable was before the loop. Call tf.enable_resource_variables() when the program starts, or take the "
                    "steps by towers.repeat." % (tower.index, tower.device, variable.op.name, variable.device),
                    TowersWarning, stacklevel=4)
                return
