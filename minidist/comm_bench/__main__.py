"""`python -m minidist.comm_bench`: parse the flags, do the run, and turn errors into sentences.

| exit status | meaning |
|---|---|
| 0 | the run is complete, and all that was checked was right |
| 1 | something was wrong, or the run failed |
| 2 | a flag or its value is unknown, or contradicts another one |
| 130 | Ctrl-C |
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from minidist.cluster import Cluster, alone, connect, connected, launched
from minidist.comm_bench.flags import parse
from minidist.comm_bench.run import run
from minidist.errors import ClusterError, HangError, MinidistError, UsageError


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status. `--help` and `--version` raise SystemExit(0)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what is wrong shows as #wrong
            return 1 if run(parse(arguments), _cluster()) else 0
    except UsageError as error:
        return _say(error, 2, once=True)
    except HangError as error:
        return _end(_say(error, 1))
    except MinidistError as error:
        return _say(error, 1)
    except MemoryError as error:
        return _say(f"not enough memory ({error}): make --max_bytes smaller", 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    finally:
        sys.stdout.flush()


def _end(status: int) -> int:
    """End at once where there are other processes, so that their launcher ends them too.

    Who does not come will not end by itself, and MPI may be waiting for it for ever.
    """
    if connected() is not None:
        sys.stdout.flush()
        os._exit(status)
    return status


def _cluster() -> Cluster:
    """Return the cluster of the processes that a launcher has started together with this one."""
    said = launched().winner
    return connect() if said is not None and said.size > 1 else alone()


def _say(what: object, status: int, once: bool = False) -> int:
    """Say it on standard error; what all processes find out, one of them says."""
    try:
        said = launched().winner
    except ClusterError:  # which may be what is to be said
        said = None
    if said is None or said.rank == 0 or not once:
        who = "" if said is None or once else f"rank {said.rank}: "
        print(f"minidist.comm_bench: {who}{what}", file=sys.stderr)
    return status


if __name__ == "__main__":
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, it stays open
    sys.exit(main(sys.argv[1:]))
