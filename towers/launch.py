"""Starts workers on this machine, for `towers.workers.connect()` to find each other.

    python -m towers.launch -n 2 script.py --its arguments
    python -m towers.launch -n 2 --restarts 3 -m package.module --its arguments

What ends in .py, and what -m names, runs under this Python; any other command runs as it is. Each worker finds in TF_CONFIG who
the others are, prints by whole lines with its number before them, and has a session of its own, so that what it starts ends with
it. When one ends with an error all are stopped. Only processes are looked after here: what a worker waits for it watches itself.
"""
import argparse
import ctypes
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import List, Optional, Sequence

__all__ = ["free_ports", "launch", "main"]

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WITH_VALUE = ("-n", "--num-workers", "--restarts", "--time-limit", "--grace")
_CANT_BE_DONE = 2  # the exit status of a bad command line, which no restart mends
_TIME_LIMIT, _GRACE, _EVERY = 300.0, 10.0, 0.05  # seconds
_WAITED_IN_VAIN = 70  # the status of a worker that waited for another one, as towers.workers.watchdog has it
_PR_SET_PDEATHSIG = 1  # of Linux' prctl


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command line and returns the exit status: 0, that of the first worker that failed, 128 + signal, or 2."""
    settings, command = _parse(sys.argv[1:] if argv is None else list(argv))
    return launch(command, settings.num_workers, settings.restarts, settings.time_limit, settings.grace)


def launch(command: Sequence[str], num_workers: int, restarts: int = 0, time_limit: Optional[float] = None,
           grace: float = _GRACE) -> int:
    """Runs workers until all have ended. To be called in the main thread: it handles SIGINT, SIGTERM and SIGHUP, which go to all.

    Args:
      command: list of str, the program and its arguments.
      num_workers: int.
      restarts: int, how often all start again after one failed; never after status 2, nor after a signal to this process.
      time_limit: float, seconds, the default of `connect(time_limit=)` in the workers; None leaves it to them.
      grace: float, seconds between SIGTERM and SIGKILL. After a first signal to this process workers have the time limit to
        save what they did, after a second one the grace.

    Returns:
      0 where all workers ended so, else the status of the first that failed; 128 + signal for one that a signal killed.
    """
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if time_limit is not None:
        environment["TOWERS_TIME_LIMIT"] = repr(time_limit)
    with _Signals() as signals:
        while True:
            if signals.count:
                return 128 + signals.last
            with _Workers(command, num_workers, environment) as workers:
                failed = workers.watch(signals, time_limit or _TIME_LIMIT, grace)
            if workers.output_error:
                _say("the workers were stopped, since their output can't be written: %s" % workers.output_error)
                return 1
            if failed is None:
                return 0
            rank, status, why = failed
            if signals.count or status == _CANT_BE_DONE or not restarts:
                _say(_how_it_ended(rank, status) + why)
                return 128 - status if status < 0 else status
            restarts -= 1
            _say("%s; starting all again, %d restart%s left" % (
                _how_it_ended(rank, status) + why, restarts, "" if restarts == 1 else "s"))


def _parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m towers.launch", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m towers.launch -n N [options] [--] (script.py | -m module | program) [its arguments]",
        description=__doc__.split("\n\n")[0])
    parser.add_argument("-n", "--num-workers", type=_at_least(1, int), required=True, metavar="N", help="how many workers")
    parser.add_argument("--restarts", type=_at_least(0, int), default=0, metavar="K",
                        help="after a failure all start again, at most K times (default 0)")
    parser.add_argument("--time-limit", type=_at_least(0.001, float), metavar="S",
                        help="seconds that a worker waits for the others (default %d)" % _TIME_LIMIT)
    parser.add_argument("--grace", type=_at_least(0, float), default=_GRACE, metavar="S",
                        help="seconds from SIGTERM to SIGKILL when workers are stopped (default %d)" % _GRACE)
    ours = 0
    while ours < len(argv) and argv[ours].startswith("-") and argv[ours] not in ("--", "-m"):
        ours += 2 if argv[ours] in _WITH_VALUE else 1
    settings, command = parser.parse_args(argv[:ours]), argv[ours + (argv[ours:ours + 1] == ["--"]):]
    if not command or command[0] == "-m" and len(command) < 2:
        parser.error("what is to run? Name a script, -m and a module, or a program.")
    if command[0] == "-m":
        if not _is_there(command[1]):
            parser.error("there is no module %s." % command[1])
        return settings, [sys.executable] + command
    if command[0].endswith(".py"):
        if not os.path.isfile(command[0]):
            parser.error("there is no script %s." % command[0])
        return settings, [sys.executable] + command
    if not shutil.which(command[0]):
        parser.error("there is no program %s: a script ends in .py, and -m goes before a module." % command[0])
    return settings, command


def _is_there(module):
    """Tells whether a module's package can be found, where workers look for it; nothing of it is imported."""
    usual, own = sys.path, os.path.dirname(os.path.abspath(__file__))  # where to look, too, if this program runs as a file
    sys.path = [os.getcwd()] + [folder for folder in usual if folder != own]
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except ValueError:  # an empty name, or __main__
        return False
    finally:
        sys.path = usual


def _at_least(least, kind):
    def number(text):
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError("%s is less than %g, or no number" % (text, least))
        return value
    number.__name__ = kind.__name__  # argparse names it where the text is no number
    return number


class _Signals:
    """Notes signals instead of dying of them, for the duration of a `with` block.

    Attributes:
      count: int, how many came.
      last: int, the number of the last one.
    """

    def __enter__(self):
        self.count, self.last, self._new, self._usual = 0, None, [], {}
        for number in _FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
                self._usual[number] = signal.signal(number, self._note)
        return self

    def _note(self, number, _):
        self.count, self.last = self.count + 1, number
        self._new.append(number)

    def take(self):
        """Returns the signals that came since it was last called."""
        taken, self._new = self._new, []
        return taken

    def __exit__(self, *_):
        for number, handler in self._usual.items():
            signal.signal(number, handler)


class _Workers:
    """The processes of one start, for the duration of a `with` block; none is left behind it.

    Attributes:
      output_error: the OSError because of which output was lost, or None.
    """

    def __init__(self, command, size, environment):
        self._command, self._size, self._environment = command, size, environment
        self._processes, self._readers, self._lock = [], [], threading.Lock()
        self.output_error = None

    def __enter__(self):
        addresses = ["localhost:%d" % port for port in free_ports(self._size)]
        try:
            for rank in range(self._size):
                self._start(rank, addresses)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, rank, addresses):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        process = subprocess.Popen(
            self._command, env=dict(self._environment, TF_CONFIG=json.dumps(config)), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=_die_with_parent())
        self._processes.append(process)
        for pipe, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            self._readers.append(threading.Thread(target=self._copy_lines, args=(pipe, out, rank), daemon=True))
            self._readers[-1].start()

    def _copy_lines(self, pipe, out, rank):
        prefix = b"[%d] " % rank
        with pipe:
            for line in pipe:  # to the end even where it can't be written: a full pipe would stop the worker
                try:
                    with self._lock:
                        out.buffer.write(prefix + line + (b"" if line.endswith(b"\n") else b"\n"))
                        out.buffer.flush()
                except (OSError, ValueError) as error:
                    self.output_error = error

    def watch(self, signals, time_limit, grace):
        """Waits until all have ended.

        Returns:
          None, or the first that failed: (rank, status, negative for a signal, words that say for whom it waited).
        """
        failed, deadline = None, float("inf")
        while True:
            statuses = [process.poll() for process in self._processes]
            if failed is None and any(statuses):
                rank = _cause(statuses)
                failed = rank, statuses[rank], self._awaited(rank, statuses[rank], statuses)
            if None not in statuses:
                return failed
            for number in signals.take():
                # A second SIGTERM would break off what the first one made a worker save.
                deadline = min(deadline, time.monotonic() + (time_limit if signals.count == 1 else grace))
                self._signal(number)
            if (failed or self.output_error) and deadline == float("inf"):
                deadline = time.monotonic() + grace
                self._signal(signal.SIGTERM)
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            time.sleep(_EVERY)

    def _awaited(self, waiting, status, statuses):
        """Returns words that say for whom a worker waited in vain, none where it ended otherwise."""
        if status != _WAITED_IN_VAIN or self._size == 1:
            return ""
        stopped = [rank for rank, process in enumerate(self._processes) if statuses[rank] is None and _is_stopped(process)]
        ended = [rank for rank, other in enumerate(statuses) if other == 0]
        if stopped:
            return ": it waited for worker %s, which is stopped" % _listed(stopped)
        if ended:
            return (": it waited for worker %s, which had ended without an error: its data were fewer, or it took fewer steps"
                    % _listed(ended))
        return ": it waited for another worker in vain"

    def _signal(self, number):
        for process in self._processes:
            if process.poll() is None:
                _signal_group(process, number)
                _signal_group(process, signal.SIGCONT)  # what is stopped can't follow

    def __exit__(self, *_):
        for process in self._processes:
            _signal_group(process, signal.SIGKILL)  # what it started, and itself
            process.wait()
        for reader in self._readers:
            reader.join(5.0)  # a process that left the session may keep the pipe open


def _cause(statuses):
    """Returns which of several workers that have failed by now did so first, an int.

    One that waited in vain did so for another, and one that was killed got no word of others.
    """
    failed = [rank for rank, status in enumerate(statuses) if status]
    return min(failed, key=lambda rank: (statuses[rank] == _WAITED_IN_VAIN, statuses[rank] > 0, rank))


def _signal_group(process, number):
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # all of it has ended; macOS says it so
        pass


def _is_stopped(process):
    if not hasattr(os, "waitid"):  # macOS
        return False
    try:
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended meanwhile
        return False


def _listed(ranks):
    return " and ".join(map(str, ranks))


def _die_with_parent():
    """Returns what a worker calls before its program starts: it is killed when this process is, on Linux; elsewhere None."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def before_exec():
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before
            os._exit(1)
    return before_exec


def free_ports(count: int) -> List[int]:
    """Returns ports that nobody listens on, and that no outgoing connection is given either, as it may be while workers start."""
    first, last = _outgoing_ports()
    candidates = [port for port in range(10000, 65536) if not first <= port <= last]
    found: List[int] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(found) == count:
            break
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
            try:
                bound.bind(("", port))
            except OSError:
                continue
        found.append(port)
    return found


def _outgoing_ports():
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
            first, last = map(int, f.read().split())
    except (OSError, ValueError):
        first, last = 32768, 65535
    return (first, last) if first > 12000 or last < 63000 else (32768, 65535)  # where that leaves none


def _how_it_ended(rank, status):
    if status >= 0:
        return "worker %d ended with status %d" % (rank, status)
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = "signal %d" % -status
    return "worker %d was killed by %s" % (rank, name)


def _say(line):
    try:
        sys.stderr.write("towers.launch: %s\n" % line)
        sys.stderr.flush()
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
