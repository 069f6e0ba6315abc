"""What a run says of itself: statistics, lines as the ancestor prints them, and the JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import minidist
from minidist.bench.flags import Flags
from minidist.data import Dataset
from minidist.train import Accuracy

SCHEMA = 1
RULE = "-" * 64


class Speed(NamedTuple):
    """Images per second over some steps; the percentiles are of the single steps' speeds."""

    mean: float
    uncertainty: float
    jitter: float
    p50: float
    p90: float
    p99: float


class Step(NamedTuple):
    """A step after the warm-up: its number from 1, its loss, and its duration in seconds."""

    step: int
    loss: float
    seconds: float


def speed(images: Sequence[int], seconds: Sequence[float]) -> Speed:
    """Return the speed of steps that took `seconds` for `images` each.

    As the ancestor: the mean is all images over all seconds, which for equal batches is
    batch / mean(seconds); with s the speeds of the n single steps, the uncertainty is
    std(s) / √n and the jitter 1.4826 · median(|s − median(s)|), the deviation of a normal
    distribution with that median of distances.

    Raises ValueError without steps, for lengths that differ, and for durations not above 0.
    """
    if not seconds or len(images) != len(seconds) or min(seconds) <= 0:
        raise ValueError(
            f"speed needs at least one step and a duration above 0 for each, but got "
            f"{len(images)} batches and {len(seconds)} durations"
        )
    speeds = np.asarray(images) / np.asarray(seconds)
    p50, p90, p99 = np.percentile(speeds, [50, 90, 99]).tolist()
    return Speed(
        mean=sum(images) / math.fsum(seconds),
        uncertainty=float(np.std(speeds)) / math.sqrt(len(speeds)),
        jitter=1.4826 * float(np.median(np.abs(speeds - p50))),
        p50=p50,
        p90=p90,
        p99=p99,
    )


def header(
    flags: Flags, dataset: Dataset, devices: Sequence[str], num_batches: int, num_epochs: float
) -> list[str]:
    """Return the lines that describe a run of `num_batches` steps, or `num_epochs` epochs."""
    return [
        f"minidist:    {minidist.__version__}",
        f"Model:       {flags.model}",
        f"Dataset:     {dataset.name}{' (synthetic)' if dataset.synthetic else ''}",
        f"Mode:        {'forward-only' if flags.forward_only else 'training'}",
        f"Batch size:  {flags.batch_size * len(devices)} global",
        f"             {flags.batch_size} per device",
        f"Num batches: {num_batches}",
        f"Num epochs:  {num_epochs:.2f}",
        f"Devices:     {list(devices)}",
        f"Data format: {flags.data_format}",
        f"Optimizer:   {flags.optimizer}",
        f"Variables:   {flags.variable_update}",
        "==========",
    ]


def columns(loss_type: str, accuracy: bool) -> str:
    """Return the heading of the rows."""
    return f"Step\tImg/sec\t{loss_type}" + ("\ttop_1_accuracy\ttop_5_accuracy" if accuracy else "")


def row(step: int, speed: Speed, loss: float, accuracy: Accuracy | None = None) -> str:
    """Return the row of one step, to the character as the ancestor prints it."""
    text = (
        f"{step}\timages/sec: {speed.mean:.1f} +/- {speed.uncertainty:.1f} "
        f"(jitter = {speed.jitter:.1f})\t{loss:.3f}"
    )
    return text if accuracy is None else f"{text}\t{accuracy.top_1:.3f}\t{accuracy.top_5:.3f}"


def closing(total_images_per_sec: float) -> list[str]:
    """Return the lines after the last row."""
    return [RULE, f"total images/sec: {total_images_per_sec:.2f}", RULE]


def accuracy_line(accuracy: Accuracy) -> str:
    """Return the line on the accuracy over the test part."""
    return (
        f"Accuracy @ 1 = {accuracy.top_1:.4f} Accuracy @ 5 = {accuracy.top_5:.4f} "
        f"[{accuracy.examples} examples]"
    )


def peak_memory_bytes() -> int:
    """Return the most memory this process has ever had resident."""
    unit = 1 if sys.platform == "darwin" else 1024  # the one system counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def versions() -> dict[str, str]:
    """Return what the results may depend on: minidist, Python, NumPy and the platform."""
    return {
        "minidist": minidist.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


def document(
    *,
    flags: Flags,
    devices: Sequence[str],
    steps: Sequence[Step],
    speed: Speed,
    total_images_per_sec: float,
    accuracy: Accuracy | None,
    weights_checksum: Sequence[str],
    parameters: int,
) -> dict[str, Any]:
    """Return the results of a run in schema 1, ready for `write`.

    `parameters` counts the trainable elements of one replica; weights_checksum has one item for
    each replica.
    """
    return {
        "schema": SCHEMA,
        "config": flags.config(),
        "devices": list(devices),
        "steps": [step._asdict() for step in steps],
        "images_per_sec": speed._asdict(),
        "total_images_per_sec": total_images_per_sec,
        "accuracy": _accuracy(accuracy),
        "weights_checksum": {str(replica): text for replica, text in enumerate(weights_checksum)},
        "parameters": parameters,
        "peak_memory_bytes": peak_memory_bytes(),
        "versions": versions(),
    }


def _accuracy(accuracy: Accuracy | None) -> dict[str, float] | None:
    return None if accuracy is None else {"top_1": accuracy.top_1, "top_5": accuracy.top_5}


def write(path: str | os.PathLike[str], results: Mapping[str, Any]) -> None:
    """Write results as JSON; numbers that JSON lacks (NaN, infinities) become null.

    The file appears whole or not at all: it is written beside its place and then renamed. A pipe
    or a terminal is written to as it is.
    """
    text = json.dumps(_finite(results), indent=2, allow_nan=False) + "\n"
    target = Path(path)
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    target = target.resolve()  # a link stays, and its target is replaced
    beside = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
