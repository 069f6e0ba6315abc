"""Who a process is, from its launcher's variables and from what it was told."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import threads
from minidist.cluster.environment import read
from minidist.cluster.places import first_host, place
from minidist.cluster.roles import Told, addresses, assign
from minidist.errors import ClusterError, UsageError

HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_FD": "9",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "first"}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[3-4]",
}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}


@pytest.mark.parametrize(
    ("variables", "launcher", "brings_mpi"),
    [
        (HYDRA, "MPICH's mpiexec", True),
        (OPEN_MPI, "Open MPI's mpirun", True),
        (TORCHRUN, "torchrun", False),
        (BY_HAND, "whoever has set RANK", False),
        (SRUN, "Slurm's srun", False),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "4"}, "a launcher with PMI", True),
        ({**SRUN, "PMIX_RANK": "1"}, "Slurm's srun", True),
    ],
)
def test_each_launcher_is_understood(variables, launcher, brings_mpi):
    found = read(variables)
    said = found.winner
    assert (said.launcher, said.rank, said.size) == (launcher, 1, 4)
    assert found.brings_mpi == brings_mpi
    assert f"{launcher} says rank 1 of 4: " in found.why
    assert all(f"{name}={variables[name]}" in found.why for name in said.variables)


def test_nobody_has_started_a_process_on_its_own():
    found = read({"HOME": "/", "RANK_OF_SOMETHING": "3"})
    assert (found.winner, found.left_out, found.brings_mpi) == (None, (), False)
    assert "started alone" in found.why


def test_a_rank_without_a_size_is_left_out():
    found = read({**HYDRA, "RANK": "7"})
    assert found.winner.launcher == "MPICH's mpiexec"
    assert found.left_out == (("RANK", "WORLD_SIZE is not set beside it"),)


def test_who_agrees_is_told():
    found = read({**HYDRA, **BY_HAND})
    assert found.winner.launcher == "whoever has set RANK"
    assert found.why.endswith("; MPICH's mpiexec agrees")


@pytest.mark.parametrize(
    "variables",
    [
        {**HYDRA, **OPEN_MPI, "PMI_RANK": "0"},
        {**HYDRA, **TORCHRUN, "WORLD_SIZE": "2"},
        {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"},
        {**SRUN, **BY_HAND, "RANK": "0"},
    ],
)
def test_a_contradiction_is_an_error_that_names_the_variables(variables):
    with pytest.raises(ClusterError, match=r"contradicts itself.* says rank .* says rank .*unset"):
        read(variables)


@pytest.mark.parametrize("nearer", [HYDRA, OPEN_MPI, TORCHRUN], ids=["hydra", "open", "torchrun"])
@pytest.mark.parametrize(
    "outer",
    [{**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, BATCH],
    ids=["srun", "sbatch"],
)
def test_slurm_speaks_of_who_has_started_a_nearer_launcher(nearer, outer):
    found = read({**outer, **nearer})
    assert (found.winner.rank, found.winner.size) == (1, 4)
    assert "nearer to this process" in found.left_out[0][1]


def test_a_batch_script_is_no_rank():
    found = read(BATCH)
    assert found.winner is None
    assert "no step of srun" in found.left_out[0][1]


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_RANK": "x", "PMI_SIZE": "2"},
        {"PMI_RANK": "0", "PMI_SIZE": ""},
        {"PMI_RANK": "-1", "PMI_SIZE": "2"},
    ],
)
def test_what_is_no_number_is_refused(variables):
    with pytest.raises(ClusterError, match="should be a number"):
        read(variables)


def test_a_rank_beyond_the_size_is_refused():
    with pytest.raises(ClusterError, match=r"PMI_RANK=2 and PMI_SIZE=2.*do not fit"):
        read({"PMI_RANK": "2", "PMI_SIZE": "2"})


# --- roles


def told(*jobs):
    return [Told(job_name=job, task_index=task) for job, task in jobs]


@pytest.mark.parametrize(
    ("said", "workers", "servers"),
    [
        ([Told()] * 3, (0, 1, 2), ()),
        ([Told(num_ps=1)] * 3, (0, 1), (2,)),
        ([Told(worker_hosts=("a:1", "b:1"), ps_hosts=("c:1",))] * 3, (0, 1), (2,)),
        (told(("ps", 0), ("worker", 1), ("worker", 0)), (2, 1), (0,)),
        (told(("ps", None), ("worker", None), ("worker", None)), (1, 2), (0,)),
    ],
)
def test_roles_follow_from_what_all_were_told(said, workers, servers):
    assert assign(said, ["h"] * len(said)) == (workers, servers)


@given(st.permutations([("worker", 0), ("worker", 1), ("worker", 2), ("ps", 0), ("ps", 1)]))
def test_every_task_is_the_rank_that_says_so(jobs):
    workers, servers = assign(told(*jobs), ["h"] * 5)
    assert [jobs[rank] for rank in workers] == [("worker", task) for task in range(3)]
    assert [jobs[rank] for rank in servers] == [("ps", task) for task in range(2)]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([Told(num_ps=2)] * 2, "leaves no worker"),
        ([Told(num_ps=1), Told()], "same num_ps.* 1 to rank 0 .* None to rank 1"),
        (told(("worker", 0), (None, None)), r"not to rank 1 \(on h1\)"),
        (told(("worker", 0), ("worker", 0)), "worker:0 is what several.* rank 0 .*rank 1"),
        (told(("worker", 0), ("worker", 2)), "none is worker:1"),
        (told(("worker", 0), ("worker", None)), "task_index.* not to rank 1"),
        (told(("ps", 0), ("ps", 1)), "none is a worker"),
        ([Told(worker_hosts=("a:1",))] * 2, "name 1 tasks, but 2 processes"),
        (
            [Told(job_name=job, worker_hosts=("a:1", "b:1")) for job in ("ps", "worker")],
            "names 2 tasks, but job_name=worker was given to 1",
        ),
    ],
)
def test_contradicting_roles_are_refused_and_the_ranks_named(said, words):
    with pytest.raises(UsageError, match=words):
        assign(said, [f"h{rank}" for rank in range(len(said))])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_ps": -1}, "num_ps=-1"),
        ({"job_name": "chief"}, "'chief' is no job"),
        ({"task_index": 0}, "needs a job_name"),
        ({"ps_hosts": ("a:1",)}, "needs worker_hosts"),
        ({"num_ps": 1, "worker_hosts": ("a:1",)}, "two ways"),
        ({"worker_hosts": ("a",)}, "'a' .* is no host:port"),
        ({"worker_hosts": ("a:99999",)}, "is no host:port"),
        ({"worker_hosts": ("a:1", "a:1")}, "a:1 is twice"),
        ({"worker_hosts": ("a:1",), "job_name": "worker", "task_index": 1}, "not among the 1 "),
        ({"worker_hosts": ("a:1",), "job_name": "ps", "task_index": 0}, "not among the 0 ps "),
    ],
)
def test_what_a_process_cannot_be_told(arguments, words):
    with pytest.raises(UsageError, match=words):
        Told(**arguments)


@pytest.mark.parametrize(
    "said",
    [
        Told(),
        Told(num_ps=2),
        Told(job_name="ps", task_index=0, worker_hosts=("a:1", "ä:2"), ps_hosts=("c:1",)),
    ],
)
def test_what_was_told_travels_as_text(said):
    assert Told.from_json(said.to_json()) == said
    assert b"\n" not in said.to_json()


def test_addresses_are_given_as_one_text_or_as_several():
    assert addresses("a:1, b:2,") == addresses(["a:1", "b:2"]) == ("a:1", "b:2")
    assert addresses("") == addresses(()) == ()


# --- where processes meet that no mpiexec has started


HOSTS = {"worker_hosts": ("first:2222", "second:2222"), "ps_hosts": ("third:2222",)}


def test_by_hand_they_meet_at_worker_0():
    nobody = read({})
    where = place(nobody, Told(job_name="worker", task_index=1, **HOSTS), {})
    assert where.address == ("first", 2222)
    assert (where.rank, where.names) == (1, ("worker:0", "worker:1", "ps:0"))
    assert place(nobody, Told(job_name="ps", task_index=0, **HOSTS), {}).rank == 2
    assert place(nobody, Told(), {}) is None
    assert place(nobody, Told(worker_hosts=("a:1",), job_name="worker", task_index=0), {}) is None
    with pytest.raises(UsageError, match="give job_name and task_index"):
        place(nobody, Told(**HOSTS), {})


def test_under_torchrun_they_meet_above_its_port():
    where = place(read(TORCHRUN), Told(), TORCHRUN)
    assert (where.address, where.rank, len(where.names)) == (("first", 29501), 1, 4)
    elsewhere = {**TORCHRUN, "MINIDIST_PORT": "7777"}
    assert place(read(elsewhere), Told(), elsewhere).address == ("first", 7777)
    with pytest.raises(ClusterError, match="MINIDIST_PORT='high' is no port"):
        place(read(TORCHRUN), Told(), {**TORCHRUN, "MINIDIST_PORT": "high"})
    nowhere = {"RANK": "1", "WORLD_SIZE": "4"}
    with pytest.raises(ClusterError, match="MASTER_ADDR"):
        place(read(nowhere), Told(), nowhere)


def test_in_a_step_they_meet_on_its_first_machine():
    where = place(read(SRUN), Told(), SRUN)
    assert where.address[0] == "node3"
    other = {**SRUN, "SLURM_STEP_ID": "1"}
    assert place(read(other), Told(), other).address != where.address
    with pytest.raises(ClusterError, match="SLURM_STEP_NODELIST"):
        place(read(SRUN), Told(), {name: SRUN[name] for name in SRUN if "NODELIST" not in name})


@pytest.mark.parametrize("variables", [HYDRA, OPEN_MPI, {**SRUN, "PMIX_RANK": "1"}])
def test_an_mpiexec_brings_them_together_itself(variables):
    assert place(read(variables), Told(), variables) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alone", "alone"),
        ("a,b", "a"),
        ("node[03-05,7],b", "node03"),
        ("rack[2,4]node[1-2].x", "rack2node1.x"),
        ("", ""),
    ],
)
def test_the_first_of_slurms_machines(nodes, first):
    assert first_host(nodes) == first


# --- cores


CORES = st.sets(st.integers(0, 7), min_size=1)


@given(st.lists(CORES, min_size=1, max_size=5))
def test_processes_of_a_machine_never_ask_for_more_cores_than_it_has(masks):
    parts = [threads.part(mask, masks) for mask in masks]
    assert all(1 <= part <= len(mask) for part, mask in zip(parts, masks, strict=True))
    # One core more than there are only where somebody would have none at all.
    most = len(set().union(*masks))
    assert sum(part for part in parts if part > 1) <= most


@pytest.mark.parametrize(
    ("masks", "parts"),
    [
        ([range(8)], [8]),
        ([range(8)] * 2, [4, 4]),
        ([range(8)] * 3, [2, 2, 2]),
        ([[0, 1], [2, 3]], [2, 2]),
        ([[0], [0]], [1, 1]),
        ([range(4), [0, 1]], [3, 1]),
    ],
)
def test_cores_are_shared_or_kept(masks, parts, monkeypatch):
    monkeypatch.setattr(threads, "quota", lambda: float("inf"))
    assert [threads.part(mask, masks) for mask in masks] == parts


def test_a_container_allows_less_than_it_has(monkeypatch):
    monkeypatch.setattr(threads, "quota", lambda: 3.5)
    monkeypatch.setattr(threads, "allowed", lambda: set(range(8)))
    monkeypatch.setattr(threads, "_part", None)
    assert threads.cores() == 3
    assert threads.part(range(8), [range(8)] * 2) == 1
    threads.divide(range(8), [range(8)])
    assert threads.cores() == 3


def test_a_sentence_has_a_name_for_each_variable():
    assert re.search(r"PMI_RANK=1, PMI_SIZE=4$", read(HYDRA).why)


def test_how_many_threads_compute_is_a_number_while_others_divide_the_cores():
    """A strategy may open or close between any two lines of who asks."""

    def forget(frame, event, argument):
        if frame.f_code is threads.per_replica.__code__:
            threads._per_replica = None
            return forget
        return None

    before = sys.gettrace()
    sys.settrace(forget)
    try:
        found = threads.per_replica()
    finally:
        sys.settrace(before)
    assert found >= 1
