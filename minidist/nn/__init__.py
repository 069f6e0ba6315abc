"""Layers: what a model is a list of.

A layer is built once for the shape of one example, which makes its variables; then it is called
with batches. Layers hold no values themselves: those are in the variables, and each replica reads
its own.
"""

from __future__ import annotations

from minidist.initializers import (
    Initializer,
    glorot_uniform,
    he_normal,
    ones,
    truncated_normal,
    zeros,
)
from minidist.nn.embedding import Embedding
from minidist.nn.layer import Layer
from minidist.nn.normalization import BatchNorm
from minidist.nn.pooling import AveragePool, GlobalAveragePool, MaxPool
from minidist.nn.residual import Residual
from minidist.nn.sequential import Sequential
from minidist.nn.weighted import Conv2D, Dense
from minidist.nn.weightless import Dropout, Flatten, ReLU

__all__ = [
    "AveragePool",
    "BatchNorm",
    "Conv2D",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAveragePool",
    "Initializer",
    "Layer",
    "MaxPool",
    "ReLU",
    "Residual",
    "Sequential",
    "glorot_uniform",
    "he_normal",
    "ones",
    "truncated_normal",
    "zeros",
]
