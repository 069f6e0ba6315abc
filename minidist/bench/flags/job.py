"""Flags of the job itself: which model on which data and devices, for how long, doing what."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.bench.flags.kinds import (
    BOOLEAN,
    DEVICE,
    EPOCH_COUNT,
    FOLDER,
    KERNELS,
    SHARE,
    choice,
    filled,
    flag,
    whole,
)
from minidist.data import SOURCES
from minidist.models import MODELS
from minidist.models.recipe import Recipe


@dataclass(frozen=True)
class Selection:
    """What is trained."""

    model: str = flag("lenet", choice(*MODELS), "the network to train")
    data_name: str = flag(
        "digits",
        choice(*SOURCES),
        "the data set; without --data_dir all but digits and text are made up",
    )
    data_dir: str | None = flag(None, FOLDER, "the folder with the files of the data set")
    batch_size: int = filled(
        whole(1),
        "examples per device and step, by default the model's for this data, else "
        f"{Recipe.batch_size}",
    )
    num_devices: int = flag(2, whole(1, 1024), "devices, each a replica", "num_gpus")
    device: str = flag(
        "cpu",
        DEVICE,
        "the kind of device; cuda takes the first GPUs, or those that workers of lower numbers "
        "leave on this machine, and cuda:0 lets all replicas share GPU 0",
    )
    kernels: str | None = flag(
        None,
        KERNELS,
        "what chooses who computes convolutions and products: on CPUs auto measures, gemm and "
        "onednn take these, and a file of choices fixes them; on GPUs gemm leaves cuDNN out; by "
        "default MINIDIST_KERNELS, or auto",
    )
    data_format: str = flag(
        "NHWC",
        choice("NHWC", "NCHW"),
        "order in which images are handed over; NCHW is transposed once",
    )


@dataclass(frozen=True)
class Length:
    """For how long."""

    num_batches: int | None = flag(
        None,
        whole(1),
        "steps to train and measure, in place of --num_epochs; what a training that "
        "is gone on from has done of them is done",
    )
    num_epochs: float | None = flag(
        None,
        EPOCH_COUNT,
        "passes over the training part; when neither this nor --num_batches is given the model's "
        f"for this data, else {Recipe.num_epochs:g}",
    )
    num_warmup_batches: int = flag(
        10, whole(0), "steps before those that are counted and measured; they train as all do"
    )
    display_every: int = flag(10, whole(1), "steps from one printed row to the next")
    display_perf_ewma: float | None = flag(
        None,
        SHARE,
        "let images/sec be of an exponentially weighted mean of the steps' times, in which the "
        "newest has this weight",
    )


@dataclass(frozen=True)
class Mode:
    """Doing what."""

    forward_only: bool = flag(False, BOOLEAN, "compute losses but train nothing")
    eval: bool = flag(
        False, BOOLEAN, "train nothing: print the accuracy of the newest checkpoint in --train_dir"
    )
    print_training_accuracy: bool = flag(
        False, BOOLEAN, "add the accuracy on the training batch to the rows"
    )
