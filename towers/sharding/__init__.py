"""Placements: what a tower's tensors have to do with the whole batch's, and how a model function comes to compute the latter."""
from towers.sharding.nodes import Decision, Node
from towers.sharding.rewrite.conversions import Meeting
from towers.sharding.rules.table import placement_rule
from towers.sharding.whole_batch import whole_batch

__all__ = ["Decision", "Meeting", "Node", "placement_rule", "whole_batch"]
