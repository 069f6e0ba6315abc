"""The flags of the command: each is written once, in the table of its group.

job.py has what is trained and for how long, input.py how examples are read, distribution.py the
policy, processes.py who takes part, optimisation.py the update, results.py what comes out. kinds.py
says what a flag can take, contradictions.py which do not go together, rates.py which learning rate
follows from them, parse.py reads a command line.

Names are those of tf_cnn_benchmarks. Defaults are the main job.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from minidist import models
from minidist.bench.flags import rates
from minidist.bench.flags.contradictions import DURING_TRAINING, check
from minidist.bench.flags.distribution import ALL, Distribution
from minidist.bench.flags.input import Input
from minidist.bench.flags.job import Length, Mode, Selection
from minidist.bench.flags.optimisation import LEARNING_RATES, LOSS_SCALE, Optimisation, Precision
from minidist.bench.flags.processes import Processes
from minidist.bench.flags.results import Checkpoints, Evaluation, Instruments, Output
from minidist.data import SOURCES
from minidist.models.recipe import Recipe
from minidist.optim.schedules import PerEpoch, Piecewise, exact
from minidist.variable_mgr import PolicyOptions

__all__ = ["ALL", "GROUPS", "LEARNING_RATES", "Flags"]

Value = str | int | float | bool | None

GROUPS = (
    *(Selection, Length, Mode, Input, Distribution, Processes, Optimisation, Precision),
    *(Evaluation, Checkpoints, Output, Instruments),
)


OPTIONS = fields(PolicyOptions)


@dataclass(frozen=True)
class Flags(  # of its bases a dataclass has the last one's fields first
    Instruments,
    Output,
    Checkpoints,
    Evaluation,
    Precision,
    Optimisation,
    Processes,
    Distribution,
    Input,
    Mode,
    Length,
    Selection,
):
    """The flags of one run, by name. Without values they are the main job.

    What is None, and follows from other flags, is filled in. Raises UsageError for flags that
    contradict each other.
    """

    def __post_init__(self) -> None:
        check(self)
        if self.num_batches is None and self.num_epochs is None:
            self._fill("num_epochs", self.recipe.num_epochs)
        if self.batch_size is None:
            self._fill("batch_size", self.recipe.batch_size)
        if self.optimizer is None:
            self._fill("optimizer", self.recipe.optimizer)
        if self.gradient_clip is None and self.gradient_clip_norm is None:
            self._fill("gradient_clip_norm", self.recipe.gradient_clip_norm)
        for name, value in rates.missing(self).items():
            if getattr(self, name) is None:
                self._fill(name, value)
        if self.use_fp16 and self.fp16_loss_scale is None:
            self._fill("fp16_loss_scale", LOSS_SCALE)
        if self.eval_batch_size is None:
            self._fill("eval_batch_size", self.batch_size)
        if self.summary_verbosity is None:
            self._fill("summary_verbosity", int(self.save_summaries_steps > 0))

    def _fill(self, name: str, value: Value) -> None:
        object.__setattr__(self, name, value)

    def steps(self, batches_per_epoch: int) -> int:
        """Return how many steps are measured: those of the last epoch, begun, are all done."""
        if self.num_batches is not None:
            return self.num_batches
        assert self.num_epochs is not None  # by __post_init__
        return in_steps(self.num_epochs, batches_per_epoch)

    def learning_rate(self, batches_per_epoch: int, batch: int) -> Callable[[int], float]:
        """Return the learning rate as a function of the steps that were done before.

        batch: the examples of a global batch.
        """
        return PerEpoch(rates.schedule(self, batch), batches_per_epoch)

    @property
    def recipe(self) -> Recipe:
        """What flags that are not given follow: the model's for this data, or what is usual."""
        return models.recipe_for(self.model, self.data_name)

    @property
    def reads_encoded_images(self) -> bool:
        """Whether the data set is files of images, which are decoded as they are read."""
        return self.data_dir is not None and SOURCES[self.data_name].any_shape

    @property
    def activations(self) -> str | None:
        """The dtype that activations are stored in; None: that of the images."""
        return "float16" if self.use_fp16 else "bfloat16" if self.use_bf16 else None

    @property
    def evaluates_during_training(self) -> bool:
        """Whether there are evaluations on the way of a training."""
        return any(getattr(self, name) is not None for name in DURING_TRAINING)

    def policy_options(self) -> PolicyOptions:
        """Return what the policy is told: its options bear the flags' names.

        Raises UsageError for what is wrong with them.
        """
        return PolicyOptions(**{item.name: getattr(self, item.name) for item in OPTIONS})

    def config(self) -> dict[str, Value]:
        """Return the flags as JSON can hold them: schedules and lists as their text."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}


def in_steps(epochs: float, batches_per_epoch: int) -> int:
    """Return after how many steps so many epochs are over: 1.1 of 10 batches after 11, not 12."""
    return math.ceil(exact(epochs) * Fraction(batches_per_epoch))


def _plain(value: Any) -> Value:
    if isinstance(value, tuple):
        return ",".join(map(repr, value))
    return str(value) if isinstance(value, Piecewise) else value
