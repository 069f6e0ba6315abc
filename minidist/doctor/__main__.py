"""`python -m minidist.doctor`: say what there is here, and who this process is.

The exit status is 0, or 1 where something is wrong, and 2 for a wrong command line. Under mpiexec,
and with the flags of a process that is started by hand, all ranks meet, and the first of them
tells.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from minidist.cluster import connected
from minidist.doctor import gpus, kernels, machine, packages, processes
from minidist.doctor.report import as_json, as_text, merged


def main(arguments: Sequence[str]) -> int:
    """Print the report; return 0, or 1 where it names problems."""
    parser = argparse.ArgumentParser(
        prog="python -m minidist.doctor",
        description="Say what is installed, what this machine has, who this process is among all, "
        "and what is missing.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    roles = parser.add_argument_group("roles of several processes, as minidist.connect takes them")
    roles.add_argument("--num_ps", type=int, help="the last ranks are so many parameter servers")
    roles.add_argument("--job_name", help="worker or ps")
    roles.add_argument("--task_index", type=int, help="the number of this process in its job")
    roles.add_argument("--worker_hosts", help="the addresses of all workers, as a:2222,b:2222")
    roles.add_argument("--ps_hosts", help="the addresses of all parameter servers")
    given = vars(parser.parse_args(arguments))
    wants_json = given.pop("json")
    told = {name: value for name, value in given.items() if value is not None}
    found = merged(
        [packages.find(), processes.find(told), machine.find(), kernels.find(), gpus.find()]
    )
    cluster = connected()
    if cluster is None or cluster.rank == 0:
        print(as_json(found) if wants_json else as_text(found), flush=True)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
