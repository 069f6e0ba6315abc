"""Sums across ranks: bit for bit in the order that the spec says, for ranks on any machines.

One box plays several: a group of ranks is told on which machine each of them is. Those on one
share memory, and between two of them there are messages.
"""

from __future__ import annotations

import os
from functools import partial
from itertools import product

import numpy as np
import pytest
import ranks
from heard import Heard
from ml_dtypes import bfloat16
from orders import ring, serial, tree
from policies import same_bits

import minidist as md
from minidist import comm, observe
from minidist.comm.peers import Ranks
from minidist.comm.row import Row
from minidist.device import host
from minidist.traffic import Outline

EVERYTHING = os.environ.get("MINIDIST_TEST_ALL") == "1"  # not only a choice of machines
# Workers by machine. The last two have no lanes, so that every rank counts as a machine.
MACHINES = ["aa", "ab", "aaa", "abc", "aaaa", "aabb", "abcd", "aab", "abab"]
# By spec: the order over all replicas; or that in a machine, and that over the machines' sums.
SPECS = {
    "auto": (serial, None),
    "pscpu#2": (serial, None),
    "xring": (ring, None),
    "rechd": (tree, None),
    "hierarchical_copy": (tree, None),
    "copy/xring": (serial, ring),
    "copy/rechd": (serial, tree),
    "pscpu/pscpu": (serial, serial),
    "psgpu/pscpu#2": (serial, serial),
    "xring/xring": (ring, ring),
    "hierarchical_copy/rechd": (tree, tree),
    "rechd/collective": (tree, serial),
    "collective": (serial, serial),
    "copy:20:xring/xring": None,  # below 21 elements the first, else the last but one
}
SHAPES = [(), (0,), (5,), (7, 11), (2, 0, 3), (1025,), (41, 1021)]
NARROW = [np.dtype(np.float16), np.dtype(bfloat16)]


def patient():
    """Return the patience of ranks that come from cases in which others have no part."""
    return 60.0, 90.0


def group(cluster, machines):
    """Return the workers of a cluster as peers on some machines."""
    ranks, names = cluster.workers, [cluster.name(rank) for rank in cluster.workers]
    return Ranks(cluster.engine, cluster.channel(), ranks, names, patient, list(machines))


def by_machine(machines):
    """Return the ranks of each machine, or each by itself where there are no lanes."""
    hosts = sorted(set(machines))
    together = [[r for r, name in enumerate(machines) if name == host] for host in hosts]
    size = len(together[0])
    regular = [list(range(k * size, (k + 1) * size)) for k in range(len(hosts))]
    return together if together == regular else [[rank] for rank in range(len(machines))]


def rows_of(count, dtype, shapes=SHAPES, exact=False, seed=0):
    random = np.random.default_rng(seed)
    if exact or np.dtype(dtype).kind in "iu":
        return [[random.integers(-9, 9, s).astype(dtype) for s in shapes] for _ in range(count)]
    return [
        [np.asarray(random.normal(size=s) * 9).astype(dtype) for s in shapes] for _ in "x" * count
    ]


def right(spec, groups, rows, weights, scale):
    """Return the sum as plain NumPy has it. groups: the numbers of the replicas of each machine."""
    totals = []
    for t, like in enumerate(rows[0]):
        inside, between = SPECS[spec] or ((serial, None) if like.size <= 20 else (ring, ring))
        kind = np.float32 if like.dtype in NARROW else like.dtype.type
        terms = {
            i: row[t].astype(kind) if weights is None else kind(weights[i]) * row[t].astype(kind)
            for i, row in enumerate(rows)
            if weights is None or weights[i]
        }
        if between is None or len(groups) == 1:
            total = inside(list(terms.values()))
        else:
            sums = [[terms[i] for i in members if i in terms] for members in groups]
            total = between([inside(parts) for parts in sums if parts])
        totals.append(np.asarray(total if scale == 1 else total * kind(scale)).astype(like.dtype))
    return totals


def every_sum(replicas):
    """Give for how many replicas in a rank, in which dtype and with which weights to sum."""
    n = 2 * replicas
    yield 2, "float32", None
    yield 2, "float32", [1.0 + 2 * i for i in range(n)]
    yield 2, "float32", [0.0, *[1.0 + i % 2 for i in range(1, n)]]
    yield 2, "float64", [0.0] * (n - 1) + [3.0]
    yield 2, bfloat16, [1.0 + i % 2 for i in range(n)]
    yield 1, "float64", None
    yield 1, "float16", [2.0] + [0.0] * (replicas - 1)
    yield 1, "int32", None
    yield 2, "uint8", None


def sums(machines, cluster):
    """What every replica gets, and what it has brought is as it was."""
    peers, workers = group(cluster, machines), len(machines)
    for spec in SPECS:
        machine = by_machine(machines)
        if spec == "collective":  # MPI knows no machines
            machine = [[rank] for rank in range(workers)]
        for n, dtype, weights in every_sum(workers):
            one = comm.make(spec, md.devices(f"cpu*{n}"), peers=peers, counts=[n] * workers)
            assert one.replicas == n * workers
            groups = [[rank * n + k for rank in members for k in range(n)] for members in machine]
            rows = rows_of(n * workers, dtype, exact="collective" in spec)
            scale = 1.0 if np.dtype(dtype).kind in "iu" else 0.25
            own = rows[cluster.task * n : (cluster.task + 1) * n]
            before = [[array.copy() for array in row] for row in own]
            wanted = [[np.full_like(array, 77) for array in rows[0]] for _ in range(n)]
            one.all_reduce(own, wanted, weights, scale=scale, threads=1)
            with np.errstate(over="ignore"):
                expected = right(spec, groups, rows, weights, scale)
            for row in wanted:
                for t, (got, best) in enumerate(zip(row, expected, strict=True)):
                    assert same_bits(got, best), (n, spec, dtype, weights, t)
            for row, was in zip(own, before, strict=True):
                assert all(map(same_bits, row, was)), "a source was written to"
    peers.leave()


def in_place_and_mixed(machines, cluster):
    """In place; rows of several dtypes; not as many replicas in all ranks."""
    peers, workers = group(cluster, machines), len(machines)
    counts = [1 + rank % 2 for rank in range(workers)]
    first = sum(counts[: cluster.task])
    for spec in ("auto", "xring", "copy/xring", "rechd/rechd", "copy/collective"):
        devices = md.devices(f"cpu*{counts[cluster.task]}")
        one = comm.make(spec, devices, peers=peers, counts=counts)
        kinds = ["float32", "int64", "float16", "float64", "float32"]
        parts = [rows_of(sum(counts), kind, SHAPES[i::5], True) for i, kind in enumerate(kinds)]
        rows = [[array for part in same for array in part] for same in zip(*parts, strict=True)]
        own = rows[first : first + counts[cluster.task]]
        expected = [sum(arrays).astype(arrays[0].dtype) for arrays in zip(*rows, strict=True)]
        one.all_reduce(own, own, threads=2)
        assert all(all(map(same_bits, row, expected)) for row in own), spec
    peers.leave()


def moved_bytes(machines, cluster):
    """What is counted where it moves is what was predicted from shapes."""
    peers, workers = group(cluster, machines), len(machines)
    kinds = [
        ((5,), "f4"),
        ((), "f8"),
        ((3, 0), "f4"),
        ((7, 11), "f8"),
        ((311, 1021), "f4"),
        ((9,), "f2"),
    ]
    kinds = [(shape, np.dtype(dtype)) for shape, dtype in kinds]
    outlines = [Outline(int(np.prod(shape)), dtype) for shape, dtype in kinds]
    for spec, (n, compact) in product(SPECS, ((1, None), (2, None), (2, "float16"))):
        devices = md.devices(f"cpu*{n}")
        one = comm.make(spec, devices, peers=peers, counts=[n] * workers, compact=compact)
        own = [Row.on(device, [np.ones(*kind) for kind in kinds]) for device in devices]
        places = [[device] * len(kinds) for device in devices] + [[host()] * len(kinds)]
        wanted = [Row([np.ones(*kind) for kind in kinds], place) for place in places]
        heard = Heard()
        with observe.attached(heard):
            one.all_reduce(own, wanted, threads=1)
        assert one.predicted_bytes(outlines, places) == heard.links, (n, spec, compact)
    peers.leave()


def totals(machines, cluster):
    """The closed forms, for N bytes that all shares divide; what all ranks count together."""
    peers, workers = group(cluster, machines), len(machines)
    size = 12 * 64 * 1024
    N = 4 * size
    machine = by_machine(machines)
    m, r = len(machine), len(machine[0])
    expected = {  # each rank reads the others' rows for its share, and their shares of the total
        "auto": 2 * m * (r - 1) * N + 2 * (m - 1) * N,  # and a chain goes there and back
        "xring": 2 * (workers - 1) * N,
        "copy/xring": 2 * m * (r - 1) * N + 2 * (m - 1) * N,
        "copy/rechd": 2 * m * (r - 1) * N + 2 * (m - 1) * N,
        "copy/pscpu": 2 * m * (r - 1) * N + 2 * (m - 1) * N,
    }
    for spec, total in expected.items():
        one = comm.make(spec, md.devices("cpu"), peers=peers, counts=[1] * workers)
        row, heard = [np.ones(size, "f4")], Heard()
        with observe.attached(heard):
            one.all_reduce([row], [row], threads=1)
        network = {link: n for link, n in heard.links.items() if "worker" in link}
        brought = peers.meet("compare", str(sum(network.values())).encode())
        assert sum(map(int, brought)) == total, spec
    peers.leave()


def in_the_window(machines, cluster):
    """Into a row in the window, and within it, come the same bits and bytes as elsewhere."""
    peers, workers = group(cluster, machines), len(machines)
    kinds = [((), np.dtype("f4")), ((3, 0), np.dtype("f8")), ((700, 1111), np.dtype("f4"))]
    kinds += [((9,), np.dtype(bfloat16)), ((9,), np.dtype("i4"))]
    for spec in ("auto", "xring", "rechd", "auto:9:xring"):
        one = comm.make(spec, md.devices("cpu"), peers=peers, counts=[1] * workers)
        row = one.allocate(kinds)
        random = np.random.default_rng(cluster.task)
        source = [np.asarray(random.normal(0, 9, shape)).astype(dtype) for shape, dtype in kinds]
        for weights, scale in ((None, 1.0), ([1.0 + i for i in range(workers)], 0.5)):
            k = len(kinds) if weights is None else 4  # weights are for floating point
            usual = [np.zeros(*kind) for kind in kinds[:k]]
            heard = Heard()
            one.all_reduce([source[:k]], [usual], weights, scale=scale, threads=1)
            with observe.attached(heard):
                one.all_reduce([source[:k]], [row[:k]], weights, scale=scale, threads=1)
            assert all(map(same_bits, row, usual)), spec
            outlines = [Outline(array.size, array.dtype) for array in usual]
            predicted = one.predicted_bytes(outlines, [[one.devices[0]] * k])
            assert heard.links == predicted, spec
            for array, given in zip(row[:k], source, strict=False):
                array[...] = given
            one.all_reduce([row[:k]], [row[:k]], weights, scale=scale, threads=1)
            assert all(map(same_bits, row, usual)), spec
        if cluster.task == 0:  # in one rank elsewhere
            row = [np.zeros(*kind) for kind in kinds]
        one.all_reduce([source], [row], threads=1)
    peers.leave()


def verbs(machines, cluster):
    """broadcast, all_gather, reduce to one, reduce_scatter."""
    peers, workers = group(cluster, machines), len(machines)
    for n, spec in product((1, 2), ("auto", "copy:4:copy/xring")):
        count, first = n * workers, n * cluster.task
        one = comm.make(
            spec, md.devices(f"cpu*{n}"), peers=peers, counts=[n] * workers, compact="bfloat16"
        )
        mine = range(first, first + n)
        for root in range(count):
            rows = [
                [np.full((3, 2), k, "i2"), np.array(k + 0.5), np.full(400_000, k, bfloat16)]
                for k in mine
            ]
            one.broadcast(rows, root)
            for a, b, c in rows:
                assert (a == root).all()
                assert b == root + 0.5
                assert (c == root).all()
            row = [np.full(7, first + 1.0, "f8")] if root in mine else None
            ones = [[np.full(7, k + 1.0)] for k in mine]
            one.reduce(ones, row, root=root, threads=1)
            assert row is None or (row[0] == count * (count + 1) / 2).all()
        rows = [[np.full((3, k), k, bfloat16), np.arange(100_000 * k)][k % 2 :] for k in mine]
        every = one.all_gather(rows)
        assert len(every) == count
        for k, row in enumerate(every):
            assert len(row) == 2 - k % 2
            assert (row[-1] == np.arange(100_000 * k)).all()
            assert k % 2 or (row[0].shape == (3, k) and (row[0] == k).all())
        parts = [np.zeros((k + 1) * 11 // count - k * 11 // count) for k in mine]
        one.reduce_scatter([[np.arange(11.0)]] * n, [[part] for part in parts], threads=1)
        for k, part in zip(mine, parts, strict=True):
            assert (part == count * np.arange(k * 11 // count, (k + 1) * 11 // count)).all()
        with pytest.raises(md.errors.UsageError, match=f"no replica {count} of {count}"):
            one.broadcast([[np.ones(2)]] * n, count)
    peers.leave()


def blocks(machines, cluster):
    """Tensors of several blocks, where machines differ in their replicas, or in who has a say."""
    peers, size = group(cluster, machines), 600_000
    for counts, heard in (
        ([2, 2, 1, 1], None),
        ([1, 3, 1, 1], None),
        ([2, 2, 2, 2], [1.0] * 5 + [0.0] * 3),
        ([2, 2, 2, 2], [0.0] * 4 + [3.0] * 4),
    ):
        counts = counts[: len(machines)]
        replicas, first = sum(counts), sum(counts[: cluster.task])
        weights = heard and heard[:replicas]
        whole = np.arange(size, dtype=np.float32) % 1000
        says = weights or [1.0] * replicas
        expected = whole * np.float32(sum((k + 1) * says[k] for k in range(replicas)))
        for spec in ("auto", "copy/xring", "copy/rechd", "copy/pscpu", "copy/collective"):
            n = counts[cluster.task]
            one = comm.make(spec, md.devices(f"cpu*{n}"), peers=peers, counts=counts)
            rows = [[whole * np.float32(k + 1)] for k in range(first, first + n)]
            wanted = [np.zeros_like(whole)]
            one.all_reduce(rows, [wanted], weights, threads=1)
            assert same_bits(wanted[0], expected), (spec, counts, heard)
    peers.leave()


EVERY = {
    "blocks": (blocks, ["abc", "aabb"]),
    "sums": (sums, ["aaa", "abc", "aabb"]),
    "in_place_and_mixed": (in_place_and_mixed, ["aa", "abc", "aab", "aabb"]),
    "moved_bytes": (moved_bytes, ["aa", "abc", "aabb"]),
    "totals": (totals, ["aa", "abc", "aabb"]),
    "in_the_window": (in_the_window, ["aa", "aaa", "ab"]),
    "verbs": (verbs, ["abc", "aabb"]),
}
CASES = {
    f"{name}-{machines}": (len(machines), 0, partial(fn, machines))
    for name, (fn, every) in EVERY.items()
    for machines in (MACHINES if EVERYTHING and name != "totals" else every)
}


@pytest.fixture(scope="module")
def outcome(request):
    return ranks.run(__file__, 4, *ranks.chosen(request, CASES), limit=110)


@pytest.mark.parametrize("case", CASES)
def test_case(outcome, case):
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
