"""Which gradients a loss has, told from the forward pass alone: dense, sparse, or none.

A model function that clips its gradients is handed stand-ins for them before they are computed. What is told here is held
against the gradients themselves when these exist.
"""
import tensorflow.compat.v1 as tf

from towers.graph.op_types import ENTERS, HANDS_ON, IDENTITIES, LOOKS_UP, READS, VARIABLES
from towers.graph.private import is_differentiable

__all__ = ["DENSE", "NONE", "SPARSE", "gradient_forms"]

NONE, DENSE, SPARSE = "None", "a tensor", "tf.IndexedSlices"
_HAND_ON = HANDS_ON | READS | ENTERS | IDENTITIES | {"IdentityN"}


def gradient_forms(loss, variables):
    """Tells what `tf.gradients(loss, variables)` would return for each variable.

    Args:
      loss: tensor.
      variables: list of variables.

    Returns:
      A list of `NONE`, `DENSE` or `SPARSE`.
    """
    reached = _reached(loss.op)
    forms = []
    for variable in variables:
        handle = variable.op.outputs[0]
        if variable.op not in reached:
            forms.append(NONE)
        else:
            forms.append(SPARSE if _takes_rows_alone(handle, reached, set()) else DENSE)
    return forms


def _reached(loss_op):
    """Returns the ops between a loss and variables that a gradient goes through."""
    reached, stack = set(), [loss_op]
    while stack:
        op = stack.pop()
        if op in reached:
            continue
        if op.type not in VARIABLES and not (op.inputs and is_differentiable(op)):
            continue
        reached.add(op)
        stack.extend(tensor.op for tensor in op.inputs if _carries_gradient(tensor))
    return reached


def _carries_gradient(tensor):
    dtype = tensor.dtype.base_dtype
    return dtype.is_floating or dtype.is_complex or dtype.name in ("resource", "variant")


def _takes_rows_alone(tensor, reached, seen):
    if tensor.name in seen:
        return True
    seen.add(tensor.name)
    consumers = [op for op in tensor.consumers() if op in reached]
    return bool(consumers) and all(_takes_rows(op, tensor, reached, seen) for op in consumers)


def _takes_rows(op, tensor, reached, seen):
    if op.type in _HAND_ON:
        return all(_takes_rows_alone(out, reached, seen) for out in _handed_on(op, tensor))
    if op.type == "GatherV2":
        return op.inputs[0] is tensor and _is_zero(op.inputs[2]) and not op.get_attr("batch_dims")
    return op.type in LOOKS_UP and not op.type.endswith("Nd") and op.inputs[0] is tensor


def _handed_on(op, tensor):
    return [out for taken, out in zip(op.inputs, op.outputs) if taken is tensor]


def _is_zero(tensor):
    value = tf.get_static_value(tensor)
    return value is not None and int(value) == 0
