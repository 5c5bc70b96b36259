"""The rate of a training over its steps."""
import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["cosine", "learning_rate", "poly", "two_drops"]


def cosine(done):
    """To zero, as half a cosine."""
    return 0.5 * (1 + tf.cos(np.pi * done))


def poly(done):
    """To zero, nearly on a line: Chen et al., "DeepLab" (2017), section 4.1; Zhao et al., "PSPNet" (2017), section 5.1."""
    return (1 - done) ** 0.9


def two_drops(done):
    """A tenth after half, a hundredth after three quarters: 32k and 48k of the 64k steps of He et al. (2015)."""
    return tf.where(done < 0.5, tf.ones_like(done), tf.where(done < 0.75, 0.1 * tf.ones_like(done), 0.01 * tf.ones_like(done)))


def learning_rate(step, num_steps, peak, warmup_steps, decay=cosine):
    """Rises linearly to `peak` in `warmup_steps`, at most a tenth of all, then follows `decay`.

    Args:
      step: integer tensor, the number of steps done.
      num_steps: int, of the whole training.
      peak: float.
      warmup_steps: int, none where it is 0.
      decay: function of how much of the training after the warm-up is done, float32 from 0 to 1, that returns the share of the
        peak that the rate then has.

    Returns:
      A float32 tensor of the shape of `step`.
    """
    warmup = max(1.0, min(warmup_steps, num_steps / 10))
    step = tf.cast(step, tf.float32)
    done = tf.clip_by_value((step - warmup) / max(1.0, num_steps - warmup), 0.0, 1.0)
    return peak * tf.minimum((step + 1) / warmup, 1.0) * decay(done)
