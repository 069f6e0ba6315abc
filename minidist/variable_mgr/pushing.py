"""Pushing: a worker's gradients go to the ps, one message to each, and the new values come back.

    message to ps 0    a text | gradient of a | of c |        variables of the group that ps 0 holds
    message to ps 1    a text | gradient of b |               … that ps 1 holds
    answers            a text | value of a | of c |  …

A ps that holds none of them gets a message too: it says that a step has been taken. The buffers are
made once. Of a table whose gradient comes by rows only these rows travel, and back only those that
have changed, where an update changes no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minidist import observe
from minidist.cluster import wire
from minidist.cluster.calls import FIRST, Call
from minidist.cluster.calls import PUSH as PUSH_VERB
from minidist.cluster.wire import NOTHING, WHOLE, Part
from minidist.comm.flat import ALIGNMENT, Kind, aligned, places, room
from minidist.comm.row import Row
from minidist.device import Array, host
from minidist.indexed_slices import IndexedSlices
from minidist.tape import Gradient
from minidist.traffic import Traffic
from minidist.variable import Variable
from minidist.variable_mgr.group import Group

if TYPE_CHECKING:
    from minidist.optim import Optimizer
    from minidist.variable_mgr.servers import Servers

Put = Callable[[int, Part], None]  # takes what has come of a variable of the group, by its number


class Outgoing:
    """The messages of a group of variables to all ps, which are used again in every step."""

    def __init__(self, servers: Servers, group: Group, optimizer: Optimizer) -> None:
        self._servers = servers
        self._names = [(name, _type(value)) for name, value in optimizer.numbers.items()]
        self._group = group
        tasks = range(len(servers.names))
        held = [servers.task_of(variable) for variable in group.variables]
        members = [[i for i, at in enumerate(held) if at == task] for task in tasks]
        numbers = [[servers.number_of(group.variables[i]) for i in part] for part in members]
        self._number = servers.declare(optimizer, self._names, numbers)
        self._ways = [self._way(task, members[task]) for task in tasks]
        self._last: Sent | None = None

    def _way(self, task: int, members: list[int]) -> _Way:
        kinds = [Kind.of(self._group.variables[i]) for i in members]
        text = wire.push_nbytes(len(self._names), len(members))
        answer = aligned(ALIGNMENT + wire.Pushed.nbytes(len(members))) + room(kinds)
        return _Way(task, members, kinds, text, max(answer, FIRST))

    def row(self) -> Row:
        """Return an array for each variable: its place in the message to its ps."""
        self._await_last()
        row = Row([None] * len(self._group.variables), [host()] * len(self._group.variables))
        for way in self._ways:
            for i, place in zip(way.members, way.whole, strict=True):
                row[i] = place
        return row

    def send(
        self,
        optimizer: Optimizer,
        gradients: Sequence[Gradient | None],
        scale: float,
        flags: int,
        **replaced: float | None,
    ) -> Sent:
        """Push gradients, those that the sums' factor is yet to be put to; None: unused.

        replaced: numbers of the optimizer that are to be others. Gradients that lie in the places
        that `row` has given are not copied.
        """
        self._await_last()
        numbers = {**optimizer.numbers, **replaced}
        values = [math.nan if number is None else float(number) for number in numbers.values()]
        step = optimizer.iterations
        calls = []
        for way in self._ways:
            table = [_entry(gradients[i]) for i in way.members]
            push = wire.Push(self._number, flags, step, scale, values, table)
            calls.append(self._post(way, push, [gradients[i] for i in way.members]))
        self._last = Sent(self._servers, self._group, self._ways, calls, gradients)
        return self._last

    def _post(self, way: _Way, push: wire.Push, gradients: Sequence[Gradient | None]) -> Call:
        caller = self._servers.caller
        text = push.text()
        arrays: list[Array] = []
        whole = 0
        for gradient in gradients:
            if isinstance(gradient, IndexedSlices):
                arrays += [gradient.indices.array, gradient.values.array]
            elif gradient is not None:
                arrays.append(gradient)
                whole += gradient.nbytes
        into = way.places(push.table)
        for place, array in zip(into, arrays, strict=True):
            if place is not array:
                host().copy(place, array)
        head = caller.head(PUSH_VERB, len(text), room(map(Kind.of, arrays)), len(way.answer))
        head.put(way.buffer)
        way.buffer[ALIGNMENT : ALIGNMENT + len(text)] = np.frombuffer(text, np.uint8)
        if observe.counting:
            rows = sum(array.nbytes for array in arrays) - whole
            self._servers.tell(way.task, whole, out=True, what="network")
            self._servers.tell(way.task, rows, out=True, what="rows")
        what = "apply gradients"
        return caller.post(way.task, way.buffer[: head.nbytes], way.answer, what)

    def _await_last(self) -> None:
        """Wait until nothing of the last push is on its way any more: its buffers are free then."""
        if self._last is not None:
            self._last.wait()
            self._last = None


class _Way:
    """What of a group goes to one ps, and the buffers for it."""

    def __init__(
        self, task: int, members: list[int], kinds: list[Kind], text: int, answer: int
    ) -> None:
        self.task, self.members, self.kinds = task, members, kinds
        self._start = aligned(ALIGNMENT + text)
        self.buffer = host().allocate((self._start + room(kinds),), np.uint8)
        self.answer = host().allocate((answer,), np.uint8)
        self.whole = places(self.buffer, self._start, kinds)  # of whole arrays of all members

    def places(self, table: Sequence[int]) -> list[Array]:
        """Return the places of the arrays that a table announces."""
        if all(entry == WHOLE for entry in table):
            return self.whole
        kinds = wire.kinds(self.kinds, table)
        nbytes = self._start + room(kinds)
        if nbytes > len(self.buffer):
            self.buffer = host().allocate((nbytes,), np.uint8)
            self.whole = places(self.buffer, self._start, self.kinds)
        return places(self.buffer, self._start, kinds)


class Sent:
    """A push that is on its way to all ps."""

    def __init__(
        self,
        servers: Servers,
        group: Group,
        ways: Sequence[_Way],
        calls: Sequence[Call],
        gradients: Sequence[Gradient | None],
    ) -> None:
        self._servers, self._group, self._ways, self._calls = servers, group, ways, calls
        self._by_rows = {i for i, g in enumerate(gradients) if isinstance(g, IndexedSlices)}
        self._waiting = observe.Lock(hands_over=True)
        self._failure: BaseException | None = None
        self._pushed: list[wire.Pushed] = []
        self._parts: dict[int, Part] = {}
        self.found: dict[int, int] = {}  # by number in the group: the version before
        self.left: dict[int, int] = {}  # and after

    def wait(self) -> None:
        """Wait for all answers; raises what is wrong with one.

        Several threads may wait: for the values, and for the buffers.
        """
        with self._waiting:
            if self._failure is not None:
                raise self._failure
            if not self._pushed:
                try:
                    self._wait()
                except Exception as failure:
                    self._failure = failure
                    raise

    def _wait(self) -> None:
        self._servers.settle()
        every = []
        for way, call in zip(self._ways, self._calls, strict=True):
            answer = call.wait()
            pushed = wire.Pushed.of(answer.text)
            arrays = answer.arrays(wire.kinds(way.kinds, pushed.table))
            parts = wire.parts(arrays, pushed.table)
            self._parts.update(zip(way.members, parts, strict=True))
            self.found.update(zip(way.members, pushed.found, strict=True))
            self.left.update(zip(way.members, pushed.left, strict=True))
            every.append(pushed)
            self._tell(way, parts)
        self._pushed = every

    @property
    def applied(self) -> bool:
        """Whether the ps have applied it."""
        return all(pushed.flags & wire.APPLIED for pushed in self._pushed)

    @property
    def steps(self) -> int:
        """How often the optimizer has been applied there."""
        return max(pushed.steps for pushed in self._pushed)

    def each(self, put: Put) -> None:
        """Give what has come of each variable to `put`."""
        for i, part in self._parts.items():
            if part is not None:
                put(i, part)

    def _tell(self, way: _Way, parts: Sequence[Part]) -> None:
        if not observe.counting:
            return
        whole = rows = 0
        for i, part in zip(way.members, parts, strict=True):
            if isinstance(part, tuple):
                rows += sum(array.nbytes for array in part)
            elif part is not None and i in self._by_rows:
                rows += part.nbytes
            elif part is not None:
                whole += part.nbytes
        self._servers.tell(way.task, whole, out=False, what="network")
        self._servers.tell(way.task, rows, out=False, what="rows")


def network_bytes(servers: Servers, variables: Sequence[Variable]) -> Traffic:
    """Return what pushing whole gradients of some variables moves, and the answers to it."""
    traffic = Traffic()
    for variable in variables:
        task = servers.task_of(variable)
        if task is not None:
            me, ps = servers.caller.cluster.me, servers.names[task]
            traffic[f"{me}->{ps}"] += Kind.of(variable).nbytes
            traffic[f"{ps}->{me}"] += Kind.of(variable).nbytes
    return traffic


def _entry(gradient: Gradient | None) -> int:
    if gradient is None:
        return NOTHING
    return len(gradient.indices) if isinstance(gradient, IndexedSlices) else WHOLE


def _type(value: float | None) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
