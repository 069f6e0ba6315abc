"""update.pyx on a GPU: optimizer rules over a flat list of tensors, all of them in one launch.

Arguments and bits are those of the CPU's rules (but for subnormal numbers, which CuPy's compiler
takes for 0). Before a rule sees a gradient it is multiplied by `scale`, each element is clipped to
[-clip, clip], and weight_decay[i] * weights[i] is added, or left out where weight_decay[i] is 0.
Hyperparameters are computed in double precision and rounded once to the element type.

A TypeError or ValueError names the list or array that does not match the others, or a clip that is
not above 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from typing import Any

import numpy as np

from minidist.kernels.grid import Machine, Tensors, pointers, table
from minidist.kernels.source import Module


def sgd(
    machine: Machine,
    weights: Tensors,
    gradients: Tensors,
    *,
    lr: float,
    scale: float,
    weight_decay: Sequence[float],
    clip: float = inf,
) -> None:
    """Apply w -= lr g."""
    columns = {"weights": weights, "gradients": gradients}
    _apply(machine, "sgd", {"lr": lr}, columns, scale, weight_decay, clip)


def momentum(
    machine: Machine,
    weights: Tensors,
    gradients: Tensors,
    momenta: Tensors,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    scale: float,
    weight_decay: Sequence[float],
    clip: float = inf,
) -> None:
    """Apply m = momentum m + g, then w -= lr m, or with Nesterov w -= lr (g + momentum m)."""
    rule = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
    columns = {"weights": weights, "momenta": momenta, "gradients": gradients}
    _apply(machine, "momentum", rule, columns, scale, weight_decay, clip)


def rmsprop(
    machine: Machine,
    weights: Tensors,
    gradients: Tensors,
    squares: Tensors,
    momenta: Tensors,
    *,
    lr: float,
    decay: float,
    momentum: float,
    epsilon: float,
    scale: float,
    weight_decay: Sequence[float],
    clip: float = inf,
) -> None:
    """Apply s = decay s + (1 - decay) g^2, m = momentum m + lr g / sqrt(s + epsilon), w -= m."""
    rule = {
        "lr": lr,
        "decay": decay,
        "rest": 1 - decay,
        "momentum": momentum,
        "epsilon": epsilon,
    }
    columns = {"weights": weights, "squares": squares, "momenta": momenta, "gradients": gradients}
    _apply(machine, "rmsprop", rule, columns, scale, weight_decay, clip)


def adam(
    machine: Machine,
    weights: Tensors,
    gradients: Tensors,
    firsts: Tensors,
    seconds: Tensors,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    scale: float,
    weight_decay: Sequence[float],
    clip: float = inf,
) -> None:
    """Apply algorithm 1 of Kingma and Ba (2015); `step` counts from 1 (ValueError)."""
    if step < 1:
        raise ValueError(f"adam: step counts from 1, got {step}")
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    rule = {
        "beta1": beta1,
        "rest1": 1 - beta1,
        "beta2": beta2,
        "rest2": 1 - beta2,
        "rate": lr * sqrt(bias2) / bias1,
        "floor": epsilon * sqrt(bias2),
    }
    columns = {"weights": weights, "firsts": firsts, "seconds": seconds, "gradients": gradients}
    _apply(machine, "adam", rule, columns, scale, weight_decay, clip)


def _apply(
    machine: Machine,
    verb: str,
    rule: dict[str, Any],
    columns: dict[str, Tensors],
    scale: float,
    weight_decay: Sequence[float],
    clip: float,
) -> None:
    """Launch a rule, whose constants lie in `rule` in the order of its C struct."""
    if not clip > 0:
        raise ValueError(f"{verb}: clip must be above 0 (infinity: do not clip), got {clip}")
    weights = columns["weights"]
    if len(weight_decay) != len(weights):
        raise ValueError(
            f"{verb}: weight_decay needs a number for each of the {len(weights)} tensors, "
            f"got {len(weight_decay)}"
        )
    if not weights:
        return
    dtype = weights[0].dtype
    number = dtype.type
    layout = [(name, "?" if isinstance(value, bool) else dtype) for name, value in rule.items()]
    tensors = table(machine, verb, columns, [dtype] * len(columns))
    constants = np.array(tuple(rule.values()), np.dtype(layout, align=True))
    decay = machine.constant(np.array(weight_decay, dtype))
    before = number(scale), number(clip), *pointers(machine, decay)
    tensors.launch(Module("update", dtype.name), verb, constants, *before)
