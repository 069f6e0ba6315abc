"""NCCL over several processes, which are threads here, on the stand-in; and over machines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl_standin import Faults
from summing import OLD, on, out, same, sums, whole_numbers, world
from thread_ranks import Meeting, ThreadPeers

import minidist as md
from minidist import comm
from minidist.comm.nccl import Nccl
from minidist.comm.nccl_library import Nccl4py
from minidist.comm.nccl_ranks import NcclRanks
from minidist.comm.nccl_teams import Teams, one_each
from minidist.errors import MergeMismatchError, PeerError, UsageError


class Peers(ThreadPeers):
    """One thread's peers, which hear of failures as processes do."""

    patience = staticmethod(lambda: (10.0, 20.0))

    def check(self, what: str) -> None:
        failure = self.meeting.failure
        if failure is not None:
            raise PeerError(f"another one has failed, while this one was to {what}: {failure!r}")

    @property
    def whole(self) -> bool:
        return self.meeting.failure is None


def processes(
    there: Any, specs: list[str], work: Callable[..., Any], hosts: Any = None
) -> list[Any]:
    """Call `work(devices, how)` in a thread for each spec; return what each returned or raised.

    how: what a communicator across them is made with.
    """
    there.gpu.may_hang = True  # as long as only some have given their work
    meeting = Meeting(len(specs), hosts)
    every = [md.devices(spec) for spec in specs]
    counts = [len(devices) for devices in every]
    results: list[Any] = [None] * len(specs)

    def run(me: int) -> None:
        peers = Peers(meeting, me)
        try:
            results[me] = work(every[me], {"peers": peers, "counts": counts})
        except BaseException as failure:
            results[me] = failure
            peers.fail(failure)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(len(specs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


PLACES = [
    ["cuda:0", "cuda:1"],
    ["cuda:0.0,cuda:1.0", "cuda:0.1,cuda:1.1"],
    ["cuda:0*2", "cuda:1", "cuda:0.2,cuda:1.0,cuda:0.3"],
]


def make(devices: Any, how: Any, inside: bool) -> Nccl:
    return Nccl(devices, **how, inside=comm.make("copy", devices) if inside else None)


def place(how: Any) -> tuple[int, int]:
    """Return the number of the first replica here, and of all."""
    return sum(how["counts"][: how["peers"].me]), sum(how["counts"])


@pytest.mark.parametrize("inside", [False, True], ids=["nccl", "copy/nccl"])
@pytest.mark.parametrize("specs", PLACES, ids=str)
def test_sums_over_processes(libraries: Path, specs: list[str], inside: bool) -> None:
    def work(devices: Any, how: Any) -> None:
        one = make(devices, how, inside)
        first, n = place(how)
        assert (one.first, one.replicas) == (first, n)
        for dtype in ("float32", "bfloat16"):
            for weights in (None, [float(k % 3) for k in range(n)]):
                rows = whole_numbers(n, dtype)
                own = on(devices, rows[first : first + len(devices)])
                one.all_reduce(own, own, weights, scale=0.5, threads=1)
                for device, row in zip(devices, own, strict=True):
                    same(out(device, row), sums(rows, weights, 0.5))
        one.close()

    for seed in range(3):
        with world(libraries, seed) as there:
            assert processes(there, specs, work) == [None] * len(specs)
            assert there.live == 0


@pytest.mark.parametrize("inside", [False, True], ids=["nccl", "copy/nccl"])
@pytest.mark.parametrize("specs", PLACES, ids=str)
def test_everything_else_over_processes(libraries: Path, specs: list[str], inside: bool) -> None:
    def work(devices: Any, how: Any) -> None:
        one = make(devices, how, inside)
        first, n = place(how)
        here = range(first, first + len(devices))
        rows = whole_numbers(n, "float32")
        for root in range(n):
            row = on(devices[:1], rows[:1])[0] if root in here else None
            at = None if row is None else comm.Row.on(devices[0], row)
            one.reduce(on(devices, rows[first:][: len(devices)]), at, root=root, threads=1)
            if row is not None:
                same(out(devices[0], row), sums(rows))
            own = on(devices, rows[first:][: len(devices)])
            one.broadcast(own, root)
            for device, got in zip(devices, own, strict=True):
                same(out(device, got), rows[root])
        shares = [[np.zeros(2, "float32")] for _ in devices]
        wanted = on(devices, shares)
        flat = whole_numbers(n, "float32", [(2 * n,)])
        one.reduce_scatter(on(devices, flat[first:][: len(devices)]), wanted, threads=1)
        for k, device, got in zip(here, devices, wanted, strict=True):
            same(out(device, got), [sums(flat)[0][2 * k : 2 * k + 2]])
        uneven = [
            whole_numbers(1, "float64", [(k,), (2, k)], k)[0] + [np.arange(k) > 1] for k in range(n)
        ]
        gathered = one.all_gather(on(devices, uneven[first:][: len(devices)]))
        for k, got in enumerate(gathered):
            same(out(got.devices[0], got), uneven[k])
        one.close()

    for seed in range(2):
        with world(libraries, seed) as there:
            assert processes(there, specs, work) == [None] * len(specs)


def test_who_does_something_else_is_named_before_nccl_is_asked(libraries: Path) -> None:
    def work(devices: Any, how: Any) -> None:
        one = Nccl(devices, **how)
        rows = [[np.ones(3 + how["peers"].me, "float32")]]
        one.all_reduce(on(devices, rows), on(devices, rows), threads=1)

    with world(libraries) as there:
        for failure in processes(there, ["cuda:0", "cuda:1"], work):
            assert isinstance(failure, MergeMismatchError | PeerError)
            assert "float32[3]" in str(failure) and "float32[4]" in str(failure)
        assert "all_reduce" not in there.gpu.calls


def test_all_processes_must_have_one_version(libraries: Path) -> None:
    def ranks(devices: Any, how: Any) -> NcclRanks:
        library = Nccl4py()
        library.version = [23203, OLD][how["peers"].me]
        return NcclRanks(library, Teams(devices, one_each(devices)), how["peers"], [0, 1])

    with world(libraries) as there:
        for failure in processes(there, ["cuda:0", "cuda:1"], ranks):
            assert isinstance(failure, UsageError)
            said = "worker:0 has 2.32.3 through nccl4py, worker:1 has 2.29.7 through nccl4py"
            assert said in str(failure)
        assert not there.handles


def test_an_old_nccl_takes_no_gpu_twice(libraries: Path) -> None:
    with world(libraries, version=OLD) as there:
        for failure in processes(there, ["cuda:0.0", "cuda:0.1"], lambda d, how: Nccl(d, **how)):
            assert isinstance(failure, UsageError)
            assert "worker:0 and worker:1 share a GPU" in str(failure)
            assert "and this is 2.29.7 through nccl4py; give" in str(failure)
        assert not there.handles
    with world(libraries, version=OLD) as there:  # on another machine it is another one
        results = processes(
            there, ["cuda:0.0", "cuda:0.1"], lambda d, how: Nccl(d, **how).close(), ["a", "b"]
        )
        assert results == [None, None]


def test_all_hear_that_the_first_cannot_begin(libraries: Path) -> None:
    with world(libraries, faults=Faults(no_id=True)) as there:
        for failure in processes(there, ["cuda:0", "cuda:1"], lambda d, how: Nccl(d, **how)):
            assert isinstance(failure, PeerError)
            assert "NCCL cannot begin in worker:0: unhandled cuda error" in str(failure)


def test_who_waits_for_a_process_that_fails_is_told(libraries: Path) -> None:
    """The other one fails when NCCL has been given this one's work already."""
    waits = threading.Event()

    def work(devices: Any, how: Any) -> None:
        one = Nccl(devices, **how)
        rows = on(devices, [[np.ones(3, "float32")]])
        one.all_reduce(rows, rows, threads=1)
        devices[0].synchronize()
        if how["peers"].me == 1:
            how["peers"].meet("all_reduce float32[3] times None and 1.0 by NCCL")
            assert waits.wait(60)
            raise KeyError("in its own code")
        one.all_reduce(rows, rows, threads=1)
        waits.set()
        devices[0].copy_out(rows[0][0])

    with world(libraries) as there:
        here, failed = processes(there, ["cuda:0", "cuda:1"], work)
        assert isinstance(failed, KeyError)
        assert isinstance(here, PeerError) and "in its own code" in str(here)
        assert there.handles[0].gone == "aborted" or there.handles[1].gone == "aborted"
        there.gpu.drain()
