"""Matrix products through cuBLAS: of 16-bit elements too, added up in float32.

With CUPY_TF32=1, CuPy's own switch, elements of float32 are rounded to 10 bits before they are
multiplied, which tensor cores do several times as fast.
"""

from __future__ import annotations

import os
from typing import Any

import cupy
import numpy as np

from minidist.device.base import Array

# cudaDataType_t, cublasComputeType_t and cublasGemmAlgo_t, of library_types.h and cublas_api.h
_TYPES = {"float16": 2, "float32": 0, "float64": 1, "bfloat16": 14}
_IN_FLOAT64, _IN_FLOAT32, _IN_TF32 = 70, 68, 77
_ANY_WAY = -1
_PLAIN, _TRANSPOSED = 0, 1


def multiply(
    handle: Any,
    a: Array,
    b: Array,
    out: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = False,
) -> Array:
    """Store a @ b in `out`, or add it: [n, k] and [k, m], each given transposed if a flag says so.

    Of arrays [p, …, …] that is done for each pair of their p matrices.
    a and b are of one dtype, out of the same, or of float32 where they are narrow. To cuBLAS, which
    counts columns first, each of them is its transposed; so it is asked for bᵀ aᵀ.
    """
    n, m = out.shape[-2:]
    k = a.shape[-2] if transpose_a else a.shape[-1]
    if not out.size:
        return out
    if not k:
        if not add:
            out.view(np.uint8).fill(0)
        return out
    double = out.dtype == np.float64
    one, other = (np.array(value, np.float64 if double else np.float32) for value in (1, add))
    tf32 = out.dtype == np.float32 == a.dtype and os.environ.get("CUPY_TF32") == "1"
    turned = (_TRANSPOSED if each else _PLAIN for each in (transpose_b, transpose_a))
    product = (handle, *turned, m, n, k, one.ctypes.data)
    matrices = (*_matrix(b), *_matrix(a), other.ctypes.data, *_matrix(out))
    compute = _IN_FLOAT64 if double else _IN_TF32 if tf32 else _IN_FLOAT32
    if out.ndim == 2:
        cupy.cuda.cublas.gemmEx(*product, *matrices, compute, _ANY_WAY)
    else:
        several = (*matrices, len(out), compute, _ANY_WAY)
        cupy.cuda.cublas.gemmStridedBatchedEx(*product, *several)
    return out


def _matrix(a: Array) -> tuple[int, ...]:
    """Return address, type, the elements from row to row, and of several from one to the next."""
    where = (a.data.ptr, _TYPES[a.dtype.name], max(a.shape[-1], 1))
    return where if a.ndim == 2 else (*where, a.shape[1] * a.shape[2])
