"""Flags of what comes out: evaluations, checkpoints, summaries and files."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.bench.flags.kinds import (
    BOOLEAN,
    EPOCH_COUNT,
    EPOCHS,
    FAULTS,
    FOLDER,
    NOT_NEGATIVE,
    OUTPUT_FILE,
    POSITIVE,
    SHARE,
    STEPS,
    TRACE_FILE,
    choice,
    filled,
    flag,
    whole,
)
from minidist.bench.inject import Fault


@dataclass(frozen=True)
class Evaluation:
    """When the accuracy on the test part is computed, and on how much of it."""

    eval_batch_size: int = filled(
        whole(1), "examples per device and batch, by default --batch_size"
    )
    num_eval_batches: int | None = flag(
        None, whole(1), "batches of an evaluation, in place of --num_eval_epochs"
    )
    num_eval_epochs: float | None = flag(
        None, EPOCH_COUNT, "passes over the test part; 1 without this and --num_eval_batches"
    )
    eval_during_training_every_n_steps: int | None = flag(
        None, whole(1), "evaluate after every so many steps (of those that are counted)"
    )
    eval_during_training_every_n_epochs: float | None = flag(
        None, POSITIVE, "evaluate after every so many epochs"
    )
    eval_during_training_at_specified_steps: tuple[int, ...] | None = flag(
        None, STEPS, "evaluate after these steps"
    )
    eval_during_training_at_specified_epochs: tuple[float, ...] | None = flag(
        None, EPOCHS, "evaluate after these epochs"
    )
    stop_at_top_1_accuracy: float | None = flag(
        None, SHARE, "end the training when an evaluation during it reaches this"
    )


@dataclass(frozen=True)
class Checkpoints:
    """What of a training is kept on the way."""

    train_dir: str | None = flag(
        None,
        FOLDER,
        "where checkpoints are saved, one at the end too; a training goes on from the newest",
    )
    save_model_steps: int | None = flag(
        None, whole(1), "save a checkpoint every so many steps, those of the warm-up counted"
    )
    save_model_secs: float = flag(
        0.0, NOT_NEGATIVE, "save one every so many seconds; 0: not for that reason"
    )
    max_ckpts_to_keep: int = flag(5, whole(0), "how many of the newest are kept; 0: all")
    save_summaries_steps: int = flag(
        0, whole(0), "write summaries to --train_dir every so many steps; 0: none"
    )
    summary_verbosity: int = filled(
        whole(0, 3),
        "1: loss, learning rate, speed and accuracy; 2: the distribution of all weights too; 3: of "
        "each variable's; by default 1 with --save_summaries_steps",
    )


@dataclass(frozen=True)
class Output:
    """What is said of a run."""

    loss_type_to_report: str = flag(
        "total_loss",
        choice("total_loss", "base_loss"),
        "the loss in the rows: with the weight decay's share, or without",
    )
    json: str | None = flag(None, OUTPUT_FILE, "write all results to this file")


@dataclass(frozen=True)
class Instruments:
    """What is looked at, and what goes wrong on purpose."""

    trace_file: str | None = flag(
        None,
        TRACE_FILE,
        "write what each replica and stream did in the last steps: .html is a page for any "
        "browser, .json is for Perfetto",
    )
    trace_steps: int = flag(10, whole(1), "how many of the last measured steps --trace_file holds")
    nvtx: bool = flag(False, BOOLEAN, "push NVTX ranges, which NVIDIA's profilers show; needs CuPy")
    profile: bool = flag(
        False,
        BOOLEAN,
        "say how long each operation takes, what computes it, and what lies between operations",
    )
    inject: tuple[Fault, ...] | None = flag(
        None, FAULTS, "make a replica slow by a factor, or let it fail in a step of the rows"
    )
