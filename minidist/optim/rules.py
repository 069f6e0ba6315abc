"""The update rules. The arithmetic is kernels/update.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Unpack

from minidist.device.ops import Ops, Tensors, Update
from minidist.optim.optimizer import Optimizer, Options, Rate, number


class SGD(Optimizer):
    """w −= lr·g."""

    slots: ClassVar[dict[str, float]] = {}
    zero_changes_nothing: ClassVar[bool] = True

    def _update(
        self,
        ops: Ops,
        weights: Tensors,
        gradients: Tensors,
        slots: Sequence[Tensors],
        step: int,
        how: Update,
    ) -> None:
        ops.sgd(weights, gradients, **how)


class Momentum(Optimizer):
    """m = μ·m + g; w −= lr·m, or with Nesterov w −= lr·(g + μ·m)."""

    slots: ClassVar[dict[str, float]] = {"momentum": 0.0}

    def __init__(
        self,
        lr: Rate,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(lr, **options)
        self.momentum = number("momentum", momentum, below=1)
        self.nesterov = nesterov

    def _update(
        self,
        ops: Ops,
        weights: Tensors,
        gradients: Tensors,
        slots: Sequence[Tensors],
        step: int,
        how: Update,
    ) -> None:
        ops.momentum(
            weights,
            gradients,
            slots[0],
            momentum=self.momentum,
            nesterov=self.nesterov,
            **how,
        )


class RMSProp(Optimizer):
    """s = ρ·s + (1−ρ)·g² from s = 1; m = μ·m + lr·g/√(s + ε); w −= m (as in tf_cnn_benchmarks)."""

    slots: ClassVar[dict[str, float]] = {"square": 1.0, "momentum": 0.0}

    def __init__(
        self,
        lr: Rate,
        decay: float = 0.9,
        momentum: float = 0.9,
        epsilon: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(lr, **options)
        self.decay = number("decay", decay, below=1)
        self.momentum = number("momentum", momentum, below=1)
        self.epsilon = number("epsilon", epsilon)

    def _update(
        self,
        ops: Ops,
        weights: Tensors,
        gradients: Tensors,
        slots: Sequence[Tensors],
        step: int,
        how: Update,
    ) -> None:
        ops.rmsprop(
            weights,
            gradients,
            slots[0],
            slots[1],
            decay=self.decay,
            momentum=self.momentum,
            epsilon=self.epsilon,
            **how,
        )


class Adam(Optimizer):
    """Adam, algorithm 1 of Kingma and Ba 2015: w −= lr·m̂/(√v̂ + ε) with bias-corrected m̂ and v̂."""

    slots: ClassVar[dict[str, float]] = {"first": 0.0, "second": 0.0}

    def __init__(
        self,
        lr: Rate,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(lr, **options)
        self.beta1 = number("beta1", beta1, below=1)
        self.beta2 = number("beta2", beta2, below=1)
        self.epsilon = number("epsilon", epsilon)

    def _update(
        self,
        ops: Ops,
        weights: Tensors,
        gradients: Tensors,
        slots: Sequence[Tensors],
        step: int,
        how: Update,
    ) -> None:
        ops.adam(
            weights,
            gradients,
            slots[0],
            slots[1],
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            step=step,
            **how,
        )
