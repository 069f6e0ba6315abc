"""Training by NCCL on the stand-in, and mistakes that show there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policies import EVERY
from summing import OLD, on, out, sums, whole_numbers, world
from training import SHAPES, given, starts, train, two_layers

import minidist as md
from minidist import comm
from minidist.comm.nccl_ranks import NcclRanks

SUMMING = [policy for policy, (name, _) in EVERY.items() if name != "independent"]
GROWN = 10  # steps, after which no more memory is made


@pytest.mark.parametrize(
    ("spec", "version"), [("cuda*2", 23203), ("cuda:0*2", 23203), ("cuda:0*2", OLD)]
)
@pytest.mark.parametrize("policy", SUMMING)
def test_two_replicas_have_the_bits_of_any_other_sum(
    libraries: Path, policy: str, spec: str, version: int
) -> None:
    """As two terms have only one sum."""
    want, _ = train("cpu*2", policy, given("nesterov"), starts(SHAPES))
    with world(libraries, 1, version=version) as there:
        got, _ = train(spec, policy, given("nesterov"), starts(SHAPES), all_reduce_spec="nccl")
        assert there.handles and there.live == 0
    for one, other in zip(got, want, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("how", "off"),
    [
        ({}, 2e-5),
        ({"gradient_repacking": 2}, 2e-5),
        ({"compact_gradient_transfer": "bfloat16"}, 3e-2),
    ],
)
@pytest.mark.parametrize("spec", ["nccl", "copy:20:nccl", "nccl/xring", "copy/nccl"])
def test_a_net_trains_as_on_the_cpu(
    libraries: Path, spec: str, how: dict[str, Any], off: float
) -> None:
    net = starts([(8, 9), (9,), (9, 3)])
    want, losses = train("cpu*3", "replicated", two_layers("adam"), net, **how)
    for seed in range(2):
        with world(libraries, seed):
            devices = "cuda:0.0,cuda:1.0,cuda:0.1"
            got, ours = train(
                devices, "replicated", two_layers("adam"), net, all_reduce_spec=spec, **how
            )
        for one, other in zip([*got, *ours], [*want, *losses], strict=True):
            np.testing.assert_allclose(one, other, rtol=off, atol=off / 10)


def test_what_is_no_gradient_is_not_summed_by_nccl(libraries: Path) -> None:
    with world(libraries) as there, md.Strategy("cuda*2", all_reduce_spec="nccl") as strategy:
        assert len(there.handles) == 2
        value = strategy.run(lambda: md.constant(np.ones(3, "float32")) + 0.0)
        np.testing.assert_array_equal(strategy.reduce("sum", value).numpy(), [2, 2, 2])
        assert "all_reduce" not in there.gpu.calls


def test_no_step_makes_memory_for_ever(libraries: Path) -> None:
    with world(libraries):
        devices = md.devices("cuda*2")
        with md.Strategy(devices, "replicated", all_reduce_spec="nccl") as strategy:
            with strategy.scope():
                variables = [md.Variable(start) for start in starts([(8, 9), (9,), (9, 3)])]
            step, made = two_layers("nesterov"), []
            for i in range(3 * GROWN):
                strategy.run(step, variables, i)
                for device in devices:
                    device.synchronize()
                made.append([device.made for device in devices])
    assert made[GROWN * 2 :] == made[GROWN * 2 : GROWN * 2 + 1] * GROWN


def test_the_race_checker_finds_nothing(libraries: Path) -> None:
    with world(libraries, 2), md.check() as check:
        train(
            "cuda*2",
            "replicated",
            two_layers("sgd"),
            starts([(8, 9), (9,), (9, 3)]),
            all_reduce_spec="nccl",
        )
    assert not check.races


# --- mistakes -----------------------------------------------------------------------------------


def sum_and_look() -> bool:
    """Sum what was just made, again and again in the same memory, and look at each sum."""
    devices = md.devices("cuda*2")
    one, right = comm.make("nccl", devices), []
    wanted = on(devices, whole_numbers(2, "float32", [(50,)]))
    for i in range(6):
        rows = whole_numbers(2, "float32", [(50,)], i)
        sources = on(devices, rows)
        for device, (array,) in zip(devices, sources, strict=True):
            device.ops.accumulate(array, array)
        one.all_reduce(sources, wanted, threads=1)
        del sources, array
        for device, row in zip(devices, wanted, strict=True):
            right.append(bool((out(device, row)[0] == 2 * sums(rows)[0]).all()))
    one.close()
    return all(right)


def forget(which: int) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        give = NcclRanks.give

        def changed(self: Any, what: str, *rows: Any) -> None:
            told = list(rows[:2])
            told[which] = [[] for _ in told[which]]
            give(self, what, *told, rows[2])

        patch.setattr(NcclRanks, "give", changed)

    return change


def without_settling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NcclRanks, "_settle", lambda self, what: None)


@pytest.mark.parametrize(
    "mistake",
    [forget(0), forget(1), without_settling],
    ids=["reads", "writes", "settled"],
)
def test_a_mistake_shows(
    libraries: Path, mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = []
    for seed in range(8):
        with world(libraries, seed):
            assert sum_and_look()
        with world(libraries, seed) as there, monkeypatch.context() as patch:
            there.gpu.may_hang = True
            md.devices("cuda*2")
            mistake(patch)
            try:
                right.append(sum_and_look())
            except Exception:
                right.append(False)
            break_off(there)
    assert not all(right)


def break_off(there: Any) -> None:
    for handle in there.handles:
        handle.gone = handle.gone or "aborted"
        handle.waiting.clear()
    there.gpu.drain()
