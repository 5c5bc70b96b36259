"""The launcher: what workers are told, how they are stopped and started again, and that none is left.

The scripts that it starts import no TensorFlow.
"""
import json
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import towers
from towers import launch
from towers.workers import connection, watchdog

ROOT = Path(__file__).parents[2]
RANK = "import json, os, signal, sys, time\nrank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
FOREVER = "while True:\n    time.sleep(60)\n"


@pytest.fixture
def script(tmp_path):
    """A function that writes a script, which knows its worker's number as `rank`, and returns its path."""
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(RANK + text)
        return str(path)
    return write


def start(*arguments):
    """Starts the launcher in a process of its own: as a file, which imports no TensorFlow."""
    return subprocess.Popen([sys.executable, str(ROOT / "towers" / "launch.py")] + list(arguments), stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, universal_newlines=True)


def wait_for(condition, seconds=20):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path("/proc/%d/stat" % pid).read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(folder, count):
    """Waits for as many files "pid.*" as `count`, and returns what they hold."""
    wait_for(lambda: len([path for path in folder.glob("pid.*") if path.read_text()]) == count)
    return [int(path.read_text()) for path in sorted(folder.glob("pid.*"))]


def saying_its_pid(folder):
    return "open(%r %% rank, 'w').write(str(os.getpid()))\n" % (str(folder) + "/pid.%d")


def test_workers_are_told_who_they_are_and_get_their_arguments(script, capfd):
    path = script("print(os.environ['TF_CONFIG'], sys.argv[1:], os.environ['TOWERS_TIME_LIMIT'], os.environ['PYTHONUNBUFFERED'])")
    assert launch.main(["-n", "3", "--time-limit", "7", path, "-n", "--restarts", "x"]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    clusters = []
    for rank, line in enumerate(lines):
        text, _, rest = line[len("[%d] " % rank):].partition("}} ")
        config = json.loads(text + "}}")
        assert line.startswith("[%d] " % rank) and config["task"] == {"type": "worker", "index": rank}
        assert rest == "['-n', '--restarts', 'x'] 7.0 1"
        clusters.append(config["cluster"]["worker"])
    assert clusters[0] == clusters[1] == clusters[2] and len(set(clusters[0])) == 3
    assert all(address.startswith("localhost:") for address in clusters[0])


def test_ports_are_free_and_given_to_no_outgoing_connection():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = launch.free_ports(50)
    assert len(set(ports)) == 50 and not [port for port in ports if first <= port <= last]
    for port in ports:
        with socket.socket() as bound:
            bound.bind(("", port))


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_modules_and_programs_run_too(dashes, capfd):
    assert launch.main(["--num-workers=2"] + dashes + ["-m", "platform", "--terse"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 2
    assert launch.main(["-n", "1"] + dashes + ["echo", "-m", "x.py"]) == 0
    assert capfd.readouterr().out == "[0] -m x.py\n"


def test_output_comes_at_once_by_whole_lines_and_errors_as_errors(script):
    path = script("""
for i in range(300):
    sys.stdout.write("out %d " % i)
    sys.stdout.flush()
    sys.stdout.write("end\\n")
    sys.stderr.write("err %d end\\n" % i)
print("first")
time.sleep(1)
print("last, without an end of line", end="")
""")
    process = start("-n", "2", path)
    began = time.time()
    for line in process.stdout:
        if line == "[1] first\n":
            first = time.time()
            break
    out, err = process.communicate()
    assert process.returncode == 0 and time.time() - first > 0.5 and first - began < 10
    assert err.splitlines().count("[0] err 7 end") == err.splitlines().count("[1] err 299 end") == 1
    assert len(err.splitlines()) == 600 and all(line.endswith(" end") for line in err.splitlines())
    assert {"[0] last, without an end of line", "[1] last, without an end of line"} <= set(out.splitlines())


def test_when_one_fails_all_are_stopped_and_its_status_is_the_launchers(script, tmp_path, capfd):
    path = script(saying_its_pid(tmp_path) + "if rank == 1: time.sleep(0.3); sys.exit(7)\n" + FOREVER)
    began = time.time()
    assert launch.main(["-n", "3", path]) == 7
    assert time.time() - began < 8  # by SIGTERM, before the grace is over
    assert capfd.readouterr().err == "towers.launch: worker 1 ended with status 7\n"
    assert not [pid for pid in pids(tmp_path, 3) if is_alive(pid)]


@pytest.mark.parametrize("statuses,rank", [
    ([None, 0, 7], 2), ([70, -9, None], 1), ([1, 70, -9], 2), ([70, 1], 1), ([None, 70], 1), ([70, 70], 0)])
def test_of_several_that_have_failed_the_one_is_named_that_the_others_failed_for(statuses, rank):
    assert launch._cause(statuses) == rank


def test_one_that_ignores_sigterm_ends_too(script, tmp_path):
    path = script(saying_its_pid(tmp_path) + "if rank == 1: time.sleep(0.5); sys.exit(7)\n"
                  "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER)
    began = time.time()
    assert launch.main(["-n", "2", "--grace", "0.5", path]) == 7
    assert 0.9 < time.time() - began < 8
    assert not [pid for pid in pids(tmp_path, 2) if is_alive(pid)]


@pytest.mark.parametrize("other,words", [
    ("os.kill(os.getpid(), signal.SIGSTOP)", "which is stopped"),
    ("sys.exit(0)", "which had ended without an error: its data were fewer, or it took fewer steps"),
    (FOREVER, None)])
def test_of_one_that_waited_in_vain_it_is_said_for_whom_and_what_is_stopped_ends_at_once(script, tmp_path, capfd, other, words):
    began = time.time()
    path = script(saying_its_pid(tmp_path) + "if rank == 0: time.sleep(0.5); sys.exit(%d)\n%s\n" % (watchdog.DEAD, other))
    assert launch.main(["-n", "2", path]) == 70
    assert time.time() - began < 8
    assert capfd.readouterr().err == "towers.launch: worker 0 ended with status 70: it waited for %s\n" % (
        "worker 1, " + words if words else "another worker in vain")
    assert not [pid for pid in pids(tmp_path, 2) if is_alive(pid)]


def test_one_that_ends_well_leaves_the_others_to_go_on(script, capfd):
    assert launch.main(["-n", "2", script("time.sleep(rank)\nprint('done')")]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] done", "[1] done"]


def test_status_of_a_killed_worker_is_128_and_the_signal(script, capfd):
    assert launch.main(["-n", "1", script("os.kill(os.getpid(), signal.SIGKILL)")]) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "towers.launch: worker 0 was killed by SIGKILL\n"


def test_after_a_failure_all_start_again_on_new_ports_as_often_as_asked(script, tmp_path, capfd):
    path = script("""
open(%r, "a").write(os.environ["TF_CONFIG"] + "\\n")
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
""" % str(tmp_path / "starts") + FOREVER)
    assert launch.main(["-n", "2", "--restarts", "2", path]) == 128 + signal.SIGKILL
    assert capfd.readouterr().err.splitlines() == [
        "towers.launch: worker 1 was killed by SIGKILL; starting all again, 1 restart left",
        "towers.launch: worker 1 was killed by SIGKILL; starting all again, 0 restarts left",
        "towers.launch: worker 1 was killed by SIGKILL"]
    starts = [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]
    assert [start["task"]["index"] for start in starts].count(1) == 3
    assert len({str(start["cluster"]) for start in starts}) == 3


def test_restarted_workers_that_end_well_are_a_success(script, tmp_path, capfd):
    path = script("path = %r + str(rank)\nif not os.path.exists(path): open(path, 'w'); sys.exit(70)\n" % str(tmp_path / "was"))
    assert launch.main(["-n", "1", "--restarts", "5", path]) == 0
    assert "worker 0 ended with status 70; starting all again, 4 restarts left" in capfd.readouterr().err


def test_what_can_not_be_done_is_not_tried_again(script, capfd):
    assert launch.main(["-n", "2", "--restarts", "5", script("sys.exit(2)")]) == 2
    assert "starting all again" not in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_all_once_and_they_may_take_their_time(script, tmp_path, number):
    path = script("""
def note(number, _):
    print("got", number)
    if rank == 1:
        sys.exit(128 + number)
    time.sleep(0.7)
    print("saved")
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
""" + saying_its_pid(tmp_path) + FOREVER)
    process = start("-n", "2", "--restarts", "5", "--grace", "0.2", path)
    workers = pids(tmp_path, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert sorted(out.splitlines()) == ["[0] got %d" % number, "[0] saved", "[1] got %d" % number]
    assert "starting all again" not in err and not [pid for pid in workers if is_alive(pid)]


def test_a_second_signal_ends_them_within_the_grace(script, tmp_path):
    path = script("signal.signal(signal.SIGINT, lambda *_: print('got'))\n" + saying_its_pid(tmp_path) + FOREVER)
    process = start("-n", "2", "--grace", "0.3", path)
    pids(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL and out.count("got") == 4


def test_after_a_signal_they_have_the_time_limit(script, tmp_path):
    path = script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + saying_its_pid(tmp_path) + FOREVER)
    process = start("-n", "2", "--time-limit", "0.5", path)
    workers = pids(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=8)
    assert process.returncode == 128 + signal.SIGKILL and not [pid for pid in workers if is_alive(pid)]


def test_workers_die_with_a_launcher_that_is_killed(script, tmp_path):
    process = start("-n", "2", script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + saying_its_pid(tmp_path) + FOREVER))
    workers = pids(tmp_path, 2)
    process.kill()
    wait_for(lambda: not [pid for pid in workers if is_alive(pid)])
    process.communicate()


def test_what_workers_started_ends_with_them(script, tmp_path):
    path = script("import subprocess\nstarted = subprocess.Popen(['sleep', '300'])\n"
                  "open(%r, 'w').write(str(started.pid))\n" % str(tmp_path / "pid.0"))
    began = time.time()
    assert launch.main(["-n", "1", path]) == 0
    assert time.time() - began < 8
    wait_for(lambda: not is_alive(*pids(tmp_path, 1)))  # it is killed, which nobody but init may wait for


def test_output_that_can_not_be_written_stops_the_workers(script, tmp_path):
    path = script(saying_its_pid(tmp_path) + "while not os.path.exists(%r):\n    time.sleep(0.05)\n"
                  "while True:\n    print('line')\n    time.sleep(0.05)\n" % str(tmp_path / "pid.1"))
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([sys.executable, str(ROOT / "towers" / "launch.py"), "-n", "2", path], stdout=full,
                                   stderr=subprocess.PIPE, universal_newlines=True)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the workers were stopped, since their output can't be written: [Errno 28] No space left on device" in err
    assert "Traceback" not in err and not [pid for pid in pids(tmp_path, 2) if is_alive(pid)]


def test_a_module_is_looked_for_where_workers_find_it_and_not_imported(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "__init__.py").write_text("print('imported')")
    (tmp_path / "beside" / "train.py").write_text("print('trained')")
    path = list(sys.path)
    assert launch.main(["-n", "1", "-m", "beside.train"]) == 0
    assert capfd.readouterr().out == "[0] imported\n[0] trained\n"  # by the worker alone
    assert sys.path == path and "beside" not in sys.modules
    process = start("-n", "1", "-m", "sums")  # what stands beside the launcher's own file is no worker's
    assert "there is no module sums." in process.communicate(timeout=20)[1] and process.returncode == 2


@pytest.mark.parametrize("arguments,message", [
    ([], "-n/--num-workers"), (["-n", "2"], "what is to run? Name a script, -m and a module, or a program"),
    (["-n", "2", "-m"], "what is to run?"), (["-n", "0", "true"], "0 is less than 1"), (["-n", "two", "true"], "two"),
    (["-n", "1", "--restarts", "-1", "true"], "-1 is less than 0"), (["-n", "1", "--time-limit", "nan", "true"], "or no number"),
    (["-n", "1", "--grace", "inf", "true"], "or no number"), (["-n", "1", "--restart", "1", "true"], "--restart"),
    (["-n", "1", "absent.py"], "there is no script absent.py"),
    (["-n", "1", "absent"], "there is no program absent: a script ends in .py, and -m goes before a module"),
    (["-n", "1", "--restarts", "5", "-m", "absent_module"], "there is no module absent_module."),
    (["-n", "1", "-m", "absent.train"], "there is no module absent.train."), (["-n", "1", "-m", ".train"], "no module .train."),
])
def test_a_bad_command_line_is_said_with_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        launch.main(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_the_launchers_time_limit_is_the_default_of_connect(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("TOWERS_TIME_LIMIT", raising=False)
    assert towers.workers.connect().time_limit == 300
    monkeypatch.setenv("TOWERS_TIME_LIMIT", "12.5")
    assert towers.workers.connect().time_limit == 12.5 and towers.workers.connect(time_limit=3).time_limit == 3
    monkeypatch.setenv("TOWERS_TIME_LIMIT", "soon")
    with pytest.raises(ValueError, match="TOWERS_TIME_LIMIT has to be a number of seconds, more than 0, not 'soon'"):
        connection.connect()
    with pytest.raises(ValueError, match="time_limit has to be a number of seconds, more than 0, not 0"):
        connection.connect(time_limit=0)


def test_a_probe_that_reaches_itself_has_reached_nobody(monkeypatch):
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())  # the kernel joins the two ends
    monkeypatch.setattr(socket, "create_connection", lambda *_: itself)
    assert watchdog.probe("localhost:%d" % itself.getsockname()[1]) == watchdog.GONE


@pytest.mark.filterwarnings("ignore:'towers.launch' found in sys.modules:RuntimeWarning")
def test_the_command_line_of_the_package_is_this_one(script, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["towers.launch", "-n", "2", script("print(rank)")])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("towers.launch", run_name="__main__", alter_sys=True)  # as python -m does
    assert done.value.code == 0 and sorted(capfd.readouterr().out.splitlines()) == ["[0] 0", "[1] 1"]
