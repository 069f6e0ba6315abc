"""A stand-in for NCCL on top of that for CuPy, as far as minidist uses it.

A call puts a piece on its stream which is over once every rank's stream has come to the same call,
and a while after that: a queue of its own does the work, in any order with all others. So a
collective completes late, and ranks that give theirs in different orders wait for each other for
ever, as they do with NCCL. Until `state` says that a call has been taken nothing may be given to
the stream. `Faults` says what goes wrong.

`nccl(cupy)` lets `from nccl.bindings import nccl` find it, or with `binding="cupy"` CuPy's.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from standin import Wait, at

from minidist.dtypes import as_dtype

KINDS = [
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "bfloat16"),
]
# Numbers of nccl.h.
READY, CUDA_ERROR, REMOTE_ERROR, IN_PROGRESS = 0, 1, 6, 7  # results
SUM, AVERAGE = 0, 4  # operations
BYTE = 1  # a type
SEVERAL_SINCE = 23000  # the version from which on ranks may share a GPU
MOST_BLOCKS = 32  # that ranks of one GPU may take together: more may never run at once
WORDS = {
    CUDA_ERROR: "unhandled cuda error",
    REMOTE_ERROR: "remote process exited or there was a network error",
}


@dataclass
class Faults:
    """What goes wrong, by the number of a call of every rank, from 0."""

    never: set[int] = field(default_factory=set)  # it does not complete
    failing: dict[int, int] = field(default_factory=dict)  # nor this, and NCCL says so later
    refused: dict[int, int] = field(default_factory=dict)  # the group's end fails
    not_taken: set[int] = field(default_factory=set)  # it stays in progress
    no_joining: bool = False  # a rank never comes
    no_id: bool = False
    abort_waits_for: threading.Event | None = None


class Error(Exception):
    """What both bindings raise. status: NCCL's result."""

    def __init__(self, status: int) -> None:
        super().__init__(WORDS.get(status, f"result {status}"))
        self.status = status


class Call:
    """One call of all ranks."""

    def __init__(self, clique: Clique, number: int, what: tuple[Any, ...]) -> None:
        self.clique, self.number, self.what = clique, number, what
        self.given: dict[int, tuple[int, int]] = {}  # by rank: where it reads and writes
        self.came: set[int] = set()
        self.done = False

    def come(self, rank: int) -> None:
        self.came.add(rank)
        faults = self.clique.world.faults
        if self.number in faults.failing:
            for handle in self.clique.handles.values():
                handle.error = faults.failing[self.number]
        elif len(self.came) == self.clique.count and self.number not in faults.never:
            queue = deque([self.do])
            self.clique.world.gpu.queues.append(queue)

    def do(self) -> None:
        verb, count, kind, how, root = self.what
        dtype = as_dtype(KINDS[kind])
        n, rng = self.clique.count, self.clique.world.rng

        def array(address: int, size: int) -> np.ndarray:
            return at(address, size * dtype.itemsize).view(dtype)

        size = count * n if verb == "reduce_scatter" else count
        if verb == "broadcast":
            total = array(self.given[root][0], count).copy()
        else:
            rows = [array(sent, size).copy() for sent, _ in self.given.values()]
            rng.shuffle(rows)
            if how == AVERAGE:
                rows = [(row * dtype.type(1 / n)).astype(dtype) for row in rows]
            else:
                assert how == SUM
            total = rows[0]
            for row in rows[1:]:
                total = (total + row).astype(dtype)
        for rank, (_, into) in self.given.items():
            if verb == "reduce_scatter":
                array(into, count)[...] = total[rank * count : (rank + 1) * count]
            elif verb != "reduce" or rank == root:
                array(into, count)[...] = total
        self.done = True


class Passing:
    """What one rank sends to another."""

    def __init__(self) -> None:
        self.sent = self.into = None
        self.done = False

    def do(self, count: int) -> None:
        if self.sent is not None and self.into is not None:
            assert self.sent[1] == self.into[1] == count, "a receiver expects another size"
            at(self.into[0], count)[...] = at(self.sent[0], count)
            self.done = True


class Taken(Wait):
    """What a stream waits for: its call, or an abort."""

    def __init__(self, call: Any, handle: Handle) -> None:
        self.call, self.handle = call, handle

    @property
    def over(self) -> bool:
        return self.call.done or self.handle.gone == "aborted"


class Clique:
    """All ranks of one communicator."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.count = 0
        self.handles: dict[int, Handle] = {}
        self.calls: dict[int, Call] = {}
        self.passing: dict[tuple[int, int, int], Passing] = defaultdict(Passing)
        self.finishing: set[int] = set()


class Handle:
    """One rank's part of a communicator."""

    def __init__(self, clique: Clique, rank: int, device: int) -> None:
        self.clique, self.rank, self.device = clique, rank, device
        self.number = itertools.count()
        self.passed: dict[tuple[str, int], Any] = defaultdict(itertools.count)
        self.waiting: list[Any] = []  # pieces that NCCL has not yet put on their streams
        self.after: list[Any] = []  # and those that come behind them
        self.looks = 0  # at the state, before it does
        self.error = 0
        self.gone = ""
        self.asked = 0  # calls so far
        self.blocks = 0  # that it takes of its GPU; 0: nobody has said

    def state(self) -> int:
        with self.clique.world.lock:
            return self._state()

    def _state(self) -> int:
        assert not self.gone, "a communicator is used after its end"
        clique = self.clique
        faults = clique.world.faults
        if self.error:
            return self.error
        if len(clique.handles) < clique.count or faults.no_joining:
            return IN_PROGRESS
        if self.asked and self.asked - 1 in faults.not_taken:
            return IN_PROGRESS
        if (
            clique.finishing
            and len(clique.finishing) < clique.count
            and self.rank in clique.finishing
        ):
            return IN_PROGRESS
        if self.looks:
            self.looks -= 1
            return IN_PROGRESS
        # Ranks connect when all of them have their first call.
        if self.waiting and not all(handle.asked for handle in clique.handles.values()):
            return IN_PROGRESS
        for queue, name, piece in self.waiting + self.after:
            clique.world.give(queue, name, piece)
        self.waiting.clear()
        self.after.clear()
        return READY


class World:
    """All that there is of NCCL."""

    def __init__(self, cupy: Any, version: int, faults: Faults, seed: int) -> None:
        self.cupy, self.gpu = cupy, cupy.gpu
        self.version, self.faults = version, faults
        self.rng = random.Random(seed)
        self.cliques: dict[bytes, Clique] = {}
        self.grouped = threading.local()
        self.handles: list[Handle] = []
        self.give = cupy.gpu.give
        self.lock = threading.RLock()
        cupy.gpu.give = self._checked

    def _checked(self, queue: Any, name: str, work: Any) -> None:
        """Give it, unless that is too early; an event is of what was given before."""
        for handle in self.handles:
            for closed, call, _ in handle.waiting:
                early = closed is queue and name != "record"
                assert not early, f"{name} was given to a stream before NCCL took {call}"
        self.give(queue, name, work)

    @property
    def live(self) -> int:
        return sum(not handle.gone for handle in self.handles)

    def new_id(self) -> bytes:
        if self.faults.no_id:
            raise Error(CUDA_ERROR)
        name = len(self.cliques).to_bytes(128, "big")
        self.cliques[name] = Clique(self)
        return name

    def join(self, count: int, name: bytes, rank: int) -> Handle:
        assert self._group() is not None, "ranks of one thread must join in a group"
        clique = self.cliques[bytes(name)]
        assert clique.count in (0, count) and rank not in clique.handles
        clique.count = count
        handle = clique.handles[rank] = Handle(clique, rank, self.cupy.here.gpu[-1])
        self.handles.append(handle)
        return handle

    def _group(self) -> list[Any] | None:
        return getattr(self.grouped, "calls", None)

    def start_group(self) -> None:
        assert self._group() is None
        self.grouped.calls = []

    def end_group(self) -> list[Handle]:
        calls, self.grouped.calls = self._group(), None
        assert calls is not None
        handles = list(dict.fromkeys(handle for handle, _ in calls))
        with self.lock:
            for handle in handles:
                handle.looks = self.rng.randrange(3)
                number = handle.asked - 1
                if number in self.faults.refused:
                    raise Error(self.faults.refused[number])
            for _, work in calls:
                work()
        return handles

    def collective(
        self, handle: Handle, what: tuple[Any, ...], sent: int, into: int, stream: int
    ) -> None:
        group = self._group()
        assert group is not None, "calls for several ranks by one thread need a group"
        assert not handle.gone and self.cupy.streams[stream].device_id == handle.device
        number = next(handle.number)
        handle.asked += 1

        def work() -> None:
            clique = handle.clique
            call = clique.calls.setdefault(number, Call(clique, number, what))
            assert call.what == what, f"ranks do {call.what} and {what}, which NCCL does not notice"
            call.given[handle.rank] = sent, into
            queue = self.cupy.streams[stream].queue
            handle.waiting.append((queue, what[0], lambda: call.come(handle.rank)))
            handle.waiting.append((queue, what[0], Taken(call, handle)))

        group.append((handle, work))

    def pass_on(
        self, handle: Handle, way: str, address: int, count: int, peer: int, stream: int
    ) -> None:
        group = self._group()
        assert group is not None and not handle.gone
        pair = (handle.rank, peer) if way == "sent" else (peer, handle.rank)
        number = next(handle.passed[way, peer])
        handle.asked += 1

        def work() -> None:
            passing = handle.clique.passing[*pair, number]
            queue = self.cupy.streams[stream].queue

            def come() -> None:
                setattr(passing, way, (address, count))
                passing.do(count)

            handle.waiting.append((queue, way, come))

            handle.after.append((queue, way, Taken(passing, handle)))

        group.append((handle, work))

    def finish(self, handle: Handle) -> None:
        assert not handle.gone
        handle.clique.finishing.add(handle.rank)

    def end(self, handle: Handle, how: str) -> None:
        if how == "aborted" and self.faults.abort_waits_for is not None:
            self.faults.abort_waits_for.wait()
        assert not handle.gone, f"a communicator was {how} that was {handle.gone}"
        handle.gone = how
        handle.waiting.clear()


def nccl4py(world: World) -> Any:
    """The lower layer of nccl4py."""

    class UniqueId:
        def __init__(self, name: bytes) -> None:
            self.name = bytes(name)

        def __bytes__(self) -> bytes:
            return self.name

        @classmethod
        def from_buffer(cls, buffer: bytearray) -> Any:
            return cls(bytes(buffer))

    class Config:
        blocking = max_ctas = None

    def comm_init_rank_config(count: int, name: UniqueId, rank: int, config: Config) -> Handle:
        assert config.blocking == 0 and config.max_ctas >= 1
        handle = world.join(count, name.name, rank)
        handle.blocks = config.max_ctas
        ranks = handle.clique.handles.values()
        beside = [one.blocks for one in ranks if one.device == handle.device]
        if world.version >= SEVERAL_SINCE:  # else they are on GPUs of several machines
            assert sum(beside) <= MOST_BLOCKS, f"ranks of one GPU take {beside} blocks"
        return handle

    def all_reduce(sent, into, count, kind, how, handle, stream):  # type: ignore[no-untyped-def]
        world.collective(handle, ("all_reduce", count, kind, how, None), sent, into, stream)

    def reduce(sent, into, count, kind, how, root, handle, stream):  # type: ignore[no-untyped-def]
        world.collective(handle, ("reduce", count, kind, how, root), sent, into, stream)

    def reduce_scatter(sent, into, count, kind, how, handle, stream):  # type: ignore[no-untyped-def]
        world.collective(handle, ("reduce_scatter", count, kind, how, None), sent, into, stream)

    def broadcast(sent, into, count, kind, root, handle, stream):  # type: ignore[no-untyped-def]
        world.collective(handle, ("broadcast", count, kind, 0, root), sent, into, stream)

    def send(sent, count, kind, peer, handle, stream):  # type: ignore[no-untyped-def]
        assert kind == BYTE
        world.pass_on(handle, "sent", sent, count, peer, stream)

    def recv(into, count, kind, peer, handle, stream):  # type: ignore[no-untyped-def]
        assert kind == BYTE
        world.pass_on(handle, "into", into, count, peer, stream)

    module: Any = types.ModuleType("nccl.bindings.nccl")
    module.__dict__.update(
        UniqueId=UniqueId,
        Config=Config,
        get_version=lambda: world.version,
        get_unique_id=lambda: UniqueId(world.new_id()),
        comm_init_rank_config=comm_init_rank_config,
        group_start=world.start_group,
        group_end=lambda: world.end_group() and None,
        comm_get_async_error=Handle.state,
        get_error_string=lambda result: WORDS.get(result, f"result {result}"),
        comm_finalize=world.finish,
        comm_destroy=lambda handle: world.end(handle, "destroyed"),
        comm_abort=lambda handle: world.end(handle, "aborted"),
        all_reduce=all_reduce,
        reduce=reduce,
        reduce_scatter=reduce_scatter,
        broadcast=broadcast,
        send=send,
        recv=recv,
    )
    return module


def of_cupy(world: World) -> Any:
    """cupy.cuda.nccl, whose calls wait until they are taken."""

    class NcclError(Error, RuntimeError):
        pass

    class NcclCommunicator:
        def __init__(self, count: int, name: bytes, rank: int) -> None:
            self.handle = world.join(count, name, rank)

        def check_async_error(self) -> None:
            state = self.handle.state()
            if state == IN_PROGRESS:
                raise KeyError(state)
            if state:
                raise NcclError(state)

        def allReduce(self, sent, into, count, kind, how, stream):  # type: ignore[no-untyped-def]
            what = ("all_reduce", count, kind, how, None)
            world.collective(self.handle, what, sent, into, stream)

        def reduce(self, sent, into, count, kind, how, root, stream):  # type: ignore[no-untyped-def]
            what = ("reduce", count, kind, how, root)
            world.collective(self.handle, what, sent, into, stream)

        def reduceScatter(self, sent, into, count, kind, how, stream):  # type: ignore[no-untyped-def]
            what = ("reduce_scatter", count, kind, how, None)
            world.collective(self.handle, what, sent, into, stream)

        def broadcast(self, sent, into, count, kind, root, stream):  # type: ignore[no-untyped-def]
            what = ("broadcast", count, kind, 0, root)
            world.collective(self.handle, what, sent, into, stream)

        def send(self, sent, count, kind, peer, stream):  # type: ignore[no-untyped-def]
            world.pass_on(self.handle, "sent", sent, count, peer, stream)

        def recv(self, into, count, kind, peer, stream):  # type: ignore[no-untyped-def]
            world.pass_on(self.handle, "into", into, count, peer, stream)

        def abort(self) -> None:
            world.end(self.handle, "aborted")

        def destroy(self) -> None:
            world.end(self.handle, "destroyed")

    def group_end() -> None:
        for handle in world.end_group():
            while handle.state() == IN_PROGRESS:
                pass

    module: Any = types.ModuleType("cupy.cuda.nccl")
    module.__dict__.update(
        NcclError=NcclError,
        NcclCommunicator=NcclCommunicator,
        get_version=lambda: world.version,
        get_unique_id=world.new_id,
        groupStart=world.start_group,
        groupEnd=group_end,
    )
    return module


@contextmanager
def nccl(
    cupy: Any,
    *,
    version: int = 23203,
    faults: Faults | None = None,
    seed: int = 0,
    binding: str = "nccl4py",
) -> Iterator[World]:
    """Let NCCL be found; gives its World."""
    world = World(cupy, version, faults or Faults(), seed)
    names = ["nccl", "nccl.bindings", "nccl.bindings.nccl", "cupy.cuda"]
    before = {name: sys.modules.pop(name, None) for name in names}
    if binding == "nccl4py":
        bindings: Any = types.ModuleType("nccl.bindings")
        bindings.nccl = nccl4py(world)
        sys.modules.update({"nccl": types.ModuleType("nccl"), "nccl.bindings": bindings})
    else:
        sys.modules["nccl"] = None  # type: ignore[assignment]
        of: Any = types.ModuleType("cupy.cuda")
        of.nccl = of_cupy(world)
        sys.modules["cupy.cuda"] = of
    try:
        yield world
    finally:
        cupy.gpu.give = world.give
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
