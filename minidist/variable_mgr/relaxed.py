"""Relaxed: what was summed a step ago is applied now, and this step's sums in the next one."""

from __future__ import annotations

from collections.abc import Sequence

from minidist.errors import UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.variable import Variable
from minidist.variable_mgr.combine import Combined, Contribution, MeetingOfAll, SumOfAll
from minidist.variable_mgr.group import Group
from minidist.variable_mgr.held import Kept

ZEROS = Kept(None)  # beside a variable that is new


class LastStep(MeetingOfAll):
    """Hands out the sums of the step before; before the first step there are zeros.

    The sums are taken on the communication stream while the replicas go on, into buckets other than
    those that are being applied.
    """

    def __init__(self, sums: SumOfAll) -> None:
        self._sums = sums
        self._turns: dict[Group, int] = {}
        self._waiting: dict[Group, Combined | None] = {}  # by the whole group; None: no example
        self._put_back: dict[Variable, Kept] = {}  # what waited where the training was saved
        self.held = (self,)

    @property
    def sums(self) -> SumOfAll:
        return self._sums

    def turn(self, group: Group) -> int:
        return self._turns.get(group, 0)

    def combine(self, contributions: Sequence[Contribution], threads: int) -> Combined | None:
        group, turn = contributions[0].group, self.turn(contributions[0].group)
        last = self._waiting[group] if group in self._waiting else self._first(group, 1 - turn)
        self._waiting[group] = None  # what fails now is lost, and not tried again
        if last is not None:
            last.wait()
        spare = max(1, threads - len(contributions))
        self._waiting[group] = self._sums.begin(contributions, spare, "communication", turn)
        self._turns[group] = 1 - turn
        return last

    def _first(self, group: Group, turn: int) -> Combined | None:
        """Return what was put back, and zeros for other variables; None where nothing is to come.

        One factor is for all: that of all that was put back, unless it comes from several steps.
        """
        kept = [self._put_back.pop(variable, ZEROS) for variable in group.variables]
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
                    array[...] = 0
                else:
                    copy.device.copy(array, value if len(factors) == 1 else value * factor)
        return Combined(whole, rows, factors.pop() if len(factors) == 1 else 1.0)

    # --- saving

    suffix = "relaxed"

    def take_out(self, variable: Variable) -> Kept | None:
        waiting = [pair for pair in self._waiting.items() if id(variable) in pair[0].index]
        if not waiting:
            return self._put_back.get(variable)
        if len(waiting) > 1:
            raise UsageError(
                f"variable {variable.name!r} has gradients that wait in {len(waiting)} groups of "
                "variables, which a checkpoint cannot tell apart; apply those of a variable always "
                "together with the same others"
            )
        ((_, combined),) = waiting
        if combined is None or id(variable) not in combined.group.index:
            return Kept(None)
        combined.wait()
        i = combined.group.index[id(variable)]
        gradient = combined.rows[0][i]
        if isinstance(gradient, IndexedSlices):
            gradient = gradient.to_dense().array
        return Kept(combined.group.copies[0][i].device.copy_out(gradient), combined.scale)

    def put_back(self, variable: Variable, kept: Kept | None) -> None:
        for group in [group for group in self._waiting if id(variable) in group.index]:
            for member in group.variables:  # the others wait on, each for itself
                self._put_back[member] = self.take_out(member) or Kept(None)
            del self._waiting[group]
        self._put_back.pop(variable, None)
        if kept is not None:
            self._put_back[variable] = kept
