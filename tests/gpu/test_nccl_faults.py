"""What goes wrong in NCCL, on the stand-in: late errors, missing ranks, an abort that blocks."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl_standin import Faults
from summing import SHAPES, on, out, same, sums, whole_numbers, world

import minidist as md
from minidist import comm
from minidist.comm import nccl_ranks
from minidist.comm.nccl import Nccl
from minidist.comm.peers import Peers
from minidist.errors import HangError, PeerError
from minidist.patience import Waiting

SOON = (0.02, 0.2)
CALLS = sum(0 not in shape for shape in SHAPES)  # that a sum of `whole_numbers` takes
N = 5


def impatient(devices: Any) -> Nccl:
    return Nccl(devices, peers=Peers(lambda: SOON))


def all_reduce(one: Nccl) -> Any:
    rows = on(one.devices, whole_numbers(len(one.devices), "float32"))
    one.all_reduce(rows, rows, threads=1)
    return rows


def check_over(there: Any, one: Nccl, why: str) -> None:
    """It was aborted everywhere, says why ever after, and leaves streams that work."""
    assert [handle.gone for handle in there.handles] == ["aborted"] * len(one.devices)
    there.faults.__init__()  # from now on all is well
    there.gpu.may_hang = False
    with pytest.raises(PeerError, match=f"NCCL was aborted since: .*{why}.*make a new strategy"):
        all_reduce(one)
    one.close()
    rows = whole_numbers(len(one.devices), "float32")
    other = comm.make("nccl", one.devices)
    for device, row in zip(one.devices, all_reduce(other), strict=True):
        same(out(device, row), sums(rows))
    other.close()
    there.gpu.drain()


@pytest.mark.parametrize("spec", ["cuda*2", "cuda:0*3"])
def test_an_error_that_comes_later_ends_the_wait_for_the_sum(libraries: Path, spec: str) -> None:
    with world(libraries, faults=Faults(failing={CALLS: 6})) as there:
        there.gpu.may_hang = True
        one = impatient(md.devices(spec))
        for device, row in zip(one.devices, all_reduce(one), strict=True):
            out(device, row)
        rows = all_reduce(one)
        words = "NCCL says of rank 0 of ., on cuda:0.*: remote process exited"
        with pytest.raises(PeerError, match=words):
            one.devices[-1].copy_out(rows[-1][2])
        check_over(there, one, "remote process exited")


class Hearing(Peers):
    """Peers that keep what they are told of this process."""

    def __init__(self) -> None:
        super().__init__(lambda: SOON)
        self.heard: list[BaseException] = []

    def fail(self, failure: BaseException) -> None:
        self.heard.append(failure)


def test_the_peers_are_told_once_why_it_was_aborted(libraries: Path) -> None:
    with world(libraries, faults=Faults(refused={CALLS - 1: 1})) as there:
        peers = Hearing()
        one = Nccl(md.devices("cuda*2"), peers=peers)
        with pytest.raises(PeerError, match="unhandled cuda error") as caught:
            all_reduce(one)
        check_over(there, one, "unhandled cuda error")
        assert peers.heard == [caught.value]


def test_an_error_is_noticed_by_the_next_sum_too(libraries: Path) -> None:
    with world(libraries, faults=Faults(failing={0: 1})) as there:
        there.gpu.may_hang = True
        one = impatient(md.devices("cuda*2"))
        all_reduce(one)
        while not there.handles[0].error:
            there.gpu.step()
        with pytest.raises(PeerError, match="unhandled cuda error"):
            all_reduce(one)
        check_over(there, one, "unhandled cuda error")


def test_a_sum_that_does_not_end_is_reported_and_then_given_up(
    libraries: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with world(libraries, faults=Faults(never={1})) as there, caplog.at_level(logging.WARNING):
        there.gpu.may_hang = True
        one = impatient(md.devices("cuda*2"))
        rows = all_reduce(one)
        what = r"the all_reduce of float32\[\], .* with cuda:0, cuda:1 has not ended"
        with pytest.raises(HangError, match=what):
            one.devices[0].copy_out(rows[0][2])
        reports = [record.getMessage() for record in caplog.records]
        assert len(reports) == 1 and "has not ended: another rank may not have come" in reports[0]
        check_over(there, one, "has not ended")


def test_all_who_wait_are_told(libraries: Path) -> None:
    with world(libraries, faults=Faults(never={0})) as there:
        there.gpu.may_hang = True
        one = impatient(md.devices("cuda*2"))
        rows = all_reduce(one)
        failures: list[BaseException] = []

        def wait(k: int) -> None:
            try:
                one.devices[k].copy_out(rows[k][2])
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=wait, args=(k,)) for k in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1 <= len(failures) <= 2
        assert all(isinstance(failure, HangError | PeerError) for failure in failures)
        check_over(there, one, "has not ended")


def test_work_that_nccl_does_not_take_is_given_up(libraries: Path) -> None:
    with world(libraries, faults=Faults(not_taken={CALLS - 1})) as there:
        one = impatient(md.devices("cuda*2"))
        with pytest.raises(HangError, match=r"NCCL has not come to all_reduce .* another rank may"):
            all_reduce(one)
        check_over(there, one, "NCCL has not come to all_reduce")


def test_work_that_nccl_refuses(libraries: Path) -> None:
    with world(libraries, faults=Faults(refused={CALLS - 1: 1})) as there:
        one = impatient(md.devices("cuda*2"))
        with pytest.raises(PeerError, match=r"NCCL cannot all_reduce .*: unhandled cuda error"):
            all_reduce(one)
        check_over(there, one, "unhandled cuda error")


def test_a_rank_that_does_not_join(libraries: Path) -> None:
    with world(libraries, faults=Faults(no_joining=True)) as there:
        with pytest.raises(HangError, match="join the 2 ranks of an NCCL communicator with cuda:0"):
            impatient(md.devices("cuda*2"))
        assert there.live == 0


def test_joining_that_blocks(libraries: Path) -> None:
    """As it may with CuPy's binding, which waits for all ranks."""
    with world(libraries, binding="cupy", faults=Faults(no_joining=True)) as there:
        with pytest.raises(HangError, match="join the 2 ranks"):
            impatient(md.devices("cuda*2"))
        there.faults.no_joining = False  # so that its thread ends


def test_an_abort_that_blocks_is_left_behind(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl_ranks, "ABORT", 0.05)
    goes_on = threading.Event()
    with world(libraries, faults=Faults(never={0}, abort_waits_for=goes_on)) as there:
        there.gpu.may_hang = True
        one = impatient(md.devices("cuda*2"))
        rows = all_reduce(one)
        with pytest.raises(HangError, match="has not ended"):
            one.devices[0].copy_out(rows[0][2])
        assert any("NCCL did not abort" in record.getMessage() for record in caplog.records)
        left = [thread for thread in threading.enumerate() if thread.name == "nccl-abort"]
        assert len(left) == 2 and all(thread.daemon for thread in left)
        goes_on.set()
        for thread in left:
            thread.join(60)
        check_over(there, one, "has not ended")


def test_ctrl_c_while_nccl_takes_its_work(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with world(libraries, faults=Faults(not_taken={CALLS - 1})) as there:
        one = impatient(md.devices("cuda*2"))
        with monkeypatch.context() as changed:
            changed.setattr(Waiting, "tick", interrupted)
            with pytest.raises(KeyboardInterrupt):
                all_reduce(one)
        check_over(there, one, "KeyboardInterrupt")


def test_closing_does_not_wait_for_ever(libraries: Path, caplog: pytest.LogCaptureFixture) -> None:
    with world(libraries, faults=Faults(never={0})) as there:
        there.gpu.may_hang = True
        one = impatient(md.devices("cuda*2"))
        all_reduce(one)
        one.close()
        assert there.live == 0
        assert any("aborted when it was to be closed" in r.getMessage() for r in caplog.records)
        with pytest.raises(PeerError, match="its communicator was closed"):
            all_reduce(one)
        there.gpu.drain()


def test_what_is_closed_sums_no_more(libraries: Path) -> None:
    with world(libraries):
        one = comm.make("nccl", md.devices("cuda*2"))
        one.close()
        with pytest.raises(PeerError, match="its communicator was closed"):
            all_reduce(one)


def test_a_run_ends_with_what_has_gone_wrong(libraries: Path) -> None:
    with world(libraries, faults=Faults(failing={2: 6})) as there:
        there.gpu.may_hang = True
        strategy = md.Strategy("cuda:0,cuda:1", all_reduce_spec="nccl", overlap=False)
        with strategy.scope():
            w = md.Variable(np.zeros(N, "float32"), name="w")
        opt = md.optim.SGD(1.0)

        def step() -> Any:
            opt.apply_gradients([(md.constant(np.ones(N, "float32")), w)])
            return w.numpy()

        strategy.run(step)
        strategy.run(step)
        with pytest.raises(PeerError, match="remote process exited"):
            strategy.run(step)
        strategy.close()
        assert there.live == 0
        there.gpu.may_hang = False
        there.gpu.drain()


def test_two_communicators_in_two_threads(libraries: Path) -> None:
    """Whose devices are the same, in the opposite order."""
    rows = whole_numbers(2, "float32")
    right: list[bool] = []

    def work(one: comm.Communicator) -> None:
        for _ in range(10):
            wanted = on(one.devices, rows)
            one.all_reduce(wanted, wanted, threads=1)
            for device, row in zip(one.devices, wanted, strict=True):
                same(out(device, row), sums(rows))
        right.append(True)

    with world(libraries, 4) as there:
        every = [comm.make("nccl", md.devices(spec)) for spec in ("cuda:0,1", "cuda:1,0")]
        there.gpu.may_hang = True
        threads = [threading.Thread(target=work, args=(one,)) for one in every]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in every:
            one.close()
    assert right == [True, True]


def test_memory_is_held_until_nccl_has_read_and_written_it(libraries: Path) -> None:
    for seed in range(6):
        with world(libraries, seed):
            devices = md.devices("cuda*2")
            one = comm.make("nccl", devices)
            rows = whole_numbers(2, "float32", [(100,)])
            wanted = on(devices, rows)
            sources = on(devices, rows)
            one.all_reduce(sources, wanted, threads=1)
            del sources  # its memory is used again at once by whoever may
            for device in devices:
                device.ops.full((100,), 99, "float32")
            for device, row in zip(devices, wanted, strict=True):
                same(out(device, row), sums(rows))
            one.close()
