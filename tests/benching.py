"""Run the benchmark's command, and read what it prints and writes.

Runs are in this process through the command's `main`, and are kept for all tests that ask for the
same flags; where pipes, terminals or signals matter, the command is a process of its own.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from minidist.bench.__main__ import main

COMMAND = [sys.executable, "-m", "minidist.bench"]
# Of a process that is started here, output is buffered as it is for users.
ENVIRONMENT = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
QUICK = ("--num_batches=4", "--num_warmup_batches=1")
PLAIN_SGD = ("--optimizer=sgd", "--weight_decay=0")

# As scripts that read the ancestor's output look for its rows and its total.
ROW = re.compile(
    r"^(\d+)\timages/sec: (\d+\.\d) \+/- (\d+\.\d) \(jitter = (\d+\.\d)\)\t(\d+\.\d{3})$", re.M
)
TOTAL = re.compile(r"^-{64}\ntotal images/sec: (\d+\.\d\d)\n-{64}$", re.M)
ACCURACY = re.compile(
    r"^Accuracy @ 1 = (\d\.\d{4}) Accuracy @ 5 = (\d\.\d{4}) \[(\d+) examples\]$", re.M
)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Output(NamedTuple):
    """What one run printed and wrote."""

    text: str
    results: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.results["steps"]]

    @property
    def checksums(self) -> list[str]:
        return list(self.results["weights_checksum"].values())


def call(*arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; return its exit status, output and errors."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        status = main(arguments)
    return status, out.getvalue(), errors.getvalue()


def fresh(*arguments: str) -> Output:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        status, text, errors = call(*arguments, f"--json={file}")
        assert (status, errors) == (0, "")
        assert os.listdir(folder) == ["results.json"]
        return Output(text, json.loads(file.read_text()))


run = cache(fresh)


def command(
    *arguments: str, stdout: Any = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with further environment variables."""
    return subprocess.run(
        [*COMMAND, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**ENVIRONMENT, **variables},
        check=False,
    )


def refused(*arguments: str) -> tuple[int, str]:
    """Run a command that must fail; return its exit status and its one line of explanation."""
    status, _, errors = call(*arguments)
    assert errors.startswith("minidist.bench: ")
    assert errors.count("\n") == 1, "a sentence and nothing else"
    return status, errors.removeprefix("minidist.bench: ").rstrip("\n")
