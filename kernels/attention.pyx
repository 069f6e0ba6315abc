"""Causal attention of several heads, and its gradient.

Arrays are C-contiguous, float32 or float64, all of one dtype in a call; results are written into
arrays of the caller. Queries, keys and values lie in one array qkv [n, tokens, 3 * heads * size]:
in the row of a token first its queries, head by head, then its keys, then its values. At most
`threads` threads share the heads; the result is the same for any number of them, but its bits are
those of a kind of processor, as in BLAS. A TypeError names the array of a wrong type, a ValueError
the one of a wrong size or layout.
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

cdef extern from "attention.h":
    ctypedef struct md_heads:
        Py_ssize_t sequences, tokens, heads, size
    bint md_attention_all(
        md_parallel team, int threads, bint wide, const md_heads &of, void *qkv, void *y
    ) noexcept nogil
    bint md_attention_backward_all(
        md_parallel team, int threads, bint wide, const md_heads &of, void *dy, void *qkv,
        void *dqkv
    ) noexcept nogil

cdef md_parallel parallel = the_team(team.parallel)


cdef md_heads read_heads(str verb, object qkv, Py_ssize_t heads) except *:
    cdef md_heads of
    if qkv.ndim != 3 or heads < 1 or qkv.shape[2] % (3 * heads) or qkv.shape[2] == 0:
        raise ValueError(
            f"{verb}: qkv of shape {qkv.shape} is not [n, tokens, 3 * {heads} heads * size]"
        )
    of.sequences, of.tokens = qkv.shape[:2]
    of.heads, of.size = heads, qkv.shape[2] // (3 * heads)
    return of


def causal_attention(qkv, y, Py_ssize_t heads, *, int threads=1):
    """Store softmax(q k^T / sqrt(size)) v, of each token over itself and those before, in y.

    y is [n, tokens, heads * size].
    """
    cdef str verb = "causal_attention"
    cdef int kind = float_kind(verb, "qkv", qkv)
    cdef md_heads of = read_heads(verb, qkv, heads)
    cdef Py_ssize_t n = qkv.size
    cdef void *pqkv = data(verb, "qkv", qkv, kind, n, False)
    cdef void *py = data(verb, "y", y, kind, n // 3, True)

    cdef PyThreadState *state = let_go(n * of.tokens)
    cdef bint done = md_attention_all(
        parallel, threads, kind == cnp.NPY_DOUBLE, of, pqkv, py
    )
    take_back(state)
    if not done:
        raise MemoryError


def causal_attention_backward(dy, qkv, dqkv, Py_ssize_t heads, *, int threads=1):
    """Store the gradient of qkv in dqkv, given that of y, dy [n, tokens, heads * size]."""
    cdef str verb = "causal_attention_backward"
    cdef int kind = float_kind(verb, "qkv", qkv)
    cdef md_heads of = read_heads(verb, qkv, heads)
    cdef Py_ssize_t n = qkv.size
    cdef void *pqkv = data(verb, "qkv", qkv, kind, n, False)
    cdef void *pdy = data(verb, "dy", dy, kind, n // 3, False)
    cdef void *pdqkv = data(verb, "dqkv", dqkv, kind, n, True)

    cdef PyThreadState *state = let_go(n * of.tokens)
    cdef bint done = md_attention_backward_all(
        parallel, threads, kind == cnp.NPY_DOUBLE, of, pdy, pqkv, pdqkv
    )
    take_back(state)
    if not done:
        raise MemoryError
