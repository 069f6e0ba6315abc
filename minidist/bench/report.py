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
from minidist.cluster import Cluster
from minidist.data import Dataset
from minidist.train import Accuracy

SCHEMA = 1
ALL_REDUCED = ("replicated", "distributed_all_reduce", "collective_all_reduce")
RULE = "-" * 64


class Speed(NamedTuple):
    """Images (of a text: tokens) per second over some steps; percentiles are of single steps'."""

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


class Evaluated(NamedTuple):
    """An evaluation in the middle of a training, after a step."""

    step: int
    accuracy: Accuracy


def speed(images: Sequence[int], seconds: Sequence[float], ewma: float | None = None) -> Speed:
    """Return the speed of steps that took `seconds` for `images` each.

    As the ancestor: the mean is all images over all seconds, which for equal batches is
    batch / mean(seconds); with s the speeds of the n single steps, the uncertainty is
    std(s) / √n and the jitter 1.4826 · median(|s − median(s)|), the deviation of a normal
    distribution with that median of distances. With `ewma` = α, images and seconds of the step
    that is i before the newest count (1 − α)^i times in the mean.

    Raises ValueError without steps, for lengths that differ, and for durations not above 0.
    """
    if not seconds or len(images) != len(seconds) or min(seconds) <= 0:
        raise ValueError(
            f"speed needs at least one step and a duration above 0 for each, but got "
            f"{len(images)} batches and {len(seconds)} durations"
        )
    speeds = np.asarray(images) / np.asarray(seconds)
    weights = np.ones(len(speeds)) if ewma is None else (1 - ewma) ** np.arange(len(speeds))[::-1]
    p50, p90, p99 = np.percentile(speeds, [50, 90, 99]).tolist()
    return Speed(
        mean=float(weights @ images / (weights @ seconds)),
        uncertainty=float(np.std(speeds)) / math.sqrt(len(speeds)),
        jitter=1.4826 * float(np.median(np.abs(speeds - p50))),
        p50=p50,
        p90=p90,
        p99=p99,
    )


def header(
    flags: Flags,
    dataset: Dataset,
    devices: Sequence[str],
    num_batches: int,
    num_epochs: float,
    where: str = "",
    cluster: Cluster | None = None,
) -> list[str]:
    """Return the lines that describe a run of `num_batches` steps, or `num_epochs` epochs.

    `where` is a line of its own on where it begins, if not with a first step. cluster: the
    processes of a run, if there are several.
    """
    batch_size = flags.eval_batch_size if flags.eval else flags.batch_size
    return [
        f"minidist:    {minidist.__version__}",
        f"Model:       {flags.model}",
        f"Dataset:     {dataset.name}{' (synthetic)' if dataset.synthetic else ''}",
        f"Mode:        {_mode(flags)}",
        f"Batch size:  {batch_size * len(devices)} global",
        f"             {batch_size} per device",
        f"Num batches: {num_batches}",
        f"Num epochs:  {num_epochs:.2f}",
        f"Devices:     {list(devices)}",
        f"Data format: {flags.data_format}",
        f"Optimizer:   {flags.optimizer}",
        f"Variables:   {flags.variable_update}",
        *_policy(flags),
        *([] if cluster is None or cluster.size == 1 else _processes(flags, cluster)),
        f"Precision:   {flags.activations or 'float32'}",
        *([where] if where else []),
        "==========",
    ]


def _mode(flags: Flags) -> str:
    if flags.eval:
        return "evaluation"
    if flags.forward_only:
        return "forward-only"
    return "training + evaluation" if flags.evaluates_during_training else "training"


def _policy(flags: Flags) -> list[str]:
    """Return the lines that say which kind of its policy this is."""
    if flags.variable_update == "parameter_server":
        return [f"Staged vars: {flags.staged_vars}"]
    if flags.variable_update in ALL_REDUCED:
        spec = flags.policy_options().spec()
        return [f"AllReduce:   {spec}", f"Consistency: {flags.variable_consistency}"]
    return []


def _processes(flags: Flags, cluster: Cluster) -> list[str]:
    """Return the lines on several processes."""
    servers = f", {len(cluster.servers)} ps" if cluster.servers else ""
    return [
        f"Processes:   {len(cluster.workers)} workers{servers}",
        f"Sync:        {flags.cross_replica_sync}",
    ]


def columns(loss_type: str, accuracy: bool, unit: str = "images") -> str:
    """Return the heading of the rows; `unit` is what the data set counts."""
    counted = "Img" if unit == "images" else unit.capitalize()
    heading = f"Step\t{counted}/sec\t{loss_type}"
    return heading + ("\ttop_1_accuracy\ttop_5_accuracy" if accuracy else "")


def row(
    step: int,
    speed: Speed,
    loss: float,
    accuracy: Accuracy | None = None,
    unit: str = "images",
) -> str:
    """Return the row of one step, of images to the character as the ancestor prints it."""
    text = (
        f"{step}\t{unit}/sec: {speed.mean:.1f} +/- {speed.uncertainty:.1f} "
        f"(jitter = {speed.jitter:.1f})\t{loss:.3f}"
    )
    return text if accuracy is None else f"{text}\t{accuracy.top_1:.3f}\t{accuracy.top_5:.3f}"


def closing(total_images_per_sec: float, unit: str = "images") -> list[str]:
    """Return the lines after the last row."""
    return [RULE, f"total {unit}/sec: {total_images_per_sec:.2f}", RULE]


def eval_row(step: int, examples_per_sec: float) -> str:
    """Return the row of one step of an evaluation."""
    return f"{step}\t{examples_per_sec:.1f} examples/sec"


def accuracy_line(accuracy: Accuracy) -> str:
    """Return the line on the accuracy over the test part."""
    return (
        f"Accuracy @ 1 = {accuracy.top_1:.4f} Accuracy @ 5 = {accuracy.top_5:.4f} "
        f"[{accuracy.count} examples]"
    )


def skipped_line(records: int) -> str:
    """Return the line on records that others have stood in for."""
    return f"Skipped {records} bad record{'' if records == 1 else 's'}"


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
    unit: str,
    steps: Sequence[Step],
    speed: Speed | None,
    total_images_per_sec: float | None,
    accuracy: Accuracy | None,
    evaluations: Sequence[Evaluated],
    watched: Mapping[str, Any],
    weights_checksum: Sequence[str],
    parameters: int,
    skipped_records: int,
    peak_memory_bytes: int,
    global_step: int,
    resumed_at: int | None,
) -> dict[str, Any]:
    """Return the results of a run in schema 1, ready for `write`; docs/bench.md has its fields.

    `parameters` counts the trainable elements of one replica, `skipped_records` what could not be
    read, over all workers; weights_checksum has one item for each replica.
    """
    return {
        "schema": SCHEMA,
        "config": flags.config(),
        "devices": list(devices),
        "unit": unit,
        "steps": [step._asdict() for step in steps],
        "images_per_sec": None if speed is None else speed._asdict(),
        "total_images_per_sec": total_images_per_sec,
        "accuracy": None if accuracy is None else _accuracy(accuracy),
        "evaluations": [{"step": step, **_accuracy(found)} for step, found in evaluations],
        **watched,
        "global_step": global_step,
        "resumed_at": resumed_at,
        "weights_checksum": {str(replica): text for replica, text in enumerate(weights_checksum)},
        "parameters": parameters,
        "skipped_records": skipped_records,
        "peak_memory_bytes": peak_memory_bytes,
        "versions": versions(),
    }


def comparison(flags: Flags, runs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of several runs, by the names of their policies, in schema 1."""
    return {
        "schema": SCHEMA,
        "config": flags.config(),
        "runs": dict(runs),
        "versions": versions(),
    }


def _accuracy(accuracy: Accuracy) -> dict[str, float]:
    return {"top_1": accuracy.top_1, "top_5": accuracy.top_5}


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
