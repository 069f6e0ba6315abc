"""What a stage tells: one line of JSON for each finding; and how it comes to a GPU.

With --standin there is none: CuPy is the tests' stand-in, and everything is small. Then the numbers
mean nothing, and that all of it runs is what is shown.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
STANDIN = "--standin" in sys.argv
MARK = "FOUND "  # before the JSON, in what a stage prints


def tell(
    name: str,
    value: float | str,
    unit: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    good: bool | None = None,
    measured: bool = False,
    **more: Any,
) -> None:
    """Tell a finding. Told again under the same name it takes the place of the one before.

    least, most: what it should reach. good: whether it is as it should be, where that is no number.
    measured: a GPU should reach it, and the stand-in need not. more: for the report alone, but
    `ends`: that nothing else is worth running.
    """
    if measured and STANDIN:
        least = most = None
    if least is not None:
        good = float(value) >= least
    elif most is not None:
        good = float(value) <= most
    wanted = "" if least is None is most else f"≥ {least:g}" if most is None else f"≤ {most:g}"
    found = {"name": name, "value": value, "unit": unit, "wanted": wanted, "good": good, **more}
    print(f"{MARK}{json.dumps(found, default=str)}", flush=True)


@contextmanager
def trying(name: str) -> Iterator[None]:
    """Let what is raised in a with statement be a finding, and go on behind it."""
    try:
        yield
    except Exception as failure:
        traceback.print_exc()
        words = f"{type(failure).__name__}: {failure}"[:300]
        tell(name, words, good=False, trace=traceback.format_exc()[-3000:])


@contextmanager
def gpu() -> Iterator[Any]:
    """Give CuPy, or with --standin what stands in for it and for NCCL."""
    if not STANDIN:
        import cupy

        yield cupy
        return
    sys.path.append(str(ROOT / "tests" / "gpu"))
    from devices import cuda
    from nccl_standin import nccl

    with tempfile.TemporaryDirectory() as folder, cuda(Path(folder), 0) as module, nccl(module):
        yield module


def seconds(call: Callable[[], object], wait: Callable[[], object], *, within: float) -> float:
    """Return the median seconds of a call whose work a GPU does, in about so many seconds.

    wait: waits for that work. Calls are timed in blocks that are long beside one wait.
    """
    call()
    wait()
    started = time.perf_counter()
    call()
    wait()
    once = max(time.perf_counter() - started, 1e-6)
    together = 1 if STANDIN else max(1, min(200, round(0.02 / once)))
    blocks = 1 if STANDIN else max(3, min(25, round(within / (once * together))))
    times = []
    for _ in range(blocks):
        started = time.perf_counter()
        for _ in range(together):
            call()
        wait()
        times.append((time.perf_counter() - started) / together)
    return statistics.median(times)


def environment(build: Path) -> dict[str, str]:
    """Return the environment in which what was built, and what was brought along, is found."""
    paths = [str(build), str(build / "wheels"), str(ROOT / "bench"), str(ROOT / "bench" / "peers")]
    given = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, given] if given else paths),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONFAULTHANDLER": "1",
        "CUPY_CACHE_DIR": str(build / "kernels_of_cupy"),
    }
