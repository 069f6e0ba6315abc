"""The gallery of hangs: each program ends at once, in the error that it should."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import minidist as md

GALLERY = {path.stem: path for path in sorted((Path(__file__).parent / "hangs").glob("*.py"))}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", GALLERY)
def test_a_hang_ends_in_its_error(name):
    program = load(GALLERY[name])
    kind, pattern = program.error
    with pytest.raises(kind) as caught:
        program.hang()
    assert re.search(pattern, words(caught.value)), words(caught.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", GALLERY)
def test_it_does_while_races_are_looked_for(name):
    program = load(GALLERY[name])
    with md.check(), pytest.raises(program.error[0]):
        program.hang()


if __name__ == "__main__":
    load(GALLERY[sys.argv[1]]).hang()
