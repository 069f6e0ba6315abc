"""Layers of models without batch normalisation: a bias, a ReLU, and initial values after He."""

from __future__ import annotations

from minidist import nn
from minidist.ops.window import Padding


def convolution(filters: int, size: int, strides: int = 1, padding: Padding = "SAME") -> nn.Conv2D:
    """A convolution with a bias and a ReLU."""
    return nn.Conv2D(
        filters,
        size,
        strides=strides,
        padding=padding,
        activation="relu",
        kernel_initializer=nn.he_normal(),
    )


def dense(units: int) -> nn.Dense:
    """A dense layer with a ReLU."""
    return nn.Dense(units, activation="relu", kernel_initializer=nn.he_normal())
