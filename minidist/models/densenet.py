"""densenet: every layer sees what all layers of its block before it made (Huang et al., 2016).

The plain networks of the paper for CIFAR-10, without bottlenecks and compression: a layer is batch
normalisation, ReLU and a 3×3 convolution, whose filters are joined to what went in. Convolutions
have no bias.
"""

from __future__ import annotations

from minidist import nn
from minidist.models.recipe import Make


def densenet(depth: int, growth: int) -> Make:
    """Return what makes the network of depth 3·n + 4 with `growth` filters in each layer.

    Three blocks of n layers, each after the first on images half as high. For 32×32×3 images and
    ten classes densenet40_k12 has 1,019,722 parameters.
    """

    def make(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
        layers: list[nn.Layer] = [_convolution(16, 3)]
        channels = 16
        for block in range(3):
            if block > 0:
                layers += [_norm_relu(), _convolution(channels, 1), nn.AveragePool(2)]
            for _ in range((depth - 4) // 3):
                layers.append(nn.Concat([[], [_norm_relu(), _convolution(growth, 3)]]))
                channels += growth
        top = [_norm_relu(), nn.GlobalAveragePool(), nn.Dense(classes)]
        return nn.Sequential([*layers, *top], f"densenet{depth}_k{growth}")

    return make


def _norm_relu() -> nn.Layer:
    return nn.BatchNorm(activation="relu")


def _convolution(filters: int, size: int) -> nn.Layer:
    return nn.Conv2D(filters, size, use_bias=False, kernel_initializer=nn.he_normal())
