"""Optimizer kernels against their NumPy twins, bit for bit, and against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minidist.kernels import plain, update

SIZES = [0, 1, 15, 17, 1000003]
CONSTANTS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": False},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "rmsprop": {"lr": 0.01, "decay": 0.9, "momentum": 0.9, "epsilon": 1.0},
    "adam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "step": 3},
}
SLOTS = {"sgd": 0, "momentum": 1, "nesterov": 1, "rmsprop": 2, "adam": 2}
VERB: dict[str, Callable[..., None]] = {
    "sgd": update.sgd,
    "momentum": update.momentum,
    "nesterov": update.momentum,
    "rmsprop": update.rmsprop,
    "adam": update.adam,
}
TWIN: dict[str, Callable[..., Any]] = {
    "sgd": plain.sgd,
    "momentum": plain.momentum,
    "nesterov": plain.momentum,
    "rmsprop": plain.rmsprop,
    "adam": plain.adam,
}


def tensors(seed: int, dtype: str, sizes: list[int] = SIZES) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(size).astype(dtype) for size in sizes]


def columns_of(rule: str, dtype: str) -> list[list[np.ndarray]]:
    """Weights, gradients, slots; the last slot is the one under a square root in Adam."""
    columns = [tensors(i, dtype) for i in range(2 + SLOTS[rule])]
    for slot in columns[2:]:
        for x in slot:
            np.abs(x, out=x)
    return columns


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", CONSTANTS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_equals_its_twin_bit_for_bit(rule: str, dtype: str, threads: int) -> None:
    columns = columns_of(rule, dtype)
    decay = [0.0, 0.1, 0.0, 0.2, 1e-4]
    want = []
    for w, g, *slots, d in zip(*columns, decay, strict=True):
        changed = TWIN[rule](w, plain.gradient(g, w, 1 / 3, d), *slots, **CONSTANTS[rule])
        want.append(changed if isinstance(changed, tuple) else (changed,))

    gradients = [g.copy() for g in columns[1]]
    VERB[rule](*columns, **CONSTANTS[rule], scale=1 / 3, weight_decay=decay, threads=threads)

    for i, row in enumerate(want):
        for got, expected in zip([columns[0][i], *(c[i] for c in columns[2:])], row, strict=True):
            assert got.dtype == expected.dtype == dtype
            np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(columns[1][i], gradients[i])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", CONSTANTS)
@pytest.mark.parametrize("clip", [0.1, 1e-3, 5.0])
def test_clipping_equals_numpys_bit_for_bit(rule: str, dtype: str, clip: float) -> None:
    columns = columns_of(rule, dtype)
    special = [np.nan, np.inf, -np.inf, -0.0, 0.0, 3 * clip, -3 * clip, np.nextafter(3 * clip, 9)]
    for x in columns[1][2:]:
        x[: len(special)] = special
    decay = [0.0, 0.1, 0.0, 0.2, 1e-4]
    with np.errstate(invalid="ignore"):
        want = []
        for w, g, *slots, d in zip(*columns, decay, strict=True):
            clipped = np.clip(g * g.dtype.type(1 / 3), -g.dtype.type(clip), g.dtype.type(clip))
            prepared = clipped + g.dtype.type(d) * w if d else clipped
            changed = TWIN[rule](w, prepared, *slots, **CONSTANTS[rule])
            want.append(changed if isinstance(changed, tuple) else (changed,))

    VERB[rule](*columns, **CONSTANTS[rule], scale=1 / 3, weight_decay=decay, clip=clip, threads=2)

    bits = np.uint32 if dtype == "float32" else np.uint64
    for i, row in enumerate(want):
        for got, expected in zip([columns[0][i], *(c[i] for c in columns[2:])], row, strict=True):
            there = ~np.isnan(expected)
            np.testing.assert_array_equal(there, ~np.isnan(got))
            np.testing.assert_array_equal(got[there].view(bits), expected[there].view(bits))
        assert i < 2 or np.isnan(columns[0][i][0])


def test_clipping_comes_after_the_scale_and_before_the_decay() -> None:
    w = np.array([8.0, 8.0], np.float32)
    g = np.array([100.0, -1.0], np.float32)
    update.sgd([w], [g], lr=1.0, scale=0.25, weight_decay=[0.5], clip=2.0)
    assert w.tolist() == [8 - (2 + 0.5 * 8), 8 - (-0.25 + 0.5 * 8)]


@pytest.mark.parametrize("clip", [0.0, -1.0, np.nan])
def test_a_clip_is_above_zero(clip: float) -> None:
    with pytest.raises(ValueError, match="sgd: clip must be above 0"):
        update.sgd([], [], lr=1.0, scale=1.0, weight_decay=[], clip=clip)


@pytest.mark.parametrize("step", [1, 2, 10, 1000])
def test_adam_is_algorithm_1_as_it_is_written(step: int) -> None:
    w, g, m, v = (x[0] for x in (tensors(i, "float64", [1000]) for i in range(4)))
    np.abs(v, out=v)
    lr, beta1, beta2, epsilon = 0.01, 0.9, 0.999, 1e-3
    new_m, new_v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    m_hat, v_hat = new_m / (1 - beta1**step), new_v / (1 - beta2**step)
    want = w - lr * m_hat / (np.sqrt(v_hat) + epsilon)
    constants = {"lr": lr, "beta1": beta1, "beta2": beta2, "epsilon": epsilon, "step": step}
    update.adam([w], [g], [m], [v], **constants, scale=1.0, weight_decay=[0.0])
    np.testing.assert_allclose(w, want, rtol=0, atol=1e-14 * abs(want).max())


@pytest.mark.parametrize("rule", CONSTANTS)
def test_alignment_does_not_matter(rule: str) -> None:
    columns = columns_of(rule, "float32")
    shifted = [[np.append(np.float32(0), x)[1:] for x in column] for column in columns]
    for arrays in (columns, shifted):
        VERB[rule](*arrays, **CONSTANTS[rule], scale=0.5, weight_decay=[0.1] * 5)
    for ours, theirs in zip(columns, shifted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def test_constant_gradient_makes_a_geometric_series() -> None:
    # m_k = g (1 - mu^k) / (1 - mu), and w_k = w_0 - lr (m_1 + ... + m_k).
    w, g, m = np.zeros(3), np.array([1.0, -2.0, 0.5]), np.zeros(3)
    for _ in range(10):
        update.momentum(
            [w], [g], [m], lr=0.1, momentum=0.5, nesterov=False, scale=1.0, weight_decay=[0.0]
        )
    np.testing.assert_allclose(m, g * (1 - 0.5**10) / 0.5, rtol=1e-14)
    np.testing.assert_allclose(w, -0.1 * g * (10 - (1 - 0.5**10)) / 0.5, rtol=1e-14)


def test_nesterov_is_momentum_looking_one_step_ahead() -> None:
    w, g, m = np.array([1.0]), np.array([2.0]), np.array([4.0])
    update.momentum(
        [w], [g], [m], lr=0.5, momentum=0.25, nesterov=True, scale=1.0, weight_decay=[0.0]
    )
    assert (m[0], w[0]) == (3.0, 1.0 - 0.5 * (2.0 + 0.25 * 3.0))


def test_first_step_of_adam_is_lr_in_the_direction_of_the_sign() -> None:
    w, g = np.zeros(4), np.array([3.0, -0.01, 1e5, -2.0])
    update.adam(
        [w],
        [g],
        [np.zeros(4)],
        [np.zeros(4)],
        lr=0.01,
        beta1=0.9,
        beta2=0.999,
        epsilon=0.0,
        step=1,
        scale=1.0,
        weight_decay=[0.0],
    )
    np.testing.assert_allclose(w, -0.01 * np.sign(g), rtol=1e-12)


def test_rmsprop_with_the_mean_square_in_balance_divides_by_the_gradient() -> None:
    # With s = g^2 the mean square stays, and each step moves by lr sign(g).
    w, g, m = np.zeros(2), np.array([0.5, -8.0]), np.zeros(2)
    s = g * g
    update.rmsprop(
        [w],
        [g],
        [s],
        [m],
        lr=0.125,
        decay=0.75,
        momentum=0.0,
        epsilon=0.0,
        scale=1.0,
        weight_decay=[0.0],
    )
    assert s.tolist() == [0.25, 64.0]
    assert w.tolist() == [-0.125, 0.125]


def test_weight_decay_comes_after_the_scale() -> None:
    w = np.array([8.0], np.float32)
    update.sgd([w], [np.array([4.0], np.float32)], lr=1.0, scale=0.25, weight_decay=[0.5])
    assert w[0] == 8 - (4 * 0.25 + 0.5 * 8)


def test_no_decay_leaves_no_trace() -> None:
    w, m = np.array([np.inf, 1.0]), np.zeros(2)
    update.momentum(
        [w],
        [np.array([1.0, -0.0])],
        [m],
        lr=1.0,
        momentum=1.0,
        nesterov=False,
        scale=1.0,
        weight_decay=[0.0],
    )
    assert w.tolist() == [np.inf, 1.0]
    assert m.tolist() == [1.0, 0.0]


def test_no_tensors_are_no_work() -> None:
    update.sgd([], [], lr=1.0, scale=1.0, weight_decay=[])


def call(weights: Any, gradients: Any, decay: Any = (0.0,)) -> None:
    update.sgd(weights, gradients, lr=1.0, scale=1.0, weight_decay=decay)


def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


ONE = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("weights", "gradients", "error", "words"),
    [
        ([ONE], [np.ones(4)], TypeError, r"sgd: gradients\[0\] .* float32, got float64 of shape"),
        ([np.ones(4, int)], [ONE], TypeError, r"weights\[0\] .* float32 or float64, got int64"),
        ([[1.0]], [ONE], TypeError, r"weights\[0\] .* got list"),
        ([ONE], [None], TypeError, r"gradients\[0\] .* got NoneType"),
        ([ONE], [np.ones(5, np.float32)], ValueError, r"gradients\[0\] must have 4 elements"),
        ([ONE], [np.ones(8, np.float32)[::2]], ValueError, r"gradients\[0\] must be C-contiguous"),
        ([ONE], [ONE.astype(">f4")], TypeError, r"gradients\[0\] .* got >f4"),
        ([read_only(np.ones(4))], [np.ones(4)], ValueError, r"weights\[0\] .* read-only"),
        ([ONE, ONE], [ONE], ValueError, "weights has 2 tensors, but gradients has 1"),
    ],
)
def test_errors_name_the_array(
    weights: Any, gradients: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(weights, gradients)


def test_every_tensor_has_its_decay() -> None:
    with pytest.raises(ValueError, match="weight_decay needs a number for each of the 1 tensors"):
        call([np.ones(4)], [np.ones(4)], decay=[])


def test_adam_counts_steps_from_one() -> None:
    with pytest.raises(ValueError, match="step counts from 1, got 0"):
        update.adam(
            [],
            [],
            [],
            [],
            lr=1.0,
            beta1=0.9,
            beta2=0.9,
            epsilon=0.0,
            step=0,
            scale=1.0,
            weight_decay=[],
        )


# --- gradients of several replicas


@pytest.mark.parametrize("counts", [None, [3.0, 1.0, 7.0]])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", CONSTANTS)
def test_adding_up_meanwhile_gives_the_bits_of_adding_up_before(
    rule: str, dtype: str, replicas: int, counts: list[float] | None
) -> None:
    sizes = [0, 1, 2047, 2049, 70001]  # a block is 2048 elements
    random = np.random.default_rng(7)
    w, *slots = ([random.random(n).astype(dtype) for n in sizes] for _ in range(1 + SLOTS[rule]))
    rows = [tensors(10 + r, dtype, sizes) for r in range(replicas)]
    before = [[g.copy() for g in row] for row in rows]
    own = counts[:replicas] if counts else None
    copies = [[np.zeros_like(x) for x in w] for _ in range(replicas - 1)]
    how = {"scale": 1 / 11, "weight_decay": [0.0, 0.1, 0.0, 0.2, 1e-4], "clip": 0.05}
    want = []
    for w_, decay, *of_tensor in zip(w, how["weight_decay"], *rows, *slots, strict=True):
        total = plain.sum(of_tensor[:replicas], own or [1.0] * replicas, 1.0)
        g = plain.gradient(total, w_, how["scale"], decay, how["clip"])
        changed = TWIN[rule](w_, g, *of_tensor[replicas:], **CONSTANTS[rule])
        want.append(changed if isinstance(changed, tuple) else (changed,))

    given = {"others": rows[1:], "counts": own, "copies": copies, "threads": 2}
    VERB[rule](w, rows[0], *slots, **CONSTANTS[rule], **how, **given)

    for i, row in enumerate(want):
        for got, expected in zip([w[i], *(slot[i] for slot in slots)], row, strict=True):
            np.testing.assert_array_equal(got, expected)
        for copy in copies:
            np.testing.assert_array_equal(copy[i], w[i])
    for row, kept in zip(rows, before, strict=True):
        for g, was in zip(row, kept, strict=True):
            np.testing.assert_array_equal(g, was)


@pytest.mark.parametrize("rule", CONSTANTS)
def test_what_several_replicas_bring_fits(rule: str) -> None:
    w, g, *slots = ([np.ones(3, np.float32)] for _ in range(2 + SLOTS[rule]))
    how = {**CONSTANTS[rule], "scale": 1.0, "weight_decay": [0.0]}
    with pytest.raises(ValueError, match=r"others\[0\]\[0\] must have 3 elements"):
        VERB[rule](w, g, *slots, **how, others=[[np.ones(4, np.float32)]])
    with pytest.raises(TypeError, match=r"others\[1\]\[0\] must be a NumPy array of float32"):
        VERB[rule](w, g, *slots, **how, others=[g, [np.ones(3)]])
    with pytest.raises(ValueError, match=r"has 1 tensors, but others\[0\] has 2"):
        VERB[rule](w, g, *slots, **how, others=[g + g])
    with pytest.raises(ValueError, match=r"copies\[0\]\[0\] is written to, but it is read-only"):
        VERB[rule](w, g, *slots, **how, copies=[[read_only(np.ones(3, np.float32))]])
    with pytest.raises(ValueError, match="3 counts for 2 lists of gradients"):
        VERB[rule](w, g, *slots, **how, others=[g], counts=[1.0, 2.0, 3.0])
    assert all((array == 1).all() for (array,) in (w, g, *slots)), "nothing was changed"
