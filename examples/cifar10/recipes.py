"""Recipes: how long to train, at which rate, and with how much weight decay.

`he` is that of He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2: 64k steps of 128
images. `cosine` takes about a third of its epochs.
"""
from typing import Callable, NamedTuple

from examples.training.schedule import cosine, two_drops

__all__ = ["RECIPES", "Recipe"]


class Recipe(NamedTuple):
    """What a training does unless the command line says otherwise.

    Attributes:
      what: str, a phrase for the help.
      epochs: int.
      learning_rate: float, the rate at its peak, for batches of 128.
      warmup_steps: int, the steps in which the rate rises to it.
      weight_decay: float.
      nesterov: whether the momentum is Nesterov's.
      decay: as for `schedule.learning_rate`.
    """
    what: str
    epochs: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    nesterov: bool
    decay: Callable


RECIPES = {
    "cosine": Recipe("after a warm-up the rate falls to zero as a cosine", 60, 0.1, 200, 5e-4, True, cosine),
    "he": Recipe("He et al.'s, whose rate falls to a tenth after half of the steps and once more after three quarters",
                 164, 0.1, 0, 1e-4, False, two_drops),
}
