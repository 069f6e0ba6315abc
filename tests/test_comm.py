"""The contract of communicators: what holds for every algorithm with every packing.

Which sum comes out is said in orders.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from orders import ORDER, summed
from policies import same_bits

import minidist as md
from minidist import comm
from minidist.comm.packing import Packs, SmallTensors
from minidist.comm.row import Row
from minidist.device.cpu import CpuDevice
from minidist.errors import ShapeError

N = 3
DTYPES = ["float32", "float64", "int32", "int64", "uint8"]
PACKERS = {
    "none": {},
    "one": {"gradient_repacking": 1},
    "eight": {"gradient_repacking": 8},
    "small": {"agg_small_grads_max_bytes": 40},
    "pairs": {"agg_small_grads_max_bytes": 1 << 20, "agg_small_grads_max_group": 2},
}
EVERY = pytest.mark.parametrize(
    ("spec", "packing"), [(spec, packing) for spec in ORDER for packing in PACKERS]
)


def communicator(spec, packing="none", n=N, **options):
    return comm.make(spec, md.devices(f"cpu*{n}"), comm.packer(**PACKERS[packing]), **options)


@st.composite
def rows(draw, dtypes=tuple(DTYPES)):
    """Return what 1 to 5 replicas give: rows of up to six tensors, alike but for the elements."""
    kinds = draw(
        st.lists(
            st.tuples(
                hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
                st.sampled_from(dtypes),
            ),
            min_size=1,
            max_size=6,
        )
    )
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    return [
        [
            np.asarray(
                random.integers(0, 256, shape)
                if np.dtype(dtype).kind in "iu"
                else random.normal(size=shape),
                dtype,
            )
            for shape, dtype in kinds
        ]
        for _ in range(draw(st.integers(1, 5)))
    ]


def empty_like(row):
    return [np.full_like(array, 77) for array in row]


@EVERY
@settings(max_examples=8, deadline=None)
@given(sources=rows(), wanted=st.integers(1, 6))
@example(sources=[[np.ones((0, 2))]] * 2, wanted=1)
def test_every_destination_gets_the_sum_in_the_specs_order(spec, packing, sources, wanted):
    """155: whatever the packing, bit for bit; integers wrap around."""
    before = [[array.copy() for array in row] for row in sources]
    destinations = [empty_like(sources[0]) for _ in range(wanted)]
    communicator(spec, packing).all_reduce(sources, destinations, threads=2)
    for destination in destinations:
        assert all(map(same_bits, destination, summed(spec, sources)))
    for row, was in zip(sources, before, strict=True):
        assert all(map(same_bits, row, was)), "a source was written to"
    only = empty_like(sources[0])
    communicator(spec, packing).reduce(sources, only, threads=1)
    assert all(map(same_bits, only, summed(spec, sources)))


@EVERY
@settings(max_examples=6, deadline=None)
@given(sources=rows(("float32", "float64")), scale=st.sampled_from([1.0, 1 / 3]))
def test_weights_and_scale(spec, packing, sources, scale):
    """Decision 1: Σ(w_i·x_i)·scale."""
    weights = [1.0 + 3 * i for i in range(len(sources))]
    for given_weights in (None, weights):
        destination = empty_like(sources[0])
        communicator(spec, packing).all_reduce(
            sources, [destination], given_weights, scale=scale, threads=2
        )
        assert all(map(same_bits, destination, summed(spec, sources, given_weights, scale)))


@EVERY
def test_a_destination_may_be_a_source(spec, packing):
    for dtype in DTYPES:
        for which in range(N):
            sources = [[np.array([1, 2 + i], dtype), np.array(i, dtype)] for i in range(N)]
            right = summed(spec, sources)
            communicator(spec, packing).all_reduce(sources, [sources[which]], threads=1)
            assert all(map(same_bits, sources[which], right))


@EVERY
def test_narrow_floats_are_summed_in_float32_and_rounded_once(spec, packing):
    """Decision 13: 2048 + 1 is 2048 in float16, but 2048 + 1 + 1 is 2050."""
    sources = [[np.full(3, x, np.float16), np.ones(2, np.float32)] for x in (2048, 1, 1)]
    destination = empty_like(sources[0])
    communicator(spec, packing).all_reduce(sources, [destination], threads=1)
    assert same_bits(destination[0], np.full(3, 2050, np.float16))
    assert same_bits(destination[1], np.full(2, 3, np.float32))


@EVERY
def test_large_tensors_over_threads(spec, packing):
    random = np.random.default_rng(7)
    sources = [
        [random.normal(size=n).astype(np.float32) for n in (90_000, 3, 20_001)] for _ in "12"
    ]
    for threads in (1, 2, 5):
        destination = empty_like(sources[0])
        communicator(spec, packing).all_reduce(sources, [destination], threads=threads)
        assert all(map(same_bits, destination, summed(spec, sources)))


@pytest.mark.parametrize("spec", ORDER)
def test_rows_that_do_not_fit_are_errors_that_name_the_replica(spec):
    ones, twos = [np.ones(2), np.ones(3)], [np.ones(2), np.ones(3)]
    one = communicator(spec)
    for wrong in ([np.ones(2)], [np.ones(2), np.ones((3, 1))], [np.ones(2), np.ones(3, "f4")]):
        with pytest.raises(ShapeError, match="replica 2"):
            one.all_reduce([ones, twos, wrong], [ones], threads=1)
    with pytest.raises(ValueError, match="no destination"):
        one.all_reduce([ones, twos], [], threads=1)
    with pytest.raises(ShapeError, match="bool"):
        one.all_reduce([[np.ones(2, bool)]] * 2, [[np.ones(2, bool)]], threads=1)
    with pytest.raises(ShapeError, match="int64 cannot be added up with weights"):
        one.all_reduce([[np.ones(2, int)]] * 2, [[np.ones(2, int)]], [1, 2], threads=1)


# --- packing ------------------------------------------------------------------------------------


def row_of(*sizes, dtype="float32"):
    return [np.arange(size, dtype=dtype) for size in sizes]


def travelling(packer, row):
    """Return what goes over the wire for a row, and what comes out of it in a row of zeros."""
    destination = [np.zeros_like(array) for array in row]
    (device,) = md.devices("cpu")
    rows = [Row.on(device, arrays) for arrays in (row, destination)]
    with packer.packed(rows[:1], rows[1:]) as (given, wanted):
        sent = [np.array(array) for array in given[0]]
        for array, arrived in zip(wanted[0], sent, strict=True):
            array[...] = arrived
    return sent, destination


def test_packs_are_one_buffer_cut_in_equal_parts_with_the_remainder_in_the_last():
    """155."""
    row = row_of(4, 2, 1, 7)
    sent, _ = travelling(Packs(3), row)
    assert [len(pack) for pack in sent] == [4, 4, 6]
    np.testing.assert_array_equal(np.concatenate(sent), np.concatenate(row))
    sent, _ = travelling(Packs(8), row_of(3))
    assert [len(pack) for pack in sent] == [0] * 7 + [3]


def test_each_dtype_has_a_buffer_of_its_own():
    sent, _ = travelling(Packs(1), [*row_of(4, 2), *row_of(3, dtype="int64"), *row_of(1)])
    assert sorted((pack.dtype.name, len(pack)) for pack in sent) == [("float32", 7), ("int64", 3)]


def test_small_tensors_share_buffers_of_neighbours():
    """156: at most max_bytes each, at most max_group together; one alone stays as it is."""
    sent, _ = travelling(SmallTensors(8, 3), row_of(1, 2, 1, 1, 9, 2, 9, 1, 1))
    # [1 2 1] make a group of three; the next 1 has no neighbour left; 2 stands between large ones
    assert [len(part) for part in sent] == [4, 2, 1, 9, 2, 9]
    sent, _ = travelling(SmallTensors(8, 9), [*row_of(1, 1), *row_of(1, 1, dtype="float64")])
    assert [(part.dtype.name, len(part)) for part in sent] == [("float32", 2), ("float64", 2)]


@pytest.mark.parametrize("packer", [Packs(1), Packs(3), SmallTensors(8, 2), SmallTensors(99, 9)])
@settings(max_examples=25, deadline=None)
@given(sources=rows())
def test_what_was_packed_comes_out_as_it_was(packer, sources):
    """155: unpacking restores the shapes."""
    _, out = travelling(packer, sources[0])
    assert all(map(same_bits, out, sources[0]))


class Counting(CpuDevice):
    """A device that counts its allocations."""

    count = 0

    def allocate(self, shape, dtype):
        self.count += 1
        return super().allocate(shape, dtype)


def test_packing_allocates_nothing_in_the_steady_state():
    """Decision 10."""
    device = Counting(0, "cpu:0")
    sources = [Row.on(device, row_of(4, 2, 1, 7)) for _ in range(3)]
    counts = []
    for _ in range(3):
        with Packs(2).packed(sources, [sources[0]]):
            pass
        counts.append(device.count)
    assert counts == [3, 3, 3]


def test_options_of_packing():
    """155, 156."""
    assert comm.packer() is None
    assert isinstance(comm.packer(gradient_repacking=2), Packs)
    assert isinstance(comm.packer(agg_small_grads_max_bytes=10), SmallTensors)
    with pytest.raises(ValueError, match="gradient_repacking=-1"):
        comm.packer(gradient_repacking=-1)
    with pytest.raises(ValueError, match="agg_small_grads_max_bytes=-5"):
        comm.packer(agg_small_grads_max_bytes=-5)
    with pytest.raises(ValueError, match="one of them"):
        comm.packer(gradient_repacking=1, agg_small_grads_max_bytes=1)
    for max_bytes, max_group in ((0, 1), (1, 0), (-1, 5), (5, -1)):
        with pytest.raises(ValueError, match="greater than 0"):
            SmallTensors(max_bytes, max_group)
    with pytest.raises(ValueError, match="at least 1"):
        Packs(0)
    with pytest.raises(ValueError, match="gradient_repacking=-1"):
        md.Strategy("cpu*2", gradient_repacking=-1)
