"""`python -m minidist.bench`: parse the flags, do the run, and turn errors into sentences.

| exit status | meaning |
|---|---|
| 0 | the run is complete |
| 1 | it failed: a loss that is not a number, a replica that hung, an output that takes no more, … |
| 2 | a flag or its value is unknown, or contradicts another one |
| 3 | a data file is missing or not what it should be |
| 130 | Ctrl-C |
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from minidist.bench.flags.parse import parse
from minidist.bench.main import main as do
from minidist.errors import DataError, MinidistError, UsageError


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status. `--help` and `--version` raise SystemExit(0)."""
    try:
        _run(arguments)
    except UsageError as error:
        return _say(error, 2)
    except DataError as error:
        return _say(error, 3)
    except MinidistError as error:
        return _say(error, 1)
    except MemoryError as error:
        return _say(f"not enough memory ({error}): make --batch_size or --num_devices smaller", 1)
    except OSError as error:
        # Files are named by the errors of those who read and write them; standard output is not.
        return _output_failed(error) if error.filename is None else _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    return 0


def _run(arguments: Sequence[str]) -> None:
    try:
        with warnings.catch_warnings():
            # What overflows ends in a NonFiniteError, which says more than NumPy's warnings.
            warnings.simplefilter("ignore", RuntimeWarning)
            do(parse(arguments))
    finally:
        sys.stdout.flush()  # while an output that takes no more can still become a sentence


def _output_failed(error: OSError) -> int:
    """Say why standard output takes no more; nothing where its reader has left, as `head` does."""
    # The interpreter will try once more to write what is left.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if isinstance(error, BrokenPipeError) else _say(f"standard output: {error}", 1)


def _say(what: object, status: int) -> int:
    print(f"minidist.bench: {what}", file=sys.stderr)
    return status


if __name__ == "__main__":
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, it stays open
    sys.exit(main(sys.argv[1:]))
