"""NCCL, through whichever of two bindings is installed: NVIDIA's own, nccl4py, or else CuPy's.

What they call things differs, and nothing else above knows it. nccl4py's communicators are not
blocking: a call returns at once, and `state` says when NCCL is ready for the next one. CuPy's know
nothing of that, and a call of theirs may wait for other ranks.

A *handle* is NCCL's communicator: one rank's part of it. Arrays are given by their addresses,
streams by CUDA's. Numbers of types, operations and results are those of NCCL's header `nccl.h`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minidist.errors import UsageError

TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
SUM, AVERAGE = 0, 4  # operations
READY, IN_PROGRESS = 0, 7  # results
SEVERAL_SINCE = 2_30_00  # the version from which on ranks may share a GPU
# CUDA's version from which on NCCL orders kernels by their launches. Before, by their ends: then
# the kernel of one rank of a GPU would wait for another's end, which itself waits for the first.
OVERLAP_SINCE = 12030
SETTINGS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # ranks may share a GPU
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # of several communicators that a program gives work to
    "NCCL_RUNTIME_CONNECT": "0",  # ranks connect when they join: later it would take memory
}


class Library(ABC):
    """One binding, by its name. version: NCCL's own, as 23203 for 2.32.3."""

    name: str
    version: int
    blocking: bool  # whether a call may wait for other ranks

    @property
    def words(self) -> str:
        """The version and the binding, as "2.32.3 through nccl4py"."""
        rest, patch = divmod(self.version, 100)
        major, minor = divmod(rest, 100)
        return f"{major}.{minor}.{patch} through {self.name}"

    @property
    def several(self) -> bool:
        """Whether several ranks may share a GPU: by this version, the settings and the driver."""
        allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return self.version >= SEVERAL_SINCE and allowed and self._overlaps

    @property
    def _overlaps(self) -> bool:
        """Whether kernels of several ranks can run on one GPU at the same time."""
        import cupy

        known: int = cupy.cuda.runtime.driverGetVersion()
        return known >= OVERLAP_SINCE or os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1"

    @abstractmethod
    def new_id(self) -> bytes:
        """Return a name for a new communicator, which all of its ranks must know to join."""

    @abstractmethod
    def join(self, name: bytes, count: int, rank: int, most_blocks: int) -> Any:
        """Become a rank of so many, on the current GPU; return the handle.

        most_blocks: how many thread blocks of the GPU a kernel of this rank takes at most.
        """

    @contextmanager
    def group(self) -> Iterator[None]:
        """Let what is called meanwhile begin together: ranks of one thread wait for each other."""
        self._start_group()
        try:
            yield
        finally:
            self._end_group()

    @abstractmethod
    def _start_group(self) -> None: ...

    @abstractmethod
    def _end_group(self) -> None: ...

    @abstractmethod
    def state(self, handle: Any) -> int:
        """Return READY, IN_PROGRESS, or the result of what has gone wrong."""

    @abstractmethod
    def said(self, result: int) -> str:
        """Return NCCL's words for a result."""

    @abstractmethod
    def finish(self, handle: Any) -> None:
        """Begin to end: wait for all ranks to have done everything."""

    @abstractmethod
    def free(self, handle: Any) -> None:
        """End; what was to be done is."""

    @abstractmethod
    def abort(self, handle: Any) -> None:
        """End at once, whatever is under way."""

    # Each puts one piece of work on a stream.

    @abstractmethod
    def all_reduce(
        self, handle: Any, sent: int, into: int, count: int, kind: int, how: int, stream: int
    ) -> None: ...

    @abstractmethod
    def reduce(
        self,
        handle: Any,
        sent: int,
        into: int,
        count: int,
        kind: int,
        how: int,
        root: int,
        stream: int,
    ) -> None: ...

    @abstractmethod
    def reduce_scatter(
        self, handle: Any, sent: int, into: int, count: int, kind: int, how: int, stream: int
    ) -> None:
        """count: elements that each rank gets."""

    @abstractmethod
    def broadcast(
        self, handle: Any, sent: int, into: int, count: int, kind: int, root: int, stream: int
    ) -> None: ...

    @abstractmethod
    def send(self, handle: Any, sent: int, count: int, kind: int, to: int, stream: int) -> None: ...

    @abstractmethod
    def receive(
        self, handle: Any, into: int, count: int, kind: int, source: int, stream: int
    ) -> None: ...


class Nccl4py(Library):
    """NVIDIA's binding. Its lower layer, as the upper one looks for PyTorch at each call."""

    name = "nccl4py"
    blocking = False

    def __init__(self) -> None:
        from nccl.bindings import nccl

        self._nccl = nccl
        self.version = nccl.get_version()

    def new_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def join(self, name: bytes, count: int, rank: int, most_blocks: int) -> Any:
        config = self._nccl.Config()
        config.blocking = 0
        config.max_ctas = most_blocks
        unique = self._nccl.UniqueId.from_buffer(bytearray(name))
        return self._nccl.comm_init_rank_config(count, unique, rank, config)

    def _start_group(self) -> None:
        self._nccl.group_start()

    def _end_group(self) -> None:
        self._nccl.group_end()

    def state(self, handle: Any) -> int:
        return int(self._nccl.comm_get_async_error(handle))

    def said(self, result: int) -> str:
        words: str = self._nccl.get_error_string(result)
        return words

    def finish(self, handle: Any) -> None:
        self._nccl.comm_finalize(handle)

    def free(self, handle: Any) -> None:
        self._nccl.comm_destroy(handle)

    def abort(self, handle: Any) -> None:
        self._nccl.comm_abort(handle)

    def all_reduce(
        self, handle: Any, sent: int, into: int, count: int, kind: int, how: int, stream: int
    ) -> None:
        self._nccl.all_reduce(sent, into, count, kind, how, handle, stream)

    def reduce(
        self,
        handle: Any,
        sent: int,
        into: int,
        count: int,
        kind: int,
        how: int,
        root: int,
        stream: int,
    ) -> None:
        self._nccl.reduce(sent, into, count, kind, how, root, handle, stream)

    def reduce_scatter(
        self, handle: Any, sent: int, into: int, count: int, kind: int, how: int, stream: int
    ) -> None:
        self._nccl.reduce_scatter(sent, into, count, kind, how, handle, stream)

    def broadcast(
        self, handle: Any, sent: int, into: int, count: int, kind: int, root: int, stream: int
    ) -> None:
        self._nccl.broadcast(sent, into, count, kind, root, handle, stream)

    def send(self, handle: Any, sent: int, count: int, kind: int, to: int, stream: int) -> None:
        self._nccl.send(sent, count, kind, to, handle, stream)

    def receive(
        self, handle: Any, into: int, count: int, kind: int, source: int, stream: int
    ) -> None:
        self._nccl.recv(into, count, kind, source, handle, stream)


class OfCupy(Library):
    """CuPy's binding, whose objects make the calls."""

    name = "CuPy"
    blocking = True

    def __init__(self) -> None:
        from cupy.cuda import nccl

        self._nccl = nccl
        self.version = nccl.get_version()

    def new_id(self) -> bytes:
        name: bytes = self._nccl.get_unique_id()
        return name

    def join(self, name: bytes, count: int, rank: int, most_blocks: int) -> Any:
        return self._nccl.NcclCommunicator(count, name, rank)

    def _start_group(self) -> None:
        self._nccl.groupStart()

    def _end_group(self) -> None:
        self._nccl.groupEnd()

    def state(self, handle: Any) -> int:
        try:
            handle.check_async_error()
        except self._nccl.NcclError as failure:
            return int(failure.status)
        except KeyError as failure:  # a result that this binding has no name for
            return int(failure.args[0])
        return READY

    def said(self, result: int) -> str:
        return str(self._nccl.NcclError(result))

    def finish(self, handle: Any) -> None:
        """`free` does it."""

    def free(self, handle: Any) -> None:
        handle.destroy()

    def abort(self, handle: Any) -> None:
        handle.abort()

    def all_reduce(
        self, handle: Any, sent: int, into: int, count: int, kind: int, how: int, stream: int
    ) -> None:
        handle.allReduce(sent, into, count, kind, how, stream)

    def reduce(
        self,
        handle: Any,
        sent: int,
        into: int,
        count: int,
        kind: int,
        how: int,
        root: int,
        stream: int,
    ) -> None:
        handle.reduce(sent, into, count, kind, how, root, stream)

    def reduce_scatter(
        self, handle: Any, sent: int, into: int, count: int, kind: int, how: int, stream: int
    ) -> None:
        handle.reduceScatter(sent, into, count, kind, how, stream)

    def broadcast(
        self, handle: Any, sent: int, into: int, count: int, kind: int, root: int, stream: int
    ) -> None:
        handle.broadcast(sent, into, count, kind, root, stream)

    def send(self, handle: Any, sent: int, count: int, kind: int, to: int, stream: int) -> None:
        handle.send(sent, count, kind, to, stream)

    def receive(
        self, handle: Any, into: int, count: int, kind: int, source: int, stream: int
    ) -> None:
        handle.recv(into, count, kind, source, stream)


def load() -> Library:
    """Return NCCL through the better binding that there is; importing it starts nothing.

    Sets what NCCL reads from the environment, where nobody has: see SETTINGS.
    Raises UsageError where there is neither.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    causes = []
    for binding in (Nccl4py, OfCupy):
        try:
            return binding()
        except (ImportError, RuntimeError) as cause:
            causes.append(f"{binding.name}: {cause}")
    raise UsageError(
        f"nccl needs NCCL, which cannot be loaded ({'; '.join(causes)}); pip install "
        "'minidist[cuda12]', or 'minidist[cuda13]' for CUDA 13, or use auto"
    )
