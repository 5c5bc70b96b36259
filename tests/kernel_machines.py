"""Machines that kernels are chosen for: each strategy's own, so that all of them run in every lane."""
import contextlib
from unittest import mock

from tf_syncbn import whole_batch
from tf_syncbn.kernels import choose as choice
from tf_syncbn.kernels.choose import Machine

MACHINES = {"gpu": Machine("GPU", 2, False), "unknown": Machine(None, 2, False), "onednn": Machine("CPU", 2, True),
            "eigen of TensorFlow 1": Machine("CPU", 1, False), "eigen": Machine("CPU", 2, False)}


@contextlib.contextmanager
def running_on(name, small):
    """Lets layers choose the kernels of a machine, None for this one, for tensors that are small or large."""
    here = whole_batch.machine_of
    with mock.patch.object(whole_batch, "machine_of", lambda x, tower: MACHINES.get(name) or here(x, tower)):
        with mock.patch.object(choice, "is_small", lambda *_: small):
            yield
