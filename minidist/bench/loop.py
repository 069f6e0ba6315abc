"""The loop of a training: a step, and what may follow it: a row, an evaluation, a checkpoint.

Steps are counted from the very start of a training, also where it was interrupted: first come
those of the warm-up, which train as all do and are only not measured, then step 1, 2, … of the
rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from minidist.bench import report
from minidist.bench.evaluation import Evaluation
from minidist.bench.figures import Figures
from minidist.bench.flags import Flags
from minidist.bench.progress import Progress
from minidist.bench.saving import Keeper, Summaries
from minidist.bench.watch import Watch
from minidist.nn import Layer
from minidist.optim import Optimizer
from minidist.strategy import Strategy
from minidist.train import Accuracy, StepResult, forward_step, l2_loss, train_step


@dataclass
class Loop:
    """The steps of one run, and what has been measured of them.

    `done` counts all steps, those of the warm-up and of earlier runs of the same training too.
    """

    flags: Flags
    strategy: Strategy
    model: Layer
    optimizer: Optimizer
    rate: Callable[[int], float]  # the learning rate by steps done
    unit: str  # what speeds count
    feed: Iterator[Any]
    evaluate: Evaluation
    evaluation_is_due: Callable[[int], bool]  # after a step of the rows
    watch: Watch
    figures: Figures
    keeper: Keeper | None
    summaries: Summaries | None
    done: int
    evaluations: list[report.Evaluated] = field(default_factory=list)
    elapsed: float = 0.0  # seconds, from the first measured step on, without the evaluations

    def warm_up(self) -> None:
        """Do the steps that are not counted, as far as they are not done."""
        print("Running warm up", flush=True)
        while self.done < self.flags.num_warmup_batches:
            self._step()
            if self.keeper is not None:
                self.keeper.after(self.done)
        print("Done warm up")

    def measure(self, total: int) -> None:
        """Do the steps that are counted, up to number `total`, and print their rows."""
        flags = self.flags
        accuracy = flags.print_training_accuracy
        print(report.columns(flags.loss_type_to_report, accuracy, self.unit))
        started = time.perf_counter()
        with self.watch.watching(), Progress(total) as progress:
            first = self.done - self.flags.num_warmup_batches + 1
            for step in range(first, total + 1):
                self._measured_step(step, progress, first=step == first, last=step == total)
                if self._after(step, progress):
                    progress.row(
                        "Stopping, as eval accuracy at least "
                        f"{self.flags.stop_at_top_1_accuracy:g} was reached"
                    )
                    break
            self.elapsed += time.perf_counter() - started  # before a trace is written
        self.figures.finish(self.elapsed)
        if self.figures.steps:
            print("\n".join(report.closing(self.total_images_per_sec, self.unit)))

    def _step(self, accuracy: bool = False) -> tuple[tuple[StepResult, ...], float]:
        """Do one step on all replicas; return what each reports, and the seconds it took."""
        self.optimizer.lr = self.rate(self.done)
        how: dict[str, Any] = {"dtype": self.flags.activations}
        began = time.perf_counter()
        images, labels = next(self.feed)
        if self.flags.forward_only:
            results = self.strategy.run(forward_step, self.model, images, labels, **how)
        else:
            how |= {"accuracy": accuracy, "label_smoothing": self.flags.label_smoothing}
            results = self.strategy.run(
                train_step, self.model, self.optimizer, images, labels, **how
            )
        results = self.strategy.local_results(results)
        seconds = time.perf_counter() - began
        self.done += 1
        return results, seconds

    def _measured_step(self, step: int, progress: Progress, *, first: bool, last: bool) -> None:
        flags, summaries = self.flags, self.summaries
        shown = first or last or step % flags.display_every == 0
        written = summaries is not None and summaries.are_due(self.done + 1)
        # The share of the weights that the step starts from. It is work for the report only:
        # outside the measured seconds, and not done where nobody reads it.
        weights = self._weights_loss() if shown or written or flags.json is not None else 0.0
        with self.watch.step(step, last=last):
            results, seconds = self._step(flags.print_training_accuracy or written)
        self.figures.add(step, results, weights, seconds)
        progress.update(step)
        if shown or written:
            self.figures.settle()
        if shown:
            accuracy = self.figures.accuracy if flags.print_training_accuracy else None
            progress.row(report.row(step, self.speed, self.figures.loss, accuracy, self.unit))
        if summaries is not None and written:
            summaries.write(self.done, self._numbers())
            summaries.write_weights(self.done)

    def _after(self, step: int, progress: Progress) -> bool:
        """Evaluate and save what is due after a step; return whether the training ends here."""
        if self.evaluation_is_due(step):
            began = time.perf_counter()
            with self.watch.paused():
                accuracy = self.evaluate()
            self.elapsed -= time.perf_counter() - began
            self.evaluations.append(report.Evaluated(step, accuracy))
            progress.row(report.accuracy_line(accuracy))
            if self.summaries is not None:
                tags = {"eval/Accuracy@1": accuracy.top_1, "eval/Accuracy@5": accuracy.top_5}
                self.summaries.write(self.done, tags)
        # Within an update that takes several steps nothing can be saved.
        stop = self.is_good_enough and self.done % self.flags.gradient_accumulation_steps == 0
        if self.keeper is not None:
            self.keeper.after(self.done, stop)
        return stop

    def accuracy(self) -> Accuracy:
        """Return the accuracy after the last step, for which it is not evaluated twice."""
        if self.evaluations:
            step, accuracy = self.evaluations[-1]
            if step == self.done - self.flags.num_warmup_batches:
                return accuracy
        return self.evaluate()

    @property
    def is_good_enough(self) -> bool:
        """Whether the last evaluation has reached what the training stops at."""
        enough = self.flags.stop_at_top_1_accuracy
        if enough is None or not self.evaluations:
            return False
        return self.evaluations[-1].accuracy.top_1 >= enough

    def _weights_loss(self) -> float:
        decay = self.flags.weight_decay
        if decay == 0 or self.flags.loss_type_to_report == "base_loss":
            return 0.0
        return decay * l2_loss(self.model.trainable_variables)

    def _numbers(self) -> dict[str, float]:
        numbers = {
            self.flags.loss_type_to_report: self.figures.loss,
            "learning_rate": self.rate(self.done - 1),
            "images_per_sec": self.speed.mean,
            "top_1_accuracy": self.figures.accuracy.top_1,
            "top_5_accuracy": self.figures.accuracy.top_5,
        }
        if self.optimizer.loss_scale is not None:
            numbers["loss_scale"] = self.optimizer.loss_scale.value
        return numbers

    @property
    def speed(self) -> report.Speed:
        """The speed of the measured steps so far, of which there must be one."""
        seconds = [step.seconds for step in self.figures.steps]
        return report.speed(self.figures.images, seconds, self.flags.display_perf_ewma)

    @property
    def total_images_per_sec(self) -> float:
        """All images over all seconds, whatever was done in them but to evaluate."""
        return sum(self.figures.images) / self.figures.elapsed
