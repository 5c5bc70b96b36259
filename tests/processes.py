"""Worker processes on loopback, for tests: started, ended whatever happens, and what they said."""
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from towers.launch import free_ports

ROOT = str(Path(__file__).parent.parent)


def cluster(count):
    """Returns a TF_CONFIG for each of `count` workers on this machine, dicts."""
    addresses = ["localhost:%d" % port for port in free_ports(count)]
    return [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}} for i in range(count)]


@contextlib.contextmanager
def started(configs, program, *arguments):
    """Starts `python -m tests.worker_programs program arguments` for each TF_CONFIG; kills what is left at the end."""
    processes = []
    try:
        for config in configs:
            environment = dict(os.environ, TF_CONFIG=config if isinstance(config, str) else json.dumps(config), PYTHONPATH=ROOT)
            processes.append(subprocess.Popen(
                [sys.executable, "-m", "tests.worker_programs", program] + [str(argument) for argument in arguments], cwd=ROOT,
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def run_workers(count, program, *arguments, timeout=150):
    """Runs a program in `count` workers; returns a list over workers of (exit status, output)."""
    with started(cluster(count), program, *arguments) as processes:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs)]
