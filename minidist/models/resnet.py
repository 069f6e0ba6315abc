"""resnet: deep networks of residual blocks (He, Zhang, Ren and Sun, 2015), in three versions.

In v1 a block is convolutions with a batch normalisation behind each, and the ReLU of their sum with
what went in. v1.5 halves images in the 3×3 convolution of a bottleneck, not in the 1×1 before it.
In v2 (He et al., 2016) normalisation and ReLU come before each convolution, and nothing is behind
the sum. Where a block changes the shape, a 1×1 convolution brings what is added to it into that
shape. Convolutions have no bias, and k // 2 pixels of padding on each side.
"""

from __future__ import annotations

from typing import NamedTuple

from minidist import nn
from minidist.models.recipe import Make

_STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


class Step(NamedTuple):
    """A convolution of a block."""

    filters: int
    size: int
    strides: int = 1


def name(depth: int, version: str) -> str:
    """Return what a network is called: "resnet50", "resnet50_v1.5", "resnet50_v2"."""
    return f"resnet{depth}" if version == "v1" else f"resnet{depth}_{version}"


def small(depth: int, version: str = "v1") -> Make:
    """Return what makes one of the paper's networks for CIFAR-10, of depth 6·n + 2.

    Three stages of n blocks of two 3×3 convolutions. For 32×32×3 images and ten classes resnet20
    has 272,474 parameters.
    """

    def make(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
        layers = _stem(Step(16, 3), version)
        for stage, width in enumerate((16, 32, 64)):
            for block in range((depth - 2) // 6):
                halves = stage > 0 and block == 0
                strides = 2 if halves else 1
                steps = [Step(width, 3, strides), Step(width, 3)]
                layers += _block(steps, Step(width, 1, strides) if halves else None, version)
        return nn.Sequential([*layers, *_top(classes, version)], name(depth, version))

    return make


def large(depth: int, version: str = "v1") -> Make:
    """Return what makes one of the paper's networks for ImageNet, of depth 50, 101 or 152.

    Four stages of bottlenecks, a 3×3 convolution between two of 1×1. For 224×224×3 images and
    1,000 classes resnet50 has 25,557,032 parameters, in 161 tensors.
    """

    def make(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
        layers = _stem(Step(64, 7, 2), version)
        layers.append(nn.MaxPool(3, strides=2, padding=((1, 1), (1, 1))))
        for stage, blocks in enumerate(_STAGES[depth]):
            width = 64 << stage
            for block in range(blocks):
                strides = 2 if stage > 0 and block == 0 else 1
                first, second = (1, strides) if version == "v1.5" else (strides, 1)
                steps = [Step(width, 1, first), Step(width, 3, second), Step(4 * width, 1)]
                layers += _block(steps, None if block else Step(4 * width, 1, strides), version)
        return nn.Sequential([*layers, *_top(classes, version)], name(depth, version))

    return make


def _stem(step: Step, version: str) -> list[nn.Layer]:
    return [_convolution(step), *([] if version == "v2" else [_norm_relu()])]


def _block(steps: list[Step], projection: Step | None, version: str) -> list[nn.Layer]:
    """Return the layers of a block. In v2 what is projected is normalised too."""
    shortcut: list[nn.Layer] | None = None if projection is None else [_convolution(projection)]
    if version == "v2":
        body = [each for step in steps for each in (_norm_relu(), _convolution(step))]
        if shortcut is None:
            return [nn.Residual(body, activation=None)]
        return [body[0], nn.Residual(body[1:], shortcut, activation=None)]
    body = [each for step in steps for each in (_convolution(step), _norm_relu())]
    body[-1] = nn.BatchNorm()
    return [nn.Residual(body, shortcut and [*shortcut, nn.BatchNorm()])]


def _top(classes: int, version: str) -> list[nn.Layer]:
    last = [_norm_relu()] if version == "v2" else []
    return [*last, nn.GlobalAveragePool(), nn.Dense(classes)]


def _norm_relu() -> nn.Layer:
    return nn.BatchNorm(activation="relu")


def _convolution(step: Step) -> nn.Layer:
    sides = (step.size // 2, step.size // 2)
    return nn.Conv2D(
        step.filters,
        step.size,
        strides=step.strides,
        padding=(sides, sides),
        use_bias=False,
        kernel_initializer=nn.he_normal(),
    )
