"""Every policy on a GPU's devices follows the oracle, bit for bit: one replica, four, all GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import REAL, cuda, gpus
from oracle import RULES, TwoLayers, relative_norm, split
from policies import EVERY, Trainer, optimizer, oracle
from scenarios import (
    BOUND,
    SHAPES,
    arrays,
    given_gradients,
    global_batch,
    parts,
    schedule,
    two_layers,
)

import minidist as md

gpu = pytest.mark.gpu
ON = [  # where, which devices, and how many
    pytest.param(0, "cuda:0*4", 4, id="stand-in"),
    pytest.param(REAL, "cuda:0*1", 1, marks=gpu, id="GPU-one"),
    pytest.param(REAL, "cuda:0*4", 4, marks=gpu, id="GPU-four"),
    *(
        pytest.param(REAL, f"cuda*{gpus()}", gpus(), marks=gpu, id="GPUs-all")
        for _ in range(gpus() > 1)
    ),
]


@pytest.mark.parametrize(
    ("rule", "where", "devices", "n"),
    [  # the stand-in has more of this in test_cuda_policies.py
        pytest.param(rule, *on.values, marks=on.marks, id=f"{rule}-{on.id}")
        for on in ON
        for rule in (RULES if on.values[0] == REAL else ["rmsprop"])
    ],
)
@pytest.mark.parametrize("policy", EVERY)
def test_given_gradients_lead_to_the_oracles_bits(
    libraries: Path, policy: str, rule: str, where: Any, devices: str, n: int
) -> None:
    rng = np.random.default_rng(n)
    starts = [arrays(rng, SHAPES, "float32") for _ in range(n)]
    expected = oracle(policy, rule, starts, weight_decay=0.01)
    opt = optimizer(rule, 0.01)
    with cuda(libraries, where), Trainer(policy, starts, devices=devices) as trainer:
        for counts in schedule(n)[:4]:
            gradients = given_gradients(rng, SHAPES, "float32", counts, n)
            trainer.apply(opt, gradients, counts)
            expected.step(gradients, counts)
            trainer.check(expected.weights, expected.reads)


@pytest.mark.parametrize(("where", "devices", "n"), ON)
@pytest.mark.parametrize("policy", EVERY)
def test_a_model_trains_as_the_oracle_does(
    libraries: Path, policy: str, where: Any, devices: str, n: int
) -> None:
    rng = np.random.default_rng(n)
    starts = [TwoLayers.start(rng, "float32") for _ in range(n)]
    expected = oracle(policy, "momentum", starts)
    opt = optimizer("momentum")
    with cuda(libraries, where), Trainer(policy, starts, devices=devices) as trainer:
        for examples in (4 * n, 4 * n - 1, 4 * n):
            counts = split(examples, n)
            batch = parts(*global_batch(rng, examples, "float32"), counts)
            reads = expected.reads

            def step(replica: int, batch: Any = batch) -> None:
                x, labels = (md.constant(each) for each in batch[replica])
                loss = lambda: two_layers(trainer.variables, x, labels)  # noqa: E731
                opt.minimize(loss, trainer.variables, count=len(labels))

            trainer.each(step)
            gradients = [
                TwoLayers.gradients(weights, *each)
                for weights, each in zip(reads, batch, strict=True)
            ]
            expected.step(gradients, counts)
        for got, want in zip(trainer.weights(), expected.reads, strict=True):
            assert relative_norm(got, want) < 10 * BOUND["float32"]
