"""What is done to each token by itself: layer normalisation, and GELU.

Arrays are C-contiguous, float32 or float64, all of one dtype in a call. x, y and their gradients
are of one size, [..., columns]; scale and offset are [columns]. Results are written into arrays of
the caller, y and dx also over what they are computed from. At most `threads` threads share the
work; the result is the same for any number of them. A TypeError names the array of a wrong type, a
ValueError the one of a wrong size or layout.
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

from minidist.kernels import team

cnp.import_array()

cdef extern from "tokens.h":
    void md_gelu_all(
        md_parallel team, int threads, bint wide, Py_ssize_t n, void *x, void *y
    ) noexcept nogil
    void md_gelu_backward_all(
        md_parallel team, int threads, bint wide, Py_ssize_t n, void *dy, void *x, void *dx
    ) noexcept nogil
    void md_layer_norm_all(
        md_parallel team, int threads, bint wide, Py_ssize_t rows, Py_ssize_t columns, void *x,
        void *scale, void *offset, double epsilon, void *y
    ) noexcept nogil
    bint md_layer_norm_backward_all(
        md_parallel team, int threads, bint wide, Py_ssize_t rows, Py_ssize_t columns, void *dy,
        void *x, void *scale, double epsilon, void *dx, void *dscale, void *doffset
    ) noexcept nogil

cdef md_parallel parallel = the_team(team.parallel)


def gelu(x, y, *, int threads=1):
    """Store x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 in y."""
    cdef int kind = float_kind("gelu", "x", x)
    cdef Py_ssize_t n = x.size
    cdef void *px = data("gelu", "x", x, kind, n, False)
    cdef void *py = data("gelu", "y", y, kind, n, True)

    cdef PyThreadState *state = let_go(n)
    md_gelu_all(parallel, threads, kind == cnp.NPY_DOUBLE, n, px, py)
    take_back(state)


def gelu_backward(dy, x, dx, *, int threads=1):
    """Store dy times the derivative of GELU at x in dx."""
    cdef int kind = float_kind("gelu_backward", "dy", dy)
    cdef Py_ssize_t n = dy.size
    cdef void *pdy = data("gelu_backward", "dy", dy, kind, n, False)
    cdef void *px = data("gelu_backward", "x", x, kind, n, False)
    cdef void *pdx = data("gelu_backward", "dx", dx, kind, n, True)

    cdef PyThreadState *state = let_go(n)
    md_gelu_backward_all(parallel, threads, kind == cnp.NPY_DOUBLE, n, pdy, px, pdx)
    take_back(state)


cdef Py_ssize_t columns_of(str verb, object x) except -1:
    if x.ndim == 0:
        raise ValueError(f"{verb}: x must be [..., columns], but it is a single number")
    return x.shape[x.ndim - 1]


def layer_norm(x, scale, offset, double epsilon, y, *, int threads=1):
    """Store (x - mean) / sqrt(variance + epsilon) * scale + offset in y.

    Mean and biased variance are those of each row.
    """
    cdef str verb = "layer_norm"
    cdef int kind = float_kind(verb, "x", x)
    cdef Py_ssize_t n = x.size, columns = columns_of(verb, x)
    cdef void *px = data(verb, "x", x, kind, n, False)
    cdef void *pscale = data(verb, "scale", scale, kind, columns, False)
    cdef void *poffset = data(verb, "offset", offset, kind, columns, False)
    cdef void *py = data(verb, "y", y, kind, n, True)
    if n == 0:
        return

    cdef PyThreadState *state = let_go(n)
    md_layer_norm_all(
        parallel, threads, kind == cnp.NPY_DOUBLE, n // columns, columns, px, pscale, poffset,
        epsilon, py
    )
    take_back(state)


def layer_norm_backward(
    dy, x, scale, double epsilon, dx, dscale, doffset, *, int threads=1
):
    """Store the gradients of layer_norm's x, scale and offset; the latter are sums over all rows.

    These sums are taken in blocks of rows that follow from the shape, and the blocks in float64.
    """
    cdef str verb = "layer_norm_backward"
    cdef int kind = float_kind(verb, "dy", dy)
    cdef Py_ssize_t n = dy.size, columns = columns_of(verb, x)
    cdef void *pdy = data(verb, "dy", dy, kind, n, False)
    cdef void *px = data(verb, "x", x, kind, n, False)
    cdef void *pscale = data(verb, "scale", scale, kind, columns, False)
    cdef void *pdx = data(verb, "dx", dx, kind, n, True)
    cdef void *pdscale = data(verb, "dscale", dscale, kind, columns, True)
    cdef void *pdoffset = data(verb, "doffset", doffset, kind, columns, True)
    if columns == 0:
        return

    cdef PyThreadState *state = let_go(n)
    cdef bint enough = md_layer_norm_backward_all(
        parallel, threads, kind == cnp.NPY_DOUBLE, n // columns, columns, pdy, px, pscale, epsilon,
        pdx, pdscale, pdoffset
    )
    take_back(state)
    if not enough:
        raise MemoryError(f"{verb}: there is no memory for the sums of the columns")
