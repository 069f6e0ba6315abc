"""Files: a recording is written as what the file's name asks for."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from minidist.errors import UsageError
from minidist.trace.chrome import to_chrome
from minidist.trace.page import page
from minidist.trace.recording import Recording

ENDINGS = (".json", ".html")


def check(path: str | PathLike[str]) -> None:
    """Raise UsageError for a file name of another kind."""
    if Path(path).suffix not in ENDINGS:
        raise UsageError(
            f"a trace is written to a file that ends with .json (for Perfetto) or .html (a page "
            f"for any browser), not to {str(path)!r}"
        )


def write(path: Path, recording: Recording) -> None:
    """Write a recording."""
    trace = to_chrome(recording)
    text = page(trace) if path.suffix == ".html" else json.dumps(trace, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")
