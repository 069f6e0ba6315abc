"""What sums across ranks are made of: shared fences, plots, machines, runs, orders."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import orders as plain
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from policies import same_bits

from minidist.comm import orders
from minidist.comm.cutting import cut, extent, lengths, runs, runs_of
from minidist.comm.machines import Machines
from minidist.comm.row import Row
from minidist.comm.window import Part
from minidist.device import host
from minidist.kernels.rendezvous import SharedFence

OTHER = """
import mmap, sys
import numpy as np
from minidist.kernels.rendezvous import SharedFence

with open(sys.argv[1], "r+b") as file:
    memory = np.frombuffer(mmap.mmap(file.fileno(), 128), np.uint8)
there, back = SharedFence(memory[:64], float(sys.argv[2])), SharedFence(memory[64:])
for turn in range(1, 201):
    assert there.wait(turn, 60.0)
    back.advance()
"""


def fences(memory, spin=0.0):
    return SharedFence(memory[:64], spin), SharedFence(memory[64:], spin)


# --- fences -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spin", [0.0, 1e-4])
def test_two_processes_wait_for_each_other_by_turns(tmp_path, spin):
    path = tmp_path / "memory"
    path.write_bytes(bytes(128))
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 128), np.uint8)
    there, back = fences(memory, spin)
    with subprocess.Popen([sys.executable, "-c", OTHER, str(path), str(spin)]) as other:
        for turn in range(1, 201):
            there.advance()
            assert back.wait(turn, 60.0)
        assert other.wait(60) == 0
    assert (there.value, back.value) == (200, 200)


def test_a_shared_fence_is_its_memory():
    memory = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    one, same = SharedFence(memory[:64]), SharedFence(memory[:64])
    assert (one.value, one.wait(0), one.wait(1, 0.0), one.wait(1, 1e-3)) == (0, True, False, False)
    same.advance(3)
    assert (one.value, one.wait(3), one.wait(4, -1.0)) == (3, True, False)
    for wrong in (memory[:63], memory[32:96], memory[:128]):
        with pytest.raises(ValueError, match="64 bytes at a multiple of 64"):
            SharedFence(wrong)


# --- plots --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400)), max_size=40))
def test_plots_never_overlap_and_come_back(steps):
    """Against a plain list of what is taken: 0 retires the oldest plot, the rest take one."""
    size = 2048
    part = Part(np.zeros(size, np.uint8))
    taken: list[tuple[int, int, list[bool]]] = []  # begin, bytes, whether others still read it
    for what, nbytes in steps:
        if what == 0 and taken:
            start, length, read = taken[0]
            part.retire(start, length, lambda read=read: not read[0])
            read[0] = False
            del taken[0]
            continue
        start = part.take(nbytes)
        room = -(-nbytes // 64) * 64
        if start is None:
            free = size - sum(length for _, length, _ in taken)
            assert free < size or room > size, "there is room, and nothing in the way"
            continue
        assert start % 64 == 0
        assert 0 <= start <= size - room
        assert all(start + room <= a or a + n <= start for a, n, _ in taken)
        taken.append((start, room, [True]))
    for start, length, _ in taken:
        part.retire(start, length, lambda: True)
    assert part.take(size) == 0


def test_a_plot_that_is_still_read_is_not_taken_again():
    part = Part(np.zeros(128, np.uint8))
    assert part.take(100) == 0
    reading = [True]
    part.retire(0, 100, lambda: not reading[0])
    assert part.take(64) is None
    reading.clear()
    reading.append(False)
    assert part.take(64) == 0


def test_the_fence_of_a_new_plot_is_at_its_start():
    memory = host().allocate((192,), np.uint8)
    memory[:] = 7
    assert Part(memory).take(100) == 0
    assert SharedFence(memory[:64]).value == 0
    assert (memory[64:] == 7).all()


# --- machines -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [
        ("a", [[0]]),
        ("aaa", [[0, 1, 2]]),
        ("abc", [[0], [1], [2]]),
        ("aabb", [[0, 1], [2, 3]]),
        ("bbaacc", [[0, 1], [2, 3], [4, 5]]),
        ("aab", [[0], [1], [2]]),  # not as many on each
        ("abab", [[0], [1], [2], [3]]),  # not one behind the other
        ("abba", [[0], [1], [2], [3]]),
    ],
)
def test_machines_and_lanes(hosts, ranks):
    for me in range(len(hosts)):
        machines = Machines.of(hosts, me)
        assert [list(each) for each in machines.ranks] == ranks
        assert me in machines.here
        assert machines.lane[machines.ranks.index(machines.here)] == me
        place = list(machines.here).index(me)
        assert list(machines.lane) == [each[place] for each in ranks]
    assert Machines.of(hosts, 0, apart=True).count == len(hosts)


# --- runs and orders ----------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=5)


@given(SIZES, st.integers(1, 6), st.sampled_from([1, 8, 64]))
def test_runs_have_every_element_once_and_in_order(sizes, count, step):
    pieces = [(i, 0, size) for i, size in enumerate(sizes)]
    plan = runs_of(pieces, count, step)
    assert len(plan) == count
    found = [(i, k) for run in plan for i, a, b in run for k in range(a, b)]
    assert found == [(i, k) for i, size in enumerate(sizes) for k in range(size)]
    assert all(extent(run) % step == 0 for run in plan[:-1])
    assert max(map(extent, plan)) <= sum(sizes) / count + 2 * step
    if step == 1:
        assert [extent(run) for run in plan] == [extent(run) for run in runs(tuple(sizes), count)]


@given(
    SIZES,
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["float32", "float64", "float16", bfloat16]),
    st.sampled_from(["serial", "ring", "tree"]),
    st.booleans(),
)
def test_pieces_are_summed_in_the_order_of_the_whole(sizes, n, parts, dtype, order, weighted):
    """However the elements are cut, the bits are those of plain NumPy on whole tensors."""
    random = np.random.default_rng(1)
    rows = [[random.normal(0, 9, size).astype(dtype) for size in sizes] for _ in range(n)]
    weights = [1.0 + i for i in range(n)] if weighted else None
    wide = np.float64 if dtype == "float64" else np.float32
    right = []
    for tensors in zip(*rows, strict=True):
        terms = [
            tensor.astype(wide) * wide(weights[i] if weights else 1)
            for i, tensor in enumerate(tensors)
        ]
        with np.errstate(over="ignore"):
            right.append((plain.SUMS[order](terms) * wide(0.5)).astype(dtype))
    whole = [Row.on(host(), row) for row in rows]
    total = Row.on(host(), [np.full_like(array, 77) for array in rows[0]])
    plan = runs_of([(i, 0, size) for i, size in enumerate(sizes)], parts)
    for part, pieces in enumerate(plan):
        sources = [cut(row, plan)[part] for row in whole]
        where = {"at": pieces, "sizes": lengths(whole[0]), "threads": 1}
        orders.add(order, [cut(total, plan)[part]], sources, weights, 0.5, **where)
    assert all(map(same_bits, total, right))


def test_integers_wrap_around_and_take_no_weights():
    rows = [Row.on(host(), [np.array([200, 1], np.uint8)]) for _ in range(3)]
    for order in ("serial", "ring", "tree"):
        total = Row.on(host(), [np.zeros(2, np.uint8)])
        orders.add(order, [total], rows, at=[(0, 0, 2)], sizes=[2], threads=1)
        assert list(total[0]) == [600 % 256, 3]
    orders.check(np.dtype("i4"), None, 1.0)
    for dtype, weights, scale in (("i4", [1.0], 1.0), ("i4", None, 0.5), ("?", None, 1.0)):
        with pytest.raises(ValueError, match="cannot be added up"):
            orders.check(np.dtype(dtype), weights, scale)
