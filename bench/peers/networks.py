"""The networks that all peers train, layer by layer, as each peer's own operations make them.

A network is a list of layers, and a layer a tuple:

    ("conv", size, channels, stride, bias)    size // 2 zeros on each side
    ("norm",)                                 by the batch's own statistics, epsilon 1e-5
    ("relu",)
    ("pool", size, stride, padding)           the greatest element
    ("mean",)                                 over height and width
    ("flatten",)
    ("dense", units)                          with a bias
    ("block", body, shortcut)                 relu(body(x) + shortcut(x)); both are lists of layers
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Layer = tuple
DECAY = 1e-4
EPSILON = 1e-5
KEPT = 0.9  # of the moving averages of a batch norm's statistics
RATE, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class Network:
    """What is trained, and on what."""

    image: tuple[int, int, int]  # height, width, channels
    classes: int
    batch: int  # of a replica
    batches: int  # that are used in turn
    decay: float  # weight decay, of every parameter
    parameters: int
    layers: list[Layer]


def _conv_norm(size: int, channels: int, stride: int = 1) -> list[Layer]:
    return [("conv", size, channels, stride, False), ("norm",)]


def _basic(channels: int, width: int, stride: int) -> Layer:
    body = [*_conv_norm(3, width, stride), ("relu",), *_conv_norm(3, width)]
    return ("block", body, _conv_norm(1, width, stride) if channels != width else [])


def _bottleneck(channels: int, width: int, stride: int) -> Layer:
    body = [*_conv_norm(1, width, stride), ("relu",), *_conv_norm(3, width), ("relu",)]
    shortcut = _conv_norm(1, 4 * width, stride) if channels != 4 * width else []
    return ("block", [*body, *_conv_norm(1, 4 * width)], shortcut)


def _resnet20() -> list[Layer]:
    layers, channels = [*_conv_norm(3, 16), ("relu",)], 16
    for width in (16, 32, 64):
        for k in range(3):
            layers.append(_basic(channels, width, 2 if width > 16 and k == 0 else 1))
            channels = width
    return [*layers, ("mean",), ("dense", 10)]


def _resnet50() -> list[Layer]:
    layers, channels = [*_conv_norm(7, 64, 2), ("relu",), ("pool", 3, 2, 1)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for k in range(blocks):
            layers.append(_bottleneck(channels, width, 2 if width > 64 and k == 0 else 1))
            channels = 4 * width
    return [*layers, ("mean",), ("dense", 1000)]


_MLP = [("flatten",), ("dense", 1024), ("relu",), ("dense", 1024), ("relu",), ("dense", 10)]
_LENET = [
    *(("conv", 5, 32, 1, True), ("relu",), ("pool", 2, 2, 0)),
    *(("conv", 5, 64, 1, True), ("relu",), ("pool", 2, 2, 0)),
    *(("flatten",), ("dense", 512), ("relu",), ("dense", 10)),
]
NETWORKS = {
    "mlp": Network((28, 28, 1), 10, 64, 4, 0.0, 1_863_690, _MLP),
    "lenet": Network((28, 28, 1), 10, 64, 4, 0.0, 1_663_370, _LENET),
    "resnet20": Network((32, 32, 3), 10, 32, 4, DECAY, 272_474, _resnet20()),
    "resnet50": Network((224, 224, 3), 1000, 4, 2, DECAY, 25_557_032, _resnet50()),
}


def shapes(name: str) -> list[tuple[int, ...]]:
    """Return the shapes of a network's parameters, filters as (height, width, in, out)."""
    network = NETWORKS[name]
    found, _ = _shapes(network.layers, network.image)
    assert sum(map(prod, found)) == network.parameters
    return found


def _shapes(
    layers: list[Layer], at: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Return the parameters' shapes, and that of what comes out of layers for an input `at`."""
    found: list[tuple[int, ...]] = []
    for kind, *how in layers:
        if kind == "conv":
            size, channels, stride, bias = how
            found += [(size, size, at[2], channels), *[(channels,)] * bias]
            at = (-(-at[0] // stride), -(-at[1] // stride), channels)
        elif kind == "norm":
            found += [at[-1:]] * 2
        elif kind == "pool":
            size, stride, padding = how
            at = (*((n + 2 * padding - size) // stride + 1 for n in at[:2]), at[2])
        elif kind == "mean":
            at = at[2:]
        elif kind == "flatten":
            at = (prod(at),)
        elif kind == "dense":
            found += [(at[0], how[0]), (how[0],)]
            at = (how[0],)
        elif kind == "block":
            body, out = _shapes(how[0], at)
            found += body + _shapes(how[1], at)[0]
            at = out
    return found, at
