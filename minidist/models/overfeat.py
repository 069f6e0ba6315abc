"""overfeat: the fast model of Sermanet et al. (2014), a wider alexnet."""

from __future__ import annotations

from minidist import nn
from minidist.models.plain import convolution, dense


def overfeat(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For 231×231×3 images and 1,000 classes 145,920,872 parameters."""
    return nn.Sequential(
        [
            convolution(96, 11, strides=4, padding="VALID"),
            nn.MaxPool(2),
            convolution(256, 5, padding="VALID"),
            nn.MaxPool(2),
            convolution(512, 3),
            convolution(1024, 3),
            convolution(1024, 3),
            nn.MaxPool(2),
            nn.Flatten(),
            dense(3072),
            nn.Dropout(0.5),
            dense(4096),
            nn.Dropout(0.5),
            nn.Dense(classes),
        ],
        name="overfeat",
    )
