"""Shelf: the variables of one strategy on a ps, and in which order its workers' calls are done.

The calls of each worker are done in their order. One that cannot be done yet waits, and with it
what that worker asks after it:

    a worker wants a variable        until worker 0 gives it its value
    a push, synchronous              until all workers have pushed theirs
    … asynchronous, with a bound     for its answer, until the slowest is close enough

What waits for too long is refused, with the names of those that it waits for.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from minidist.assigning import Change, added, assigned, subtracted
from minidist.cluster import Cluster, alone, wire
from minidist.cluster.calls import (
    ADD,
    CREATE,
    DO,
    GROUP,
    OPEN,
    PULL,
    PUSH,
    SUBTRACT,
    WRITE,
    Desk,
    Head,
    Letter,
    as_text,
)
from minidist.comm.flat import ALIGNMENT, Kind, places, room
from minidist.comm.peers import Peers, Ranks
from minidist.creation import VariableAggregation, VariableSynchronization
from minidist.device import host
from minidist.dtypes import as_dtype
from minidist.errors import HangError, MergeMismatchError, MinidistError, PeerError, UsageError
from minidist.optim.optimizer import Optimizer
from minidist.patience import REPORT_AFTER
from minidist.server import rules, updates
from minidist.server.rows import Changed
from minidist.server.updates import Given, Group
from minidist.server.verbs import VERBS
from minidist.strategy import Strategy
from minidist.tensor import Tensor
from minidist.variable import Variable

CHANGES = {WRITE: assigned, ADD: added, SUBTRACT: subtracted}

log = logging.getLogger("minidist")


@dataclass(frozen=True)
class Terms:
    """What all workers of a strategy say of it.

    how: "together", where the gradients of all workers make one step; "in turn", where each
    worker's make one, after all have come; "apart", where each worker's are applied when they come.
    bound: by how many steps a worker may be ahead of the slowest, None for any number. meeting: the
    channel over which the ps meet.
    """

    policy: str
    how: str
    bound: int | None
    meeting: int
    deadline: float

    def __post_init__(self) -> None:
        assert self.how in ("together", "in turn", "apart")

    def check_same(self, other: Terms, worker: int) -> None:
        """Raise MergeMismatchError where another worker says something else."""
        for name in (field.name for field in fields(self)):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs and name != "deadline":
                raise MergeMismatchError(
                    f"worker:{worker} makes a strategy with {name}={theirs!r}, and another worker "
                    f"made it with {ours!r}; all workers must make the same, in the same order"
                )


class Shelf:
    """See the module.

    name, task: this ps's own. optimizer: that of the verb that is being done (see verbs.py).
    """

    def __init__(self, cluster: Cluster, desk: Desk, terms: dict[str, Any]) -> None:
        self.name, self.task = cluster.me, cluster.task
        self.terms = Terms(**terms)
        self.optimizer: Optimizer | None = None
        self._desk = desk
        self._strategy = Strategy("cpu:0", "parameter_server", cluster=alone())
        self._by_number: dict[int, Variable] = {}
        self._groups: dict[tuple[int, int], Group] = {}  # by worker and number
        self._rules: dict[int, tuple[Optimizer, Any]] = {}  # by number, and what was said of it
        workers = range(len(cluster.workers))
        self._queues: dict[int, deque[Letter]] = {worker: deque() for worker in workers}
        self._held: dict[int, tuple[Given, list[int]]] = {}  # applied, but not yet answered
        self._steps = dict.fromkeys(workers, 0)  # that each worker has taken
        self._left: set[int] = set()
        self._changed = Changed(workers, fresh=self.terms.how != "apart")
        self._peers = Peers()
        if len(cluster.servers) > 1:
            assert cluster.engine is not None
            names = [cluster.name(rank) for rank in cluster.servers]
            patience = (REPORT_AFTER, self.terms.deadline)
            self._peers = Ranks(
                cluster.engine, self.terms.meeting, cluster.servers, names, lambda: patience
            )

    @property
    def variables(self) -> list[Variable]:
        """The variables that this ps holds, in the order of their creation."""
        return [self._by_number[number] for number in sorted(self._by_number)]

    def changed(self) -> None:
        """Note that variables were changed by something else than an update."""
        self._changed.everything()

    # --- the order of the calls

    def take(self, letter: Letter) -> None:
        """Do a call, when its turn has come."""
        self._queues[letter.worker].append(letter)
        self._go_on()

    def leave(self, worker: int) -> None:
        """Note that a worker takes no further part; what it has asked for is done."""
        self._left.add(worker)
        self._go_on()
        self.expire()

    @property
    def forgotten(self) -> bool:
        """Whether all workers have left."""
        return len(self._left) == len(self._queues)

    def _go_on(self) -> None:
        """Do everything that can be done now."""
        moved = True
        while moved:
            self._release()
            moved = False
            for queue in self._queues.values():
                if queue and queue[0].worker not in self._held:
                    moved |= self._try(queue[0])

    def _try(self, letter: Letter) -> bool:
        """Do the first call of a worker, and those that belong to it; say whether that was so."""
        if self._awaited(letter):
            return False
        party = [letter]
        if letter.head.what == PUSH and self.terms.how != "apart":
            party = [queue[0] for queue in self._queues.values() if queue]
        for each in party:
            self._queues[each.worker].popleft()
        try:
            self._do(party)
        except Exception as failure:
            if not isinstance(failure, MinidistError):
                log.exception("%s has failed to do what a worker asked", self.name)
            for each in party:
                each.refuse(failure)
        return True

    def _awaited(self, letter: Letter) -> list[int]:
        """Return the workers without which a call cannot be done yet."""
        if letter.head.what == CREATE:
            number = letter.said["number"]
            return [] if letter.worker == 0 or number in self._by_number else [0]
        if letter.head.what == PUSH and self.terms.how != "apart":
            return [
                worker
                for worker, queue in self._queues.items()
                if not queue or queue[0].head.what != PUSH
            ]
        return []

    def _slow(self, worker: int) -> list[int]:
        """Return the workers that are too far behind another one."""
        if self.terms.bound is None:
            return []
        least = self._steps[worker] - self.terms.bound
        return [
            other
            for other, steps in self._steps.items()
            if steps < least and other not in self._left
        ]

    @property
    def due(self) -> float:
        """In how many seconds the first of those that wait has waited for too long."""
        now = time.monotonic()
        ends = [letter.since + letter.head.patience for letter, _ in self._waiting()]
        return max(0.0, min(ends, default=math.inf) - now)

    def _waiting(self) -> list[tuple[Letter, list[int]]]:
        """Return the calls that wait, with the workers that they wait for."""
        found = [(given.letter, self._slow(worker)) for worker, (given, _) in self._held.items()]
        found += [
            (queue[0], self._awaited(queue[0]))
            for worker, queue in self._queues.items()
            if queue and worker not in self._held
        ]
        return found

    def expire(self) -> None:
        """Refuse what waits for workers that have left, or has waited for too long."""
        for letter, awaited in self._waiting():
            waited, worker = time.monotonic() - letter.since, letter.worker
            if awaited and (self._left & {*awaited} or waited >= letter.head.patience):
                if self._held.pop(worker, None) is None:
                    self._queues[worker].popleft()
                letter.refuse(self._vain(worker, awaited, waited))

    def _vain(self, worker: int, awaited: Sequence[int], waited: float) -> BaseException:
        """Return the error for a worker that waits in vain."""
        gone = sorted(self._left & {*awaited})
        if gone:
            return PeerError(
                f"worker:{worker} waits for {_names(gone)}, which has ended after "
                f"{self._steps[gone[0]]} steps; all workers must take the same number of steps"
            )
        behind = ", ".join(f"worker:{other} has taken {self._steps[other]}" for other in awaited)
        bound = self.terms.bound
        why = "" if bound is None else f", which are more than staleness_bound={bound} behind it"
        return HangError(
            f"worker:{worker} has taken {self._steps[worker]} steps and has waited {waited:.1f} s "
            f"for {_names(awaited)}{why} ({behind})"
        )

    # --- the calls

    def _do(self, party: Sequence[Letter]) -> None:
        letter = party[0]
        what = letter.head.what
        if what == OPEN:
            self.terms.check_same(Terms(**letter.said), letter.worker)
            letter.answer()
        elif what == CREATE:
            self._create(letter)
        elif what == GROUP:
            said = letter.said
            rule = self._rule(said["optimizer"])
            variables = tuple([self._by_number[number] for number in said["variables"]])
            names = [(name, kind) for name, kind in said["numbers"]]
            self._groups[letter.worker, said["group"]] = Group(rule, names, variables)
            letter.answer()
        elif what == PUSH:
            self._push([self._given(each) for each in party])
        elif what in CHANGES:
            self._write(letter, CHANGES[what])
        elif what == PULL:
            self._pull(letter)
        elif what == DO:
            said = letter.said
            rule_said = said["optimizer"]
            self.optimizer = None if rule_said is None else self._rule(rule_said)
            letter.answer(as_text(VERBS[said["verb"]](self, said["about"])))
        else:
            raise UsageError(f"a worker asks {self.name} for what it does not know: {what}")

    def _create(self, letter: Letter) -> None:
        said = dict(letter.said)
        number, kind = said.pop("number"), Kind(tuple(said.pop("shape")), as_dtype(said["dtype"]))
        variable = self._by_number.get(number)
        if variable is None:
            (value,) = letter.arrays([kind])
            said["synchronization"] = VariableSynchronization[said["synchronization"]]
            said["aggregation"] = VariableAggregation[said["aggregation"]]
            manager = self._strategy.variable_mgr
            variable = manager.create(self._strategy, [lambda: value], **said)
            self._by_number[number] = variable
        if (variable.name, *Kind.of(variable)) != (said["name"], *kind):
            raise MergeMismatchError(
                f"worker:{letter.worker} creates variable {said['name']!r}, {kind.dtype}"
                f"{list(kind.shape)}, and another worker {variable.name!r}, {variable.dtype}"
                f"{list(variable.shape)}; all workers must create the same in the same order"
            )
        values = [] if letter.worker == 0 else [variable.copies[0].array]
        letter.answer(_versions([variable]), values)

    def _rule(self, said: dict[str, Any]) -> Optimizer:
        """Return the optimizer that workers call by a number; made where it is new."""
        number, kind = said["number"], [said["module"], said["name"]]
        if number not in self._rules:
            rule = rules.make(*kind)
            rule.squares_of_all = self._squares_of_all
            self._rules[number] = rule, kind
        rule, known = self._rules[number]
        if known != kind:
            raise MergeMismatchError(
                f"one worker's optimizer {number} is a {'.'.join(known)}, and another's a "
                f"{'.'.join(kind)}; all workers must use the same, in the same order"
            )
        return rule

    def _write(self, letter: Letter, change: Change) -> None:
        """Change variables; where it is not known what comes of it, tell the worker."""
        variables = [self._by_number[number] for number in letter.said]
        arrays = letter.arrays([Kind.of(variable) for variable in variables])
        for variable, array in zip(variables, arrays, strict=True):
            copy = variable.copies[0]
            value = Tensor(array, host())
            copy.write(change(copy, value))
            if self.terms.how == "apart":  # otherwise all workers know it
                self._changed.whole(variable)
        values = [variable.copies[0].array for variable in variables]
        letter.answer(_versions(variables), [] if change is assigned else values)

    def _pull(self, letter: Letter) -> None:
        variables = [self._by_number[number] for number in letter.said]
        for variable in variables:
            self._changed.news(variable, letter.worker)  # which it is told now
        values = [variable.copies[0].array for variable in variables]
        letter.answer(_versions(variables), values)

    # --- gradients

    def _given(self, letter: Letter) -> Given:
        number = wire.Push.group_of(letter.text)
        group = self._groups.get((letter.worker, number))
        if group is None:
            raise UsageError(f"{self.name} knows no group {number} of worker:{letter.worker}")
        return Given.of(letter, group)

    def _push(self, given: Sequence[Given]) -> None:
        updates.require_alike(given)
        first = given[0]
        found = [variable.copies[0].version for variable in first.group.variables]
        if self.terms.how == "together":
            applied = updates.together(given, self._all, self._changed)
        else:
            if self.terms.how == "in turn":
                first.group.rule.restore_iterations([first.push.step])
            applied = updates.in_turn(given, self._changed)
        for each in given:
            self._steps[each.letter.worker] += 1
        if self.terms.how == "apart":
            self._held[first.letter.worker] = first, found
        else:
            self._answer(given, found, applied)

    def _release(self) -> None:
        """Answer those that were held back for slower workers, which have come closer."""
        for worker, (given, found) in list(self._held.items()):
            if not self._slow(worker):
                del self._held[worker]
                self._answer([given], found, applied=True)

    def _answer(self, given: Sequence[Given], found: Sequence[int], applied: bool) -> None:
        """Answer pushes; where all are to be told the same, in one buffer."""
        group = given[0].group
        wanted = [self.terms.how == "apart"] * len(group.variables)
        if self.terms.how != "apart" and applied:  # what anybody has a gradient of has changed
            columns = zip(*[each.parts for each in given], strict=True)
            wanted = [any(part is not None for part in column) for column in columns]
        different = any(map(self._changed.by_rows, group.variables))
        flags, steps = wire.APPLIED if applied else 0, group.rule.iterations
        left = [variable.copies[0].version for variable in group.variables]
        for several in [[each] for each in given] if different else [given]:
            worker = several[0].letter.worker
            table, arrays = updates.answer(group, worker, wanted, self._changed)
            text = wire.Pushed(flags, steps, found, left, table).text()
            kinds = [Kind.of(array) for array in arrays]
            head = Head(0, len(text), room(kinds))
            lent = self._desk.lend(head.nbytes)
            head.put(lent.buffer)
            lent.buffer[ALIGNMENT : ALIGNMENT + len(text)] = np.frombuffer(text, np.uint8)
            into = places(lent.buffer, head.start, kinds)
            for place, array in zip(into, arrays, strict=True):
                host().copy(place, array)
            for each in several:
                lent.answer(each.letter)

    # --- with the other ps

    def _all(self, found: bool) -> bool:
        """Return whether all ps find what this one does."""
        every = self._peers.meet("see whether gradients are finite", bytes([found]))
        return all(each == b"\1" for each in every)

    def _squares_of_all(self, squares: list[float]) -> list[float]:
        every = self._peers.meet("add squares", np.array(squares, np.float64).tobytes())
        return [float(each) for part in every for each in np.frombuffer(part, np.float64)]


def _versions(variables: Sequence[Variable]) -> bytes:
    return struct.pack(f"<{len(variables)}q", *[v.copies[0].version for v in variables])


def _names(workers: Sequence[int]) -> str:
    return ", ".join(f"worker:{worker}" for worker in workers)
