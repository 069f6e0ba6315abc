"""googlenet: convolutions of several sizes side by side (Szegedy et al., 2014), Inception's first.

Without the paper's auxiliary classifiers, local response normalisation and dropout, as in
tf_cnn_benchmarks.
"""

from __future__ import annotations

from minidist import nn
from minidist.models.plain import convolution


def googlenet(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For 224×224×3 images and 1,000 classes 6,998,552 parameters."""
    return nn.Sequential(
        [
            convolution(64, 7, strides=2),
            _halved(),
            convolution(64, 1),
            convolution(192, 3),
            _halved(),
            _inception(64, (96, 128), (16, 32), 32),
            _inception(128, (128, 192), (32, 96), 64),
            _halved(),
            _inception(192, (96, 208), (16, 48), 64),
            _inception(160, (112, 224), (24, 64), 64),
            _inception(128, (128, 256), (24, 64), 64),
            _inception(112, (144, 288), (32, 64), 64),
            _inception(256, (160, 320), (32, 128), 128),
            _halved(),
            _inception(256, (160, 320), (32, 128), 128),
            _inception(384, (192, 384), (48, 128), 128),
            nn.GlobalAveragePool(),
            nn.Dense(classes),
        ],
        name="googlenet",
    )


def _inception(
    ones: int, threes: tuple[int, int], fives: tuple[int, int], pooled: int
) -> nn.Concat:
    """Filters of 1×1, 3×3, 5×5, and 1×1 behind a pooling; fewer of 1×1 stand before the large."""
    return nn.Concat(
        [
            [convolution(ones, 1)],
            [convolution(threes[0], 1), convolution(threes[1], 3)],
            [convolution(fives[0], 1), convolution(fives[1], 5)],
            [nn.MaxPool(3, strides=1, padding="SAME"), convolution(pooled, 1)],
        ]
    )


def _halved() -> nn.MaxPool:
    return nn.MaxPool(3, strides=2, padding="SAME")
