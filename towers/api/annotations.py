"""Names for the types of TensorFlow's own things, for signatures to say what they take.

To a type checker each of them is `Any`: most builds of TensorFlow carry no types, and those that do disagree with the others.
Nothing is imported for them, and nothing is checked by them when a program runs.
"""
from typing import Any, Callable, List, Sequence, Tuple, Union

__all__ = ["ClusterResolver", "ConfigProto", "ConvertedModelFn", "DType", "Gradient", "GradsAndVars", "Graph", "LossScale",
           "ModelFn", "Operation", "Optimizer", "Session", "SessionRunHook", "Shape", "StepFn", "Structure", "Tensor",
           "TensorFn", "TensorLike", "TransformFn", "Transforms", "UpdateOps", "Variable", "VariablePlacement", "VariableScope"]

ClusterResolver = Any
ConfigProto = Any
DType = Any
Graph = Any
LossScale = Any
Operation = Any
Optimizer = Any
Session = Any
SessionRunHook = Any
Shape = Any  # what `tf.TensorShape` is made of
Tensor = Any
TensorLike = Any  # a tensor, and what `tf.convert_to_tensor` makes one of: arrays, numbers, variables
Variable = Any
VariableScope = Any

Structure = Any  # a nested structure of tensors: of tuples, lists and dicts
Gradient = Any  # a tensor, `tf.IndexedSlices` or None
GradsAndVars = List[Tuple[Gradient, Variable]]
TensorFn = Callable[[Tensor], Tensor]
TransformFn = Callable[[GradsAndVars], GradsAndVars]
# Such functions, and `towers.training.transforms.Transform`: what a checker makes of a list of both is a list of `object`.
Transforms = Sequence[Any]
StepFn = Callable[[], Structure]
UpdateOps = Union[str, Sequence[Operation]]  # a policy, or a list of operations and tensors
VariablePlacement = Union[str, Callable[[Operation], str]]
ModelFn = Callable[..., Any]
ConvertedModelFn = Any  # a model function with an attribute `converted`
