"""What a graph keeps of the forward pass until the backward pass has read it, found in the graph itself.

The rule: every tensor that an op of the backward pass reads and that no op of the backward pass made, once, by its bytes.
Ops that pass a buffer on (identities, reshapes) stand for what they got. Of a call of a graph function its inputs and
outputs count, not what it makes inside. Not counted are constants, variables' own values, what the caller names (`dy`), and
what zeros are made like that nobody reads and so never run: `tf.gradients` makes them for outputs without a gradient.
"""
import numpy as np

__all__ = ["num_bytes", "tensors_saved_for_backward"]

_PASS_ON = frozenset(["Identity", "StopGradient", "PreventGradient", "Bitcast", "Snapshot", "Reshape", "ExpandDims", "Squeeze"])
_NOT_COUNTED = frozenset(["Const", "VariableV2", "VarHandleOp", "ReadVariableOp"])


def tensors_saved_for_backward(backward_ops, inputs=(), given=()):
    """Returns the tensors that the backward pass reads of the forward pass.

    Args:
      backward_ops: list of operations, those that the calls of `tf.gradients` made.
      inputs: tensors that count whatever made them: the layer's inputs, which are variables in a benchmark.
      given: tensors that do not count: the gradients that the backward pass starts from.

    Returns:
      A list of tensors, each once.
    """
    backward_ops = [op for op in backward_ops if op.type != "ZerosLike" or op.outputs[0].consumers()]
    backward = set(backward_ops)
    inputs = {_origin(tensor).name for tensor in inputs}
    given = {_origin(tensor).name for tensor in given}
    found = {}
    for op in backward_ops:
        for tensor in op.inputs:
            origin = _origin(tensor)
            counts = origin.name in inputs or origin.op.type not in _NOT_COUNTED
            if counts and origin.op not in backward and origin.name not in given:
                found[origin.name] = origin
    return list(found.values())


def num_bytes(tensor, session):
    """Returns the bytes of a tensor; runs it once where its shape is unknown."""
    count = tensor.shape.num_elements()
    if count is None:
        count = np.size(session.run(tensor))
    return count * tensor.dtype.base_dtype.size


def _origin(tensor):
    """Returns the tensor whose buffer `tensor` is."""
    while True:
        op = tensor.op
        if op.type == "IdentityN":
            tensor = op.inputs[tensor.value_index]
        elif op.type in _PASS_ON:
            tensor = op.inputs[0]
        else:
            return tensor
