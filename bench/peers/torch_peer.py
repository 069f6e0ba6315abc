"""PyTorch: DistributedDataParallel over gloo, one process for each replica.

    python torch_peer.py --workload resnet20 [--layout nchw]      # pip install torch numpy

Its best settings on CPUs: channels last (--layout nchw is the other one), gradients as views of
the buckets, a static graph, fused optimizers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import job as jobs
from networks import MOMENTUM, NETWORKS, RATE, shapes

ASKED = jobs.asked(
    __doc__,
    (*NETWORKS, "allreduce", "optimizer", "input", "import"),
    ("--layout", {"choices": ("nhwc", "nchw"), "default": "nhwc"}),
    ("--rank", {"type": int, "help": "of a process that this program has started itself"}),
    ("--store", {"help": "where the ranks find each other"}),
)
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # read when torch is loaded
    os.environ[_name] = str(ASKED.threads)


def answer(variant: str, *args: Any, **more: Any) -> None:
    from importlib.metadata import version

    jobs.answer("torch", version("torch"), ASKED, variant, *args, **more)


# --- training -----------------------------------------------------------------------------------


def training_rank() -> None:
    """Train in one of the processes, which answers with what it has measured."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch_network import module

    network = NETWORKS[ASKED.workload]
    batch = ASKED.batch or network.batch
    torch.manual_seed(0)
    height, width, channels = network.image
    last = torch.channels_last if ASKED.options["layout"] == "nhwc" else torch.contiguous_format
    model = module(network.layers, channels, height)[0].to(memory_format=last)
    parameters = sum(each.numel() for each in model.parameters())
    if ASKED.replicas > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    how = {"momentum": MOMENTUM, "weight_decay": network.decay, "fused": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, **how)
    torch.manual_seed(1 + ASKED.options["rank"])
    batches = [
        (
            torch.randn(batch, channels, height, width).to(memory_format=last),
            torch.randint(0, network.classes, (batch,)),
        )
        for _ in range(network.batches)
    ]

    def step(i: int) -> float:
        images, labels = batches[i % len(batches)]
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    measured = jobs.train(ASKED, step)
    tell({"seconds": measured.seconds, "params": parameters, **measured.told()})


def training() -> None:
    """Train in all processes; a step is as long as in the slowest one."""
    told = in_ranks()
    seconds = [max(each) for each in zip(*(one["seconds"] for one in told), strict=True)]
    first = told[0]
    batch = ASKED.batch or NETWORKS[ASKED.workload].batch
    images = ASKED.replicas * batch
    answer(
        f"{'ddp' if ASKED.replicas > 1 else 'single'}-{ASKED.options['layout']}",
        seconds,
        images,
        "images/s",
        memory=sum(one["memory"] for one in told),
        batch=batch,
        cores_used=round(sum(one["cores_used"] for one in told), 2),
        **{key: first[key] for key in ("loss_first", "loss_last", "params")},
    )


# --- all-reduce ---------------------------------------------------------------------------------


def sums_rank() -> None:
    import torch
    from torch import distributed

    found = {}
    for size, often in jobs.SUMS.items():
        buffer, seconds = torch.zeros(size * 256), []
        for _ in range(ASKED.warmup + often * ASKED.steps):
            distributed.barrier()
            started = time.perf_counter()
            distributed.all_reduce(buffer)
            seconds.append(time.perf_counter() - started)
        found[size] = seconds[ASKED.warmup :]
    tell({"seconds": found})


def sums() -> None:
    told = in_ranks()
    memory = sum(one["memory"] for one in told)
    for size in jobs.SUMS:
        each = zip(*(one["seconds"][str(size)] for one in told), strict=True)
        gigabytes = 1024e-9 * size
        answer("gloo", [max(some) for some in each], gigabytes, "GB/s", memory=memory, batch=size)


# --- processes ----------------------------------------------------------------------------------


def in_ranks() -> list[dict[str, Any]]:
    """Start this program once for each replica; return what they tell, in order."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--store", f"{folder}/store", "--rank"]
        running = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(ASKED.replicas)
        ]
        said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit("a rank has failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


def tell(what: dict[str, Any]) -> None:
    print(json.dumps({**what, "memory": jobs.peak_memory()}), flush=True)


def rank(work: Any) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(ASKED.threads)
    torch.set_num_interop_threads(1)
    if ASKED.replicas > 1:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{ASKED.options['store']}",
            rank=ASKED.options["rank"],
            world_size=ASKED.replicas,
        )
    work()
    if ASKED.replicas > 1:
        distributed.barrier()
        distributed.destroy_process_group()


# --- one process --------------------------------------------------------------------------------


def optimizer() -> None:
    import torch

    torch.set_num_threads(ASKED.threads)
    parameters = [torch.randn(shape).requires_grad_() for shape in shapes("resnet50")]
    for each in parameters:
        each.grad = torch.randn(each.shape) * 0.01
    rules = {
        "sgdm": torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, fused=True),
        "adam": torch.optim.Adam(parameters, lr=1e-3, fused=True),
    }
    for name, rule in rules.items():
        nbytes = 4 * jobs.WORDS[name] * NETWORKS["resnet50"].parameters
        seconds = jobs.timed(ASKED.steps, ASKED.warmup, rule.step)
        answer(f"{name}-fused", seconds, nbytes / 1e9, "GB/s")


def pipelines() -> None:
    import torch
    from torch.nn.functional import pad
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(ASKED.threads)
    mean, scale = torch.tensor(jobs.MEAN), 1 / torch.tensor(jobs.STD)
    images = torch.randint(0, 256, (jobs.EXAMPLES, 32, 32, 3), dtype=torch.uint8)
    labels = torch.randint(0, 10, (jobs.EXAMPLES,))
    rows = torch.arange(32)

    class One(Dataset):
        def __len__(self) -> int:
            return jobs.EXAMPLES

        def __getitem__(self, i: int) -> Any:
            top, left = torch.randint(0, 9, (2,)).tolist()
            crop = pad(images[i], (0, 0, 4, 4, 4, 4))[top : top + 32, left : left + 32]
            if torch.rand(()) < 0.5:
                crop = crop.flip(1)
            return (crop - mean) * scale, labels[i]

    class Many(One):
        def __getitems__(self, chosen: list[int]) -> Any:
            of, n = torch.tensor(chosen), len(chosen)
            padded = pad(images[of], (0, 0, 4, 4, 4, 4))
            tops, lefts = torch.randint(0, 9, (2, n, 1))
            columns = lefts + torch.where(torch.rand(n, 1) < 0.5, rows.flip(0), rows)
            each = torch.arange(n)[:, None, None]
            crops = padded[each, (tops + rows)[:, :, None], columns[:, None]]
            return (crops - mean) * scale, labels[of]

    batch = ASKED.batch or jobs.INPUT_BATCH
    ways = {"per_sample": (One(), None, 1), "batched": (Many(), lambda whole: whole, 5)}
    for name, (source, together, more) in ways.items():
        for workers in (0, 1, 2):
            loader = DataLoader(
                *(source, batch, True),
                num_workers=workers,
                collate_fn=together,
                drop_last=True,
                prefetch_factor=4 if workers else None,
            )
            batches = iter(loader)
            steps = min(more * ASKED.steps, len(loader) - ASKED.warmup)
            seconds = jobs.window(ASKED, steps, lambda batches=batches: next(batches))
            del batches, loader
            memory = jobs.peak_memory() + workers * getrusage(RUSAGE_CHILDREN).ru_maxrss / 1024
            how = {"batch": batch, "memory": memory}
            answer(f"{name}-workers{workers}", seconds, batch, "images/s", **how)


_GROUP = """
import sys, torch, torch.distributed as d
d.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/store",
                     rank=int(sys.argv[2]), world_size=2)
d.barrier()
"""


def start() -> None:
    for variant, code, processes in (("import", "import torch", 1), ("two replicas", _GROUP, 2)):
        seconds, memory = jobs.fresh(ASKED, code, processes)
        answer(variant, seconds, 1, "s", memory=memory)
    answer("size with dependencies", [1.0], jobs.megabytes("torch"), "MB", memory=0.0)


ONE_PROCESS = {"optimizer": optimizer, "input": pipelines, "import": start}


def main() -> None:
    if ASKED.workload in ONE_PROCESS:
        ONE_PROCESS[ASKED.workload]()
    elif ASKED.options["rank"] is not None:
        rank(sums_rank if ASKED.workload == "allreduce" else training_rank)
    else:
        (sums if ASKED.workload == "allreduce" else training)()


if __name__ == "__main__":
    main()
