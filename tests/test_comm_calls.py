"""What communicators do beside summing: 16 bits on the way, many calls at once, no allocation."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from communicators import (
    EVERY_SPEC,
    PACKINGS,
    SHAPES,
    SIXTEEN,
    check,
    communicator,
    full_like,
    random_rows,
)
from orders import ORDER, summed

import minidist as md
from minidist import comm
from minidist.device.cpu import CpuDevice

# --- 16 bits on the way -------------------------------------------------------------------------


@EVERY_SPEC
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("compact", SIXTEEN)
def test_what_is_compact_is_rounded_before_the_sum_and_after(spec, n, compact):
    narrow = SIXTEEN[compact]
    sources = random_rows(n)
    rounded = [[np.asarray(a.astype(narrow).astype(np.float32)) for a in row] for row in sources]
    for weights, packing in ((None, {}), ([3.0 + i for i in range(n)], PACKINGS[1])):
        totals = summed(spec, rounded, weights, 1 / 7)
        right = [np.asarray(total.astype(narrow).astype(np.float32)) for total in totals]
        one = communicator(spec, n, packing, compact=compact)
        assert one.order == ORDER[spec]
        check(one, sources, right, n, weights, 1 / 7)


def test_what_is_compact_is_rounded_only_once():
    """2048 + 1 is 2048 in float16, 2048 + 1 + 1 is not; float64 does not go by way of float32."""
    one = communicator("copy", 3, compact="float16")
    destination = [np.zeros(1)]
    one.reduce([[np.array([x])] for x in (2048.0, 1.0, 1.0)], destination, threads=1)
    assert destination[0] == 2050
    barely_above_half = 1 + 2**-8 + 2**-40  # bfloat16 has 1 and 1 + 2^-7; float32 takes the half
    one = communicator("copy", 2, compact="bfloat16")
    one.reduce([[np.array([barely_above_half])], [np.zeros(1)]], destination, threads=1)
    assert destination[0] == 1 + 2**-7


def test_what_is_too_large_for_float16_is_infinite_without_a_warning():
    for compact, right in (("float16", np.inf), ("bfloat16", 2.0**20)):
        destination = [np.zeros(2, np.float32)]
        sources = [[np.array([2.0**19, 1], np.float32)]] * 2
        communicator("xring", 2, compact=compact).reduce(sources, destination, threads=1)
        assert list(destination[0]) == [right, 2]


def test_compact_leaves_other_dtypes_alone():
    kinds = ["int64", "float32", "float16"]
    sources = [[np.array([1001 + i], dtype) for dtype in kinds] for i in range(2)]
    destination = full_like(sources[0])
    communicator("copy", 2, compact="bfloat16").reduce(sources, destination, threads=1)
    assert [array.dtype for array in destination] == kinds
    assert destination[0] == 2003 and destination[2] == np.float16(2003)
    assert destination[1] == 2000  # 1000 and 1004 in steps of 4; 2004 lies between 2000 and 2008


def test_one_device_sends_nothing_so_nothing_is_rounded():
    destination = [np.zeros(1, np.float32)]
    one = comm.make("auto", md.devices("cpu*1"), compact="float16")
    one.reduce([[np.full(1, 0.1, np.float32)]], destination, threads=1)
    assert destination[0] == np.float32(0.1)


# --- many at once, and the steady state ---------------------------------------------------------


@EVERY_SPEC
def test_several_threads_may_call_one_communicator(spec):
    one = communicator(spec, 3, PACKINGS[2], compact=None)
    jobs = [random_rows(3, "float32", SHAPES, seed) for seed in range(4)]
    right = [summed(spec, sources) for sources in jobs]
    start, failures = threading.Barrier(len(jobs)), []

    def work(sources, totals):
        try:
            start.wait()
            for _ in range(4):
                check(one, sources, totals, 3)
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=work, args=both) for both in zip(jobs, right, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class Counting(CpuDevice):
    """A device that counts its allocations."""

    count = 0

    def allocate(self, shape, dtype):
        self.count += 1
        return super().allocate(shape, dtype)


@EVERY_SPEC
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("compact", [None, "bfloat16"])
def test_after_the_first_call_nothing_is_allocated(spec, packing, compact, monkeypatch):
    """Decision 10."""
    devices = [Counting(i, f"cpu:{i}") for i in range(5)]
    server = Counting(0, "cpu:9")
    monkeypatch.setattr(comm, "host", lambda: server)
    one = comm.make(spec, devices, comm.packer(**packing), compact=compact)
    sources = random_rows(5)
    for row in sources:
        row.append(np.ones(3, int))
        row.append(np.ones(3, np.float16))
    destinations = [full_like(row) for row in sources]
    counts = []
    for _ in range(3):
        one.all_reduce(sources, destinations, threads=2)
        counts.append(server.count + sum(device.count for device in devices))
    assert counts[0] > 0 and counts == [counts[0]] * 3


@EVERY_SPEC
def test_arrays_that_are_not_contiguous_are_errors(spec):
    one = communicator(spec, 2)
    rows = [[np.ones((20, 100), np.float32)] for _ in range(2)]
    slanted = [np.zeros((100, 20), np.float32).T]
    with pytest.raises(ValueError, match="contiguous"):
        one.all_reduce(rows, [slanted], threads=1)
    with pytest.raises(ValueError, match="contiguous"):
        one.all_reduce([rows[0], slanted], [rows[1]], threads=1)


@EVERY_SPEC
def test_rows_that_do_not_fit_name_who_brings_them(spec):
    one = communicator(spec, 2)
    rows = [[np.ones(3, np.float32)] for _ in range(2)]
    with pytest.raises(ValueError, match="destination 1"):
        one.all_reduce(rows, [rows[0], [np.ones(4, np.float32)]], threads=1)
    with pytest.raises(ValueError, match="3 weights for 2 replicas"):
        one.all_reduce(rows, [rows[0]], [1, 2, 3], threads=1)
