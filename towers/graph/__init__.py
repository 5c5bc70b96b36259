"""TensorFlow's graph: walks, order, copies, hooks on gradients, and the private calls, all in one file."""
