"""Which implementation is the fastest here for a kind of work: measured once, and remembered.

A kind of work has a name, which says all that matters but the number of examples. What was chosen
is kept in a file for each kind of machine (processor and versions), so that every process on it
computes alike, and the same program has the same bits tomorrow. Who measures holds a lock on the
file; who waited for it finds the choice made. Where no file can be written, a process keeps its
choices to itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minidist import observe
from minidist.errors import UsageError

try:
    import fcntl
except ImportError:  # no lock between processes where the system has none
    fcntl = None  # type: ignore[assignment]

Ways = Mapping[str, Callable[[], object]]  # what does the work, by the implementation's name

ROUNDS = 5  # in which all ways are timed in turn, after one that is not
PATIENCE = 30.0  # seconds for which a process waits for another that measures


class Choices:
    """Choices in one file: {"choices": {work: {"chosen": name, "microseconds": {name: time}}}}.

    fixed: the file is the user's. It is read once and never written, and work that it does not
    name has no choice. Raises UsageError where such a file cannot be read.
    """

    def __init__(self, path: Path, about: Mapping[str, str], *, fixed: bool = False) -> None:
        self.path = path
        self._about = dict(about)
        self._fixed = fixed
        self._lock = observe.Lock()
        self._holds = 0  # of the lock on the file: a way may itself consist of work to choose for
        self._known: dict[str, dict[str, Any]] = {}
        self._read()

    def get(self, work: str, ways: Ways) -> str | None:
        """Return the name of the way that was chosen, measuring all of them first if none was."""
        with self._lock:
            if work not in self._known and not self._fixed:
                with self._held():
                    self._read()
                    if work not in self._known:
                        self._known[work] = _measured(ways)
                        self._write()
            found = self._known.get(work)
            return None if found is None else str(found["chosen"])

    def __len__(self) -> int:
        return len(self._known)

    def renew(self) -> None:
        """Forget, in a child of a fork, who held the lock."""
        self._lock = observe.Lock()

    def _read(self) -> None:
        try:
            choices = json.loads(self.path.read_text())["choices"]
            self._known |= {
                work: {**each, "chosen": each["chosen"]} for work, each in choices.items()
            }
        except FileNotFoundError:
            problem: Any = "it is not there"
        except OSError as cause:
            problem = cause
        except (ValueError, KeyError, TypeError, AttributeError):
            problem = 'it is not as minidist writes it: {"choices": {work: {"chosen": name}}}'
        else:
            return
        if self._fixed:
            raise UsageError(
                f"the file of choices {self.path} cannot be used: {problem}; give auto, gemm, "
                "onednn or a copy of a file that minidist has written (the doctor says where)"
            )

    def _write(self) -> None:
        text = json.dumps({**self._about, "choices": self._known}, indent=1, sort_keys=True)
        with contextlib.suppress(OSError):
            number, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            try:
                with os.fdopen(number, "w") as file:
                    file.write(text)
                os.replace(name, self.path)
            except OSError:
                os.unlink(name)
                raise

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock of the file; without it after some time, or where there can be none."""
        self._holds += 1
        with contextlib.ExitStack() as stack:
            stack.callback(self._let_go)
            with contextlib.suppress(OSError):
                if self._holds == 1:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(open(self.path.with_suffix(".lock"), "w"))
                    _lock(file.fileno())
            yield

    def _let_go(self) -> None:
        self._holds -= 1


def _lock(number: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while fcntl is not None:
        try:
            return fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)


def _measured(ways: Ways) -> dict[str, Any]:
    """Return which way has the smallest of its times, all of them in turn, and these times."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(ROUNDS):
        for name, way in ways.items():
            begin = time.thread_time()
            way()
            times[name].append((time.thread_time() - begin) * 1e6)
    best = {name: round(min(each), 1) for name, each in times.items()}
    return {"chosen": min(best, key=best.__getitem__), "microseconds": best}


def folder() -> Path:
    """Return where the files of choices are: $XDG_CACHE_HOME/minidist, or ~/.cache/minidist."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "minidist"


def of_machine(versions: Mapping[str, str]) -> Choices:
    """Return the choices for this machine and these versions."""
    about = {"processor": _processor(), **versions}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return Choices(folder() / f"kernels-{digest[:12]}.json", about)


def _processor() -> str:
    """Return all that the system says of a processor's kind and of what it can do."""
    wanted = ("model name", "cpu family", "model", "stepping", "cache size", "flags")
    said = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            if not name.strip():
                break
            if name.strip() in wanted:
                said[name.strip()] = value.strip()
    return "; ".join(f"{name} {value}" for name, value in said.items()) or platform.processor()
