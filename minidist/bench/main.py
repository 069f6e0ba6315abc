"""What the flags ask for: one run or all policies' runs, and their results in a file."""

from __future__ import annotations

from dataclasses import replace

from minidist.bench import making, report
from minidist.bench.compare import compare
from minidist.bench.crew import Crew
from minidist.bench.flags import ALL, Flags
from minidist.bench.flags.contradictions import check_among
from minidist.bench.run import run
from minidist.device import cpu_linear
from minidist.errors import MinidistError


def main(flags: Flags, crew: Crew) -> None:
    """Do what the flags ask for, print it, and write its JSON if they ask for that.

    A parameter server serves until the workers have ended.
    Raises what `run` raises, and MinidistError where the results cannot be written.
    """
    if flags.kernels is not None:
        cpu_linear.set_kernels(flags.kernels)
    kernels = cpu_linear.kernels()  # looked at now, and not by the first layer
    crew.join(flags)
    flags = replace(flags, kernels=kernels)
    cluster = crew.cluster
    check_among(flags, len(cluster.workers), len(cluster.servers))
    if cluster.job == "ps":
        crew.serve()
        return
    with crew.console():
        dataset = making.dataset(flags, len(cluster.workers))
        crew.exchange("begin", None)  # nobody computes for who cannot even read its data
        results = (compare if flags.variable_update == ALL else run)(flags, dataset, crew)
    for file in crew.for_chief([flags.json] if flags.json is not None else []):
        try:
            report.write(file, results)
        except OSError as error:
            raise MinidistError(
                f"--json={file}: the results could not be written: {error.strerror or error}"
            ) from error
