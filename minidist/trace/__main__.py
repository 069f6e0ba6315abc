"""`python -m minidist.trace summary FILE`: what a trace file says, as a table and in sentences."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from minidist.errors import DataError
from minidist.trace.chrome import MALFORMED, read
from minidist.trace.phases import phases
from minidist.trace.words import table, verdict

USAGE = "usage: python -m minidist.trace summary FILE (a .json or .html that --trace_file wrote)"


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 2 for arguments or a file that are not what they should be."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    if len(arguments) != 2 or arguments[0] != "summary":
        print(USAGE, file=sys.stderr)
        return 2
    try:
        found = phases(read(Path(arguments[1])))
    except DataError as error:
        print(f"minidist.trace: {error}", file=sys.stderr)
        return 2
    except MALFORMED:
        print(
            f"minidist.trace: {arguments[1]} holds what minidist does not write; was it changed, "
            "or put together from several traces?",
            file=sys.stderr,
        )
        return 2
    if found is None:
        print(f"minidist.trace: {arguments[1]} has no whole step in it", file=sys.stderr)
        return 2
    print("\n".join(verdict(found)), table(found), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
