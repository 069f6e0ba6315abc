"""NVTX ranges on the stand-in: spans, and what streams are given, nest."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist.device import get
from minidist.errors import UsageError


def test_ranges_nest_as_what_is_told(standin: Any) -> None:
    device = get("cuda:0")
    array = device.copy_in(np.ones(4, np.float32))
    area = md.StagingArea(["float32"], device=device)
    assert not standin.ranges
    with md.nvtx():
        area.put([md.Tensor(array, device)])
        device.ops.exp(array)
    pushed = list(standin.ranges)
    assert pushed[0] == "put: into a staging area" and "copy: a staged item" in pushed
    assert "exp (cuda:0 compute)" in pushed and "copy (cuda:0 copy)" in pushed
    depth = 0
    for each in pushed:
        depth += 1 if each is not None else -1
        assert depth >= 0
    assert depth == 0 and pushed.index("copy: a staged item") < pushed.index("copy (cuda:0 copy)")
    device.ops.exp(array)
    assert standin.ranges == pushed


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UsageError, match="pip install 'minidist"):
        md.nvtx()


def test_a_profiler_asks_for_them() -> None:
    """By its variable; where there is no CuPy, that is no reason to fail."""
    program = (
        "import sys; sys.modules['cupy'] = {cupy}; import minidist; from minidist import observe; "
        "print([type(each).__name__ for each in observe.watching])"
    )
    fake = "__import__('unittest.mock').mock.MagicMock()"
    for cupy, said in ((fake, "['Ranges']"), ("None", "[]")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(cupy=cupy)],
            env={"NVTX_INJECTION64_PATH": "/a/profiler", "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == said
