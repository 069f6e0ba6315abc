"""Findings: what the doctor has to say of something, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """Something that does not work, or not as it should, and what mends it."""

    what: str
    cure: str


@dataclass
class Findings:
    """What was found, by name, in the order in which it is told; and the problems among it."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def wrong(self, what: str, cure: str) -> None:
        self.problems.append(Problem(what, cure))
