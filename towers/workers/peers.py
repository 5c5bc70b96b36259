"""How the towers of one build meet those of the other workers.

Each worker's graph holds its own towers. Where they meet, what they left is combined first; what that came to crosses between the
workers once, whatever the number of towers, and every worker computes the same of it.
"""
import warnings

import tensorflow.compat.v1 as tf

from towers.api.wording import TowersWarning
from towers.graph.draws import drawing_ops, seeds_of
from towers.workers.gradient_sums import describe, scaled, sum_gradients
from towers.workers.variables import check_equal_at_start, copied

__all__ = ["Peers"]


class Peers:
    """The other workers of one build.

    Args:
      workers: `towers.workers.connection.Workers`, more than one.
      num_towers: int, how many towers this worker has.

    Attributes:
      workers: as given.
      collectives: `towers.workers.collectives.Collectives`.
      first: int, the number of this worker's first tower among all towers.
      num_towers: int, how many towers all workers have.
    """

    def __init__(self, workers, num_towers):
        self.workers, self.collectives = workers, workers.collectives
        self.build = "build %d" % self.collectives.next_of_graph("builds")
        self.towers_of = self.tell([num_towers])
        self.first, self.num_towers = sum(self.towers_of[:workers.rank]), sum(self.towers_of)

    def tell(self, items):
        """Returns the JSON items of all workers in the order of their ranks, one list."""
        return [item for told in self.workers.tell_all(items, "building its towers") for item in told]

    def sum(self, tensor, *purpose):
        """Adds up a tensor over workers; `purpose` tells it apart from the build's others."""
        return self.collectives.sum(tensor, (self.build, *purpose))

    def check_alike(self, what, items):
        """Raises `ValueError` in every worker where not all of them call this with the same list of str, and names the first."""
        self.workers.check_alike(what, items)

    def warn_of_same_draws(self, towers):
        """Warns where a random op of this worker's towers, such as dropout's, draws what another worker's draws.

        Args:
          towers: list of `towers.Tower`.
        """
        drawing = drawing_ops(towers)
        seeds = [seeds_of(op) for op in drawing]
        told = self.workers.tell_all(seeds, "building its towers")
        for op, seed in zip(drawing, seeds):
            if any(seed) and any(seed in others for rank, others in enumerate(told) if rank != self.workers.rank):
                warnings.warn("Every worker draws the same random numbers at %r. Give each seeds of its own: "
                              "tf.set_random_seed(seed + workers.rank)." % op.name, TowersWarning, stacklevel=4)
                return

    def average(self, sums, variables):
        """Averages gradients over all towers of all workers.

        Args:
          sums: list of tensors and `tf.IndexedSlices`, the sums over this worker's towers.
          variables: list of variables, whose gradients these are.
        """
        turn = self.collectives.next_of_graph(self.build + " averages")
        with tf.control_dependencies([check_equal_at_start(tf.get_default_graph())]):
            sums = sum_gradients(self.collectives, sums, (self.build, "gradients", turn))
        self.check_alike("gradients", [describe(gradient, variable) for gradient, variable in zip(sums, variables)])
        self.check_alike("collectives", self.collectives.made())
        return [scaled(gradient, 1.0 / self.num_towers) for gradient in sums]

    def update_alike(self, updates, variables, after, is_of_last):
        """Returns ops that run one worker's updates in that worker, and give the others the values that they wrote.

        Args:
          updates: list of operations and tensors, this worker's.
          variables: list of variables that they write, in an order that is the same in every worker.
          after: list of operations and tensors that read the variables before they are written.
          is_of_last: whether the last worker's updates are those that run; the first one's are if not.
        """
        if not variables:
            return list(updates)
        self.check_alike("variables that update ops write", [variable.op.name for variable in variables])
        source = self.workers.size - 1 if is_of_last else 0
        purpose = (self.build, "updates", self.collectives.next_of_graph(self.build + " updates"))
        with tf.name_scope("updates_of_workers"), tf.control_dependencies(
                list(updates) if self.workers.rank == source else list(after)):
            values = [variable.read_value() for variable in variables]
            copies = copied(self.collectives, values, purpose, source)
            if self.workers.rank == source:
                return [copy.op for copy in copies]
            return [tf.assign(variable, copy).op for variable, copy in zip(variables, copies)]

    def meet(self, purpose, left, aggregate, across, shapes):
        """Returns what each of this worker's towers gets of a meeting of all workers' towers.

        Args:
          purpose: tuple of str and int, what the meeting is known by in every worker.
          left: list over this worker's towers of lists of what each left, tensors and None.
          aggregate: a function of such a list over all towers, see `towers.exchange`.
          across: `towers.meeting.meetings.Across`, or None.
          shapes: list of `tf.TensorShape`, what all towers' contributions are known to have in common; None is their own.

        Returns:
          A list over this worker's towers of lists of tensors.
        """
        purpose = (self.build,) + purpose
        if across is not None:
            cross = self.collectives.sum if across.of_sum else self.collectives.join
            return [across.whole(cross(across.part(left), purpose))] * len(left)
        columns = []
        for number, column in enumerate(zip(*left)):
            if column[0] is None:  # of what some aggregates know and this one does not
                columns.append([None] * self.num_towers)
            else:
                columns.append(self._of_all(list(column), (shapes or {number: column[0].shape})[number], purpose + (number,)))
        return aggregate([list(of_tower) for of_tower in zip(*columns)])[self.first:self.first + len(left)]

    def _of_all(self, contributions, shape, purpose):
        """Returns one contribution of every tower of every worker, a list."""
        most = max(self.towers_of)
        if shape.is_fully_defined():
            rows = tf.stack(contributions)
            rows = tf.pad(rows, [[0, most - len(contributions)]] + [[0, 0]] * shape.rank)
            rows.set_shape([most] + shape.as_list())
            joined = self.collectives.join(rows, purpose)
            return [joined[worker, tower] for worker, count in enumerate(self.towers_of) for tower in range(count)]
        if shape.rank is None:
            raise ValueError("%r of %r has an unknown rank, and can't cross between workers." % (contributions[0].name, purpose))
        nothing = tf.zeros([0] * shape.rank, contributions[0].dtype)
        turns = [self.collectives.join_varied(contributions[i] if i < len(contributions) else nothing, purpose + (i,))
                 for i in range(most)]
        return [turns[tower][worker] for worker, count in enumerate(self.towers_of) for tower in range(count)]
