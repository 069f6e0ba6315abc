"""Ranks: test programs that run as several processes under mpiexec, with a hard time limit.

A test module runs itself, or another file, once, and asks what became of each case:

    CASES = {"sums": (2, 0, check_sums)}             # workers, ps, what each of their ranks calls

    @pytest.fixture(scope="module")
    def outcome(request):
        return ranks.run(__file__, 4, *ranks.chosen(request, CASES))

    @pytest.mark.parametrize("case", CASES)
    def test_case(outcome, case):
        outcome.check(case)

    if __name__ == "__main__":
        ranks.main(CASES)                            # in every process

Each case has a cluster of its own, of the first ranks, so one that fails leaves the next alone.
What a rank prints is kept apart from what others print, and is shown where something went wrong.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")  # as launchers call it
LIMIT = 90  # seconds, if a test does not say
UNFINISHED = "it did not come to the end of this case"
PRINTED = 5000  # characters that are shown of what a rank has printed: the last ones
SAYING = 3  # seconds that ranks have at their limit to say where they are, before they end
LATER = 10  # seconds more that mpiexec has to end what does not end itself


def mpiexec():
    """Return the path of the mpiexec that belongs to this Python, or of any other; or None."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@dataclass
class Outcome:
    """What became of some ranks: the exit code, what each printed, and its cases' failures."""

    code: int | None  # None: it ran past its limit
    said: list[str]  # by rank
    mpi: str  # what mpiexec itself printed
    failures: list[dict[str, str]] = field(default_factory=list)  # by rank and case; "" for none

    def check(self, case):
        """Fail unless all ranks of a case have come to its end."""
        wrong = {rank: of[case] for rank, of in enumerate(self.failures) if of.get(case)}
        if wrong:
            lines = [f"rank {rank}: {text}" for rank, text in wrong.items()]
            if UNFINISHED in wrong.values():
                lines.append(str(self))
            raise AssertionError("\n".join([f"{case} failed", *lines]))
        if not any(case in of for of in self.failures):
            raise AssertionError(f"no rank has begun {case!r}\n{self}")

    def require_success(self):
        """Fail unless all ranks have ended with 0."""
        if self.code != 0:
            raise AssertionError(str(self))

    def __str__(self):
        ended = "ran past its limit" if self.code is None else f"ended with {self.code}"
        lines = [f"mpiexec {ended}", self.mpi.rstrip()]
        for rank, text in enumerate(self.said):
            if text.strip():
                lines += [f"--- rank {rank} printed", text.rstrip()[-PRINTED:]]
        return "\n".join(lines)


def run(program, count, *args, limit=LIMIT, env=None, launcher=()):
    """Run a program file as so many ranks and return the Outcome; never for longer than `limit`.

    Ranks that still run then print where each of their threads is, and end. env: what is added to
    the environment. launcher: arguments of mpiexec.
    """
    start = mpiexec()
    if start is None:
        raise AssertionError(
            "there is no mpiexec beside this Python or on the PATH; pip install 'minidist[mpi]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        how = [start, *launcher, "-n", str(count), sys.executable]
        command = [*how, __file__, folder, str(limit), str(program), *map(str, args)]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        ) as process:
            code: int | None = None
            try:
                printed, _ = process.communicate(timeout=limit + LATER)
                code = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
        said = [_read(Path(folder, f"{rank}.txt")) for rank in range(count)]
        failures = [_failures(Path(folder, f"{rank}.json")) for rank in range(count)]
        return Outcome(code, said, printed.decode(errors="replace"), failures)


def _read(path):
    return path.read_text(errors="replace") if path.exists() else "(it did not start)"


def _failures(path):
    """Return what a rank has noted; of the last line perhaps only a part was written."""
    failures = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            case, failure = json.loads(line)
            failures[case] = failure
    return failures


def chosen(request, cases):
    """Return the names of those cases that pytest is to run of the test module of a request."""
    asked = {
        item.callspec.params.get("case")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    return [name for name in cases if name in asked]


# --- in a rank ----------------------------------------------------------------------------------


def main(cases, connect=None):
    """Run those cases that the arguments name, or all, each in a cluster of its own.

    cases: by name, how many workers and how many ps the cluster has, and the function that each of
    its ranks calls with it. The first ranks are the workers, the next ones the ps. A case that
    fails in one rank is over for it, and the next one begins.
    """
    import minidist as md

    whole = (connect or md.connect)()
    names = sys.argv[1:] or list(cases)
    for name in names:
        if whole.rank < sum(cases[name][:2]):
            _note(name, UNFINISHED)
    for name in names:
        workers, servers, fn = cases[name]
        assert workers + servers <= whole.size, f"{name!r} needs {workers + servers} ranks"
        cluster = whole.part(range(workers), range(workers, workers + servers))
        if whole.rank >= workers + servers:
            continue
        failure = ""
        try:
            fn(cluster)
        except BaseException:
            failure = traceback.format_exc()
            print(f"=== {name}\n{failure}", flush=True)
        _note(name, failure)
    raise SystemExit(0)


def _note(case, failure):
    notes = os.environ.get("MINIDIST_TEST_NOTES")
    if notes is not None:
        with open(notes, "a") as file:
            file.write(json.dumps([case, failure]) + "\n")


def _begin(folder, limit, program, *args):
    """Be one rank: write to files of its own, end after the limit, and run the program."""
    rank = next((os.environ[name] for name in RANK if name in os.environ), "0")
    path = Path(folder, f"{rank}.txt")
    with path.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(limit))
    # The end comes later: the first rank's is that of all, and each shall say where it is.
    signal.setitimer(signal.ITIMER_REAL, float(limit) + SAYING)
    os.environ["MINIDIST_TEST_NOTES"] = str(Path(folder, f"{rank}.json"))
    sys.argv[:] = [program, *args]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    _begin(*sys.argv[1:])
