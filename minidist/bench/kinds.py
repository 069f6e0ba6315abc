"""What a flag can take: each kind reads its text and says in words what it allows."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minidist.bench.schedule import FORM, Schedule
from minidist.errors import UsageError

MANY = 10**9  # steps or examples: more than anyone can wait for or hold


@dataclass(frozen=True)
class Kind:
    """`parse` reads a value from its text or raises ValueError; `allowed` is that in words."""

    parse: Callable[[str], object]
    allowed: str


def choice(*names: str) -> Kind:
    """One of some names."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    *most, last = names
    return Kind(parse, f"{', '.join(most)} or {last}" if most else last)


def whole(least: int, most: int = MANY) -> Kind:
    """A whole number in a range."""

    def parse(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise ValueError(text)
        return number

    return Kind(parse, f"a whole number from {least} to {most}")


def real(allowed: str, accepts: Callable[[float], bool]) -> Kind:
    """A finite number that passes a test."""

    def parse(text: str) -> float:
        number = float(text)
        if not math.isfinite(number) or not accepts(number):
            raise ValueError(text)
        return number

    return Kind(parse, allowed)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _folder(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _output_file(text: str) -> str:
    path = Path(text)
    try:
        if not text or path.is_dir() or not path.parent.is_dir():
            raise ValueError(text)
        if path.is_file() or not path.exists():  # tried now, and not after the training
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{text[:80]!r} cannot be written: {why}") from None
    return text


BOOLEAN = Kind(_boolean, "true or false")
POSITIVE = real("a number above 0", lambda number: number > 0)
EPOCH_COUNT = real("a number above 0, at most a million", lambda number: 0 < number <= 1e6)
NOT_NEGATIVE = real("a number of at least 0", lambda number: number >= 0)
FRACTION = real("a number from 0 to just below 1", lambda number: 0 <= number < 1)
FOLDER = Kind(_folder, "a folder")
OUTPUT_FILE = Kind(_output_file, "a file name in a folder that exists")
SCHEDULE = Kind(Schedule.parse, FORM)
