"""resnet, densenet and mobilenet against PyTorch, where that is: losses and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch_twin import compare, torch

F = torch.nn.functional


class Net:
    """The published networks, which take their weights one by one from a list."""

    def __init__(self, weights: Iterator[Any]) -> None:
        self.weights = weights

    def convolution(self, x: Any, filters: int, size: int, strides: int = 1) -> Any:
        kernel = next(self.weights).permute(3, 2, 0, 1)
        assert kernel.shape == (filters, x.shape[1], size, size)
        return F.conv2d(x, kernel, stride=strides, padding=size // 2)

    def norm(self, x: Any, epsilon: float = 1e-5) -> Any:
        scale, offset = next(self.weights), next(self.weights)
        return F.batch_norm(x, None, None, scale, offset, training=True, eps=epsilon)

    def norm_relu(self, x: Any) -> Any:
        return torch.relu(self.norm(x))

    def classes(self, x: Any) -> Any:
        return x.mean((2, 3)) @ next(self.weights) + next(self.weights)

    # -- resnet ------------------------------------------------------------------------------

    def block(self, x: Any, projects: bool, *steps: tuple[int, int, int]) -> Any:
        y = x
        for number, step in enumerate(steps):
            y = self.norm(self.convolution(y, *step))
            y = torch.relu(y) if number + 1 < len(steps) else y
        strides = max(strides for _, _, strides in steps)
        x = self.norm(self.convolution(x, steps[-1][0], 1, strides)) if projects else x
        return torch.relu(x + y)

    def block_v2(self, x: Any, projects: bool, *steps: tuple[int, int, int]) -> Any:
        y = first = self.norm_relu(x)
        for number, step in enumerate(steps):
            y = self.convolution(self.norm_relu(y) if number else y, *step)
        strides = max(strides for _, _, strides in steps)
        return y + (self.convolution(first, steps[-1][0], 1, strides) if projects else x)

    def small(self, x: Any, blocks: int, block: Any) -> Any:
        for width in (16, 32, 64):
            for number in range(blocks):
                halves = width > 16 and number == 0
                x = block(x, halves, (width, 3, 1 + halves), (width, 3, 1))
        return x

    def large(self, x: Any, late: bool, block: Any) -> Any:
        x = F.max_pool2d(x, 3, 2, 1)
        for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for number in range(blocks):
                halves = width > 64 and number == 0
                first, second = 1 + (halves and not late), 1 + (halves and late)
                steps = [(width, 1, first), (width, 3, second), (4 * width, 1, 1)]
                x = block(x, number == 0, *steps)
        return x

    def resnet32(self, x: Any) -> Any:
        return self.classes(self.small(self.norm_relu(self.convolution(x, 16, 3)), 5, self.block))

    def resnet20_v2(self, x: Any) -> Any:
        x = self.small(self.convolution(x, 16, 3), 3, self.block_v2)
        return self.classes(self.norm_relu(x))

    def resnet50(self, x: Any, late: bool = False) -> Any:
        x = self.norm_relu(self.convolution(x, 64, 7, 2))
        return self.classes(self.large(x, late, self.block))

    def resnet50_late(self, x: Any) -> Any:
        return self.resnet50(x, late=True)

    def resnet50_v2(self, x: Any) -> Any:
        x = self.large(self.convolution(x, 64, 7, 2), False, self.block_v2)
        return self.classes(self.norm_relu(x))

    # -- densenet and mobilenet --------------------------------------------------------------

    def densenet40_k12(self, x: Any) -> Any:
        x = self.convolution(x, 16, 3)
        for block in range(3):
            if block:
                x = F.avg_pool2d(self.convolution(self.norm_relu(x), x.shape[1], 1), 2)
            for _ in range(12):
                x = torch.cat([x, self.convolution(self.norm_relu(x), 12, 3)], 1)
        return self.classes(self.norm_relu(x))

    def mobilenet(self, x: Any) -> Any:
        x = self._relu6(self._same(x, 2, lambda x, s: F.conv2d(x, self._kernel(), stride=s)))
        stages = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1)]
        for t, c, n, s in [*stages, (6, 160, 3, 2), (6, 320, 1, 1)]:
            for number in range(n):
                x = self._inverted(x, t * x.shape[1], c, 1 if number else s)
        return self.classes(self._relu6(self.convolution(x, 1280, 1)))

    def _inverted(self, x: Any, wide: int, filters: int, strides: int) -> Any:
        def by_channel(y: Any, strides: int) -> Any:
            kernel = next(self.weights).permute(2, 0, 1)[:, None]
            return F.conv2d(y, kernel, stride=strides, groups=wide)

        y = x if wide == x.shape[1] else self._relu6(self.convolution(x, wide, 1))
        y = self._relu6(self._same(y, strides, by_channel))
        y = self.norm(self.convolution(y, filters, 1), 1e-3)
        return x + y if strides == 1 and filters == x.shape[1] else y

    def _kernel(self) -> Any:
        return next(self.weights).permute(3, 2, 0, 1)

    def _relu6(self, x: Any) -> Any:
        return F.relu6(self.norm(x, 1e-3))

    @staticmethod
    def _same(x: Any, strides: int, convolve: Callable[[Any, int], Any]) -> Any:
        """A 3×3 convolution with SAME padding: of an even length and strides of 2 it is behind."""
        before = [int(strides == 1 or n % 2) for n in x.shape[2:]]
        return convolve(F.pad(x, (before[1], 1, before[0], 1)), strides)


@pytest.mark.parametrize(
    ("name", "side", "theirs"),
    [
        ("resnet32", 16, Net.resnet32),
        ("resnet20_v2", 16, Net.resnet20_v2),
        ("resnet50", 33, Net.resnet50),
        ("resnet50_v1.5", 33, Net.resnet50_late),
        ("resnet50_v2", 33, Net.resnet50_v2),
        ("densenet40_k12", 8, Net.densenet40_k12),
        ("mobilenet", 32, Net.mobilenet),
        ("mobilenet", 43, Net.mobilenet),
    ],
)
def test_losses_and_gradients(name: str, side: int, theirs: Callable[[Net, Any], Any]) -> None:
    compare(name, side, lambda weights, x: theirs(Net(weights), x))
