"""float16 and bfloat16 on a CPU: storage. What is computed is computed in float32.

A verb that is `in_float32` is written for float32 and float64 alone. Given narrow arrays it gets
them widened, which is exact, and what it returns is rounded to their dtype: once for each verb,
however many steps the verb has inside. What overflows there becomes infinite and goes on as such,
without a warning: an automatic loss scale lives on that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any, TypeVar

import numpy as np

from minidist.device.base import Array
from minidist.dtypes import as_array, is_narrow
from minidist.kernels import reduce

Verb = TypeVar("Verb", bound=Callable[..., Any])


def widened(value: Any) -> Any:
    """Return a narrow array in float32, and anything else as it is."""
    if not (isinstance(value, np.ndarray) and is_narrow(value.dtype)):
        return value
    wide = np.empty(value.shape, np.float32)
    reduce.cast([wide], [value])
    return wide


def rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array in a narrow dtype, rounded once."""
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        return as_array(array, dtype)
    narrow = np.empty(array.shape, dtype)
    reduce.cast([narrow], [array])
    return narrow


def compute(
    function: Callable[..., Any],
    *arrays: Array,
    rounds: Collection[int] | None = None,
    **options: Any,
) -> Any:
    """Return function(*arrays, **options), in float32 and rounded where the first array is narrow.

    Of several results those at these places are rounded, or all; what is not float32 stays.
    """
    dtype = arrays[0].dtype
    if not is_narrow(dtype):
        return function(*arrays, **options)
    wide = {name: widened(value) for name, value in options.items()}
    with np.errstate(all="ignore"):
        results = function(*map(widened, arrays), **wide)
    if not isinstance(results, tuple):
        return _rounded(results, dtype)
    return tuple(
        _rounded(result, dtype) if rounds is None or place in rounds else result
        for place, result in enumerate(results)
    )


def _rounded(value: Any, dtype: np.dtype[Any]) -> Any:
    narrow = isinstance(value, np.ndarray) and value.dtype == np.float32
    return rounded(value, dtype) if narrow else value


def rounding(*places: int) -> Callable[[Verb], Verb]:
    """Let a verb (self, array, …) take narrow arrays and round its results at these places."""
    return _narrow(places)


def _narrow(places: Collection[int] | None) -> Callable[[Verb], Verb]:

    def decorated(verb: Verb) -> Verb:
        @wraps(verb)
        def narrow_or_not(self: Any, first: Array, *rest: Any, **options: Any) -> Any:
            if first.itemsize != 2:  # most arrays are wide, and this is the fastest test
                return verb(self, first, *rest, **options)
            return compute(partial(verb, self), first, *rest, rounds=places, **options)

        return narrow_or_not  # type: ignore[return-value]

    return decorated


in_float32 = _narrow(None)
