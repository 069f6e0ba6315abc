"""Where windows lie on an image: the arithmetic of SAME, VALID and explicit padding.

| padding | windows along a length of n, window k, stride s | padding |
|---|---|---|
| "SAME" | ⌈n/s⌉ | as little as that needs, the odd one at the end |
| "VALID" | ⌊(n − k)/s⌋ + 1 | none |
| ((top, bottom), (left, right)) | ⌊(n + before + after − k)/s⌋ + 1 | as given |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from minidist.device.ops import Shape, Window
from minidist.errors import ShapeError, UsageError

Pair = int | Sequence[int]
Padding = str | Sequence[Sequence[int]]


def window(operation: str, shape: Shape, size: Pair, strides: Pair, padding: Padding) -> Window:
    """Return where windows of `size` lie on images of `shape` (..., height, width, channels).

    Raises ShapeError naming the operation where no window fits, UsageError for bad options.
    """
    sizes = _pair(operation, "window size", size)
    steps = _pair(operation, "strides", strides)
    around = _padding(operation, padding)
    return _laid(operation, tuple(shape), sizes, steps, around, str(padding))


@lru_cache(maxsize=1024)
def _laid(
    operation: str,
    shape: Shape,
    sizes: tuple[int, int],
    steps: tuple[int, int],
    around: tuple[tuple[int, int], ...] | None,
    padding: str,
) -> Window:
    """Return the same for options that are known to be good; a layer asks again in every step."""
    before, after, output = [], [], []
    for axis, (k, s) in enumerate(zip(sizes, steps, strict=True)):
        n = shape[axis - 3]
        if around is not None:
            first, last = around[axis]
        elif padding.upper() == "VALID":
            first, last = 0, 0
        else:
            total = max((-(-n // s) - 1) * s + k - n, 0)
            first, last = total // 2, total - total // 2
        count = (n + first + last - k) // s + 1
        if n == 0 or n + first + last < k:
            raise ShapeError(
                f"{operation}: windows of {sizes} with padding {padding} do not fit images of "
                f"shape {tuple(shape)}; give larger images or pad more"
            )
        if first >= k or last >= k:
            raise ShapeError(
                f"{operation}: with padding {padding} some windows of {sizes} lie wholly outside "
                f"of images of shape {shape}; pad less than a window"
            )
        before.append(first)
        after.append(last)
        output.append(count)
    return Window(sizes, steps, _two(before), _two(after), _two(output))


def _pair(operation: str, what: str, value: Pair) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise UsageError(f"{operation}: {what} {value!r}; give a positive integer, or a pair")
    return _two(pair)


def _padding(operation: str, padding: Padding) -> tuple[tuple[int, int], ...] | None:
    """The pairs of explicit padding, None for SAME and VALID."""
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "VALID"):
            raise UsageError(f"{operation}: padding {padding!r}; write SAME, VALID or pairs")
        return None
    pairs = [tuple(pair) for pair in padding]
    if [len(pair) for pair in pairs] != [2, 2] or min(map(min, pairs)) < 0:
        raise UsageError(
            f"{operation}: padding {padding!r}; write SAME, VALID or ((top, bottom), (left, right))"
        )
    return tuple([_two(pair) for pair in pairs])


def _two(values: Sequence[Any]) -> tuple[int, int]:
    first, second = values
    return int(first), int(second)
