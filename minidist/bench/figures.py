"""Figures: what the measured steps have shown, in this worker and then in all.

A worker knows only its own part of a batch. Before something is printed the workers bring their
figures together, and the loss of a step is then that of the whole batch, to the bit as one process
with all replicas would have found it. Nothing of that is in a step's time.

Workers that are not in step (--nocross_replica_sync) do it once, at the end; until then each has
its own figures only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from minidist.bench import report
from minidist.bench.crew import Crew
from minidist.train import Accuracy, StepResult, mean_loss


class Figures:
    """Steps of the rows: `steps` and `images` by step, as far as they are settled.

    in_step: whether the workers are, so that all settle after the same steps.
    """

    def __init__(self, crew: Crew, *, in_step: bool) -> None:
        self._crew = crew
        self._in_step = in_step
        self._own: list[Any] = []  # of all steps: number, loss of the weights, seconds, results
        self.steps: list[report.Step] = []
        self.images: list[int] = []
        self.accuracy = Accuracy.of(())  # on the last settled step's batch
        self.elapsed = 0.0  # seconds, of the worker that took longest

    @property
    def loss(self) -> float:
        """That of the last settled step."""
        return self.steps[-1].loss

    def add(self, step: int, results: Sequence[StepResult], weights: float, seconds: float) -> None:
        """Note what a step has shown here. weights: the share of the weights in the loss."""
        self._own.append((step, weights, seconds, [astuple(result) for result in results]))

    def settle(self) -> None:
        """Bring together what was added. All workers that are in step must call it."""
        own = self._own[len(self.steps) :]
        self._take(self._crew.exchange("settle figures", own) if self._in_step else [own])

    def finish(self, elapsed: float) -> None:
        """Settle what is left, at the end. All workers must call it."""
        if not self._in_step:
            self.steps, self.images = [], []
        own = self._own[len(self.steps) :]
        found = self._crew.exchange("settle all figures", [own, elapsed])
        self._take([steps for steps, _ in found])
        self.elapsed = max(seconds for _, seconds in found)

    def _take(self, found: Sequence[Sequence[Any]]) -> None:
        """Add steps: what each worker has found of each of them."""
        for each in zip(*found, strict=True):
            results = [StepResult(*result) for _, _, _, own in each for result in own]
            step, weights, _, _ = each[0]
            seconds = sum(of_worker[2] for of_worker in each) / len(each)
            self.steps.append(report.Step(step, mean_loss(results) + weights, seconds))
            self.images.append(sum(result.count for result in results))
            self.accuracy = Accuracy.of(results)
