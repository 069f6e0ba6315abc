"""Whole training steps of every policy on the stand-in: replicas that share a GPU, and two GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from devices import cuda
from policies import EVERY
from standin import GPUS
from training import SHAPES, given, of_images, starts, train, two_layers

import minidist as md

RULES = ["sgd", "nesterov", "rmsprop", "adam"]
SPECS = ["cuda:0*3", f"cuda*{GPUS}"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", EVERY)
def test_given_gradients_lead_to_the_cpus_bits(
    libraries: Path, policy: str, rule: str, spec: str
) -> None:
    n = 3 if spec == SPECS[0] else GPUS
    want, _ = train(f"cpu*{n}", policy, given(rule), starts(SHAPES))
    with cuda(libraries, hash_of(policy, rule)):
        got, _ = train(spec, policy, given(rule), starts(SHAPES))
    for one, other in zip(got, want, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("policy", EVERY)
def test_training_is_as_on_the_cpu(libraries: Path, policy: str, spec: str) -> None:
    n = 3 if spec == SPECS[0] else GPUS
    net = starts([(8, 9), (9,), (9, 3)])
    want, losses = train(f"cpu*{n}", policy, two_layers("adam"), net)
    for seed in range(2):
        with cuda(libraries, seed):
            got, ours = train(spec, policy, two_layers("adam"), net)
        for one, other in zip([*got, *ours], [*want, *losses], strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "spec", ["copy", "pscpu#2", "psgpu", "xring", "rechd", "hierarchical_copy"]
)
def test_every_way_to_sum(libraries: Path, spec: str) -> None:
    want, _ = train("cpu*4", "replicated", given("sgd"), starts(SHAPES), all_reduce_spec=spec)
    with cuda(libraries, 4):
        devices = "cuda:0.0,cuda:0.1,cuda:1.0,cuda:1.1"
        got, _ = train(devices, "replicated", given("sgd"), starts(SHAPES), all_reduce_spec=spec)
    for one, other in zip(got, want, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_model_of_convolutions_with_batches_read_ahead(libraries: Path) -> None:
    def layers() -> list[md.nn.Layer]:
        windows = [md.nn.Conv2D(4, 3), md.nn.BatchNorm(), md.nn.ReLU(), md.nn.MaxPool(2)]
        return [*windows, md.nn.Flatten(), md.nn.Dense(3)]

    want = of_images("cpu*2", layers)
    with cuda(libraries, 1):
        assert of_images("cuda:0*2", layers) == pytest.approx(want, rel=1e-4)


def test_no_step_after_the_second_makes_memory(libraries: Path) -> None:
    with cuda(libraries, 0):
        devices = md.devices("cuda:0*2")
        with md.Strategy(devices, "replicated") as strategy:
            with strategy.scope():
                variables = [md.Variable(start) for start in starts([(8, 9), (9,), (9, 3)])]
            step, made = two_layers("nesterov"), []
            for i in range(12):
                strategy.run(step, variables, i)
                for device in devices:
                    device.synchronize()
                made.append([device.made for device in devices])
    assert made[1:] == made[1:2] * 11


def hash_of(*words: str) -> int:
    return sum(map(ord, "".join(words)))
