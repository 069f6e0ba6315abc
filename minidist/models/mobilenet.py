"""mobilenet: a network for small devices, in its second version (Sandler et al., 2018).

A block widens its images by a 1×1 convolution, filters each channel by itself, and narrows them
again; where input and output are of one shape it adds what went in. ReLU6 comes behind the first
two of these and not behind the third. Normalisation and initial values are as in tf_cnn_benchmarks.
"""

from __future__ import annotations

from minidist import nn

# What each stage has: how much wider its blocks are within, their filters, how many blocks there
# are, and the strides of the first.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For 224×224×3 images and 1,000 classes 3,504,872 parameters."""
    layers = _convolution(32, 3, strides=2)
    channels = 32
    for widening, filters, blocks, strides in _STAGES:
        for block in range(blocks):
            layers += _block(channels, widening, filters, 1 if block else strides)
            channels = filters
    last = nn.Dense(classes, kernel_initializer=_initial())
    top = [*_convolution(1280, 1), nn.GlobalAveragePool(), nn.Dropout(0.2), last]
    return nn.Sequential([*layers, *top], "mobilenet")


def _block(channels: int, widening: int, filters: int, strides: int) -> list[nn.Layer]:
    wide = widening * channels
    body = [
        *(_convolution(wide, 1) if widening > 1 else []),
        nn.DepthwiseConv2D(3, strides=strides, kernel_initializer=_initial()),
        _batch_norm("relu6"),
        *_convolution(filters, 1, activation=None),
    ]
    return [nn.Residual(body, activation=None)] if strides == 1 and filters == channels else body


def _convolution(
    filters: int, size: int, strides: int = 1, activation: str | None = "relu6"
) -> list[nn.Layer]:
    convolution = nn.Conv2D(
        filters, size, strides=strides, use_bias=False, kernel_initializer=_initial()
    )
    return [convolution, _batch_norm(activation)]


def _batch_norm(activation: str | None) -> nn.Layer:
    return nn.BatchNorm(momentum=0.997, epsilon=1e-3, activation=activation)


def _initial() -> nn.Initializer:
    return nn.truncated_normal(0.09)
