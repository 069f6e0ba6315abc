"""mlp: two hidden layers of 1024."""

from __future__ import annotations

from minidist import nn


def mlp(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """784-1024-1024-10 for 28×28 images and ten classes: 1,863,690 parameters."""
    return nn.Sequential(
        [
            nn.Flatten(),
            nn.Dense(1024, activation="relu", kernel_initializer=nn.he_normal()),
            nn.Dense(1024, activation="relu", kernel_initializer=nn.he_normal()),
            nn.Dense(classes),
        ],
        name="mlp",
    )
