"""What the flags stand for: data set, batches, strategy, model and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from minidist import data, models, ops, optim, threads
from minidist.bench.crew import Crew
from minidist.bench.flags import Flags
from minidist.bench.gpus import own_gpus
from minidist.data.planes import Planes
from minidist.data.repeated import Repeated
from minidist.errors import ShapeError, UsageError
from minidist.nn import Layer
from minidist.optim import LossScale
from minidist.strategy import Strategy
from minidist.tensor import Tensor


def dataset(flags: Flags, workers: int) -> data.Dataset:
    """Load the data set, with images in the flags' data format.

    Images that may have any shape are made for the model.

    Raises UsageError where it has fewer examples than a batch, DataError for files that cannot be
    read.
    """
    batch = flags.batch_size * flags.num_devices * workers
    has_a_shape = flags.data_dir is not None and not data.SOURCES[flags.data_name].any_shape
    size = None if has_a_shape else flags.recipe.image_size
    loaded = data.load(
        flags.data_name,
        flags.data_dir,
        image_shape=None if size is None else (size, size, 3),
        examples=max(512, batch),
        seed=flags.tf_random_seed,
        settings=flags.settings(),
    )
    if batch > len(loaded.train):
        times = f" times {workers} workers" if workers > 1 else ""
        raise UsageError(
            f"--batch_size={flags.batch_size} times --num_devices={flags.num_devices}{times} is a "
            f"batch of {batch} examples, but {loaded.name} has only {len(loaded.train)} to train "
            "on: make one of the two smaller"
        )
    if flags.data_format == "NCHW":
        if len(loaded.train.shape) != 3:
            raise UsageError(
                f"--data_format=NCHW is an order of images, and --data_name={flags.data_name} has "
                "none: leave it out"
            )
        loaded = replace(loaded, train=Planes(loaded.train), test=Planes(loaded.test))
    return loaded


def training_batches(flags: Flags, workers: int, split: data.Split, start: int = 0) -> data.Batches:
    """Return the global batches of a training that has done `start` steps already."""
    return data.Batches(
        split,
        flags.batch_size * flags.num_devices * workers,
        seed=flags.tf_random_seed,
        start=start,
        workers=_threads(flags),
    )


def test_batches(flags: Flags, workers: int, split: data.Split) -> data.Batches:
    """Return the global batches of evaluations, without an end, in the examples' own order."""
    return data.Batches(
        split,
        min(flags.eval_batch_size * flags.num_devices * workers, len(split)),
        seed=flags.tf_random_seed,
        shuffle=False,
        workers=_threads(flags),
    )


def _threads(flags: Flags) -> int:
    """Return how many threads read examples."""
    if flags.datasets_num_private_threads is not None:
        return flags.datasets_num_private_threads
    return threads.cores() if flags.reads_encoded_images else 0


def feed(flags: Flags, strategy: Strategy, batches: data.Batches) -> Iterator[Any]:
    """Return what the replicas of a training are fed."""
    return iter(
        strategy.distribute_dataset(
            Repeated(batches) if flags.datasets_repeat_cached_sample else batches,
            prefetch=flags.datasets_prefetch_buffer_size,
        )
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
    """Return the model with its variables, made in the strategy that is current.

    Raises UsageError, naming the layer, where it cannot take the data's examples.
    """
    shape = of.train.shape
    if flags.data_format == "NCHW":
        channels, height, width = shape
        shape = height, width, channels
    try:
        built = models.build(flags.model, shape, of.classes)
    except ShapeError as error:
        raise UsageError(
            f"--model={flags.model} cannot take examples as those of {of.name}: {error}"
        ) from None
    answers = (*of.train.label_shape, of.classes)
    if built.output_shape != answers:
        raise UsageError(
            f"--model={flags.model} gives {built.output_shape} for an example of {of.name}, which "
            f"needs {answers}, one for each label and class: choose another model"
        )
    return built if flags.data_format == "NHWC" else _ChannelsFirst(built)


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
