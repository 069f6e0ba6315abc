"""Before the ranks run: the command line, which mpiexec, and what keeps it from starting them."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from launching import BEGIN, Launched, is_gone, launch, opened

from minidist.errors import ClusterError, UsageError
from minidist.launch import mpiexec
from minidist.launch.arguments import parse
from minidist.launch.mpiexec import Host, Mpiexec, parse_hosts, read_hostfile

HYDRA = Mpiexec("/mpi/mpiexec", "mpich", "Hydra 5")
OPEN_MPI = Mpiexec("/mpi/mpirun", "openmpi", "mpirun (Open MPI) 5")


@pytest.fixture
def fake(tmp_path):
    """Return a function that makes an mpiexec of a shell script; asked, it says it is Hydra."""

    def make(script, version="echo HYDRA; echo Version: 5.0.2"):
        path = tmp_path / "mpiexec"
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {version}; exit; fi\n{script}\n')
        path.chmod(0o755)
        return f"--mpiexec={path}"

    return make


# --- the command line


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["-m", "pkg", "-n", "9"], [sys.executable, "-m", "pkg", "-n", "9"]),
        (["-c", "pass"], [sys.executable, "-c", "pass"]),
        (["--", "-m", "pkg", "--x=1"], [sys.executable, "-m", "pkg", "--x=1"]),
        (["--", "program", "--", "-n"], ["program", "--", "-n"]),
        (["program", "--tag_output"], ["program", "--tag_output"]),
        ([__file__, "a b"], [sys.executable, __file__, "a b"]),
    ],
)
def test_the_command_begins_where_the_options_end(arguments, command):
    plan, restarts, tag = parse(["-n", "2", "--max_restarts", "3", *arguments])
    assert (plan.command, plan.count, restarts, tag) == (command, 2, 3, False)


def test_hosts_say_how_many_ranks_there_are():
    plan, _, tag = parse(["--hosts", "a:2,b,c:3", "--tag_output", "program"])
    assert (plan.count, tag) == (6, True)
    assert plan.hosts == [Host("a", 2), Host("b", None), Host("c", 3)]
    assert parse(["--hosts=a:2", "-n", "1", "program"])[0].count == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "how many ranks"),
        (["-n", "2"], "what to start"),
        (["-n", "0", "x"], "0 is no whole number from 1 on"),
        (["-n", "two", "x"], "two is no whole number"),
        (["-n", "2", "--max_restarts=-1", "x"], "no whole number from 0 on"),
        (["-n", "2", "--max_restart=1", "x"], "unrecognized arguments: --max_restart=1"),
        (["-n", "2", "--grace=soon", "x"], "soon is no number"),
        (["-n", "2", "-m"], "-m needs what to run"),
        (["-n", "2", "not_there.py"], "no file not_there.py"),
        (["--hosts=a:2,b:x", "x"], "'b:x' is no machine"),
        (["--hosts=a", "--hostfile=b", "x"], "contradict each other"),
        (["--hostfile=not_there", "x"], "No such file"),
    ],
)
def test_wrong_command_lines_are_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        parse(arguments)


def test_a_wrong_command_line_is_a_sentence_and_status_2():
    status, out, errors = launch("-n", "2")
    assert (status, out, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("minidist.launch: say what to start")


def test_a_hostfile_has_a_machine_on_each_line(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two machines\na slots=2 max_slots=4\n\nb:3   # the other one\nc\n")
    assert read_hostfile(str(file)) == [Host("a", 2), Host("b", 3), Host("c", None)]
    file.write_text("a\nb slots=none\n")
    with pytest.raises(UsageError, match="line 2"):
        read_hostfile(str(file))
    file.write_text("# nobody\n")
    with pytest.raises(UsageError, match="names no machine"):
        read_hostfile(str(file))


# --- mpiexec


def test_dialects():
    hosts = parse_hosts("a:2,b")
    variables = {"MINIDIST_LAUNCH": "", "PYTHONPATH": "", "HOME": "", "OMP_NUM_THREADS": "1"}
    assert HYDRA.command(3, [], variables, 2) == ["/mpi/mpiexec", "-n", "3"]
    assert HYDRA.command(3, hosts, variables, 2) == (["/mpi/mpiexec", "-hosts", "a:2,b", "-n", "3"])
    exported = ["-x", "MINIDIST_LAUNCH", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]
    begin = ["/mpi/mpirun", "--bind-to", "none"]
    assert OPEN_MPI.command(2, [], variables, 2) == [*begin, *exported, "-n", "2"]
    assert OPEN_MPI.command(3, [], {}, 2) == [*begin, "--oversubscribe", "-n", "3"]
    assert OPEN_MPI.command(3, hosts, {}, 2) == [*begin, "--host", "a:2,b:1", "-n", "3"]


def test_the_mpiexec_beside_this_python_comes_first(fake, tmp_path, monkeypatch):
    fake("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mpiexec").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.1'\n")
    (elsewhere / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{elsewhere}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert mpiexec.find() == Mpiexec(str(tmp_path / "mpiexec"), "mpich", "Hydra 5.0.2")
    (tmp_path / "mpiexec").unlink()
    found = mpiexec.find()
    assert (found.path, found.dialect) == (str(elsewhere / "mpiexec"), "openmpi")
    assert found.version == "mpirun (Open MPI) 5.0.1"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"pip install 'minidist\[mpi\]'"):
        mpiexec.find()


def test_an_mpiexec_that_is_unknown_or_not_there_is_refused(fake, tmp_path):
    status, _, errors = launch("-n", "2", f"--mpiexec={tmp_path / 'none'}", "x")
    assert (status, errors.count("\n")) == (1, 1)
    assert "there is no program" in errors
    status, _, errors = launch("-n", "2", fake("", version="echo I am new"), "x")
    assert (status, errors.count("\n")) == (1, 1)
    assert "says 'I am new'" in errors


# --- what goes wrong before all ranks are there


def test_what_mpiexec_says_is_shown_where_it_does_not_start_them(fake):
    status, out, errors = launch("-n", "3", fake("echo no such machine >&2; exit 7"), "x")
    assert (status, out) == (7, "")
    assert "mpiexec has ended with status 7, and ranks 0, 1, 2 of 3 have not started" in errors
    assert "no such machine\n" in errors


def test_ranks_that_do_not_start_in_time_are_named(fake):
    fake_mpiexec = fake("echo asking; exec sleep 1000")
    status, _, errors = launch("-n", "1", fake_mpiexec, "--start_timeout=0.3", "x")
    assert status == 1
    assert "after 0.3 s rank 0 of 1 has not started" in errors


def test_an_interrupt_while_they_start(fake, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    launched = Launched("-n", "2", fake(f"echo $$ > {pipe}; exec sleep 1000"), "x")
    pid = pipe.read_text().strip()  # once it is started, and not before
    assert len(opened([pid])) == 1
    launched.process.send_signal(signal.SIGINT)
    status, _, errors = launched.end()
    assert (status, errors) == (130, "minidist.launch: SIGINT: all ranks are ended\n")
    assert is_gone(pid)


def test_a_program_that_there_is_not():
    status, out, errors = launch("-n", "1", "not_there_at_all")
    assert (status, out) == (127, "")
    assert "minidist.launch: not_there_at_all: No such file or directory\n" in errors
    assert "has exited with status 127" in errors


def test_a_stranger_cannot_speak_for_a_rank(fake):
    program = (
        "import os, socket, json; a = os.environ['MINIDIST_LAUNCH'].split(); "
        "host, port = a[1].split(':'); s = socket.create_connection((host, int(port))); "
        "from minidist.launch.supervisor import HEAD; "
        "b = json.dumps({'token': 'x' + a[0], 'rank': 1, 'host': '', 'rank_pid': 1}).encode(); "
        "s.sendall(HEAD.pack(b'H', len(b)) + b); print(s.recv(1))"
    )
    assert launch("-n", "1", "-c", program) == (0, "b''\n", "")


# --- other machines


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Let Hydra reach this machine by any of its addresses through something that is no ssh."""
    path = tmp_path / "ssh"
    path.write_text(
        '#!/bin/bash\nwhile [[ "$1" == -* ]]; do shift; done\nshift\nexec bash -c "$*"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("HYDRA_LAUNCHER", "ssh")
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(path))


@pytest.mark.skipif(mpiexec.find().dialect != "mpich", reason="made for MPICH's mpiexec")
def test_ranks_on_other_machines_come_and_end_too(ssh):
    program = BEGIN + ("print(os.environ['PMI_HOSTNAME'], os.getpid(), flush=True); signal.pause()")
    launched = Launched("--hosts=127.0.0.2:2,127.0.0.3", "-c", program)
    hosts, pids = zip(*map(str.split, launched.read(3)), strict=True)
    assert sorted(hosts) == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]
    os.kill(int(pids[hosts.index("127.0.0.3")]), signal.SIGKILL)
    status, _, errors = launched.end()
    assert status == 137
    assert "minidist.launch: rank 2 on " in errors
    assert all(map(is_gone, pids))
