"""The bench's own command on a GPU: several replicas, every policy, and what overlapping hides."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

from gpu_stages.tell import STANDIN, gpu, tell, trying
from minidist.bench.__main__ import main as bench

SMALL = ["--model=trivial", "--batch_size=2", "--num_batches=2", "--num_warmup_batches=1"]
LARGE = ["--num_batches=30", "--num_warmup_batches=5", "--display_every=10"]
MODEL = ["--model=resnet20", "--data_name=cifar10", "--batch_size=64"]
RUNS = {
    "lenet, cuda:0, 4 replicas": ["--device=cuda:0", "--num_devices=4"],
    "lenet, every policy, 2 replicas": [
        *("--device=cuda:0", "--num_devices=2", "--variable_update=all"),
    ],
    "resnet20, 2 replicas, overlap": [
        *("--device=cuda:0", "--num_devices=2", "--overlap", "--use_bf16", *MODEL),
    ],
}


def main() -> None:
    with gpu():
        for name, flags in RUNS.items():
            with trying(name):
                run(name, flags)


def run(name: str, flags: list[str]) -> None:
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        with contextlib.redirect_stdout(printed):
            status = bench([*flags, *(SMALL if STANDIN else LARGE), f"--json={path}"])
        print(printed.getvalue(), flush=True)
        told = json.loads(path.read_text()) if path.exists() else {}
    if status or "total_images_per_sec" not in told:
        tell(name, f"status {status}", good=status == 0)
        return
    rate = round(told["total_images_per_sec"])
    tell(name, rate, "images/s", good=True, hidden_share=told["hidden_share"])


if __name__ == "__main__":
    main()
