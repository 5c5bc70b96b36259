"""Rules, a file a family: which placements an op wants, and what its outputs then are."""
from towers.sharding.rules import (diagonals, gathers, movement, normalization, pointwise, products, reductions, reshapes, rows,
                                   segments, sizes, slices, state)
from towers.sharding.rules.control_flow import functions, lists, tensor_lists
from towers.sharding.rules.table import RULES, decide, placement_rule

__all__ = ["RULES", "decide", "diagonals", "functions", "gathers", "lists", "movement", "normalization", "placement_rule",
           "pointwise", "products", "reductions", "reshapes", "rows", "segments", "sizes", "slices", "state", "tensor_lists"]
