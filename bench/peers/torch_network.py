"""The networks of networks.py as modules of PyTorch."""

from __future__ import annotations

from typing import Any

from networks import Layer


def module(layers: list[Layer], channels: int, size: int) -> tuple[Any, int, int]:
    """Return layers as one module, and the channels and the height of what comes out."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, body: Any, shortcut: Any) -> None:
            super().__init__()
            self.body, self.shortcut = body, shortcut

        def forward(self, x: Any) -> Any:
            return torch.relu_(self.body(x) + self.shortcut(x))

    made: list[Any] = []
    for kind, *how in layers:
        if kind == "conv":
            width, out, stride, bias = how
            made.append(nn.Conv2d(channels, out, width, stride, width // 2, bias=bias))
            channels, size = out, -(-size // stride)
        elif kind == "norm":
            made.append(nn.BatchNorm2d(channels))
        elif kind == "relu":
            made.append(nn.ReLU(inplace=True))
        elif kind == "pool":
            made.append(nn.MaxPool2d(*how))
            size = (size + 2 * how[2] - how[0]) // how[1] + 1
        elif kind == "mean":
            made += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        elif kind == "flatten":
            made.append(nn.Flatten())
            channels *= size * size
        elif kind == "dense":
            made.append(nn.Linear(channels, how[0]))
            channels = how[0]
        elif kind == "block":
            body, out, height = module(how[0], channels, size)
            made.append(Block(body, module(how[1], channels, size)[0]))
            channels, size = out, height
    return nn.Sequential(*made), channels, size
