"""ResNet-50 in bfloat16 by minidist and by PyTorch without a compiler, in turns that alternate."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import util
from typing import Any

from gpu_stages.tell import STANDIN, tell, trying

BATCHES = (2,) if STANDIN else (256, 64)  # the next one only where one does not fit
ROUNDS = 2 if STANDIN else 5
WANTED = 0.9  # times PyTorch's images per second

Turn = Callable[[], dict[str, Any]]


def main() -> None:
    for batch in BATCHES:
        with trying(f"resnet50, batch {batch}"):
            compare(batch)
            return


def compare(batch: int) -> None:
    name = f"resnet50 bfloat16, batch {batch}"
    with ExitStack() as ending:
        own = ending.enter_context(server("minidist", batch))
        tell(f"{name}: first 3 steps", own()["warm_up_s"], "s")
        peer = None
        if util.find_spec("torch") is not None:
            with trying("resnet50 by PyTorch"):
                peer = ending.enter_context(server("torch", batch))
                peer()
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(ROUNDS):
            last = own()
            ours.append(last["rate"])
            tell(name, round(statistics.median(ours)), "images/s", rounds=ours, **last)
            allocations = last["allocations"]
            tell("resnet50: allocations after step 2", allocations, most=0, measured=True)
            if peer is not None:
                theirs.append(peer()["rate"])
                ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
                tell(
                    f"{name}, of PyTorch",
                    round(statistics.median(ratios), 3),
                    "of its images/s",
                    least=WANTED,
                    measured=True,
                    ratios=ratios,
                    theirs=theirs,
                )


@contextmanager
def server(framework: str, batch: int) -> Iterator[Turn]:
    """Start one side; give what reads its next answer, asking for all but the first."""
    command = [sys.executable, "-m", "gpu_stages.resnet", framework, str(batch)]
    command += ["--standin"] * STANDIN
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        requests, lines = process.stdin, process.stdout
        asked = 0

        def turn() -> dict[str, Any]:
            nonlocal asked
            if asked:
                requests.write("\n")
                requests.flush()
            asked += 1
            for line in lines:
                if line.startswith("ANSWER "):
                    told: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                    return told
                print(line, end="", flush=True)
            raise RuntimeError(f"{framework} has ended with status {process.wait()}")

        try:
            yield turn
        finally:
            process.kill()


if __name__ == "__main__":
    main()
