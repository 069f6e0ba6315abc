"""Servers: the ps that hold the variables of a strategy, as a worker sees them.

Each new variable goes to the ps that holds the fewest bytes so far, the first of equals; all
workers find the same. What this worker has of a variable is a copy, and what it writes there goes
on to the ps: in the synchronous mode all workers write the same, and worker 0 sends it, with the
next push at the latest; in the asynchronous mode each sends its own at once, and what is added to a
variable is added there.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from minidist import observe
from minidist.assigning import Change, added, assigned, fitting, put
from minidist.cluster.calls import (
    ADD,
    CLOSE,
    CREATE,
    DO,
    GROUP,
    OPEN,
    PULL,
    SUBTRACT,
    WRITE,
    Call,
    Caller,
    Received,
    as_text,
)
from minidist.cluster.site import Site
from minidist.comm.flat import Kind, room
from minidist.device import Array
from minidist.errors import UsageError
from minidist.tape import stop_recording
from minidist.variable import Variable

if TYPE_CHECKING:
    from minidist.optim import Optimizer

SECONDS_PER_BYTE = 1e-6  # for which a worker waits longer for a ps that reads or writes files
SECONDS_FOR_FILES = 60.0


class Shelved(NamedTuple):
    """Where a variable is: on which ps, its number there, and its version when it was asked for."""

    task: int
    number: int
    version: int


class Servers:
    """See the module.

    how, bound: see minidist.server.shelf.Terms. names: of the ps, as "ps:0".
    """

    def __init__(self, site: Site, policy: str, how: str, bound: int | None = None) -> None:
        cluster = site.cluster
        if not cluster.servers:
            raise UsageError(
                f"{policy} of several workers keeps variables on parameter servers, of which "
                f"{cluster!r} has none; start more processes and say md.connect(num_ps=1), or take "
                "collective_all_reduce, which needs none"
            )
        self.site = site
        self.how = how
        self.apart = how == "apart"
        self.caller = Caller(cluster, cluster.channel(), site.patience, site.peers.check)
        self.names = self.caller.names
        self._me = cluster.me
        self._is_chief = cluster.is_chief
        self._loads = [0] * len(self.names)
        self._count = 0  # variables so far
        self._places: WeakKeyDictionary[Variable, Shelved] = WeakKeyDictionary()
        self._by_number: WeakValueDictionary[int, Variable] = WeakValueDictionary()
        self._rules: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._rule_numbers = count()  # none of which is given again: the ps forget no optimizer
        self._groups = 0
        self._unsent: dict[Variable, None] = {}  # written here, and not yet sent to a ps
        self._sent: deque[Call] = deque()  # whose answers nobody has waited for
        terms = {
            "policy": policy,
            "how": how,
            "bound": bound,
            "meeting": cluster.channel(),
            "deadline": site.patience()[1],
        }
        self._wait(self._call_all(OPEN, as_text(terms), "make a strategy"))

    def _call_all(self, verb: int, text: bytes, what: str) -> list[Call]:
        return [self.caller.call(task, verb, text, what=what) for task in range(len(self.names))]

    def _wait(self, calls: Sequence[Call]) -> list[Received]:
        """Wait for the answers to some calls, and to those that were sent before."""
        while True:
            try:
                self._sent.popleft().wait()
            except IndexError:  # there is none, or another thread waits for it
                return [call.wait() for call in calls]

    # --- who holds what

    def task_of(self, variable: Variable) -> int | None:
        """Return the number of the ps that holds a variable, None where it is on none."""
        place = self._places.get(variable)
        return None if place is None else place.task

    def number_of(self, variable: Variable) -> int:
        """Return what the ps call a variable: how many were created before it."""
        return self._places[variable].number

    def create(
        self, name: str, value: Array, beside: Variable | None, options: dict[str, Any]
    ) -> tuple[Shelved, Array]:
        """Create a variable on a ps; return where it is, and the value that it has there.

        That is worker 0's, or asynchronously what has become of it since.
        """
        if beside is not None and beside in self._places:
            task = self._places[beside].task
        else:
            task = min(range(len(self._loads)), key=self._loads.__getitem__)
        number = self._count
        self._count += 1
        self._loads[task] += value.nbytes
        kind = Kind.of(value)
        said = {
            "number": number,
            "name": name,
            "shape": kind.shape,
            "dtype": kind.dtype.name,
            "trainable": options["trainable"],
            "decays": options["decays"],
            "synchronization": options["synchronization"].name,
            "aggregation": options["aggregation"].name,
        }
        what = f"create variable {name!r}"
        arrays = [value] if self._is_chief else []
        answer = room([kind]) + 128
        call = self.caller.call(task, CREATE, as_text(said), arrays, what=what, room=answer)
        (answered,) = self._wait([call])
        if not self._is_chief:
            (value,) = answered.arrays([kind])
        self.tell(task, value.nbytes, out=self._is_chief, what="values")
        return Shelved(task, number, _version(answered)), value

    def adopt(self, variable: Variable, shelved: Shelved) -> None:
        """Note where a new variable is."""
        self._places[variable] = shelved
        self._by_number[shelved.number] = variable
        if self.apart:
            for copy in variable.copies:
                copy.version = shelved.version

    # --- what is written here

    def wrote(self, variable: Variable) -> None:
        """Note that a variable has been written: the ps must have what it is now."""
        if variable not in self._places:
            return
        if not self.apart:
            self._unsent[variable] = None
            return
        (call,) = self._write([variable])
        (answer,) = self._wait([call])
        variable.copies[0].version = _version(answer)

    def flush(self) -> None:
        """Send what was written here and is not yet with the ps. Nobody waits for the answers."""
        unsent, self._unsent = list(self._unsent), {}
        if self._is_chief:
            self._sent += self._write(unsent)

    def _write(self, variables: Sequence[Variable]) -> list[Call]:
        calls = []
        for task, several in self._by_task(variables):
            copies = [variable.copies[0] for variable in several]
            arrays = [copy.device.copy_out(copy.array) for copy in copies]
            text, what = self._text(several), f"set {_some(several)}"
            versions = 8 * len(several) + 128
            calls.append(self.caller.call(task, WRITE, text, arrays, what=what, room=versions))
            self.tell(task, sum(array.nbytes for array in arrays), out=True, what="values")
        return calls

    def change(self, variable: Variable, change: Change, value: Any) -> None:
        """Do, asynchronously, what this worker's replicas have assigned together."""
        if change is assigned:
            put(variable.copies, change, value)
            return
        with stop_recording():
            delta = fitting(variable.copies[0], value)
        verb = ADD if change is added else SUBTRACT
        task = self._places[variable].task
        array = delta.device.copy_out(delta.array)
        kind = Kind.of(array)
        text, what = self._text([variable]), f"change {variable.name!r}"
        call = self.caller.call(task, verb, text, [array], what=what, room=room([kind]) + 128)
        (answer,) = self._wait([call])
        (value,) = answer.arrays([kind])
        self.tell(task, array.nbytes, out=True, what="values")
        self.tell(task, array.nbytes, out=False, what="values")
        self._take(variable, value, _version(answer))

    def pull(self) -> None:
        """Give all copies here the values that the ps hold now.

        Workers that are in step do it together; then the ps have what worker 0 has sent before.
        """
        self.flush()
        self._wait(())
        self.site.peers.meet("take the values that the ps hold")
        calls, asked = [], []
        for task, variables in self._by_task(self._by_number.values()):
            kinds = [Kind.of(variable) for variable in variables]
            what, nbytes = f"give {_some(variables)}", room(kinds) + 8 * len(kinds) + 128
            calls.append(
                self.caller.call(task, PULL, self._text(variables), what=what, room=nbytes)
            )
            asked.append((task, variables, kinds))
        answers = self._wait(calls)
        for answer, (task, variables, kinds) in zip(answers, asked, strict=True):
            versions = struct.unpack(f"<{len(variables)}q", answer.text)
            self.tell(task, sum(kind.nbytes for kind in kinds), out=False, what="values")
            for variable, value, version in zip(
                variables, answer.arrays(kinds), versions, strict=True
            ):
                self._take(variable, value, version)
        self._unsent.clear()

    def _take(self, variable: Variable, value: Array, version: int) -> None:
        """Give the copies of a variable here a value that comes from its ps."""
        variable.reader.before_write()
        for copy in variable.copies:
            copy.device.copy(copy.array, value)
            copy.version = version if self.apart else copy.version + 1

    def _by_task(self, variables: Any) -> list[tuple[int, list[Variable]]]:
        """Return some variables by the ps that hold them, in the order of their creation."""
        found: dict[int, list[Variable]] = {}
        for variable in sorted(variables, key=self.number_of):
            found.setdefault(self._places[variable].task, []).append(variable)
        return sorted(found.items())

    def _text(self, variables: Sequence[Variable]) -> bytes:
        return as_text([self.number_of(variable) for variable in variables])

    # --- what else

    def rule(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what a ps must know of an optimizer to have one like it."""
        kind = type(optimizer)
        number = self._rules.get(optimizer)
        if number is None:
            number = self._rules[optimizer] = next(self._rule_numbers)
        return {"number": number, "module": kind.__module__, "name": kind.__qualname__}

    def declare(self, optimizer: Optimizer, names: Any, members: Sequence[Sequence[int]]) -> int:
        """Tell each ps of a group of variables, by numbers; return the number of the group."""
        number = self._groups
        self._groups += 1
        for task, variables in enumerate(members):
            said = {
                "group": number,
                "optimizer": self.rule(optimizer),
                "numbers": names,
                "variables": variables,
            }
            text = as_text(said)
            self._sent.append(self.caller.call(task, GROUP, text, what="know an optimizer"))
        return number

    def ask(
        self,
        verb: str,
        about: dict[str, Any],
        optimizer: Optimizer | None = None,
        tasks: Sequence[int] | None = None,
    ) -> list[dict[str, Any]]:
        """Let each ps, or those of some tasks, do a verb by its name; return what they answer.

        They do it after all that this worker has asked before. Where `about` says how many "bytes"
        go to or come from files, that may take longer than anything else.
        Raises what fails there, with the name of the ps.
        """
        self.flush()
        rule = None if optimizer is None else self.rule(optimizer)
        text = as_text({"verb": verb, "about": about, "optimizer": rule})
        seconds = 0.0
        if "bytes" in about:
            seconds = SECONDS_FOR_FILES + about["bytes"] * SECONDS_PER_BYTE
        calls = [
            self.caller.call(task, DO, text, what=f"do {verb!r}", seconds=seconds)
            for task in (range(len(self.names)) if tasks is None else tasks)
        ]
        return [answer.said for answer in self._wait(calls)]

    def close(self) -> None:
        """Tell the ps that this worker does not use the variables any more."""
        if self.caller.broken is None:
            self.flush()
        self.caller.broken = None  # also then: they shall not wait for it
        self._call_all(CLOSE, b"", "close a strategy")

    def settle(self) -> None:
        """Wait for all answers that are still to come; raises what is wrong with one."""
        self._wait(())

    def tell(self, task: int, nbytes: int, *, out: bool, what: str) -> None:
        """Tell of bytes that have gone to a ps, or have come from it."""
        if observe.counting and nbytes:
            ends = (self._me, self.names[task])
            observe.moved(*(ends if out else ends[::-1]), nbytes, what)


def _version(answer: Received) -> int:
    return int(struct.unpack("<q", answer.text)[0])


def _some(variables: Sequence[Variable]) -> str:
    names = [repr(variable.name) for variable in variables[:3]]
    return ", ".join(names) + ", …" * (len(variables) > 3)
