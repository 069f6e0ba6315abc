"""Distributed input: larger parts first, every example once, and the devices they are on."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from minidist.errors import ShapeError
from minidist.input import split_sizes


@given(st.integers(0, 1000), st.integers(1, 20))
def test_parts_are_even_and_the_larger_ones_first(examples, replicas):
    sizes = split_sizes(examples, replicas)
    assert sum(sizes) == examples and len(sizes) == replicas
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=5), st.integers(1, 5))
def test_each_example_reaches_one_replica_in_order(batches, n):
    source = np.arange(100.0)
    starts = np.cumsum([0, *batches])
    globals_ = [{"x": source[a:b], "y": np.arange(a, b)} for a, b in pairwise(starts)]
    with md.Strategy(f"cpu*{n}") as strategy:
        seen = []
        for batch in strategy.distribute_dataset(globals_):
            parts = [md.select_replica(i, batch) for i in range(n)]
            for i, part in enumerate(parts):
                assert part["x"].device.short == f"cpu:{i}" and part["y"].dtype == np.int64
            assert [len(part["x"]) for part in parts] == split_sizes(
                sum(len(part["x"]) for part in parts), n
            )
            seen += [value for part in parts for value in part["x"].numpy()]
    assert seen == list(range(sum(batches)))


def test_replicas_get_their_own_part_and_its_true_size():
    with md.Strategy("cpu*3") as strategy:
        (batch,) = strategy.distribute_dataset([np.arange(4.0)])
        sizes = strategy.run(lambda x: (x.shape[0], float(md.ops.reduce_sum(x))), batch)
    assert md.select_replica(0, sizes) == (2, 1.0)
    assert md.select_replica(2, sizes) == (1, 3.0)
    with md.Strategy("cpu*3") as strategy:
        (batch,) = strategy.distribute_dataset([np.arange(1.0)])
        assert strategy.run(lambda x: x.shape[0] + 0.5, batch).values == (1.5, 0.5, 0.5)


def test_arrays_of_different_length_are_an_error():
    with md.Strategy("cpu*2") as strategy, pytest.raises(ShapeError, match="same first dimension"):
        next(iter(strategy.distribute_dataset([(np.zeros(3), np.zeros(4))])))
