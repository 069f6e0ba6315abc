"""bench/gpu_check.py: whatever becomes of a stage, the next one runs, and the table comes last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import minidist

ROOT = Path(minidist.__file__).parent.parent
BENCH = ROOT / "bench"
# Stages in place of its own: their programs, by name.
PROGRAM = """
import sys
sys.path.insert(0, {bench!r})
import gpu_check
from gpu_check import Check, Stage

PROGRAMS = {programs!r}
gpu_check.STAGES = tuple(Stage(name, limit) for name, (limit, _) in PROGRAMS.items())
Check.command = lambda self, stage: [sys.executable, "-c", PROGRAMS[stage.name][1]]
sys.argv[1:] = {arguments!r}
sys.exit(gpu_check.main())
"""
TELL = "from gpu_stages.tell import tell, trying\n"
GOOD = TELL + "tell('a ratio', 0.9, 'of it', least=0.85)\ntell('a word', 'yes')"
IDLE = TELL + "with trying('this'):\n    1 / 0"
ENDS = TELL + "tell('CUDA', 'no GPU: there is none', good=False, ends=True)"
RAISES = TELL + "tell('before', 1, most=2)\nraise RuntimeError('it broke')"
TRIES = TELL + "with trying('this'):\n    1 / 0\ntell('behind', 3, most=2)"
CRASHES = TELL + "tell('before', 1, good=True)\nimport os\nos.kill(os.getpid(), 11)"
HANGS = (  # and so does a process of its own, which holds what it prints to
    TELL
    + "tell('before', 1, good=True)\nimport subprocess, sys, time\n"
    + "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\ntime.sleep(600)"
)


def start(programs: dict[str, tuple[float, str]], *arguments: str) -> subprocess.Popen[str]:
    text = PROGRAM.format(bench=str(BENCH), programs=programs, arguments=list(arguments))
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def check(
    folder: Path, programs: dict[str, tuple[float, str]], *arguments: str
) -> tuple[int, str, Any]:
    """Return the status, what was printed, and the stages of the report by name."""
    path = folder / "report.json"
    process = start(programs, f"--json={path}", f"--log={folder / 'log'}", *arguments)
    out, _ = process.communicate(timeout=100)
    report = json.loads(path.read_text())
    return process.returncode, out, {stage["stage"]: stage for stage in report["stages"]}


def table(out: str) -> list[list[str]]:
    return [line.split() for line in out.partition("wanted\n")[2].splitlines()]


def test_what_is_good_ends_well(tmp_path: Path) -> None:
    status, out, stages = check(tmp_path, {"one": (60, GOOD)})
    assert status == 0 and out.splitlines()[-1] == "everything is as it should be"
    assert table(out)[:2] == [
        ["✓", "one", "a", "ratio", "0.9", "of", "it", "≥", "0.85"],
        ["one", "a", "word", "yes"],
    ]
    assert stages["one"]["found"]["a ratio"]["value"] == 0.9 and not stages["one"]["tail"]


def test_no_stage_keeps_the_next_from_running(tmp_path: Path) -> None:
    programs = {
        "raises": (60.0, RAISES),
        "tries": (60.0, TRIES),
        "crashes": (60.0, CRASHES),
        "hangs": (3.0, HANGS),
        "good": (60.0, GOOD),
    }
    status, out, stages = check(tmp_path, programs)
    assert status == 1 and out.splitlines()[-1] == "not everything is: see ✗"
    how = {name: stage["how"] for name, stage in stages.items()}
    assert how == {
        "raises": "ended with status 1",
        "tries": "done",
        "crashes": f"ended with status -{int(signal.SIGSEGV)}",
        "hangs": "was ended after 3 s",
        "good": "done",
    }
    assert all("before" in stages[name]["found"] for name in ("raises", "crashes", "hangs"))
    assert "RuntimeError: it broke" in stages["raises"]["tail"]
    assert stages["tries"]["found"]["this"]["value"] == "ZeroDivisionError: division by zero"
    assert stages["tries"]["found"]["behind"]["good"] is False
    assert "it broke" in (tmp_path / "log").read_text()
    wrong = [line[1] for line in table(out) if line[0] == "✗"]
    assert wrong == ["raises", "tries", "tries", "crashes", "hangs"]
    assert "ended with status 1: RuntimeError: it broke\n" in out


def test_who_could_do_nothing_is_not_done(tmp_path: Path) -> None:
    status, out, stages = check(tmp_path, {"idle": (60.0, IDLE), "silent": (60.0, "print()")})
    assert status == 1 and "could do nothing: ZeroDivisionError: division by zero\n" in out
    assert {name: (stage["how"], stage["good"]) for name, stage in stages.items()} == dict.fromkeys(
        ("idle", "silent"), ("could do nothing", False)
    )


def test_what_ends_it_is_said_once(tmp_path: Path) -> None:
    status, out, stages = check(tmp_path, {"machine": (60.0, ENDS), "good": (60.0, GOOD)})
    assert status == 1 and list(stages) == ["machine"] and stages["machine"]["how"] == "done"
    assert out.count("the rest was not run: no GPU: there is none\n") == 1
    assert json.loads((tmp_path / "report.json").read_text())["ended"] == "no GPU: there is none"


def test_without_a_gpu_it_ends_with_the_machine() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCH / "gpu_check.py"), "--only=machine,smoke"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=100
    )
    assert done.returncode == 1 and "the rest was not run: CuPy finds no GPU: " in done.stdout
    assert "== smoke" not in done.stdout


def test_when_time_is_over_the_rest_is_not_run(tmp_path: Path) -> None:
    programs = {"hangs": (60.0, HANGS), "good": (60.0, GOOD)}
    status, _, stages = check(tmp_path, programs, "--seconds=4")
    assert status == 1 and stages["hangs"]["how"] == "was ended after 4 s"
    assert stages["good"]["how"] == "was not run: no time was left"


def test_who_is_told_to_end_says_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    process = start({"good": (60, GOOD), "hangs": (60, HANGS)}, f"--json={path}")
    assert process.stdout
    for line in process.stdout:
        if line.startswith("== hangs"):
            break
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and ["✓", "good", "a", "ratio"] in [r[:4] for r in table(out)]
    stages = json.loads(path.read_text())["stages"]
    assert [stage["how"] for stage in stages] == ["done", "was interrupted"]


def test_its_help_says_what_to_bring_along() -> None:
    command = [sys.executable, str(BENCH / "gpu_check.py"), "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for word in ("optree", "nccl4py", "nvidia-cudnn-frontend", "g++", "--wheels", "--standin"):
        assert word in out
