"""Convolutions and products of float32 on AMX's tiles, which multiply bfloat16; tiles.h says how.

Images are [n, h, w, c] and filters [kh, kw, c, k]. A TypeError names the array of a wrong type, a
ValueError the one of a wrong size or layout.
"""

cimport numpy as cnp
from kernels.arrays cimport PyThreadState, data, let_go, take_back
from kernels.windows cimport md_windows

cnp.import_array()

cdef extern from "tile_convolution.h":
    ctypedef enum md_direction:
        MD_FORWARD, MD_BACKWARD_INPUT, MD_BACKWARD_FILTER
    bint md_has_tiles() noexcept nogil
    bint md_can_tile(md_direction direction, const md_windows &g, Py_ssize_t k) except +
    bint md_tile(
        md_direction direction, const md_windows &g, Py_ssize_t k, const float *first,
        const float *second, const float *bias, float *result
    ) noexcept nogil

cdef extern from "tile_product.h":
    bint md_multiply_by_tiles(
        const float *a, const float *b, float *c, Py_ssize_t n, Py_ssize_t k, Py_ssize_t m,
        bint transpose_a, bint transpose_b
    ) noexcept nogil


def has_tiles():
    """Whether this processor has tiles that multiply bfloat16, and the system lets us use them."""
    return md_has_tiles()


cdef no_room(str verb, Py_ssize_t elements):
    return MemoryError(
        f"{verb}: there is no memory to split arrays of together {4 * elements} bytes into parts"
    )


cdef class Convolution:
    """A convolution of x, padded by `before` above and to the left, with w; y is its result."""

    cdef md_windows _g
    cdef Py_ssize_t _k
    cdef bint[3] _can

    def __init__(self, *, x, w, y, strides, before):
        cdef int direction
        self._g.n, self._g.h, self._g.w, self._g.c = x
        self._g.kh, self._g.kw = w[:2]
        self._g.rows, self._g.columns, self._k = y[1:]
        self._g.stride_h, self._g.stride_w = strides
        self._g.pad_top, self._g.pad_left = before
        for direction in range(3):
            self._can[direction] = md_can_tile(<md_direction> direction, self._g, self._k)

    @property
    def can_forward(self):
        """Whether there are tiles, and they can do that without being mostly empty."""
        return self._can[<int> MD_FORWARD]

    @property
    def can_backward_input(self):
        return self._can[<int> MD_BACKWARD_INPUT]

    @property
    def can_backward_filter(self):
        return self._can[<int> MD_BACKWARD_FILTER]

    def forward(self, x, w, *more):
        """Store x * w in y, the last array; with a bias [k] before it, which is added."""
        *bias, y = more
        cdef const float *add = NULL
        if bias:
            add = <const float *> data("forward", "bias", bias[0], cnp.NPY_FLOAT, self._k, False)
        self._run(MD_FORWARD, "forward", ("x", "w", "y"), (x, w, y), add)

    def backward_input(self, dy, w, dx):
        """Store the gradient of x in dx."""
        self._run(MD_BACKWARD_INPUT, "backward_input", ("dy", "w", "dx"), (dy, w, dx), NULL)

    def backward_filter(self, x, dy, dw):
        """Store the gradient of w in dw."""
        self._run(MD_BACKWARD_FILTER, "backward_filter", ("x", "dy", "dw"), (x, dy, dw), NULL)

    cdef _run(
        self, md_direction direction, str verb, tuple names, tuple arrays, const float *bias
    ):
        cdef md_windows g = self._g
        cdef Py_ssize_t elements = 0
        cdef const float *at[3]
        cdef int i
        if not self._can[<int> direction]:
            raise ValueError(f"{verb}: tiles cannot do that here; can_{verb} says so")
        sizes = {
            "x": g.n * g.h * g.w * g.c,
            "w": g.kh * g.kw * g.c * self._k,
            "y": g.n * g.rows * g.columns * self._k,
        }
        for i, (name, array) in enumerate(zip(names, arrays, strict=True)):
            size = sizes[name.removeprefix("d")]
            at[i] = <const float *> data(verb, name, array, cnp.NPY_FLOAT, size, i == 2)
            elements += size
        cdef PyThreadState *state = let_go(elements)
        cdef bint done = md_tile(direction, g, self._k, at[0], at[1], bias, <float *> at[2])
        take_back(state)
        if not done:
            raise no_room(verb, elements)


def multiply(a, b, c, bint transpose_a=False, bint transpose_b=False):
    """Store in c [n, m] the product of a [n, k] and b [k, m], each given transposed if so said."""
    cdef str verb = "multiply"
    if not (
        a.ndim == b.ndim == c.ndim == 2 and a.shape[not transpose_a] == b.shape[transpose_b]
        and c.shape == (a.shape[transpose_a], b.shape[not transpose_b])
    ):
        raise ValueError(
            f"{verb}: needs a [n, k], b [k, m] and c [n, m], a or b transposed if so said, got "
            f"shapes {a.shape}, {b.shape} and {c.shape}"
        )
    if not md_has_tiles():
        raise ValueError(f"{verb}: this processor has no tiles; has_tiles says so")
    cdef Py_ssize_t n = c.shape[0], m = c.shape[1], k = a.shape[not transpose_a]
    cdef void *pa = data(verb, "a", a, cnp.NPY_FLOAT, a.size, False)
    cdef void *pb = data(verb, "b", b, cnp.NPY_FLOAT, b.size, False)
    cdef void *pc = data(verb, "c", c, cnp.NPY_FLOAT, c.size, True)

    cdef PyThreadState *state = let_go(a.size + b.size + c.size)
    cdef bint done = md_multiply_by_tiles(
        <const float *> pa, <const float *> pb, <float *> pc, n, k, m, transpose_a, transpose_b
    )
    take_back(state)
    if not done:
        raise no_room(verb, a.size + b.size + c.size)
