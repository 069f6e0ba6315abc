"""update.cu, run thread by thread on the CPU, gives the bits of plain.py and of update.pyx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator import Emulator

from minidist.kernels import gpu_update, grid, plain, update

SIZES = [0, 1, 15, 4096, 17, 9001, 0]
DECAY = [0.0, 0.1, 0.0, 0.2, 1e-4, 0.3, 0.5]
CONSTANTS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": False},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "rmsprop": {"lr": 0.01, "decay": 0.9, "momentum": 0.9, "epsilon": 1.0},
    "adam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "step": 3},
}
VERB = {rule: "momentum" if rule == "nesterov" else rule for rule in CONSTANTS}
SLOTS = {"sgd": 0, "momentum": 1, "nesterov": 1, "rmsprop": 2, "adam": 2}
Place = Callable[..., np.ndarray]

every_rule = pytest.mark.parametrize("rule", CONSTANTS)
every_type = pytest.mark.parametrize("dtype", ["float32", "float64"])


def columns_of(rule: str, dtype: str) -> list[list[np.ndarray]]:
    """Weights, gradients, slots; a slot may stand under a square root."""
    random = np.random.default_rng(0)
    columns = [[random.standard_normal(n).astype(dtype) for n in SIZES] for _ in range(4)]
    return [*columns[:2], *([np.abs(x) for x in slot] for slot in columns[2 : 2 + SLOTS[rule]])]


def assert_equal(columns: list[list[np.ndarray]], want: list[list[np.ndarray]]) -> None:
    for column, wanted in zip(columns, want, strict=True):
        for got, expected in zip(column, wanted, strict=True):
            np.testing.assert_array_equal(got, expected)


@every_rule
@every_type
@pytest.mark.parametrize("shift", [0, 1])
def test_equals_its_twin_in_one_launch(
    machine: Emulator, place: Place, rule: str, dtype: str, shift: int
) -> None:
    columns = columns_of(rule, dtype)
    want: list[list[np.ndarray]] = [[] for _ in columns]
    for w, g, *slots, d in zip(*columns, DECAY, strict=True):
        prepared = plain.gradient(g, w, 1 / 3, d)
        changed = getattr(plain, VERB[rule])(w, prepared, *slots, **CONSTANTS[rule])
        w, *slots = changed if isinstance(changed, tuple) else (changed,)
        for column, array in zip(want, (w, g, *slots), strict=True):
            column.append(array)

    # The tensors of one row may be aligned differently.
    got = [
        [place(x, shift * (i + c) % 3) for i, x in enumerate(xs)] for c, xs in enumerate(columns)
    ]
    verb = getattr(gpu_update, VERB[rule])
    verb(machine, *got, **CONSTANTS[rule], scale=1 / 3, weight_decay=DECAY)
    assert_equal(got, want)
    assert machine.launches == [VERB[rule]]


@every_rule
@every_type
def test_clips_and_strides_as_the_cpu_does(
    machine: Emulator, rule: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "BLOCKS", 2)
    columns = columns_of(rule, dtype)
    columns[1][4][:5] = [np.nan, np.inf, -np.inf, -0.0, 0.0]
    got = [[x.copy() for x in column] for column in columns]
    options = {**CONSTANTS[rule], "scale": 1 / 3, "weight_decay": DECAY, "clip": 0.25}
    getattr(update, VERB[rule])(*columns, **options)
    getattr(gpu_update, VERB[rule])(machine, *got, **options)
    assert_equal(got, columns)


def test_what_has_no_tensors_launches_nothing(machine: Emulator) -> None:
    gpu_update.sgd(machine, [], [], lr=1.0, scale=1.0, weight_decay=[])
    empty = np.zeros((0, 3))
    gpu_update.sgd(machine, [empty], [empty], lr=1.0, scale=1.0, weight_decay=[0.0])
    assert machine.launches == []


def test_errors_name_the_array(machine: Emulator) -> None:
    w, options = np.zeros(3), {"lr": 1.0, "scale": 1.0}
    with pytest.raises(TypeError, match=r"sgd: gradients\[0\] must be float64, got float32"):
        gpu_update.sgd(machine, [w], [np.float32([1, 2, 3])], weight_decay=[0.0], **options)
    with pytest.raises(ValueError, match=r"sgd: gradients\[1\] must have 3 elements"):
        gpu_update.sgd(machine, [w, w], [w, w[:2]], weight_decay=[0.0, 0.0], **options)
    with pytest.raises(ValueError, match=r"sgd: gradients\[0\] must be C-contiguous"):
        gpu_update.sgd(machine, [w], [np.zeros(6)[::2]], weight_decay=[0.0], **options)
    with pytest.raises(ValueError, match="weights has 1 tensors, but gradients 0"):
        gpu_update.sgd(machine, [w], [], weight_decay=[0.0], **options)
    with pytest.raises(ValueError, match="needs a number for each of the 1 tensors, got 0"):
        gpu_update.sgd(machine, [w], [w], weight_decay=[], **options)
    with pytest.raises(ValueError, match="clip must be above 0"):
        gpu_update.sgd(machine, [w], [w], weight_decay=[0.0], clip=0.0, **options)
