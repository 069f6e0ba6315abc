"""Communicators: how buffers on several devices meet. `make` puts one together.

| algorithm | sums | order | file |
|---|---|---|---|
| copy | on one device and stores to all, in one pass | serial | copy.py |
| pscpu#shards | on the host, and everybody fetches the sum | serial | servers.py |
| psgpu#shards | on the compute devices by turns, and so on | serial | servers.py |
| xring#shards | a share on each replica, passed round a ring | ring | ring.py |
| rechd | a share on each replica, by halves exchanged with mates | tree | halving.py |
| hierarchical_copy | within two groups, across and back | tree | hierarchical.py |
| auto | as the fastest of the serial ones, by size | serial | auto.py |

spec.py has the grammar in which they are asked for, ranges.py the choice by size; compact.py rounds
to 16 bits, and packing.py puts many tensors in few buffers. docs/reductions.md says when to use
what.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.auto import fastest
from minidist.comm.base import Communicator
from minidist.comm.compact import Compact
from minidist.comm.copy import Copy
from minidist.comm.halving import HalvingDoubling
from minidist.comm.hierarchical import HierarchicalCopy
from minidist.comm.packing import Packer, allocate_row, packer
from minidist.comm.ranges import ByRange
from minidist.comm.ring import Ring
from minidist.comm.row import Row
from minidist.comm.servers import Servers
from minidist.comm.spec import Range, Spec, parse
from minidist.device import Device, host

__all__ = ["Communicator", "Packer", "Row", "Spec", "allocate_row", "make", "packer", "parse"]


def make(
    spec: Spec | str,
    devices: Sequence[Device],
    packer: Packer | None = None,
    *,
    reducers: Sequence[Device] | None = None,
    compact: str | None = None,
) -> Communicator:
    """Return the communicator for these devices that a spec asks for.

    reducers: where `copy` sums, on all of the devices if not given.
    compact: "float16" or "bfloat16" rounds what travels; of one device alone nothing does.
    Raises UsageError (a ValueError) for a spec there is not, or not for these devices.
    """
    if isinstance(spec, str):
        spec = parse(spec)
    members = [_make(one, devices, packer, reducers) for one in spec.ranges]
    whole = members[0] if len(members) == 1 else ByRange(spec, members)
    return Compact(whole, compact) if compact and len(devices) > 1 else whole


def _make(
    one: Range,
    devices: Sequence[Device],
    packer: Packer | None,
    reducers: Sequence[Device] | None,
) -> Communicator:
    match one.algorithm:
        case "copy":
            return Copy(devices, packer, reducers)
        case "pscpu":
            return Servers(devices, packer, [host()], one.shards)
        case "psgpu":
            return Servers(devices, packer, devices, one.shards)
        case "xring":
            return Ring(devices, packer, one.shards)
        case "rechd":
            return HalvingDoubling(devices, packer)
        case "hierarchical_copy":
            return HierarchicalCopy(devices, packer)
        case _:
            return make(fastest(devices[0]), devices, packer, reducers=reducers)
