"""A stand-in for CuPy on a machine without a GPU, as far as minidist uses it.

Its arrays lie in the host's memory, and work on them is done by NumPy, or by the fibers of
emulator.py, but not when it is given: each stream has a queue, and a `Gpu` does what is in the
queues in a random order, in which only events order streams among themselves, and as late as it
can. Memory that is made is full of NaN, and memory that is dropped is used again at once by its
stream. So an event that was forgotten, a buffer that is used again too early or a copy that is not
waited for shows as a wrong number.

`cupy(folder, seed)` makes a module of that name, with its own Gpu at `.gpu`. What is called as in
CuPy here is a class that `bound` ties to that Gpu, or a function that is given it first.
"""

from __future__ import annotations

import ctypes
import math
import random
import threading
import types
import weakref
from bisect import bisect, insort
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from emulator import TYPES, Emulator

from minidist.kernels.grid import _TABLE as TABLE
from minidist.kernels.source import modules

GPUS = 2
FUNCTIONS = [
    *("add", "subtract", "multiply", "divide", "power", "negative", "exp", "log", "sqrt"),
    *("equal", "less", "less_equal", "sum", "max", "argmax", "take", "argsort"),
    *("concatenate", "ascontiguousarray"),
]
LINE = 512  # bytes to which CuPy aligns memory
GEMM_TYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}  # cudaDataType
NARROW = ("float16", "bfloat16")
COMPUTED = {  # by cublasComputeType: the types that may be multiplied, and of the product
    68: {("float32",) * 2, *((t, t) for t in NARROW), *((t, "float32") for t in NARROW)},
    70: {("float64", "float64")},
    77: {("float32", "float32")},  # rounded to TF32
}
IN_FLOAT64 = 70
NOT_READY = 600  # cudaError
WORDS = {700: "cudaErrorIllegalAddress: an illegal memory access was encountered"}
TO_DEVICE, TO_HOST, WITHIN = 1, 2, 3  # cudaMemcpyKind


class Mark:
    """A position in a queue. Each recording of an event has its own."""

    def __init__(self) -> None:
        self.done = False
        self.at = 0  # pieces of work that were done before it, of all streams


class Gpu:
    """All streams of all GPUs, and who does what they were given.

    emulator: who does what kernels do. cupy: the module.
    """

    cupy: Any

    def __init__(self, seed: int, emulator: Emulator) -> None:
        self._random, self.asked = random.Random(seed), random.Random(seed)
        self.emulator = emulator
        self.here = _Here()
        self.streams: dict[int, Any] = {}  # by what CuPy calls their ptr
        self.lock = threading.RLock()
        self.queues: list[deque[Any]] = []
        self.memory: list[np.ndarray] = []  # of all that was ever made: nothing is freed
        self.places: list[tuple[int, int, int]] = []  # its first address, its end, and whose it is
        self.room = [math.inf] * GPUS  # bytes of each that are free
        self.peers: set[tuple[int, int]] = set()  # whose kernels reach whose memory
        # By what CuPy calls their ptr. Held: a `__del__` brings back what weak references lost.
        self.events: dict[int, Any] = {}
        self.queries = 0  # of events
        self.fault = 0  # what CUDA says of everything, once something has gone wrong
        self.late: list[deque[Any]] = []  # queues in which nothing is done for now
        self.products: list[tuple[str, str, int]] = []  # types, and in which cuBLAS computed
        self.calls: list[str] = []  # what was given, in that order
        self.time = 0  # pieces that were done
        self.may_hang = False  # whether all streams may wait for something that never comes

    def give(self, queue: deque[Any], name: str, work: Any) -> None:
        with self.lock:
            self.calls.append(name)
            queue.append(work)

    def do(self, name: str, work: Any) -> None:
        """Give it to the stream that is current."""
        assert self.here.streams, f"{name} was given to no stream of its own"
        self.give(self.here.streams[-1].queue, name, work)

    def finish(self, mark: Mark) -> None:
        """Do something, at random, until the mark is reached."""
        with self.lock:
            while not mark.done:
                self.step()

    def step(self) -> None:
        """Do the next piece of some stream that need not wait, if anything is left to do."""
        with self.lock:
            if self.idle():
                return
            ready = [q for q in self.queues if q and not (isinstance(q[0], Wait) and not q[0].over)]
            if self.late:
                ready = [q for q in ready if not any(q is late for late in self.late)]
            if not ready and (self.may_hang or self.late):
                return
            assert ready, "every stream waits for another one"
            piece = self._random.choice(ready).popleft()
            if isinstance(piece, Mark):
                piece.done, piece.at = True, self.time
            elif not isinstance(piece, Wait):
                self.time += 1
                with np.errstate(all="ignore"):
                    piece()

    def drain(self) -> None:
        """Do all that was given."""
        while not self.idle():
            self.step()

    def idle(self) -> bool:
        return not any(self.queues)

    def take(self, start: int, size: int, number: int) -> None:
        """Let memory be a GPU's, if there is so much."""
        with self.lock:
            if size > self.room[number]:
                raise OutOfMemoryError(f"GPU {number} has no {size} bytes")
            self.room[number] -= size
            insort(self.places, (start, start + size, number))

    def owner(self, address: int) -> int | None:
        """Return whose memory an address is in; None: the host's."""
        with self.lock:
            i = bisect(self.places, (address, math.inf)) - 1
            if i < 0 or address >= self.places[i][1]:
                return None
            return self.places[i][2]


class Wait:
    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    @property
    def over(self) -> bool:
        return self._mark.done


class _Here(threading.local):
    def __init__(self) -> None:
        self.gpu = [0]
        self.streams: list[Any] = []
        self.allocators: list[Any] = []


def at(address: int, nbytes: int) -> np.ndarray:
    """Return the host's memory at an address."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class Bound:
    """A class of CuPy's: of one Gpu, once it is `bound`."""

    _gpu: Gpu


def bound(gpu: Gpu, kind: type[Bound]) -> Any:
    return type(kind.__name__, (kind,), {"_gpu": gpu})


# --- memory


class BaseMemory(Bound):
    device_id: int

    @property
    def device(self) -> Any:
        return self._gpu.cupy.cuda.Device(self.device_id)


class Memory(BaseMemory):
    def __init__(self, size: int) -> None:
        raw = np.full(size + LINE, 0xFF, np.uint8)
        self.ptr = -(-raw.ctypes.data // LINE) * LINE
        self.size, self.device_id = size, self._gpu.here.gpu[-1]
        self._gpu.take(self.ptr, size, self.device_id)
        self._gpu.memory.append(raw)


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class PooledMemory(BaseMemory):
    """Memory in use. As CuPy's, and as arrays of NumPy, it ends with the last reference to it,
    and not by the garbage collector, whose victims may be taken up again by who is told."""

    def __init__(self, memory: Any, free: list[Any]) -> None:
        self.ptr, self.size, self.device_id = memory.ptr, memory.size, memory.device_id
        self._gpu = memory._gpu
        self._hold = np.empty(0)
        weakref.finalize(self._hold, free.append, memory)


class MemoryPool(Bound):
    def __init__(self, allocator: Callable[[int], Any]) -> None:
        self._allocator = allocator
        self._free: dict[Any, list[Any]] = {}

    def malloc(self, size: int) -> Any:
        size = -(-size // LINE) * LINE
        key = self._gpu.here.streams[-1], size
        free = self._free.setdefault(key, [])
        memory = free.pop() if free else self._allocator(size).mem
        return MemoryPointer(PooledMemory(memory, free), 0)

    def free_all_blocks(self) -> None:
        """Give back what lies in the arenas of the current GPU; nothing else gets its places."""
        here = self._gpu.here.gpu[-1]
        for (stream, _), free in self._free.items():
            while stream.device_id == here and free:
                self._gpu.room[here] += free.pop().size


@contextmanager
def using_allocator(gpu: Gpu, allocator: Any) -> Any:
    gpu.here.allocators.append(allocator)
    yield
    gpu.here.allocators.pop()


# --- arrays


class ndarray(Bound):
    data: Any  # a MemoryPointer

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None) -> None:
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.data = self._gpu.here.allocators[-1](nbytes) if memptr is None else memptr
        self.host = at(self.data.ptr, nbytes).view(dtype).reshape(shape)

    @property
    def flags(self) -> Any:
        return types.SimpleNamespace(c_contiguous=self.host.flags.c_contiguous)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = self._gpu.here.streams[-1]
        about = dict(self.host.__array_interface__, version=3, stream=stream.ptr)
        return about if self.host.size else {**about, "data": (0, False)}

    def __dlpack__(self, *, stream: int) -> Any:
        gpu, mark = self._gpu, Mark()
        gpu.give(gpu.here.streams[-1].queue, "record", mark)
        gpu.give(gpu.streams[stream].queue, "wait", Wait(mark))
        return self

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id

    def __len__(self) -> int:
        return len(self.host)

    def _view(self, host: np.ndarray) -> Any:
        view = type(self).__new__(type(self))
        offset = host.ctypes.data - self.data.mem.ptr if host.size else 0
        view.data, view.host = MemoryPointer(self.data.mem, offset), host
        return view

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        return self._view(self.host[index if Ellipsis in index else (*index, ...)])

    def __setitem__(self, index: Any, value: Any) -> None:
        into, index, value = self.host, plain(index), plain(value)
        self._gpu.do("set", lambda: into.__setitem__(index, value))

    def reshape(self, *shape: Any) -> Any:
        shape = shape[0] if len(shape) == 1 else shape
        assert self.host.flags.c_contiguous
        return self._view(self.host.reshape(shape))

    def view(self, dtype: Any) -> Any:
        return self._view(self.host.view(dtype))

    def transpose(self, axes: Any) -> Any:
        return self._view(self.host.transpose(axes))

    def fill(self, value: Any) -> None:
        into = self.host
        self._gpu.do("fill", lambda: into.fill(value))

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        if not copy and self.host.dtype == dtype:
            return self
        return lazy(self._gpu, lambda a: a.astype(dtype), "astype")(self)


for _name in ("shape", "dtype", "size", "nbytes", "ndim", "itemsize", "strides"):
    setattr(ndarray, _name, property(lambda self, name=_name: getattr(self.host, name)))


def plain(value: Any) -> Any:
    """Return NumPy's arrays for these; they do not hold the memory, as a stream does not."""
    if isinstance(value, ndarray):
        return value.host
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value


def zeros(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, list | tuple):
        return type(value)(zeros(item) for item in value)
    return value


def lazy(gpu: Gpu, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def given(*args: Any, out: Any = None, **options: Any) -> Any:
        args = plain(args)
        with np.errstate(all="ignore"):
            like = np.asarray(function(*zeros(args), **options))
        result = gpu.cupy.ndarray(like.shape, like.dtype) if out is None else out
        into = result.host
        gpu.do(name, lambda: np.copyto(into, function(*args, **options), casting="same_kind"))
        return result

    return given


def from_dlpack(gpu: Gpu, x: Any) -> Any:
    kind, number = x.__dlpack_device__()
    assert (kind, number) == (2, gpu.here.gpu[-1])
    return x.__dlpack__(stream=gpu.here.streams[-1].ptr)


def asarray(gpu: Gpu, x: Any) -> Any:
    about = x.__cuda_array_interface__
    gpu.streams[about["stream"]].synchronize()
    memory = types.SimpleNamespace(ptr=about["data"][0], device_id=gpu.here.gpu[-1], of=x)
    return gpu.cupy.ndarray(about["shape"], about["typestr"], MemoryPointer(memory, 0))


def unique(gpu: Gpu, a: Any, return_inverse: bool) -> Any:
    assert return_inverse
    gpu.here.streams[-1].synchronize()
    results = []
    for values in np.unique(a.host, return_inverse=True):
        result = gpu.cupy.ndarray(values.shape, values.dtype)
        gpu.do("unique", lambda into=result.host, values=values: np.copyto(into, values))
        results.append(result)
    return tuple(results)


# --- streams


class Device(Bound):
    def __init__(self, number: int) -> None:
        self.id = number

    def __enter__(self) -> Any:
        self._gpu.here.gpu.append(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.here.gpu.pop()


class Stream(Bound):
    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking
        self.queue: deque[Any] = deque()
        self.device_id = self._gpu.here.gpu[-1]
        self.ptr = id(self)
        with self._gpu.lock:
            self._gpu.queues.append(self.queue)
        self._gpu.streams[self.ptr] = self

    def __enter__(self) -> Any:
        here = self._gpu.here
        assert here.gpu[-1] == self.device_id, "a stream is used where another GPU is current"
        here.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.here.streams.pop()

    def wait_event(self, event: Any) -> None:
        self._gpu.give(self.queue, "wait", Wait(event.mark))

    def synchronize(self) -> None:
        mark = Mark()
        self._gpu.give(self.queue, "synchronize", mark)
        self._gpu.finish(mark)


class Event(Bound):
    def __init__(self, *, disable_timing: bool) -> None:
        self.mark = Mark()
        self.mark.done = True
        self.disable_timing = disable_timing
        self.device_id = self._gpu.here.gpu[-1]
        self.ptr = id(self)
        self._gpu.events[self.ptr] = self

    def record(self, stream: Any) -> None:
        assert stream.device_id == self.device_id, "an event is another GPU's than the stream"
        self.mark = Mark()
        self._gpu.give(stream.queue, "record", self.mark)

    @property
    def done(self) -> bool:
        return eventQuery(self._gpu, self.ptr) == 0


def eventQuery(gpu: Gpu, event: int) -> int:
    """Return 0 if it has happened. That who asks again and again gets on, something is done."""
    mark = gpu.events[event].mark
    gpu.queries += 1
    if gpu.fault:
        return gpu.fault
    for _ in range(gpu.asked.randrange(4)):
        if not mark.done:
            gpu.step()
    return 0 if mark.done else NOT_READY


def get_elapsed_time(start: Any, end: Any) -> float:
    assert start.mark.done and end.mark.done and not start.disable_timing
    return 1000.0 * (end.mark.at - start.mark.at)  # each takes a second


# --- copies, kernels and products


def move(gpu: Gpu, name: str, to: int, source: int, size: int, stream: int) -> None:
    into, values = at(to, size), at(source, size)
    gpu.give(gpu.streams[stream].queue, name, lambda: np.copyto(into, values))


def memcpyAsync(gpu: Gpu, to: int, source: int, size: int, kind: int, stream: int) -> None:
    owners = gpu.owner(to), gpu.owner(source)
    kinds = {TO_DEVICE: (True, False), TO_HOST: (False, True), WITHIN: (True, True)}
    fits = kinds[kind] == tuple(owner is not None for owner in owners)
    assert fits or not size, "it is no copy of this kind"
    assert kind != WITHIN or owners[0] == owners[1], "another GPU's memory is a peer's"
    move(gpu, "copy", to, source, size, stream)


def memcpyPeerAsync(
    gpu: Gpu, to: int, number: int, source: int, other: int, size: int, stream: int
) -> None:
    assert number != other
    assert (number, other) == (gpu.owner(to), gpu.owner(source)), "the memory is of other GPUs"
    move(gpu, "copy from a peer", to, source, size, stream)


class RawKernel(Bound):
    def __init__(self, code: str, name: str, *, options: tuple[str, ...], backend: str) -> None:
        (self._module,) = (m for m in modules() if m.text == code and m.options == options)
        self._name = name

    def __call__(self, grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
        launch = (self._module, self._name, grid, block[0], arguments)
        number = self._gpu.here.gpu[-1]

        def do() -> None:
            for owner in {self._gpu.owner(address) for address in _addresses(arguments)} - {None}:
                assert owner == number or (number, owner) in self._gpu.peers, (
                    f"GPU {number} reaches no memory of GPU {owner}"
                )
            self._gpu.emulator.launch(*launch)

        self._gpu.do(self._name, do)


def _addresses(arguments: tuple[Any, ...]) -> list[int]:
    """Return all of a kernel's arguments that may be addresses, those in a table too."""
    found: list[int] = []
    for argument in map(np.asarray, arguments):
        if argument.nbytes % 8 == 0:
            found += np.frombuffer(argument.tobytes(), np.uint64).tolist()
        if argument.dtype == TABLE:
            first, _, _, rows, columns, *_ = argument.item()
            found += at(first, 8 * rows * columns).view(np.uint64).tolist()
    return found


def deviceEnablePeerAccess(gpu: Gpu, peer: int) -> None:
    pair = gpu.here.gpu[-1], peer
    if pair in gpu.peers:
        raise CUDARuntimeError("cudaErrorPeerAccessAlreadyEnabled")
    gpu.peers.add(pair)


def gemmStridedBatchedEx(
    gpu: Gpu, handle: Any, b_turned: int, a_turned: int, m: int, n: int, k: int, *rest: Any
) -> None:
    one, *matrices, count, compute, algorithm = rest
    other = matrices.pop(8)
    for i in range(count):
        b, a, out = (
            (at + i * step * TYPES[GEMM_TYPES[kind]].itemsize, kind, stride)
            for at, kind, stride, step in (matrices[:4], matrices[4:8], matrices[8:])
        )
        each = (one, *b, *a, other, *out, compute, algorithm)
        gemmEx(gpu, handle, b_turned, a_turned, m, n, k, *each)


def gemmEx(
    gpu: Gpu, handle: Any, b_turned: int, a_turned: int, m: int, n: int, k: int, *rest: Any
) -> None:
    assert handle == id(gpu.here.streams[-1]), "cuBLAS keeps memory for each of its handles"
    one, b, b_type, ldb, a, a_type, lda, other, out, out_type, ldc, compute, _ = rest
    given, made = GEMM_TYPES[a_type], GEMM_TYPES[out_type]
    assert b_type == a_type and (given, made) in COMPUTED[compute], "cuBLAS does not support it"
    gpu.products.append((given, made, compute))

    left = _matrix(a, a_type, *((k, n) if a_turned else (n, k)), lda)
    right = _matrix(b, b_type, *((m, k) if b_turned else (k, m)), ldb)
    into = _matrix(out, out_type, n, m, ldc)
    wide = np.dtype(np.float64 if compute == IN_FLOAT64 else np.float32)
    assert at(one, wide.itemsize).view(wide)[0] == 1
    before = at(other, wide.itemsize).view(wide)[0].copy()

    def multiply() -> None:
        x, y = (np.asarray(each, wide) for each in (left, right))
        product = (x.T if a_turned else x) @ (y.T if b_turned else y)
        if before:
            product += np.asarray(into, wide)
        into[...] = product.astype(into.dtype)

    gpu.do("gemm", multiply)


def _matrix(address: int, kind: int, rows: int, columns: int, stride: int) -> np.ndarray:
    assert stride == max(columns, 1)
    dtype = TYPES[GEMM_TYPES[kind]]
    return at(address, rows * columns * dtype.itemsize).view(dtype).reshape(rows, columns)


# --- the module


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int | str) -> None:
        super().__init__(WORDS[status] if isinstance(status, int) else status)


class OutOfMemoryError(MemoryError):
    pass


def cupy(folder: Path, seed: int = 0) -> Any:
    gpu = Gpu(seed, Emulator(folder, "shuffled"))
    module: Any = types.ModuleType("cupy")
    gpu.cupy, module.gpu = module, gpu
    module.streams, module.here = gpu.streams, gpu.here
    module.ranges = []  # pushed; and popped: None
    for name in FUNCTIONS:
        setattr(module, name, lazy(gpu, getattr(np, name), name))
    for function in (from_dlpack, asarray, unique):
        setattr(module, function.__name__, partial(function, gpu))
    module.ndarray, module.RawKernel = bound(gpu, ndarray), bound(gpu, RawKernel)
    module.cuda = _cuda(gpu, module.ranges)
    return module


def _cuda(gpu: Gpu, ranges: list[str | None]) -> Any:
    return types.SimpleNamespace(
        **{kind.__name__: bound(gpu, kind) for kind in (Device, Stream, Event, MemoryPool, Memory)},
        MemoryPointer=MemoryPointer,
        memory=types.SimpleNamespace(
            BaseMemory=bound(gpu, BaseMemory), OutOfMemoryError=OutOfMemoryError
        ),
        using_allocator=partial(using_allocator, gpu),
        alloc_pinned_memory=lambda size: np.full(size, 0xFF, np.uint8),
        get_elapsed_time=get_elapsed_time,
        nvtx=types.SimpleNamespace(RangePush=ranges.append, RangePop=lambda: ranges.append(None)),
        cublas=types.SimpleNamespace(
            gemmEx=partial(gemmEx, gpu),
            gemmStridedBatchedEx=partial(gemmStridedBatchedEx, gpu),
            create=lambda: id(gpu.here.streams[-1]),
            destroy=lambda handle: None,
        ),
        runtime=types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=lambda: GPUS,
            driverGetVersion=lambda: 12090,
            getDeviceProperties=lambda gpu: {"uuid": b"GPU"},  # it ends where a byte is zero
            deviceGetPCIBusId=lambda gpu: f"0000:{gpu:02X}:00.0",
            deviceCanAccessPeer=lambda gpu, peer: 1,
            deviceEnablePeerAccess=partial(deviceEnablePeerAccess, gpu),
            eventQuery=partial(eventQuery, gpu),
            memcpyAsync=partial(memcpyAsync, gpu),
            memcpyPeerAsync=partial(memcpyPeerAsync, gpu),
            memcpyHostToDevice=TO_DEVICE,
            memcpyDeviceToHost=TO_HOST,
            memcpyDeviceToDevice=WITHIN,
        ),
    )
