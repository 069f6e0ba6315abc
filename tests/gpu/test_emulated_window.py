"""window.cu, run thread by thread on the CPU, gives the bits of plain.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from emulator import TYPES, Emulator, assert_same_bits

from minidist.dtypes import as_array
from minidist.kernels import gpu_window, grid, plain

Place = Callable[..., np.ndarray]
Windows = plain.Windows

GEOMETRIES = {
    "one pixel": ((1, 1, 1, 1), Windows((1, 1), (1, 1), (1, 1), (0, 0))),
    "3x3 same": ((2, 5, 6, 3), Windows((5, 6), (3, 3), (1, 1), (1, 1))),
    "2x2 apart": ((2, 6, 4, 8), Windows((3, 2), (2, 2), (2, 2), (0, 0))),
    "3x3 strides 2": ((1, 7, 8, 16), Windows((4, 4), (3, 3), (2, 2), (1, 0))),
    "gaps": ((1, 9, 9, 4), Windows((3, 2), (2, 3), (3, 5), (0, 1))),
    "flat": ((2, 4, 9, 5), Windows((4, 5), (1, 5), (1, 2), (0, 2))),
    "larger than the image": ((1, 2, 3, 8), Windows((2, 3), (5, 5), (1, 1), (2, 2))),
    "no images": ((0, 3, 3, 2), Windows((3, 3), (3, 3), (1, 1), (1, 1))),
}

every_type = pytest.mark.parametrize("dtype", TYPES)
every_geometry = pytest.mark.parametrize("name", GEOMETRIES)
alignments = pytest.mark.parametrize("shift", [0, 1])


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(TYPES[dtype])


def exact(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.itemsize == 2 else x


def position(windows: Windows) -> gpu_window.Position:
    return (*windows.size, *windows.strides, *windows.before)


def pooled(shape: tuple[int, ...], windows: Windows) -> tuple[int, int, int, int]:
    return (shape[0], *windows.output, shape[3])


@every_type
@every_geometry
@alignments
def test_columns(machine: Emulator, place: Place, dtype: str, name: str, shift: int) -> None:
    shape, windows = GEOMETRIES[name]
    x = place(normal(shape, dtype), shift)
    row = windows.size[0] * windows.size[1] * shape[3]
    columns = place(np.ones((shape[0], *windows.output, row), x.dtype))
    gpu_window.im2col(machine, x, columns, position(windows))
    assert_same_bits(columns, as_array(plain.im2col(exact(x), windows), x.dtype))

    columns = place(normal(columns.shape, grid.wide(dtype).name, 1), shift)
    dx = place(np.ones_like(x))
    gpu_window.col2im(machine, columns, dx, position(windows))
    assert_same_bits(dx, as_array(plain.col2im(columns, shape, windows), x.dtype))


@every_type
@every_geometry
@alignments
def test_max_pool(machine: Emulator, place: Place, dtype: str, name: str, shift: int) -> None:
    shape, windows = GEOMETRIES[name]
    # Whole numbers, so that some are equal, without -0, of which NumPy's max takes either.
    whole = np.round(normal(shape, "float32") * 2) + 0
    x = place(whole.astype(TYPES[dtype]), shift)
    x.reshape(-1)[::7] = np.nan
    x.reshape(-1)[3::5] = -np.inf
    y = place(np.ones(pooled(shape, windows), x.dtype))
    argmax = place(np.full(y.shape, -1, np.int32), shift)
    gpu_window.max_pool(machine, x, y, argmax, position(windows))
    want, places = plain.max_pool(exact(x), windows)
    assert_same_bits(y, as_array(want, x.dtype))
    np.testing.assert_array_equal(argmax, places)

    dy, dx = place(normal(y.shape, dtype, 1)), place(np.ones_like(x), shift)
    gpu_window.max_pool_backward(machine, dy, argmax, dx, position(windows))
    want = plain.max_pool_backward(exact(dy), argmax, shape, windows)
    assert_same_bits(dx, as_array(want, x.dtype))


@every_type
@every_geometry
@alignments
def test_average_pool(machine: Emulator, place: Place, dtype: str, name: str, shift: int) -> None:
    shape, windows = GEOMETRIES[name]
    x = place(normal(shape, dtype), shift)
    y = place(np.ones(pooled(shape, windows), x.dtype))
    gpu_window.average_pool(machine, x, y, position(windows))
    assert_same_bits(y, as_array(plain.average_pool(exact(x), windows), x.dtype))

    dy, dx = place(normal(y.shape, dtype, 1)), place(np.ones_like(x), shift)
    gpu_window.average_pool_backward(machine, dy, dx, position(windows))
    want = plain.average_pool_backward(exact(dy), shape, windows)
    assert_same_bits(dx, as_array(want, x.dtype))


@every_type
@every_geometry
@alignments
def test_depthwise(machine: Emulator, place: Place, dtype: str, name: str, shift: int) -> None:
    shape, windows = GEOMETRIES[name]
    x = place(normal(shape, dtype), shift)
    w = place(normal((*windows.size, shape[3]), dtype, 1), shift)
    y = place(np.ones(pooled(shape, windows), x.dtype))
    gpu_window.depthwise(machine, x, w, y, position(windows))
    assert_same_bits(y, as_array(plain.depthwise(exact(x), exact(w), windows), x.dtype))

    dy, dx = place(normal(y.shape, dtype, 2)), place(np.ones_like(x), shift)
    gpu_window.depthwise_backward_input(machine, dy, w, dx, position(windows))
    want = plain.depthwise_backward_input(exact(dy), exact(w), shape, windows)
    assert_same_bits(dx, as_array(want, x.dtype))

    dw = place(np.ones_like(w), shift)
    gpu_window.depthwise_backward_filter(machine, x, dy, dw, position(windows))
    want = plain.depthwise_backward_filter(exact(x), exact(dy), windows)
    bound = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(dw.astype("f8"), want, rtol=bound, atol=bound)


def test_a_small_grid_strides_over_a_large_image(
    machine: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "BLOCKS", 2)
    windows = Windows((17, 19), (3, 3), (1, 1), (1, 1))
    x = normal((3, 17, 19, 4), "float32")
    columns = np.ones((3, 17, 19, 36), np.float32)
    gpu_window.im2col(machine, x, columns, position(windows))
    assert_same_bits(columns, plain.im2col(x, windows))
    dx = np.ones_like(x)
    gpu_window.col2im(machine, columns, dx, position(windows))
    assert_same_bits(dx, plain.col2im(columns, x.shape, windows))


def test_errors_name_the_array(machine: Emulator) -> None:
    x, y = np.ones((1, 4, 4, 2)), np.ones((1, 2, 2, 2))
    narrow, where = np.ones((1, 2, 2, 8), np.float16), (2, 2, 2, 2, 0, 0)
    with pytest.raises(TypeError, match="max_pool: argmax must be int32, got int64"):
        gpu_window.max_pool(machine, x, y, np.ones(y.shape, np.int64), where)
    with pytest.raises(ValueError, match="im2col: columns must have 32 elements"):
        gpu_window.im2col(machine, x, y, where)
    with pytest.raises(TypeError, match="col2im: columns must be float32, got float16"):
        gpu_window.col2im(machine, narrow, x.astype(np.float16), where)
    with pytest.raises(ValueError, match="lie wholly outside of images of 4x4"):
        gpu_window.average_pool(machine, x, np.ones((1, 3, 2, 2)), where)
    with pytest.raises(ValueError, match="window 0x2 and strides 1x1 must be positive"):
        gpu_window.average_pool(machine, x, y, (0, 2, 1, 1, 0, 0))
