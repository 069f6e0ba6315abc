"""Every verb of `device.ops` with arguments for it, made the same for every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minidist.device import Device
from minidist.device.ops import Window
from minidist.dtypes import as_array, kind

DTYPES = ["float32", "float64", "float16", "bfloat16"]
BOUND = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 1.6e-2}
SAME = Window((2, 3), (2, 1), (0, 1), (1, 1), (3, 5))  # of images 5 x 5
POINT = Window((1, 1), (1, 1), (0, 0), (0, 0), (5, 5))


class Case:
    """The arguments of a verb: arrays of `dtype` by shape, made the same for every device."""

    def __init__(self, dtype: str) -> None:
        self._rng = np.random.default_rng(3)
        self._dtype = dtype
        self.wide = "float64" if dtype == "float64" else "float32"

    def __call__(self, *shape: int) -> np.ndarray:
        return as_array(self._rng.normal(size=shape), self._dtype)

    def positive(self, *shape: int) -> np.ndarray:
        return as_array(self._rng.uniform(0.5, 2, shape), self._dtype)

    def per_channel(self, n: int) -> np.ndarray:
        return self._rng.uniform(0.5, 2, n).astype(self.wide)


Arguments = tuple[Any, ...]
CASES: dict[str, Callable[[Case], list[Arguments]]] = {
    "full": lambda c: [((2, 3), 0.1, c(1).dtype), ((), 1.5, c(1).dtype)],
    "fill": lambda c: [(c(2, 3), 0.1)],
    "copy": lambda c: [(c(2, 3),), (c(0, 3),)],
    "cast": lambda c: (
        [(c(5, 7), dtype) for dtype in (*DTYPES, "int32", "bool")] + [(np.arange(7), c(1).dtype)]
    ),
    "convert": lambda c: [([c(5), c(3)], [np.float32([1, 2, 3, 4, 5]), c(3)], {"threads": 1})],
    "add": lambda c: [(c(3, 4), c(4)), (c(), c(2)), (c(0, 2), c(2))],
    "subtract": lambda c: [(c(3, 4), c(3, 1))],
    "multiply": lambda c: [(c(3, 4), c(3, 4))],
    "divide": lambda c: [(c(3, 4), c.positive(3, 4))],
    "power": lambda c: [(c.positive(3, 4), 1.5)],
    "negative": lambda c: [(c(3, 4),)],
    "exp": lambda c: [(c(3, 4),)],
    "log": lambda c: [(c.positive(3, 4),)],
    "sqrt": lambda c: [(c.positive(3, 4),)],
    "compare": lambda c: [(r, c(9), c(9)) for r in ("equal", "less", "less_equal")],
    "accumulate": lambda c: [(c(3, 4), c(3, 4))],
    "relu": lambda c: [(c(3, 4),)],
    "relu_backward": lambda c: [(c(3, 4), c(3, 4))],
    "relu6": lambda c: [(c(3, 4),)],
    "relu6_backward": lambda c: [(c(3, 4), c(3, 4))],
    "gelu": lambda c: [(c(3, 4),)],
    "gelu_backward": lambda c: [(c(3, 4), c(3, 4))],
    "dropout": lambda c: [(c(30, 4), 0.3, (1, 2), (3, 4, 5))],
    "reshape": lambda c: [(c(3, 4), (2, 6))],
    "transpose": lambda c: [(c(3, 4, 2), (2, 0, 1)), (c(), ())],
    "broadcast_to": lambda c: [(c(4), (3, 4)), (c(), (2,))],
    "concatenate": lambda c: [([c(3, 4), c(2, 4)],), ([c(3, 2, 4), c(3, 2, 0), c(3, 2, 1)], 2)],
    "take": lambda c: [(c(5, 4), (slice(1, None, 2), None, 3)), (c(5, 4), 2), (c(3), (1,))],
    "put": lambda c: [(c(2, 4), slice(1, None, 2), (5, 4))],
    "gather": lambda c: [(c(5, 4), np.array([3, 0, 3]))],
    "scatter": lambda c: [(c(5, 4), np.array([3, 0]), c(2, 4)), (c(5), np.array([1]), c())],
    "scatter_add": lambda c: [(c(5, 4), np.array([3, 0, 3, 3]), c(4, 4))],
    "unique": lambda c: [(np.array([3, 0, 3, 9]),), (np.zeros(0, np.int64),)],
    "reduce_sum": lambda c: [
        (c(9, 4), (0,), False),
        (c(9, 4), (0, 1), True),
        (c(0, 2), (0,), False),
    ],
    "reduce_max": lambda c: [(c(9, 4), (1,), True)],
    "argmax": lambda c: [(c(9, 4), 1)],
    "matmul": lambda c: [
        (c(3, 4), c(4, 5)),
        (c(4, 3), c(4, 5), True),
        (c(3, 4), c(5, 4), False, True),
        (c(4, 3), c(5, 4), True, True),
        (c(3, 0), c(0, 5)),
        (c(0, 3), c(3, 2)),
        (c(2, 2, 4, 3), c(2, 2, 5, 4), True, True),
        (c(0, 3, 4), c(0, 4, 5)),
    ],
    "dense": lambda c: [(c(3, 4), c(4, 5), c(5)), (c(3, 4), c(4, 5), c(5), True)],
    "conv2d": lambda c: [
        (c(2, 5, 5, 3), c(2, 3, 3, 4), SAME),
        (c(2, 5, 5, 3), c(1, 1, 3, 4), POINT),
        (c(2, 5, 5, 3), c(2, 3, 3, 4), SAME, c(4), True),
        (c(2, 5, 5, 3), c(1, 1, 3, 4), POINT, None, True),
    ],
    "conv2d_backward_input": lambda c: [
        (c(2, 3, 5, 4), c(2, 3, 3, 4), (2, 5, 5, 3), SAME),
        (c(2, 5, 5, 4), c(1, 1, 3, 4), (2, 5, 5, 3), POINT),
    ],
    "conv2d_backward_filter": lambda c: [
        (c(2, 5, 5, 3), c(2, 3, 5, 4), (2, 3, 3, 4), SAME),
        (c(2, 5, 5, 3), c(2, 5, 5, 4), (1, 1, 3, 4), POINT),
        (c(0, 5, 5, 3), c(0, 3, 5, 4), (2, 3, 3, 4), SAME),
    ],
    "depthwise_conv2d": lambda c: [
        (c(2, 5, 5, 3), c(2, 3, 3), SAME),
        (c(0, 5, 5, 3), c(2, 3, 3), SAME),
    ],
    "depthwise_conv2d_backward_input": lambda c: [(c(2, 3, 5, 3), c(2, 3, 3), (2, 5, 5, 3), SAME)],
    "depthwise_conv2d_backward_filter": lambda c: [
        (c(2, 5, 5, 3), c(2, 3, 5, 3), SAME),
        (c(0, 5, 5, 3), c(0, 3, 5, 3), SAME),
    ],
    "max_pool": lambda c: [(c(2, 5, 5, 3), SAME)],
    "max_pool_backward": lambda c: [
        (
            c(1, 1, 1, 2),
            np.array([0, 3], np.int32).reshape(1, 1, 1, 2),
            (1, 2, 2, 2),
            Window((2, 2), (1, 1), (0, 0), (0, 0), (1, 1)),
        )
    ],
    "average_pool": lambda c: [(c(2, 5, 5, 3), SAME)],
    "average_pool_backward": lambda c: [(c(2, 3, 5, 3), (2, 5, 5, 3), SAME)],
    "moments": lambda c: [(c(2, 3, 5),), (c(0, 5),)],
    "normalize": lambda c: [
        (c(6, 5), *(c.per_channel(5) for _ in range(4)), 0.01),
        (c(6, 5), *(c.per_channel(5) for _ in range(4)), 0.01, c(6, 5), True),
    ],
    "normalize_backward": lambda c: [
        (c(6, 5), c(6, 5), *(c.per_channel(5) for _ in range(3)), 0.01, moments, *fused)
        for moments in (True, False)
        for fused in ((), (c(6, 5), False), (c(6, 5), True), (None, True))
    ],
    "layer_norm": lambda c: [(c(2, 3, 5), c.per_channel(5), c.per_channel(5), 0.01)],
    "layer_norm_backward": lambda c: [
        (c(2, 3, 5), c(2, 3, 5), c.per_channel(5), 0.01),
        (c(0, 5), c(0, 5), c.per_channel(5), 0.01),
    ],
    "causal_attention": lambda c: [(c(2, 5, 18), 2), (c(0, 5, 18), 2)],
    "causal_attention_backward": lambda c: [(c(2, 5, 6), c(2, 5, 18), 2)],
    "bias_backward": lambda c: [(c(6, 5),), (c(2, 3, 5), c(2, 3, 5)), (c(0, 5), c(0, 5))],
    "softmax": lambda c: [(c(6, 5),)],
    "log_softmax": lambda c: [(c(6, 5),)],
    "softmax_cross_entropy": lambda c: [(c(6, 5), np.arange(6) % 5)],
    "first_nonfinite": lambda c: [([c(3), c(4)],), ([c(3), c(2) / c(1)[:0].sum()],)],
}
FLOATS_ONLY = {  # of float32 and float64
    "sum": lambda c: [
        ([[c(7), c(2, 3)]] * 1, [[c(7), c(2, 3)], [c(7), c(2, 3)]], {"scale": 0.5, "threads": 1}),
        ([[c(7)]], [[c(7)], [c(7)]], {"weights": [1.0, 2.0], "threads": 1}),
    ],
    "sum_squares": lambda c: [([c(7), c(5000)], {"threads": 1})],
    "sgd": lambda c: [([c(7)], [c(7)], {"lr": 0.1, **UPDATE})],
    "momentum": lambda c: [
        ([c(7)], [c(7)], [c(7)], {"lr": 0.1, "momentum": 0.9, "nesterov": True, **UPDATE})
    ],
    "rmsprop": lambda c: [
        (*([c.positive(7)] for _ in range(4)), RMSPROP),
    ],
    "adam": lambda c: [(*([c.positive(7)] for _ in range(4)), ADAM)],
}
UPDATE = {"scale": 0.5, "weight_decay": [0.01], "threads": 1}
RMSPROP = {"lr": 0.1, "decay": 0.9, "momentum": 0.9, "epsilon": 0.01, **UPDATE}
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 0.01, "step": 3, **UPDATE}


def placed(value: Any, device: Device) -> Any:
    if isinstance(value, np.ndarray):
        return device.copy_in(value)
    return [placed(item, device) for item in value] if isinstance(value, list) else value


def seen(value: Any, device: Device) -> Any:
    if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, np.generic):
        return device.copy_out(value)
    if isinstance(value, list | tuple):
        return [seen(item, device) for item in value]
    return value


def call(device: Device, verb: str, arguments: Arguments) -> Any:
    """Return what a verb returns, and what its arguments are after it."""
    options = arguments[-1] if isinstance(arguments[-1], dict) else {}
    given = [placed(value, device) for value in arguments[: -1 if options else None]]
    result = getattr(device.ops, verb)(*given, **options)
    return seen([result, given], device)


def compare(got: Any, want: Any, bound: float) -> None:
    if isinstance(want, list):
        for one, other in zip(got, want, strict=True):
            compare(one, other, bound)
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and got.shape == want.shape
        if kind(want.dtype) == "f":
            got, want = (np.asarray(each, np.float64) for each in (got, want))
            np.testing.assert_allclose(got, want, rtol=bound, atol=bound)
        else:
            np.testing.assert_array_equal(got, want)
    else:
        assert got == want or got == pytest.approx(want, rel=1e-12)
