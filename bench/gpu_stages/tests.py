"""The tests that can run on a GPU, by several processes at a time: one for each file, or more.

python -m gpu_stages.tests test_cuda_oracle     # those files
python -m gpu_stages.tests but test_cuda_oracle # all others
"""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_stages.tell import ROOT, STANDIN, tell

FOLDER = ROOT / "tests" / "gpu"
SHARDS = {  # what of a file is chosen by each of several processes
    "test_cuda_oracle": ("sgd", "momentum", "nesterov", "rmsprop", "adam", "a_model_trains"),
}
TOGETHER = 1 if STANDIN else 6  # processes at a time
WHICH = "not gpu" if STANDIN else "gpu"
RESULT = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)")
NONE_CHOSEN = 5  # pytest's status where a file has no such test


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    files = sorted(FOLDER.glob("test_*.py"))
    if names[0] == "but":
        files = [file for file in files if file.stem not in names[1:] and _on_gpus(file)]
    else:
        files = [file for file in files if file.stem in names]
    with ThreadPoolExecutor(TOGETHER) as threads:
        list(threads.map(lambda piece: _run(*piece), _pieces(files)))


def _pieces(files: list[Path]) -> list[tuple[Path, str]]:
    """Return files, with what is chosen of each: nothing is everything."""
    return [(file, part) for file in files for part in SHARDS.get(file.stem, ("",))]


def _on_gpus(file: Path) -> bool:
    """Whether a file may have tests for a GPU; with the stand-in one is enough."""
    text = file.read_text()
    return file.stem == "test_cuda_lent" if STANDIN else "cupy: Any" in text or "mark.gpu" in text


def _run(file: Path, part: str) -> None:
    """Run tests of one file, and tell after each of them how it stands."""
    name = f"{file.stem} {part}".strip()
    options = ["-vv", "-m", WHICH, "-W", "default", "--tb=short", "-p", "no:cacheprovider"]
    options += ["-k", part] * bool(part)
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    counts = {"PASSED": 0, "FAILED": 0, "ERROR": 0, "SKIPPED": 0}
    failed: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout
        for line in process.stdout:
            print(f"{name}: {line}", end="", flush=True)
            match = RESULT.match(line)
            if match:
                counts[match[2]] += 1
                if match[2] in ("FAILED", "ERROR"):
                    failed.append(match[1].rpartition("/")[2])
                _tell(name, counts, failed, "so far, ")
    if process.returncode == NONE_CHOSEN:
        return
    _tell(name, counts, failed, "" if process.returncode in (0, 1) else f"{process.returncode}, ")


def _tell(name: str, counts: dict[str, int], failed: list[str], prefix: str) -> None:
    wrong = counts["FAILED"] + counts["ERROR"]
    words = f"{prefix}{counts['PASSED']} passed, {wrong} failed, {counts['SKIPPED']} skipped"
    good = not wrong and not prefix and counts["PASSED"] > 0
    tell(name, words, good=good, failed=failed)


if __name__ == "__main__":
    main()
