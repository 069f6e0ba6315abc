"""Watch: the timeline of the measured steps, from which phases come and what --trace_file holds.

It costs little and is always on. Buffers are bounded, so phases are those of the last steps of a
long training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from minidist.instruments import profile
from minidist.instruments.primitives import Kept
from minidist.instruments.profile import Profile
from minidist.strategy import Strategy
from minidist.trace import Phases, Timeline, phases, words, write

STEPS = 100  # of which phases are the mean, at most


class Watch:
    """Listens during the measured steps, and plants the faults that the flags ask for."""

    def __init__(self, flags: Flags, crew: Crew, counts: Counts, strategy: Strategy) -> None:
        self._flags = flags
        self._crew = crew
        self._counts = counts
        self._timeline = Timeline()
        self._profile = Profile(strategy) if flags.profile else None
        self._kept = Kept()
        self._faults = Faults(flags.inject or ())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Listen within a with statement; what was heard is written on the way out."""
        try:
            with ExitStack() as stack:
                stack.enter_context(self._counts.counting())
                stack.enter_context(self._timeline.attached())
                if self._profile is not None:
                    stack.enter_context(self._profile)
                if self._flags.inject:  # last, and so within what is timed
                    stack.enter_context(observe.attached(self._faults))
                yield
        finally:
            self._write()

    @contextmanager
    def step(self, number: int, *, last: bool) -> Iterator[None]:
        """Say which step of the rows goes on; the last one's primitives are kept for a profile."""
        self._faults.step = number
        keeps = last and self._profile is not None
        try:
            with (
                observe.attached(self._kept) if keeps else observe.nothing,
                observe.span("step", f"step {number}", step=number),
            ):
                yield
        finally:
            self._faults.step = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let a with statement do what belongs to no step, and is not counted."""
        with self._counts.paused(), self._profile.paused() if self._profile else observe.nothing:
            yield

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
        brought = self._counts.json(), None if own is None else own.json(), self._profiled()
        every = self._crew.exchange("report", brought)
        return Found(
            merging.counts([counted for counted, _, _ in every]),
            merging.phases([timed for _, timed, _ in every]),
            merging.profile([profiled for _, _, profiled in every]),
        )

    def _profiled(self) -> list[profile.Figures] | None:
        if self._profile is None:
            return None
        if self._kept:
            self._profile.time_alone(self._kept)
        return self._profile.json()


@dataclass(frozen=True)
class Found:
    """What was counted, as the JSON has it, and where the time of the last steps went.

    phases: None where there was no step. profile: of each replica; None unless asked for.
    """

    counts: dict[str, Any]
    phases: Phases | None
    profile: list[profile.OfReplica] | None

    def lines(self) -> list[str]:
        """Return what a report says of it."""
        said = counts.lines(self.counts)
        said += [] if self.phases is None else words.lines(self.phases)
        return said + ([] if self.profile is None else profile.lines(self.profile))

    def json(self) -> dict[str, Any]:
        """Return the fields of a run's JSON."""
        fields: dict[str, Any] = {"phases": None, "hidden_share": None, "replicas": None}
        if self.phases is not None:
            fields = self.phases.json()
        timed = {key: fields[key] for key in ("phases", "hidden_share", "replicas")}
        profiled = None if self.profile is None else [each.json() for each in self.profile]
        return self.counts | timed | {"profile": profiled}
