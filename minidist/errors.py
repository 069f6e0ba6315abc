"""Every exception minidist raises of its own, each a sentence: what, who, where and the cure.

Where a built-in type says it best (a wrong shape is a ValueError) the class here is also that
type, so that callers may catch either.
"""

from __future__ import annotations

from typing import Any


class MinidistError(Exception):
    """Base of every error that minidist defines."""


class NotBuiltError(MinidistError, ImportError):
    """The compiled parts are missing or do not fit this Python."""


class ContextError(MinidistError, RuntimeError):
    """A call was made in the wrong context: replica, cross-replica, or another strategy's."""


class StructureError(MinidistError, ValueError):
    """Nested structures that should have the same shape do not."""


class ShapeError(MinidistError, ValueError):
    """Shapes or dtypes do not fit an operation."""


class MergeMismatchError(MinidistError, RuntimeError):
    """Replicas made a different number of merge_calls, or met with different intentions."""


class HangError(MinidistError, TimeoutError):
    """A peer did not arrive within the deadline."""


class ClusterError(MinidistError, RuntimeError):
    """Processes cannot be brought together: MPI is missing, or they contradict each other."""


class PeerError(MinidistError, RuntimeError):
    """Another rank has failed or ended, so what is done together cannot go on."""


class RaceError(MinidistError, RuntimeError):
    """Nothing orders two accesses to the same memory: the checking mode has found it."""


class ClosedError(MinidistError, RuntimeError):
    """What was closed takes nothing in any more, and nothing is left in it."""


class ForkError(MinidistError, RuntimeError):
    """The process was forked after replica threads had started."""


class ThreadError(MinidistError, RuntimeError):
    """The system starts no more threads for this process."""


class NonFiniteError(MinidistError, ArithmeticError):
    """A loss or gradient is NaN or infinite."""


class OutOfMemoryError(MinidistError, MemoryError):
    """There is no memory for what a layer computes.

    `name` is the layer's, behind those of the models it is in; `nbytes` it asked for, or None.
    """

    def __init__(self, message: str, layer: Any, name: str, nbytes: int | None) -> None:
        super().__init__(message)
        self.layer = layer
        self.name = name
        self.nbytes = nbytes


class InjectedError(MinidistError, RuntimeError):
    """A replica was made to fail on purpose."""


class EndOfDataError(MinidistError, EOFError):
    """A data set has no more batches.

    Where run_steps meets the end between two of its steps, `context` is the MultiStepContext with
    what the last full step has set; else it is None.
    """

    context: Any = None


class DataError(MinidistError, OSError):
    """A data file is missing, truncated or not what it should be."""


class MalformedError(MinidistError, ValueError):
    """Bytes are damaged, or not of the format that they should have.

    Who knows the file that they lie in says that too.
    """


class ImageError(DataError):
    """An encoded image is damaged, or of a kind that is not read.

    `byte` is where in it, from 0. Who knows the file that it lies in says that too.
    """

    def __init__(self, byte: int, message: str) -> None:
        super().__init__(message)
        self.byte = byte


class UsageError(MinidistError, ValueError):
    """An option has an unknown name or value, or contradicts another one."""
