"""The version of towers and tf_syncbn, in a file that needs no TensorFlow to read."""
__version__ = "0.1.0"
