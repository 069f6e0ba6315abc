"""trivial: the least that is a model; what it costs to train it is what everything else costs."""

from __future__ import annotations

from math import prod

from minidist import nn


def trivial(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Flatten, one unit, 4096 units, the classes; as the ancestor's, ReLU and initial values too.

    The single unit often starts dead (its ReLU gives 0 for all images) and then stays so: this
    model is for measuring, not for learning.
    """
    return nn.Sequential(
        [
            nn.Flatten(),
            nn.Dense(1, kernel_initializer=nn.truncated_normal((2 / prod(input_shape)) ** 0.5)),
            nn.ReLU(),
            nn.Dense(4096, kernel_initializer=nn.truncated_normal(2**0.5)),
            nn.ReLU(),
            nn.Dense(classes, kernel_initializer=nn.truncated_normal(4096**-0.5)),
        ],
        name="trivial",
    )
