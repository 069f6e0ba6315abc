"""What is opened and closed leaves nothing behind: no thread, no open file, no object.

bench/leaks.py does the same a thousand times, and looks at the memory too.
"""

from __future__ import annotations

import gc
import runpy
from collections import Counter
from pathlib import Path

import pytest

LEAKS = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "leaks.py"))
ROUND = 20
KINDS = list(LEAKS["openings"](Path()))


@pytest.fixture(autouse=True)
def nothing_older():
    """Leave out of all countings what is there already; of a whole suite that is a lot to walk."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def objects():
    """Return how many objects of each of our classes there are."""
    classes = [type(item) for item in gc.get_objects()]
    return Counter(each for each in classes if str(each.__module__).startswith("minidist"))


@pytest.mark.parametrize("kind", KINDS)
def test_openings_and_closings_leave_nothing_behind(kind, tmp_path):
    opening = LEAKS["openings"](tmp_path)[kind]
    counted = []
    for _ in range(3):  # the first round makes what is kept once
        for _ in range(ROUND):
            opening()
        counted.append((LEAKS["held"](), objects()))
    (_, (before, objects_before), (after, objects_after)) = counted
    for what in ("threads", "open files"):
        assert after[what] == before[what]
    assert objects_after == objects_before
    every_object = "objects that Python tracks"
    more = after[every_object] - before[every_object]
    assert more < ROUND  # not one for each; but a thread may be about to end


def test_the_report_counts_what_is_left(capsys):
    left = []
    LEAKS["measure_openings"](20, {"forgetful": lambda: left.append([]), "tidy": lambda: None})
    _, _, forgetful, tidy = capsys.readouterr().out.splitlines()
    assert int(forgetful.split()[4]) >= 20
    assert abs(int(tidy.split()[4])) < 20
