"""The compiled parts, built beside the checkout for the Python that runs this."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_stages.tell import ROOT, tell

FILES = "setup.py", "pyproject.toml", "README.md", "LICENSE"


def main() -> None:
    folder = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    started = time.perf_counter()
    shutil.copytree(
        ROOT / "minidist", folder / "minidist", dirs_exist_ok=True, ignore=_but_sources("kernels")
    )
    shutil.copytree(ROOT / "kernels", folder / "kernels", dirs_exist_ok=True, ignore=_but_sources())
    for name in FILES:
        shutil.copy2(ROOT / name, folder)
    link = folder / "minidist" / "kernels"
    if not link.is_symlink():
        link.symlink_to(Path("..") / "kernels")
    status = _build(folder)
    if status:  # by tools that are too old for the project's metadata, which nothing here needs
        (folder / "pyproject.toml").unlink()
        status = _build(folder)
    tell("build", round(time.perf_counter() - started, 1), "s", good=status == 0)
    sys.exit(status)


def _build(folder: Path) -> int:
    jobs = len(os.sched_getaffinity(0))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", f"-j{jobs}"]
    # Without the safe path, so that setup.py finds what lies beside it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def _but_sources(*names: str) -> Callable[[Any, list[str]], set[str]]:
    return shutil.ignore_patterns("__pycache__", "*.so", *names)


if __name__ == "__main__":
    main()
