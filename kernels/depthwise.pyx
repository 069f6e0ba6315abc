"""Depthwise convolution: each channel of an image has a filter of its own. And its derivatives.

Arrays and windows are as in layer.pyx: images [n, h, w, c], windows [n, rows, columns, c], and
filters [kh, kw, c]. The bits do not depend on the number of threads or the kind of processor. A
TypeError names the array of a wrong type, a ValueError the one of a wrong size or layout.
"""

cimport numpy as cnp
from kernels.arrays cimport (
    PyThreadState,
    data,
    float_kind,
    let_go,
    md_parallel,
    take_back,
    the_team,
)
from kernels.windows cimport md_windows, read_windows

import numpy as np

from minidist.kernels import team

cnp.import_array()

cdef extern from "depthwise.h":
    void md_depthwise(
        md_parallel team, int threads, bint wide, const md_windows &g, void *x, void *w, void *y
    ) noexcept nogil
    void md_depthwise_backward_input(
        md_parallel team, int threads, bint wide, const md_windows &g, void *dy, void *w, void *dx
    ) noexcept nogil
    void md_depthwise_backward_filter(
        md_parallel team, int threads, bint wide, const md_windows &g, void *x, void *dy,
        double *totals, void *dw
    ) noexcept nogil

cdef md_parallel parallel = the_team(team.parallel)


cdef md_windows read(
    str verb, str name, object images, object windows, object w, Py_ssize_t stride_h,
    Py_ssize_t stride_w, Py_ssize_t pad_top, Py_ssize_t pad_left,
) except *:
    if w.ndim != 3 or images.ndim != 4 or w.shape[2] != images.shape[3]:
        raise ValueError(
            f"{verb}: needs images [n, h, w, c] and a filter [kh, kw, c], got shapes "
            f"{images.shape} and {w.shape}"
        )
    return read_windows(
        verb, name, images, windows, w.shape[0], w.shape[1], stride_h, stride_w, pad_top, pad_left
    )


def forward(
    x, w, y, Py_ssize_t stride_h, Py_ssize_t stride_w, Py_ssize_t pad_top, Py_ssize_t pad_left,
    *, int threads=1,
):
    """Store in y [n, rows, columns, c] the sum of each window of x times w, by channel."""
    cdef str verb = "depthwise forward"
    cdef int kind = float_kind(verb, "x", x)
    cdef md_windows g = read(
        verb, "y", x, y, w, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * g.c
    cdef void *px = data(verb, "x", x, kind, x.size, False)
    cdef void *pw = data(verb, "w", w, kind, w.size, False)
    cdef void *py = data(verb, "y", y, kind, total, True)

    cdef PyThreadState *state = let_go(x.size)
    md_depthwise(parallel, threads, kind == cnp.NPY_DOUBLE, g, px, pw, py)
    take_back(state)


def backward_input(
    dy, w, dx, Py_ssize_t stride_h, Py_ssize_t stride_w, Py_ssize_t pad_top,
    Py_ssize_t pad_left, *, int threads=1,
):
    """Store in dx [n, h, w, c] the gradient of the images."""
    cdef str verb = "depthwise backward_input"
    cdef int kind = float_kind(verb, "dy", dy)
    cdef md_windows g = read(
        verb, "dy", dx, dy, w, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * g.c
    cdef void *pdy = data(verb, "dy", dy, kind, total, False)
    cdef void *pw = data(verb, "w", w, kind, w.size, False)
    cdef void *pdx = data(verb, "dx", dx, kind, dx.size, True)

    cdef PyThreadState *state = let_go(dx.size)
    md_depthwise_backward_input(parallel, threads, kind == cnp.NPY_DOUBLE, g, pdy, pw, pdx)
    take_back(state)


def backward_filter(
    x, dy, dw, Py_ssize_t stride_h, Py_ssize_t stride_w, Py_ssize_t pad_top,
    Py_ssize_t pad_left, *, int threads=1,
):
    """Store in dw [kh, kw, c] the gradient of the filter.

    Blocks of windows are added up in the type of the elements, and all of them in float64.
    """
    cdef str verb = "depthwise backward_filter"
    cdef int kind = float_kind(verb, "x", x)
    cdef md_windows g = read(
        verb, "dy", x, dy, dw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * g.c
    cdef void *px = data(verb, "x", x, kind, x.size, False)
    cdef void *pdy = data(verb, "dy", dy, kind, total, False)
    cdef void *pdw = data(verb, "dw", dw, kind, dw.size, True)
    totals = np.zeros(dw.size)
    cdef double *sums = <double *> cnp.PyArray_DATA(<cnp.ndarray> totals)

    cdef PyThreadState *state = let_go(x.size)
    md_depthwise_backward_filter(parallel, threads, kind == cnp.NPY_DOUBLE, g, px, pdy, sums, pdw)
    take_back(state)
