"""Convolutions and matrix products on a CPU, each by the implementation that is fastest for it.

Work of some size goes the way that was chosen for its kind (cpu_choice.py), small work the plain
one. What was made for a shape is kept.

Who chooses is said by kernel_choice.py.

Where a replica has several threads, one library must have them all, since each lets its threads
spin for a while after its work: `auto` then means `onednn`, unless that is missing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from minidist import observe, threads
from minidist.device import cpu_choice, cpu_onednn, kernel_choice
from minidist.device.base import Array
from minidist.device.cpu_narrow import widened
from minidist.device.cpu_work import GEMM, WIDENED, Convolution, Product, Way, is_here
from minidist.device.ops import Shape, Window
from minidist.dtypes import is_narrow
from minidist.errors import UsageError
from minidist.kernels import reduce

log = logging.getLogger("minidist")

Work = Convolution | Product

SMALL = 1 << 20  # floating-point operations up to which there is nothing to choose
MOST = 4096  # kinds of work for which what was made is kept

_kernels: str | None = None  # who chose the ways that are taken
_choices: cpu_choice.Choices | None = None  # of this machine, for `auto`
_taken: dict[Work, tuple[str, Way]] = {}  # with the implementation's name
_has_team = False  # once there was work for several threads: OpenMP keeps them from then on


def set_kernels(name: str) -> None:
    """Let `auto`, `gemm`, `onednn` or a file of choices say which implementations compute.

    Raises UsageError for a file that cannot be used, and for `onednn` where it cannot. Of a file
    that names what is not here the log says so.
    """
    global _kernels, _choices
    if name == "onednn" and cpu_onednn.find() is None:
        raise UsageError(
            f"kernels of onednn are asked for, but {cpu_onednn.why_not()}; or ask for auto"
        )
    kernel_choice.set_name(name)
    lacking = {each for each in (kernel_choice.of_file() or {}).values() if not is_here(each)}
    if lacking:
        log.warning(
            "the file of choices %s names %s, which cannot be used here: such work goes by gemm, "
            "and its last bits may differ from those on other machines",
            name,
            " and ".join(sorted(lacking)),
        )
    _choices = cpu_choice.of_machine() if name == "auto" else None
    _kernels = name
    _taken.clear()


def kernels() -> str:
    """Return what says which implementations compute: `auto`, `gemm`, `onednn` or a path."""
    if _kernels is None:
        set_kernels(kernel_choice.name())
    assert _kernels is not None
    return _kernels


def choices() -> cpu_choice.Choices | None:
    """Return what remembers the choices; None where nothing is measured."""
    kernels()
    return _choices


def used() -> set[tuple[str, str]]:
    """Return each kind of work that there was, with the implementation that does it.

    Where few examples of a kind are small work and many are not, there may be two.
    """
    return {(work.name, name) for work, (name, _) in list(_taken.items())}


def conv2d(x: Array, w: Array, window: Window, bias: Array | None = None) -> Array:
    y = np.empty((len(x), *window.output, w.shape[3]), x.dtype)
    work = Convolution("forward", x.shape, w.shape, window, x.dtype, threads.per_replica())
    if bias is None:
        return _do(work, x, w, y)
    return _do(work._replace(bias=True), x, w, bias, y)


def conv2d_backward_input(dy: Array, w: Array, x_shape: Shape, window: Window) -> Array:
    dx = np.empty(x_shape, dy.dtype)
    work = Convolution("backward_input", x_shape, w.shape, window, dy.dtype, threads.per_replica())
    return _do(work, dy, w, dx)


def conv2d_backward_filter(x: Array, dy: Array, w_shape: Shape, window: Window) -> Array:
    dw = np.empty(w_shape, x.dtype)
    work = Convolution("backward_filter", x.shape, w_shape, window, x.dtype, threads.per_replica())
    return _do(work, x, dy, dw)


def matmul(
    a: Array,
    b: Array,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Array | None = None,
) -> Array:
    c = out
    if c is None:
        c = np.empty((a.shape[transpose_a], b.shape[not transpose_b]), a.dtype)
    work = Product(a.shape, b.shape, transpose_a, transpose_b, a.dtype, threads.per_replica())
    return _do(work, a, b, c)


def _do(work: Work, *arrays: Array) -> Array:
    name, way = _taken.get(work) or _found(work, arrays)
    if observe.watching:
        observe.worked(work, name)
    way(*arrays)
    return arrays[-1]


def _found(work: Work, arrays: Sequence[Array]) -> tuple[str, Way]:
    """Return the way that work of this shape goes from now on, and its name."""
    global _has_team
    with observe.span("choose", work.name):
        _has_team |= work.threads > 1
        ways = _ways(work)
        name, way = next(ways)
        if work.operations > SMALL and kernels() != GEMM:
            at_hand = {name: way, **dict(ways)}
            wanted = _wanted(work, at_hand, arrays)
            name = wanted if wanted in at_hand else name
            way = at_hand[name]
    if len(_taken) >= MOST:
        _taken.clear()
    _taken[work] = name, way
    return name, way


def _ways(work: Work) -> Iterator[tuple[str, Way]]:
    """Yield the ways to do a work, that which can do everything first."""
    if is_narrow(work.dtype):
        yield WIDENED, partial(_widened, work._replace(dtype=np.dtype(np.float32)))
    yield from work.ways()


def _widened(work: Work, *arrays: Array) -> None:
    *given, c = arrays
    wide = _do(work, *map(widened, given), np.empty(c.shape, np.float32))
    with np.errstate(all="ignore"):
        reduce.cast([c], [wide])


def _wanted(work: Work, at_hand: dict[str, Way], arrays: Sequence[Array]) -> str | None:
    """Return by which of the ways to do the work; the last array is used to measure them."""
    fixed = kernel_choice.of_file()
    if fixed is not None:
        return fixed.get(work.name)
    if _choices is None or work.threads > 1:
        return "onednn"
    return _choices.get(work.name, {name: partial(way, *arrays) for name, way in at_hand.items()})


def _after_fork() -> None:
    if _choices is not None:
        _choices.renew()
    if _has_team:
        cpu_onednn.give_up()
        _taken.clear()


os.register_at_fork(after_in_child=_after_fork)
