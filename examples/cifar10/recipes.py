"""Recipes: how long to train, at which rate, and with how much weight decay.

`he` is that of He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2: 64k steps of 128
images. `cosine` takes about a third of its epochs.
"""
from typing import Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["RECIPES", "Recipe", "learning_rate"]


class Recipe(NamedTuple):
    """What a training does unless the command line says otherwise.

    Attributes:
      what: str, a phrase for the help.
      epochs: int.
      learning_rate: float, the rate at its peak, for batches of 128.
      warmup_steps: int, the steps in which the rate rises to it.
      weight_decay: float.
      nesterov: whether the momentum is Nesterov's.
      decay: function of how much of the training after the warm-up is done, float32 from 0 to 1, that returns the share of the
        peak that the rate then has.
    """
    what: str
    epochs: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    nesterov: bool
    decay: Callable


def _cosine(done):
    return 0.5 * (1 + tf.cos(np.pi * done))


def _two_drops(done):
    """A tenth after half, a hundredth after three quarters: 32k and 48k of the paper's 64k steps."""
    return tf.where(done < 0.5, tf.ones_like(done), tf.where(done < 0.75, 0.1 * tf.ones_like(done), 0.01 * tf.ones_like(done)))


RECIPES = {
    "cosine": Recipe("after a warm-up the rate falls to zero as a cosine", 60, 0.1, 200, 5e-4, True, _cosine),
    "he": Recipe("He et al.'s, whose rate falls to a tenth after half of the steps and once more after three quarters",
                 164, 0.1, 0, 1e-4, False, _two_drops),
}


def learning_rate(step, num_steps, peak, warmup_steps, decay=_cosine):
    """Rises linearly to `peak` in `warmup_steps`, at most a tenth of all, then follows `decay`.

    Args:
      step: integer tensor, the number of steps done.
      num_steps: int, of the whole training.
      peak: float.
      warmup_steps: int, none where it is 0.
      decay: as in a `Recipe`.

    Returns:
      A float32 tensor of the shape of `step`.
    """
    warmup = max(1.0, min(warmup_steps, num_steps / 10))
    step = tf.cast(step, tf.float32)
    done = tf.clip_by_value((step - warmup) / max(1.0, num_steps - warmup), 0.0, 1.0)
    return peak * tf.minimum((step + 1) / warmup, 1.0) * decay(done)
