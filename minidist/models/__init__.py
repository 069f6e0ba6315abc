"""Models by name. A model is data: a function of the data's shape that returns a list of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minidist import nn
from minidist.errors import UsageError
from minidist.models.lenet import lenet
from minidist.models.mlp import mlp
from minidist.models.resnet import resnet20, resnet50
from minidist.models.trivial import trivial

MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Sequential]] = {
    "trivial": trivial,
    "mlp": mlp,
    "lenet": lenet,
    "resnet20": resnet20,
    "resnet50": resnet50,
}


def build(name: str, input_shape: Sequence[int], classes: int, dtype: Any = None) -> nn.Sequential:
    """Return a model with its variables, for examples of a shape (height, width, channels).

    dtype: the default one unless given (see md.default_dtype).

    Raises UsageError for an unknown name, ShapeError naming the layer if the images are too small.
    """
    if name not in MODELS:
        raise UsageError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    shape = tuple(input_shape)
    model = MODELS[name](shape, classes)
    model.build(shape, dtype)
    return model
