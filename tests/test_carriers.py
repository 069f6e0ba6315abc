"""How ranks hand each other things: meetings by mail and by messages, boards, letters."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import ranks
from test_tiered import group

import minidist as md
from minidist import comm
from minidist.comm.boards import Boards, carrier
from minidist.comm.letters import Letters
from minidist.comm.mail import BOX
from minidist.errors import PeerError

WORKERS = 3
KINDS = {"mail": "aaa", "messages": "abc"}


def meetings(machines, cluster):
    """Whatever the ranks bring comes to all, in their order, also what is longer than a box."""
    peers = group(cluster, machines)
    sizes = [0, 1, 900, 2000, BOX - 100, BOX, 3 * BOX]
    for turn in range(40):
        brought = bytes([cluster.task]) * sizes[(turn + cluster.task) % len(sizes)]
        what = "meet" if turn % 3 else "meet" * 500 * (turn + 1)
        expected = [bytes([task]) * sizes[(turn + task) % len(sizes)] for task in range(WORKERS)]
        assert peers.meet(what, brought) == expected
    assert (peers._mail is not None) == (machines == "aaa")
    peers.leave()


def rounds(machines, cluster):
    """Many rounds in a hurry: what a rank reads is never what was written for another round."""
    peers = group(cluster, machines)
    joined = carrier(peers, range(WORKERS))
    assert type(joined) is (Boards if machines == "aaa" else Letters)
    assert carrier(peers, range(WORKERS)) is joined
    me, random = cluster.task, np.random.default_rng(5)
    for turn in range(150):
        lengths = random.integers(0, 2000, (WORKERS, WORKERS))  # from, to
        np.fill_diagonal(lengths, 0)
        to_all = turn % 2 == 1
        out = int(lengths[me].sum()) if to_all else [int(n) for n in lengths[me]]
        into = [int(lengths[q].sum() if to_all else lengths[q, me]) for q in range(WORKERS)]
        with joined.round(out, into, np.dtype("i4"), "test") as one:
            for other in [me] if to_all else [q for q in range(WORKERS) if q != me]:
                one.desk(other)[:] = turn * 100 + me * 10 + (0 if to_all else other)
            one.hand_over()
            for q in range(WORKERS):
                if q != me:
                    taken = one.take(q)
                    assert len(taken) == into[q]
                    assert (taken == turn * 100 + q * 10 + (0 if to_all else me)).all()
    peers.leave()


def no_room(cluster):
    """Where one rank has no memory left for the others, all take messages, and sum the same."""
    peers = group(cluster, "aaa")
    if cluster.task == 1:
        peers.plots.take = lambda nbytes: -1
    assert type(carrier(peers, range(WORKERS))) is Letters
    one = comm.make("auto", md.devices("cpu"), peers=peers, counts=[1] * WORKERS)
    row = [np.full(5, 1.0 + cluster.task)]
    one.all_reduce([row], [row], threads=1)
    assert (row[0] == 6).all()
    assert [array.shape for array in one.allocate([((3,), np.dtype("f4"))])] == [(3,)]
    peers.leave()


def plots_come_back(cluster):
    """Groups that come and go take no more of the window than those that are there at a time."""
    starts = []
    for _ in range(8):
        peers = group(cluster, "aaa")
        one = comm.make("auto", md.devices("cpu"), peers=peers, counts=[1] * WORKERS)
        row = [np.ones(300_000, "f4")]
        one.all_reduce([row], [row], threads=1)
        starts.append(max(start for start, _ in peers.plots.taken))
        peers.leave()
        while not peers._all_ended():  # until all others have said so
            pass
    assert len(set(starts[4:])) == 1  # until then plots of the cases before come back


def a_failure_reaches_who_waits_at_a_board(cluster):
    """Ranks that wait in shared memory hear of what has happened elsewhere."""
    peers = group(cluster, "aaa")
    joined = carrier(peers, range(WORKERS))
    if cluster.task == 2:
        peers.fail(ValueError("it has failed"))
        return

    def wait():
        with joined.round(1, [1] * WORKERS, np.dtype("i4"), "test") as one:
            one.hand_over()
            one.take(2)

    with pytest.raises(PeerError, match=r"worker:2 .* has failed .*: ValueError: it has failed"):
        wait()


CASES = {
    **{f"meetings-{how}": (3, 0, partial(meetings, m)) for how, m in KINDS.items()},
    **{f"rounds-{how}": (3, 0, partial(rounds, m)) for how, m in KINDS.items()},
    "no_room": (3, 0, no_room),
    "plots_come_back": (3, 0, plots_come_back),
    "a_failure_at_a_board": (3, 0, a_failure_reaches_who_waits_at_a_board),
}


@pytest.fixture(scope="module")
def outcome(request):
    return ranks.run(__file__, WORKERS, *ranks.chosen(request, CASES))


@pytest.mark.parametrize("case", CASES)
def test_case(outcome, case):
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
