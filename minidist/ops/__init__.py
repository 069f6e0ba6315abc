"""Operations on Tensors: each is a forward pass with its derivative beside it.

An operation checks what it is given, computes through `device.ops`, and hands `tape.record` a
closure that turns the gradient of its result into gradients of its inputs. Images are NHWC. All
inputs of one operation are of one dtype and on one device; a Python number takes the dtype of the
Tensor beside it. Errors are ShapeErrors that name the operation and the shapes.

float16 and bfloat16 are computed in float32, forward and backward, and what comes out, result or
gradient, is rounded once to the dtype that went in. Losses and the moments of batch normalisation
are float32.
"""

from __future__ import annotations

from minidist.ops.activation import dropout, gelu, log_softmax, relu, relu6, softmax
from minidist.ops.attention import causal_attention
from minidist.ops.convert import TensorLike, as_tensor, constant
from minidist.ops.convolution import conv2d
from minidist.ops.depthwise import depthwise_conv2d
from minidist.ops.elementwise import (
    add,
    divide,
    equal,
    exp,
    less,
    less_equal,
    log,
    multiply,
    negative,
    power,
    sqrt,
    square,
    subtract,
)
from minidist.ops.embedding import embedding
from minidist.ops.layer_norm import layer_norm
from minidist.ops.linear import bias_add, dense, matmul
from minidist.ops.losses import softmax_cross_entropy
from minidist.ops.normalization import batch_norm, batch_norm_inference
from minidist.ops.operators import install_operators
from minidist.ops.pooling import average_pool, max_pool
from minidist.ops.reductions import argmax, l2_loss, reduce_mean, reduce_sum
from minidist.ops.response import local_response_norm
from minidist.ops.shape import cast, concat, reshape, stop_gradient, take, transpose

__all__ = [
    "TensorLike",
    "add",
    "argmax",
    "as_tensor",
    "average_pool",
    "batch_norm",
    "batch_norm_inference",
    "bias_add",
    "cast",
    "causal_attention",
    "concat",
    "constant",
    "conv2d",
    "dense",
    "depthwise_conv2d",
    "divide",
    "dropout",
    "embedding",
    "equal",
    "exp",
    "gelu",
    "install_operators",
    "l2_loss",
    "layer_norm",
    "less",
    "less_equal",
    "local_response_norm",
    "log",
    "log_softmax",
    "matmul",
    "max_pool",
    "multiply",
    "negative",
    "power",
    "reduce_mean",
    "reduce_sum",
    "relu",
    "relu6",
    "reshape",
    "softmax",
    "softmax_cross_entropy",
    "sqrt",
    "square",
    "stop_gradient",
    "subtract",
    "take",
    "transpose",
]
