"""With any of what keeps order in cuda*.py taken away, the stand-in shows wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from devices import cuda
from mistakes import CASES

from minidist.device import get

SEEDS = range(12)


@pytest.mark.parametrize(("program", "mistake"), CASES, ids=lambda case: case.__name__)
def test_a_mistake_shows(
    libraries: Path, program: Callable[[], bool], mistake: Callable[..., None]
) -> None:
    right = []
    for seed in SEEDS:
        with cuda(libraries, seed):
            assert program()
        with cuda(libraries, seed) as cupy:
            get("cuda:0")
            mistake(cupy)
            right.append(program())
            cupy.gpu.drain()
    assert not all(right)
