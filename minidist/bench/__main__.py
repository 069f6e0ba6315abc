"""`python -m minidist.bench`: parse the flags, do the run, and turn errors into sentences.

| exit status | meaning |
|---|---|
| 0 | the run is complete |
| 1 | it failed: a loss that is not a number, a replica that hung, an output that takes no more, … |
| 2 | a flag or its value is unknown, or contradicts another one |
| 3 | a data file is missing or not what it should be |
| 130 | Ctrl-C |

Of several ranks all end with the status of the one that has failed first.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

try:
    from minidist.bench.crew import Crew, Ended
    from minidist.bench.flags.parse import parse
    from minidist.bench.main import main as do
    from minidist.errors import DataError, MinidistError, PeerError, UsageError
except KeyboardInterrupt:  # in the first moments; from then on `main` has it
    print("minidist.bench: interrupted", file=sys.stderr)
    sys.exit(130)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status. `--help` and `--version` raise SystemExit(0)."""
    crew = Crew()
    try:
        _run(arguments, crew)
    except (Exception, KeyboardInterrupt) as error:
        ended = _as_sentence(error)
        crew.fail(error)
        return crew.end(ended)
    return crew.end(Ended())


def _run(arguments: Sequence[str], crew: Crew) -> None:
    try:
        with warnings.catch_warnings():
            # What overflows ends in a NonFiniteError, which says more than NumPy's warnings.
            warnings.simplefilter("ignore", RuntimeWarning)
            with crew.console():  # for --help
                flags = parse(arguments)
            do(flags, crew)
    finally:
        sys.stdout.flush()  # while an output that takes no more can still become a sentence


def _as_sentence(error: BaseException) -> Ended:
    """Return how the command ends by an exception. Raises one that nobody was to expect."""
    match error:
        case UsageError():
            return Ended(2, str(error))
        case DataError():
            return Ended(3, str(error))
        case MinidistError():
            return Ended(1, str(error), remove=2 * isinstance(error, PeerError))
        case MemoryError():
            cure = "make --batch_size or --num_devices smaller"
            return Ended(1, f"not enough memory ({error}): {cure}")
        case OSError(filename=None):
            # Files are named by the errors of those who read and write them; standard output is
            # not.
            return _output_failed(error)
        case OSError():
            return Ended(1, str(error))
        case KeyboardInterrupt():
            return Ended(130, "interrupted", remove=1)
    raise error


def _output_failed(error: OSError) -> Ended:
    """Say why standard output takes no more; nothing where its reader has left, as `head` does."""
    # The interpreter will try once more to write what is left.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Ended(1, "" if isinstance(error, BrokenPipeError) else f"standard output: {error}")


if __name__ == "__main__":
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, it stays open
    sys.exit(main(sys.argv[1:]))
