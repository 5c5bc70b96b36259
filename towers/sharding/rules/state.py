"""What has effects: writes, checks, summaries, and the ops of control flow 1.

A write takes what the whole batch comes to, so that all towers would write the same; `towers.state` lets one do it.
"""
import tensorflow.compat.v1 as tf

from towers.sharding.nodes import Refused, Unfit
from towers.sharding.placements import InTurn, Listed, Replicate, Running, Shard
from towers.sharding.rules.table import ANY, rule

__all__ = []

WRITES = """Assign AssignAdd AssignAddVariableOp AssignSub AssignSubVariableOp AssignVariableOp ResourceScatterAdd
ResourceScatterDiv ResourceScatterMax ResourceScatterMin ResourceScatterMul ResourceScatterNdAdd ResourceScatterNdSub
ResourceScatterNdUpdate ResourceScatterSub ResourceScatterUpdate ResourceStridedSliceAssign ScatterAdd ScatterDiv ScatterMax
ScatterMin ScatterMul ScatterNdAdd ScatterNdSub ScatterNdUpdate ScatterSub ScatterUpdate StridedSliceAssign LookupTableInsertV2
CountUpTo"""


@rule(WRITES)
def write(node):
    return node.replicated()


# Optimizers' own ops, as of a model that trains a part of itself: the gradient is of the whole batch.
@rule("ApplyAdadelta ApplyAdagrad ApplyAdam ApplyFtrl ApplyGradientDescent ApplyMomentum ApplyRMSProp ResourceApplyAdagrad "
      "ResourceApplyAdam ResourceApplyGradientDescent ResourceApplyKerasMomentum ResourceApplyMomentum ResourceApplyRMSProp")
def train(node):
    return node.replicated()


@rule("Assert NoOp ControlTrigger PrintV2 ImageSummary ImageSummaryV2 AudioSummary AudioSummaryV2 TensorSummary TensorSummaryV2 "
      "ConsumeMutexLock", ANY + (InTurn, Running))
def of_the_tower(node):
    return node.decide(Replicate())


@rule("ScalarSummary HistogramSummary MergeSummary WriteScalarSummary WriteHistogramSummary")
def summary(node):
    return node.replicated()


# What each tower takes from outside of the model, for itself.
@rule("IteratorGetNext IteratorGetNextSync QueueDequeueV2 QueueDequeueManyV2 QueueDequeueUpToV2 ReaderReadV2", always=True)
def data(node):
    found = []
    for value in node.outputs:
        if value.dims is None or not value.dims:
            raise Refused("the model function takes %r from outside, and whether it holds examples is not to be "
                          "told from its shape. Hand it in as a part of the batch." % value.tensor.name)
        found.append(Shard(0, node.context.rows_of(value.tensor), 1))
    return node.decide(found)


@rule("IdentityN", ANY)
def handed_on(node):
    return node.decide([value.placement for value in node.inputs])


@rule("Switch RefSwitch", ANY + (InTurn, Running))
def switch(node):
    if isinstance(node.inputs[1].placement, InTurn):  # an example chooses; where a Merge ends that, what it chose is its own
        if not node.context.carries_turns and not node.of(Listed):
            raise Unfit()
        is_value = isinstance(node.inputs[0].placement, Replicate) and node.inputs[0].dtype != tf.resource
        return node.decide(InTurn() if is_value else node.inputs[0].placement)
    return node.decide(node.inputs[0].placement, node.wanted([1]))


@rule("Enter RefEnter Exit RefExit NextIteration RefNextIteration LoopCond", ANY)
def passed(node):
    if node.type == "LoopCond" and not node.all(Replicate):
        raise Unfit()
    return node.decide(node.inputs[0].placement)
