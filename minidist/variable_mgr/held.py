"""Held: what a policy holds between two steps beside the variables, and how that is saved.

    w/staged      what replicas compute with next, where that is older than w
    m/delta       what the last step's assignments will subtract from m
    m/pending     what assignments since then will
    w/relaxed     the gradient that waits for the next step, and the factor that makes a mean of it

Each is an array of the variable's shape and dtype, one for all replicas, so that any number of
replicas goes on from it. Another policy leaves it alone, and a policy that finds nothing of its own
goes on as from new variables that start with w.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from minidist.dtypes import HostArray
from minidist.variable import Variable


class Kept(NamedTuple):
    """What is held beside one variable. None: that there is nothing to come, which is held too."""

    array: HostArray | None
    factor: float = 1.0


class Held(Protocol):
    """One kind of what is held."""

    @property
    def suffix(self) -> str:
        """What it is called in a state, after the variable's name."""

    def take_out(self, variable: Variable) -> Kept | None:
        """Return a copy in the host's memory, or None where it is as beside a new variable."""

    def put_back(self, variable: Variable, kept: Kept | None) -> None:
        """Go on from what `take_out` returned. The variable's own value has been put back before.

        An array has the variable's shape and dtype.
        """
