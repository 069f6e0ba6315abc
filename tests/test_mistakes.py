"""The gallery of mistakes between ranks: each ends in an error that names them, and none hangs.

Each file of tests/mistakes/ is a program of two ranks: mpiexec -n 2 python tests/mistakes/….py
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import pytest
import ranks

GALLERY = {path.stem: path for path in sorted((Path(__file__).parent / "mistakes").glob("*.py"))}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fails_as_it_says(path, cluster):
    """Every rank raises what the program says; where it says nothing of a rank, that one ends."""
    program = load(path)
    expected = program.error
    if not isinstance(expected, dict):
        expected = dict.fromkeys(range(2), expected)
    if cluster.task not in expected:
        program.mistake(cluster)
        return
    kind, words = expected[cluster.task]
    with pytest.raises(kind, match=words):
        program.mistake(cluster)


CASES = {name: (2, 0, partial(fails_as_it_says, path)) for name, path in GALLERY.items()}


@pytest.fixture(scope="module")
def outcome(request):
    return ranks.run(__file__, 2, *ranks.chosen(request, CASES))


def test_there_are_enough():
    assert len(GALLERY) >= 12


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_ends_in_an_error_that_names_the_ranks(outcome, case):
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
