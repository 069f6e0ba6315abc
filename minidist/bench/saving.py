"""What is kept of a training in its folder: checkpoints, and summaries on the way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from minidist.bench.crew import Crew
from minidist.bench.flags import Flags
from minidist.dtypes import HostArray
from minidist.nn import Layer
from minidist.optim import Optimizer
from minidist.summary import SummaryWriter
from minidist.train_dir import TrainDir

STOPPED_AT = "stopped at accuracy"  # in a checkpoint: what was asked for, and reached with it
SUMMARIES = ("summaries.jsonl", "summaries.csv", "events.out.tfevents.minidist")


class Keeper:
    """Saves a training when that is due: every so many steps or seconds, and at its end.

    `end` is how many steps there will be. Steps are counted from the very start, with those of the
    warm-up.
    """

    def __init__(
        self,
        flags: Flags,
        crew: Crew,
        folder: TrainDir,
        model: Layer,
        optimizer: Optimizer,
        end: int,
    ) -> None:
        self._flags = flags
        self._crew = crew
        self._folder = folder
        self._model = model
        self._optimizer = optimizer
        # In between there is a part of an update, which no checkpoint holds.
        self._update = flags.gradient_accumulation_steps
        self._end = end - end % self._update
        self.has_stopped = False
        self._step = 0  # of the last checkpoint
        self._time = time.monotonic()

    def resume(self) -> None:
        """Load the newest checkpoint, and note in `has_stopped` whether that was good enough."""
        self._step, extra = self._folder.load(self._model, self._optimizer)
        reached, enough = extra.get(STOPPED_AT), self._flags.stop_at_top_1_accuracy
        if reached is not None and enough is not None:
            self.has_stopped = reached >= enough

    def after(self, step: int, stop: bool = False) -> None:
        """Save after so many steps, if it is due or the training stops here."""
        if step % self._update == 0 and (stop or step == self._end or self._is_due(step)):
            extra = {STOPPED_AT: self._flags.stop_at_top_1_accuracy} if stop else {}
            self._folder.save(step, self._model, self._optimizer, extra=extra)
            self._step, self._time = step, time.monotonic()

    def _is_due(self, step: int) -> bool:
        steps, seconds = self._flags.save_model_steps, self._flags.save_model_secs
        if steps is not None:
            return step // steps > self._step // steps
        if seconds == 0:
            return False
        return self._crew.chiefs("look at the clock", time.monotonic() - self._time >= seconds)


class Summaries:
    """Writes numbers on the way as lines of JSON, as a table, and as events for TensorBoard.

    Only the chief does. A context manager that closes the files. Summaries of steps after
    `resumed_at`, which a killed training has left, are cut off.
    """

    def __init__(
        self, flags: Flags, crew: Crew, folder: TrainDir, model: Layer, resumed_at: int
    ) -> None:
        self._every = flags.save_summaries_steps
        self._verbosity = flags.summary_verbosity
        self._model = model
        self._open = ExitStack()
        self._writers = [
            self._open.enter_context(SummaryWriter(folder.path / name, resume_from=resumed_at))
            for name in crew.for_chief(SUMMARIES)
        ]

    def are_due(self, step: int) -> bool:
        """Whether there are some to write after so many steps, those of the warm-up counted."""
        return step % self._every == 0

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write numbers by their tags."""
        for writer in self._writers:
            for tag, number in numbers.items():
                writer.scalar(tag, number, step)

    def write_weights(self, step: int) -> None:
        """Write how the weights are distributed, as far as the flags want it."""
        variables = self._model.trainable_variables
        if self._verbosity >= 2:
            every = np.concatenate([np.ravel(variable) for variable in variables])
            self._histogram(step, "weights", every)
        if self._verbosity >= 3:
            for variable in variables:
                self._histogram(step, variable.name, np.asarray(variable))

    def _histogram(self, step: int, tag: str, values: HostArray) -> None:
        for writer in self._writers:
            writer.histogram(tag, values, step)

    def __enter__(self) -> Summaries:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()
