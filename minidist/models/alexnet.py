"""alexnet: five convolutions and three dense layers, in the form of Krizhevsky (2014).

That is the network in one column of "One weird trick for parallelizing convolutional neural
networks". Small images get the one of TensorFlow's CIFAR-10 tutorial, which goes back to the same
author; tf_cnn_benchmarks has both under this name too.
"""

from __future__ import annotations

from minidist import nn
from minidist.models.plain import convolution, dense

LEAST = 67  # pixels of a side: with fewer nothing is left for the last pooling


def alexnet(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For 227×227×3 images and 1,000 classes 61,838,248 parameters; 32×32×3 and 10: 1,756,426.

    Torchvision's alexnet has 61,100,840: with 256 filters in the fourth convolution, not 384.
    """
    small = min(input_shape[:2], default=LEAST) < LEAST
    return nn.Sequential(_small(classes) if small else _large(classes), "alexnet")


def _large(classes: int) -> list[nn.Layer]:
    return [
        convolution(64, 11, strides=4, padding="VALID"),
        nn.MaxPool(3, strides=2),
        convolution(192, 5),
        nn.MaxPool(3, strides=2),
        convolution(384, 3),
        convolution(384, 3),
        convolution(256, 3),
        nn.MaxPool(3, strides=2),
        nn.Flatten(),
        dense(4096),
        nn.Dropout(0.5),
        dense(4096),
        nn.Dropout(0.5),
        nn.Dense(classes),
    ]


def _small(classes: int) -> list[nn.Layer]:
    return [
        _small_convolution(),
        nn.MaxPool(3, strides=2, padding="SAME"),
        nn.LocalResponseNorm(4, alpha=0.001 / 9, beta=0.75),
        _small_convolution(nn.constant(0.1)),
        nn.LocalResponseNorm(4, alpha=0.001 / 9, beta=0.75),
        nn.MaxPool(3, strides=2, padding="SAME"),
        nn.Flatten(),
        _small_dense(384),
        _small_dense(192),
        nn.Dense(classes, kernel_initializer=nn.truncated_normal(1 / 192)),
    ]


def _small_convolution(bias: nn.Initializer | None = None) -> nn.Conv2D:
    start = nn.truncated_normal(0.05)
    return nn.Conv2D(64, 5, activation="relu", kernel_initializer=start, bias_initializer=bias)


def _small_dense(units: int) -> nn.Dense:
    return nn.Dense(
        units,
        activation="relu",
        kernel_initializer=nn.truncated_normal(0.04),
        bias_initializer=nn.constant(0.1),
    )
