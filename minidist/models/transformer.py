"""transformer: a small decoder that guesses each token of a text from those before it."""

from __future__ import annotations

from minidist import nn

WIDTH = 128
HEADS = 4
BLOCKS = 4


def transformer(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For windows of 64 bytes 867,328 parameters.

    As in GPT-2 (Radford and others, 2019): embeddings of tokens and of positions, then blocks of
    attention and of two dense layers with GELU between them, each of the two normalised before and
    added to its input. Initial weights are truncated normal, of deviation 0.02, divided by
    √(2·blocks) in the last layer of what is added: there are two such sums in each block.
    """
    layers: list[nn.Layer] = [
        nn.Embedding(classes, WIDTH, sparse=False, initializer=_small()),
        nn.Positions(initializer=_small()),
    ]
    for _ in range(BLOCKS):
        layers += [
            _added(_dense(3 * WIDTH), nn.CausalAttention(HEADS)),
            _added(_dense(4 * WIDTH), nn.GELU()),
        ]
    return nn.Sequential([*layers, nn.LayerNorm(), _dense(classes)], "transformer")


def _added(*body: nn.Layer) -> nn.Residual:
    """What some layers make of what is normalised, brought to its width and added to it."""
    last = nn.Dense(WIDTH, kernel_initializer=_small(1 / (2 * BLOCKS) ** 0.5))
    return nn.Residual([nn.LayerNorm(), *body, last], activation=None)


def _dense(units: int) -> nn.Dense:
    return nn.Dense(units, kernel_initializer=_small())


def _small(factor: float = 1.0) -> nn.Initializer:
    return nn.truncated_normal(0.02 * factor)
