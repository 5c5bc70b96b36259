"""Keras 3 inside a model function: what fails there, and whose ops nothing runs, is said with the cure.

From TensorFlow 2.16 on `tf.keras` is Keras 3, which has no `tf.layers`, takes no tensor where it wants a bool and keeps no
update ops, so its batch norms' averages never move in a graph. Keras 2 is a package of its own, and has to be chosen by the
user before TensorFlow is imported.
"""
import contextlib
import os
import sys

__all__ = ["CURE", "explained", "made_by_keras3"]

CURE = ("Keras 3 is not made for TensorFlow 1 graphs. For Keras 2 and tf.layers install tf-keras and set TF_USE_LEGACY_KERAS=1 "
        "in the environment before TensorFlow is imported.")


@contextlib.contextmanager
def explained(tower):
    """Raises RuntimeError, with the cure and from the original error, where the `with` block fails in Keras 3.

    Args:
      tower: int, the number of the tower whose model function runs.
    """
    try:
        yield
    except Exception as error:
        if not _fails_in_keras3(error):
            raise
        raise RuntimeError("The model function of tower %d fails in Keras 3: %s: %s. %s" % (
            tower, type(error).__name__, str(error).strip().rstrip("."), CURE)) from error


def made_by_keras3(op):
    """Tells whether Keras 3 called what made an op."""
    folder = _folder_of_keras3()
    return folder is not None and any(frame[0].startswith(folder) for frame in op.traceback)


def _fails_in_keras3(error):
    if "not available with Keras 3" in str(error):  # TensorFlow's own words for tf.layers
        return True
    folder, owner = _folder_of_keras3(), getattr(error, "obj", None)  # whose attribute is missing
    if folder is None:
        return False
    files, trace = [], error.__traceback__
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    ours = os.path.abspath(os.path.join(__file__, "..", "..", "..")) + os.sep
    if files[-1].startswith(tuple(ours + package + os.sep for package in ("towers", "tf_syncbn"))):
        return False
    owner = getattr(owner, "__name__", type(owner).__module__)  # a module's name, or where an object's class stands
    return any(name.startswith(folder) for name in files) or owner.split(".")[0] == "keras"


def _folder_of_keras3():
    keras = sys.modules.get("keras")
    if getattr(keras, "__version__", "").startswith("3.") and getattr(keras, "__file__", None):
        return os.path.dirname(keras.__file__) + os.sep
    return None
