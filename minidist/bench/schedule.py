"""A learning rate that changes at given epochs, as `--piecewise_learning_rate_schedule` says it."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from minidist.errors import UsageError

FORM = "rate;epoch;rate;epoch;...;rate with rising epochs, as 0.02;10;0.01;15;0.005"


@dataclass(frozen=True)
class Schedule:
    """rates[i] holds from epochs[i - 1] on until just before epochs[i]; one rate more than epochs.

    str(schedule) is the text that `Schedule.parse` reads.
    """

    rates: tuple[float, ...]
    epochs: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read "0.02;10;0.01;15;0.005": 0.02 for 10 epochs, 0.01 for the next 5, then 0.005.

        Raises UsageError for an even number of parts, parts that are not finite numbers of at
        least 0, or epochs that do not rise.
        """
        try:
            numbers = tuple(float(part) for part in text.split(";"))
        except ValueError:
            numbers = ()
        rates, epochs = numbers[::2], numbers[1::2]
        if (
            len(numbers) % 2 == 0
            or not all(math.isfinite(number) and number >= 0 for number in numbers)
            or any(later <= earlier for earlier, later in pairwise(epochs))
        ):
            raise UsageError(f"{text!r} is not a learning rate schedule: write {FORM}")
        return cls(rates, epochs)

    def rate(self, epoch: float) -> float:
        """Return the rate after `epoch` epochs, which may be a fraction."""
        return self.rates[bisect_right(self.epochs, epoch)]

    def __str__(self) -> str:
        numbers = [self.rates[0]]
        for epoch, rate in zip(self.epochs, self.rates[1:], strict=True):
            numbers += [epoch, rate]
        return ";".join(repr(number).removesuffix(".0") for number in numbers)
