"""Devices by name. `get("cpu:1")` and `host()` return the one Device of that name.

| name | device |
|---|---|
| `cpu:1`, `CPU:1`, `/device:CPU:1`, `/job:worker/task:0/device:CPU:1` | virtual CPU device 1 |
| `cpu`, and the empty name | `cpu:0` |
| `cuda:1`, `/device:CUDA:1`, … | GPU 1 |
| `cuda:0.0`, `cuda:0.1`, … | shares of GPU 0, for replicas that use it together |
| `host` | the memory that no replica computes in |

After `device:` the kind is in capitals. A name with a job and a task is that of a device of this
process only if they are this process's: `worker` and 0.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Iterable

from minidist.device.base import ALIGNMENT, Array, Device, Event, Stream
from minidist.device.cpu import CpuDevice, Host
from minidist.device.lease import Lease
from minidist.errors import UsageError

__all__ = [
    "ALIGNMENT",
    "Array",
    "Device",
    "Event",
    "Lease",
    "Stream",
    "devices",
    "get",
    "host",
    "known",
]

KINDS = ("cpu", "cuda")
_known: dict[str, Device] = {}
_lock = threading.Lock()
_NAME = re.compile(
    r"(?:/?job:(?P<job>\w+))?(?:/?task:(?P<task>\d+))?"
    r"(?:/?device:(?P<capitals>[A-Z]+)|/?(?P<kind>[A-Za-z]+))(?::(?P<index>\d+)(?P<share>\.\d+)?)?"
)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for device in _known.values():
        device.renew()


os.register_at_fork(after_in_child=_after_fork)


def host() -> Device:
    """Return the host: where parameters of a parameter server live, and where data comes from."""
    with _lock:
        if "host" not in _known:
            _known["host"] = Host(0, "host")
        return _known["host"]


def get(name: str | Device) -> Device:
    """Return the device of that name (see the table above).

    Raises UsageError for a name that no device can have.
    """
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is no device; give a name such as cpu:1")
    match = _NAME.fullmatch(name.strip() or "cpu")
    kind = (match["capitals"] or match["kind"]).lower() if match else ""
    if kind == "host":
        return host()
    if match is None or kind not in KINDS or (kind == "cpu" and match["share"]):
        raise UsageError(
            f"{name!r} is no device here; write host, or one of {', '.join(KINDS)} with an index, "
            "as in cpu:1 or /device:CPU:1; only a GPU has shares, as in cuda:0.1"
        )
    if match["job"] not in (None, "worker") or int(match["task"] or 0) != 0:
        raise UsageError(
            f"{name!r} is a device of another process; this one is task 0 of the job worker"
        )
    index = int(match["index"] or 0)
    short = f"{kind}:{index}"
    if match["share"]:
        short += f".{int(match['share'][1:])}"
    with _lock:
        if short not in _known:
            _known[short] = CpuDevice(index, short) if kind == "cpu" else _cuda(index, short)
        return _known[short]


def _cuda(index: int, short: str) -> Device:
    """Make a CUDA device; CuPy is imported now and no earlier."""
    try:
        importlib.import_module("cupy")
    except ImportError as failure:
        raise UsageError(
            f"{short} needs CuPy, which cannot be imported ({failure}); pip install "
            "'minidist[cuda12]', or 'minidist[cuda13]' for CUDA 13"
        ) from failure
    from minidist.device.cuda import CudaDevice

    return CudaDevice(index, short)


def known() -> list[Device]:
    """Return all devices that were asked for so far."""
    with _lock:
        return list(_known.values())


def devices(spec: str | Iterable[str | Device]) -> list[Device]:
    """Return the devices of a specification.

    `"cpu*4"` is the first four, `"cpu:0,2"` those two, `"cpu:3"` one, `"cuda:0*4"` four shares of
    GPU 0; a list holds names or devices. Raises UsageError where it names none, one twice, or a
    kind that there is not.
    """
    if not isinstance(spec, Iterable):
        raise UsageError(f"{spec!r} names no devices; write for example md.devices('cpu*2')")
    found = _parse(spec) if isinstance(spec, str) else [get(item) for item in spec]
    if not found:
        raise UsageError("no devices were given; write for example md.devices('cpu*2')")
    if len(set(found)) < len(found):
        raise UsageError(
            f"a device is named twice in {spec!r}; each replica needs a device of its own"
        )
    return found


def _parse(spec: str) -> list[Device]:
    text = spec.strip()
    if not text:
        return []
    match = re.fullmatch(
        r"(?P<kind>[A-Za-z]+)"
        r"(?:\*(?P<count>\d+)|:(?P<list>\d+(?:\s*,\s*\d+)*)|:(?P<one>\d+)\*(?P<shares>\d+))?",
        text,
    )
    if match is None:
        return [get(part) for part in text.split(",")]
    if match["shares"] is not None:
        one = f"{match['kind']}:{match['one']}"
        return [get(f"{one}.{i}") for i in range(int(match["shares"]))]
    if match["count"] is not None:
        return [get(f"{match['kind']}:{i}") for i in range(int(match["count"]))]
    indices = match["list"] or "0"
    return [get(f"{match['kind']}:{int(i)}") for i in indices.split(",")]
