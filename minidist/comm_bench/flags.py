"""The flags of `python -m minidist.comm_bench`: those of nccl-tests, with their letters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from minidist.bench.flags.kinds import DEVICE, OUTPUT_FILE, POSITIVE, Kind, flag, whole
from minidist.bench.flags.parse import read
from minidist.comm.spec import UNITS
from minidist.comm_bench.data import DTYPES, OPS
from minidist.comm_bench.verbs import VERBS
from minidist.errors import UsageError

PROGRAM = "python -m minidist.comm_bench"
PURPOSE = (
    "Time what replicas do together, alone or under mpiexec, and check to the bit what comes out."
)
ALL = "all"


def _bytes(text: str) -> int:
    match = re.fullmatch("([0-9]{1,12})([KMG]?)", text.upper())
    if match is None:
        raise ValueError(text)
    return int(match[1]) * UNITS[match[2]]


def _some(*known: str) -> Kind:
    def parse(text: str) -> tuple[str, ...]:
        given = known if text == ALL else tuple(dict.fromkeys(text.split(",")))
        if not set(given) <= set(known):
            raise ValueError(text)
        return given

    return Kind(parse, f"{ALL}, or with commas between them some of {', '.join(known)}")


def _specs(text: str) -> tuple[str, ...]:
    given = tuple(dict.fromkeys(text.split(",")))
    if "" in given:
        raise ValueError(text)
    return given


BYTES = Kind(_bytes, "a number of bytes such as 8, 64K, 16M or 1G")
SPECS = Kind(_specs, f"{ALL}, or specs with commas between them")


@dataclass(frozen=True)
class Sizes:
    """How large the buffers are."""

    min_bytes: int = flag(4 << 10, BYTES, "the first size", "b")
    max_bytes: int = flag(16 << 20, BYTES, "no size is above this", "e")
    step_factor: int = flag(16, whole(2, 1 << 20), "each size is so many times the last one", "f")


@dataclass(frozen=True)
class What:
    """What is done."""

    verb: tuple[str, ...] = flag(tuple(VERBS), _some(*VERBS), "what replicas do together")
    all_reduce_spec: tuple[str, ...] = flag(
        ("auto",),
        SPECS,
        "the communicators; mpi, under mpiexec, is MPI's own call, timed where it is made",
    )
    datatype: tuple[str, ...] = flag(("float32",), _some(*DTYPES), "of the elements", "d")
    op: tuple[str, ...] = flag(
        ("sum",),
        _some(*OPS),
        "the sum; times 1/n; or with replicas k = 0, 1, … counting 1, 2, 3, 1, 2, 3, … times",
        "o",
    )
    root: int = flag(0, whole(0), "the replica that broadcasts, or that reduce is for", "r")


@dataclass(frozen=True)
class Where:
    """Which replicas take part."""

    num_devices: int | None = flag(
        None, whole(1, 4096), "devices of each process; by default 2 alone, 1 under mpiexec", "g"
    )
    device: str = flag(
        "cpu",
        DEVICE,
        "the kind of device; processes that see the same GPUs of a machine take them one after the "
        "other, and cuda:0 lets all replicas share GPU 0",
    )


@dataclass(frozen=True)
class Calls:
    """How often."""

    iters: int = flag(20, whole(1), "calls that are timed", "n")
    warmup_iters: int = flag(5, whole(0), "calls before them that are not", "w")
    check: int = flag(1, whole(0), "calls after them on fresh data, whose results are checked", "c")
    timeout: float = flag(
        60.0, POSITIVE, "seconds after which it is an error that a process does not come", "T"
    )


@dataclass(frozen=True)
class Output:
    """What comes out."""

    json: str | None = flag(None, OUTPUT_FILE, "write all results to this file", "J")


GROUPS = (Sizes, What, Where, Calls, Output)


@dataclass(frozen=True)
class Flags(Output, Calls, Where, What, Sizes):
    """The flags of one run. Raises UsageError for flags that contradict each other."""

    def __post_init__(self) -> None:
        if self.max_bytes < self.min_bytes:
            raise UsageError(
                f"--max_bytes={self.max_bytes} is below --min_bytes={self.min_bytes}: there is no "
                "size in between"
            )
        if self.min_bytes == 0 and self.max_bytes > 0:
            raise UsageError(
                "--min_bytes=0 never gets larger by --step_factor; begin with 1, or give "
                "--max_bytes=0 too"
            )

    def sizes(self) -> Iterator[int]:
        """Return the sizes in bytes, rising."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            if size == 0:
                return
            size *= self.step_factor

    def __str__(self) -> str:
        """Return the flags as one would give them: those that are not as by default."""
        default = Flags().config()
        given = [(name, value) for name, value in self.config().items() if value != default[name]]
        return " ".join(["comm_bench", *(f"--{name}={value}" for name, value in given)])

    def config(self) -> dict[str, Any]:
        """Return the flags as JSON can hold them."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: ",".join(v) if isinstance(v, tuple) else v for name, v in values.items()}


def parse(arguments: Sequence[str]) -> Flags:
    """Return the flags that the arguments of a command (without its name) give.

    Raises UsageError for flags or values that are unknown, missing or contradictory. `--help` and
    `--version` print and raise SystemExit(0).
    """
    return read(arguments, Flags, GROUPS, PROGRAM, PURPOSE)
