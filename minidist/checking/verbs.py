"""Verbs: which arrays each verb of a CPU device reads and writes, told where the verb is used.

Of the verbs of `device.ops` and of the device's copies. What a verb computes inside, with other
verbs, is not told again. What is handed out to be looked at (`numpy()`, `__array__`, DLPack) counts
as read there and then, and nobody can write to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from minidist import observe
from minidist.checking.memory import owner_of
from minidist.checking.telling import Method, Telling
from minidist.device.cpu import CpuDevice
from minidist.device.cpu_ops import CpuOps
from minidist.device.ops import WRITES, Ops
from minidist.tensor import Tensor

VIEWS = {"reshape", "take"}  # may return what they are given, unread
LOOKS_AT_NOTHING = {"share_memory", "full"}
DEVICE_WRITES: dict[str, dict[int | str, bool]] = {
    "copy": {0: False, "destination": False},
    "copy_in": {},
    "copy_out": {},
}


class _Here(threading.local):
    inside = False  # whether this thread is in a verb


_here = _Here()


def _arrays(value: Any) -> Iterator[Any]:
    """Give the arrays in an argument: itself, or in lists of lists."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays(item)


def _telling(name: str, written: dict[int | str, bool]) -> Any:
    def wrap(verb: Method) -> Method:
        def told(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _here.inside:
                return verb(self, *args, **kwargs)
            reads: list[Any] = []
            writes: list[Any] = []
            places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            for place, value in places:
                if isinstance(value, np.ndarray | list | tuple):
                    found = list(_arrays(value))
                    reads_too = written.get(place)
                    if reads_too is not None:
                        writes += found
                    if reads_too is not False:
                        reads += found
            _here.inside = True
            try:
                if name in VIEWS:
                    result = verb(self, *args, **kwargs)
                    if owner_of(result) is not owner_of(args[0]):
                        observe.accessed(reads, [result], name)
                    return result
                observe.accessed(reads, writes, name)
                result = verb(self, *args, **kwargs)
                new = list(_arrays(result))
                if new:
                    observe.accessed((), new, name)
                return result
            finally:
                _here.inside = False

        return told

    return wrap


def _host_view(verb: Method) -> Method:
    def told(self: Any, a: Any) -> Any:
        if not _here.inside:
            observe.accessed([a], (), "numpy")
        return _unwritable(a)

    return told


def _unwritable(array: Any) -> Any:
    """Return a view that nobody can make writable."""
    plain = array.view(f"V{array.itemsize}") if array.dtype.kind == "V" else array
    view = np.asarray(memoryview(plain).toreadonly())
    return view if view.dtype == array.dtype else view.view(array.dtype)


def _dlpack(method: Method) -> Method:
    def told(self: Tensor, **options: Any) -> Any:
        if self.device.kind == "cuda" or self.array.dtype.kind == "V":
            return method(self, **options)  # of bfloat16 it says what to do
        return self.numpy().__dlpack__(**options)

    return told


VERBS = Telling(
    [
        *(
            (CpuOps, name, _telling(name, WRITES.get(name, {})))
            for name in sorted(Ops.__abstractmethods__ - LOOKS_AT_NOTHING - {"host_view"})
        ),
        *((CpuDevice, name, _telling(name, written)) for name, written in DEVICE_WRITES.items()),
        (CpuOps, "host_view", _host_view),
        (Tensor, "__dlpack__", _dlpack),
    ]
)
