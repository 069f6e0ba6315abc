"""inception: its third version (Szegedy et al., 2015) and its fourth (Szegedy et al., 2016).

Blocks put convolutions of several sizes side by side; a large one is done as two of 1×n and n×1, or
as several of 3×3. Behind each is a batch normalisation without a scale, whose offset does not
decay. The third version is without the paper's auxiliary classifier and dropout. All of that is as
in tf_cnn_benchmarks.
"""

from __future__ import annotations

from minidist import nn
from minidist.ops.window import Padding, Pair

Step = tuple[int, Pair]  # filters of a convolution, and their size


def inception3(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For 299×299×3 images and 1,000 classes 23,817,352 parameters."""
    return nn.Sequential(
        [
            *_convolution((32, 3), 2, "VALID"),
            *_convolution((32, 3), 1, "VALID"),
            *_convolution((64, 3)),
            nn.MaxPool(3, strides=2),
            *_convolution((80, 1)),
            *_convolution((192, 3), 1, "VALID"),
            nn.MaxPool(3, strides=2),
            *(_with_fives(pooled) for pooled in (32, 64, 64)),
            _halved([(384, 3)], [(64, 1), (96, 3), (96, 3)]),
            *(_with_sevens(width) for width in (128, 160, 160, 192)),
            _halved([(192, 1), (320, 3)], [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)]),
            _spread(_average()),
            _spread(nn.MaxPool(3, strides=1, padding="SAME")),
            nn.GlobalAveragePool(),
            nn.Dense(classes),
        ],
        name="inception3",
    )


def inception4(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For 299×299×3 images and 1,000 classes 42,648,232 parameters."""
    return nn.Sequential(
        [
            *_convolution((32, 3), 2, "VALID"),
            *_convolution((32, 3), 1, "VALID"),
            *_convolution((64, 3)),
            _halved([(96, 3)]),
            _valid([(64, 1), (96, 3)], [(64, 1), (64, (7, 1)), (64, (1, 7)), (96, 3)]),
            _halved([(192, 3)]),
            *(_block_a() for _ in range(4)),
            _halved([(384, 3)], [(192, 1), (224, 3), (256, 3)]),
            *(_block_b() for _ in range(7)),
            _halved([(192, 1), (192, 3)], [(256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3)]),
            *(_block_c() for _ in range(3)),
            nn.GlobalAveragePool(),
            nn.Dropout(0.2),
            nn.Dense(classes),
        ],
        name="inception4",
    )


def _with_fives(pooled: int) -> nn.Concat:
    """The third version's block for the largest images."""
    return nn.Concat(
        [
            _convolutions((64, 1)),
            _convolutions((48, 1), (64, 5)),
            _convolutions((64, 1), (96, 3), (96, 3)),
            [_average(), *_convolutions((pooled, 1))],
        ]
    )


def _with_sevens(n: int) -> nn.Concat:
    """The third version's block for images of middle size; 1×7 and 7×1 do for 7×7."""
    down, across = (7, 1), (1, 7)
    return nn.Concat(
        [
            _convolutions((192, 1)),
            _convolutions((n, 1), (n, across), (192, down)),
            _convolutions((n, 1), (n, down), (n, across), (n, down), (192, across)),
            [_average(), *_convolutions((192, 1))],
        ]
    )


def _spread(pool: nn.Layer) -> nn.Concat:
    """The third version's block for the smallest images, of which there are many channels."""
    return nn.Concat(
        [
            _convolutions((320, 1)),
            [*_convolutions((384, 1)), _both_ways(384)],
            [*_convolutions((448, 1), (384, 3)), _both_ways(384)],
            [pool, *_convolutions((192, 1))],
        ]
    )


def _block_a() -> nn.Concat:
    """The fourth version's block for the largest images."""
    return nn.Concat(
        [
            [_average(), *_convolutions((96, 1))],
            _convolutions((96, 1)),
            _convolutions((64, 1), (96, 3)),
            _convolutions((64, 1), (96, 3), (96, 3)),
        ]
    )


def _block_b() -> nn.Concat:
    """The fourth version's block for images of middle size."""
    down, across = (7, 1), (1, 7)
    return nn.Concat(
        [
            [_average(), *_convolutions((128, 1))],
            _convolutions((384, 1)),
            _convolutions((192, 1), (224, across), (256, down)),
            _convolutions((192, 1), (192, across), (224, down), (224, across), (256, down)),
        ]
    )


def _block_c() -> nn.Concat:
    """The fourth version's block for the smallest images."""
    return nn.Concat(
        [
            [_average(), *_convolutions((256, 1))],
            _convolutions((256, 1)),
            [*_convolutions((384, 1)), _both_ways(256)],
            [*_convolutions((384, 1), (448, (1, 3)), (512, (3, 1))), _both_ways(256)],
        ]
    )


def _both_ways(filters: int) -> nn.Concat:
    return nn.Concat([_convolutions((filters, (1, 3))), _convolutions((filters, (3, 1)))])


def _halved(*branches: list[Step]) -> nn.Concat:
    """Halve height and width: by the last convolution of each branch, and by a pooling."""
    halving = [
        [*_convolutions(*first), *_convolution(last, 2, "VALID")] for *first, last in branches
    ]
    return nn.Concat([*halving, [nn.MaxPool(3, strides=2)]])


def _valid(*branches: list[Step]) -> nn.Concat:
    """Branches whose last convolution has no padding."""
    return nn.Concat(
        [[*_convolutions(*first), *_convolution(last, 1, "VALID")] for *first, last in branches]
    )


def _convolutions(*steps: Step) -> list[nn.Layer]:
    """One after the other, all of which leave height and width as they are."""
    return [layer for step in steps for layer in _convolution(step)]


def _convolution(step: Step, strides: int = 1, padding: Padding = "SAME") -> list[nn.Layer]:
    filters, size = step
    return [
        nn.Conv2D(
            filters,
            size,
            strides=strides,
            padding=padding,
            use_bias=False,
            kernel_initializer=nn.he_normal(),
        ),
        nn.BatchNorm(momentum=0.999, epsilon=1e-3, scale=False, decays=False, activation="relu"),
    ]


def _average() -> nn.AveragePool:
    return nn.AveragePool(3, strides=1, padding="SAME")
