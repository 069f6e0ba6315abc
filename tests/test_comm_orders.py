"""Every algorithm sums in the order of its class, bit for bit, for any number of replicas."""

from __future__ import annotations

import numpy as np
import pytest
from communicators import (
    EVERY_SPEC,
    PACKINGS,
    REPLICAS,
    SHAPES,
    SIXTEEN,
    check,
    communicator,
    full_like,
    random_rows,
)
from orders import SUMS, summed
from policies import same_bits

import minidist as md
from minidist.comm.copy import Copy
from minidist.comm.cutting import cut, lengths, runs, shares
from minidist.comm.row import Row
from minidist.comm.tree import twigs
from minidist.device.cpu import CpuDevice
from minidist.device.cpu_ops import CpuOps

# --- the order ----------------------------------------------------------------------------------


@EVERY_SPEC
@pytest.mark.parametrize("n", REPLICAS)
def test_the_sum_in_its_order_for_every_packing_and_number_of_destinations(spec, n):
    for dtype in ("float32", "float64"):
        sources = random_rows(n, dtype)
        for weights in (None, [1.0 + 3 * i for i in range(n)]):
            for scale in (1.0, 1 / 3):
                right = summed(spec, sources, weights, scale)
                for packing, wanted in zip(PACKINGS, (n, 1, n + 2), strict=True):
                    check(communicator(spec, n, packing), sources, right, wanted, weights, scale)
        right = summed(spec, sources)
        for wanted in (1, 2, 3, n, 2 * n + 1):
            check(communicator(spec, n), sources, right, wanted, threads=1)


@EVERY_SPEC
@pytest.mark.parametrize("n", REPLICAS)
def test_integers_wrap_around_in_any_order(spec, n):
    for dtype in ("int32", "uint8"):
        sources = random_rows(n, dtype)
        check(communicator(spec, n, PACKINGS[1]), sources, summed("copy", sources), n)


@EVERY_SPEC
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("narrow", SIXTEEN)
def test_narrow_floats_are_summed_in_float32_in_the_same_order(spec, n, narrow):
    dtype = SIXTEEN[narrow]
    sources = [[array.astype(dtype) for array in row] for row in random_rows(n)]
    wide = [[array.astype(np.float32) for array in row] for row in sources]
    for weights, packing in ((None, {}), ([0.5 + i for i in range(n)], PACKINGS[2])):
        right = [np.asarray(total.astype(dtype)) for total in summed(spec, wide, weights, 1 / 3)]
        check(communicator(spec, n, packing), sources, right, n, weights, 1 / 3)


@EVERY_SPEC
def test_tensors_of_several_dtypes_are_summed_each_in_its_own(spec):
    n = 3
    kinds = ["float32", "int64", "float64", "float32", "uint8", "float64"]
    sources = [
        [random_rows(n, dtype, SHAPES[i : i + 1], i)[r][0] for i, dtype in enumerate(kinds)]
        for r in range(n)
    ]
    check(communicator(spec, n, PACKINGS[1]), sources, summed(spec, sources), n)


@EVERY_SPEC
@pytest.mark.parametrize("n", REPLICAS)
def test_destinations_may_be_sources(spec, n):
    """All of them in place, in place the other way round, or one."""
    for order in (range(n), range(n - 1, -1, -1), [n // 2]):
        sources = random_rows(n)
        right = summed(spec, sources)
        communicator(spec, n).all_reduce(sources, [sources[r] for r in order], threads=2)
        for r in order:
            assert all(map(same_bits, sources[r], right))


@EVERY_SPEC
def test_tensors_summed_together_or_alone_have_the_same_bits(spec):
    """So buckets and groups of variables change nothing."""
    sources = random_rows(5)
    one = communicator(spec, 5)
    together = full_like(sources[0])
    one.reduce(sources, together, threads=2)
    for i, total in enumerate(together):
        alone = full_like([total])
        one.reduce([[row[i]] for row in sources], alone, threads=1)
        assert same_bits(alone[0], total)


@EVERY_SPEC
def test_fewer_replicas_than_devices(spec):
    """Where some have nothing to bring, the order is that of the others."""
    one = communicator(spec, 5)
    for n in (1, 2, 3, 4):
        sources = random_rows(n)
        check(one, sources, summed(spec, sources), 5)


@EVERY_SPEC
def test_nan_and_infinity_reach_every_replica(spec):
    sources = random_rows(4)
    sources[2][-1][3, 5] = np.nan
    sources[1][-1][16, 0] = np.inf
    destinations = [full_like(sources[0]) for _ in range(4)]
    communicator(spec, 4).all_reduce(sources, destinations, threads=2)
    for destination in destinations:
        assert np.isnan(destination[-1][3, 5]) and np.isposinf(destination[-1][16, 0])
        assert all(map(same_bits, destination, destinations[0]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_classes_agree_within_the_bound(dtype):
    """Decision 1."""
    bound = {"float32": 1e-5, "float64": 1e-12}[dtype]
    for n in REPLICAS:
        parts = [row[-1] for row in random_rows(n, dtype)]
        serial, ring, tree = (SUMS[order](parts) for order in ("serial", "ring", "tree"))
        for other in (ring, tree):
            assert np.linalg.norm(other - serial) <= bound * np.linalg.norm(serial)
    assert not same_bits(ring, serial) and not same_bits(tree, serial), "what is tested is nothing"


# --- the pieces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 18))
def test_twigs_are_a_power_of_two_of_one_or_two_replicas(n):
    groups = twigs(range(n))
    assert len(groups) & (len(groups) - 1) == 0
    assert 2 * len(groups) > n >= len(groups)
    assert [replica for group in groups for replica in group] == list(range(n))
    assert {len(group) for group in groups} <= {1, 2}


@pytest.mark.parametrize("plan", [shares, runs])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_cover_every_element_once(plan, count):
    (device,) = md.devices("cpu")
    row = Row.on(device, [np.zeros(shape, int) for shape in SHAPES])
    parts = cut(row, plan(lengths(row), count))
    assert len(parts) == count
    for part in parts:
        for piece in part:
            piece += 1
    assert all((array == 1).all() for array in row)
    sizes = [sum(piece.size for piece in part) for part in parts]
    assert max(sizes) - min(sizes) <= (len(row) if plan is shares else 1)


def test_copy_sums_tensor_i_on_device_i_modulo_their_number():
    class Noting(CpuOps):
        def __init__(self):
            self.summed = []

        def sum(self, destinations, sources, **options):
            self.summed += [array.size for array in sources[0]]
            super().sum(destinations, sources, **options)

    devices = [CpuDevice(i, f"cpu:{i}") for i in range(3)]
    for device in devices:
        device.ops = Noting()
    sources = [[np.ones(size, np.float32) for size in range(1, 8)] for _ in range(3)]
    for reducers, expected in (
        (None, [[1, 4, 7], [2, 5], [3, 6]]),
        (devices[1:2], [[], [1, 2, 3, 4, 5, 6, 7], []]),
    ):
        destination = full_like(sources[0])
        for device in devices:
            device.ops.summed.clear()
        Copy(devices, None, reducers).all_reduce(sources, [destination], threads=1)
        assert [device.ops.summed for device in devices] == expected
        assert all((array == 3).all() for array in destination)
