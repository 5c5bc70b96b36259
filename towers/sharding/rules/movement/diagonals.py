"""Diagonals of matrices, and what is set there."""
import numpy as np

from towers.sharding.nodes import Unfit
from towers.sharding.placements import Shard
from towers.sharding.rules.pointwise import along_rows
from towers.sharding.rules.reductions import own_rows_of
from towers.sharding.rules.table import SUMS, rule

__all__ = []


@rule("Diag MatrixDiag MatrixDiagV2 MatrixDiagV3", (Shard,) + SUMS)
def diagonal(node):
    placement = node.inputs[0].placement
    if isinstance(placement, SUMS):
        return _of_sum(node)
    if not isinstance(placement, Shard) or node.type == "Diag" and node.inputs[0].rank != 1 or not _is_main(node, 1):
        raise Unfit()
    if placement.axis == node.inputs[0].rank - 1:
        return own_rows_of(node, placement, 0)
    return node.decide(placement, node.wanted(range(1, len(node.inputs))))


def _of_sum(node):
    """What stands beside a sum's diagonal is nothing, or no part of the sum."""
    beside = node.inputs[-1].const() if node.type.endswith(("V2", "V3")) else 0
    if beside is None or np.any(beside != 0):
        raise Unfit()
    return node.decide(node.inputs[0].placement, node.wanted(range(1, len(node.inputs))))


def _is_main(node, k):
    """Tells whether an op is of the main diagonal, as those of the first kinds always are."""
    if node.type.endswith(("V2", "V3")):
        number = node.inputs[k].const()
        return number is not None and not np.any(number)
    return True


@rule("DiagPart MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3", (Shard,) + SUMS)
def part_of_diagonal(node):
    placement = node.inputs[0].placement
    if isinstance(placement, SUMS):
        return _of_sum(node)
    if not isinstance(placement, Shard) or node.type == "DiagPart" or not _is_main(node, 1):
        raise Unfit()
    if placement.axis >= node.inputs[0].rank - 2:
        raise Unfit()  # a diagonal is as long as the shorter of two axes
    return node.decide(placement, node.wanted(range(1, len(node.inputs))))


@rule("MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3", (Shard,))
def set_diagonal(node):
    matrix, diagonal_of = node.inputs[0], node.inputs[1]
    rank = matrix.rank
    if not _is_main(node, 2):
        raise Unfit()
    axes = {value.placement.axis for value in (matrix, diagonal_of) if isinstance(value.placement, Shard)}
    if axes == {rank - 2} and isinstance(matrix.placement, Shard):
        return own_rows_of(node, matrix.placement, 0)
    if len(axes) == 1 and max(axes) < rank - 2:
        wants, placement = along_rows(node, rank, {0: 0, 1: 0, 2: rank})
        return node.decide(placement, wants)
    raise Unfit()


@rule("MatrixBandPart BatchMatrixBandPart", (Shard,) + SUMS)
def band(node):
    placement = node.inputs[0].placement
    if isinstance(placement, SUMS) or isinstance(placement, Shard) and placement.axis < node.inputs[0].rank - 2:
        return node.decide(placement, node.wanted([1, 2]))
    if not isinstance(placement, Shard):
        raise Unfit()
    return own_rows_of(node, placement, 0)
