"""Ways: the communicators that are measured, each by the name of its spec, and MPI's own calls.

`mpi` is the yardstick between processes: MPI's call itself, made and timed on the thread that talks
to MPI, for one replica a process. `collective` is the same call by way of a communicator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from minidist import comm
from minidist.cluster import Cluster
from minidist.cluster.site import Site
from minidist.comm.peers import KINDS
from minidist.comm.row import Row
from minidist.comm.spec import ALGORITHMS, BETWEEN
from minidist.comm_bench import data
from minidist.comm_bench.buffers import Buffers
from minidist.comm_bench.flags import ALL
from minidist.dtypes import is_narrow
from minidist.errors import UsageError
from minidist.patience import Waiting
from minidist.threads import cores

T = TypeVar("T")
Call = Callable[[], object]

MPI = "mpi"
FREE_TAG = KINDS - 1  # of no channel, as they begin with number 1, and not that of notices


class Way(ABC):
    """One way to do the verbs. name: how one asks for it."""

    name: str

    @abstractmethod
    def call(self, buffers: Buffers) -> Call | None:
        """Return what does the verb of the buffers once; None where this way has it not."""

    @abstractmethod
    def enter(self) -> None:
        """Wait until all processes are here, so that none is timed while it waits for another."""

    def run(self, loop: Callable[[], T]) -> T:
        """Return what `loop` returns, from where calls are to be made."""
        return loop()

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; nothing more is called."""


class ByCommunicator(Way):
    """What a strategy's replicas use: rows of one array, worked on by the calling thread's team.

    It broadcasts in place. It gathers into new arrays, once a process; of one process alone there
    is nothing to gather, since everybody reads what lies where it is.
    """

    def __init__(self, name: str, site: Site) -> None:
        self.name = name
        self._peers = site.peers
        self._processes = site.peers.count
        self._communicator = comm.make(name, site.devices, peers=site.sums, counts=site.counts)

    def enter(self) -> None:
        self._peers.meet("enter the next call")

    def close(self) -> None:
        self._communicator.close()

    def call(self, buffers: Buffers) -> Call | None:
        """On GPUs it is over when these have done it, not when they have been given it."""
        call = self._given(buffers)
        if call is None or buffers.devices[0].kind != "cuda":
            return call

        def finished() -> None:
            call()
            for device in buffers.devices:
                device.synchronize()

        return finished

    def _given(self, buffers: Buffers) -> Call | None:
        gives = [[array] for array in buffers.gives if array is not None]
        gets = [[array] for array in buffers.gets if array is not None]
        how: dict[str, Any] = {
            "weights": data.weights(buffers.op, buffers.replicas),
            "scale": data.scale(buffers.op, buffers.replicas),
            "threads": cores(),
        }
        communicator = self._communicator
        match buffers.verb.name:
            case "all_reduce":
                gets = gives if buffers.in_place else gets
                return partial(communicator.all_reduce, gives, gets, **how)
            case "reduce":
                wanted = [
                    Row.on(device, [array])
                    for device, array in zip(buffers.devices, buffers.gets, strict=True)
                    if array is not None
                ]
                how["root"] = buffers.root
                return partial(communicator.reduce, gives, wanted[0] if wanted else None, **how)
            case "reduce_scatter":
                return partial(communicator.reduce_scatter, gives, gets, **how)
            case "broadcast" if buffers.in_place:
                return partial(communicator.broadcast, gets, buffers.root)
            case "all_gather" if self._processes > 1 and not buffers.in_place:
                return partial(buffers.take, communicator.all_gather, gives)
            case _:
                return None


class ByMpi(Way):
    """MPI's own call on each process's only replica. patience: seconds to a report, and an error.

    MPI adds up and shares what it has types for; it broadcasts only in place, and scatters a sum
    only out of place.
    """

    name = MPI

    def __init__(self, cluster: Cluster, patience: tuple[float, float]) -> None:
        assert cluster.engine is not None
        self._engine = cluster.engine
        self._patience = patience
        self._entered = 0  # calls so far: each may take as long as the patience says

        def begin(mpi: Any, world: Any) -> tuple[Any, Any]:
            workers = world.group.Incl(cluster.workers)
            return world.Create_group(workers, FREE_TAG), mpi.IN_PLACE

        self._together, self._in_place = self._on_thread(begin)

    def run(self, loop: Callable[[], T]) -> T:
        return self._on_thread(lambda mpi, world: loop())

    def _on_thread(self, fn: Callable[[Any, Any], T]) -> T:
        pending = self._engine.call(fn)
        while not pending.done:
            waiting, entered = Waiting(*self._patience), self._entered
            while not pending.done and entered == self._entered:
                waiting.tick(pending.fence, 1, lambda: "MPI's own call has not come to its end")
        result: T = pending.get()
        return result

    def enter(self) -> None:
        self._together.Barrier()
        self._entered += 1

    def close(self) -> None:
        """Hold on to nothing: MPI ends with the process."""

    def call(self, buffers: Buffers) -> Call | None:
        ((gives,), (gets,)) = buffers.gives, buffers.gets
        if buffers.op != "sum" or is_narrow(buffers.dtype):
            return None
        root = buffers.root
        match buffers.verb.name:
            case "all_reduce":
                return lambda: self._together.Allreduce(self._given(buffers), gets)
            case "reduce":
                return lambda: self._together.Reduce(self._given(buffers), gets, root=root)
            case "broadcast" if buffers.in_place:
                return lambda: self._together.Bcast(gets, root=root)
            case "all_gather":
                return lambda: self._together.Allgather(self._given(buffers), gets)
            case "reduce_scatter" if not buffers.in_place:
                return lambda: self._together.Reduce_scatter_block(gives, gets)
            case _:
                return None

    def _given(self, buffers: Buffers) -> Any:
        here = buffers.gets[0] is not None
        return self._in_place if buffers.in_place and here else buffers.gives[0]


def ways(
    specs: Sequence[str], site: Site, cluster: Cluster, patience: tuple[float, float]
) -> tuple[list[Way], dict[str, str]]:
    """Return those that the specs name; of `all` those there are, and why others are not here.

    Raises UsageError for a spec there is not, or not for these replicas.
    """
    everything = ALL in specs
    elsewhere: dict[str, str] = {}
    found: list[Way] = []
    for name in _all(site) if everything else specs:
        try:
            found.append(_way(name, site, cluster, patience))
        except UsageError as error:
            if not everything:
                raise
            elsewhere[name] = str(error)
    return found, elsewhere


def _all(site: Site) -> list[str]:
    """Return what may be had; `auto`, and what across ranks is alone another one, is left out."""
    names = [spec for spec in ALGORITHMS if spec not in ("auto", "collective")]
    if site.peers.count > 1:
        names.append("collective")
    if len(set(site.peers.hosts)) > 1:
        names += [f"copy/{between}" for between in BETWEEN]
    return [*names, MPI]


def _way(name: str, site: Site, cluster: Cluster, patience: tuple[float, float]) -> Way:
    if name != MPI:
        return ByCommunicator(name, site)
    if cluster.engine is None:
        raise UsageError("mpi is MPI's own call between processes; start this under mpiexec")
    if site.devices[0].kind != "cpu":
        raise UsageError("mpi is MPI's own call for arrays in the host's memory; use --device=cpu")
    if set(site.counts) != {1}:
        raise UsageError("mpi is for one replica a process; give --num_devices=1")
    return ByMpi(cluster, patience)
