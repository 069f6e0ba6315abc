"""The gallery of races: each planted bug is found, each cured program is clean, in any order."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import minidist as md
from minidist.checking import fuzz
from minidist.errors import RaceError

GALLERY = {path.stem: path for path in sorted((Path(__file__).parent / "races").glob("*.py"))}
DEFAULT = RaceError, "nothing orders two accesses"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_enough():
    assert len(GALLERY) >= 12


@pytest.mark.parametrize("name", GALLERY)
def test_a_planted_bug_is_found_in_any_order(name):
    bug = load(GALLERY[name])
    kind, words = getattr(bug, "error", DEFAULT)
    with pytest.raises(kind, match=words), md.check():
        bug.bug()
    for seed in range(5):
        with pytest.raises(kind, match=words), md.check(), fuzz(seed):
            bug.bug()


@pytest.mark.parametrize("name", GALLERY)
def test_the_cured_program_is_clean_in_any_order(name):
    cured = load(GALLERY[name])
    with md.check():
        cured.cure()
    for seed in range(5):
        with md.check(), fuzz(seed):
            cured.cure()


@pytest.mark.parametrize("name", GALLERY)
def test_nothing_checks_when_nobody_asks(name):
    program = load(GALLERY[name])
    if not hasattr(program, "error"):
        program.bug()


if __name__ == "__main__":
    with md.check():
        load(GALLERY[sys.argv[1]]).bug()
