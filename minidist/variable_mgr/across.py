"""Across: the policies whose variables are on ps, as rows of parts like those in __init__.py.

| policy | place | read | combine | apply |
|---|---|---|---|---|
| parameter_server | ps, copy with every worker | fetched from that | sum of all workers | ps |
| … staged_vars | same | last step's | same | same, while the next step runs |
| … cross_replica_sync=False | same | fetched | the worker's mean | ps, each worker's |
| distributed_replicated | ps, copy with every replica | own | sum of all workers | ps |

Variables go to the ps with the fewest bytes, start with worker 0's values, and non-trainable ones
are there too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist.cluster.site import Site
from minidist.variable_mgr.late import ApplyLate, LateCopy, ReadLate
from minidist.variable_mgr.manager import VariableMgr
from minidist.variable_mgr.place import EveryReplica, Place
from minidist.variable_mgr.read import Read, ReadCached, ReadFetched, ReadOwn
from minidist.variable_mgr.served import (
    OnEveryWorker,
    ReadApart,
    ServedCopy,
    ServersApply,
    ShadowsApply,
    SumForServers,
)
from minidist.variable_mgr.servers import Servers
from minidist.variable_mgr.start import FromFirst

if TYPE_CHECKING:
    from minidist.variable_mgr import PolicyOptions


def parameter_server(site: Site, options: PolicyOptions) -> VariableMgr:
    """Variables are on the ps; each worker has a copy of them, from which its replicas fetch."""
    apart = not options.cross_replica_sync
    name = f"parameter_server{'+staged_vars' * options.staged_vars}{'+asynchronous' * apart}"
    servers, sums = _sums(name, site, options)
    spread = options.local_parameter_device != "cpu"
    place = OnEveryWorker(site, spread=spread, apart=apart)
    read: Read = ReadCached(site.devices) if options.caching else ReadFetched(site.devices)
    apply = ServersApply(sums, servers)
    copy = ServedCopy
    if apart:
        read = ReadApart(site.devices)
    elif options.staged_vars:
        apply = late = ApplyLate(sums, servers)
        read, copy = ReadLate(site.devices, late), LateCopy
    return _manager(name, site, place, read, sums, apply, servers, copy)


def distributed_replicated(site: Site, options: PolicyOptions) -> VariableMgr:
    """Every replica has a copy, and the ps a shadow of it, to which gradients are applied."""
    name = "distributed_replicated"
    servers, sums = _sums(name, site, options)
    apply = ShadowsApply(sums, servers)
    place = EveryReplica(site.devices)
    return _manager(name, site, place, ReadOwn(), sums, apply, servers, ServedCopy)


def _sums(name: str, site: Site, options: PolicyOptions) -> tuple[Servers, SumForServers]:
    """Return the ps, which know how to apply sums, and how gradients are summed for them."""
    original = options.gradient_scale == "original"
    how = "in turn" if original else "together"
    if not options.cross_replica_sync:
        how = "apart"
    servers = Servers(site, name, how, options.staleness_bound)
    communicator = options.for_gradients(Site.alone(site.devices))
    return servers, SumForServers(communicator, site, servers, mean_of_worker=original)


def _manager(
    name: str,
    site: Site,
    place: Place,
    read: Read,
    combine: SumForServers,
    apply: ServersApply,
    servers: Servers,
    copy: type[ServedCopy],
) -> VariableMgr:
    return VariableMgr(
        name,
        site.devices,
        place=place,
        read=read,
        combine=combine,
        apply=apply,
        start=FromFirst(site.peers),
        site=site,
        servers=servers,
        copy=copy,
    )
