"""An observer that adds up which bytes it hears of, by their way."""

from __future__ import annotations

from collections import Counter

from minidist.observe import Observer


class Heard(Observer):
    """Bytes by link, as "cpu:0->cpu:1", of every kind together."""

    def __init__(self) -> None:
        self.links: Counter[str] = Counter()

    def moved(self, source: str, destination: str, nbytes: int, what: str) -> None:
        self.links[f"{source}->{destination}"] += nbytes
