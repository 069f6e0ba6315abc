"""Relaxed: what was summed a step ago is applied now, and this step's sums in the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from minidist.errors import UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.variable import Variable
from minidist.variable_mgr.agreement import Agreement
from minidist.variable_mgr.combine import MeetingOfAll, SumOfAll
from minidist.variable_mgr.contribution import Combined, Contribution
from minidist.variable_mgr.group import NOTHING, Group
from minidist.variable_mgr.held import Kept

if TYPE_CHECKING:
    from minidist.optim import Optimizer

ZEROS = Kept(None)  # beside a variable that is new


class LastStep(MeetingOfAll):
    """Hands out the sums of the step before; before the first step there are zeros.

    The sums are taken on the communication stream while the replicas go on, into buckets other than
    those that are being applied.
    """

    def __init__(self, sums: SumOfAll) -> None:
        self._sums = sums
        self._groups: WeakSet[Group] = WeakSet()  # those for which something waits
        # What waits beside single variables: since the training was loaded, or because an optimizer
        # has been used for them together with others than before.
        self._loaded: WeakKeyDictionary[Variable, Kept] = WeakKeyDictionary()
        self._left: WeakKeyDictionary[Optimizer, dict[Variable, Kept]] = WeakKeyDictionary()
        self.held = (self,)

    @property
    def sums(self) -> SumOfAll:
        return self._sums

    def turn(self, group: Group) -> int:
        return group.turn

    def combine(
        self, contributions: Sequence[Contribution], agreed: Agreement, threads: int
    ) -> Combined | None:
        group, turn = contributions[0].group, contributions[0].group.turn
        last: Combined | None = group.waiting
        if group.waiting is NOTHING:
            left = self._left.setdefault(contributions[0].optimizer, {})
            for other in contributions[0].optimizer.groups.values():
                if not other.index.keys().isdisjoint(group.index):
                    self._leave(other, left)
            last = self._first(group, 1 - turn, left)
            self._groups.add(group)
        group.waiting = None  # what fails now is lost, and not tried again
        if last is not None:
            last.wait()
        spare = max(1, threads - len(contributions))
        group.waiting = self._sums.begin(contributions, agreed, spare, "communication", turn)
        group.turn = 1 - turn
        return last

    def _leave(self, group: Group, left: dict[Variable, Kept]) -> None:
        """Let what waits for a group wait for each of its variables by itself."""
        if group in self._groups:
            for variable in group.variables:
                left[variable] = self._of(group, variable)
            group.waiting = NOTHING
            self._groups.discard(group)

    def _first(self, group: Group, turn: int, left: dict[Variable, Kept]) -> Combined | None:
        """Return what was left, or loaded, and zeros for others; None where nothing is to come.

        One factor is for all: that of all that was left, unless it comes from several steps.
        """
        kept = [left.pop(v) if v in left else self._loaded.pop(v, ZEROS) for v in group.variables]
        used = [i for i, each in enumerate(kept) if each is ZEROS or each.array is not None]
        if not used:
            return None
        factors = {each.factor for each in kept if each.array is not None}
        rows = [[row[i] for i in used] for row in group.rows(turn)]
        whole = group if len(used) == len(kept) else group.part(used)
        for row, copies in zip(rows, whole.copies, strict=True):
            for i, array, copy in zip(used, row, copies, strict=True):
                value, factor = kept[i]
                if value is None:
                    copy.device.ops.fill(array, 0)
                else:
                    copy.device.copy(array, value if len(factors) == 1 else value * factor)
        return Combined(whole, rows, factors.pop() if len(factors) == 1 else 1.0, step=0)

    # --- saving

    suffix = "relaxed"

    def take_out(self, variable: Variable) -> Kept | None:
        kept = [self._of(group, variable) for group, _ in self._waiting_for(variable)]
        kept += [left[variable] for left in self._left.values() if variable in left]
        if len(kept) > 1:
            raise UsageError(
                f"gradients of variable {variable.name!r} wait for {len(kept)} optimizers, which a "
                "checkpoint cannot tell apart; let one optimizer train it"
            )
        return kept[0] if kept else self._loaded.get(variable)

    def _waiting_for(self, variable: Variable) -> list[tuple[Group, Optimizer]]:
        """Return the groups in which something waits for a variable, with their optimizers."""
        groups = [(group, group.optimizer()) for group in self._groups]
        return [
            (group, optimizer)
            for group, optimizer in groups
            if optimizer is not None and id(variable) in group.index
        ]

    def _of(self, group: Group, variable: Variable) -> Kept:
        """Return what waits for one of a group's variables."""
        combined: Combined | None = group.waiting
        if combined is None or id(variable) not in combined.group.index:
            return Kept(None)
        combined.wait()
        i = combined.group.index[id(variable)]
        gradient = combined.rows[0][i]
        if isinstance(gradient, IndexedSlices):
            gradient = gradient.to_dense().array
        return Kept(combined.group.copies[0][i].device.copy_out(gradient), combined.scale)

    def put_back(self, variable: Variable, kept: Kept | None) -> None:
        for group, optimizer in self._waiting_for(variable):
            self._leave(group, self._left.setdefault(optimizer, {}))
        for left in self._left.values():
            left.pop(variable, None)
        self._loaded.pop(variable, None)
        if kept is not None:
            self._loaded[variable] = kept
