"""Diagnosis: what to say of a run that goes wrong. Who waits, in which line, and who does not come.

Where a replica is, its thread's stack tells at the moment when it is asked.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from minidist.errors import MergeMismatchError
from minidist.patience import stack

if TYPE_CHECKING:
    from minidist.run import Run

log = logging.getLogger("minidist")

MOST = 8  # replicas of one kind that a report tells about, each in a line
_PACKAGE = f"{Path(__file__).parent}{os.sep}"


def names(run: Run, replicas: Sequence[int]) -> str:
    """Return "replica 3" or "replicas 0, 1", and how many there are if they are not all named.

    replicas: their numbers in this process; they are named by those among all.
    """
    named = ", ".join(str(run.first + i) for i in replicas[:MOST])
    more = len(replicas) - MOST
    return f"replica{'s' * (len(replicas) != 1)} {named}" + (f" and {more} more" * (more > 0))


def waiting(run: Run, waited: float) -> str:
    """Report on replicas that have waited for others for some seconds."""
    merging = run.merging
    if merging is not None:
        return (
            f"all replicas wait since {waited:.1f} s for the merge function of merge_call number "
            f"{run.meetings_of[merging]} (the deadline is {run.deadline:g} s), which replica "
            f"{run.first + merging} runs{_for_peers(run)}. It is now at\n"
            f"{stack(run.workers[merging].thread)}"
        )
    here, gone = _here(run), _gone(run)
    missing = [i for i in range(run.n) if i not in {*here, *gone}]
    lines = [
        f"replicas wait since {waited:.1f} s for {names(run, missing)} (the deadline is "
        f"{run.deadline:g} s)",
        *_each(here, lambda i: _where(run, i)),
        *_each(gone, lambda i: f"replica {run.first + i} has returned"),
        *_each(
            missing,
            lambda i: (
                f"replica {run.first + i} has come to {run.meetings_of[i]} merge_calls and is now "
                "at\n"
                f"{stack(run.workers[i].thread)}"
            ),
        ),
    ]
    return "\n  ".join(lines)


def unequal(run: Run) -> MergeMismatchError:
    """Return the error for a replica that has finished while another waits for it."""
    here, gone = _here(run), _gone(run)
    return MergeMismatchError(
        f"a different number of merge_calls: {names(run, gone)} finished {_defined(run.fn)} after "
        f"{', '.join(str(run.meetings_of[i]) for i in gone[:MOST])}, while "
        + "; ".join(_each(here, lambda i: _where(run, i)))
        + ". Every replica must make the same merge_calls in the same order"
    )


def check_same(run: Run, functions: Sequence[Any]) -> None:
    """Raise MergeMismatchError unless all replicas met with the same merge function."""
    first = functions[0]
    for i, other in enumerate(functions):
        if other is not first and _code(other) != _code(first):
            raise MergeMismatchError(
                f"replicas met for different things: replica {run.first} in {_at(run, 0)} with "
                f"{first!r}, replica {run.first + i} in {_at(run, i)} with {other!r}; all replicas "
                "must make the same merge_calls in the same order"
            )


def met(run: Run) -> str:
    """Say in which lines of their functions the replicas have met; to be appended."""
    places = {i: _at(run, i) for i in range(min(run.n, MOST))}
    if len(set(places.values())) == 1:
        return f", which met in {places[0]}"
    came = (f"replica {run.first + i} came from {place}" for i, place in places.items())
    return "; " + ", ".join(came)


def users_line() -> str:
    """Return the line of the calling thread that is the user's, as file:line."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "no line"


def note(failure: BaseException, text: str) -> None:
    """Add a note to an exception, once, whatever its class makes of that."""
    try:
        if text not in getattr(failure, "__notes__", ()):
            failure.add_note(text)
    except Exception:
        log.warning("%s: %s", type(failure).__name__, text)


def summary(failure: BaseException) -> str:
    """Return an exception's type and message."""
    try:
        return "".join(traceback.format_exception_only(failure)).strip()
    except Exception:
        return type(failure).__name__


def _here(run: Run) -> list[int]:
    return [i for i in range(run.n) if run.rendezvous.payloads[i] is not None]


def _gone(run: Run) -> list[int]:
    return [i for i in range(run.n) if run.rendezvous.departed[i]]


def _each(replicas: Sequence[int], line: Callable[[int], str]) -> list[str]:
    lines = [line(i) for i in replicas[:MOST]]
    if len(replicas) > MOST:
        lines.append(f"and {len(replicas) - MOST} more like these")
    return lines


def _where(run: Run, i: int) -> str:
    number = run.meetings_of[i]
    return f"replica {run.first + i} waits in merge_call number {number}, in {_at(run, i)}"


def _for_peers(run: Run) -> str:
    """Say for which other processes it is waited; to be appended."""
    site = run.strategy.site
    waits = [peers.waits for peers in (site.peers, site.sums)]
    servers = run.strategy.variable_mgr.servers
    if servers is not None:
        waits.append(servers.caller.waits)
    return "".join(f"; {says()}" for says in waits if says is not None)


def _at(run: Run, i: int) -> str:
    """Say in which line of its function a replica that waits is: the user's, if one is."""
    frame = sys._current_frames().get(run.workers[i].thread.ident or 0)
    last: FrameType | None = None
    while frame is not None and frame.f_code is not run.entry:
        last = frame
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            break
        frame = frame.f_back
    return _place(last.f_code, last.f_lineno) if last else "no line"


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_name!r} at {code.co_filename}:{line}"


def _defined(fn: Any) -> str:
    code = _code(fn)
    return _place(code, code.co_firstlineno) if isinstance(code, CodeType) else repr(fn)


def _code(fn: Any) -> Any:
    """Return what is the same for the same function defined, or bound, anew in each replica."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", fn)
