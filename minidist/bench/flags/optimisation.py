"""Flags of the update: rule, learning rate, what is done to gradients before it, and precision."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.bench.flags.kinds import (
    BOOLEAN,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SCHEDULE,
    SHARE,
    choice,
    filled,
    flag,
    whole,
)
from minidist.models.recipe import Recipe
from minidist.optim.schedules import Piecewise

LEARNING_RATES = {"sgd": 0.2, "momentum": 0.02, "rmsprop": 0.05, "adam": 0.002}
LOSS_SCALE = 128.0


@dataclass(frozen=True)
class Optimisation:
    """What a step does to the weights."""

    optimizer: str = filled(
        choice(*LEARNING_RATES),
        f"the update rule, by default the model's for this data, else {Recipe.optimizer}",
    )
    init_learning_rate: float | None = flag(
        None,
        NOT_NEGATIVE,
        "the learning rate; by default that of the model for this data, or "
        + ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items()),
    )
    resnet_base_lr: float | None = flag(
        None,
        NOT_NEGATIVE,
        "the learning rate for a global batch of 256, from which the schedule of resnets for "
        "ImageNet is made",
    )
    piecewise_learning_rate_schedule: Piecewise | None = flag(  # noqa: RUF009, it is a field()
        None, SCHEDULE, "learning rates by epoch, in place of --init_learning_rate"
    )
    num_epochs_per_decay: float | None = flag(
        None, POSITIVE, "epochs after which the learning rate falls, again and again"
    )
    learning_rate_decay_factor: float | None = flag(
        None, SHARE, "what it is multiplied by each time"
    )
    minimum_learning_rate: float | None = flag(None, NOT_NEGATIVE, "what it does not fall below")
    num_learning_rate_warmup_epochs: float | None = flag(
        None, POSITIVE, "epochs in which the learning rate rises from 0 to its first value"
    )
    momentum: float = flag(0.9, FRACTION, "share of the momentum kept")
    nesterov: bool = flag(True, BOOLEAN, "momentum is Nesterov's")
    rmsprop_decay: float = flag(0.9, FRACTION, "decay of the mean square")
    rmsprop_momentum: float = flag(0.9, FRACTION, "share of the momentum kept")
    rmsprop_epsilon: float = flag(1.0, POSITIVE, "added to the mean square")
    adam_beta1: float = flag(0.9, FRACTION, "decay of the mean gradient")
    adam_beta2: float = flag(0.999, FRACTION, "decay of the mean square")
    adam_epsilon: float = flag(1e-8, POSITIVE, "added to the root mean square")
    weight_decay: float = flag(
        4e-5, NOT_NEGATIVE, "this times the weight is added to each gradient"
    )
    gradient_clip: float | None = flag(
        None, POSITIVE, "each element of the mean gradients is kept within plus and minus this"
    )
    gradient_clip_norm: float | None = flag(
        None,
        POSITIVE,
        "the mean gradients are scaled down to this norm, taken over all of them; by default the "
        "model's for this data",
    )
    gradient_accumulation_steps: int = flag(
        1, whole(1), "batches whose gradients are added up for one update"
    )
    label_smoothing: float = flag(
        0.0, FRACTION, "the share of each label that a training spreads evenly over all classes"
    )
    tf_random_seed: int = flag(
        1234,
        whole(0, 2**64 - 1),
        "decides initial weights, order of examples, dropout and made-up images",
        "seed",
    )


@dataclass(frozen=True)
class Precision:
    """In how many bits it computes. Variables are float32 always."""

    use_fp16: bool = flag(False, BOOLEAN, "activations are float16, and the loss is scaled")
    use_bf16: bool = flag(False, BOOLEAN, "activations are bfloat16")
    fp16_loss_scale: float | None = flag(
        None, POSITIVE, f"what the loss is multiplied by with --use_fp16, by default {LOSS_SCALE:g}"
    )
    fp16_enable_auto_loss_scale: bool = flag(
        False,
        BOOLEAN,
        "halve the scale where gradients are not finite, which are not applied then, and double it "
        "after many that are",
    )
    fp16_inc_loss_scale_every_n: int = flag(1000, whole(1), "how many steps are many")
