"""What layers compute: ReLU, dropout and its random numbers, softmax cross-entropy, windows.

All arrays are C-contiguous, float32 or float64, all of one dtype in a call; results are written
into arrays of the caller. Of any length zero there is nothing to do. At most `threads` threads
share the work; the result is the same for any number of them. A TypeError names the array of a
wrong type, a ValueError the one of a wrong size or layout.

The window verbs take images [n, h, w, c], channels last, and windows [n, rows, columns, ...].
Window (i, j) is kh x kw and begins at row i * stride_h - pad_top, column j * stride_w - pad_left;
every window must reach into the image (ValueError), what lies outside of it is padding. How much
there is below and to the right follows from the number of windows.
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
from libc.stdint cimport int32_t, int64_t

from minidist.kernels import team

cnp.import_array()

cdef extern from "layer.h":
    ctypedef unsigned int md_u32
    ctypedef struct md_stream:
        md_u32[2] key
        md_u32[3] counter
    void md_philox(
        md_u32 k0, md_u32 k1, md_u32 c0, md_u32 c1, md_u32 c2, md_u32 c3, md_u32 *words
    ) noexcept nogil
    void md_uniform_fill(
        md_parallel team, int threads, bint wide, Py_ssize_t n, void *out, md_stream stream
    ) noexcept nogil
    void md_relu_all(
        md_parallel team, int threads, bint wide, bint six, Py_ssize_t n, void *x, void *y
    ) noexcept nogil
    void md_relu_backward_all(
        md_parallel team, int threads, bint wide, bint six, Py_ssize_t n, void *dy, void *y,
        void *dx
    ) noexcept nogil
    void md_dropout_all(
        md_parallel team, int threads, bint wide, Py_ssize_t n, void *x, void *y, double rate,
        md_stream stream
    ) noexcept nogil
    void md_softmax_all(
        md_parallel team, int threads, bint wide, Py_ssize_t n, Py_ssize_t classes, void *logits,
        int64_t *labels, void *losses, void *dlogits
    ) noexcept nogil

cdef extern from "window.h":
    void md_im2col(
        md_parallel team, int threads, bint wide, const md_windows &g, void *x, void *columns
    ) noexcept nogil
    void md_col2im(
        md_parallel team, int threads, bint wide, const md_windows &g, void *columns, void *dx
    ) noexcept nogil
    void md_max_pool(
        md_parallel team, int threads, bint wide, const md_windows &g, void *x, void *y,
        int32_t *argmax
    ) noexcept nogil
    void md_max_pool_backward(
        md_parallel team, int threads, bint wide, const md_windows &g, void *dy, int32_t *argmax,
        void *dx
    ) noexcept nogil
    void md_average_pool(
        md_parallel team, int threads, bint wide, const md_windows &g, void *x, void *y
    ) noexcept nogil
    void md_average_pool_backward(
        md_parallel team, int threads, bint wide, const md_windows &g, void *dy, void *dx
    ) noexcept nogil

cdef md_parallel parallel = the_team(team.parallel)


cdef int take_relu(str verb, bint six, object x, object y, int threads) except -1:
    cdef int kind = float_kind(verb, "x", x)
    cdef Py_ssize_t n = x.size
    cdef void *px = data(verb, "x", x, kind, n, False)
    cdef void *py = data(verb, "y", y, kind, n, True)

    cdef PyThreadState *state = let_go(n)
    md_relu_all(parallel, threads, kind == cnp.NPY_DOUBLE, six, n, px, py)
    take_back(state)
    return 0


cdef int take_relu_backward(
    str verb, bint six, object dy, object y, object dx, int threads
) except -1:
    cdef int kind = float_kind(verb, "dy", dy)
    cdef Py_ssize_t n = dy.size
    cdef void *pdy = data(verb, "dy", dy, kind, n, False)
    cdef void *py = data(verb, "y", y, kind, n, False)
    cdef void *pdx = data(verb, "dx", dx, kind, n, True)

    cdef PyThreadState *state = let_go(n)
    md_relu_backward_all(parallel, threads, kind == cnp.NPY_DOUBLE, six, n, pdy, py, pdx)
    take_back(state)
    return 0


def relu(x, y, *, int threads=1):
    """Store x where it is not negative, else 0, in y, which may be x. NaN stays NaN."""
    take_relu("relu", False, x, y, threads)


def relu_backward(dy, y, dx, *, int threads=1):
    """Store dy where y > 0, else 0, in dx, which may be dy or y."""
    take_relu_backward("relu_backward", False, dy, y, dx, threads)


def relu6(x, y, *, int threads=1):
    """Store 0 where x is negative, 6 where it is above, else x, in y, which may be x.

    NaN stays NaN.
    """
    take_relu("relu6", True, x, y, threads)


def relu6_backward(dy, y, dx, *, int threads=1):
    """Store dy where 0 < y < 6, else 0, in dx, which may be dy or y."""
    take_relu_backward("relu6_backward", True, dy, y, dx, threads)


cdef int check_words(str verb, str name, object words, Py_ssize_t count) except -1:
    cdef bint right = len(words) == count
    for word in words:
        right = right and 0 <= word < 1 << 32
    if not right:
        raise ValueError(
            f"{verb}: {name} must be {count} words of 32 bits, 0 to 2**32 - 1, got {words}"
        )
    return 0


cdef md_stream read_stream(
    str verb, object key, object counter, Py_ssize_t words_needed
) except *:
    check_words(verb, "key", key, 2)
    check_words(verb, "counter", counter, 3)
    if words_needed > <Py_ssize_t> 1 << 34:
        raise ValueError(
            f"{verb}: a counter has 2**34 words, not {words_needed}; use several counters"
        )
    cdef md_stream stream
    stream.key = [key[0], key[1]]
    stream.counter = [counter[0], counter[1], counter[2]]
    return stream


def philox(key, counter):
    """Return the four words of one block of Philox4x32-10, for a key of two and a counter of four.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). Words are
    integers from 0 to 2**32 - 1 (ValueError).
    """
    check_words("philox", "key", key, 2)
    check_words("philox", "counter", counter, 4)
    cdef md_u32[4] words
    md_philox(key[0], key[1], counter[0], counter[1], counter[2], counter[3], words)
    return words[0], words[1], words[2], words[3]


def uniform(out, key, counter, *, int threads=1):
    """Fill `out` with uniform numbers in [0, 1), a pure function of key and counter.

    Block b is philox(key, (b, *counter)), for a key of two words and a counter of three. A float32
    has the upper 24 bits of one word; a float64 the upper 27 of one and the upper 26 of the next.
    """
    cdef int kind = float_kind("uniform", "out", out)
    cdef Py_ssize_t n = out.size
    cdef void *place = data("uniform", "out", out, kind, n, True)
    cdef md_stream stream = read_stream("uniform", key, counter, out.nbytes // 4)

    cdef PyThreadState *state = let_go(n)
    md_uniform_fill(parallel, threads, kind == cnp.NPY_DOUBLE, n, place, stream)
    take_back(state)


def dropout(x, y, double rate, key, counter, *, int threads=1):
    """Store x / (1 - rate), or 0 with probability `rate`, in y, which may be x.

    Element i is dropped when the upper 24 bits of word i of the stream, as a number in [0, 1), are
    below the rate: the same elements in float32 and float64. It is linear in x, so its derivative
    is the same call on dy. A ValueError unless 0 <= rate < 1.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate must be at least 0 and below 1, got {rate}")
    cdef int kind = float_kind("dropout", "x", x)
    cdef Py_ssize_t n = x.size
    cdef void *px = data("dropout", "x", x, kind, n, False)
    cdef void *py = data("dropout", "y", y, kind, n, True)
    cdef md_stream stream = read_stream("dropout", key, counter, n)

    cdef PyThreadState *state = let_go(n)
    md_dropout_all(parallel, threads, kind == cnp.NPY_DOUBLE, n, px, py, rate, stream)
    take_back(state)


def softmax_cross_entropy(logits, labels, losses, dlogits, *, int threads=1):
    """Store the loss of each example, and its derivative softmax(logits) - onehot(label).

    logits and dlogits [n, classes] (they may be the same array), labels [n] int64, losses [n]. A
    ValueError names the position of a label that is none of the classes. A logit that is NaN or
    infinite makes the loss NaN, unless it is -inf and not the label's.
    """
    cdef str verb = "softmax_cross_entropy"
    cdef int kind = float_kind(verb, "logits", logits)
    if logits.ndim != 2:
        raise ValueError(f"{verb}: logits must be [n, classes], got shape {logits.shape}")
    cdef Py_ssize_t n = logits.shape[0], classes = logits.shape[1], i
    cdef void *x = data(verb, "logits", logits, kind, n * classes, False)
    cdef int64_t *label = <int64_t *> data(verb, "labels", labels, cnp.NPY_INT64, n, False)
    cdef void *loss = data(verb, "losses", losses, kind, n, True)
    cdef void *d = data(verb, "dlogits", dlogits, kind, n * classes, True)
    for i in range(n):
        if label[i] < 0 or label[i] >= classes:
            raise ValueError(
                f"{verb}: label {label[i]} at position {i} is none of the {classes} classes "
                f"0 to {classes - 1}"
            )

    cdef PyThreadState *state = let_go(n * classes)
    md_softmax_all(parallel, threads, kind == cnp.NPY_DOUBLE, n, classes, x, label, loss, d)
    take_back(state)


def im2col(
    x, columns, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    """Copy windows of x [n, h, w, c] to columns [n, rows, columns, kh * kw * c]; padding is 0.

    Convolution is then columns.reshape(-1, kh * kw * c) @ filters.reshape(kh * kw * c, -1).
    """
    cdef str verb = "im2col"
    cdef int kind = float_kind(verb, "x", x)
    float_kind(verb, "columns", columns)
    cdef md_windows g = read_windows(
        verb, "columns", x, columns, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * kh * kw * g.c
    cdef void *px = data(verb, "x", x, kind, x.size, False)
    cdef void *out = data(verb, "columns", columns, kind, total, True)

    cdef PyThreadState *state = let_go(total)
    md_im2col(parallel, threads, kind == cnp.NPY_DOUBLE, g, px, out)
    take_back(state)


def col2im(
    columns, dx, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    """Store in dx [n, h, w, c] the sum of all that lies over each element: im2col's derivative."""
    cdef str verb = "col2im"
    cdef int kind = float_kind(verb, "columns", columns)
    float_kind(verb, "dx", dx)
    cdef md_windows g = read_windows(
        verb, "columns", dx, columns, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * kh * kw * g.c
    cdef void *source = data(verb, "columns", columns, kind, total, False)
    cdef void *pdx = data(verb, "dx", dx, kind, dx.size, True)

    cdef PyThreadState *state = let_go(total)
    md_col2im(parallel, threads, kind == cnp.NPY_DOUBLE, g, source, pdx)
    take_back(state)


def max_pool(
    x, y, argmax, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    """Store the largest of each window of x [n, h, w, c] in y [n, rows, columns, c].

    argmax, int32 and of y's shape, is its place in the window, row * kw + column. Of equals the
    first counts, row by row; a NaN is larger than any number; padding never wins.
    """
    cdef str verb = "max_pool"
    cdef int kind = float_kind(verb, "x", x)
    float_kind(verb, "y", y)
    cdef md_windows g = read_windows(
        verb, "y", x, y, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * g.c
    cdef void *px = data(verb, "x", x, kind, x.size, False)
    cdef void *py = data(verb, "y", y, kind, total, True)
    cdef int32_t *places = <int32_t *> data(verb, "argmax", argmax, cnp.NPY_INT32, total, True)

    cdef PyThreadState *state = let_go(x.size)
    md_max_pool(parallel, threads, kind == cnp.NPY_DOUBLE, g, px, py, places)
    take_back(state)


def max_pool_backward(
    dy, argmax, dx, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    """Store in dx [n, h, w, c] the sum of dy over the windows that each element won."""
    cdef str verb = "max_pool_backward"
    cdef int kind = float_kind(verb, "dy", dy)
    float_kind(verb, "dx", dx)
    cdef md_windows g = read_windows(
        verb, "dy", dx, dy, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * g.c
    cdef void *pdy = data(verb, "dy", dy, kind, total, False)
    cdef int32_t *places = <int32_t *> data(verb, "argmax", argmax, cnp.NPY_INT32, total, False)
    cdef void *pdx = data(verb, "dx", dx, kind, dx.size, True)

    cdef PyThreadState *state = let_go(dx.size)
    md_max_pool_backward(parallel, threads, kind == cnp.NPY_DOUBLE, g, pdy, places, pdx)
    take_back(state)


def average_pool(
    x, y, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    """Store the mean of each window of x [n, h, w, c] in y [n, rows, columns, c].

    Padding does not count: the sum is divided by the elements that lie in the image.
    """
    cdef str verb = "average_pool"
    cdef int kind = float_kind(verb, "x", x)
    float_kind(verb, "y", y)
    cdef md_windows g = read_windows(
        verb, "y", x, y, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * g.c
    cdef void *px = data(verb, "x", x, kind, x.size, False)
    cdef void *py = data(verb, "y", y, kind, total, True)

    cdef PyThreadState *state = let_go(x.size)
    md_average_pool(parallel, threads, kind == cnp.NPY_DOUBLE, g, px, py)
    take_back(state)


def average_pool_backward(
    dy, dx, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    """Store in dx [n, h, w, c] the sum of dy / count over the windows on each element."""
    cdef str verb = "average_pool_backward"
    cdef int kind = float_kind(verb, "dy", dy)
    float_kind(verb, "dx", dx)
    cdef md_windows g = read_windows(
        verb, "dy", dx, dy, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * g.c
    cdef void *pdy = data(verb, "dy", dy, kind, total, False)
    cdef void *pdx = data(verb, "dx", dx, kind, dx.size, True)

    cdef PyThreadState *state = let_go(dx.size)
    md_average_pool_backward(parallel, threads, kind == cnp.NPY_DOUBLE, g, pdy, pdx)
    take_back(state)
