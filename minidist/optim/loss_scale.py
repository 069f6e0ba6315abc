"""LossScale: a factor on the loss that keeps small gradients of 16-bit activations above zero.

The gradients are divided by it after they have been reduced, before they are clipped. An automatic
one looks for the largest factor that the numbers bear, as tf_cnn_benchmarks does: where gradients
are not finite nothing is applied and the factor is halved; after `every_n` + 1 finite steps in a
row it is doubled.
"""

from __future__ import annotations

import math
from typing import Any

from minidist.errors import NonFiniteError, UsageError

SMALLEST, LARGEST = 2.0**-64, 2.0**64  # an automatic scale stays between them


class LossScale:
    """`value` multiplies losses; `counter` counts finite steps since it last changed.

    An automatic one belongs to one optimizer, for it changes once with each of its steps.
    Raises UsageError (a ValueError) for a value that is not above 0 and for every_n below 1.
    """

    def __init__(self, value: float = 128.0, automatic: bool = False, every_n: int = 1000) -> None:
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise UsageError(f"a loss scale is a finite number above 0, not {value!r}")
        if type(automatic) is not bool:
            raise UsageError(f"automatic is True or False, not {automatic!r}")
        if type(every_n) is not int or every_n < 1:
            raise UsageError(f"every_n is a number of steps from 1, not {every_n!r}")
        self.value = float(value)
        self.automatic = automatic
        self.every_n = every_n
        self.counter = 0

    def update(self, finite: bool) -> bool:
        """Note one step, and return whether its gradients are to be applied.

        Raises NonFiniteError where the scale cannot be halved any more.
        """
        if not finite:
            if self.value / 2 < SMALLEST:
                raise NonFiniteError(
                    f"gradients are not finite at a loss scale of {self.value:g} either, so it is "
                    "not the scale that makes them so; look at the loss, the weights and the input"
                )
            self.value /= 2
            self.counter = 0
        elif self.counter < self.every_n:
            self.counter += 1
        else:
            self.value = min(2 * self.value, max(self.value, LARGEST))
            self.counter = 0
        return finite

    @property
    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"value": self.value, "counter": self.counter}

    @staticmethod
    def fits(state: Any) -> bool:
        """Whether `restore` can take it."""
        if not isinstance(state, dict) or set(state) != {"value", "counter"}:
            return False
        value, counter = state["value"], state["counter"]
        return (
            isinstance(value, float)
            and 0 < value < math.inf
            and type(counter) is int
            and counter >= 0
        )

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a state."""
        self.value, self.counter = state["value"], int(state["counter"])
