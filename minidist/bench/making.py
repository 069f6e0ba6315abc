"""What the flags stand for: data set, batches, strategy, model and optimizer."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from minidist import data, models, ops, optim
from minidist.bench.crew import Crew
from minidist.bench.flags import Flags
from minidist.bench.gpus import own_gpus
from minidist.errors import UsageError
from minidist.nn import Layer
from minidist.optim import LossScale
from minidist.strategy import Strategy
from minidist.tensor import Tensor


def dataset(flags: Flags, workers: int) -> data.Dataset:
    """Load the data set, with images in the flags' data format.

    Raises UsageError where it has fewer examples than a batch, DataError for files that cannot be
    read.
    """
    batch = flags.batch_size * flags.num_devices * workers
    loaded = data.load(
        flags.data_name, flags.data_dir, examples=max(512, batch), seed=flags.tf_random_seed
    )
    if batch > len(loaded.train):
        times = f" times {workers} workers" if workers > 1 else ""
        raise UsageError(
            f"--batch_size={flags.batch_size} times --num_devices={flags.num_devices}{times} is a "
            f"batch of {batch} examples, but {loaded.name} has only {len(loaded.train)} to train "
            "on: make one of the two smaller"
        )
    if flags.data_format == "NCHW":
        train, test = _channels_first(loaded.train), _channels_first(loaded.test)
        loaded = replace(loaded, train=train, test=test)
    return loaded


def training_batches(
    flags: Flags, workers: int, examples: data.Examples, start: int = 0
) -> data.Batches:
    """Return the global batches of a training that has done `start` steps already."""
    return data.Batches(
        examples,
        flags.batch_size * flags.num_devices * workers,
        seed=flags.tf_random_seed,
        start=start,
    )


def test_batches(flags: Flags, workers: int, examples: data.Examples) -> data.Batches:
    """Return the global batches of evaluations, without an end, in the examples' own order."""
    assert flags.eval_batch_size is not None  # by Flags
    return data.Batches(
        examples,
        min(flags.eval_batch_size * flags.num_devices * workers, len(examples)),
        seed=flags.tf_random_seed,
        shuffle=False,
    )


def strategy(flags: Flags, crew: Crew) -> Strategy:
    """Return the strategy of a crew, which the caller closes."""
    return Strategy(
        devices(flags, crew),
        flags.variable_update,
        cluster=crew.cluster,
        concurrent=flags.concurrent,
        **asdict(flags.policy_options()),
    )


def devices(flags: Flags, crew: Crew) -> str:
    """Return this worker's devices, as `md.devices` reads them; all workers must ask."""
    if flags.device != "cuda":
        return f"{flags.device}*{flags.num_devices}"
    return own_gpus(crew.workers, flags.num_devices)


def model(flags: Flags, of: data.Dataset) -> Layer:
    """Return the model with its variables, made in the strategy that is current."""
    if flags.data_format == "NHWC":
        return models.build(flags.model, of.image_shape, of.classes)
    channels, height, width = of.image_shape
    return _ChannelsFirst(models.build(flags.model, (height, width, channels), of.classes))


def optimizer(flags: Flags, rate: float) -> optim.Optimizer:
    """Return the optimizer, at its first learning rate."""
    how: dict[str, Any] = {
        "weight_decay": flags.weight_decay,
        "gradient_clip": flags.gradient_clip,
        "gradient_clip_norm": flags.gradient_clip_norm,
        "gradient_accumulation_steps": flags.gradient_accumulation_steps,
        "loss_scale": _loss_scale(flags),
    }
    if flags.optimizer == "sgd":
        return optim.SGD(rate, **how)
    if flags.optimizer == "momentum":
        return optim.Momentum(rate, flags.momentum, flags.nesterov, **how)
    if flags.optimizer == "rmsprop":
        return optim.RMSProp(
            rate, flags.rmsprop_decay, flags.rmsprop_momentum, flags.rmsprop_epsilon, **how
        )
    return optim.Adam(rate, flags.adam_beta1, flags.adam_beta2, flags.adam_epsilon, **how)


def _loss_scale(flags: Flags) -> LossScale | None:
    if flags.fp16_loss_scale is None:
        return None
    return LossScale(
        flags.fp16_loss_scale,
        flags.fp16_enable_auto_loss_scale,
        flags.fp16_inc_loss_scale_every_n,
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


def _channels_first(examples: data.Examples) -> data.Examples:
    images = np.ascontiguousarray(examples.images.transpose(0, 3, 1, 2))
    return data.Examples(images, examples.labels)
