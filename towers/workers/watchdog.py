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
_PATIENCE, _GLANCE, _EVERY = 2.0, 0.3, 1.0  # seconds
_MEND = ("All others answer (%s), so one of them comes to no such step: it ran out of data, runs other ops, or is slow. Run the "
         "same steps in every worker, or connect with a larger time_limit.")
_FEWER_STEPS = " If it ended without an error, its data were fewer: give every worker as many steps first."


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
        self._patience = min(_PATIENCE, max(time_limit / 4, 0.1))
        self._cluster, self._end = cluster, end or _end_process
        self._peers = [rank for rank in range(cluster.size) if rank != cluster.rank]
        self._waits = []  # that have not come to their end, the oldest first
        self._gone = {}  # rank -> how often in turn it was found gone
        self._changed = threading.Condition()
        self._thread = None

    @contextlib.contextmanager
    def waiting(self, what, place=None):
        """Watches for the duration of a `with` block, in which this process waits for its peers.

        Args:
          what: str, in what it waits.
          place: optional function that may know it better: it returns a str, or None. It may hang.

        Yields:
          The wait, for `end_if_one_has_ended`.
        """
        wait = _Wait(what, place)
        if not self._peers:
            yield wait
            return
        with self._changed:
            self._waits.append(wait)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="towers.workers.watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield wait
        finally:
            with self._changed:
                self._waits.remove(wait)

    def _watch(self):
        looked = 0.0
        while True:
            with self._changed:
                while not self._waits:
                    self._gone.clear()
                    self._changed.wait()
                wait = self._waits[0]
                last = wait.since + self.time_limit - self._patience  # so that what is said then is said within the limit
                self._changed.wait(min(_EVERY, max(last - time.monotonic(), 0.0)))
                if wait not in self._waits:
                    continue
            if time.monotonic() >= last:
                self._look_for_the_last_time(wait)
            elif time.monotonic() - max(wait.since, looked) >= _EVERY:
                self._look(wait)
                looked = time.monotonic()

    def _look(self, wait):
        found = self._probe(_GLANCE)
        for rank, state in found.items():
            self._gone[rank] = self._gone.get(rank, 0) + 1 if state == GONE else 0
        gone = [rank for rank in self._peers if self._gone[rank] > 1]
        if gone:
            self._end_unless_it_is_over(wait, self._for_want_of(gone, found))

    def _look_for_the_last_time(self, wait):
        found = self._probe(self._patience)
        time.sleep(max(wait.since + self.time_limit - time.monotonic(), 0.0))
        missing = [rank for rank, state in found.items() if state is not ALIVE]
        if missing:
            self._end_unless_it_is_over(wait, self._for_want_of(missing, found))
        else:
            names = ", ".join(self._cluster.describe(rank) for rank in self._peers)
            self._end_unless_it_is_over(wait, ", the time limit. " + self._mend % names)

    def _probe(self, patience):
        addresses = [self._cluster.addresses[rank] for rank in self._peers]
        return dict(zip(self._peers, _at_once([lambda a=address: probe(a, patience) for address in addresses], patience, SILENT)))

    def end_if_one_has_ended(self, wait):
        """Ends the process where a wait failed because a peer has died."""
        began = time.monotonic()
        while time.monotonic() - began < _EVERY:  # it may be ending still
            found = self._probe(_PATIENCE)
            gone = [rank for rank, state in found.items() if state == GONE]
            if gone:
                self._end(self._sentence(wait, self._for_want_of(gone, found)))
            time.sleep(_EVERY / 10)

    def _for_want_of(self, missing, found):
        fewer = _FEWER_STEPS if found[missing[0]] == GONE and self._cluster.rank is not None else ""
        return " for %s, which %s. Start all workers again, from the last checkpoint.%s" % (
            " and ".join(self._cluster.describe(rank) for rank in missing), found[missing[0]], fewer)

    def _end_unless_it_is_over(self, wait, how):
        sentence = self._sentence(wait, how)
        with self._changed:
            if wait in self._waits:
                self._end(sentence)

    def _sentence(self, wait, how):
        waited = time.monotonic() - wait.since
        return "%s waited %.0f seconds in %s%s" % (
            self._cluster.describe(self._cluster.rank).capitalize(), waited, wait.words(), how)


class _Wait:

    def __init__(self, what, place):
        self.since, self._what, self._place = time.monotonic(), what, place

    def words(self):
        """Returns in what the process waits."""
        return _at_once([self._place], _GLANCE, None)[0] or self._what if self._place else self._what


def _at_once(calls, patience, otherwise):
    """Returns what functions return that are called at once, each in a thread; `otherwise` for one that needs longer."""
    results = [otherwise] * len(calls)

    def call(i):
        results[i] = calls[i]()

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return list(results)


def _end_process(sentence):
    """Prints a sentence and ends the process; nothing can be cleaned up, since its main thread hangs in TensorFlow."""
    sys.stdout.flush()
    sys.stderr.write("error: %s\n" % sentence)
    sys.stderr.flush()
    os._exit(DEAD)
