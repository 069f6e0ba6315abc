"""Models by name. A model is data: a function of the data's shape that returns a list of layers.

Each has recipes for the data it is made for. docs/models.md has sizes and sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from minidist import nn
from minidist.errors import UsageError
from minidist.models import resnet
from minidist.models.alexnet import alexnet
from minidist.models.densenet import densenet
from minidist.models.googlenet import googlenet
from minidist.models.inception import inception3, inception4
from minidist.models.lenet import lenet
from minidist.models.mlp import mlp
from minidist.models.mobilenet import mobilenet
from minidist.models.overfeat import overfeat
from minidist.models.recipe import ByBatch, Make, Recipe
from minidist.models.transformer import transformer
from minidist.models.trivial import trivial
from minidist.models.vgg import vgg11, vgg16, vgg19
from minidist.optim.schedules import Decay, Piecewise


class Model(NamedTuple):
    """What makes a model, and its recipes: for images as of ImageNet, as of CIFAR-10, for text."""

    make: Make
    imagenet: Recipe | None = None
    cifar10: Recipe | None = None
    text: Recipe | None = None


def _large_resnet(batch_size: int) -> Recipe:
    tenths = Piecewise((1.0, 0.1, 0.01, 0.001, 0.0001), (30, 60, 80, 90))
    return Recipe(224, batch_size, ByBatch(0.128, 256, tenths, warm_up=5))


_DENSENET = Recipe(32, 64, Piecewise((0.1, 0.01, 0.001, 0.0001), (150, 225, 300)))
_SMALL_RESNET = Recipe(32, 128, Piecewise((0.1, 0.01, 0.001, 0.0002), (82, 123, 300)))
_OF_TEXT = Recipe(None, 8, 0.001, "adam", gradient_clip_norm=1.0, num_epochs=5)

MODELS = {
    "trivial": Model(trivial, Recipe(227, 32, 0.005), Recipe(32, 32, 0.005)),
    "mlp": Model(mlp),
    "lenet": Model(lenet, Recipe(28, 32, 0.005)),
    "alexnet": Model(alexnet, Recipe(227, 512, 0.005), Recipe(32, 128, Decay(0.1, 100, 0.1))),
    "overfeat": Model(overfeat, Recipe(231, 32, 0.005)),
    "vgg11": Model(vgg11, Recipe(224, 64, 0.005)),
    "vgg16": Model(vgg16, Recipe(224, 64, 0.005)),
    "vgg19": Model(vgg19, Recipe(224, 64, 0.005)),
    "googlenet": Model(googlenet, Recipe(224, 32, 0.005)),
    "inception3": Model(inception3, Recipe(299, 32, 0.005)),
    "inception4": Model(inception4, Recipe(299, 32, 0.005)),
    **{
        resnet.name(depth, version): Model(resnet.large(depth, version), _large_resnet(batch_size))
        for depth, batch_size in ((50, 64), (101, 32), (152, 32))
        for version in ("v1", "v1.5", "v2")
    },
    **{
        resnet.name(depth, version): Model(resnet.small(depth, version), None, _SMALL_RESNET)
        for depth in (20, 32, 44, 56, 110)
        for version in ("v1", "v2")
    },
    "densenet40_k12": Model(densenet(40, 12), None, _DENSENET),
    "densenet100_k12": Model(densenet(100, 12), None, _DENSENET),
    "densenet100_k24": Model(densenet(100, 24), None, _DENSENET),
    "mobilenet": Model(mobilenet, Recipe(224, 32, 0.005)),
    "transformer": Model(transformer, text=_OF_TEXT),
}


def build(name: str, input_shape: Sequence[int], classes: int, dtype: Any = None) -> nn.Sequential:
    """Return a model with its variables, for examples of a shape.

    That is (height, width, channels), or (tokens,) of text. dtype: the default one unless given
    (see md.default_dtype).

    Raises UsageError for an unknown name, ShapeError naming the layer that cannot take the shape.
    """
    shape = tuple(input_shape)
    model = _known(name).make(shape, classes)
    model.build(shape, dtype)
    return model


def recipe_for(name: str, data_name: str) -> Recipe:
    """Return how a model is trained on a data set by default: by its recipe, or as is usual.

    Images of any size become as large as CIFAR-10's where the model is made for no others.
    Raises UsageError for an unknown model.
    """
    model = _known(name)
    of = dict.fromkeys(("imagenet", "folder", "synthetic"), model.imagenet)
    of |= {"cifar10": model.cifar10, "text": model.text}
    recipe = of.get(data_name)
    if recipe is None and data_name in ("imagenet", "folder", "synthetic") and model.cifar10:
        return Recipe(model.cifar10.image_size)
    return recipe or Recipe()


def _known(name: str) -> Model:
    if name not in MODELS:
        raise UsageError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]
