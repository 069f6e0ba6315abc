"""What the flags ask for: one run or all policies' runs, and their results in a file."""

from __future__ import annotations

from minidist.bench import making, report
from minidist.bench.compare import compare
from minidist.bench.flags import ALL, Flags
from minidist.bench.run import run
from minidist.errors import MinidistError


def main(flags: Flags) -> None:
    """Do what the flags ask for, print it, and write its JSON if they ask for that.

    Raises what `run` raises, and MinidistError where the results cannot be written.
    """
    dataset = making.dataset(flags)
    results = (compare if flags.variable_update == ALL else run)(flags, dataset)
    if flags.json is None:
        return
    try:
        report.write(flags.json, results)
    except OSError as error:
        raise MinidistError(
            f"--json={flags.json}: the results could not be written: {error.strerror or error}"
        ) from error
