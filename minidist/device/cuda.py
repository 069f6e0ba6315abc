"""CUDA devices: a GPU, or a share of one, with streams of its own.

    cpu.py                                  here
    the compute stream is the caller        it is a CUDA stream, and the caller goes on
    other streams are threads               they are CUDA streams
    threads order what they do              cuda_stream.py orders it on the streams too
    an array is a piece of memory           its block knows who touches it (cuda_memory.py)

`cuda:0` is GPU 0; `cuda:0.0` to `cuda:0.3` are four devices on it, for four replicas, which share
its memory and compute at the same time as far as there is room.

To and from the host's memory everything goes through pinned buffers: what is copied in is read
before `copy` returns and travels then, what is copied out has arrived.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar, cast

import cupy
import numpy as np

from minidist import observe
from minidist.device.base import ALIGNMENT, Array, Device, Stream, home
from minidist.device.cuda_memory import Memory, Pinned, Tied
from minidist.device.cuda_ops import CudaOps
from minidist.device.cuda_stream import CudaStream, role
from minidist.dtypes import as_dtype
from minidist.errors import ForkError, UsageError

T = TypeVar("T")

OUT = "copy out"  # the role of the stream that copies to the host; "copy" is the way in


class CudaDevice(Device):
    """GPU `index`, or with a `share` one of several devices on it.

    Raises UsageError where there is no such GPU, or none can be used.
    """

    kind = "cuda"

    def __init__(self, index: int, short: str, **place: Any) -> None:
        check(index)
        self.events: deque[Any] = deque()  # CUDA events that nobody uses
        self.timers: deque[Any] = deque()  # those that know when they happened
        self.pinned = Pinned()
        self.gpu = cupy.cuda.Device(index)
        self._pid = os.getpid()
        super().__init__(index, short, **place)
        self.memory = Memory(self)
        self.name = self.name.rpartition(":")[0] + ":" + short.partition(":")[2]
        self.ops = CudaOps(self)

    @property
    def uuid(self) -> str:
        """What the GPU is called in all processes of its machine; its shares have the same."""
        runtime = cupy.cuda.runtime
        # CuPy's uuid may end at the first byte that is zero, and so be another GPU's too; but parts
        # of one GPU (MIG) have the same place on the bus.
        uuid = bytes(runtime.getDeviceProperties(self.index)["uuid"])[:16].hex()
        return f"{runtime.deviceGetPCIBusId(self.index)} {uuid}"

    # --- streams

    def stream_here(self) -> CudaStream:
        """Return the stream that the calling thread gives work to."""
        here = role()
        return cast(CudaStream, self._streams.get(here) or self.stream(here))

    @contextmanager
    def giving(self, stream: CudaStream | None = None) -> Iterator[CudaStream]:
        """Give one piece of work to a stream: CuPy uses it, this GPU and its memory."""
        stream = stream or self.stream_here()
        with stream.giving(), self.gpu, stream.raw, cupy.cuda.using_allocator(self.memory.allocate):
            yield stream

    def take_event(self) -> Any:
        """Return a CUDA event that nobody uses."""
        try:
            return self.events.popleft()
        except IndexError:
            with self.gpu:
                return cupy.cuda.Event(disable_timing=True)

    def _new_stream(self, role: str) -> Stream:
        if os.getpid() != self._pid:
            raise ForkError(
                f"{self.short} was first used in process {self._pid}, and CUDA does not survive a "
                f"fork into {os.getpid()}; start processes by spawn, or use no GPU before the fork"
            )
        with self.gpu:
            return CudaStream(self, role, cupy.cuda.Stream(non_blocking=True))

    def _end_stream(self, stream: Stream) -> None:
        cast(CudaStream, stream).end()

    def _outwards(self) -> CudaStream:
        with self._lock:
            if OUT not in self._streams:
                self._streams[OUT] = self._new_stream(OUT)
            return cast(CudaStream, self._streams[OUT])

    # --- memory

    def settle(self) -> None:
        """Do nothing: each verb says whose memory it uses, see `giving`."""

    def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        with self.giving():
            return cupy.ndarray(tuple(shape), as_dtype(dtype).newbyteorder("="))

    def tie(self, array: Array, owner: object) -> Array:
        memory = cupy.cuda.MemoryPointer(Tied(array, owner), 0)
        return cupy.ndarray(array.shape, array.dtype, memory)

    def lend(self, array: Array, how: Callable[[Array], T]) -> T:
        with self.giving() as stream:
            array.data.mem.block.read(stream)
            return how(array)

    def room(self) -> int:
        with cupy.cuda.Device(self.index):
            free, _ = cupy.cuda.runtime.memGetInfo()
        return int(free)

    def trim(self) -> None:
        super().trim()
        self.memory.clear()

    @property
    def made(self) -> int:
        """How often CUDA was asked for memory, the GPU's or pinned: steps alike do not need it."""
        return self.memory.made + self.pinned.made

    def reaches(self, array: Array) -> bool:
        """Whether this GPU's kernels can read and write an array: here, or on a peer."""
        if isinstance(array, np.ndarray):
            return False
        gpu: int = array.data.device_id
        return gpu == self.index or are_peers(self.index, gpu)

    # --- copies

    def copy_out(self, array: Array) -> np.ndarray[Any, Any]:
        if observe.counting:
            observe.moved(self.short, "host", array.nbytes, "values")
        destination = np.empty(array.shape, array.dtype)
        self.fetch([destination], [array])
        return destination

    def copy(self, destination: Array, source: Array) -> None:
        if not destination.flags.c_contiguous:
            with self.giving() as stream:
                destination.data.mem.block.write(stream)
                beside = self._beside(source)
                with observe.piece(stream, "copy", [beside], [destination]):
                    destination[...] = beside
        elif not destination.size:
            return
        elif isinstance(source, np.ndarray):
            self._put(destination, source)
        elif not source.flags.c_contiguous:
            self.copy(destination, home(source).ops.copy(source))
        else:
            with self.giving() as stream:
                source.data.mem.block.read(stream)
                destination.data.mem.block.write(stream)
                with observe.piece(stream, "copy", [source], [destination]):
                    self._move(destination, source, stream)

    def _move(self, destination: Array, source: Array, stream: CudaStream) -> None:
        to, at, size = destination.data, source.data, source.nbytes
        runtime = cupy.cuda.runtime
        if to.device_id == at.device_id:
            kind = runtime.memcpyDeviceToDevice
            runtime.memcpyAsync(to.ptr, at.ptr, size, kind, stream.raw.ptr)
        else:
            places = to.ptr, to.device_id, at.ptr, at.device_id
            runtime.memcpyPeerAsync(*places, size, stream.raw.ptr)

    def _beside(self, source: Array) -> Array:
        """Return an array of this device's with the values of any array."""
        array = self.allocate(source.shape, source.dtype)
        self.copy(array, source)
        return array

    def _put(self, destination: Array, source: np.ndarray[Any, Any]) -> None:
        """Copy from the host, whose array may change as soon as this returns."""
        buffer = self.pinned.take(destination.nbytes)
        place = buffer[: destination.nbytes].view(destination.dtype).reshape(destination.shape)
        if observe.watching:
            observe.accessed([source], [place], "copy")
        np.copyto(place, source, casting="equiv")  # another byte order is no other dtype
        with self.giving() as stream:
            destination.data.mem.block.write(stream)
            with observe.piece(stream, "copy in", [place], [destination]):
                cupy.cuda.runtime.memcpyAsync(
                    destination.data.ptr,
                    buffer.ctypes.data,
                    destination.nbytes,
                    cupy.cuda.runtime.memcpyHostToDevice,
                    stream.raw.ptr,
                )
        self.pinned.give_back(buffer, stream.record())

    def fetch(self, destinations: Sequence[np.ndarray[Any, Any]], sources: Sequence[Array]) -> None:
        sources = [a if a.flags.c_contiguous else self.ops.copy(a) for a in sources]
        ends = list(accumulate(-(-source.nbytes // ALIGNMENT) * ALIGNMENT for source in sources))
        if not ends or not ends[-1]:
            return
        buffer = self.pinned.take(ends[-1])
        starts = [0, *ends]
        with self.giving(self._outwards()) as stream:
            for source in sources:
                source.data.mem.block.read(stream)
            with observe.piece(stream, OUT, sources, [buffer]):
                for start, source in zip(starts, sources, strict=False):
                    cupy.cuda.runtime.memcpyAsync(
                        buffer.ctypes.data + start,
                        source.data.ptr,
                        source.nbytes,
                        cupy.cuda.runtime.memcpyDeviceToHost,
                        stream.raw.ptr,
                    )
        arrived = stream.record()
        arrived.wait()
        if observe.watching:
            observe.accessed([buffer], destinations, OUT)
        for start, into, source in zip(starts, destinations, sources, strict=False):
            values = buffer[start : start + source.nbytes].view(source.dtype)
            np.copyto(into, values.reshape(source.shape))
        self.pinned.give_back(buffer, arrived)


@cache
def are_peers(gpu: int, other: int) -> bool:
    """Let a GPU's kernels read and write another one's memory; return whether they can."""
    runtime = cupy.cuda.runtime
    if not runtime.deviceCanAccessPeer(gpu, other):
        return False
    with cupy.cuda.Device(gpu):
        try:
            runtime.deviceEnablePeerAccess(other)
        except runtime.CUDARuntimeError as failure:
            if "PeerAccessAlreadyEnabled" not in str(failure):
                raise
    return True


def check(index: int) -> None:
    """Raise UsageError, with the cure, unless GPU `index` can be used."""
    if os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") != "0":
        raise UsageError(
            "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM is set, and with per-thread default streams "
            "CuPy's pool hands out memory that is still in use; unset it"
        )
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as failure:
        raise UsageError(
            f"cuda:{index} cannot be used: CUDA says {failure}; install NVIDIA's driver, or use "
            "cpu devices"
        ) from failure
    if index >= count:
        there = ", ".join(f"cuda:{i}" for i in range(count)) or "no GPU"
        raise UsageError(f"there is no cuda:{index} in this machine, which has {there}")
