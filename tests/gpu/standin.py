"""A stand-in for CuPy on a machine without a GPU, as far as minidist uses it.

Its arrays lie in the host's memory, and work on them is done by NumPy, or by the fibers of
emulator.py, but not when it is given: each stream has a queue, and a `Gpu` does what is in the
queues in a random order, in which only events order streams among themselves, and as late as it
can. Memory that is made is full of NaN, and memory that is dropped is used again at once by its
stream. So an event that was forgotten, a buffer that is used again too early or a copy that is not
waited for shows as a wrong number.

`cupy(folder, seed)` makes a module of that name, with its own Gpu at `.gpu`.
"""

from __future__ import annotations

import ctypes
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from emulator import TYPES, Emulator

from minidist.kernels.source import modules

GPUS = 2
FUNCTIONS = [
    *("add", "subtract", "multiply", "divide", "power", "negative", "exp", "log", "sqrt"),
    *("equal", "less", "less_equal", "sum", "max", "argmax", "take", "argsort"),
    *("concatenate", "ascontiguousarray"),
]
LINE = 512  # bytes to which CuPy aligns memory


class Mark:
    """A position in a queue. Each recording of an event has its own."""

    def __init__(self) -> None:
        self.done = False
        self.at = 0  # pieces of work that were done before it, of all streams


class Gpu:
    """All streams of all GPUs, and who does what they were given."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.lock = threading.RLock()
        self.queues: list[deque[Any]] = []
        self.memory: list[np.ndarray] = []  # of all that was ever made: nothing is freed
        self.calls: list[str] = []  # what was given, in that order
        self.time = 0  # pieces that were done
        self.may_hang = False  # whether all streams may wait for something that never comes

    def give(self, queue: deque[Any], name: str, work: Any) -> None:
        with self.lock:
            self.calls.append(name)
            queue.append(work)

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
            if not ready and self.may_hang:
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


def cupy(folder: Path, seed: int = 0) -> Any:
    gpu, here = Gpu(seed), _Here()
    emulator = Emulator(folder, "shuffled")
    rng = random.Random(seed)

    def give(name: str, work: Any) -> None:
        assert here.streams, f"{name} was given to no stream of its own"
        gpu.give(here.streams[-1].queue, name, work)

    # --- memory

    class BaseMemory:
        @property
        def device(self) -> Any:
            return Device(self.device_id)

    class Memory(BaseMemory):
        def __init__(self, size: int) -> None:
            raw = np.full(size + LINE, 0xFF, np.uint8)
            gpu.memory.append(raw)
            self.ptr = -(-raw.ctypes.data // LINE) * LINE
            self.size, self.device_id = size, here.gpu[-1]

    class MemoryPointer:
        def __init__(self, mem: Any, offset: int) -> None:
            self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    class PooledMemory(BaseMemory):
        """Memory in use. As CuPy's, and as arrays of NumPy, it ends with the last reference to it,
        and not by the garbage collector, whose victims may be taken up again by who is told."""

        def __init__(self, memory: Any, free: list[Any]) -> None:
            self.ptr, self.size, self.device_id = memory.ptr, memory.size, memory.device_id
            self._hold = np.empty(0)
            weakref.finalize(self._hold, free.append, memory)

    class MemoryPool:
        def __init__(self, allocator: Callable[[int], Any]) -> None:
            self._allocator = allocator
            self._free: dict[Any, list[Any]] = {}

        def malloc(self, size: int) -> Any:
            size = -(-size // LINE) * LINE
            key = here.streams[-1], size
            free = self._free.setdefault(key, [])
            memory = free.pop() if free else self._allocator(size).mem
            return MemoryPointer(PooledMemory(memory, free), 0)

        def free_all_blocks(self) -> None:
            self._free.clear()

    @contextmanager
    def using_allocator(allocator: Any) -> Any:
        here.allocators.append(allocator)
        yield
        here.allocators.pop()

    # --- arrays

    class ndarray:
        def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None) -> None:
            dtype = np.dtype(dtype)
            shape = (shape,) if isinstance(shape, int) else tuple(shape)
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            self.data = here.allocators[-1](nbytes) if memptr is None else memptr
            self.host = at(self.data.ptr, nbytes).view(dtype).reshape(shape)

        @property
        def flags(self) -> Any:
            return types.SimpleNamespace(c_contiguous=self.host.flags.c_contiguous)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            about = dict(self.host.__array_interface__, version=3, stream=here.streams[-1].ptr)
            return about if self.size else {**about, "data": (0, False)}

        def __dlpack__(self, *, stream: int) -> Any:
            mark = Mark()
            gpu.give(here.streams[-1].queue, "record", mark)
            gpu.give(streams[stream].queue, "wait", Wait(mark))
            return self

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, self.data.device_id

        def __len__(self) -> int:
            return len(self.host)

        def _view(self, host: np.ndarray) -> Any:
            view = ndarray.__new__(ndarray)
            offset = host.ctypes.data - self.data.mem.ptr if host.size else 0
            view.data, view.host = MemoryPointer(self.data.mem, offset), host
            return view

        def __getitem__(self, index: Any) -> Any:
            index = index if isinstance(index, tuple) else (index,)
            return self._view(self.host[index if Ellipsis in index else (*index, ...)])

        def __setitem__(self, index: Any, value: Any) -> None:
            into, index, value = self.host, plain(index), plain(value)
            give("set", lambda: into.__setitem__(index, value))

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
            give("fill", lambda: into.fill(value))

        def astype(self, dtype: Any, copy: bool = True) -> Any:
            if not copy and self.host.dtype == dtype:
                return self
            return lazy(lambda a: a.astype(dtype), "astype")(self)

    for name in ("shape", "dtype", "size", "nbytes", "ndim", "itemsize", "strides"):
        setattr(ndarray, name, property(lambda self, name=name: getattr(self.host, name)))

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

    def lazy(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def given(*args: Any, out: Any = None, **options: Any) -> Any:
            args = plain(args)
            with np.errstate(all="ignore"):
                like = np.asarray(function(*zeros(args), **options))
            result = ndarray(like.shape, like.dtype) if out is None else out
            into = result.host
            give(name, lambda: np.copyto(into, function(*args, **options), casting="same_kind"))
            return result

        return given

    def from_dlpack(x: Any) -> Any:
        kind, number = x.__dlpack_device__()
        assert (kind, number) == (2, here.gpu[-1])
        return x.__dlpack__(stream=here.streams[-1].ptr)

    def asarray(x: Any) -> Any:
        about = x.__cuda_array_interface__
        streams[about["stream"]].synchronize()
        memory = types.SimpleNamespace(ptr=about["data"][0], device_id=here.gpu[-1], of=x)
        return ndarray(about["shape"], about["typestr"], MemoryPointer(memory, 0))

    def unique(a: Any, return_inverse: bool) -> Any:
        assert return_inverse
        here.streams[-1].synchronize()
        results = []
        for values in np.unique(a.host, return_inverse=True):
            result = ndarray(values.shape, values.dtype)
            give("unique", lambda into=result.host, values=values: np.copyto(into, values))
            results.append(result)
        return tuple(results)

    # --- streams

    class Device:
        def __init__(self, number: int) -> None:
            self.id = number

        def __enter__(self) -> Any:
            here.gpu.append(self.id)
            return self

        def __exit__(self, *_: object) -> None:
            here.gpu.pop()

    class Stream:
        def __init__(self, *, non_blocking: bool) -> None:
            assert non_blocking
            self.queue: deque[Any] = deque()
            self.device_id = here.gpu[-1]
            self.ptr = id(self)
            with gpu.lock:
                gpu.queues.append(self.queue)
            streams[self.ptr] = self

        def __enter__(self) -> Any:
            assert here.gpu[-1] == self.device_id, "a stream is used where another GPU is current"
            here.streams.append(self)
            return self

        def __exit__(self, *_: object) -> None:
            here.streams.pop()

        def wait_event(self, event: Any) -> None:
            gpu.give(self.queue, "wait", Wait(event.mark))

        def synchronize(self) -> None:
            mark = Mark()
            gpu.give(self.queue, "synchronize", mark)
            gpu.finish(mark)

    streams: dict[int, Any] = {}

    class Event:
        def __init__(self, *, disable_timing: bool) -> None:
            self.mark = Mark()
            self.mark.done = True
            self.disable_timing = disable_timing

        def record(self, stream: Any) -> None:
            self.mark = Mark()
            gpu.give(stream.queue, "record", self.mark)

        @property
        def done(self) -> bool:
            """Whether it has happened. That who asks again and again gets on, something is done."""
            for _ in range(rng.randrange(4)):
                if not self.mark.done:
                    gpu.step()
            return self.mark.done

    def get_elapsed_time(start: Any, end: Any) -> float:
        assert start.mark.done and end.mark.done and not start.disable_timing
        return 1000.0 * (end.mark.at - start.mark.at)  # each takes a second

    # --- copies, kernels and products

    def move(name: str, to: int, source: int, size: int, stream: int) -> None:
        into, values = at(to, size), at(source, size)
        gpu.give(streams[stream].queue, name, lambda: np.copyto(into, values))

    def memcpyAsync(to: int, source: int, size: int, kind: int, stream: int) -> None:
        move("copy", to, source, size, stream)

    def memcpyPeerAsync(to: int, gpu: int, source: int, other: int, size: int, stream: int) -> None:
        assert gpu != other
        move("copy from a peer", to, source, size, stream)

    class RawKernel:
        def __init__(self, code: str, name: str, *, options: tuple[str, ...], backend: str) -> None:
            (self._module,) = (m for m in modules() if m.text == code and m.options == options)
            self._name = name

        def __call__(self, grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
            launch = (self._module, self._name, grid, block[0], arguments)
            give(self._name, lambda: emulator.launch(*launch))

    def gemmEx(
        handle: Any, b_turned: int, a_turned: int, m: int, n: int, k: int, *rest: Any
    ) -> None:
        assert handle == id(here.streams[-1]), "cuBLAS keeps memory for each of its handles"
        one, b, b_type, ldb, a, a_type, lda, other, out, out_type, ldc, compute, _ = rest
        kinds = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}

        def matrix(address: int, kind: int, rows: int, columns: int, stride: int) -> np.ndarray:
            assert stride == max(columns, 1)
            dtype = TYPES[kinds[kind]]
            return at(address, rows * columns * dtype.itemsize).view(dtype).reshape(rows, columns)

        left = matrix(a, a_type, *((k, n) if a_turned else (n, k)), lda)
        right = matrix(b, b_type, *((m, k) if b_turned else (k, m)), ldb)
        into = matrix(out, out_type, n, m, ldc)
        wide = np.dtype(np.float64 if compute == 70 else np.float32)
        assert at(one, wide.itemsize).view(wide)[0] == 1
        before = at(other, wide.itemsize).view(wide)[0].copy()

        def multiply() -> None:
            x, y = (np.asarray(each, wide) for each in (left, right))
            product = (x.T if a_turned else x) @ (y.T if b_turned else y)
            if before:
                product += np.asarray(into, wide)
            into[...] = product.astype(into.dtype)

        give("gemm", multiply)

    ranges: list[str | None] = []  # pushed; and popped: None
    module: Any = types.ModuleType("cupy")
    module.ranges = ranges
    for name in FUNCTIONS:
        setattr(module, name, lazy(getattr(np, name), name))
    module.from_dlpack, module.asarray = from_dlpack, asarray
    module.streams, module.here = streams, here
    module.ndarray, module.unique, module.RawKernel, module.gpu = ndarray, unique, RawKernel, gpu
    module.streams = streams  # by what CuPy calls their ptr

    class CUDARuntimeError(RuntimeError):
        pass

    class OutOfMemoryError(MemoryError):
        pass

    module.cuda = types.SimpleNamespace(
        Device=Device,
        Stream=Stream,
        Event=Event,
        nvtx=types.SimpleNamespace(RangePush=ranges.append, RangePop=lambda: ranges.append(None)),
        get_elapsed_time=get_elapsed_time,
        MemoryPool=MemoryPool,
        MemoryPointer=MemoryPointer,
        Memory=Memory,
        memory=types.SimpleNamespace(BaseMemory=BaseMemory, OutOfMemoryError=OutOfMemoryError),
        using_allocator=using_allocator,
        alloc_pinned_memory=lambda size: np.full(size, 0xFF, np.uint8),
        cublas=types.SimpleNamespace(
            gemmEx=gemmEx, create=lambda: id(here.streams[-1]), destroy=lambda handle: None
        ),
        runtime=types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=lambda: GPUS,
            getDeviceProperties=lambda gpu: {"uuid": bytes([gpu] * 16)},
            deviceCanAccessPeer=lambda gpu, peer: 1,
            deviceEnablePeerAccess=lambda peer: None,
            memcpyAsync=memcpyAsync,
            memcpyPeerAsync=memcpyPeerAsync,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyDeviceToDevice=3,
        ),
    )
    return module
