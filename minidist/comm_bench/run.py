"""One run: what the flags ask for, measured line by line."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from minidist.bench.gpus import own_gpus
from minidist.bench.report import write
from minidist.cluster import Cluster
from minidist.cluster.site import Site
from minidist.comm.peers import Peers
from minidist.comm_bench import table
from minidist.comm_bench.buffers import Buffers
from minidist.comm_bench.flags import Flags
from minidist.comm_bench.measure import Measured, measure
from minidist.comm_bench.verbs import VERBS, Verb
from minidist.comm_bench.ways import Way, ways
from minidist.device import devices
from minidist.dtypes import as_dtype
from minidist.errors import MinidistError, UsageError
from minidist.patience import REPORT_AFTER


def run(flags: Flags, cluster: Cluster) -> int:
    """Do it, let the chief print it and write its JSON; return how many elements were wrong.

    Raises UsageError for flags that do not fit the cluster, MinidistError where a process does not
    do as the others or the results cannot be written.
    """
    count = flags.num_devices or (1 if cluster.size > 1 else 2)
    patience = (min(REPORT_AFTER, flags.timeout), flags.timeout)
    peers = cluster.peers(lambda: patience)
    try:
        peers.meet(f"run {flags}")
        here = devices(_devices(flags, count, peers))
    except BaseException as failure:
        peers.fail(failure)
        raise
    site = Site.of(here, cluster, in_step=True, patience=lambda: patience)
    try:
        results = _run(flags, cluster, site, patience)
    except BaseException as failure:
        site.fail(failure)
        raise
    site.leave()
    return table.wrong_in(results) or 0


def _run(
    flags: Flags, cluster: Cluster, site: Site, patience: tuple[float, float]
) -> list[Measured]:
    if flags.root >= site.replicas:
        raise UsageError(
            f"--root={flags.root}: there are {site.replicas} replicas, and the first is number 0"
        )
    found, elsewhere = ways(flags.all_reduce_spec, site, cluster, patience)
    combinations = list(_combinations(flags))
    mpi = cluster.engine.implementation if cluster.engine else ""
    about = (flags, _processes(site), elsewhere, mpi)
    say = print if cluster.is_chief else _nothing
    say("\n".join(table.header(*about)), flush=True)
    results = []
    for measured in _measure(flags, site, found, combinations):
        say(table.line(measured), flush=True)
        results.append(measured)
    for way in found:
        way.close()
    if not results:
        raise UsageError("none of these communicators has any of these verbs for such elements")
    say("\n".join(table.closing(results)), flush=True)
    if flags.json is not None and cluster.is_chief:
        try:
            write(flags.json, table.document(*about, results))
        except OSError as error:
            raise MinidistError(
                f"--json={flags.json}: the results could not be written: {error.strerror or error}"
            ) from error
    return results


def _processes(site: Site) -> list[dict[str, Any]]:
    """Return who takes part: each process's name, its machine and its devices."""
    own = " ".join([device.short for device in site.devices])
    met = site.peers.meet("say what devices there are", own.encode())
    return [
        {
            "name": name,
            "host": host or platform.node(),
            "devices": said.decode().split(),
        }
        for name, host, said in zip(site.peers.names, site.peers.hosts, met, strict=True)
    ]


def _devices(flags: Flags, count: int, peers: Peers) -> str:
    """Return this process's devices, as `md.devices` reads them."""
    if flags.device != "cuda":
        return f"{flags.device}*{count}"
    return own_gpus(peers, count)


def _nothing(*words: object, **how: object) -> None:
    pass


def _combinations(flags: Flags) -> Iterator[tuple[Verb, str, str]]:
    """Return verbs with the dtypes and ops that they have.

    Integers have no mean, and what does not add up has no op. Raises UsageError for a verb that
    has none of them.
    """
    for verb in (VERBS[name] for name in flags.verb):
        kinds = [
            (dtype, op)
            for dtype, op in itertools.product(flags.datatype, flags.op if verb.sums else ["sum"])
            if op == "sum" or as_dtype(dtype).kind not in "iu"
        ]
        if not kinds:
            raise UsageError(
                f"--op={','.join(flags.op)} divides, and --datatype={','.join(flags.datatype)} "
                "has integers alone, of which there is only the sum"
            )
        yield from ((verb, dtype, op) for dtype, op in kinds)


def _measure(
    flags: Flags, site: Site, found: Sequence[Way], combinations: Sequence[tuple[Verb, str, str]]
) -> Iterator[Measured]:
    for way, (verb, dtype, op) in itertools.product(found, combinations):
        for size, in_place in itertools.product(flags.sizes(), (False, True)):
            buffers = Buffers(
                verb,
                dtype,
                size // as_dtype(dtype).itemsize,
                op,
                devices=site.devices,
                replicas=site.replicas,
                first=site.first,
                root=flags.root,
                in_place=in_place,
            )
            how: dict[str, Any] = {
                "iters": flags.iters,
                "warmup_iters": flags.warmup_iters,
                "check": flags.check,
            }
            measured = measure(way, buffers, site.peers, **how)
            if measured is not None:
                yield measured
