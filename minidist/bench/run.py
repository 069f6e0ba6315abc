"""One run of the benchmark: data, model and strategy from the flags, then warm-up, steps, accuracy."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist import context, data, models, ops, optim
from minidist.bench import report
from minidist.bench.flags import Flags
from minidist.bench.progress import Progress
from minidist.nn import Layer
from minidist.strategy import Strategy
from minidist.tensor import Tensor
from minidist.train import (
    Accuracy,
    StepResult,
    evaluate,
    forward_step,
    l2_loss,
    mean_loss,
    train_step,
    weights_checksums,
)


def main(flags: Flags) -> None:
    """Do the run, print it, and write its JSON if the flags ask for that.

    Raises UsageError for flags that do not go together with the data, DataError for data files
    that cannot be read, NonFiniteError for a loss that is not a number.
    """
    global_batch = flags.batch_size * flags.num_devices
    dataset = data.load(
        flags.data_name, flags.data_dir, examples=max(512, global_batch), seed=flags.tf_random_seed
    )
    batches = data.Batches(_ordered(dataset.train, flags), global_batch, seed=flags.tf_random_seed)
    context.seed(flags.tf_random_seed)
    with Strategy(
        f"{flags.device}*{flags.num_devices}", flags.variable_update, concurrent=flags.concurrent,
        gradient_scale=flags.gradient_scale, local_parameter_device=flags.local_parameter_device,
    ) as strategy:
        print("Generating training model")
        with strategy.scope():
            model = models.build(flags.model, dataset.image_shape, dataset.classes)
            if flags.data_format == "NCHW":
                model = _ChannelsFirst(model)
        run = _Run(flags, dataset, strategy, model, optimizer(flags), batches)
        run.train()
        accuracy = None
        if not dataset.synthetic and not flags.forward_only:
            size = min(global_batch, len(dataset.test))
            test = _ordered(dataset.test, flags)
            accuracy = evaluate(strategy, model, data.Batches(test, size, seed=0, shuffle=False, epochs=1))
            print(report.accuracy_line(accuracy))
        if flags.json is not None:
            report.write(flags.json, run.document(accuracy))


def optimizer(flags: Flags) -> optim.Optimizer:
    """Return the optimizer that the flags name, at its first learning rate."""
    rate, decay = flags.learning_rate(0), flags.weight_decay
    if flags.optimizer == "sgd":
        return optim.SGD(rate, weight_decay=decay)
    if flags.optimizer == "momentum":
        return optim.Momentum(rate, flags.momentum, flags.nesterov, weight_decay=decay)
    if flags.optimizer == "rmsprop":
        return optim.RMSProp(
            rate, flags.rmsprop_decay, flags.rmsprop_momentum, flags.rmsprop_epsilon,
            weight_decay=decay,
        )
    return optim.Adam(
        rate, flags.adam_beta1, flags.adam_beta2, flags.adam_epsilon, weight_decay=decay
    )


@dataclass
class _Run:
    """What one run is made of, and what it has measured."""

    flags: Flags
    dataset: data.Dataset
    strategy: Strategy
    model: Layer
    optimizer: optim.Optimizer
    batches: data.Batches
    steps: list[report.Step] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    elapsed: float = 0.0

    def train(self) -> None:
        """Warm up, then do the measured steps, printing rows as the ancestor does."""
        flags = self.flags
        per_epoch = self.batches.batches_per_epoch
        if flags.num_batches is not None:
            total = flags.num_batches
        else:
            total = math.ceil((flags.num_epochs or 0) * per_epoch)
        names = [device.short for device in self.strategy.devices]
        print("\n".join(report.header(flags, self.dataset, names, total, total / per_epoch)))

        print("Running warm up", flush=True)
        feed = iter(self.strategy.distribute_dataset(self.batches))
        for step in range(flags.num_warmup_batches):
            self._step(step / per_epoch, next(feed), accuracy=False)
        print("Done warm up")
        print(report.columns(flags.loss_type_to_report, flags.print_training_accuracy))
        started = time.perf_counter()
        with Progress(total) as progress:
            for step in range(1, total + 1):
                self._measured_step(step, total, feed, progress)
        self.elapsed = time.perf_counter() - started
        print("\n".join(report.closing(self._total_images_per_sec())))

    def _measured_step(
        self, step: int, total: int, feed: Iterator[Any], progress: Progress
    ) -> None:
        flags = self.flags
        shown = step == 1 or step % flags.display_every == 0 or step == total
        # The weights' share of the loss is that of the weights the step starts from. It is only
        # reported, so it is not measured, and computed where somebody will read it.
        weights = self._weights_loss() if shown or flags.json is not None else 0.0
        started = time.perf_counter()
        epoch = (flags.num_warmup_batches + step - 1) / self.batches.batches_per_epoch
        results = self._step(epoch, next(feed), accuracy=flags.print_training_accuracy)
        seconds = time.perf_counter() - started
        loss = mean_loss(results) + weights
        self.images.append(sum(result.examples for result in results))
        self.steps.append(report.Step(step, loss, seconds))
        progress.update(step, f"loss {loss:.3f}")
        if shown:
            accuracy = None
            if flags.print_training_accuracy:
                accuracy = Accuracy.of(results)
            progress.row(report.row(step, self._speed(), loss, accuracy))

    def _step(self, epoch: float, batch: Any, *, accuracy: bool) -> list[StepResult]:
        """Do one step on all replicas."""
        images, labels = batch
        if self.flags.forward_only:
            return list(self.strategy.local_results(
                self.strategy.run(forward_step, self.model, images, labels)
            ))
        self.optimizer.lr = self.flags.learning_rate(epoch)
        return list(self.strategy.local_results(self.strategy.run(
            train_step, self.model, self.optimizer, images, labels, accuracy=accuracy
        )))

    def _weights_loss(self) -> float:
        decay = self.flags.weight_decay
        if decay == 0 or self.flags.loss_type_to_report == "base_loss":
            return 0.0
        return decay * l2_loss(self.model.trainable_variables)

    def _speed(self) -> report.Speed:
        return report.speed(self.images, [step.seconds for step in self.steps])

    def _total_images_per_sec(self) -> float:
        return sum(self.images) / self.elapsed

    def document(self, accuracy: Accuracy | None) -> dict[str, Any]:
        """Return what the JSON file holds."""
        return report.document(
            flags=self.flags,
            devices=[device.short for device in self.strategy.devices],
            steps=self.steps,
            speed=self._speed(),
            total_images_per_sec=self._total_images_per_sec(),
            accuracy=accuracy,
            weights_checksum=weights_checksums(self.strategy, self.model),
            parameters=sum(variable.size for variable in self.model.trainable_variables),
        )


class _ChannelsFirst(Layer):
    """A model that is handed NCHW images: they are transposed once, at its entrance."""

    def __init__(self, model: Layer) -> None:
        super().__init__(model.name)
        self.model = model
        self.variables = model.variables
        height, width, channels = model.input_shape or ()
        self.input_shape = (channels, height, width)
        self.output_shape = model.output_shape

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return self.model(ops.transpose(x, (0, 2, 3, 1)), training)


def _ordered(examples: data.Examples, flags: Flags) -> data.Examples:
    """Return examples with their images in the flags' data format."""
    if flags.data_format == "NHWC":
        return examples
    images = np.ascontiguousarray(examples.images.transpose(0, 3, 1, 2))
    return data.Examples(images, examples.labels)
