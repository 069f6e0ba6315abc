"""Which implementation is the fastest here for a kind of work: measured once, and remembered.

A kind of work has a name, which says all that matters but the number of examples. What was chosen
is kept in a file for each kind of machine (processor, build and versions), so that every process on
it computes alike, and the same program has the same bits tomorrow. Who measures holds a lock on the
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

import numpy as np

from minidist import observe
from minidist.device import cpu_onednn
from minidist.device.cpu_work import may_do
from minidist.kernels import channel, convolution, layer, reduce, tiles

try:
    import fcntl
except ImportError:  # no lock between processes where the system has none
    fcntl = None  # type: ignore[assignment]

Ways = Mapping[str, Callable[[], object]]  # what does the work, by the implementation's name

ROUNDS = 5  # in which all ways are timed in turn, after one that is not
PATIENCE = 30.0  # seconds for which a process waits for another that measures
NOWHERE = Path(os.devnull, "no home directory")  # where no file can be


class Choices:
    """Choices in one file: {"choices": {work: {"chosen": name, "microseconds": {name: time}}}}.

    `about` is written beside them, for who looks into the file.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self.path = path
        self._about = dict(about)
        self._lock = observe.Lock()
        self._holds = 0  # of the lock on the file: a way may itself consist of work to choose for
        self._lock_file: int | None = None  # its descriptor, while this process holds that lock
        self._known: dict[str, dict[str, Any]] = {}
        self._read()

    def get(self, work: str, ways: Ways) -> str:
        """Return the name of the way that was chosen, measuring all of them first if none was."""
        with self._lock:
            if work not in self._known:
                with self._held():
                    self._read()
                    if work not in self._known:
                        self._known[work] = _measured(ways)
                        self._write()
            return str(self._known[work]["chosen"])

    def __len__(self) -> int:
        return len(self._known)

    def why_not_kept(self) -> str:
        """Return why choices cannot be kept in the file, as a sentence; empty where they can."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path.parent):
                return ""
        except OSError as cause:
            return str(cause)

    def renew(self) -> None:
        """Forget, in a child of a fork, who held the locks.

        The parent's lock on the file would outlive the parent's measuring as long as the child had
        that file open.
        """
        self._lock = observe.Lock()
        self._holds = 0
        self._close()

    def _read(self) -> None:
        """Add what the file has; one that is missing or not whole has nothing.

        What has somebody's name who cannot do that work is measured again.
        """
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError
        ):
            choices = json.loads(self.path.read_text())["choices"]
            self._known |= {
                work: each
                for work, each in choices.items()
                if isinstance(each, dict) and may_do(each.get("chosen"), work)
            }

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
        try:
            with contextlib.suppress(OSError):
                if self._holds == 1:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    path = self.path.with_suffix(".lock")
                    self._lock_file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
                    _lock(self._lock_file)
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._close()

    def _close(self) -> None:
        number, self._lock_file = self._lock_file, None
        if number is not None:
            os.close(number)


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
    """Return where the files of choices are: $XDG_CACHE_HOME/minidist, or ~/.cache/minidist.

    A relative path there counts for nothing, as its specification says. Who has no home directory
    either can have no files.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            cache = NOWHERE
    return cache / "minidist"


def of_machine() -> Choices:
    """Return the choices for this machine, and for this build of all that may compute on it."""
    onednn = cpu_onednn.find()
    about = {
        "processor": _processor(),
        "minidist": _compiled(onednn),
        "numpy": np.__version__,
        "onednn": onednn.version() if onednn is not None else "none",
        "tiles": "can be used" if tiles.has_tiles() else "none",  # a process may be denied them
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return Choices(folder() / f"kernels-{digest[:12]}.json", about)


def _compiled(onednn: Any) -> str:
    """Return a digest of the compiled parts: there may be many builds of a version."""
    digest = hashlib.sha256()
    for part in (channel, convolution, layer, reduce, tiles, onednn):
        if part is not None:
            digest.update(Path(str(part.__file__)).read_bytes())
    return digest.hexdigest()[:12]


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
