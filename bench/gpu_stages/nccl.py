"""Sums by NCCL: one rank, several on one GPU, all GPUs, and ranks in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np

import minidist as md
from gpu_stages.tell import STANDIN, gpu, seconds, tell, trying

SHAPES = [(3,), (1 << 10, 33), (7, 5), (1 << 12,) if STANDIN else (1 << 24,)]
STEPS = 3


def main() -> None:
    with gpu() as cupy:
        count = cupy.cuda.runtime.getDeviceCount()
        specs = ["cuda:0*1", "cuda:0*4"] + [f"cuda*{count}"] * (count > 1)
        for spec in specs:
            with trying(f"nccl, {spec}"):
                sums(spec)
    if not STANDIN:
        with trying("nccl, 2 processes"):
            processes()


def sums(spec: str) -> None:
    """Let replicas apply gradients that NCCL sums, and compare with the sum by our own kernels."""
    got, took = train(spec, "nccl")
    want, ours = train(spec, "copy")
    error = max(float(np.abs(a - b).max()) for a, b in zip(got, want, strict=True))
    more = {"step_ms": round(took * 1e3, 3), "copy_ms": round(ours * 1e3, 3)}
    tell(f"nccl, {spec}", float(f"{error:.2g}"), "off", most=1e-5, **more)


def train(spec: str, how: str) -> tuple[list[np.ndarray], float]:
    """Return the weights after some steps, and the seconds of another one."""
    with md.Strategy(spec, "replicated", all_reduce_spec=how) as strategy:
        with strategy.scope():
            variables = [md.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
        rule = md.optim.SGD(0.1)

        def gradients() -> list[Any]:
            context = md.get_replica_context()
            assert context is not None
            rng = np.random.default_rng(context.replica_id)
            return [md.constant(rng.normal(size=s).astype(np.float32)) for s in SHAPES]

        given = strategy.run(gradients)

        def step(gradients: list[Any]) -> None:
            rule.apply_gradients(zip(gradients, variables, strict=True))

        def all_done() -> None:
            for device in strategy.devices:
                device.synchronize()

        for _ in range(STEPS):
            strategy.run(step, given)
        all_done()
        weights = [variable.copies[-1].numpy() for variable in variables]
        return weights, seconds(lambda: strategy.run(step, given), all_done, within=0.5)


def processes() -> None:
    """Let two ranks share a GPU: only where there is an MPI that brings them together."""
    flags = ["--device=cuda:0", "--num_devices=1", "--model=mlp", "--num_batches=5"]
    flags += ["--variable_update=collective_all_reduce", "--all_reduce_spec=nccl"]
    command = [sys.executable, "-m", "minidist.launch", "-n", "2", "-m", "minidist.bench", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    print(done.stdout, done.stderr, flush=True)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    words = "trains" if done.returncode == 0 else f"status {done.returncode}: {said}"
    without = done.returncode and "mpi" in done.stderr.lower()
    tell("nccl, 2 processes", words[:300], good=None if without else done.returncode == 0)


if __name__ == "__main__":
    main()
