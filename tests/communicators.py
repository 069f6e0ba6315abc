"""What tests of communicators share: rows of every kind of shape, and the check of a sum."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16
from orders import ORDER
from policies import same_bits

import minidist as md
from minidist import comm

REPLICAS = [1, 2, 3, 4, 5, 7, 8]
SHAPES = [(), (0,), (1,), (2, 0, 3), (5,), (7, 11), (1025,), (17, 1021)]  # the last is > 16 Ki
PACKINGS = [{}, {"gradient_repacking": 3}, {"agg_small_grads_max_bytes": 50}]
SIXTEEN = {"float16": np.float16, "bfloat16": bfloat16}
EVERY_SPEC = pytest.mark.parametrize("spec", ORDER)


def communicator(spec, n, packing=None, **options):
    if n == 1 and spec == "hierarchical_copy":
        pytest.skip("one device makes no two groups")
    return comm.make(spec, md.devices(f"cpu*{n}"), comm.packer(**packing or {}), **options)


def random_rows(n, dtype="float32", shapes=SHAPES, seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        return [[rng.integers(-99, 99, shape).astype(dtype) for shape in shapes] for _ in range(n)]
    return [[np.asarray(rng.normal(size=shape), dtype) for shape in shapes] for _ in range(n)]


def full_like(row):
    return [np.full_like(array, 77) for array in row]


def check(one, sources, right, wanted, weights=None, scale=1.0, threads=2):
    before = [[array.copy() for array in row] for row in sources]
    destinations = [full_like(sources[0]) for _ in range(wanted)]
    one.all_reduce(sources, destinations, weights, scale=scale, threads=threads)
    for destination in destinations:
        assert all(map(same_bits, destination, right))
    for row, was in zip(sources, before, strict=True):
        assert all(map(same_bits, row, was)), "a source was written to"
