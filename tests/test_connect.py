"""Processes become a cluster, however they were started; and end together when one fails."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ranks

from minidist import threads
from minidist.cluster import connecting
from minidist.cluster.line import SPEAKERS, Line
from minidist.cluster.pmi import Desk, Lines
from minidist.comm import implementation
from minidist.errors import ClusterError, UsageError

# Without an mpiexec only MPIs that speak PMI-1 find each other.
pmi = pytest.mark.skipif(
    implementation.vendor()[0] not in SPEAKERS, reason="this MPI speaks no PMI-1"
)

PROGRAM = Path(__file__).with_name("connecting.py")
LIMIT = 60
SOON = 30  # seconds: for what does not wait for a deadline, on a machine that is busy


def names(outcome):
    outcome.require_success()
    return [json.loads(said.splitlines()[-1])["me"] for said in outcome.said]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(*arguments, **variables):
    """Start a process that no launcher knows of."""
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def ends(*processes):
    """Return the status, the output and the errors of each."""
    found = []
    for process in processes:
        out, errors = process.communicate(timeout=LIMIT)
        found.append((process.returncode, out, errors))
    return found


# --- under mpiexec


def test_ranks_know_who_they_are_and_share_the_cores():
    outcome = ranks.run(PROGRAM, 3, "plain", "")
    assert names(outcome) == ["worker:0", "worker:1", "worker:2"]
    told = [json.loads(said) for said in outcome.said]
    assert [(each["rank"], each["size"]) for each in told] == [(0, 3), (1, 3), (2, 3)]
    every = range(len(threads.allowed()))
    assert {each["cores"] for each in told} == {threads.part(every, [every] * 3)}


def test_the_last_ranks_are_ps():
    assert names(ranks.run(PROGRAM, 2, "served", 1)) == ["worker:0", "ps:0"]


def test_each_rank_may_say_who_it_is():
    hosts = {"worker_hosts": "a:1,b:1", "ps_hosts": "c:1"}
    told = [{"job_name": job, "task_index": task, **hosts}
            for job, task in (("ps", 0), ("worker", 1), ("worker", 0))]  # fmt: skip
    outcome = ranks.run(PROGRAM, 3, "as_told", json.dumps(told))
    assert names(outcome) == ["ps:0", "worker:1", "worker:0"]


def test_ranks_that_contradict_each_other_all_say_so():
    told = [{"job_name": "worker", "task_index": 0}] * 2
    outcome = ranks.run(PROGRAM, 2, "as_told", json.dumps(told))
    assert outcome.code not in (None, 0)
    assert any("worker:0 is what several processes were told: rank 0" in s for s in outcome.said)


STALE = {"RANK": "0", "WORLD_SIZE": "2"}  # as another launcher's shell leaves them behind
NO_PART = r"rank 1 \(on .*\) takes no part: the environment contradicts itself"


def test_a_rank_that_its_environment_contradicts_is_named_by_the_others():
    outcome = ranks.run(PROGRAM, 2, "plain", "", env=STALE, limit=SOON)
    assert outcome.code not in (None, 0)
    assert re.search(f"ClusterError: {NO_PART}", outcome.said[0]), outcome
    assert "ClusterError: the environment contradicts itself" in outcome.said[1], outcome


def test_the_doctor_too_names_a_rank_that_its_environment_contradicts():
    done = subprocess.run(
        [ranks.mpiexec(), "-n", "2", sys.executable, "-m", "minidist.doctor"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SOON,
        env={**os.environ, **STALE},
        check=False,
    )
    assert done.returncode != 0
    assert re.search(NO_PART, done.stdout + done.stderr), done


def test_an_uncaught_exception_bears_the_name_of_its_rank_and_ends_the_job():
    outcome = ranks.run(PROGRAM, 2, "fail", "")
    assert outcome.code not in (None, 0)
    lines = [line for line in outcome.said[1].splitlines() if "[worker:1 on " in line]
    assert "Traceback (most recent call last):" in lines[0]
    assert lines[-1].endswith("] ValueError: one of them fails")


def test_a_hook_that_was_there_is_called_and_the_job_ends():
    outcome = ranks.run(PROGRAM, 2, "fail_by_hook", "")
    assert outcome.code not in (None, 0)
    assert "worker:1 on " in outcome.said[1]
    assert "in its own way: one of them fails" in outcome.said[1]


def test_a_thread_that_fails_ends_only_itself():
    outcome = ranks.run(PROGRAM, 2, "fail_in_thread", "")
    assert names(outcome) == ["worker:0", "worker:1"]
    assert "worker:1 on " in outcome.said[1] and "ZeroDivisionError" in outcome.said[1]


def test_a_rank_that_ends_early_is_named_by_the_others():
    outcome = ranks.run(PROGRAM, 2, "exit_early", 3)
    assert outcome.code not in (None, 0), outcome
    assert "PeerError: worker:1" in outcome.said[0]


def test_who_takes_fewer_steps_makes_no_success():
    outcome = ranks.run(PROGRAM, 2, "one_step_fewer", "", limit=SOON)
    assert outcome.code == 1, outcome
    assert re.search(r"PeerError: worker:1 \(on .*\) has ended after", outcome.said[0]), outcome


@pytest.mark.parametrize("status", [0, 3])
def test_who_ends_before_there_is_a_strategy_is_named_at_once(status):
    outcome = ranks.run(PROGRAM, 2, "exit_at_once", status, limit=SOON)
    assert outcome.code == (status or 1), outcome
    assert re.search(r"PeerError: worker:1 \(on .*\) has ended after", outcome.said[0]), outcome


def test_a_killed_rank_ends_the_others():
    assert ranks.run(PROGRAM, 2, "die", "").code not in (None, 0)


def test_a_forked_child_is_no_rank():
    command = [ranks.mpiexec(), "-n", "2", sys.executable, str(PROGRAM), "fork", ""]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done
    lines = done.stdout.split("\n")
    assert "Traceback" not in done.stderr, done
    assert lines.count("5") == 2 and done.stdout.count('"me": "worker:') == 2


# --- without


@pmi
def test_processes_that_nobody_has_started_find_each_other():
    hosts = [f"localhost:{free_port()}" for _ in range(3)]
    found = []
    for job, task in (("ps", 0), ("worker", 1), ("worker", 0)):
        told = {"job_name": job, "task_index": task}
        told |= {"worker_hosts": ",".join(hosts[:2]), "ps_hosts": hosts[2]}
        found.append(start("as_told", json.dumps(told)))
    ended = ends(*found)
    assert [status for status, _, _ in ended] == [0, 0, 0], ended
    assert [json.loads(out)["me"] for _, out, _ in ended] == ["ps:0", "worker:1", "worker:0"]


@pmi
@pytest.mark.parametrize("killed", [0, 1])
def test_if_one_of_them_is_killed_the_other_ends(killed):
    port = str(free_port())
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MINIDIST_PORT": port}
    processes = [start("hold", RANK=str(rank), **variables) for rank in range(2)]
    for process in processes:
        assert process.stdout.readline()  # it has come to MPI's beginning
    processes[killed].kill()
    ended = ends(*processes)
    assert ended[killed][0] == -9
    assert ended[1 - killed][0] == 1
    assert f"rank {killed} has died" in ended[1 - killed][2]


@pmi
@pytest.mark.parametrize(
    "variables",
    [
        [{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"} for rank in range(2)],
        [
            {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
            | {"SLURM_STEP_NODELIST": "localhost"}
            for rank in range(2)
        ],
    ],
    ids=["torchrun", "srun"],
)
def test_launchers_that_know_no_mpi(variables):
    port = str(free_port())
    ended = ends(*(start("plain", "", MINIDIST_PORT=port, **each) for each in variables))
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert [json.loads(out)["me"] for _, out, _ in ended] == ["worker:0", "worker:1"]


@pmi
def test_an_mpiexec_of_another_mpi_is_noticed():
    [(status, _, errors)] = ends(
        start("plain", "", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="4")
    )
    assert status == 1
    assert "Open MPI's mpirun has started this process as rank 1 of 4, but MPI here (" in errors
    assert "sees rank 0 of 1; start it with the mpiexec of this MPI" in errors


def test_one_process_is_a_cluster_of_one():
    [(status, out, _)] = ends(start("plain", ""))
    assert status == 0
    assert json.loads(out) == {"me": "worker:0", "rank": 0, "size": 1, "cores": threads.cores()}


@pytest.fixture
def no_mpi(monkeypatch):
    monkeypatch.setattr(connecting, "find_spec", lambda name: None)
    monkeypatch.setattr(connecting, "_connected", None)
    for name in ("PMI_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_without_mpi_one_process_is_enough_for_itself(no_mpi):
    cluster = connecting.connect()
    assert (cluster.engine, cluster.me, cluster.size) == (None, "worker:0", 1)
    assert connecting.connect() is cluster is connecting.connected()
    with pytest.raises(UsageError, match="num_ps=1"):
        connecting.connect(num_ps=1)


def test_one_process_cannot_be_the_ps(no_mpi):
    with pytest.raises(UsageError, match="leaves no worker"):
        connecting.connect(num_ps=1)
    assert connecting.connected() is None


def test_without_mpi_several_are_told_what_to_install(no_mpi, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ClusterError, match=r"pip install 'minidist\[mpi\]'"):
        connecting.connect()


# --- where they meet


def line(port, rank, names, **patience):
    return Line(("127.0.0.1", port), rank, names, **patience)


def test_who_does_not_come_is_named(caplog):
    with pytest.raises(ClusterError, match=r"a waits at 127.0.0.1:\d+ for b, c, not started yet"):
        line(free_port(), 0, ["a", "b", "c"], report_after=0.1, deadline=0.5)
    assert "for b, c, not started yet" in caplog.text


def test_where_nobody_is_is_said():
    with pytest.raises(ClusterError, match=r"b cannot reach a at 127.0.0.1:\d+ .*is it started"):
        line(free_port(), 1, ["a", "b"], report_after=0.1, deadline=0.2)


def test_a_port_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"a cannot listen at 127.0.0.1:{port}.*in use"):
            line(port, 0, ["a", "b"])


@pytest.fixture
def desk():
    """Return a function that opens a line to a desk for processes a and b, without any process."""
    listener = socket.create_server(("127.0.0.1", 0))
    serving = threading.Thread(target=Desk(listener, ["a", "b"]).serve)
    serving.start()
    opened = []

    def connect():
        connection = socket.create_connection(listener.getsockname(), timeout=LIMIT)
        opened.append(connection)
        return Lines(connection)

    yield connect
    for connection in opened:
        connection.close()
    serving.join(LIMIT)
    assert not serving.is_alive(), "the desk is open though all have gone"
    listener.close()


def come(lines, rank, size=2):
    lines.say(f"cmd=here rank={rank} size={size}")


def test_who_does_not_fit_is_refused(desk):
    first, second, third = desk(), desk(), desk()
    come(first, 1)
    first.say("cmd=missing")
    assert first.next() == {"cmd": "missing", "why": "a"}
    come(second, 1)
    assert second.next() == {"cmd": "refused", "why": "another process is b already"}
    come(third, 0, size=3)
    assert third.next()["why"] == "it was told of 3 processes, and a of 2"
    come(third, 0)
    assert third.next() == first.next() == {"cmd": "all_here"}


def test_mpi_puts_waits_and_gets(desk):
    lines = [desk(), desk(), desk(), desk()]
    for rank in range(2):
        come(lines[rank], rank)
        assert rank == 0 or lines[0].next() == lines[1].next() == {"cmd": "all_here"}
    for rank, mpi in enumerate(lines[2:]):
        mpi.say(f"cmd=initack pmiid={rank}")
        told = [mpi.next() for _ in range(4)]
        assert told[1:3] == [{"cmd": "set", "size": "2"}, {"cmd": "set", "rank": str(rank)}]
        mpi.say(f"cmd=put kvsname=any key=k{rank} value=from {rank}=")
        assert mpi.next()["rc"] == "0"
        mpi.say("cmd=barrier_in")
    for rank, mpi in enumerate(lines[2:]):
        assert mpi.next() == {"cmd": "barrier_out", "rc": "0"}
        mpi.say(f"cmd=get kvsname=any key=k{1 - rank}")
        assert mpi.next()["value"] == f"from {1 - rank}="
        mpi.say("cmd=get kvsname=any key=nothing")
        assert mpi.next()["rc"] == "-1"


def test_a_line_that_breaks_is_a_death_and_a_bye_is_none(desk):
    first, second = desk(), desk()
    come(first, 0)
    come(second, 1)
    assert first.next() == second.next() == {"cmd": "all_here"}
    second.say("cmd=bye")
    second.close()
    first.say("cmd=missing")
    assert first.next() == {"cmd": "missing", "why": ""}, "of the one that has left nothing is said"


def test_of_a_death_all_others_hear(desk):
    first, second = desk(), desk()
    come(first, 0)
    come(second, 1)
    assert first.next() == second.next() == {"cmd": "all_here"}
    second.close()
    assert first.next() == {"cmd": "died", "why": "b has died or left the others"}
