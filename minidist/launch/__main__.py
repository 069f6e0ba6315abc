"""`python -m minidist.launch`: start a program as several ranks, and watch over them.

| exit status | meaning |
|---|---|
| 0 | all ranks have exited with 0 |
| n | the first rank that failed has exited with n; after signal s it is 128 + s |
| 1 | the ranks could not be started |
| 2 | the command line is wrong |
| 130 | Ctrl-C |
"""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Sequence
from typing import Any

from minidist.errors import ClusterError, UsageError
from minidist.launch.arguments import parse
from minidist.launch.job import End, Job, Plan
from minidist.launch.output import Output
from minidist.launch.supervisor import adopt_orphans

USAGE = 2  # the status of a program whose command line is wrong: to start it again is of no use


def main(arguments: Sequence[str]) -> int:
    """Launch what the arguments say; return the exit status. `--help` raises SystemExit(0)."""
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        plan, restarts, tag = parse(arguments)
    except UsageError as error:
        Output(False, news.put).say(str(error))
        return USAGE
    except ClusterError as error:
        Output(False, news.put).say(str(error))
        return 1
    adopt_orphans()
    output = Output(tag, news.put)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: news.put(int(number)))
    restart = 0
    while True:
        end = _start(plan, restart, news, output)
        if not end.again or end.status == USAGE or restart == restarts:
            return end.status
        restart += 1
        output.say(f"all ranks are started again; this is restart {restart} of {restarts}")


def _start(plan: Plan, restart: int, news: queue.SimpleQueue[Any], output: Output) -> End:
    try:
        job = Job(plan, restart, news, output)
    except OSError as cause:
        output.say(f"{plan.mpiexec.path} cannot be started: {cause}")
        return End(1)
    return job.run()


if __name__ == "__main__":
    for name in ("stdout", "stderr"):  # closed by whoever started this
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it stays open
    sys.exit(main(sys.argv[1:]))
