"""The command line: the class `Flags` is the table of flags, and every flag is written there once.

Names are those of tf_cnn_benchmarks. A flag is given as `--name=value` or `--name value`, a boolean
as `--name`, `--noname` or `--name=true`; the last one counts. Defaults are the main job.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

import minidist
from minidist.bench.kinds import (
    BOOLEAN,
    EPOCH_COUNT,
    FOLDER,
    FRACTION,
    NOT_NEGATIVE,
    OUTPUT_FILE,
    POSITIVE,
    SCHEDULE,
    Kind,
    choice,
    whole,
)
from minidist.bench.schedule import Schedule
from minidist.data import SOURCES
from minidist.errors import UsageError
from minidist.models import MODELS
from minidist.variable_mgr import GRADIENT_SCALES, PARAMETER_DEVICES, POLICIES

T = TypeVar("T")
Value = str | int | float | bool | None

PROGRAM = "python -m minidist.bench"
GROUPS = ("Selection", "Length", "Mode", "Distribution", "Optimisation", "Output")
EPOCHS = 20.0
LEARNING_RATES = {"sgd": 0.2, "momentum": 0.02, "rmsprop": 0.05, "adam": 0.002}


def flag(group: str, default: T, kind: Kind, words: str, *aliases: str) -> T:
    """Return the dataclass field of one flag; `words` is its help, `aliases` its further names."""
    about = {"group": group, "kind": kind, "words": words, "aliases": aliases}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Flags:
    """The flags of one run, by name. Without values they are the main job.

    `init_learning_rate` and `num_epochs` are filled in when nothing replaces them. Raises
    UsageError for flags that contradict each other.
    """

    model: str = flag("Selection", "lenet", choice(*MODELS), "the network to train")
    data_name: str = flag(
        "Selection",
        "digits",
        choice(*SOURCES),
        "the data set; all but digits are made up unless --data_dir is given",
    )
    data_dir: str | None = flag(
        "Selection", None, FOLDER, "where the files of mnist or cifar10 lie"
    )
    batch_size: int = flag("Selection", 32, whole(1), "examples per device and step")
    num_devices: int = flag("Selection", 2, whole(1, 1024), "devices, each a replica", "num_gpus")
    device: str = flag("Selection", "cpu", choice("cpu"), "the kind of device")
    data_format: str = flag(
        "Selection",
        "NHWC",
        choice("NHWC", "NCHW"),
        "order in which images are handed over; NCHW is transposed once",
    )

    num_batches: int | None = flag(
        "Length", None, whole(1), "steps to train and measure, in place of --num_epochs"
    )
    num_epochs: float | None = flag(
        "Length",
        None,
        EPOCH_COUNT,
        f"passes over the training part; {EPOCHS:g} when neither this nor --num_batches is given",
    )
    num_warmup_batches: int = flag(
        "Length", 10, whole(0), "steps before those that are counted and measured"
    )
    display_every: int = flag("Length", 10, whole(1), "steps from one printed row to the next")

    forward_only: bool = flag("Mode", False, BOOLEAN, "compute losses but train nothing")
    print_training_accuracy: bool = flag(
        "Mode", False, BOOLEAN, "add the accuracy on the training batch to the rows"
    )

    variable_update: str = flag(
        "Distribution",
        "replicated",
        choice(*POLICIES),
        "the policy that keeps the copies of a variable in step",
    )
    local_parameter_device: str = flag(
        "Distribution",
        "cpu",
        choice(*PARAMETER_DEVICES),
        "where parameter_server keeps each variable: on the host, or on the least loaded of the "
        "devices (device and gpu mean the same)",
    )
    gradient_scale: str = flag(
        "Distribution",
        "mean",
        choice(*GRADIENT_SCALES),
        "mean over replicas under every policy, or the ancestors' mixture of sums and means",
    )
    concurrent: bool = flag(
        "Distribution", True, BOOLEAN, "replicas run at the same time, else in turns"
    )

    optimizer: str = flag("Optimisation", "momentum", choice(*LEARNING_RATES), "the update rule")
    init_learning_rate: float | None = flag(
        "Optimisation",
        None,
        NOT_NEGATIVE,
        "the learning rate, by default "
        + ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items()),
    )
    piecewise_learning_rate_schedule: Schedule | None = flag(  # noqa: RUF009, it is a field()
        "Optimisation", None, SCHEDULE, "learning rates by epoch, in place of --init_learning_rate"
    )
    momentum: float = flag("Optimisation", 0.9, FRACTION, "share of the momentum kept")
    nesterov: bool = flag("Optimisation", True, BOOLEAN, "momentum is Nesterov's")
    rmsprop_decay: float = flag("Optimisation", 0.9, FRACTION, "decay of the mean square")
    rmsprop_momentum: float = flag("Optimisation", 0.9, FRACTION, "share of the momentum kept")
    rmsprop_epsilon: float = flag("Optimisation", 1.0, POSITIVE, "added to the mean square")
    adam_beta1: float = flag("Optimisation", 0.9, FRACTION, "decay of the mean gradient")
    adam_beta2: float = flag("Optimisation", 0.999, FRACTION, "decay of the mean square")
    adam_epsilon: float = flag("Optimisation", 1e-8, POSITIVE, "added to the root mean square")
    weight_decay: float = flag(
        "Optimisation", 4e-5, NOT_NEGATIVE, "this times the weight is added to each gradient"
    )
    tf_random_seed: int = flag(
        "Optimisation",
        1234,
        whole(0, 2**64 - 1),
        "decides initial weights, order of examples, dropout and made-up images",
        "seed",
    )

    loss_type_to_report: str = flag(
        "Output",
        "total_loss",
        choice("total_loss", "base_loss"),
        "the loss in the rows: with the weight decay's share, or without",
    )
    json: str | None = flag("Output", None, OUTPUT_FILE, "write all results to this file")

    def __post_init__(self) -> None:
        if self.num_batches is not None and self.num_epochs is not None:
            raise UsageError(
                "--num_batches and --num_epochs contradict each other: give only one of them"
            )
        if self.num_batches is None and self.num_epochs is None:
            object.__setattr__(self, "num_epochs", EPOCHS)
        schedule = self.piecewise_learning_rate_schedule
        if schedule is not None and self.init_learning_rate is not None:
            raise UsageError(
                "--piecewise_learning_rate_schedule and --init_learning_rate contradict each "
                "other: give only one of them"
            )
        if schedule is None and self.init_learning_rate is None:
            object.__setattr__(self, "init_learning_rate", LEARNING_RATES[self.optimizer])

    def steps(self, batches_per_epoch: int) -> int:
        """Return how many steps are measured: those of the last epoch, begun, are all done."""
        if self.num_batches is not None:
            return self.num_batches
        # As the decimal fraction that was given: 1.1 epochs of 10 batches are 11 steps, not 12.
        return math.ceil(Fraction(str(self.num_epochs)) * batches_per_epoch)

    def learning_rate(self, epoch: float) -> float:
        """Return the learning rate after `epoch` epochs, which may be a fraction."""
        if self.piecewise_learning_rate_schedule is not None:
            return self.piecewise_learning_rate_schedule.rate(epoch)
        assert self.init_learning_rate is not None  # by __post_init__
        return self.init_learning_rate

    def config(self) -> dict[str, Value]:
        """Return the flags as JSON can hold them, a schedule as its text."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: str(value) if isinstance(value, Schedule) else value
            for name, value in values.items()
        }


def parse(arguments: Sequence[str]) -> Flags:
    """Return the flags that the arguments of a command (without its name) give.

    Raises UsageError for flags or values that are unknown, missing or contradictory. `--help` and
    `--version` print and raise SystemExit(0).
    """
    try:
        namespace, unknown = _parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}: see --help") from None
    if unknown:
        _refuse(unknown[0])
    given: dict[str, str] = vars(namespace)
    values: dict[str, Any] = {}
    for item in fields(Flags):
        kind: Kind = item.metadata["kind"]
        for name in (item.name, *item.metadata["aliases"]):
            if name not in given:
                continue
            try:
                value = kind.parse(given[name])
            except UsageError as error:
                raise UsageError(f"--{name}: {error}") from None
            except ValueError:
                raise UsageError(f"--{name}={given[name]} is not {kind.allowed}") from None
            if values.setdefault(item.name, value) != value:
                raise UsageError(
                    f"--{item.name} and --{name} are the same flag, but were given "
                    f"{values[item.name]} and {value}: give only one of them"
                )
    return Flags(**values)


def _parser() -> argparse.ArgumentParser:
    """Make the parser that only collects text by name; `parse` reads it."""
    parser = argparse.ArgumentParser(
        usage=f"{PROGRAM} [--flag=value ...]",
        description="Train a model on several devices, and print speed, loss and accuracy.",
        epilog="Booleans are given as --flag, --noflag or --flag=true. Of a flag given twice the "
        "last one counts.",
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    version = f"minidist {minidist.__version__}"
    parser.add_argument("--version", action="version", version=version)
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for item in fields(Flags):
        group, kind = groups[item.metadata["group"]], item.metadata["kind"]
        words = f"{item.metadata['words']} ({kind.allowed})"
        if item.default is not None:
            words += f" [{str(item.default).lower() if kind is BOOLEAN else item.default}]"
        if kind is BOOLEAN:
            group.add_argument(f"--{item.name}", nargs="?", const="true", metavar="X", help=words)
            group.add_argument(
                f"--no{item.name}",
                dest=item.name,
                action="store_const",
                const="false",
                help=argparse.SUPPRESS,
            )
            continue
        group.add_argument(f"--{item.name}", metavar="X", help=words)
        for alias in item.metadata["aliases"]:
            group.add_argument(f"--{alias}", metavar="X", help=f"the same as --{item.name}")
    return parser


def _refuse(argument: str) -> NoReturn:
    if not argument.startswith("--"):
        raise UsageError(f"{argument!r} is not a flag: flags begin with --, see --help")
    name = argument.removeprefix("--").split("=")[0]
    known = [name for item in fields(Flags) for name in (item.name, *item.metadata["aliases"])]
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean --{close[0]}?" if close else "."
    raise UsageError(f"--{name} is not a flag{guess} Flags are --{', --'.join(known)}.")
