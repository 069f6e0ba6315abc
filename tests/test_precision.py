"""Operations on float16 and bfloat16: computed in float32, rounded once; see also _gradients."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from narrow import DTYPES, bits, gradients, grid, narrow, nearest, normal, whole, wide

import minidist as md
from minidist import ops
from minidist.errors import ShapeError

quick = settings(deadline=None, max_examples=30)
both = pytest.mark.parametrize("dtype", DTYPES)


# --- rounding -----------------------------------------------------------------------------------


@quick
@given(narrow, st.lists(st.floats(), max_size=20))
def test_a_float64_is_rounded_once(dtype, values):
    assert (bits(ops.constant(values, dtype)) == nearest(values, dtype)).all()


@both
def test_halfway_points_are_rounded_to_even_and_their_neighbours_are_not(dtype):
    numbers = grid(dtype)
    halves = (numbers[1:] + numbers[:-1]) / 2
    for values in (halves, np.nextafter(halves, 0), np.nextafter(halves, np.inf)):
        for sign in (1, -1):
            x = ops.constant(sign * values)
            assert (bits(ops.cast(x, dtype)) == nearest(sign * values, dtype)).all()


@both
def test_every_number_goes_to_float32_and_back(dtype):
    numbers = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
    x = ops.constant(numbers)
    back = ops.cast(ops.cast(x, "float32"), dtype)
    assert x.dtype == back.dtype == DTYPES[dtype]
    assert (bits(back) == bits(numbers)).all()
    assert np.array_equal(ops.cast(x, "float32").numpy(), wide(numbers), equal_nan=True)


def test_whole_numbers_are_rounded_once():
    values = np.array([2**25 + 2**17 + 1, 2**40 + 2**32 + 1, -(2**30), 257, 0])
    x = ops.cast(ops.constant(values), "bfloat16")
    assert (bits(x) == nearest(values, "bfloat16")).all()


def test_ml_dtypes_is_imported_only_where_bfloat16_is_named():
    program = """
import sys, minidist as md
md.constant([1.0], "float16") * 2
assert "ml_dtypes" not in sys.modules
md.constant([1.0], "bfloat16")
assert "ml_dtypes" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# --- forward, bit for bit -----------------------------------------------------------------------

ELEMENTWISE = {
    "add": (ops.add, np.add),
    "subtract": (ops.subtract, np.subtract),
    "multiply": (ops.multiply, np.multiply),
    "divide": (ops.divide, np.divide),
    "negative": (lambda a, b: ops.negative(a), lambda a, b: -a),
    "exp": (lambda a, b: ops.exp(a), lambda a, b: np.exp(a)),
    "log": (lambda a, b: ops.log(ops.square(a)), None),
    "square": (lambda a, b: ops.square(a), lambda a, b: a * a),
    "cube": (lambda a, b: ops.power(a, 3), lambda a, b: np.power(a, 3.0)),
    "relu": (lambda a, b: ops.relu(a), lambda a, b: np.maximum(a, 0)),
    "number": (lambda a, b: 3 * a, lambda a, b: 3 * a),
}
SHAPES = [((), ()), ((0, 3), (0, 3)), ((1,), (7,)), ((5, 3), (3,)), ((33, 65), (33, 65))]


@both
@pytest.mark.parametrize("name", [name for name in ELEMENTWISE if name != "log"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_elementwise(name, shapes, dtype):
    operation, oracle = ELEMENTWISE[name]
    a, b = (normal(shape, dtype, seed) for seed, shape in enumerate(shapes))
    y = operation(ops.constant(a), ops.constant(b))
    expected = oracle(wide(a), wide(b))
    assert y.shape == expected.shape and y.dtype == DTYPES[dtype]
    assert (bits(y) == nearest(expected, dtype)).all()


@both
def test_log_and_square_root(dtype):
    x = np.abs(normal((7, 9), dtype, 3))
    for operation, oracle in ((ops.log, np.log), (ops.sqrt, np.sqrt)):
        assert (bits(operation(ops.constant(x))) == nearest(oracle(wide(x)), dtype)).all()


@both
def test_a_number_takes_the_dtype_of_the_tensor_beside_it(dtype):
    x = normal((50,), dtype, 1)
    tenth = nearest(0.1, dtype).astype(np.uint16).view(DTYPES[dtype])
    assert (bits(ops.constant(x) * 0.1) == nearest(wide(x) * wide(tenth), dtype)).all()
    assert (ops.constant(x) * x[0]).dtype == DTYPES[dtype]
    with pytest.raises(ShapeError, match=f"{dtype} and float32"):
        ops.constant(x) + ops.constant([1.0])


@both
def test_comparisons_are_exact(dtype):
    a, b = whole((40,), dtype, 1, 3), whole((40,), dtype, 2, 3)
    assert (ops.less(a, b).numpy() == (wide(a) < wide(b))).all()
    assert (ops.equal(a, b).numpy() == (wide(a) == wide(b))).all()
    assert int(ops.argmax(a)) == np.argmax(wide(a))


@both
@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (5, 33, 7), (0, 3, 2), (3, 0, 2)])
def test_matrix_products(n, k, m, dtype):
    x, w, b = whole((n, k), dtype, 1), whole((k, m), dtype, 2), whole((m,), dtype, 3)
    exact = wide(x) @ wide(w)
    assert (bits(ops.matmul(x, w)) == nearest(exact, dtype)).all()
    assert (bits(ops.dense(x, w, b)) == nearest(exact + wide(b), dtype)).all()
    assert (bits(ops.bias_add(x, x[0] if n else w[:, 0])) >= 0).all()


def convolved(x, w):
    """A convolution without padding, stride 1, as its definition says."""
    kh, kw = w.shape[:2]
    y = np.zeros((len(x), x.shape[1] - kh + 1, x.shape[2] - kw + 1, w.shape[3]))
    for i, j in product(range(kh), range(kw)):
        y += x[:, i : i + y.shape[1], j : j + y.shape[2]].astype(np.float64) @ w[i, j]
    return y


@both
@pytest.mark.parametrize(
    ("n", "size", "c", "window", "k"), [(2, 7, 3, 3, 5), (3, 5, 8, 1, 4), (0, 4, 1, 2, 2)]
)
def test_convolution_and_its_gradients(n, size, c, window, k, dtype):
    x, w = whole((n, size, size, c), dtype, 1), whole((window, window, c, k), dtype, 2)
    exact = convolved(wide(x), wide(w))
    dy = whole(exact.shape, dtype, 3)
    y, (dx, dw) = gradients(lambda x, w: ops.conv2d(x, w, 1, "VALID"), x, w, dy=dy)
    assert (bits(y) == nearest(exact, dtype)).all()
    around = [(0, 0), (window - 1,) * 2, (window - 1,) * 2, (0, 0)]
    back = convolved(np.pad(wide(dy), around), wide(w)[::-1, ::-1].swapaxes(2, 3))
    assert (bits(dx) == nearest(back, dtype)).all()
    filters = convolved(wide(x).transpose(3, 1, 2, 0), wide(dy).transpose(1, 2, 0, 3))
    assert (bits(dw) == nearest(filters.transpose(1, 2, 0, 3), dtype)).all()


@both
def test_pooling(dtype):
    x, dy = whole((2, 4, 6, 3), dtype, 1), whole((2, 2, 3, 3), dtype, 2)
    windows = wide(x).reshape(2, 2, 2, 3, 2, 3)
    y, (dx,) = gradients(lambda x: ops.max_pool(x, 2), x, dy=dy)
    assert (bits(y) == nearest(windows.max((2, 4)), dtype)).all()
    assert dx.dtype == DTYPES[dtype] and wide(dx.numpy()).sum() == wide(dy).sum()
    y, (dx,) = gradients(lambda x: ops.average_pool(x, 2), x, dy=dy)
    assert (bits(y) == nearest(windows.mean((2, 4)), dtype)).all()
    assert (bits(dx) == nearest(wide(dy).repeat(2, 1).repeat(2, 2) / 4, dtype)).all()


@both
@pytest.mark.parametrize("axis", [None, 0, 1, (0, 2), -1])
@pytest.mark.parametrize("shape", [(30, 7, 11), (0, 7, 2)])
def test_sums_and_means_are_taken_in_float32(axis, shape, dtype):
    x = whole(shape, dtype, 5)
    exact = wide(x).sum(axis)
    y, (dx,) = gradients(lambda x: ops.reduce_sum(x, axis), x)
    assert (bits(y) == nearest(exact, dtype)).all() and (wide(dx.numpy()) == 1).all()
    y, (dx,) = gradients(lambda x: ops.reduce_mean(x, axis), x)
    count = np.float32(max(x.size // max(exact.size, 1), 1))
    assert (bits(y) == nearest(exact / count, dtype)).all()
    assert (bits(dx) == nearest(np.full(shape, 1 / count), dtype)).all()


@both
def test_a_mean_is_right_where_the_sum_or_the_count_is_too_large(dtype):
    x = np.ones(70_000, DTYPES[dtype])
    y, (dx,) = gradients(ops.reduce_mean, x)
    assert float(y) == 1
    assert (bits(dx) == nearest(np.float32(1) / np.float32(70_000), dtype)).all()
    assert np.isinf(float(ops.reduce_sum(x))) == (dtype == "float16")


@both
def test_what_only_moves_elements(dtype):
    x = normal((4, 6), dtype, 1)
    for operation, oracle in (
        (lambda x: ops.reshape(x, (3, -1)), lambda x: x.reshape(3, -1)),
        (ops.transpose, np.transpose),
        (lambda x: x[1:, ::2], lambda x: x[1:, ::2]),
        (ops.stop_gradient, lambda x: x),
    ):
        assert (bits(operation(ops.constant(x))) == bits(oracle(x))).all()
    y, (dx,) = gradients(lambda x: ops.transpose(x[1:, ::2]), x)
    assert y.shape == (3, 3) and wide(dx.numpy()).sum() == 9


@both
def test_embedding_adds_up_rows_in_float32(dtype):
    table = whole((4, 3), dtype, 1)
    ids = np.array([2] * 300 + [0])
    dy = np.ones((301, 3), DTYPES[dtype])
    y, (slices,) = gradients(lambda table: ops.embedding(table, ids), table, dy=dy)
    assert (bits(y) == bits(table[ids])).all()
    for gradient in (slices.to_dense(), slices.coalesced().to_dense()):
        assert (bits(gradient) == nearest([[1] * 3, [0] * 3, [300] * 3, [0] * 3], dtype)).all()


# --- the ends of the range ----------------------------------------------------------------------


@both
def test_infinities_and_nans_go_through(dtype):
    x = np.array([1, np.inf, -np.inf, np.nan], np.float32).astype(DTYPES[dtype])
    y = ops.constant(x)
    assert (bits(y + 1) == nearest([2, np.inf, -np.inf, np.nan], dtype)).all()
    assert np.isnan(float(ops.reduce_sum(y))) and np.isnan(wide(ops.softmax(y).numpy())).all()
    assert wide((y * 2).numpy())[1:3].tolist() == [np.inf, -np.inf]
    assert np.isnan(wide(ops.matmul(ops.reshape(y, (1, 4)), ops.reshape(y, (4, 1))).numpy())).all()
    assert y.device.ops.first_nonfinite([y.array[:1], y.array]) == 1


@both
def test_too_large_becomes_infinite_and_small_numbers_stay(dtype):
    numbers = grid(dtype)
    largest = ops.constant(numbers[-1:], dtype)
    assert np.isinf(wide((largest + largest).numpy())).all()
    small = ops.constant(numbers[1:4], dtype)
    assert wide((small + small).numpy()).tolist() == (2 * numbers[1:4]).tolist()
    assert wide((small * 0.5).numpy()).tolist() == [0, numbers[1], numbers[2]]
    assert wide(ops.relu(small).numpy()).tolist() == numbers[1:4].tolist()


def test_bfloat16_in_the_hands_of_others():
    x = md.constant([1.5, 2], "bfloat16")
    assert np.asarray(x).dtype == x.numpy().dtype == DTYPES["bfloat16"]
    assert np.asarray(x, "float32").tolist() == [1.5, 2]
    assert x[0].item() == 1.5 and repr(x) == "<Tensor [1.5, 2] (2,) bfloat16 on cpu:0>"
    with pytest.raises(BufferError, match="float32"):
        np.from_dlpack(x)
    with md.default_dtype("bfloat16"):
        assert md.constant(0.1).dtype == DTYPES["bfloat16"]
