"""The accuracy over the test part: of a checkpoint, at a training's end, and on its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from math import prod

from minidist import data
from minidist.bench import making, report
from minidist.bench.flags import Flags, in_steps
from minidist.nn import Layer
from minidist.optim.schedules import exact
from minidist.strategy import Strategy
from minidist.train import Accuracy, evaluate


class Evaluation:
    """Evaluates a model on as much of the test part as the flags want. It changes nothing."""

    def __init__(
        self,
        flags: Flags,
        workers: int,
        strategy: Strategy,
        model: Layer,
        split: data.Split,
    ) -> None:
        self._flags = flags
        self._strategy = strategy
        self._model = model
        self._batches = making.test_batches(flags, workers, split)
        self.num_batches = flags.num_eval_batches or in_steps(
            flags.num_eval_epochs or 1.0, self._batches.batches_per_epoch
        )
        self.num_epochs = self.num_batches / self._batches.batches_per_epoch

    def __call__(self, after: Callable[[int], None] | None = None) -> Accuracy:
        """Return the accuracy over all workers, which all of them must ask for.

        `after` is called after each batch with the number of its examples, over all workers.
        """
        sizes = self._sizes()
        return evaluate(
            self._strategy,
            self._model,
            islice(self._batches, self.num_batches),
            dtype=self._flags.activations,
            after=None if after is None else lambda _: after(next(sizes)),
        )

    def _sizes(self) -> Iterator[int]:
        """Give how many examples, each with a label of its own, each batch has."""
        batches, each = self._batches, prod(self._batches.split.label_shape)
        while True:
            for begin in range(0, len(batches.split), batches.batch_size):
                yield each * min(batches.batch_size, len(batches.split) - begin)

    def with_rows(self) -> tuple[Accuracy, float]:
        """Evaluate, print the speed every few batches, and return the accuracy and images/sec."""
        started = last = time.perf_counter()
        batches = seen = total = 0

        def after(examples: int) -> None:
            nonlocal last, batches, seen, total
            batches, seen, total = batches + 1, seen + examples, total + examples
            if batches % self._flags.display_every == 0:
                now = time.perf_counter()
                print(report.eval_row(batches, seen / (now - last)), flush=True)
                last, seen = now, 0

        accuracy = self(after)
        return accuracy, total / (time.perf_counter() - started)


def due(flags: Flags, batches_per_epoch: int) -> Callable[[int], bool]:
    """Return whether to evaluate after a step, as a function of its number from 1."""
    every_n_steps = flags.eval_during_training_every_n_steps
    if every_n_steps is not None:
        return lambda step: step % every_n_steps == 0
    if flags.eval_during_training_every_n_epochs is not None:
        period = exact(flags.eval_during_training_every_n_epochs) * batches_per_epoch
        return lambda step: step // period > (step - 1) // period
    steps = set(flags.eval_during_training_at_specified_steps or ())
    for epochs in flags.eval_during_training_at_specified_epochs or ():
        steps.add(in_steps(epochs, batches_per_epoch))
    return steps.__contains__
