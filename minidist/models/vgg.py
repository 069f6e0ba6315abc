"""vgg: 3×3 convolutions, two to four of them between poolings (Simonyan and Zisserman, 2014)."""

from __future__ import annotations

from minidist import nn
from minidist.models.plain import convolution, dense


def vgg11(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """The paper's A. For 224×224×3 images and 1,000 classes 132,863,336 parameters."""
    return _vgg("vgg11", (1, 1, 2, 2, 2), classes)


def vgg16(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """The paper's D. For 224×224×3 images and 1,000 classes 138,357,544 parameters."""
    return _vgg("vgg16", (2, 2, 3, 3, 3), classes)


def vgg19(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """The paper's E. For 224×224×3 images and 1,000 classes 143,667,240 parameters."""
    return _vgg("vgg19", (2, 2, 4, 4, 4), classes)


def _vgg(name: str, convolutions: tuple[int, ...], classes: int) -> nn.Sequential:
    """Stages of so many convolutions; a pooling ends each and halves height and width."""
    layers: list[nn.Layer] = []
    for filters, count in zip((64, 128, 256, 512, 512), convolutions, strict=True):
        layers += [convolution(filters, 3) for _ in range(count)]
        layers.append(nn.MaxPool(2))
    head = [dense(4096), nn.Dropout(0.5), dense(4096), nn.Dropout(0.5), nn.Dense(classes)]
    return nn.Sequential([*layers, nn.Flatten(), *head], name)
