"""Recipes: which flags follow from a model and its data, and which rates from those.

test_models_large.py has all that docs/models.md says of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from benching import QUICK, refused, run

from minidist import models
from minidist.bench import making
from minidist.bench.flags import LEARNING_RATES
from minidist.bench.flags.parse import parse
from minidist.errors import UsageError
from minidist.models import MODELS

LARGE = ["--model=resnet50", "--data_name=imagenet"]
SMALL = ["--model=resnet20", "--data_name=cifar10"]


# As tf_cnn_benchmarks: image size, examples per device, and the learning rate of the first step.
@pytest.mark.parametrize(
    ("data_name", "name", "image_size", "batch_size", "rate"),
    [
        ("imagenet", "alexnet", 227, 512, 0.005),
        ("synthetic", "overfeat", 231, 32, 0.005),
        ("folder", "resnet50_v1.5", 224, 64, 0),
        ("cifar10", "alexnet", 32, 128, 0.1),
    ],
)
def test_a_model_brings_its_flags(
    data_name: str, name: str, image_size: int, batch_size: int, rate: float
) -> None:
    flags = parse([f"--data_name={data_name}", f"--model={name}"])
    assert (flags.recipe.image_size, flags.batch_size) == (image_size, batch_size)
    assert flags.eval_batch_size == batch_size
    assert flags.learning_rate(10, 256)(0) == rate


def test_other_data_and_other_optimizers_have_flags_of_their_own() -> None:
    for name in MODELS:
        for data_name in ("digits", "mnist"):
            flags = parse([f"--model={name}", f"--data_name={data_name}"])
            assert (flags.batch_size, flags.recipe.image_size) == (32, None)
            assert flags.init_learning_rate == LEARNING_RATES["momentum"]
    for data in (LARGE, SMALL):
        for optimizer in ("rmsprop", "adam"):
            rate = parse([*data, f"--optimizer={optimizer}"]).learning_rate(10, 64)
            assert {rate(step) for step in range(0, 9999, 9)} == {LEARNING_RATES[optimizer]}
    for data_name in ("imagenet", "synthetic", "cifar10"):
        assert parse(["--model=mlp", f"--data_name={data_name}"]).batch_size == 32


def test_a_rate_for_momentum_is_one_for_sgd_too() -> None:
    for optimizer in ("sgd", "momentum"):
        flags = parse(["--model=vgg16", "--data_name=synthetic", f"--optimizer={optimizer}"])
        assert (flags.init_learning_rate, flags.learning_rate(10, 64)(0)) == (0.005, 0.005)


def test_what_is_given_is_taken() -> None:
    flags = parse([*SMALL, "--batch_size=5", "--init_learning_rate=0.3"])
    assert (flags.batch_size, flags.learning_rate(1, 5)(10_000)) == (5, 0.3)
    flags = parse([*LARGE, "--init_learning_rate=0.3"])
    assert flags.learning_rate(10, 512)(0) == 0.3
    flags = parse([*LARGE, "--piecewise_learning_rate_schedule=0.3;1;0.2"])
    assert list(map(flags.learning_rate(10, 512), (0, 10))) == [0.3, 0.2]
    falling = ["--num_epochs_per_decay=1", "--learning_rate_decay_factor=0.5"]
    rate = parse([*LARGE, *falling]).learning_rate(10, 64)
    assert list(map(rate, (0, 10))) == [LEARNING_RATES["momentum"], LEARNING_RATES["momentum"] / 2]


def test_large_resnets_rise_with_the_batch_and_fall_by_tenths() -> None:
    flags = parse(LARGE)
    steps = [0, 10, 25, 50, 299, 300, 600, 800, 900]
    wanted = [0, 0.2, 0.5, 1, 1, 0.1, 0.01, 0.001, 0.0001]
    for batch in (64, 256, 4096):
        rates = list(map(flags.learning_rate(10, batch), steps))
        assert rates == pytest.approx([0.128 * batch / 256 * each for each in wanted])
    other = parse([*LARGE, "--resnet_base_lr=0.2", "--num_learning_rate_warmup_epochs=1"])
    assert list(map(other.learning_rate(10, 128), (5, 10))) == pytest.approx([0.05, 0.1])
    adam = parse([*LARGE, "--optimizer=adam", "--resnet_base_lr=0.2"])
    assert adam.learning_rate(10, 128)(50) == pytest.approx(0.1)


def test_small_models_fall_by_their_own_epochs() -> None:
    rate = parse(SMALL).learning_rate(10, 256)
    assert list(map(rate, (819, 820, 1229, 1230, 2999, 3000))) == [
        *(0.1, 0.01, 0.01, 0.001, 0.001, 0.0002)
    ]
    rate = parse(["--model=densenet40_k12", "--data_name=cifar10"]).learning_rate(10, 256)
    assert list(map(rate, (1499, 1500, 2250, 3000))) == [0.1, 0.01, 0.001, 0.0001]
    rate = parse(["--model=alexnet", "--data_name=cifar10"]).learning_rate(10, 256)
    assert list(map(rate, (999, 1000, 2000))) == pytest.approx([0.1, 0.01, 0.001])


def test_filled_flags_fill_in_no_more() -> None:
    for arguments in ([], LARGE, SMALL, ["--model=alexnet", "--data_name=cifar10"]):
        flags = parse(arguments)
        assert replace(flags, num_devices=3).config() == flags.config() | {"num_devices": 3}


def test_a_base_rate_is_refused_where_nothing_is_scaled_by_it() -> None:
    for arguments in ([], SMALL, ["--model=vgg16", "--data_name=imagenet"]):
        with pytest.raises(UsageError, match=r"--resnet_base_lr=0\.1 is for large resnets on"):
            parse([*arguments, "--resnet_base_lr=0.1"])
    with pytest.raises(UsageError, match="--init_learning_rate and --resnet_base_lr contradict"):
        parse([*LARGE, "--resnet_base_lr=0.1", "--init_learning_rate=0.1"])


def test_an_unknown_model_has_no_recipe() -> None:
    with pytest.raises(UsageError, match="there is no model 'vgg'; there are trivial, mlp, "):
        models.recipe_for("vgg", "imagenet")


def test_made_up_images_have_the_size_that_the_model_is_for() -> None:
    output = run(*QUICK, "--data_name=imagenet", "--batch_size=2")
    assert output.results["parameters"] == (2_432 + 51_264 + (7 * 7 * 64 + 1) * 512 + 513 * 1001)


@pytest.mark.parametrize("name", ["resnet20", "resnet110_v2", "densenet40_k12"])
def test_made_up_images_of_a_model_for_cifar10_are_as_small(name: str) -> None:
    flags = parse([f"--model={name}", "--data_name=synthetic", "--num_devices=1"])
    assert making.dataset(flags, 1).train.shape == (32, 32, 3)
    assert (flags.batch_size, flags.init_learning_rate) == (32, LEARNING_RATES["momentum"])


def test_a_model_that_cannot_take_the_data_names_the_layer_and_the_shapes() -> None:
    status, sentence = refused("--model=vgg11")
    assert status == 2
    assert sentence.startswith("--model=vgg11 cannot take examples as those of digits: layer ")
    assert "layer 'max_pool_3', for examples of shape (1, 1, 512): max_pool: windows" in sentence


def test_smoothed_labels_are_what_a_training_sees() -> None:
    flags = (*QUICK, "--model=mlp", "--loss_type_to_report=base_loss")
    plain, smooth = run(*flags), run(*flags, "--label_smoothing=0.1")
    assert plain.losses != smooth.losses
    assert smooth.results["config"]["label_smoothing"] == 0.1
