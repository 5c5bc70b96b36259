"""Kinds of TensorFlow's ops, by their types, that several rooms ask about; what an op does to a batch, the rules say."""

__all__ = ["ADDS", "BODIES", "BRANCHES", "CALLS", "ENTERS", "EXITS", "HANDS_ON", "IDENTITIES", "LOOKS_UP", "LOOPS_BACK", "MERGES",
           "OF_SHAPES", "QUOTIENTS", "READS", "SAME_NUMBERS", "SWITCHES", "VARIABLES"]


def _types(names):
    return frozenset(names.split())


ADDS = _types("Add AddV2")
QUOTIENTS = _types("Div DivNoNan RealDiv")

VARIABLES = _types("Variable VariableV2 VarHandleOp")
READS = _types("Identity ReadVariableOp")
LOOKS_UP = _types("Gather GatherNd GatherV2 ResourceGather ResourceGatherNd")  # some rows

HANDS_ON = _types("CheckNumerics CheckNumericsV2 DeepCopy Identity Print Snapshot")  # their first input
SAME_NUMBERS = HANDS_ON | _types("Cast ExpandDims Reshape Squeeze StopGradient")  # one output, the numbers of the first input
OF_SHAPES = _types("OnesLike Rank Shape ShapeN Size ZerosLike")  # of what they take, the shape is enough

# Of control flow 1: the ways into a loop, out of it, what joins two ways, the circles in a graph, and the ways into branches.
ENTERS, EXITS, MERGES, LOOPS_BACK, SWITCHES, IDENTITIES = (
    frozenset([name, "Ref" + name]) for name in ("Enter", "Exit", "Merge", "NextIteration", "Switch", "Identity"))
# Of control flow 2: the attributes that name the functions which ops of a type call; those ops that have state, and may write;
# and those whose first input chooses a branch.
BODIES = {"If": ("then_branch", "else_branch"), "StatelessIf": ("then_branch", "else_branch"), "Case": ("branches",),
          "StatelessCase": ("branches",), "While": ("cond", "body"), "StatelessWhile": ("cond", "body"),
          "PartitionedCall": ("f",), "StatefulPartitionedCall": ("f",)}
CALLS = frozenset(name for name in BODIES if not name.startswith(("Stateless", "Partitioned")))
BRANCHES = frozenset(name for name in BODIES if "branch" in BODIES[name][0])
