"""One run of the benchmark: header, model, warm-up, measured steps, accuracy, JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist import context, data, models, ops, optim
from minidist.bench import report
from minidist.bench.flags import Flags
from minidist.bench.progress import Progress
from minidist.errors import MinidistError, UsageError
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
    seed = flags.tf_random_seed
    global_batch = flags.batch_size * flags.num_devices
    dataset = data.load(flags.data_name, flags.data_dir, examples=max(512, global_batch), seed=seed)
    if global_batch > len(dataset.train):
        raise UsageError(
            f"--batch_size={flags.batch_size} times --num_devices={flags.num_devices} is a batch "
            f"of {global_batch} examples, but {dataset.name} has only {len(dataset.train)} to "
            "train on: make one of the two smaller"
        )
    batches = data.Batches(_ordered(dataset.train, flags), global_batch, seed=seed)
    total = flags.steps(batches.batches_per_epoch)
    context.seed(seed)
    with Strategy(
        f"{flags.device}*{flags.num_devices}",
        flags.variable_update,
        concurrent=flags.concurrent,
        gradient_scale=flags.gradient_scale,
        local_parameter_device=flags.local_parameter_device,
    ) as strategy:
        devices = [device.short for device in strategy.devices]
        epochs = total / batches.batches_per_epoch
        print("\n".join(report.header(flags, dataset, devices, total, epochs)))
        print("Generating training model")
        with strategy.scope():
            model: Layer = models.build(flags.model, dataset.image_shape, dataset.classes)
        if flags.data_format == "NCHW":
            model = _ChannelsFirst(model)
        feed = iter(strategy.distribute_dataset(batches))
        run = _Run(flags, strategy, model, optimizer(flags), feed, batches.batches_per_epoch)
        run.warm_up()
        run.measure(total)
        accuracy = None
        if not dataset.synthetic and not flags.forward_only:
            size = min(global_batch, len(dataset.test))
            test = data.Batches(
                _ordered(dataset.test, flags), size, seed=seed, shuffle=False, epochs=1
            )
            accuracy = evaluate(strategy, model, test)
            print(report.accuracy_line(accuracy))
        if flags.json is not None:
            _write(flags.json, run.document(accuracy))


def optimizer(flags: Flags) -> optim.Optimizer:
    """Return the optimizer that the flags name, at its first learning rate."""
    rate, decay = flags.learning_rate(0), flags.weight_decay
    if flags.optimizer == "sgd":
        return optim.SGD(rate, weight_decay=decay)
    if flags.optimizer == "momentum":
        return optim.Momentum(rate, flags.momentum, flags.nesterov, weight_decay=decay)
    if flags.optimizer == "rmsprop":
        return optim.RMSProp(
            rate,
            flags.rmsprop_decay,
            flags.rmsprop_momentum,
            flags.rmsprop_epsilon,
            weight_decay=decay,
        )
    return optim.Adam(
        rate, flags.adam_beta1, flags.adam_beta2, flags.adam_epsilon, weight_decay=decay
    )


@dataclass
class _Run:
    """The steps of one run, and what has been measured of them.

    Steps of the warm-up train as all do; they are only not measured, counted or shown.
    """

    flags: Flags
    strategy: Strategy
    model: Layer
    optimizer: optim.Optimizer
    feed: Iterator[Any]
    batches_per_epoch: int
    steps: list[report.Step] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    elapsed: float = 0.0

    def warm_up(self) -> None:
        """Do the steps that are not counted."""
        print("Running warm up", flush=True)
        for step in range(self.flags.num_warmup_batches):
            self._step(step)
        print("Done warm up")

    def measure(self, total: int) -> None:
        """Do the steps that are counted, and print their rows."""
        flags = self.flags
        print(report.columns(flags.loss_type_to_report, flags.print_training_accuracy))
        started = time.perf_counter()
        with Progress(total) as progress:
            for step in range(1, total + 1):
                shown = step == 1 or step % flags.display_every == 0 or step == total
                # The share of the weights that the step starts from. It is work for the report
                # only: outside the measured seconds, and not done where nobody reads it.
                weights = self._weights_loss() if shown or flags.json is not None else 0.0
                began = time.perf_counter()
                results = self._step(flags.num_warmup_batches + step - 1)
                seconds = time.perf_counter() - began
                loss = mean_loss(results) + weights
                self.images.append(sum(result.examples for result in results))
                self.steps.append(report.Step(step, loss, seconds))
                progress.update(step)
                if shown:
                    accuracy = Accuracy.of(results) if flags.print_training_accuracy else None
                    progress.row(report.row(step, self._speed(), loss, accuracy))
        self.elapsed = time.perf_counter() - started
        print("\n".join(report.closing(self._total_images_per_sec())))

    def _step(self, before: int) -> tuple[StepResult, ...]:
        """Do one step on all replicas, after `before` others; return what each reports."""
        images, labels = next(self.feed)
        if self.flags.forward_only:
            results = self.strategy.run(forward_step, self.model, images, labels)
        else:
            self.optimizer.lr = self.flags.learning_rate(before / self.batches_per_epoch)
            results = self.strategy.run(
                train_step,
                self.model,
                self.optimizer,
                images,
                labels,
                accuracy=self.flags.print_training_accuracy,
            )
        return self.strategy.local_results(results)

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


def _write(path: str, document: dict[str, Any]) -> None:
    try:
        report.write(path, document)
    except OSError as error:
        raise MinidistError(
            f"--json={path}: the results could not be written: {error.strerror or error}"
        ) from error
