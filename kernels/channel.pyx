"""What is done to each channel, along the last axis: bias and ReLU, sums, batch normalisation.

Arrays are C-contiguous, float32 or float64, all of one dtype in a call. x, y and their gradients
are of one size, [..., channels]; what belongs to the channels is [channels]. Results are written
into arrays of the caller, which may be those that are given of the same size. At most `threads`
threads share the work; the result is the same for any number of them. A TypeError names the array
of a wrong type, a ValueError the one of a wrong size or layout.

Sums are taken in an order of their own, which follows from the shape: in blocks, and these in
float64.
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

cdef extern from "channel.h":
    cppclass md_rows:
        md_rows(Py_ssize_t rows, Py_ssize_t channels) noexcept nogil
    bint md_bias_all(
        md_parallel team, int threads, bint wide, md_rows shape, void *x, void *bias, bint relu,
        void *y
    ) noexcept nogil
    bint md_bias_backward_all(
        md_parallel team, int threads, bint wide, md_rows shape, void *dy, void *y, void *dz,
        void *dbias
    ) noexcept nogil

cdef extern from "batch_norm.h":
    bint md_moments_all(
        md_parallel team, int threads, bint wide, md_rows shape, void *x, void *mean,
        void *variance
    ) noexcept nogil
    bint md_normalize_all(
        md_parallel team, int threads, bint wide, md_rows shape, void *x, void *mean,
        void *variance, void *scale, void *offset, double epsilon, void *add, bint relu, void *y
    ) noexcept nogil
    bint md_normalize_backward_all(
        md_parallel team, int threads, bint wide, md_rows shape, void *dy, void *y, void *x,
        void *mean, void *variance, void *scale, double epsilon, bint moments, void *dx,
        void *dscale, void *doffset, void *dz
    ) noexcept nogil

cdef md_parallel parallel = the_team(team.parallel)


cdef Py_ssize_t channels_of(str verb, str name, object x) except -1:
    if x.ndim == 0:
        raise ValueError(f"{verb}: {name} must be [..., channels], but it is a single number")
    return x.shape[x.ndim - 1]


cdef int finish(str verb, PyThreadState *state, bint enough) except -1:
    take_back(state)
    if not enough:
        raise MemoryError(f"{verb}: there is no memory for the sums of the channels")
    return 0


def bias(x, bias, y, *, bint relu=False, int threads=1):
    """Store x + bias in y, with `relu` where that is not negative, and else 0. NaN stays NaN."""
    cdef str verb = "bias"
    cdef int kind = float_kind(verb, "x", x)
    cdef Py_ssize_t n = x.size, channels = channels_of(verb, "x", x)
    cdef void *px = data(verb, "x", x, kind, n, False)
    cdef void *pbias = data(verb, "bias", bias, kind, channels, False)
    cdef void *py = data(verb, "y", y, kind, n, True)
    if channels == 0:
        return
    cdef PyThreadState *state = let_go(n)
    cdef bint enough = md_bias_all(
        parallel, threads, kind == cnp.NPY_DOUBLE, md_rows(n // channels, channels), px, pbias,
        relu, py
    )
    finish(verb, state, enough)


def bias_backward(dy, dbias, y=None, dz=None, *, int threads=1):
    """Store the sums of dz in dbias [channels], where dz is dy itself, or what ReLU lets through.

    With y, the result of ReLU, dz is stored too: dy where y > 0, else 0.
    """
    cdef str verb = "bias_backward"
    cdef int kind = float_kind(verb, "dy", dy)
    cdef Py_ssize_t n = dy.size, channels = channels_of(verb, "dy", dy)
    cdef void *pdy = data(verb, "dy", dy, kind, n, False)
    cdef void *py = NULL
    cdef void *pdz = NULL
    if y is not None:
        py = data(verb, "y", y, kind, n, False)
        pdz = data(verb, "dz", dz, kind, n, True)
    cdef void *pdbias = data(verb, "dbias", dbias, kind, channels, True)
    if channels == 0:
        return
    cdef PyThreadState *state = let_go(n)
    cdef bint enough = md_bias_backward_all(
        parallel, threads, kind == cnp.NPY_DOUBLE, md_rows(n // channels, channels), pdy, py, pdz,
        pdbias
    )
    finish(verb, state, enough)


def moments(x, mean, variance, *, int threads=1):
    """Store the mean and the biased variance of each channel; 0 and 0 of no rows."""
    cdef str verb = "moments"
    cdef int kind = float_kind(verb, "x", x)
    cdef Py_ssize_t n = x.size, channels = channels_of(verb, "x", x)
    cdef void *px = data(verb, "x", x, kind, n, False)
    cdef void *pmean = data(verb, "mean", mean, kind, channels, True)
    cdef void *pvariance = data(verb, "variance", variance, kind, channels, True)
    if channels == 0:
        return
    cdef PyThreadState *state = let_go(n)
    cdef bint enough = md_moments_all(
        parallel, threads, kind == cnp.NPY_DOUBLE, md_rows(n // channels, channels), px, pmean,
        pvariance
    )
    finish(verb, state, enough)


def normalize(
    x, mean, variance, scale, offset, double epsilon, y, add=None, *, bint relu=False,
    int threads=1,
):
    """Store (x - mean) / sqrt(variance + epsilon) * scale + offset in y.

    To that `add`, of x's size, is added, and with `relu` what is negative becomes 0.
    """
    cdef str verb = "normalize"
    cdef int kind = float_kind(verb, "x", x)
    cdef Py_ssize_t n = x.size, channels = channels_of(verb, "x", x)
    cdef void *px = data(verb, "x", x, kind, n, False)
    cdef void *pmean = data(verb, "mean", mean, kind, channels, False)
    cdef void *pvariance = data(verb, "variance", variance, kind, channels, False)
    cdef void *pscale = data(verb, "scale", scale, kind, channels, False)
    cdef void *poffset = data(verb, "offset", offset, kind, channels, False)
    cdef void *padd = NULL if add is None else data(verb, "add", add, kind, n, False)
    cdef void *py = data(verb, "y", y, kind, n, True)
    if channels == 0:
        return
    cdef PyThreadState *state = let_go(n)
    cdef bint enough = md_normalize_all(
        parallel, threads, kind == cnp.NPY_DOUBLE, md_rows(n // channels, channels), px, pmean,
        pvariance, pscale, poffset, epsilon, padd, relu, py
    )
    finish(verb, state, enough)


def normalize_backward(
    dy, x, mean, variance, scale, double epsilon, bint moments, dx, dscale, doffset, y=None,
    dz=None, *, int threads=1,
):
    """Store the gradients of normalize's x, scale and offset.

    With `moments`, mean and variance are those of x itself and depend on it. With y, the result of
    normalize's ReLU, what that lets through is stored in dz and goes on: dy where y > 0, else 0. It
    is the gradient of `add` too. dz may be dx, if nobody wants it.
    """
    cdef str verb = "normalize_backward"
    cdef int kind = float_kind(verb, "x", x)
    cdef Py_ssize_t n = x.size, channels = channels_of(verb, "x", x)
    cdef void *pdy = data(verb, "dy", dy, kind, n, False)
    cdef void *px = data(verb, "x", x, kind, n, False)
    cdef void *pmean = data(verb, "mean", mean, kind, channels, False)
    cdef void *pvariance = data(verb, "variance", variance, kind, channels, False)
    cdef void *pscale = data(verb, "scale", scale, kind, channels, False)
    cdef void *pdx = data(verb, "dx", dx, kind, n, True)
    cdef void *pdscale = data(verb, "dscale", dscale, kind, channels, True)
    cdef void *pdoffset = data(verb, "doffset", doffset, kind, channels, True)
    cdef void *py = NULL
    cdef void *pdz = NULL
    if y is not None:
        py = data(verb, "y", y, kind, n, False)
        pdz = data(verb, "dz", dz, kind, n, True)
    if channels == 0:
        return
    cdef PyThreadState *state = let_go(n)
    cdef bint enough = md_normalize_backward_all(
        parallel, threads, kind == cnp.NPY_DOUBLE, md_rows(n // channels, channels), pdy, py, px,
        pmean, pvariance, pscale, epsilon, moments, pdx, pdscale, pdoffset, pdz
    )
    finish(verb, state, enough)
