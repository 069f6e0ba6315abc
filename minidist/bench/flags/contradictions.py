"""Flags that do not go together: found before anything starts, and named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist.bench.flags.distribution import ALL
from minidist.bench.flags.input import OF_ENCODED
from minidist.errors import UsageError
from minidist.variable_mgr import ACROSS, OPTIONS_OF, SERVED

if TYPE_CHECKING:
    from minidist.bench.flags import Flags

DURING_TRAINING = (
    "eval_during_training_every_n_steps",
    "eval_during_training_every_n_epochs",
    "eval_during_training_at_specified_steps",
    "eval_during_training_at_specified_epochs",
)
IN_STEP = (*DURING_TRAINING, "save_model_secs")  # what needs workers that are
BY_ITSELF = "independent"  # a policy whose replicas never meet, wherever they are
# No two of one line.
ALTERNATIVES = (
    ("num_batches", "num_epochs"),
    ("num_eval_batches", "num_eval_epochs"),
    ("forward_only", "eval"),
    ("forward_only", "train_dir"),
    ("eval", "trace_file"),
    ("eval", "inject"),
    ("eval", "profile"),
    ("save_model_secs", "save_model_steps"),
    ("piecewise_learning_rate_schedule", "init_learning_rate", "resnet_base_lr"),
    ("piecewise_learning_rate_schedule", "num_epochs_per_decay"),
    ("piecewise_learning_rate_schedule", "learning_rate_decay_factor"),
    ("resnet_base_lr", "num_epochs_per_decay"),
    ("use_fp16", "use_bf16"),
    ("gradient_clip", "gradient_clip_norm"),
    DURING_TRAINING,
    *((during, other) for during in DURING_TRAINING for other in ("eval", "forward_only")),
    *((during, "staged_vars") for during in DURING_TRAINING),
    *(("num_ps", name) for name in ("job_name", "worker_hosts", "ps_hosts")),
)
# The first is of no use without the second.
NEEDS = (
    ("eval", "train_dir"),
    ("trace_steps", "trace_file"),
    ("save_model_steps", "train_dir"),
    ("save_model_secs", "train_dir"),
    ("save_summaries_steps", "train_dir"),
    ("num_epochs_per_decay", "learning_rate_decay_factor"),
    ("learning_rate_decay_factor", "num_epochs_per_decay"),
    ("minimum_learning_rate", "num_epochs_per_decay"),
    ("fp16_loss_scale", "use_fp16"),
    ("fp16_enable_auto_loss_scale", "use_fp16"),
    ("task_index", "job_name"),
    ("ps_hosts", "worker_hosts"),
)


def check(flags: Flags) -> None:
    """Raise UsageError for the first contradiction."""
    for names in ALTERNATIVES:
        given = [name for name in names if _is_given(flags, name)]
        if len(given) > 1:
            raise UsageError(
                f"--{given[0]} and --{given[1]} contradict each other: give only one of them"
            )
    for name, needed in NEEDS:
        if _is_given(flags, name) and not _is_given(flags, needed):
            raise UsageError(f"--{name} needs --{needed}: give both, or neither")
    if flags.stop_at_top_1_accuracy is not None and not flags.evaluates_during_training:
        raise UsageError(
            "--stop_at_top_1_accuracy needs evaluations during the training: give one of "
            f"--{', --'.join(DURING_TRAINING)} too"
        )
    if flags.summary_verbosity and not flags.save_summaries_steps:
        raise UsageError(
            f"--summary_verbosity={flags.summary_verbosity} needs --save_summaries_steps: say how "
            "often summaries are written"
        )
    for name in OF_ENCODED:
        if _is_given(flags, name) and not flags.reads_encoded_images:
            raise UsageError(
                f"--{name} is for encoded images, which --data_name=imagenet and folder read from "
                "--data_dir: give both, or leave it out"
            )
    if flags.variable_update == ALL and flags.eval:
        raise UsageError(
            "--eval evaluates one training, and --variable_update=all names several: name one"
        )
    for name, policies in OPTIONS_OF.items():
        if _is_given(flags, name) and flags.variable_update not in (*policies, ALL):
            raise UsageError(
                f"--{name}={getattr(flags, name)} is for --variable_update={policies[0]}, not for "
                f"{flags.variable_update}: leave one of them out"
            )
    if "hierarchical_copy" in str(flags.policy_options().spec()) and flags.num_devices == 1:
        raise UsageError(
            "hierarchical_copy copies between devices, but --num_devices is 1: leave it out"
        )
    if flags.policy_options().spec().by_nccl and flags.device == "cpu":
        raise UsageError(
            f"--all_reduce_spec={flags.all_reduce_spec} sums on GPUs, but --device is cpu: give "
            "--device=cuda, or use auto"
        )
    if not flags.cross_replica_sync and flags.variable_update != ALL:
        for name in IN_STEP:
            if _is_given(flags, name):
                raise UsageError(
                    f"--{name} needs workers that are in step, but --nocross_replica_sync lets "
                    "each go on alone: leave one of them out"
                )


def check_among(flags: Flags, workers: int, servers: int) -> None:
    """Raise UsageError for what does not fit the number of processes, once that is known."""
    replicas = flags.num_devices * workers
    for fault in flags.inject or ():
        if fault.replica >= replicas:
            of = f" in each of {workers} workers" if workers > 1 else ""
            raise UsageError(
                f"--inject={fault} names replica {fault.replica}, but --num_devices="
                f"{flags.num_devices}{of} has replicas 0 to {replicas - 1}"
            )
    if workers > 1 and flags.variable_update not in (BY_ITSELF, *ACROSS, *SERVED, ALL):
        raise UsageError(
            f"--variable_update={flags.variable_update} is for one process, but there are "
            f"{workers} workers: choose {', '.join(ACROSS + SERVED)} or {BY_ITSELF}"
        )
    if workers > 1 and not servers and flags.variable_update in SERVED:
        raise UsageError(
            f"--variable_update={flags.variable_update} of {workers} workers needs parameter "
            "servers: start more processes, and say with --num_ps how many they are"
        )
    if servers and flags.variable_update not in (*SERVED, ALL):
        raise UsageError(
            f"--variable_update={flags.variable_update} has nothing to do for {servers} parameter "
            "servers: leave out --num_ps and --ps_hosts"
        )


def _is_given(flags: Flags, name: str) -> bool:
    """Whether a flag says something else than one that is not given."""
    value, default = getattr(flags, name), type(flags).__dataclass_fields__[name].default
    return value != default and (value is not False or default is True)
