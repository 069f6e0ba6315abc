"""Layers: what a model is a list of.

A layer is built once for the shape of one example, which makes its variables; then it is called
with batches. Layers hold no values themselves: those are in the variables, and each replica reads
its own.
"""

from __future__ import annotations

from minidist.initializers import (
    Initializer,
    constant,
    glorot_uniform,
    he_normal,
    ones,
    truncated_normal,
    zeros,
)
from minidist.nn.attention import CausalAttention
from minidist.nn.concat import Concat
from minidist.nn.embedding import Embedding, Positions
from minidist.nn.layer import Layer
from minidist.nn.layer_norm import LayerNorm
from minidist.nn.normalization import BatchNorm
from minidist.nn.pooling import AveragePool, GlobalAveragePool, MaxPool
from minidist.nn.residual import Residual
from minidist.nn.response import LocalResponseNorm
from minidist.nn.sequential import Sequential
from minidist.nn.weighted import Conv2D, Dense, DepthwiseConv2D
from minidist.nn.weightless import GELU, Dropout, Flatten, ReLU

__all__ = [
    "GELU",
    "AveragePool",
    "BatchNorm",
    "CausalAttention",
    "Concat",
    "Conv2D",
    "Dense",
    "DepthwiseConv2D",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAveragePool",
    "Initializer",
    "Layer",
    "LayerNorm",
    "LocalResponseNorm",
    "MaxPool",
    "Positions",
    "ReLU",
    "Residual",
    "Sequential",
    "constant",
    "glorot_uniform",
    "he_normal",
    "ones",
    "truncated_normal",
    "zeros",
]
