"""Learning rates that change as the training goes on: functions to be given as an optimizer's `lr`.

    after = schedules.Piecewise((0.1, 0.01), (30,))            # by epochs
    rising = schedules.WarmUp(after, 5)
    optimizer = md.optim.SGD(schedules.PerEpoch(rising, steps_per_epoch=100))

A schedule is called with the time since the start, in steps or whatever else its own numbers are
in. All numbers are taken as the decimal fractions they are written as, so that what starts at 0.3
epochs of 10 steps starts at step 3.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from minidist.errors import UsageError

Time = int | float | Fraction
Schedule = Callable[[Time], float]

FORM = "rate;epoch;rate;epoch;...;rate with rising epochs, as 0.02;10;0.01;15;0.005"


def exact(number: Time) -> Fraction:
    """Return a number as the decimal fraction it is written as: 0.1 is a tenth."""
    return number if isinstance(number, Fraction) else Fraction(str(number))


@dataclass(frozen=True)
class Piecewise:
    """rates[i] holds from times[i - 1] on until just before times[i]; one rate more than times.

    str(schedule) is the text that `Piecewise.parse` reads.
    Raises UsageError for other lengths, numbers that are not finite or below 0, and times that do
    not rise.
    """

    rates: tuple[float, ...]
    times: tuple[Time, ...]

    def __post_init__(self) -> None:
        numbers = (*self.rates, *self.times)
        if (
            len(self.rates) != len(self.times) + 1
            or not all(math.isfinite(number) and number >= 0 for number in numbers)
            or any(later <= earlier for earlier, later in pairwise(self.times))
        ):
            raise UsageError(
                f"rates {self.rates} with changes at {self.times} are no schedule: it takes one "
                "rate more than times, all of at least 0, and times that rise"
            )

    @classmethod
    def parse(cls, text: str) -> Piecewise:
        """Read "0.02;10;0.01;15;0.005": 0.02 for 10 epochs, 0.01 for the next 5, then 0.005.

        Raises UsageError for a text of another form.
        """
        try:
            numbers = tuple(float(part) for part in text.split(";"))
            return cls(numbers[::2], numbers[1::2])
        except ValueError:
            raise UsageError(f"{text!r} is not a learning rate schedule: write {FORM}") from None

    def __call__(self, time: Time) -> float:
        return self.rates[bisect_right([exact(start) for start in self.times], exact(time))]

    def __str__(self) -> str:
        numbers: list[Time] = [self.rates[0]]
        for time, rate in zip(self.times, self.rates[1:], strict=True):
            numbers += [time, rate]
        return ";".join(repr(number).removesuffix(".0") for number in numbers)


@dataclass(frozen=True)
class Decay:
    """rate·factor^⌊time / every⌋, but not below `minimum`: a staircase, as in the ancestor.

    Raises UsageError for an `every` not above 0, a factor outside 0 to 1, and rates below 0.
    """

    rate: float
    every: Time
    factor: float
    minimum: float = 0.0

    def __post_init__(self) -> None:
        if not (self.every > 0 and 0 <= self.factor <= 1 and self.rate >= 0 and self.minimum >= 0):
            raise UsageError(
                f"{self} needs every > 0, a factor from 0 to 1, and rates of at least 0"
            )

    def __call__(self, time: Time) -> float:
        falls = exact(time) // exact(self.every)
        return max(self.rate * self.factor**falls, self.minimum)


@dataclass(frozen=True)
class WarmUp:
    """Rises linearly from 0 to the first rate of `after` in `length`, then goes on as `after` says.

    `after` counts its time from the same start. Raises UsageError for a `length` not above 0.
    """

    after: Schedule
    length: Time

    def __post_init__(self) -> None:
        if not self.length > 0:
            raise UsageError(f"a warm-up needs a length above 0, not {self.length}")

    def __call__(self, time: Time) -> float:
        share = exact(time) / exact(self.length)
        return self.after(time) if share >= 1 else self.after(0) * float(share)


@dataclass(frozen=True)
class PerEpoch:
    """A schedule in epochs as a function of steps.

    Raises UsageError for a `steps_per_epoch` not above 0.
    """

    schedule: Schedule
    steps_per_epoch: Time

    def __post_init__(self) -> None:
        if not self.steps_per_epoch > 0:
            raise UsageError(f"steps_per_epoch must be above 0, not {self.steps_per_epoch}")

    def __call__(self, step: Time) -> float:
        return self.schedule(exact(step) / exact(self.steps_per_epoch))
