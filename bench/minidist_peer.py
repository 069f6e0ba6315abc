"""minidist itself, on the workloads of its peers: replicas are threads of one process.

    python bench/minidist_peer.py --workload resnet20 --replicas 2 --threads-per-replica 1
    python bench/minidist_peer.py --workload mlp --variable-update parameter_server

Command line and lines of JSON are those of the programs in bench/peers, so that all can take turns
in one run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
from peers import job as jobs
from peers.networks import MOMENTUM, NETWORKS, RATE, shapes

import minidist as md
from minidist import comm
from minidist.data import Batches, preprocess
from minidist.data.dataset import shuffled
from minidist.data.pixels import Pixels
from minidist.train import train_step
from minidist.variable_mgr import POLICIES

POLICY = "--variable-update", {"choices": list(POLICIES), "default": "replicated"}
WORKLOADS = (*NETWORKS, "allreduce", "optimizer", "merge_call", "input", "jpeg", "import")
ASKED = jobs.asked(__doc__, WORKLOADS, POLICY, jobs.PHOTOS)
# Of these the first times fresh interpreters only, and the others' workers need cores too.
if ASKED.workload not in ("import", "input", "jpeg"):
    # The cores are shared among the replicas, so their number says how many threads each has.
    cores = sorted(os.sched_getaffinity(0))[: ASKED.replicas * ASKED.threads]
    os.sched_setaffinity(0, cores)


def answer(variant: str, *args: Any, **more: Any) -> None:
    from importlib.metadata import version

    jobs.answer("minidist", version("minidist"), ASKED, variant, *args, **more)


def strategy() -> md.Strategy:
    return md.Strategy(f"cpu*{ASKED.replicas}", ASKED.options["variable_update"])


def placed(on: md.Strategy, make: Callable[[], Any]) -> md.PerReplica:
    """Return what `make` gives, made anew for each replica, on its device."""
    values = []
    for device in on.devices:
        with md.device(device):
            values.append(md.constant(make()))
    return md.PerReplica(on.devices, values)


# --- training -----------------------------------------------------------------------------------


def training() -> None:
    network = NETWORKS[ASKED.workload]
    batch = ASKED.batch or network.batch
    random = np.random.default_rng(1)
    with strategy() as on:
        with on.scope():
            model = md.models.build(ASKED.workload, network.image, network.classes)
        optimizer = md.optim.Momentum(RATE, MOMENTUM, weight_decay=network.decay)
        batches = [
            (
                placed(on, lambda: random.standard_normal((batch, *network.image), np.float32)),
                placed(on, lambda: random.integers(0, network.classes, batch)),
            )
            for _ in range(network.batches)
        ]

        def step(i: int) -> float:
            results = on.run(train_step, model, optimizer, *batches[i % len(batches)])
            return statistics.mean(result.loss for result in on.local_results(results))

        measured = jobs.train(ASKED, step)
    answer(
        ASKED.options["variable_update"],
        measured.seconds,
        ASKED.replicas * batch,
        "images/s",
        batch=batch,
        params=sum(variable.size for variable in model.trainable_variables),
        **measured.told(),
    )


# --- the rest -----------------------------------------------------------------------------------


def sums() -> None:
    """Sum in place, as the variable manager does with its buckets, and into new tensors."""
    with strategy() as on:
        communicator = comm.make("auto", on.devices)
        threads = ASKED.replicas * ASKED.threads

        def sum_rows(strategy: md.Strategy, buffers: md.PerReplica) -> None:
            rows = [[buffer.array] for buffer in strategy.local_results(buffers)]
            communicator.all_reduce(rows, rows, threads=threads)

        def in_place(buffer: md.Tensor) -> None:
            md.get_replica_context().merge_call(sum_rows, buffer)

        def new(buffer: md.Tensor) -> None:
            md.get_replica_context().all_reduce("sum", buffer)

        def replica(how: Callable[[md.Tensor], None], buffer: md.Tensor, times: int) -> Any:
            here, seconds = md.get_replica_context(), np.empty(times)
            for i in range(times):
                here.merge_call(lambda strategy: None)  # all enter together
                started = time.perf_counter()
                how(buffer)
                seconds[i] = time.perf_counter() - started
            return seconds

        for size, often in jobs.SUMS.items():
            for variant, how in (("in place", in_place), ("new tensors", new)):
                buffers = placed(on, lambda size=size: np.zeros(size * 256, np.float32))
                times = ASKED.warmup + often * ASKED.steps
                found = on.local_results(on.run(replica, how, buffers, times))
                slowest = np.maximum.reduce(found)[ASKED.warmup :].tolist()
                answer(variant, slowest, 1024e-9 * size, "GB/s", batch=size)


def optimizer() -> None:
    (device,) = md.devices("cpu*1")
    random = np.random.default_rng(0)

    def kept(scale: float) -> list[Any]:
        arrays = [device.allocate(shape, "float32") for shape in shapes("resnet50")]
        for array in arrays:
            array[...] = scale * random.standard_normal(array.shape, np.float32)
        return arrays

    weights, gradients, firsts, seconds = kept(1.0), kept(0.01), kept(0.0), kept(0.0)
    how = {"scale": 1.0, "weight_decay": [0.0] * len(weights), "threads": ASKED.threads}
    momentum = {"lr": RATE, "momentum": MOMENTUM, "nesterov": False}
    adam = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "step": 1000}
    rules = {
        "sgdm": lambda: device.ops.momentum(weights, gradients, firsts, **momentum, **how),
        "adam": lambda: device.ops.adam(weights, gradients, firsts, seconds, **adam, **how),
    }
    for name, rule in rules.items():
        nbytes = 4 * jobs.WORDS[name] * NETWORKS["resnet50"].parameters
        times = jobs.timed(ASKED.steps, ASKED.warmup, rule)
        answer(name, times, nbytes / 1e9, "GB/s")


def merges() -> None:
    def merging(times: int) -> None:
        here = md.get_replica_context()
        for _ in range(times):
            here.merge_call(lambda strategy: None)

    with strategy() as on:
        empty = jobs.timed(20 * ASKED.steps, ASKED.warmup, lambda: on.run(merging, 0))
        full = jobs.timed(ASKED.steps, ASKED.warmup, lambda: on.run(merging, jobs.MERGES))
    answer("run", empty, 1, "us")
    less = statistics.median(empty)
    answer("merge_call", [each - less for each in full], jobs.MERGES, "us")


def pipelines() -> None:
    """The transform in NumPy, as a user writes it, and minidist's own, of images in memory."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (jobs.EXAMPLES, 32, 32, 3), np.uint8)
    labels = random.integers(0, 10, jobs.EXAMPLES)
    mean, scale = np.float32(jobs.MEAN), 1 / np.float32(jobs.STD)
    batch, rows = ASKED.batch or jobs.INPUT_BATCH, np.arange(32)

    def padded(chosen: Any) -> Any:
        around = np.zeros((len(chosen), 40, 40, 3), np.uint8)
        around[:, 4:36, 4:36] = images[chosen]
        return around

    def one(i: int) -> Any:
        top, left, mirror = random.integers(0, (9, 9, 2))
        crop = padded([i])[0, top : top + 32, left : left + 32]
        return (crop[:, ::-1] if mirror else crop) - mean

    def per_sample(chosen: Any) -> Any:
        return np.stack([one(i) * scale for i in chosen])

    def batched(chosen: Any) -> Any:
        n = len(chosen)
        tops, lefts = random.integers(0, 9, (2, n, 1))
        columns = lefts + np.where(random.random((n, 1)) < 0.5, rows[::-1], rows)
        each = np.arange(n)[:, None, None]
        crops = padded(chosen)[each, (tops + rows)[:, :, None], columns[:, None]]
        return (crops - mean) * scale

    def source(transform: Callable[[Any], Any]) -> Iterator[Any]:
        for order in map(random.permutation, repeat(jobs.EXAMPLES)):
            for start in range(0, jobs.EXAMPLES - batch + 1, batch):
                chosen = order[start : start + batch]
                yield transform(chosen), labels[chosen]

    with strategy() as on:
        for transform, more in ((per_sample, 1), (batched, 5)):
            for workers in (0, 1):
                batches = source(transform)
                if workers:
                    batches = iter(on.distribute_dataset(batches))
                seconds, cores = jobs.busy_window(ASKED, more * ASKED.steps, batches.__next__)
                variant = f"{transform.__name__}-workers{workers}"
                answer(variant, seconds, batch, "images/s", batch=batch, cores_used=round(cores, 2))
    shift = -np.float32(jobs.MEAN) * scale
    split = Pixels(images, labels, pad=4, scale=scale, shift=shift)
    for workers in jobs.WORKERS:
        batches = iter(Batches(split, batch, seed=1, workers=workers, ahead=4))
        seconds, cores = jobs.busy_window(ASKED, 40 * ASKED.steps, batches.__next__)
        answer(
            f"own-workers{workers}",
            seconds,
            batch,
            "images/s",
            batch=batch,
            cores_used=round(cores, 2),
        )


class Photographs:
    """A Split of encoded images in memory, of no class."""

    shape: tuple[int, ...] = (jobs.PHOTO_SIZE, jobs.PHOTO_SIZE, 3)
    dtype = np.dtype(np.float32)
    label_shape: tuple[int, ...] = ()
    grain = 1

    def __init__(self, files: list[bytes]) -> None:
        self.files = files
        self.prepare = preprocess.make(md.data.Settings(distortions=False), self.shape, train=True)

    def __len__(self) -> int:
        return len(self.files)

    def order(self, seed: int, epoch: int) -> Any:
        return shuffled(len(self), seed, epoch)

    def read(self, numbers: Any, seed: int, epoch: int, inputs: Any, labels: Any) -> None:
        labels[...] = 0
        for row, number in enumerate(numbers.tolist()):
            self.prepare(self.files[number], seed, epoch, number, inputs[row])


def photographs() -> None:
    """Decode a random part of each file, flip, resize and scale it."""
    split, batch = Photographs(jobs.photos(ASKED)), ASKED.batch or jobs.PHOTO_BATCH
    for workers in jobs.WORKERS:
        batches = iter(Batches(split, batch, seed=1, workers=workers, ahead=4))
        seconds, cores = jobs.busy_window(ASKED, ASKED.steps, batches.__next__)
        answer(
            f"workers{workers}", seconds, batch, "images/s", batch=batch, cores_used=round(cores, 2)
        )


_TWO = "import minidist as md\nmd.Strategy('cpu*2').run(lambda: None)\n"


def start() -> None:
    for variant, code in (("import", "import minidist"), ("two replicas", _TWO)):
        seconds, memory = jobs.fresh(ASKED, code)
        answer(variant, seconds, 1, "s", memory=memory)
    answer("size with dependencies", [1.0], jobs.megabytes("minidist"), "MB", memory=0.0)


OTHERS = {
    "allreduce": sums,
    "optimizer": optimizer,
    "merge_call": merges,
    "input": pipelines,
    "jpeg": photographs,
    "import": start,
}

if __name__ == "__main__":
    OTHERS.get(ASKED.workload, training)()
