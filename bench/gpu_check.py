"""Prove minidist on a GPU, and measure it there, in under five minutes.

    python bench/gpu_check.py --json=report.json --log=report.log

It downloads nothing, installs nothing and writes only to build/gpu_check and to the two files. It
builds the compiled parts for this Python beside the checkout, compiles the CUDA sources, trains on
the GPU as on the CPU, measures, runs every policy on 1 and 4 replicas of one GPU (and on all GPUs
where there are more) against the oracle, sums by NCCL, and runs the tests that are for a GPU.

Each stage is a process with a time of its own. One that fails, hangs or crashes does not keep the
next from running, and what it had found until then counts; only where CuPy finds no GPU the rest is
not tried. The table comes last in any case, also after Ctrl-C or a SIGTERM; the report is written
anew after each stage. The exit status is 0 where everything is as it should be, else 1.

What must be brought along: Python 3.11 or newer with its headers, a C++ compiler (g++), NVIDIA's
driver, and the packages cupy-cuda12x[ctk] or cupy-cuda13x[ctk] (without [ctk] where NVRTC, cuBLAS
and CUDA's headers are there already), nvidia-nccl-cu12 or -cu13, numpy, cython, setuptools; optree,
ml_dtypes, safetensors, rich and threadpoolctl; for the tests pytest, pytest-timeout and hypothesis.
What uses more where it is there: nccl4py (else CuPy's own NCCL), nvidia-cudnn-frontend and
nvidia-cudnn-cu12 or -cu13 (else convolutions are columns and products), pybind11, torch (to compare
with), mpi4py with an MPI (for ranks in processes). What is not installed there can come as wheels
in a folder, --wheels=FOLDER: they are unpacked, not installed. optree, nccl4py and
nvidia-cudnn-frontend are those that are missing most often.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_stages.tell import MARK, ROOT, environment

TOTAL = 285.0  # seconds for everything
SLOWER = 5  # times a stage's limit, where all is done by the CPU
TAIL = 40  # last lines of a stage that went wrong, for the report
GRACE = 5.0  # seconds in which what was killed must be gone


@dataclass(frozen=True)
class Stage:
    """A program of gpu_stages. limit: the seconds after which it is ended."""

    name: str
    limit: float
    arguments: tuple[str, ...] = ()
    module: str = ""  # if it is not called as the stage is


STAGES = (
    Stage("machine", 20),
    Stage("build", 150),
    Stage("kernels", 60),
    Stage("smoke", 60),
    Stage("bandwidth", 30),
    Stage("overhead", 35),
    Stage("staging", 20),
    Stage("training", 100),
    Stage("bench", 40),
    Stage("policies", 60, ("test_cuda_oracle",), "tests"),
    Stage("nccl", 45),
    Stage("tests", 100, ("but", "test_cuda_oracle"), "tests"),
)


@dataclass
class Result:
    """What became of a stage."""

    stage: str
    how: str = "was not run: no time was left"
    good: bool = False  # whether it came to its end by itself, with status 0
    seconds: float = 0.0
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


class Check:
    """All stages, one after the other, and their report."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._slower = SLOWER if options.standin else 1
        self._deadline = time.monotonic() + (options.seconds or TOTAL * self._slower)
        version = "{}.{}".format(*sys.version_info)
        self._build = ROOT / "build" / "gpu_check" / version
        self._log: IO[str] | None = None
        self.results: list[Result] = []
        self.ended = ""  # why the rest would be of no use

    def run(self) -> None:
        """Run the stages that are wanted. Raises nothing that a stage does wrong."""
        (self._build / "wheels").mkdir(parents=True, exist_ok=True)
        if self._options.wheels:
            for wheel in sorted(Path(self._options.wheels).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(self._build / "wheels")
        with contextlib.ExitStack() as closing:
            if self._options.log:
                self._log = closing.enter_context(
                    open(self._options.log, "w", encoding="utf-8", errors="replace")
                )
            for stage in STAGES:
                if stage.name in self._options.only:
                    result = Result(stage.name)
                    self.results.append(result)
                    self._run(stage, result)
                    ending = [found for found in result.found.values() if found.get("ends")]
                    self.ended = ending[0]["value"] if ending else ""
                    self.write()
                    if self.ended:
                        return

    def _run(self, stage: Stage, result: Result) -> None:
        """Run one stage, ended at its limit, and fill in its result."""
        limit = min(stage.limit * self._slower, self._deadline - time.monotonic())
        if limit < 2:
            return
        result.how = "was interrupted"
        self._say(f"== {stage.name}, at most {limit:.0f} s")
        started = time.monotonic()
        process = subprocess.Popen(
            self.command(stage),
            cwd=ROOT,
            env=environment(self._build),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(process, result), daemon=True)
        reader.start()
        status: int | None = None
        how = f"was ended after {limit:.0f} s"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
                how = f"ended with status {status}" if status else "done"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            reader.join(GRACE)
            result.seconds = round(time.monotonic() - started, 1)
        if status == 0 and all("trace" in found for found in result.found.values()):
            how = "could do nothing"
        result.how, result.good = how, how == "done"
        self._say(f"== {stage.name} {result.how}, {result.seconds} s")

    def command(self, stage: Stage) -> list[str]:
        """Return how a stage is started."""
        module = f"gpu_stages.{stage.module or stage.name}"
        standin = ["--standin"] if self._options.standin else []
        return [sys.executable, "-m", module, *stage.arguments, *standin]

    def _read(self, process: subprocess.Popen[str], result: Result) -> None:
        """Log what a stage prints, and note what it finds."""
        assert process.stdout
        for line in process.stdout:
            if result.seconds:  # somebody goes on printing after the stage's end
                return
            line = line.rstrip("\n")
            if line.startswith(MARK):
                with contextlib.suppress(ValueError, KeyError):
                    found = json.loads(line.removeprefix(MARK))
                    result.found[found["name"]] = found
                    if self._log is None:
                        continue
            else:
                result.tail = [*result.tail, line[:400]][-TAIL:]
            if self._log is not None:
                print(line, file=self._log, flush=True)

    def _say(self, line: str) -> None:
        for file in (sys.stdout, self._log):
            if file is not None:
                print(line, file=file, flush=True)

    # --- the report

    @property
    def good(self) -> bool:
        return all(
            result.good and all(found["good"] is not False for found in result.found.values())
            for result in self.results
        )

    def write(self) -> None:
        """Write the report, whole or not at all."""
        if not self._options.json:
            return
        told = [asdict(result) for result in self.results]
        for one, result in zip(told, self.results, strict=True):
            if result.good:
                one["tail"] = []
        report: dict[str, Any] = {"good": self.good, "standin": self._options.standin}
        report |= {"ended": self.ended, "stages": told}
        path = Path(self._options.json)
        beside = path.with_name(f".{path.name}.new")
        beside.write_text(json.dumps(report, indent=1))
        beside.replace(path)

    def table(self) -> str:
        """Return a line for each finding."""
        lines = ["", f"{'':2}{'stage':<11}{'what':<46}{'found':<44}wanted"]
        for result in self.results:
            if not result.good:
                last = next(filter(None, map(str.strip, reversed(result.tail))), "")[:160]
                how = f"{result.how}{': ' if last else ''}{last}"
                lines.append(f"✗ {result.stage:<11}{'the stage itself':<46}{how}")
            for found in result.found.values():
                mark = {True: "✓", False: "✗", None: " "}[found["good"]]
                value = f"{found['value']} {found['unit']}"
                if not found["wanted"] and len(value) > 43:
                    value = value[:160]
                lines.append(
                    f"{mark} {result.stage:<11}{found['name'][:45]:<46}{value:<44}{found['wanted']}"
                )
        if self.ended:
            lines.append(f"the rest was not run: {self.ended}")
        lines.append("everything is as it should be" if self.good else "not everything is: see ✗")
        if self._options.standin:
            lines.append("on the stand-in for CuPy: the numbers mean nothing")
        return "\n".join(lines)


def main() -> int:
    options = parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    for file in (sys.stdout, sys.stderr):
        file.reconfigure(errors="replace")  # a terminal that has no ✓ is no reason to fail
    check = Check(options)
    try:
        check.run()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        with contextlib.suppress(OSError):
            check.write()
        print(check.table(), flush=True)
    return 0 if check.good else 1


def parsed() -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument("--json", help="where the report goes")
    parser.add_argument("--log", help="where all goes that the stages print")
    parser.add_argument("--wheels", help="a folder of wheels of what is missing here")
    parser.add_argument("--only", help=f"stages, as build,smoke; all: {','.join(names)}")
    words = f"for everything [{TOTAL:g}, with --standin {TOTAL * SLOWER:g}]"
    parser.add_argument("--seconds", type=float, help=words)
    parser.add_argument(
        "--standin",
        action="store_true",
        help="without a GPU: let the tests' stand-in for CuPy take its place, and all be small",
    )
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else names
    for name in options.only:
        if name not in names:
            parser.error(f"there is no stage {name!r}; there are {', '.join(names)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
