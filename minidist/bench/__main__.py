"""`python -m minidist.bench`: parse the flags, do the run, and turn errors into sentences.

| exit status | meaning |
|---|---|
| 0 | the run is complete |
| 1 | it failed: a loss that is not a number, a replica that hung, … |
| 2 | a flag or its value is unknown, or contradicts another one |
| 3 | a data file is missing or not what it should be |
| 130 | Ctrl-C |
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from minidist.bench.flags import parse
from minidist.bench.run import main as run
from minidist.errors import DataError, MinidistError, UsageError


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    try:
        run(parse(arguments))
    except UsageError as error:
        return _say(error, 2)
    except DataError as error:
        return _say(error, 3)
    except MinidistError as error:
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    return 0


def _say(what: object, status: int) -> int:
    print(f"minidist.bench: {what}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
