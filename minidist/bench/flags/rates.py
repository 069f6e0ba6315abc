"""How large the learning rate is: what the flags leave open follows from the model's recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minidist.bench.flags.optimisation import LEARNING_RATES
from minidist.errors import UsageError
from minidist.models.recipe import ByBatch
from minidist.optim.schedules import Decay, Piecewise, Schedule, WarmUp

if TYPE_CHECKING:
    from minidist.bench.flags import Flags


def missing(flags: Flags) -> dict[str, Any]:
    """Return, by name, the flags that say how large the rate is and are not given.

    A recipe is followed as a whole, where no flag says how large the rate is or that it falls.
    Raises UsageError for a flag that the recipe has no use for.
    """
    rate = flags.recipe.learning_rate
    if flags.resnet_base_lr is not None and not isinstance(rate, ByBatch):
        raise UsageError(
            f"--resnet_base_lr={flags.resnet_base_lr} is for large resnets on ImageNet, not for "
            f"--model={flags.model} on --data_name={flags.data_name}: give --init_learning_rate"
        )
    if flags.init_learning_rate is not None or flags.piecewise_learning_rate_schedule is not None:
        return {}
    falls = flags.num_epochs_per_decay is not None
    fits = flags.recipe.has_rate_for(flags.optimizer)
    if falls or not (fits or flags.resnet_base_lr is not None):
        rate = None
    match rate:
        case None:
            return {"init_learning_rate": LEARNING_RATES[flags.optimizer]}
        case Piecewise():
            return {"piecewise_learning_rate_schedule": rate}
        case Decay():
            return {
                "init_learning_rate": rate.rate,
                "num_epochs_per_decay": rate.every,
                "learning_rate_decay_factor": rate.factor,
            }
        case ByBatch():
            return {
                "resnet_base_lr": rate.rate,
                "num_learning_rate_warmup_epochs": rate.warm_up,
            }
        case _:
            return {"init_learning_rate": rate}


def schedule(flags: Flags, batch: int) -> Schedule:
    """Return the learning rate by epochs, of a global batch of so many examples."""
    rate = _after_warm_up(flags, batch)
    if flags.num_learning_rate_warmup_epochs is not None:
        return WarmUp(rate, flags.num_learning_rate_warmup_epochs)
    return rate


def _after_warm_up(flags: Flags, batch: int) -> Schedule:
    if flags.piecewise_learning_rate_schedule is not None:
        return flags.piecewise_learning_rate_schedule
    if flags.resnet_base_lr is not None:
        rate = flags.recipe.learning_rate
        assert isinstance(rate, ByBatch)  # by `missing`
        return replace(rate, rate=flags.resnet_base_lr).of(batch)
    assert flags.init_learning_rate is not None  # by `missing`
    if flags.num_epochs_per_decay is None:
        return Piecewise((flags.init_learning_rate,), ())
    assert flags.learning_rate_decay_factor is not None  # by check
    return Decay(
        flags.init_learning_rate,
        flags.num_epochs_per_decay,
        flags.learning_rate_decay_factor,
        flags.minimum_learning_rate or 0.0,
    )
