"""Python's operators for Tensors, and for anything that an operation takes as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minidist.ops import elementwise, linear, shape
from minidist.ops.convert import TensorLike
from minidist.tensor import Tensor


def _swapped(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def swapped(self: TensorLike, other: TensorLike) -> Tensor:
        return operation(other, self)

    return swapped


# `==` is missing on purpose: Tensors compare by identity so that they can be keys.
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "__add__": elementwise.add,
    "__radd__": _swapped(elementwise.add),
    "__sub__": elementwise.subtract,
    "__rsub__": _swapped(elementwise.subtract),
    "__mul__": elementwise.multiply,
    "__rmul__": _swapped(elementwise.multiply),
    "__truediv__": elementwise.divide,
    "__rtruediv__": _swapped(elementwise.divide),
    "__pow__": elementwise.power,
    "__matmul__": linear.matmul,
    "__rmatmul__": _swapped(linear.matmul),
    "__neg__": elementwise.negative,
    "__lt__": elementwise.less,
    "__le__": elementwise.less_equal,
    "__gt__": _swapped(elementwise.less),
    "__ge__": _swapped(elementwise.less_equal),
    "__getitem__": shape.take,
}


def install_operators(kind: type[Any]) -> None:
    """Give a class, whose instances `ops.as_tensor` takes, the operators above."""
    for name, operation in OPERATORS.items():
        setattr(kind, name, operation)


install_operators(Tensor)
