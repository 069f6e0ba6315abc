"""What layers compute: ReLU, dropout and random numbers, softmax cross-entropy, and windows."""

cimport numpy as cnp
from kernels.arrays cimport (
    PyThreadState,
    check_threads,
    data,
    float_type,
    let_go,
    md_parallel,
    take_back,
    the_team,
)
from libc.stdint cimport int64_t

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
    void md_uniform_fill[T](
        md_parallel team, int threads, Py_ssize_t n, T *out, md_stream stream
    ) noexcept nogil
    void md_relu_all[T](
        md_parallel team, int threads, Py_ssize_t n, T *x, T *y
    ) noexcept nogil
    void md_relu_backward_all[T](
        md_parallel team, int threads, Py_ssize_t n, T *dy, T *y, T *dx
    ) noexcept nogil
    void md_dropout_all[T](
        md_parallel team, int threads, Py_ssize_t n, T *x, T *y, double rate, md_stream stream
    ) noexcept nogil
    void md_softmax_all[T](
        md_parallel team, int threads, Py_ssize_t n, Py_ssize_t classes, T *logits,
        int64_t *labels, T *losses, T *dlogits
    ) noexcept nogil

cdef extern from "window.h":
    cppclass md_windows:
        Py_ssize_t n, h, w, c, rows, columns
        Py_ssize_t kh, kw, stride_h, stride_w, pad_top, pad_left
    void md_im2col[T](
        md_parallel team, int threads, const md_windows &g, T *x, T *out
    ) noexcept nogil
    void md_col2im[T](
        md_parallel team, int threads, const md_windows &g, T *columns, T *dx
    ) noexcept nogil
    void md_max_pool[T](
        md_parallel team, int threads, const md_windows &g, T *x, T *y, int *argmax
    ) noexcept nogil
    void md_max_pool_backward[T](
        md_parallel team, int threads, const md_windows &g, T *dy, int *argmax, T *dx
    ) noexcept nogil
    void md_average_pool[T](
        md_parallel team, int threads, const md_windows &g, T *x, T *y
    ) noexcept nogil
    void md_average_pool_backward[T](
        md_parallel team, int threads, const md_windows &g, T *dy, T *dx
    ) noexcept nogil

cdef md_parallel parallel = the_team(team.parallel)


def relu(x, y, *, int threads=1):
    check_threads("relu", threads)
    cdef int kind = float_type("relu", "x", x)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(<cnp.ndarray> x)
    cdef void *px = data("relu", "x", x, kind, n, False)
    cdef void *py = data("relu", "y", y, kind, n, True)

    cdef PyThreadState *state = let_go(n)
    if kind == cnp.NPY_FLOAT:
        md_relu_all(parallel, threads, n, <float *> px, <float *> py)
    else:
        md_relu_all(parallel, threads, n, <double *> px, <double *> py)
    take_back(state)


def relu_backward(dy, y, dx, *, int threads=1):
    check_threads("relu_backward", threads)
    cdef int kind = float_type("relu_backward", "dy", dy)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(<cnp.ndarray> dy)
    cdef void *pdy = data("relu_backward", "dy", dy, kind, n, False)
    cdef void *py = data("relu_backward", "y", y, kind, n, False)
    cdef void *pdx = data("relu_backward", "dx", dx, kind, n, True)

    cdef PyThreadState *state = let_go(n)
    if kind == cnp.NPY_FLOAT:
        md_relu_backward_all(
            parallel, threads, n, <float *> pdy, <float *> py, <float *> pdx)
    else:
        md_relu_backward_all(
            parallel, threads, n, <double *> pdy, <double *> py, <double *> pdx)
    take_back(state)


cdef md_stream read_stream(str verb, object key, object counter) except *:
    """The stream of a key of two words and a counter of three, each 32 bits."""
    cdef md_stream stream
    if len(key) != 2 or len(counter) != 3:
        raise ValueError(
            f"{verb}: key needs two words and counter three, got {len(key)} and {len(counter)}"
        )
    for word in (*key, *counter):
        if not 0 <= word < 1 << 32:
            raise ValueError(
                f"{verb}: key and counter are words of 32 bits, from 0 to 2**32 - 1, got {word}"
            )
    stream.key = [key[0], key[1]]
    stream.counter = [counter[0], counter[1], counter[2]]
    return stream


def philox(key, counter):
    cdef md_u32 words[4]
    if len(counter) != 4:
        raise ValueError(f"philox: counter needs four words, got {len(counter)}")
    cdef md_stream stream = read_stream("philox", key, counter[1:])
    if not 0 <= counter[0] < 1 << 32:
        raise ValueError(f"philox: counter is made of words of 32 bits, got {counter[0]}")
    md_philox(
        stream.key[0], stream.key[1], counter[0], stream.counter[0], stream.counter[1],
        stream.counter[2], words,
    )
    return words[0], words[1], words[2], words[3]


def uniform(out, key, counter, *, int threads=1):
    check_threads("uniform", threads)
    cdef int kind = float_type("uniform", "out", out)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(<cnp.ndarray> out)
    cdef void *place = data("uniform", "out", out, kind, n, True)
    cdef md_stream stream = read_stream("uniform", key, counter)
    if n > <Py_ssize_t> 1 << (34 if kind == cnp.NPY_FLOAT else 33):
        raise ValueError(f"uniform: one counter yields no more than 2**34 words, asked for {n}")

    cdef PyThreadState *state = let_go(n)
    if kind == cnp.NPY_FLOAT:
        md_uniform_fill(parallel, threads, n, <float *> place, stream)
    else:
        md_uniform_fill(parallel, threads, n, <double *> place, stream)
    take_back(state)


def dropout(x, y, double rate, key, counter, *, int threads=1):
    check_threads("dropout", threads)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate must be at least 0 and below 1, got {rate}")
    cdef int kind = float_type("dropout", "x", x)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(<cnp.ndarray> x)
    cdef void *px = data("dropout", "x", x, kind, n, False)
    cdef void *py = data("dropout", "y", y, kind, n, True)
    cdef md_stream stream = read_stream("dropout", key, counter)
    if n > <Py_ssize_t> 1 << 34:
        raise ValueError(f"dropout: one counter yields no more than 2**34 words, asked for {n}")

    cdef PyThreadState *state = let_go(n)
    if kind == cnp.NPY_FLOAT:
        md_dropout_all(parallel, threads, n, <float *> px, <float *> py, rate, stream)
    else:
        md_dropout_all(parallel, threads, n, <double *> px, <double *> py, rate, stream)
    take_back(state)


def softmax_cross_entropy(logits, labels, losses, dlogits, *, int threads=1):
    cdef str verb = "softmax_cross_entropy"
    check_threads(verb, threads)
    cdef int kind = float_type(verb, "logits", logits)
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
    if kind == cnp.NPY_FLOAT:
        md_softmax_all(
            parallel, threads, n, classes, <float *> x, label, <float *> loss, <float *> d)
    else:
        md_softmax_all(
            parallel, threads, n, classes, <double *> x, label, <double *> loss, <double *> d)
    take_back(state)


cdef md_windows read_windows(
    str verb, str name, tuple image, tuple windows, Py_ssize_t kh, Py_ssize_t kw,
    Py_ssize_t stride_h, Py_ssize_t stride_w, Py_ssize_t pad_top, Py_ssize_t pad_left,
) except *:
    """The geometry of windows [n, rows, columns, ...] over images [n, h, w, c], checked."""
    cdef md_windows g
    if len(image) != 4 or len(windows) != 4 or image[0] != windows[0]:
        raise ValueError(
            f"{verb}: images [n, h, w, c] and {name} [n, rows, columns, ...] are needed, "
            f"got shapes {image} and {windows}"
        )
    g.n, g.h, g.w, g.c = image
    g.rows, g.columns = windows[1], windows[2]
    g.kh, g.kw, g.stride_h, g.stride_w = kh, kw, stride_h, stride_w
    g.pad_top, g.pad_left = pad_top, pad_left
    if min(kh, kw, stride_h, stride_w) < 1:
        raise ValueError(
            f"{verb}: window {kh}x{kw} and strides {stride_h}x{stride_w} must be positive"
        )
    if not (
        0 <= pad_top < kh and 0 <= pad_left < kw
        and (g.rows == 0 or (g.rows - 1) * stride_h - pad_top < g.h)
        and (g.columns == 0 or (g.columns - 1) * stride_w - pad_left < g.w)
    ):
        raise ValueError(
            f"{verb}: some of the {g.rows}x{g.columns} windows of {kh}x{kw}, strides "
            f"{stride_h}x{stride_w}, padding {pad_top} above and {pad_left} to the left, "
            f"lie wholly outside of images of {g.h}x{g.w}"
        )
    return g


def im2col(
    x, columns, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    check_threads("im2col", threads)
    cdef int kind = float_type("im2col", "x", x)
    float_type("im2col", "columns", columns)
    cdef md_windows g = read_windows(
        "im2col", "columns", x.shape, columns.shape, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * kh * kw * g.c
    cdef void *px = data("im2col", "x", x, kind, g.n * g.h * g.w * g.c, False)
    cdef void *out = data("im2col", "columns", columns, kind, total, True)

    cdef PyThreadState *state = let_go(total)
    if kind == cnp.NPY_FLOAT:
        md_im2col(parallel, threads, g, <float *> px, <float *> out)
    else:
        md_im2col(parallel, threads, g, <double *> px, <double *> out)
    take_back(state)


def col2im(
    columns, dx, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    check_threads("col2im", threads)
    cdef int kind = float_type("col2im", "columns", columns)
    float_type("col2im", "dx", dx)
    cdef md_windows g = read_windows(
        "col2im", "columns", dx.shape, columns.shape, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t total = g.n * g.rows * g.columns * kh * kw * g.c
    cdef void *source = data("col2im", "columns", columns, kind, total, False)
    cdef void *pdx = data("col2im", "dx", dx, kind, g.n * g.h * g.w * g.c, True)

    cdef PyThreadState *state = let_go(total)
    if kind == cnp.NPY_FLOAT:
        md_col2im(parallel, threads, g, <float *> source, <float *> pdx)
    else:
        md_col2im(parallel, threads, g, <double *> source, <double *> pdx)
    take_back(state)


def max_pool(
    x, y, argmax, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    check_threads("max_pool", threads)
    cdef int kind = float_type("max_pool", "x", x)
    float_type("max_pool", "y", y)
    cdef md_windows g = read_windows(
        "max_pool", "y", x.shape, y.shape, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t images = g.n * g.h * g.w * g.c, total = g.n * g.rows * g.columns * g.c
    cdef void *px = data("max_pool", "x", x, kind, images, False)
    cdef void *py = data("max_pool", "y", y, kind, total, True)
    cdef int *chosen = <int *> data("max_pool", "argmax", argmax, cnp.NPY_INT32, total, True)

    cdef PyThreadState *state = let_go(images)
    if kind == cnp.NPY_FLOAT:
        md_max_pool(parallel, threads, g, <float *> px, <float *> py, chosen)
    else:
        md_max_pool(parallel, threads, g, <double *> px, <double *> py, chosen)
    take_back(state)


def max_pool_backward(
    dy, argmax, dx, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    cdef str verb = "max_pool_backward"
    check_threads(verb, threads)
    cdef int kind = float_type(verb, "dy", dy)
    float_type(verb, "dx", dx)
    cdef md_windows g = read_windows(
        verb, "dy", dx.shape, dy.shape, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t images = g.n * g.h * g.w * g.c, total = g.n * g.rows * g.columns * g.c
    cdef void *pdy = data(verb, "dy", dy, kind, total, False)
    cdef int *chosen = <int *> data(verb, "argmax", argmax, cnp.NPY_INT32, total, False)
    cdef void *pdx = data(verb, "dx", dx, kind, images, True)

    cdef PyThreadState *state = let_go(images)
    if kind == cnp.NPY_FLOAT:
        md_max_pool_backward(parallel, threads, g, <float *> pdy, chosen, <float *> pdx)
    else:
        md_max_pool_backward(parallel, threads, g, <double *> pdy, chosen, <double *> pdx)
    take_back(state)


def average_pool(
    x, y, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    check_threads("average_pool", threads)
    cdef int kind = float_type("average_pool", "x", x)
    float_type("average_pool", "y", y)
    cdef md_windows g = read_windows(
        "average_pool", "y", x.shape, y.shape, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t images = g.n * g.h * g.w * g.c, total = g.n * g.rows * g.columns * g.c
    cdef void *px = data("average_pool", "x", x, kind, images, False)
    cdef void *py = data("average_pool", "y", y, kind, total, True)

    cdef PyThreadState *state = let_go(images)
    if kind == cnp.NPY_FLOAT:
        md_average_pool(parallel, threads, g, <float *> px, <float *> py)
    else:
        md_average_pool(parallel, threads, g, <double *> px, <double *> py)
    take_back(state)


def average_pool_backward(
    dy, dx, Py_ssize_t kh, Py_ssize_t kw, Py_ssize_t stride_h, Py_ssize_t stride_w,
    Py_ssize_t pad_top, Py_ssize_t pad_left, *, int threads=1,
):
    cdef str verb = "average_pool_backward"
    check_threads(verb, threads)
    cdef int kind = float_type(verb, "dy", dy)
    float_type(verb, "dx", dx)
    cdef md_windows g = read_windows(
        verb, "dy", dx.shape, dy.shape, kh, kw, stride_h, stride_w, pad_top, pad_left
    )
    cdef Py_ssize_t images = g.n * g.h * g.w * g.c, total = g.n * g.rows * g.columns * g.c
    cdef void *pdy = data(verb, "dy", dy, kind, total, False)
    cdef void *pdx = data(verb, "dx", dx, kind, images, True)

    cdef PyThreadState *state = let_go(images)
    if kind == cnp.NPY_FLOAT:
        md_average_pool_backward(parallel, threads, g, <float *> pdy, <float *> pdx)
    else:
        md_average_pool_backward(parallel, threads, g, <double *> pdy, <double *> pdx)
    take_back(state)
