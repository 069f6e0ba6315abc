"""Models for ImageNet: sizes as published, shapes on the way, and images that do not fit.

Sizes need no values, so most variables here are only noted.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from minidist import context, models, nn
from minidist.errors import ShapeError
from minidist.models import MODELS
from minidist.models.recipe import ByBatch
from minidist.optim.schedules import Decay, Piecewise

WORDS = {
    ByBatch(
        0.128, 256, Piecewise((1.0, 0.1, 0.01, 0.001, 0.0001), (30, 60, 80, 90)), 5
    ): "by batch",
    Piecewise((0.1, 0.01, 0.001, 0.0002), (82, 123, 300)): "steps",
    Piecewise((0.1, 0.01, 0.001, 0.0001), (150, 225, 300)): "dense steps",
    Decay(0.1, 100, 0.1): "tenths",
}
PAGE = Path(__file__).parent.parent / "docs/models.md"


class Noted(NamedTuple):
    """What is known of a variable that has no values."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    decays: bool


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(
        layer: Any,
        name: str,
        shape: Any,
        dtype: Any,
        start: Any,
        trainable: bool = True,
        decays: bool = True,
    ) -> Noted:
        layer.variables.append(Noted(name, shape, trainable, decays))
        return layer.variables[-1]

    monkeypatch.setattr(nn.Layer, "_variable", note)


# With sources: torchvision's table for vgg, Keras' for googlenet ("inception_v1") and inception3
# (23,851,784 less 34,432 that are not trained), timm's for inception4 (42,679,816 less 31,584
# scales of normalisations), torchvision's for resnet and mobilenet; the small alexnet by hand. The
# papers give 0.27, 0.46, 0.66, 0.85 and 1.7 million for the small resnets, 1.0, 7.0 and 27.2 for
# densenet.
@pytest.mark.parametrize(
    ("name", "side", "classes", "count"),
    [
        ("vgg11", 224, 1000, 132_863_336),
        ("vgg16", 224, 1000, 138_357_544),
        ("vgg19", 224, 1000, 143_667_240),
        ("googlenet", 224, 1000, 6_998_552),
        ("inception3", 299, 1000, 23_851_784 - 34_432),
        ("inception4", 299, 1000, 42_679_816 - 31_584),
        # 256 filters in its fourth convolution would make it torchvision's 61,100,840.
        ("alexnet", 227, 1000, 61_100_840 + 128 * (9 * 384 + 1) + 128 * 9 * 256),
        ("alexnet", 32, 10, 76 * 64 + 1601 * 64 + 4097 * 384 + 385 * 192 + 193 * 10),
        ("overfeat", 231, 1000, 145_920_872),
        ("resnet50", 224, 1000, 25_557_032),
        ("resnet101", 224, 1000, 44_549_160),
        ("resnet152", 224, 1000, 60_192_808),
        ("resnet50_v1.5", 224, 1000, 25_557_032),
        ("resnet101_v1.5", 224, 1000, 44_549_160),
        ("resnet152_v1.5", 224, 1000, 60_192_808),
        # No normalisation behind the shortcuts, which have 3,840 channels together.
        ("resnet50_v2", 224, 1000, 25_557_032 - 2 * 3840),
        ("resnet101_v2", 224, 1000, 44_549_160 - 2 * 3840),
        ("resnet152_v2", 224, 1000, 60_192_808 - 2 * 3840),
        ("resnet20", 32, 10, 272_474),
        ("resnet32", 32, 10, 466_906),
        ("resnet44", 32, 10, 661_338),
        ("resnet56", 32, 10, 855_770),
        ("resnet110", 32, 10, 1_730_714),
        ("resnet110_v2", 32, 10, 1_730_714 - 2 * 96),
        ("densenet40_k12", 32, 10, 1_019_722),
        ("densenet100_k12", 32, 10, 6_979_642),
        ("densenet100_k24", 32, 10, 27_249_082),
        ("mobilenet", 224, 1000, 3_504_872),
    ],
)
def test_sizes(noted: None, name: str, side: int, classes: int, count: int) -> None:
    model = models.build(name, (side, side, 3), classes)
    assert model.output_shape == (classes,)
    assert sum(prod(v.shape) for v in model.variables if v.trainable) == count


def test_the_page_has_the_tables_of_the_recipes(noted: None) -> None:
    tables = re.findall(r"^## For (ImageNet|CIFAR-10)$(.*?)(?=^## )", PAGE.read_text(), re.M | re.S)
    assert [data for data, _ in tables] == ["ImageNet", "CIFAR-10"]
    for data, table in tables:
        classes = 1000 if data == "ImageNet" else 10
        found = {}
        for line in re.findall(r"^\| `.*$", table, re.M):
            name, side, count, batch, rate = (cell.strip(" `") for cell in line.split("|")[1:6])
            model = models.build(name, (int(side), int(side), 3), classes)
            assert sum(prod(v.shape) for v in model.variables if v.trainable) == int(
                count.replace(",", "")
            ), name
            found[name] = int(side), int(batch), rate
        wanted = {}
        for name, row in MODELS.items():
            recipe = row.imagenet if data == "ImageNet" else row.cifar10
            if recipe is not None:
                wanted[name] = recipe.image_size, recipe.batch_size, _in_words(recipe.learning_rate)
        assert found == wanted


def _in_words(rate: Any) -> str:
    return str(rate) if isinstance(rate, float) else WORDS[rate]


@pytest.mark.parametrize(
    ("name", "side", "shapes"),
    [
        (
            "alexnet",
            227,
            [(55, 64), (27, 64), (27, 192), (13, 192), (13, 384), (13, 256), (6, 256)],
        ),
        ("overfeat", 231, [(56, 96), (28, 96), (24, 256), (12, 256), (12, 512), (6, 1024)]),
        ("vgg19", 224, [(224, 64), (112, 128), (56, 256), (28, 512), (14, 512), (7, 512)]),
        ("googlenet", 224, [(112, 64), (56, 192), (28, 256), (28, 480), (14, 832), (7, 1024)]),
        ("inception3", 299, [(149, 32), (147, 64), (73, 80), (71, 192), (35, 192)]),
        ("inception3", 299, [(35, 256), (35, 288), (17, 768), (8, 1280), (8, 2048)]),
        ("inception4", 299, [(147, 64), (73, 160), (71, 192), (35, 384)]),
        ("inception4", 299, [(35, 384), (17, 1024), (8, 1536)]),
    ],
)
def test_images_shrink_as_published(
    noted: None, name: str, side: int, shapes: list[tuple[int, int]]
) -> None:
    model = models.build(name, (side, side, 3), 1000)
    found = [layer.output_shape for layer in model.layers]
    wanted = [(size, size, channels) for size, channels in shapes]
    assert [shape for shape in dict.fromkeys(found) if shape in wanted] == wanted


@pytest.mark.parametrize(
    ("name", "least", "layer"),
    [
        ("alexnet", 1, ""),
        ("overfeat", 71, "max_pool_2"),
        ("vgg16", 32, "max_pool_4"),
        ("googlenet", 1, ""),
        ("inception3", 75, "concat_8"),
        ("inception4", 75, "concat_15"),
    ],
)
def test_the_smallest_images(noted: None, name: str, least: int, layer: str) -> None:
    assert models.build(name, (least, least, 3), 10).output_shape == (10,)
    if layer:
        with pytest.raises(ShapeError, match=f"layer '{name}', .*: layer '{layer}', "):
            models.build(name, (least - 1, least - 1, 3), 10)


def test_small_images_get_the_small_alexnet(noted: None) -> None:
    found = [len(models.build("alexnet", (n, 99, 3), 10).layers) for n in (66, 67)]
    assert found == [10, 14]


def test_offsets_of_inception_do_not_decay(noted: None) -> None:
    model = models.build("inception3", (75, 75, 3), 10)
    decays = {(v.name, v.decays) for v in model.variables if v.trainable}
    assert decays == {("kernel", True), ("beta", False), ("bias", True)}


def test_alexnet_and_inception_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    context.seed(1)
    monkeypatch.setattr(nn, "he_normal", nn.glorot_uniform)  # quicker to draw from
    x = np.random.default_rng(0).standard_normal((2, 75, 75, 3)).astype(np.float32)
    for name, side in (("alexnet", 12), ("inception3", 75)):
        model = models.build(name, (side, side, 3), 10)
        y = model(x[:, :side, :side], training=True).numpy()
        assert y.shape == (2, 10) and np.isfinite(y).all() and (y[0] != y[1]).all()
        assert model(x[:0, :side, :side]).shape == (0, 10)
