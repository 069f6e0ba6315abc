"""Checking: what nothing orders is an error, though it went well this time.

    with md.check():                 # or md.check() from now on, or MINIDIST_CHECK=1 from the start
        strategy.run(step, ...)      # raises RaceError

| file | idea |
|---|---|
| verbs.py | which arrays each verb of a device reads and writes |
| handovers.py | how Python's own threads and queues hand over |
| clocks.py | who does something, and what of it others have seen |
| orders.py | where one sees what another did: streams, runs, meetings, hand-overs |
| memory.py | who touched which bytes of a buffer last |
| places.py | where in the program that was |
| telling.py | methods that tell what they do |
| checker.py | the observer that puts these together |
| fuzz.py | threads take turns, chosen by a seed |

docs/instruments/races.md says what is checked and what is not.
"""

from __future__ import annotations

from minidist.checking.checker import Checker, check
from minidist.checking.fuzz import fuzz
from minidist.checking.places import Race

__all__ = ["Checker", "Race", "check", "fuzz"]
