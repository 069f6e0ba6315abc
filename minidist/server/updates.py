"""Updates: what a ps does with the gradients that workers push.

together   those of all workers are summed in their order, and applied once
in turn    each worker's are applied by themselves, one after the other in the workers' order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from minidist.cluster import wire
from minidist.cluster.calls import Letter
from minidist.cluster.wire import MUST_BE_FINITE, NOTHING, WHOLE, Part
from minidist.comm.flat import Kind
from minidist.device import Array, host
from minidist.errors import MergeMismatchError
from minidist.indexed_slices import IndexedSlices
from minidist.optim.optimizer import Optimizer, all_finite
from minidist.server import rules
from minidist.server.rows import Changed
from minidist.tape import Gradient
from minidist.tensor import Tensor
from minidist.threads import cores
from minidist.variable import Variable
from minidist.variable_mgr.sparse import sum_rows

Agree = Callable[[bool], bool]  # of what one ps finds, whether all do


@dataclass(frozen=True)
class Group:
    """Variables of this ps whose gradients a worker pushes together, and who applies them."""

    rule: Optimizer
    names: Sequence[tuple[str, str]]  # of the rule's numbers, with their types
    variables: tuple[Variable, ...]

    @cached_property
    def kinds(self) -> list[Kind]:
        return [Kind.of(variable) for variable in self.variables]


@dataclass
class Given:
    """The gradients that one worker has pushed, as they lie in its letter."""

    letter: Letter
    group: Group
    push: wire.Push
    parts: list[Part]

    @classmethod
    def of(cls, letter: Letter, group: Group) -> Given:
        push = wire.Push.of(letter.text, len(group.names))
        arrays = letter.arrays(wire.kinds(group.kinds, push.table))
        return cls(letter, group, push, wire.parts(arrays, push.table))


def require_alike(given: Sequence[Given]) -> None:
    """Raise MergeMismatchError where workers push gradients of different things."""
    first = given[0]
    for other in given:
        if other.group.variables != first.group.variables or other.group.rule is not (
            first.group.rule
        ):
            raise MergeMismatchError(
                f"worker:{first.letter.worker} and worker:{other.letter.worker} apply gradients to "
                f"different variables, or by different optimizers: {_words(first.group)} and "
                f"{_words(other.group)}; all workers must do the same in the same order"
            )


def together(given: Sequence[Given], agree: Agree, changed: Changed) -> bool:
    """Apply the sum of all; return False where it had to be finite and, on any ps, is not."""
    first = given[0]
    sums = _sums(first.group, [each.parts for each in given])
    first.group.rule.restore_iterations([first.push.step])
    if first.push.flags & MUST_BE_FINITE and not agree(all_finite([host()] * len(sums), sums)):
        return False
    _update(first, sums, changed)
    return True


def in_turn(given: Sequence[Given], changed: Changed) -> bool:
    """Apply each worker's; return False where they had to be finite and some worker's are not."""
    for each in given:
        if each.push.flags & MUST_BE_FINITE and not each.push.flags & wire.FINITE:
            return False
    for each in given:
        if not each.push.flags & wire.NO_STEP:
            _update(each, _sums(each.group, [each.parts]), changed)
    return True


def _update(given: Given, sums: Sequence[Gradient | None], changed: Changed) -> None:
    group = given.group
    rules.set_numbers(group.rule, group.names, given.push.numbers)
    used = [i for i, total in enumerate(sums) if total is not None]
    variables = tuple([group.variables[i] for i in used])
    gradients = [sums[i] for i in used]
    group.rule.update(0, variables, gradients, scale=given.push.scale, threads=cores())
    for variable, gradient in zip(variables, gradients, strict=True):
        if isinstance(gradient, IndexedSlices) and group.rule.changes_only_rows(variable.copies[0]):
            changed.rows(variable, gradient.indices.array)
        else:
            changed.whole(variable)


def _sums(group: Group, given: Sequence[Sequence[Part]]) -> list[Gradient | None]:
    """Return for each variable the sum of what there is of it, in the order of the workers.

    It is taken in the memory of the first that has any.
    """
    sums: list[Gradient | None] = []
    dense: dict[tuple[str, int], list[list[Array]]] = {}  # that are summed in one pass
    for variable, column in zip(group.variables, zip(*given, strict=True), strict=True):
        there = [part for part in column if part is not None]
        if not there:
            sums.append(None)
        elif any(isinstance(part, tuple) for part in there):
            sums.append(sum_rows([_slices(variable, part) for part in there], None))
        else:
            sums.append(there[0])
            if len(there) > 1:
                dense.setdefault((str(variable.dtype), len(there)), []).append(there)
    for columns in dense.values():
        rows = [list(row) for row in zip(*columns, strict=True)]
        host().ops.sum([rows[0]], rows, threads=cores())
    return sums


def _slices(variable: Variable, part: Part) -> IndexedSlices:
    assert isinstance(part, tuple)
    indices, values = part
    return IndexedSlices(Tensor(values, host()), Tensor(indices, host()), variable.shape)


def _words(group: Group) -> str:
    names = [variable.name for variable in group.variables]
    return f"{type(group.rule).__name__} to {names if len(names) < 7 else [*names[:5], '…']}"


def answer(
    group: Group, worker: int, wanted: Sequence[bool], changed: Changed
) -> tuple[list[int], list[Array]]:
    """Return a table, and the arrays in it, of what a worker does not know of some variables.

    wanted: which of the group's.
    """
    table: list[int] = []
    arrays: list[Array] = []
    for variable, want in zip(group.variables, wanted, strict=True):
        copy = variable.copies[0]
        rows = changed.news(variable, worker) if want else None
        if not want:
            table.append(NOTHING)
        elif rows is None:
            table.append(WHOLE)
            arrays.append(copy.array)
        else:
            table.append(len(rows))
            arrays += [rows, copy.device.ops.gather(copy.array, rows)]
    return table, arrays
