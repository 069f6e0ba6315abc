"""resnet: deep networks of residual blocks (He, Zhang, Ren and Sun, 2015), in their first version.

Convolutions have no bias, k // 2 pixels of padding on each side, and a batch normalisation behind
them. The small networks are the paper's for CIFAR-10, the large ones those for ImageNet.
"""

from __future__ import annotations

from minidist import nn


def resnet20(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For 32×32×3 images and ten classes 272,474 parameters."""
    return _small("resnet20", 3, classes)


def resnet50(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For 224×224×3 images and 1,000 classes 25,557,032 parameters, in 161 tensors."""
    return _large("resnet50", (3, 4, 6, 3), classes)


def _small(name: str, blocks: int, classes: int) -> nn.Sequential:
    """Three stages of so many basic blocks each, which makes 6·blocks + 2 layers with weights."""
    layers = _convolution(16, 3)
    for stage, width in enumerate((16, 32, 64)):
        for block in range(blocks):
            halves = stage > 0 and block == 0
            layers.append(_basic(width, 2 if halves else 1, projects=halves))
    return nn.Sequential([*layers, nn.GlobalAveragePool(), nn.Dense(classes)], name)


def _large(name: str, stages: tuple[int, ...], classes: int) -> nn.Sequential:
    """Stages of bottlenecks, each twice as wide as the one before, with images half as high."""
    layers = [*_convolution(64, 7, strides=2), nn.MaxPool(3, strides=2, padding=((1, 1), (1, 1)))]
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            strides = 2 if stage > 0 and block == 0 else 1
            layers.append(_bottleneck(64 << stage, strides, projects=block == 0))
    return nn.Sequential([*layers, nn.GlobalAveragePool(), nn.Dense(classes)], name)


def _basic(width: int, strides: int, projects: bool) -> nn.Residual:
    """Two 3×3 convolutions."""
    body = [*_convolution(width, 3, strides), *_convolution(width, 3, activation=None)]
    return nn.Residual(body, _projection(width, strides) if projects else None)


def _bottleneck(width: int, strides: int, projects: bool) -> nn.Residual:
    """A 3×3 convolution between two 1×1, of which the first has the strides."""
    body = [
        *_convolution(width, 1, strides),
        *_convolution(width, 3),
        *_convolution(4 * width, 1, activation=None),
    ]
    return nn.Residual(body, _projection(4 * width, strides) if projects else None)


def _projection(width: int, strides: int) -> list[nn.Layer]:
    return _convolution(width, 1, strides, activation=None)


def _convolution(
    filters: int, size: int, strides: int = 1, activation: str | None = "relu"
) -> list[nn.Layer]:
    sides = (size // 2, size // 2)
    return [
        nn.Conv2D(
            filters,
            size,
            strides=strides,
            padding=(sides, sides),
            use_bias=False,
            kernel_initializer=nn.he_normal(),
        ),
        nn.BatchNorm(activation=activation),
    ]
