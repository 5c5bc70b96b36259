"""Rules, a file a family: which placements an op wants, and what its outputs then are."""
from towers.sharding.rules import normalization, pointwise, products, reductions, rows, segments, sizes, state
from towers.sharding.rules.control_flow import functions, lists, tensor_lists
from towers.sharding.rules.movement import axes, diagonals, gathers, reshapes, slices
from towers.sharding.rules.table import RULES, decide, placement_rule

__all__ = ["RULES", "axes", "decide", "diagonals", "functions", "gathers", "lists", "normalization", "placement_rule",
           "pointwise", "products", "reductions", "reshapes", "rows", "segments", "sizes", "slices", "state", "tensor_lists"]
