"""Attention of tokens to those before them (Vaswani and others, 2017)."""

from __future__ import annotations

from minidist.device.base import Array
from minidist.errors import ShapeError
from minidist.ops.convert import TensorLike, floats
from minidist.tape import record
from minidist.tensor import Tensor


def causal_attention(qkv: TensorLike, heads: int) -> Tensor:
    """softmax(q·kᵀ/√size)·v, each token over itself and those before it.

    [n, t, 3·heads·size] -> [n, t, heads·size]: in a row of qkv are a token's queries, head by head,
    then its keys, then its values. The scores, of which there are t² for each head, are not kept:
    the way back computes them again. A row that is not finite also reaches tokens before it, for
    0·∞ is NaN: on CPUs those of its block of 16, on a GPU any.
    """
    qkv = floats("causal_attention", qkv)
    if qkv.ndim != 3 or heads < 1 or qkv.shape[2] % (3 * heads) or not qkv.shape[2]:
        raise ShapeError(
            f"causal_attention: qkv {qkv.shape} is not [n, t, 3·{heads}·size], for {heads} heads; "
            f"the last length must be a multiple of {3 * heads}"
        )
    ops = qkv.device.ops

    def backward(dy: Array, _: object) -> tuple[Array]:
        return (ops.causal_attention_backward(dy, qkv.array, heads),)

    return record(ops.causal_attention(qkv.array, heads), (qkv,), backward)
