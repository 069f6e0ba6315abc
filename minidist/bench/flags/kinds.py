"""What a flag is: its default, its words, and its kind, which reads its text.

Each kind says in words what it allows.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from minidist.bench.inject import FORM as FAULTS_FORM
from minidist.bench.inject import Fault
from minidist.errors import UsageError
from minidist.optim.schedules import FORM, Piecewise
from minidist.trace import files as trace

T = TypeVar("T")

MANY = 10**9  # steps or examples: more than anyone can wait for or hold


@dataclass(frozen=True)
class Kind:
    """`parse` reads a value from its text or raises ValueError; `allowed` is that in words.

    A switch may also be given without a value, which is "true", and as --noname, "false".
    """

    parse: Callable[[str], object]
    allowed: str
    switch: bool = False


def flag(default: T, kind: Kind, words: str, *aliases: str) -> T:
    """Return the dataclass field of one flag; `words` is its help, `aliases` its further names."""
    return field(default=default, metadata={"kind": kind, "words": words, "aliases": aliases})


def filled(kind: Kind, words: str, *aliases: str) -> Any:
    """Return the field of a flag that follows from others where it is not given."""
    return flag(None, kind, words, *aliases)


def choice(*names: str) -> Kind:
    """One of some names."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    *most, last = names
    return Kind(parse, f"{', '.join(most)} or {last}" if most else last)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise ValueError(text)
        return number

    return parse


def _real(accepts: Callable[[float], bool]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = float(text)
        if not math.isfinite(number) or not accepts(number):
            raise ValueError(text)
        return number

    return parse


def whole(least: int, most: int = MANY) -> Kind:
    """A whole number in a range."""
    return Kind(_whole(least, most), f"a whole number from {least} to {most}")


def real(allowed: str, accepts: Callable[[float], bool]) -> Kind:
    """A finite number that passes a test."""
    return Kind(_real(accepts), allowed)


def several(one: Callable[[str], float], allowed: str) -> Kind:
    """Numbers with commas between them, in any order."""
    return Kind(lambda text: tuple(sorted({one(part) for part in text.split(",")})), allowed)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _narrow(text: str) -> str | bool:
    if text in ("float16", "bfloat16"):
        return text
    return "float16" if _boolean(text) else False


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError(text)
    return text


def _text(text: str) -> str:
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


def _trace_file(text: str) -> str:
    trace.check(text)
    return _output_file(text)


BOOLEAN = Kind(_boolean, "true or false", switch=True)
NARROW = Kind(_narrow, "float16, bfloat16, true (float16) or false", switch=True)
POSITIVE = real("a number above 0", lambda number: number > 0)
EPOCH_COUNT = real("a number above 0, at most a million", lambda number: 0 < number <= 1e6)
NOT_NEGATIVE = real("a number of at least 0", lambda number: number >= 0)
FRACTION = real("a number from 0 to just below 1", lambda number: 0 <= number < 1)
SHARE = real("a number above 0, at most 1", lambda number: 0 < number <= 1)
DEVICE = Kind(_device, "cpu, cuda, or one GPU as cuda:0")
TEXT = Kind(_text, "a text")
KERNELS = Kind(_text, "auto, gemm, onednn or a file")
FOLDER = Kind(_text, "a folder")
OUTPUT_FILE = Kind(_output_file, "a file name in a folder that exists")
TRACE_FILE = Kind(_trace_file, "a file name in a folder that exists, ending in .json or .html")
FAULTS = Kind(Fault.parse, FAULTS_FORM)
SCHEDULE = Kind(Piecewise.parse, FORM)
STEPS = several(_whole(1, MANY), "whole numbers from 1 with commas between them")
EPOCHS = several(_real(lambda number: number > 0), "numbers above 0 with commas between them")
