"""Ends this process where the workers' common step can't go on, and says who is missing.

TensorFlow 1.15 gives collectives no time limit, and a session's limits don't cover what it does before the first op runs. So a
thread watches what this process is waiting in. A peer whose server refuses connections has died, which ends the wait at once;
when the time limit is over every peer is asked whether it answers. A gRPC server answers whoever begins an HTTP/2 connection; of
a process that was stopped the kernel accepts it, and nothing comes.
"""
import contextlib
import os
import socket
import sys
import threading
import time

__all__ = ["DEAD", "GONE", "SILENT", "Watchdog", "probe"]

GONE, SILENT, ALIVE = "has ended, or never began: nothing listens there", "does not answer: it is stopped, or hangs", None
DEAD = 70  # the exit status of a process that the watchdog ends, os.EX_SOFTWARE
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # of HTTP/2, with empty settings
_PATIENCE, _EVERY = 2.0, 1.0  # seconds
_MEND = ("All others answer (%s), so one of them comes to no such step: it ran out of data, runs other ops, or is slow. Run the "
         "same steps in every worker, or connect with a larger time_limit.")


def probe(address, patience=_PATIENCE):
    """Returns `ALIVE`, `GONE` or `SILENT`, what the gRPC server at "host:port" is found to be, within `patience` seconds."""
    host, _, port = address.rpartition(":")
    try:
        with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), patience)) as connection:
            if connection.getsockname() == connection.getpeername():  # as the kernel may choose where nobody listens
                return GONE
            connection.sendall(_HELLO)
            return ALIVE if connection.recv(1) else GONE
    except socket.timeout:
        return SILENT
    except OSError:  # refused, reset, no such host, no way to it
        return GONE


class Watchdog:
    """Watches the waits of this process for its peers.

    Args:
      cluster: `towers.workers.cluster.Cluster`.
      time_limit: float, seconds that a wait may take.
      end: a function of a sentence that ends the process.
      mend: str, what is wrong where all peers answer; "%s" in it is their names.
    """

    def __init__(self, cluster, time_limit, end=None, mend=_MEND):
        self.time_limit, self._mend = time_limit, mend
        self._cluster, self._end = cluster, end or _end_process
        self._peers = [rank for rank in range(cluster.size) if rank != cluster.rank]
        self._waiting = {}  # a wait's token -> (what for, since when)
        self._gone = {}  # rank -> how often in turn it was found gone
        self._changed = threading.Condition()
        self._thread = None

    @contextlib.contextmanager
    def waiting(self, what):
        """Watches for the duration of a `with` block, in which this process waits for its peers; `what` says in what."""
        if not self._peers:
            yield
            return
        token = object()
        with self._changed:
            self._waiting[token] = what, time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="towers.workers.watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._waiting[token]

    def _watch(self):
        while True:
            with self._changed:
                while not self._waiting:
                    self._gone.clear()
                    self._changed.wait()
                self._changed.wait(_EVERY)
                what, since = min(self._waiting.values(), key=lambda wait: wait[1]) if self._waiting else (None, None)
            if what is not None and time.monotonic() - since >= _EVERY:
                self._look(what, time.monotonic() - since)

    def _look(self, what, waited):
        over = waited > self.time_limit
        patience = min(_PATIENCE, max(self.time_limit / 4, 0.1))
        found = {rank: probe(self._cluster.addresses[rank], patience) for rank in self._peers}
        for rank, state in found.items():
            self._gone[rank] = self._gone.get(rank, 0) + 1 if state == GONE else 0
        missing = [rank for rank, state in found.items() if state is not ALIVE and (over or self._gone[rank] > 1)]
        with self._changed:
            if not any(waiting[0] == what for waiting in self._waiting.values()):  # it came to its end meanwhile
                return
        if missing:
            self._end_for_want_of(missing, found, what, waited)
        elif over:
            self._end("%s waited %.0f seconds in %s, the time limit. %s" % (
                self._cluster.describe(self._cluster.rank).capitalize(), waited, what,
                self._mend % ", ".join(self._cluster.describe(rank) for rank in self._peers)))

    def end_if_one_has_ended(self, what):
        """Ends the process where a wait failed because a peer has died."""
        began = time.monotonic()
        while time.monotonic() - began < _EVERY:  # it may be ending still
            found = {rank: probe(self._cluster.addresses[rank]) for rank in self._peers}
            gone = [rank for rank, state in found.items() if state == GONE]
            if gone:
                self._end_for_want_of(gone, found, what, time.monotonic() - began)
            time.sleep(_EVERY / 10)

    def _end_for_want_of(self, missing, found, what, waited):
        self._end("%s waited %.0f seconds in %s for %s, which %s. Start all workers again, from the last checkpoint." % (
            self._cluster.describe(self._cluster.rank).capitalize(), waited, what,
            " and ".join(self._cluster.describe(rank) for rank in missing), found[missing[0]]))


def _end_process(sentence):
    """Prints a sentence and ends the process; nothing can be cleaned up, since its main thread hangs in TensorFlow."""
    sys.stdout.flush()
    sys.stderr.write("error: %s\n" % sentence)
    sys.stderr.flush()
    os._exit(DEAD)
