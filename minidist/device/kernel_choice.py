"""Who chooses what computes convolutions and products: MINIDIST_KERNELS, or `set_name`.

On CPUs `auto` measures, `gemm` and `onednn` take these wherever they can, and the path of a file of
choices fixes them (cpu_linear.py). On GPUs `gemm` means products of matrices in place of cuDNN
(cuda_dnn.py); all else is the same there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from minidist.device.cpu_work import able, may_do
from minidist.errors import UsageError

KINDS = ("auto", "gemm", "onednn")

_name: str | None = None
_of_file: dict[str, str] | None = None


def set_name(name: str) -> None:
    """Let `auto`, `gemm`, `onednn` or a user's file choose. Raises UsageError for other files."""
    global _name, _of_file
    _of_file = None if name in KINDS else read(Path(name))
    _name = name


def name() -> str:
    """Return who chooses: `auto`, `gemm`, `onednn` or a path."""
    if _name is None:
        set_name(os.environ.get("MINIDIST_KERNELS") or "auto")
    assert _name is not None
    return _name


def of_file() -> dict[str, str] | None:
    """Return what the user's file chooses for each kind of work; None where there is none."""
    name()
    return _of_file


def read(path: Path) -> dict[str, str]:
    """Return what a file of choices says: for each kind of work, an implementation's name.

    Raises UsageError where it cannot be read, or names somebody who cannot do a work.
    """
    try:
        choices = json.loads(path.read_text())["choices"]
        chosen = {work: each["chosen"] for work, each in choices.items()}
        unfit = [work for work, name in chosen.items() if not may_do(name, work)]
        if not unfit:
            return chosen
        can = ", ".join(able(unfit[0])) or "a name"
        problem: Any = f"{json.dumps(chosen[unfit[0]])} is chosen for {unfit[0]!r}; it may be {can}"
    except FileNotFoundError:
        raise UsageError(
            f"`{path}` is neither auto, gemm, onednn nor a file: give one of these, or a copy of a "
            "file that minidist has written (the doctor says where)"
        ) from None
    except OSError as cause:
        problem = cause
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        problem = 'it is not as minidist writes it: {"choices": {work: {"chosen": name}}}'
    raise UsageError(
        f"the file of choices {path} cannot be used: {problem}; give auto, gemm, onednn or a copy "
        "of a file that minidist has written (the doctor says where)"
    )
