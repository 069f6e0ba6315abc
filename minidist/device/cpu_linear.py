"""Convolutions and matrix products on a CPU, each by the implementation that is fastest for it.

Work of some size goes the way that was chosen for its kind (cpu_choice.py), small work the plain
one. What was made for a shape is kept.

MINIDIST_KERNELS, or `set_kernels`, says who chooses: `auto` measures, `gemm` and `onednn` take
these wherever they can, and the path of a file of choices fixes them.

Where a replica has several threads, one library must have them all, since each lets its threads
spin for a while after its work: `auto` then means `onednn`, unless that is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from minidist import observe, threads
from minidist.device import cpu_choice, cpu_onednn
from minidist.device.base import Array
from minidist.device.cpu_narrow import widened
from minidist.device.cpu_work import PLAIN, Convolution, Product, Run
from minidist.device.ops import Shape, Window
from minidist.dtypes import is_narrow
from minidist.errors import UsageError
from minidist.kernels import reduce

Work = Convolution | Product

SMALL = 1 << 20  # floating-point operations up to which there is nothing to choose
MOST = 4096  # kinds of work for which what was made is kept
WIDENED = "float32"  # narrow arrays are widened, and the result is rounded
KINDS = ("auto", "gemm", "onednn")

_kernels: str | None = None  # what MINIDIST_KERNELS or set_kernels says
_choices: cpu_choice.Choices | None = None
_runs: dict[Work, Run] = {}
_used: dict[str, str] = {}


def set_kernels(name: str) -> None:
    """Let `auto`, `gemm`, `onednn` or a file of choices say which implementations compute.

    Raises UsageError for a file that cannot be read, and for `onednn` where it cannot be used.
    """
    global _kernels, _choices
    if name == "onednn" and cpu_onednn.find() is None:
        raise UsageError(
            f"kernels of onednn are asked for, but {cpu_onednn.why_not()}; or ask for auto"
        )
    if name == "auto":
        _choices = cpu_choice.of_machine(cpu_onednn.versions())
    else:
        _choices = None if name in KINDS else cpu_choice.Choices(Path(name), {}, fixed=True)
    _kernels = name
    _runs.clear()
    _used.clear()


def kernels() -> str:
    """Return what says which implementations compute: `auto`, `gemm`, `onednn` or a path."""
    if _kernels is None:
        set_kernels(os.environ.get("MINIDIST_KERNELS") or "auto")
    assert _kernels is not None
    return _kernels


def choices() -> cpu_choice.Choices | None:
    """Return what remembers the choices; None where there is nothing to choose."""
    kernels()
    return _choices


def used() -> dict[str, str]:
    """Return, for each kind of work that there was, which implementation does it."""
    return dict(_used)


def conv2d(x: Array, w: Array, window: Window) -> Array:
    y = np.empty((len(x), *window.output, w.shape[3]), x.dtype)
    work = Convolution("forward", x.shape, w.shape, window, x.dtype, threads.each())
    return _do(work, x, w, y)


def conv2d_backward_input(dy: Array, w: Array, x_shape: Shape, window: Window) -> Array:
    dx = np.empty(x_shape, dy.dtype)
    work = Convolution("backward_input", x_shape, w.shape, window, dy.dtype, threads.each())
    return _do(work, dy, w, dx)


def conv2d_backward_filter(x: Array, dy: Array, w_shape: Shape, window: Window) -> Array:
    dw = np.empty(w_shape, x.dtype)
    work = Convolution("backward_filter", x.shape, w_shape, window, x.dtype, threads.each())
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
    work = Product(a.shape, b.shape, transpose_a, transpose_b, a.dtype, threads.each())
    return _do(work, a, b, c)


def _do(work: Work, a: Array, b: Array, c: Array) -> Array:
    run = _runs.get(work) or _find(work, a, b, c)
    if observe.watching:
        observe.worked(work)
    run(a, b, c)
    return c


def _find(work: Work, a: Array, b: Array, c: Array) -> Run:
    ways = _ways(work)
    name, run = next(ways)
    if work.operations > SMALL and kernels() != PLAIN:
        at_hand = {name: run, **dict(ways)}
        wanted = _wanted(work, at_hand, a, b, c)
        name = wanted if wanted in at_hand else name
        run = at_hand[name]
    if len(_runs) >= MOST:
        _runs.clear()
        _used.clear()
    _runs[work] = run
    _used[work.name] = name
    return run


def _ways(work: Work) -> Iterator[tuple[str, Run]]:
    """Yield the ways to do a work, that which can do everything first."""
    if is_narrow(work.dtype):
        yield WIDENED, partial(_widened, work._replace(dtype=np.dtype(np.float32)))
    yield from work.ways()


def _widened(work: Work, a: Array, b: Array, c: Array) -> None:
    wide = _do(work, widened(a), widened(b), np.empty(c.shape, np.float32))
    with np.errstate(all="ignore"):
        reduce.cast([c], [wide])


def _wanted(work: Work, at_hand: dict[str, Run], a: Array, b: Array, c: Array) -> str | None:
    """Return by which of the ways to do the work; c's memory is used to measure them."""
    if _choices is None or (work.threads > 1 and kernels() == "auto"):
        return "onednn"
    return _choices.get(work.name, {name: partial(run, a, b, c) for name, run in at_hand.items()})


def _after_fork() -> None:
    if _choices is not None:
        _choices.renew()
    if any(work.threads > 1 for work in _runs):
        cpu_onednn.give_up()
        _runs.clear()


os.register_at_fork(after_in_child=_after_fork)
