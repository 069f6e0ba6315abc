"""Communicators: how buffers on several devices meet. `make` puts one together.

| algorithm | sums | order | file |
|---|---|---|---|
| copy | on one device and stores to all, in one pass | serial | copy.py |
| pscpu#shards | on the host, and everybody fetches the sum | serial | servers.py |
| psgpu#shards | on the compute devices by turns, and so on | serial | servers.py |
| xring#shards | a share on each replica, passed round a ring | ring | ring.py |
| rechd | a share on each replica, by halves exchanged with mates | tree | halving.py |
| hierarchical_copy | within two groups, across and back | tree | hierarchical.py |
| nccl | each rank of NCCL's by NCCL | NCCL's | nccl.py |
| auto | as the fastest of the serial ones, by size | serial | auto.py |

Over several processes tiered.py puts together what is done in a machine, where each rank adds up a
share (exchange.py), and what is done between machines (between.py):

| between | sums | order | file |
|---|---|---|---|
| (none) | replica by replica, along a chain of machines | serial | chain.py |
| xring | the machines' sums, along chains that each begin with another one | ring | chain.py |
| rechd | the machines' sums, by halves exchanged with mates | tree | doubling.py |
| pscpu#shards | the machines' sums, on machines that serve by turns | serial | gathered.py |
| nccl | the processes' sums, by NCCL | NCCL's | nccl.py |
| collective | the machines' sums, by MPI's own all-reduce | MPI's | collective.py |

Ranks meet through peers.py, and hand each other arrays in memory that they share (window.py,
mail.py, boards.py, fields.py) or by messages (mpi.py, letters.py, lane.py).

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
from minidist.comm.nccl import Nccl
from minidist.comm.nccl_machines import NcclMachines
from minidist.comm.packing import Packer, allocate_row, packer
from minidist.comm.peers import Peers, Ranks
from minidist.comm.ranges import ByRange
from minidist.comm.ring import Ring
from minidist.comm.row import Row
from minidist.comm.servers import Servers
from minidist.comm.spec import Range, Spec, parse
from minidist.comm.tiered import Tiered
from minidist.device import Device, host

__all__ = ["Communicator", "Packer", "Row", "Spec", "allocate_row", "make", "packer", "parse"]

ORDERS = {"xring": "ring", "rechd": "tree", "hierarchical_copy": "tree"}  # others are serial


def make(
    spec: Spec | str,
    devices: Sequence[Device],
    packer: Packer | None = None,
    *,
    reducers: Sequence[Device] | None = None,
    compact: str | None = None,
    peers: Peers | None = None,
    counts: Sequence[int] = (),
) -> Communicator:
    """Return the communicator for these devices that a spec asks for.

    reducers: where `copy` sums, on all of the devices if not given.
    compact: "float16" or "bfloat16" rounds what travels; of one device alone nothing does.
    peers, counts: the processes whose replicas are summed with these, and how many each has.
    Raises UsageError (a ValueError) for a spec there is not, or not for these devices.
    """
    if isinstance(spec, str):
        spec = parse(spec)
    if isinstance(peers, Ranks):
        members = [_across(one, devices, packer, peers, counts) for one in spec.ranges]
        replicas = sum(counts)
    else:
        members = [_make(one, devices, packer, reducers, peers) for one in spec.ranges]
        replicas = len(devices)
    whole = members[0] if len(members) == 1 else ByRange(spec, members)
    return Compact(whole, compact) if compact and replicas > 1 else whole


def _across(
    one: Range,
    devices: Sequence[Device],
    packer: Packer | None,
    peers: Ranks,
    counts: Sequence[int],
) -> Communicator:
    if one.algorithm == "nccl" and one.between in (None, "nccl"):
        return Nccl(devices, packer, peers=peers, counts=counts)
    if one.algorithm == "nccl":
        return NcclMachines(devices, peers, counts, str(one.between), one.between_shards)
    if one.between == "nccl":
        own = _make(one, devices, None, None, None) if len(devices) > 1 else None
        return Nccl(devices, packer, peers=peers, counts=counts, inside=own)
    if one.algorithm == "collective":
        return Tiered(devices, peers, counts, "serial", "collective", apart=True)
    inside = ORDERS.get(one.algorithm, "serial")
    return Tiered(devices, peers, counts, inside, one.between, one.between_shards)


def _make(
    one: Range,
    devices: Sequence[Device],
    packer: Packer | None,
    reducers: Sequence[Device] | None,
    peers: Peers | None,
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
        case "nccl":
            return Nccl(devices, packer, peers=peers)
        case _:
            if devices[0].kind == "cuda":  # gradients would have to come to the host first
                reducers = None
            return make(fastest(devices[0]), devices, packer, reducers=reducers)
