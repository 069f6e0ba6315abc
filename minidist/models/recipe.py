"""Recipe: how a model is trained where nobody says otherwise, on the data that it is made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minidist import nn
from minidist.optim.schedules import Decay, Piecewise, Schedule, Time

# What makes a model: a function of the shape of an example and the number of classes.
Make = Callable[[tuple[int, ...], int], nn.Sequential]


@dataclass(frozen=True)
class ByBatch:
    """A learning rate that grows with the batch, so that an epoch goes as far (Goyal et al., 2017).

    It is `rate` where a global batch has `examples`, times the factor that `factors` has for an
    epoch. It is meant to rise to that in the first `warm_up` epochs.
    """

    rate: float
    examples: int
    factors: Piecewise
    warm_up: float

    def of(self, batch: int) -> Schedule:
        """Return the schedule of a global batch, without the warm-up."""
        first = self.rate * batch / self.examples

        def schedule(epoch: Time) -> float:
            return first * self.factors(epoch)

        return schedule


@dataclass(frozen=True)
class Recipe:
    """Values of flags that are not given, for images as tf_cnn_benchmarks has them.

    Without arguments it is what is usual where a model has no recipe.

    image_size: height and width, in pixels, of the images that it is fed; None: what the data has.
    batch_size: examples per device.
    learning_rate: that of `optimizer`, None: the usual one of each; times are epochs.
    num_epochs: of a training.
    """

    image_size: int | None = None
    batch_size: int = 32
    learning_rate: float | Piecewise | Decay | ByBatch | None = None
    optimizer: str = "momentum"
    gradient_clip_norm: float | None = None
    num_epochs: float = 20.0

    def has_rate_for(self, optimizer: str) -> bool:
        """Whether the learning rate is one for this optimizer: one for momentum is one for SGD."""
        return optimizer == self.optimizer or {optimizer, self.optimizer} == {"sgd", "momentum"}
