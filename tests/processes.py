"""Worker processes on loopback, for tests: started, ended whatever happens, and what they said.

Importing TensorFlow takes a processor for seconds, so one process does, and those of the workers are its forks: of TensorFlow's
runtime an import starts nothing.
"""
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from towers.launch import free_ports

ROOT = str(Path(__file__).parent.parent)
# Imports by `preamble`, and forks a process for each program.
_FORKS = """
import json, os, sys
preamble, programs, outputs = json.load(sys.stdin)
exec(preamble, {})
pids = []
for (source, environment, sys.argv[1:]), output in zip(programs, outputs):
    pid = os.fork()
    if not pid:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        exec(compile(source, "worker", "exec"), {"__name__": "__main__"})
        sys.exit()
    pids.append(pid)
print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]))
"""


def cluster(count):
    """Returns a TF_CONFIG for each of `count` workers on this machine, dicts."""
    addresses = ["localhost:%d" % port for port in free_ports(count)]
    return [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}} for i in range(count)]


def run_forks(preamble, programs, timeout=300):
    """Runs programs at once, each in a process of its own; returns a list over these of (exit status, output).

    Args:
      preamble: str, Python that imports what takes long.
      programs: list of (source, str; environment variables, a dict; arguments, a list).
      timeout: float, seconds after which all are killed, and the test fails.
    """
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in programs]
        numbers = [output.fileno() for output in outputs]
        process = subprocess.Popen([sys.executable, "-c", _FORKS], cwd=ROOT, env=dict(os.environ, PYTHONPATH=ROOT),
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=numbers, start_new_session=True,
                                   universal_newlines=True)
        said = ""
        try:
            said, _ = process.communicate(json.dumps([preamble, programs, numbers], default=str), timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            written = [output.seek(0) or output.read() for output in outputs]
            if not said:
                print("\n".join(written))
        return list(zip([status >> 8 or -(status & 127) for status in json.loads(said.splitlines()[-1])], written))


def run_workers(count, program, *arguments, timeout=300):
    """Runs a function of tests/worker_programs.py in `count` workers; returns a list over workers of (exit status, output)."""
    return run_in(cluster(count), program, *arguments, timeout=timeout)


def run_in(configs, program, *arguments, timeout=300):
    """As `run_workers`, of a list of TF_CONFIGs, dicts."""
    return run_forks("import tests.worker_programs", [
        ("from tests import worker_programs; worker_programs.main()", {"TF_CONFIG": json.dumps(config)}, (program,) + arguments)
        for config in configs], timeout)
