"""Places: where in the program something was done, and what is said of two that nothing orders."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from minidist import context
from minidist.checking.clocks import Actor, StreamActor

PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
DEPTH = 40  # calls that are kept of a stack
SHOWN = 3  # lines of minidist's own that a report shows of a stack

Stack = tuple[tuple[CodeType, int], ...]  # code and the instruction in it, the innermost first


class Access:
    """Who did something with memory, when and where."""

    __slots__ = ("actor", "stack", "submitted", "time", "verb", "who")

    def __init__(self, actor: Actor, verb: str, stack: Stack, submitted: Stack) -> None:
        self.actor = actor
        self.time = actor.time
        self.verb = verb
        self.stack = stack
        self.submitted = submitted  # where a stream was given the work
        self.who = who()

    @property
    def is_a_streams(self) -> bool:
        return isinstance(self.actor, StreamActor)

    def line(self) -> str:
        """Return the place in the user's program, or where there is none minidist's."""
        calls = (*self.stack, *self.submitted)
        return _line(next((call for call in calls if _is_users(call)), calls[0]))

    def told(self, kind: str) -> str:
        """Return who did it, and the stack in a few lines."""
        who = self.actor.name if self.is_a_streams else _named(self.who, self.actor.name)
        text = f"a {kind} by {who}, in {self.verb}:\n{_short(self.stack)}"
        if self.submitted:
            text += f"\n    which was given this work at\n{_short(self.submitted)}"
        return text


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes that nothing orders.

    `what` names the memory; `lines` are the two places, in the order in which they happened this
    time. str(race) is the report.
    """

    what: str
    lines: tuple[str, str]
    report: str

    def __str__(self) -> str:
        return self.report


def stack(skip: int) -> Stack:
    """Return the calls that led here, without the innermost `skip`."""
    frame = sys._getframe(skip + 1)
    found: list[tuple[CodeType, int]] = []
    while len(found) < DEPTH:
        found.append((frame.f_code, frame.f_lasti))
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    return tuple(found)


def who() -> tuple[Any, ...]:
    """Return which replica the calling thread is, or merges as; () where it is none."""
    frame = context.frame()
    if frame.run is None:
        return ()
    return (frame.replica_id, frame.device.short, frame.replica is None)


def race(what: str, told: Sequence[str], lines: tuple[str, str], cure: str) -> Race:
    report = "\n  ".join([f"nothing orders two accesses to {what}", *told, cure])
    return Race(what, lines, report)


def _named(who: tuple[Any, ...], thread: str) -> str:
    if not who:
        return thread
    replica, device, merging = who
    if merging:
        return f"the merge function, on {thread}"
    return f"replica {replica} ({device})"


def _short(calls: Stack) -> str:
    """Return the lines of a stack that say most: the user's first, then the innermost."""
    users = [call for call in calls if _is_users(call)][:1]
    chosen = users + [call for call in calls[:SHOWN] if call not in users]
    return "\n".join(f"      {_line(call)} in {call[0].co_name}{_text(call)}" for call in chosen)


def _is_users(call: tuple[CodeType, int]) -> bool:
    """Whether a call is in the user's program: not in minidist, nor where Python goes between."""
    between = threading.__file__, contextlib.__file__
    return not call[0].co_filename.startswith((PACKAGE, *between))


def _line(call: tuple[CodeType, int]) -> str:
    return f"{call[0].co_filename}:{_number(call)}"


def _number(call: tuple[CodeType, int]) -> int:
    code, instruction = call
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def _text(call: tuple[CodeType, int]) -> str:
    text = linecache.getline(call[0].co_filename, _number(call)).strip()
    return f": {text}" if text else ""
