"""python -m minidist.comm_bench in several processes: all count the same, and one prints."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import ranks

from minidist import comm, comm_bench
from minidist.comm.peers import never
from minidist.comm_bench import data
from minidist.comm_bench.flags import parse
from minidist.comm_bench.run import run
from minidist.comm_bench.verbs import VERBS
from minidist.errors import HangError, MergeMismatchError, PeerError

QUICK = ("--iters=1", "--warmup_iters=0", "-b=48", "-e=96K", "-f=2048")
PROGRAM = Path(comm_bench.__file__).with_name("__main__.py")


def table(cluster, *flags):
    """Run it in this rank; return how many elements were wrong, and what it printed."""
    with redirect_stdout(io.StringIO()) as out:
        wrong = run(parse([*QUICK, *flags]), cluster)
    text = out.getvalue()
    assert bool(text) == cluster.is_chief, "only the chief prints"
    return wrong, [line.split() for line in text.splitlines() if line[0] != "#"], text


def every_verb_type_and_op_is_right(cluster):
    kinds = ("-d=float32,bfloat16,int32", "-o=all", "-r=4", "-g=2")
    wrong, lines, text = table(cluster, "--all_reduce_spec=copy,xring,rechd", *kinds)
    assert wrong == 0
    if cluster.is_chief:
        assert "# 6 replicas in 3 processes" in text
        assert {line[4] for line in lines} == set(VERBS)
        assert {line[2] for line in lines} == {"float32", "bfloat16", "int32"}
        assert {line[3] for line in lines} == {"sum", "mean", "weighted", "-"}
        assert {line[-1] for line in lines} == {"0"}


def mpi_itself_is_right(cluster):
    wrong, lines, _ = table(cluster, "--all_reduce_spec=mpi", "-d=all", "-r=1")
    assert wrong == 0
    if cluster.is_chief:
        places = {(line[4], line[6]) for line in lines}
        assert places == {
            *(("all_reduce", "yes"), ("all_reduce", "no"), ("reduce", "yes"), ("reduce", "no")),
            *(("broadcast", "yes"), ("all_gather", "yes"), ("all_gather", "no")),
            ("reduce_scatter", "no"),
        }
        assert {line[2] for line in lines} == {d for d in data.DTYPES if not d.endswith("float16")}


def what_is_wrong_in_one_rank_is_counted_in_all(cluster):
    brought = data.result

    def spoilt(*args):
        right = brought(*args)
        if cluster.task == 1:
            right[-2:] += 1
        return right

    data.result = spoilt
    try:
        wrong, lines, _ = table(cluster, "--verb=all_reduce", "-e=48", "--check=3")
    finally:
        data.result = brought
    assert wrong == 2 * 2 * 3  # elements, in place and not, checks
    if cluster.is_chief:
        assert [line[-1] for line in lines] == ["6", "6"]


def other_flags_are_named(cluster):
    with pytest.raises(MergeMismatchError, match=r"worker:1: run comm_bench .*--iters=2"):
        run(parse([*QUICK, f"--iters={1 + cluster.task}"]), cluster)


def a_rank_that_fails_is_named(cluster):
    if cluster.task == 1:
        make, comm.make = comm.make, None
        try:
            with pytest.raises(TypeError):
                table(cluster)
        finally:
            comm.make = make
        return
    with pytest.raises(PeerError, match=r"worker:1 .* has failed .*TypeError"):
        run(parse([*QUICK]), cluster)


def a_rank_that_does_not_come_is_named(cluster):
    end = cluster.peers(never)
    if cluster.task == 1:
        cluster.peers(never)  # as the others have
        end.meet("end this case")
        return
    with pytest.raises(
        HangError, match=r"worker:0 has waited for worker:1 \(on .*\) to run comm_be"
    ):
        run(parse([*QUICK, "--timeout=0.2"]), cluster)
    end.meet("end this case")


CASES = {
    fn.__name__: (workers, 0, fn)
    for workers, fn in [
        (3, every_verb_type_and_op_is_right),
        (2, mpi_itself_is_right),
        (2, what_is_wrong_in_one_rank_is_counted_in_all),
        (2, other_flags_are_named),
        (2, a_rank_that_fails_is_named),
        (2, a_rank_that_does_not_come_is_named),
    ]
}


@pytest.fixture(scope="module")
def outcome(request):
    return ranks.run(__file__, 3, *ranks.chosen(request, CASES))


@pytest.mark.parametrize("case", CASES)
def test_in_ranks(outcome, case):
    outcome.check(case)


def test_as_a_command_one_rank_prints_and_all_end_with_0():
    outcome = ranks.run(PROGRAM, 2, *QUICK, "--all_reduce_spec=all")
    outcome.require_success()
    first, second = outcome.said
    assert "# Out of bounds values : 0 OK" in first
    assert re.search(r"^#   worker:1 on \S+: cpu:0$", first, re.MULTILINE)
    assert re.search(r"^# not here: nccl: nccl sums on GPUs", first, re.MULTILINE)
    assert re.search(r"^# minidist \S+, .*MPI", first)
    assert second == ""


def test_flags_that_are_wrong_are_told_once_and_all_end_with_2():
    outcome = ranks.run(PROGRAM, 2, "--verb=dance")
    assert outcome.code == 2
    assert [text.count("\n") for text in outcome.said] == [1, 0]
    assert outcome.said[0].startswith("minidist.comm_bench: --verb=dance is not all, or")


def test_a_rank_that_is_stuck_in_mpi_ends_at_its_timeout():
    outcome = ranks.run(Path(__file__).with_name("stuck_in_mpi.py"), 2)
    assert outcome.code == 1
    assert "(the deadline is 0.5 s) MPI's own call has not come to its end" in outcome.said[0]
    assert "rank 1: not enough memory (spam): make --max_bytes smaller" in outcome.said[1]


if __name__ == "__main__":
    ranks.main(CASES)
