"""Models of convolutions alone, and inception, against PyTorch where that is: losses, gradients."""

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

    def convolution(
        self, x: Any, filters: int, size: Any, stride: int = 1, same: bool = True
    ) -> Any:
        kernel, bias = self._kernel(x, filters, size), next(self.weights)
        return torch.relu(F.conv2d(x, kernel, bias, stride, _around(size) if same else 0))

    def normed(self, x: Any, filters: int, size: Any, stride: int = 1, same: bool = True) -> Any:
        x = F.conv2d(x, self._kernel(x, filters, size), None, stride, _around(size) if same else 0)
        return torch.relu(F.batch_norm(x, None, None, None, next(self.weights), True, eps=1e-3))

    def chain(self, x: Any, *steps: tuple[int, Any], halve: bool = False, same: bool = True) -> Any:
        for number, (filters, size) in enumerate(steps):
            last = number + 1 == len(steps)
            stride, padded = (2, False) if halve and last else (1, same or not last)
            x = self.normed(x, filters, size, stride, padded)
        return x

    def dense(self, x: Any, units: int) -> Any:
        kernel, bias = next(self.weights), next(self.weights)
        assert kernel.shape == (x.shape[1], units)
        return x @ kernel + bias

    def _kernel(self, x: Any, filters: int, size: Any) -> Any:
        kernel = next(self.weights).permute(3, 2, 0, 1)
        height, width = size if isinstance(size, tuple) else (size, size)
        assert kernel.shape == (filters, x.shape[1], height, width)
        return kernel

    def classes(self, x: Any, *units: int) -> Any:
        for each in units:
            x = torch.relu(self.dense(x, each))
        return self.dense(x, 10)

    def alexnet(self, x: Any) -> Any:
        x = F.max_pool2d(self.convolution(x, 64, 11, 4, same=False), 3, 2)
        x = F.max_pool2d(self.convolution(x, 192, 5), 3, 2)
        x = self.convolution(self.convolution(x, 384, 3), 384, 3)
        x = F.max_pool2d(self.convolution(x, 256, 3), 3, 2)
        return self.classes(_flat(x), 4096, 4096)

    def alexnet_of_small_images(self, x: Any) -> Any:
        x = _same_pool(self.convolution(x, 64, 5))
        x = F.local_response_norm(x, 9, 0.001, 0.75, 1.0)  # its alpha is that of a mean
        x = F.local_response_norm(self.convolution(x, 64, 5), 9, 0.001, 0.75, 1.0)
        return self.classes(_flat(_same_pool(x)), 384, 192)

    def overfeat(self, x: Any) -> Any:
        x = F.max_pool2d(self.convolution(x, 96, 11, 4, same=False), 2)
        x = F.max_pool2d(self.convolution(x, 256, 5, same=False), 2)
        for filters in (512, 1024, 1024):
            x = self.convolution(x, filters, 3)
        return self.classes(_flat(F.max_pool2d(x, 2)), 3072, 4096)

    def vgg11(self, x: Any) -> Any:
        for stage in ([64], [128], [256] * 2, [512] * 2, [512] * 2):
            for filters in stage:
                x = self.convolution(x, filters, 3)
            x = F.max_pool2d(x, 2)
        return self.classes(_flat(x), 4096, 4096)

    def googlenet(self, x: Any) -> Any:
        def block(x: Any, a: int, b: int, c: int, d: int, e: int, f: int) -> Any:
            parts = [
                self.convolution(x, a, 1),
                self.convolution(self.convolution(x, b, 1), c, 3),
                self.convolution(self.convolution(x, d, 1), e, 5),
                self.convolution(F.max_pool2d(x, 3, 1, 1), f, 1),
            ]
            return torch.cat(parts, 1)

        x = _same_pool(self.convolution(F.pad(x, (2, 3, 2, 3)), 64, 7, 2, same=False))
        x = _same_pool(self.convolution(self.convolution(x, 64, 1), 192, 3))
        x = block(block(x, 64, 96, 128, 16, 32, 32), 128, 128, 192, 32, 96, 64)
        x = block(_same_pool(x), 192, 96, 208, 16, 48, 64)
        x = block(block(x, 160, 112, 224, 24, 64, 64), 128, 128, 256, 24, 64, 64)
        x = block(block(x, 112, 144, 288, 32, 64, 64), 256, 160, 320, 32, 128, 128)
        x = block(block(_same_pool(x), 256, 160, 320, 32, 128, 128), 384, 192, 384, 48, 128, 128)
        return self.classes(x.mean((2, 3)))

    def inception3(self, x: Any) -> Any:
        chain = self.chain
        x = self.normed(self.normed(x, 32, 3, 2, same=False), 32, 3, same=False)
        x = F.max_pool2d(self.normed(x, 64, 3), 3, 2)
        x = F.max_pool2d(self.normed(self.normed(x, 80, 1), 192, 3, same=False), 3, 2)
        for pooled in (32, 64, 64):
            a = [chain(x, (64, 1)), chain(x, (48, 1), (64, 5))]
            b = [chain(x, (64, 1), (96, 3), (96, 3)), chain(_average(x), (pooled, 1))]
            x = torch.cat(a + b, 1)
        a = [chain(x, (384, 3), halve=True), chain(x, (64, 1), (96, 3), (96, 3), halve=True)]
        x = torch.cat([*a, F.max_pool2d(x, 3, 2)], 1)
        for n in (128, 160, 160, 192):
            a = [chain(x, (192, 1)), chain(x, (n, 1), (n, (1, 7)), (192, (7, 1)))]
            b = [(n, 1), (n, (7, 1)), (n, (1, 7)), (n, (7, 1)), (192, (1, 7))]
            x = torch.cat([*a, chain(x, *b), chain(_average(x), (192, 1))], 1)
        a = [chain(x, (192, 1), (320, 3), halve=True)]
        b = [chain(x, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), halve=True)]
        x = torch.cat([*a, *b, F.max_pool2d(x, 3, 2)], 1)
        for pool in (_average, lambda x: F.max_pool2d(x, 3, 1, 1)):
            parts = [chain(x, (320, 1))]
            for steps in ([(384, 1)], [(448, 1), (384, 3)]):
                y = chain(x, *steps)
                parts += [chain(y, (384, (1, 3))), chain(y, (384, (3, 1)))]
            x = torch.cat([*parts, chain(pool(x), (192, 1))], 1)
        return self.classes(x.mean((2, 3)))

    def inception4(self, x: Any) -> Any:
        chain = self.chain

        def halved(x: Any, *branches: list[tuple[int, Any]]) -> Any:
            parts = [chain(x, *branch, halve=True) for branch in branches]
            return torch.cat([*parts, F.max_pool2d(x, 3, 2)], 1)

        x = self.normed(self.normed(x, 32, 3, 2, same=False), 32, 3, same=False)
        x = halved(self.normed(x, 64, 3), [(96, 3)])
        a = chain(x, (64, 1), (96, 3), same=False)
        b = chain(x, (64, 1), (64, (7, 1)), (64, (1, 7)), (96, 3), same=False)
        x = halved(torch.cat([a, b], 1), [(192, 3)])
        for _ in range(4):
            a = [chain(_average(x), (96, 1)), chain(x, (96, 1)), chain(x, (64, 1), (96, 3))]
            x = torch.cat([*a, chain(x, (64, 1), (96, 3), (96, 3))], 1)
        x = halved(x, [(384, 3)], [(192, 1), (224, 3), (256, 3)])
        down, across = (7, 1), (1, 7)
        for _ in range(7):
            a = [chain(_average(x), (128, 1)), chain(x, (384, 1))]
            b = [chain(x, (192, 1), (224, across), (256, down))]
            long = [(192, 1), (192, across), (224, down), (224, across), (256, down)]
            x = torch.cat([*a, *b, chain(x, *long)], 1)
        x = halved(x, [(192, 1), (192, 3)], [(256, 1), (256, across), (320, down), (320, 3)])
        for _ in range(3):
            parts = [chain(_average(x), (256, 1)), chain(x, (256, 1))]
            for steps in ([(384, 1)], [(384, 1), (448, (1, 3)), (512, (3, 1))]):
                y = chain(x, *steps)
                parts += [chain(y, (256, (1, 3))), chain(y, (256, (3, 1)))]
            x = torch.cat(parts, 1)
        return self.classes(x.mean((2, 3)))


def _around(size: Any) -> Any:
    return tuple(n // 2 for n in size) if isinstance(size, tuple) else size // 2


def _flat(x: Any) -> Any:
    return x.permute(0, 2, 3, 1).reshape(len(x), -1)


def _same_pool(x: Any) -> Any:
    """The greatest of 3×3 in strides of 2, with SAME padding: of an even length it is behind."""
    height, width = (int(n % 2) for n in x.shape[2:])
    padding = (width, 1, height, 1)
    return F.max_pool2d(F.pad(x, padding, value=-torch.inf), 3, 2)


def _average(x: Any) -> Any:
    return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


@pytest.mark.parametrize(
    ("name", "side", "theirs"),
    [
        ("alexnet", 67, Net.alexnet),
        ("alexnet", 16, Net.alexnet_of_small_images),
        ("overfeat", 71, Net.overfeat),
        ("vgg11", 32, Net.vgg11),
        ("googlenet", 32, Net.googlenet),
        ("inception3", 75, Net.inception3),
        ("inception4", 75, Net.inception4),
    ],
)
def test_losses_and_gradients(name: str, side: int, theirs: Callable[[Net, Any], Any]) -> None:
    compare(
        name, side, lambda weights, x: theirs(Net(weights), x), label_smoothing=0.1, tolerance=1e-6
    )
