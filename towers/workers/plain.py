"""Workers for graphs without towers: sums of tensors, and an optimizer whose gradients are averaged over workers."""
import tensorflow.compat.v1 as tf

from towers.graph.gradient_hook import detail_of, with_gradient
from towers.graph.walk import ancestors
from towers.meeting.slices import numbers_of
from towers.meeting.sums import gradient_of_extreme
from towers.meeting.turns import without_numbers
from towers.workers.gradient_sums import describe, scaled, sum_gradients
from towers.workers.variables import check_equal_at_start

__all__ = ["AveragingOptimizer", "average_gradients", "extreme_with_gradient", "sum_with_gradient"]


def sum_with_gradient(workers, tensor, name):
    """Returns the sum of a tensor over workers, whose gradient is the sum over workers of what reaches it in each."""
    total = workers.collectives.sum(tensor, _purpose(workers), name)
    return _with_gradient("TowersWorkersSum", total, tensor, workers, name)


@tf.RegisterGradient("TowersWorkersSum")
def _sum_gradient(op, dy, _):
    workers, name = detail_of(op)
    return None, sum_with_gradient(workers, tf.convert_to_tensor(dy), name)


def extreme_with_gradient(workers, tensor, reduce, name):
    """Returns the largest or smallest of a tensor over workers, whose gradient goes to those that have it, in equal parts."""
    extreme = reduce(workers.collectives.join(tensor, _purpose(workers)), 0)
    return _with_gradient("TowersWorkersExtreme", extreme, tensor, workers, name)


@tf.RegisterGradient("TowersWorkersExtreme")
def _extreme_gradient(op, dy, _):
    workers, name = detail_of(op)
    return None, gradient_of_extreme(dy, *op.inputs, lambda parts: sum_with_gradient(workers, parts, name))


def _with_gradient(gradient, value, tensor, workers, name):
    if not tensor.dtype.is_floating:
        return value
    return with_gradient(gradient, lambda: tf.identity_n([tf.stop_gradient(value), tensor]), "IdentityN", (workers, name))[0]


def _purpose(workers):
    turn = workers.collectives.next_of_graph("all_reduce")
    return "all_reduce", turn, without_numbers(tf.get_default_graph().get_name_scope())


def average_gradients(workers, grads_and_vars, weight=None):
    """Averages gradients over workers, see `Workers.average_gradients`."""
    pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
    if not pairs:
        raise ValueError("There is no gradient to average: it is None for every variable, of %s."
                         % [variable.op.name for _, variable in grads_and_vars])
    if workers.size == 1:
        return pairs
    collectives, graph = workers.collectives, tf.get_default_graph()
    purpose = ("average_gradients", collectives.next_of_graph("average_gradients"))
    with tf.name_scope("average_over_workers"), tf.control_dependencies([check_equal_at_start(graph)]):
        gradients = [gradient for gradient, _ in pairs]
        if weight is None:
            factor = 1.0 / workers.size
        else:
            weight = tf.cast(weight, tf.float64)
            factor = tf.div_no_nan(tf.ones([], tf.float64), collectives.sum(weight, purpose + ("weight",)))
            gradients = [_times(gradient, weight) for gradient in gradients]
        sums = sum_gradients(collectives, gradients, purpose)
        workers.check_alike("gradients", [describe(*pair) for pair in pairs])
        workers.check_alike("collectives", collectives.made())
        averaged = [scaled(gradient, factor) if weight is None else _times(gradient, factor) for gradient in sums]
        # None is there before all are, so that none is applied while another one still reads its variable.
        return list(zip(tf.tuple(averaged), [variable for _, variable in pairs]))


def _times(gradient, factor):
    return scaled(gradient, tf.cast(factor, gradient.dtype))


class AveragingOptimizer(tf.train.Optimizer):
    """An optimizer whose gradients are averaged over workers, see `Workers.optimizer`.

    Attributes:
      optimizer: the `tf.train.Optimizer` that applies them.
    """

    def __init__(self, workers, optimizer, weight=None):
        super().__init__(False, "AveragingOptimizer")
        self.optimizer, self._workers, self._weight = optimizer, workers, weight
        self._averaged = set()  # ops of averaged gradients

    def compute_gradients(self, *args, **kwargs):
        """Computes the wrapped optimizer's gradients and averages them; those that are None are left out."""
        return self._average(self.optimizer.compute_gradients(*args, **kwargs))

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Applies gradients, which are averaged here unless `compute_gradients` did."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        are_averaged = [not self._averaged.isdisjoint(ancestors([numbers_of(gradient)])) for gradient, _ in pairs]
        if not any(are_averaged):
            pairs = self._average(pairs)
        elif not all(are_averaged):
            raise ValueError("The gradient of %r is this worker's own, while others were averaged over workers: take all of them "
                             "from compute_gradients, or none." % pairs[are_averaged.index(False)][1].op.name)
        return self.optimizer.apply_gradients(pairs, global_step=global_step, name=name)

    def _average(self, grads_and_vars):
        averaged = average_gradients(self._workers, grads_and_vars, self._weight)
        self._averaged.update(numbers_of(gradient).op for gradient, _ in averaged)
        return averaged

    def get_slot(self, *args, **kwargs):
        """As the wrapped optimizer's."""
        return self.optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args, **kwargs):
        """As the wrapped optimizer's."""
        return self.optimizer.get_slot_names(*args, **kwargs)

    def variables(self):
        """As the wrapped optimizer's."""
        return self.optimizer.variables()
