"""How fast examples come: minidist beside tf.data, on the same work and files, taking turns.

    python bench/input.py --tensorflow F/bin/python
    python bench/input.py --rounds 2                        # minidist alone

Three things are measured. `input`: 32×32×3 images in memory, padded, cropped at random, mirrored
and scaled. `jpeg`: a random part of files of about 100 KB decoded, mirrored, resized to 224×224 and
scaled. In each round both do both; a line has the medians, and the median of the rounds' ratios
with the lowest and highest; tf.data's is its best way with any number of workers. Where others use
the cores too, images per CPU second say more than images/s.

`training`: resnet20 on CIFAR-10's format, read and distorted, beside made-up images that are merely
copied: in turns too, how much of the speed remains. The photographs are made up: noise whose
amplitude falls with its frequency as a photograph's does; it needs Pillow to write them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from peers.job import positive

HERE = Path(__file__).parent
TARGETS = {"input": 4.0, "jpeg": 1.0}  # times tf.data
KEPT = 0.97  # of the speed, with real data
PHOTOS = 64
BATCHES = {"input": 60, "jpeg": 30}


def photograph(random: np.random.Generator, height: int, width: int) -> np.ndarray[Any, Any]:
    """Make up an image uint8 [height, width, 3]: its amplitudes fall a little faster than 1/f."""
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)
    frequency = np.maximum(np.hypot(down, across), 1 / max(height, width))

    def plane() -> np.ndarray[Any, Any]:
        phases = np.exp(2j * np.pi * random.random(frequency.shape))
        noise = np.fft.irfft2(phases / frequency**1.15, (height, width))
        return noise / noise.std()

    shared = plane()
    channels = [shared + 0.4 * plane() for _ in range(3)]
    return np.clip(127 + 45 * np.stack(channels, -1), 0, 255).astype(np.uint8)


def write_photographs(folder: Path) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    for i in range(PHOTOS):
        height, width = [(375, 500), (500, 375), (333, 500), (400, 400)][i % 4]
        image = Image.fromarray(photograph(random, height, width))
        image.save(folder / f"{i:02}.jpg", quality=92)


def rates(python: str, peer: str, workload: str, photos: Path) -> dict[str, tuple[float, float]]:
    """Return images/s, and images per CPU second, by variant, as a peer says them."""
    command = [python, str(HERE / peer), "--workload", workload, "--photos", str(photos)]
    command += ["--steps", str(BATCHES[workload]), "--warmup", "5"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["variant"]: (line["rate"], line["rate"] / line["cores_used"]) for line in lines}


def beside_tf_data(tensorflow: str | None, rounds: int, photos: Path) -> None:
    for workload, target in TARGETS.items():
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        bests = []
        for _ in range(rounds):
            own = rates(sys.executable, "minidist_peer.py", workload, photos)
            for variant, each in own.items():
                found[f"minidist {variant}"].append(each)
            if tensorflow:
                others = rates(tensorflow, "peers/tensorflow_peer.py", workload, photos)
                for variant, each in others.items():
                    found[f"tf.data {variant}"].append(each)
                mine = [each for variant, each in own.items() if variant.endswith("workers2")]
                bests.append((map(max, *mine, (0, 0)), map(max, *others.values())))
        print(f"{workload}: images/s and images per CPU second, medians of {rounds} rounds")
        for variant, every in found.items():
            rate, thrift = map(statistics.median, zip(*every, strict=True))
            print(f"  {variant:32}{rate:12,.0f}{thrift:12,.0f}")
        if bests:
            ratios = [[a / b for a, b in zip(*pair, strict=True)] for pair in bests]
            shown = ("images/s", f"target {target:.1f}"), ("images per CPU second", "no target")
            for each, (unit, aim) in zip(zip(*ratios, strict=True), shown, strict=True):
                print(
                    f"  two workers, times tf.data's best in {unit}: {statistics.median(each):.2f} "
                    f"({min(each):.2f} to {max(each):.2f}); {aim}"
                )


def training(rounds: int, folder: Path) -> None:
    """Compare resnet20 on files of CIFAR-10's format with resnet20 on made-up images."""
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        records = random.integers(0, 256, (10_000, 3073), np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
    ratios = []
    for _ in range(rounds):
        real = speed("--data_dir", str(folder))
        ratios.append(real / speed())
    print(
        f"training: resnet20 on read and distorted images runs at {statistics.median(ratios):.1%} "
        f"({min(ratios):.1%} to {max(ratios):.1%}) of the speed on made-up ones; target {KEPT:.0%}"
    )


def speed(*flags: str) -> float:
    """Return images/s of a short training."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "minidist.bench", "--model=resnet20", "--batch_size=32"]
        command += ["--data_name=cifar10", "--num_batches=60", "--num_eval_batches=1"]
        command += ["--init_learning_rate=0.01", f"--json={result}", *flags]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment)
        return float(json.loads(result.read_text())["images_per_sec"]["p50"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensorflow", metavar="PYTHON", help="a Python that has TensorFlow")
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photographs(folder)
        beside_tf_data(options.tensorflow, options.rounds, folder)
        training(options.rounds, folder)


if __name__ == "__main__":
    main()
