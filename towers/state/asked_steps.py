"""The training steps that model functions ask an optimizer of theirs for, see `towers.estimators`, while only ops stand for them.

Until the real steps are made the graph does not say that these ops come after what the real ones wait for.
"""
from towers.graph.walk import descendants

__all__ = ["AskedSteps"]


class AskedSteps:
    """What stands for the steps, and what is behind it.

    Args:
      views: list over towers of `towers.state.reads_and_writes.View`.
    """

    def __init__(self, views):
        asked = [view.tower.context.asked for view in views]
        of_towers = [each.steps_and_before(view.tower.update_ops) for each, view in zip(asked, views) if each is not None]
        # The number of a step -> what stands for it in each tower, and all that runs before it in any.
        self._steps = [([done for done, _ in of_step], set().union(*[before for _, before in of_step]))
                       for of_step in zip(*of_towers)]
        self._behind = {done: descendants([done]) for dones, _ in self._steps for done in dones}

    def after(self, ops):
        """Returns what stands for those steps that run after any of some ops, a list."""
        return [done for dones, before in self._steps if not before.isdisjoint(ops) for done in dones]

    def numbers_before(self, op):
        """Returns the numbers of the steps that an op runs after, a tuple, alike in every tower."""
        return tuple(number for number, (dones, _) in enumerate(self._steps) if any(op in self._behind[done] for done in dones))

    def before(self, op):
        """Returns what stands for those steps that an op runs after, a tuple."""
        return tuple(done for done, behind in self._behind.items() if op in behind)
