"""lenet: two convolutions with pooling, two dense layers, after LeCun et al. (1998)."""

from __future__ import annotations

from minidist import nn


def lenet(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For 28×28×1 images and ten classes 1,663,370 parameters, as in TensorFlow's MNIST tutorial.

    Each pooling halves height and width, which must be at least 4. ReLU comes behind it: the
    greatest of a window is the same before and after, and there are a quarter as many numbers.
    """
    return nn.Sequential(
        [
            nn.Conv2D(32, 5, kernel_initializer=nn.he_normal()),
            nn.MaxPool(2),
            nn.ReLU(),
            nn.Conv2D(64, 5, kernel_initializer=nn.he_normal()),
            nn.MaxPool(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dense(512, activation="relu", kernel_initializer=nn.he_normal()),
            nn.Dense(classes),
        ],
        name="lenet",
    )
