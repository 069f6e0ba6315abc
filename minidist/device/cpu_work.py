"""Kinds of work that several implementations can do: what each is called, and who can do it.

`gemm` is NumPy's BLAS, for convolutions with im2col before it: it can do everything. `direct` is a
kernel of our own for the gradient of a filter, which needs no columns; `tiles` are kernels of our
own for processors with AMX, which multiply float32 in parts of bfloat16. `onednn` has
primitives for images as they lie here, channels last, and `onednn-any` those for the layout that
oneDNN likes best, between two reorders of the images; `onednn-sgemm` is its other product of
matrices. oneDNN computes in float32, and convolves bfloat16 with sums in float32, which are rounded
once. For other narrow arrays there is no way here: what stores them is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from minidist.device import cpu_onednn
from minidist.device.base import Array
from minidist.device.cpu_convolution import convolve, convolve_filter, convolve_input
from minidist.device.ops import Shape, Window
from minidist.dtypes import is_narrow
from minidist.kernels import channel, convolution, tiles

Way = Callable[..., object]  # of arrays, of which the last is written
GEMM = "gemm"
_BY_COLUMNS = {
    "forward": convolve,
    "backward_input": convolve_input,
    "backward_filter": convolve_filter,
}
WIDENED = "float32"  # narrow arrays are widened, and the result is rounded
# Who can do what in float32, on one machine or another.
_ABLE = {
    "conv2d forward": (GEMM, "tiles", "onednn", "onednn-any"),
    "conv2d backward_input": (GEMM, "tiles", "onednn", "onednn-any"),
    "conv2d backward_filter": (GEMM, "direct", "tiles", "onednn", "onednn-any"),
    "matmul": (GEMM, "tiles", "onednn", "onednn-sgemm"),
}


def able(work: str) -> tuple[str, ...]:
    """Return who can do the work of a name, on one machine or another; () for other names."""
    kind, _, dtype = work.partition(",")[0].rpartition(" ")
    names = _ABLE.get(kind, ())
    if dtype == "float32" or not names:
        return names
    if dtype == "bfloat16" and kind != "matmul":
        return WIDENED, "onednn", "onednn-any"
    return (WIDENED,) if dtype in ("float16", "bfloat16") else (GEMM,)


def may_do(name: object, work: str) -> bool:
    """Whether `name` names who can do a work; of a work that there is not, any name does."""
    return isinstance(name, str) and name in (able(work) or (name,))


def is_here(name: str) -> bool:
    """Whether this process can use an implementation at all, if not for every work."""
    if name == "tiles":
        return tiles.has_tiles()
    if name == "direct":
        return convolution.can_filter_gradient(16)
    return not name.startswith("onednn") or cpu_onednn.find() is not None


class Convolution(NamedTuple):
    """One direction of a convolution: x [n, h, w, c], filter [kh, kw, c, k].

    `forward` takes (x, w, y), or (x, w, bias, y), `backward_input` (dy, w, dx) and
    `backward_filter` (x, dy, dw).
    """

    direction: str
    x: Shape
    w: Shape
    window: Window
    dtype: np.dtype[Any]
    threads: int
    bias: bool = False

    @property
    def name(self) -> str:
        """All that matters for who is the fastest, but the number of images."""
        window, (kh, kw, _, k) = self.window, self.w
        return (
            f"conv2d {self.direction} {self.dtype}, image {_by(self.x[1:])}, "
            f"filter {_by((kh, kw, k))}, strides {_by(window.strides)}, "
            f"padding {_by(window.before)} {_by(window.after)}, threads {self.threads}"
        )

    @property
    def y(self) -> Shape:
        return self.x[0], *self.window.output, self.w[3]

    @property
    def arrays(self) -> tuple[Shape, ...]:
        """The shapes of the arrays, in the order in which they are taken."""
        bias = ((self.w[3],),) if self.bias else ()
        orders: dict[str, tuple[Shape, ...]] = {
            "forward": (self.x, self.w, *bias, self.y),
            "backward_input": (self.y, self.w, self.x),
            "backward_filter": (self.x, self.y, self.w),
        }
        return orders[self.direction]

    @property
    def operations(self) -> int:
        """Floating-point ones: two for each product that is added to a sum."""
        return 2 * self.x[0] * prod(self.window.output) * prod(self.w)

    def ways(self) -> Iterator[tuple[str, Way]]:
        narrow = is_narrow(self.dtype)
        if not narrow:
            columns = partial(_BY_COLUMNS[self.direction], self.window)
            yield GEMM, self._convolve_and_add if self.bias else columns
        if (
            self.direction == "backward_filter"
            and self.dtype == np.float32
            and self.threads == 1
            and convolution.can_filter_gradient(self.w[3])
        ):
            yield "direct", self._direct
        if self.dtype == np.float32 and self.threads == 1:
            tiled = tiles.Convolution(
                x=self.x,
                w=self.w,
                y=self.y,
                strides=self.window.strides,
                before=self.window.before,
            )
            if getattr(tiled, f"can_{self.direction}"):
                yield "tiles", getattr(tiled, self.direction)
        onednn = cpu_onednn.find()
        if onednn is None or self.dtype.name not in ("float32", "bfloat16"):
            return
        for name, own_layout in (("onednn", False), ("onednn-any", True)):
            shapes = onednn.Convolution(
                x=self.x,
                w=self.w,
                y=self.y,
                strides=self.window.strides,
                before=self.window.before,
                after=self.window.after,
                own_layout=own_layout,
                narrow=narrow,
                has_bias=self.bias,
                threads=self.threads,
            )
            primitive = getattr(shapes, self.direction)()
            if primitive is not None:
                yield name, primitive.run

    def _convolve_and_add(self, x: Array, w: Array, bias: Array, y: Array) -> None:
        convolve(self.window, x, w, y)
        channel.bias(y, bias, y, threads=self.threads)

    def _direct(self, x: Array, dy: Array, dw: Array) -> None:
        convolution.filter_gradient(x, dy, dw, *self.window.strides, *self.window.before)


class Product(NamedTuple):
    """A matrix product c = a [n, k] @ b [k, m], each given transposed if so said."""

    a: Shape
    b: Shape
    transpose_a: bool
    transpose_b: bool
    dtype: np.dtype[Any]
    threads: int

    @property
    def name(self) -> str:
        """All that matters but the number of examples: it is how many rows `a` has as given."""
        a = f"({self.a[1]}xn)" if self.transpose_a else f"(nx{self.a[1]})"
        b = f"({_by(self.b)})"
        if self.transpose_a:
            b = f"({self.b[0]}xn)" if self.transpose_b else f"(nx{self.b[1]})"
        turned = " transposed" if self.transpose_b else ""
        return f"matmul {self.dtype}, {a} by {b}{turned}, threads {self.threads}"

    @property
    def arrays(self) -> tuple[Shape, Shape, Shape]:
        return self.a, self.b, (self.a[self.transpose_a], self.b[not self.transpose_b])

    @property
    def operations(self) -> int:
        return 2 * prod(self.a) * self.b[not self.transpose_b]

    def ways(self) -> Iterator[tuple[str, Way]]:
        if not is_narrow(self.dtype):
            yield GEMM, self._blas
        if self.dtype != np.float32:
            return
        if self.threads == 1 and tiles.has_tiles():
            yield "tiles", self._on_tiles
        onednn = cpu_onednn.find()
        if onednn is None:
            return
        lengths = {
            "n": self.a[self.transpose_a],
            "k": self.a[not self.transpose_a],
            "m": self.b[not self.transpose_b],
            "transpose_a": self.transpose_a,
            "transpose_b": self.transpose_b,
            "threads": self.threads,
        }
        primitive = onednn.matmul(**lengths)
        if primitive is not None:
            yield "onednn", primitive.run
        yield "onednn-sgemm", partial(onednn.sgemm, **lengths)

    def _blas(self, a: Array, b: Array, c: Array) -> None:
        np.matmul(a.T if self.transpose_a else a, b.T if self.transpose_b else b, out=c)

    def _on_tiles(self, a: Array, b: Array, c: Array) -> None:
        tiles.multiply(a, b, c, self.transpose_a, self.transpose_b)


def _by(lengths: tuple[int, ...]) -> str:
    return "x".join(map(str, lengths))
