"""What stands in a turn of a loop over the examples, of Python's own or of TensorFlow's, and is of one example."""
