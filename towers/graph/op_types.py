"""Kinds of TensorFlow's ops, by their types, that several rooms ask about; what an op does to a batch, the rules say."""

__all__ = ["ADDS", "BRANCHES", "CALLS", "ENTERS", "EXITS", "HANDS_ON", "LOOKS_UP", "LOOPS_BACK", "MERGES", "OF_SHAPES",
           "QUOTIENTS", "READS", "SAME_NUMBERS", "STOPS", "SWITCHES", "VARIABLES"]


def _types(names):
    return frozenset(names.split())


ADDS = _types("Add AddV2")
QUOTIENTS = _types("Div DivNoNan RealDiv")

VARIABLES = _types("Variable VariableV2 VarHandleOp")
READS = _types("Identity ReadVariableOp")
LOOKS_UP = _types("Gather GatherNd GatherV2 ResourceGather ResourceGatherNd")  # some rows

HANDS_ON = _types("CheckNumerics CheckNumericsV2 DeepCopy Identity Print Snapshot")  # their first input
STOPS = _types("PreventGradient StopGradient")  # so do these, but for its gradient
SAME_NUMBERS = HANDS_ON | _types("Cast ExpandDims Reshape Squeeze StopGradient")  # one output, the numbers of the first input
OF_SHAPES = _types("OnesLike Rank Shape ShapeN Size ZerosLike")  # of what they take, the shape is enough

# Of control flow 1: the ways into a loop, out of it, what joins two ways, the circles in a graph, and the ways into branches.
ENTERS, EXITS, MERGES = _types("Enter RefEnter"), _types("Exit RefExit"), _types("Merge RefMerge")
LOOPS_BACK, SWITCHES = _types("NextIteration RefNextIteration"), _types("Switch RefSwitch")
# Of control flow 2: what may write, and what its first input chooses in.
CALLS, BRANCHES = _types("If Case While StatefulPartitionedCall"), _types("If StatelessIf Case StatelessCase")
