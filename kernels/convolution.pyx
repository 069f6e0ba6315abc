"""The gradient of a convolution's filter, for processors with AVX2 or AVX-512.

Images are [n, h, w, c], channels last, and windows as in layer.pyx. A TypeError names the array of
a wrong type, a ValueError the one of a wrong size or layout.
"""

cimport numpy as cnp
from kernels.arrays cimport PyThreadState, data, let_go, take_back

cnp.import_array()

cdef extern from "convolution.h":
    ctypedef struct md_windows:
        Py_ssize_t n, h, w, c, rows, columns, kh, kw, stride_h, stride_w, pad_top, pad_left
    int md_filter_lanes(Py_ssize_t k) noexcept nogil
    bint md_filter_gradient(
        const md_windows &g, Py_ssize_t k, const float *x, const float *dy, float *dw
    ) noexcept nogil


def can_filter_gradient(Py_ssize_t filters):
    """Whether filter_gradient takes so many filters: of 8 or, for AVX-512, 16 a whole multiple."""
    return md_filter_lanes(filters) > 0


def filter_gradient(
    x, dy, dw, Py_ssize_t stride_h, Py_ssize_t stride_w, Py_ssize_t pad_top, Py_ssize_t pad_left
):
    """Store in dw [kh, kw, c, k] the gradient of a filter, from x and dy [n, rows, columns, k].

    All float32. The bits depend on the shapes and on the kind of processor, as in BLAS.
    """
    cdef str verb = "filter_gradient"
    cdef md_windows g
    cdef Py_ssize_t k
    if not (
        x.ndim == dy.ndim == dw.ndim == 4 and x.shape[0] == dy.shape[0]
        and x.shape[3] == dw.shape[2] and dy.shape[3] == dw.shape[3]
    ):
        raise ValueError(
            f"{verb}: needs x [n, h, w, c], dy [n, rows, columns, k] and dw [kh, kw, c, k], got "
            f"shapes {x.shape}, {dy.shape} and {dw.shape}"
        )
    g.n, g.h, g.w, g.c = x.shape
    g.rows, g.columns, k = dy.shape[1:]
    g.kh, g.kw = dw.shape[:2]
    g.stride_h, g.stride_w, g.pad_top, g.pad_left = stride_h, stride_w, pad_top, pad_left
    if min(stride_h, stride_w) < 1 or min(pad_top, pad_left) < 0:
        raise ValueError(
            f"{verb}: strides {stride_h}x{stride_w} must be positive, and the padding {pad_top} "
            f"above and {pad_left} to the left not negative"
        )
    if md_filter_lanes(k) == 0:
        raise ValueError(f"{verb}: this processor has no vectors for {k} filters")
    cdef void *px = data(verb, "x", x, cnp.NPY_FLOAT, x.size, False)
    cdef void *pdy = data(verb, "dy", dy, cnp.NPY_FLOAT, dy.size, False)
    cdef void *pdw = data(verb, "dw", dw, cnp.NPY_FLOAT, dw.size, True)

    cdef PyThreadState *state = let_go(x.size + dy.size)
    cdef bint done = md_filter_gradient(g, k, <float *> px, <float *> pdy, <float *> pdw)
    take_back(state)
    if not done:
        raise MemoryError
