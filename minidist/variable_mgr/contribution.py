"""Contribution: what one replica brings of gradients; Combined: what comes out for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minidist import observe
from minidist.comm import Row
from minidist.device import Array
from minidist.errors import MergeMismatchError, UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.optim.optimizer import all_finite
from minidist.structure import leaf
from minidist.tape import Gradient
from minidist.variable import Variable
from minidist.variable_mgr.agreement import Agreement
from minidist.variable_mgr.errand import Errand
from minidist.variable_mgr.group import Group

if TYPE_CHECKING:
    from minidist.optim import Optimizer
    from minidist.variable_mgr.overlap import Filling


@leaf
@dataclass(slots=True)
class Contribution:
    """What one replica brings: a gradient for each variable of the group (None: unused).

    count: how many examples are behind them, None where the replica does not say.
    scale: what they are yet to be multiplied by, the same in all replicas: 1/loss scale.
    order: the variables' numbers in the order in which their gradients were given.
    reusable: whether nobody else has the gradients' arrays, so that sums may be put into them.
    bucket: the one in which they are wanted; None: anywhere.
    """

    group: Group
    count: int | None
    optimizer: Optimizer
    gradients: list[Gradient | None]
    scale: float = 1.0
    order: list[int] = field(default_factory=list)
    filling: Filling | None = None
    reusable: bool = False
    bucket: Row | None = None

    def in_bucket(self, variable: Any) -> Array | None:
        """Return where in the bucket the gradient of a variable belongs."""
        return None if self.bucket is None else self.bucket[self.group.index[id(variable)]]

    def give(self, variable: Any, gradient: Gradient) -> None:
        """Take the final gradient of one variable; a tape's sink."""
        i = self.group.index[id(variable)]
        if isinstance(gradient, IndexedSlices):
            gradient = gradient.coalesced()
        elif self.bucket is not None and gradient is not self.bucket[i]:
            self.bucket.devices[i].copy(self.bucket[i], gradient)
            gradient = self.bucket[i]
        self.gradients[i] = gradient
        self.order.append(i)
        if self.filling is not None:
            self.filling.given(self, i)

    def given_all(self) -> None:
        """Note that the backward pass is over: what has no gradient now is unused."""
        if self.filling is not None:
            self.filling.given_all(self)


@leaf
@dataclass(slots=True)
class Combined:
    """What comes out: for each place the gradients to apply, times `scale`.

    An IndexedSlices among them has each of its indices once. The sums are there once the
    errand is done. step: the one whose gradients they are. came_from: while somebody watches, for
    each replica and variable the version of it that the replica's gradient comes from. first: the
    number, among all, of this process's first replica.
    others: where the update adds up gradients, those of further replicas, to be added to each of
    `rows`; None in the place of a sum that is there. counts: how many times each replica's are
    taken, those in `rows` first; None: once.
    """

    group: Group
    rows: Sequence[Sequence[Gradient]]
    scale: float
    step: int
    errand: Errand | None = None
    came_from: dict[tuple[int, Variable], int] = field(default_factory=dict)
    first: int = 0
    others: Sequence[Sequence[Gradient | None]] = ()
    counts: Sequence[float] | None = None

    def note_origin(self, replica: int, contribution: Contribution) -> None:
        """Note from what a replica's gradients come: what it has read last."""
        if contribution.count == 0:  # it has no say
            return
        pairs = zip(contribution.group.variables, contribution.gradients, strict=True)
        for variable, gradient in pairs:
            if gradient is not None and replica in variable.seen:
                self.came_from[replica, variable] = variable.seen[replica]

    def tell_ages(self, place: int, replica: int | None = None) -> None:
        """Tell how old the gradients of one replica, or of all, are to the copies of a place."""
        for (whose, variable), version in self.came_from.items():
            if replica is None or whose == replica:
                age = variable.copies[place].version - version
                observe.applied(variable.name, self.first + whose, age)

    def wait(self) -> None:
        """Wait until the sums are there; raises what taking them has raised."""
        if self.errand is not None:
            self.errand.wait()

    def finite(self) -> bool:
        """Whether the gradients of the first place have neither a NaN nor an infinity."""
        devices = [copy.device for copy in self.group.copies[0]]
        return all_finite(devices, self.rows[0])


def without_unused(
    contributions: Sequence[Contribution], agreed: Agreement
) -> Sequence[Contribution]:
    """Leave out the variables that no replica has used; raises UsageError where that is all."""
    used = agreed.used
    group = contributions[0].group
    if len(used) == len(group.variables):
        return contributions
    if not used:
        raise UsageError(
            "no replica has a gradient for any of the variables; is the loss computed from them?"
        )
    group.tell_unused(used)
    part = group.part(used)
    return [
        replace(contribution, group=part, gradients=[contribution.gradients[i] for i in used])
        for contribution in contributions
    ]


def check_same(contributions: Sequence[Contribution], first: int) -> None:
    """Raise MergeMismatchError where replicas come with different variables or optimizers.

    first: the number of the first one.
    """
    group, optimizer = contributions[0].group, contributions[0].optimizer
    for replica, contribution in enumerate(contributions, first):
        if contribution.optimizer is not optimizer:
            raise MergeMismatchError(
                f"replicas {first} and {replica} apply gradients with different optimizers, "
                f"{optimizer!r} and {contribution.optimizer!r}; make one outside run and let all "
                "replicas use it"
            )
        if contribution.group is not group:
            raise MergeMismatchError(
                f"replicas {first} and {replica} apply gradients to different variables: "
                f"{_some(group)} and {_some(contribution.group)}; all replicas must pass the same, "
                "in the same order"
            )


def _some(group: Group) -> str:
    names = group.names
    return repr(names if len(names) <= 6 else [*names[:5], f"… {len(names)} in all"])
