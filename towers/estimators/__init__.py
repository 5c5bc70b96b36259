"""`tf.estimator.Estimator` on towers: model functions that hold an optimizer, metrics and a scaffold, replicated as they are."""
from towers.estimators.replication import replicate_model_fn
from towers.estimators.tower_optimizer import TowerOptimizer

__all__ = ["TowerOptimizer", "replicate_model_fn"]
