"""From losses to a training step: gradients, what is done with them, many steps a call."""
