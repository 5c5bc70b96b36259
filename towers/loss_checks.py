"""What is said, while towers are built, of losses whose average over towers is not the loss of the whole batch."""
from towers.along_examples import Examples
from towers.first_axis import sizes_of_examples
from towers.inlined import with_functions_inlined
from towers.inner_gradients import warn_of_inner_gradients
from towers.mixed_losses import warn_of_mixed
from towers.number_powers import warn_of_powers
from towers.positions import warn_of_positions
from towers.summed_losses import warn_of_sums

__all__ = ["warn_of_losses"]


def warn_of_losses(losses, towers, is_divided=False, stacklevel=3):
    """Warns where a tower's loss takes its examples by their place, by gradients of their own, together, or adds them up.

    Args:
      losses: list over towers of scalar tensors.
      towers: list of `Tower`.
      is_divided: bool, whether the caller divided the batch.
      stacklevel: int, as of `warnings.warn`.
    """
    if towers[0].context.num_towers == 1:
        return
    # Of one example nothing is added up, and its axis is as any other of size 1: a tower of several is looked at.
    losses, towers = zip(*sorted(zip(losses, towers), key=lambda of_tower: 1 in sizes_of_examples(of_tower[1:])))
    warn_of_inner_gradients(losses, towers, Examples(towers), stacklevel + 1)
    losses, towers = with_functions_inlined(losses, towers)
    examples = Examples(towers)
    warn_of_positions(losses, towers, examples, is_divided, stacklevel + 1)
    of_losses = losses, towers, examples, stacklevel + 1
    if not warn_of_mixed(*of_losses) and not warn_of_sums(*of_losses):
        warn_of_powers(*of_losses)
