"""Watch: the timeline of the measured steps, from which phases come and what --trace_file holds.

It costs little and is always on. Buffers are bounded, so phases are those of the last steps of a
long training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist import observe
from minidist.bench import counts, merging
from minidist.bench.counts import Counts
from minidist.bench.crew import Crew
from minidist.bench.flags import Flags
from minidist.bench.inject import Faults
from minidist.errors import MinidistError
from minidist.trace import Phases, Timeline, phases, words, write

STEPS = 100  # of which phases are the mean, at most


class Watch:
    """Listens during the measured steps, and plants the faults that the flags ask for."""

    def __init__(self, flags: Flags, crew: Crew, counts: Counts) -> None:
        self._flags = flags
        self._crew = crew
        self._counts = counts
        self._timeline = Timeline()
        self._faults = Faults(flags.inject or ())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Listen within a with statement; what was heard is written on the way out."""
        try:
            with self._counts.counting(), self._timeline.attached():
                if not self._flags.inject:
                    yield
                else:
                    with observe.attached(self._faults):  # later, and so within what is timed
                        yield
        finally:
            self._write()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Say which step of the rows goes on."""
        self._faults.step = number
        try:
            with observe.span("step", f"step {number}", step=number):
                yield
        finally:
            self._faults.step = None

    def paused(self) -> AbstractContextManager[None]:
        """Return a with statement's way to do what belongs to no step, and is not counted."""
        return self._counts.paused()

    def _write(self) -> None:
        if self._flags.trace_file is None:
            return
        file = self._crew.own_file(self._flags.trace_file)
        try:
            write(Path(file), self._timeline.recording().last(self._flags.trace_steps))
        except OSError as error:
            raise MinidistError(
                f"--trace_file={file}: the trace could not be written: {error.strerror or error}"
            ) from error

    def found(self) -> Found:
        """Return what was found in all workers, all of which must call it."""
        own = phases(self._timeline.recording().last(STEPS))
        brought = self._counts.json(), None if own is None else own.json()
        every = self._crew.exchange("report", brought)
        return Found(
            merging.counts([counted for counted, _ in every]),
            merging.phases([timed for _, timed in every]),
        )


@dataclass(frozen=True)
class Found:
    """What was counted, as the JSON has it, and where the time of the last steps went.

    phases: None where there was no step.
    """

    counts: dict[str, Any]
    phases: Phases | None

    def lines(self) -> list[str]:
        """Return what a report says of it."""
        return counts.lines(self.counts) + ([] if self.phases is None else words.lines(self.phases))

    def json(self) -> dict[str, Any]:
        """Return the fields of a run's JSON."""
        fields: dict[str, Any] = {"phases": None, "hidden_share": None, "replicas": None}
        if self.phases is not None:
            fields = self.phases.json()
        return self.counts | {key: fields[key] for key in ("phases", "hidden_share", "replicas")}
