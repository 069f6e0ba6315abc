"""Text and the transformer: windows, what a layer refuses, and a training that learns.

tests/test_transformer_torch.py has the arithmetic.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benching import QUICK, call, run
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from minidist import context, data, models, nn, ops
from minidist.bench.flags.parse import parse
from minidist.data.text import TOKENS, Text
from minidist.errors import DataError, ShapeError, UsageError
from minidist.train import forward_step, mean_loss, train_step

# -- text ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=60), st.integers(1, 7), st.integers(0, 2**32), st.integers(0, 3))
def test_an_epoch_guesses_every_byte_once(
    content: bytes, tokens: int, seed: int, epoch: int
) -> None:
    split = Text(np.frombuffer(content, np.uint8), tokens)
    order = split.order(seed, epoch)
    inputs, labels = np.full((2, len(split), tokens), -1)
    split.read(order, seed, epoch, inputs, labels)
    place = {int(number): row for row, number in enumerate(order)}
    assert sorted(place) == list(range(len(split)))
    windows = [place[number] for number in range(len(split))]
    guessed = bytes(labels[windows].reshape(-1).tolist())
    assert guessed == content[1 : 1 + len(split) * tokens]
    assert len(content) - 1 - len(guessed) < tokens
    assert bytes(inputs[windows].reshape(-1).tolist()) == content[: len(guessed)]


def test_the_text_that_comes_with_python() -> None:
    of = data.load("text")
    assert (of.name, of.classes, of.synthetic, of.unit) == ("text", 256, False, "tokens")
    for split in (of.train, of.test):
        assert split.shape == split.label_shape == (TOKENS,) and split.dtype == np.int64
    inputs, labels = np.empty((2, 3, TOKENS), np.int64)
    of.train.read(np.arange(3), 0, 0, inputs, labels)
    text = bytes(inputs.reshape(-1).tolist()).decode()
    assert text.isascii() and "assert" in text
    assert len(of.train) > 5 * len(of.test) > 1000


def test_files_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(bytes(range(256)) * 3)
    (tmp_path / "a.txt").write_bytes(b"a" * 500)
    (tmp_path / "c.md").write_bytes(b"no text")
    (tmp_path / "d.txt").mkdir()
    of = data.load("text", tmp_path)
    together = b"a" * 500 + bytes(range(256)) * 3
    cut = len(together) * 9 // 10
    assert of.train.text.tobytes() == together[:cut] and of.test.text.tobytes() == together[cut:]


def test_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"no text here: expected files whose names end in \.txt"):
        data.load("text", tmp_path)
    (tmp_path / "short.txt").write_bytes(b"x" * (10 * TOKENS))
    with pytest.raises(DataError, match=rf"has {10 * TOKENS} bytes; .*more than the {TOKENS}"):
        data.load("text", tmp_path)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"comes without the text .*give a folder of \.txt files"):
        data.load("text")


# -- layers ----------------------------------------------------------------------------------


def test_layers_of_sequences() -> None:
    model = nn.Sequential(
        [
            nn.Embedding(7, 12, sparse=False),
            nn.Positions(),
            nn.LayerNorm(),
            nn.Dense(24),
            nn.CausalAttention(2),
            nn.GELU(),
        ]
    )
    assert model.build((5,)) == (5, 8)
    assert model(np.zeros((3, 5), np.int64)).shape == (3, 5, 8)
    assert model(np.zeros((0, 5), np.int64)).shape == (0, 5, 8)
    shapes = {variable.name: variable.shape for variable in model.variables}
    assert shapes == {
        "embedding/table": (7, 12),
        "positions/table": (5, 12),
        "layer_norm/gamma": (12,),
        "layer_norm/beta": (12,),
        "dense/kernel": (12, 24),
        "dense/bias": (24,),
    }


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (nn.CausalAttention(2), (5, 8), r"'attention'.*\[tokens, 3·k\], where k is a multiple of"),
        (nn.CausalAttention(2), (12,), r"'attention'.*\[tokens, 3·k\]"),
        (nn.Positions(), (5, 8, 3), r"'positions'.*\[tokens, units\]"),
        (nn.Dense(3), (8, 8, 1), r"'dense'.*\[k\] or \[tokens, k\]; put a Flatten before"),
        (nn.LayerNorm(), (), r"'layer_norm'.*a last axis"),
    ],
)
def test_a_layer_names_itself_and_what_it_takes(
    layer: nn.Layer, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ShapeError, match=words):
        layer.build(shape)


@pytest.mark.parametrize(
    ("operation", "inputs", "words"),
    [
        (ops.layer_norm, (np.ones((2, 3)), np.ones(3), np.ones(2)), r"layer_norm: x \(2, 3\), sca"),
        (ops.causal_attention, (np.ones((2, 3, 8)), 2), r"qkv \(2, 3, 8\) is not \[n, t, 3·2·size"),
        (ops.gelu, (np.ones(3, int),), r"gelu: dtype int64"),
        (ops.matmul, (np.ones((2, 3, 4)), np.ones((3, 4, 5))), r"behind equal axes"),
    ],
)
def test_an_operation_names_itself_and_the_shapes(operation: Any, inputs: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        operation(*inputs)


def test_heads_are_a_number_above_0() -> None:
    with pytest.raises(UsageError, match="attention: heads must be a whole number above 0, not 0"):
        nn.CausalAttention(0)


def test_rows_and_units_are_numbers_above_0_and_an_epsilon_is_not_below() -> None:
    for rows in (0, 2.5, True):
        with pytest.raises(UsageError, match="embedding: rows must be a whole number above 0"):
            nn.Embedding(rows, 3)
        with pytest.raises(UsageError, match="embedding: units must be a whole number above 0"):
            nn.Embedding(3, rows)
    for epsilon in (-1e-9, np.nan):
        with pytest.raises(UsageError, match=f"layer_norm: the epsilon is {epsilon}; it must be"):
            nn.LayerNorm(epsilon=epsilon)


@pytest.mark.parametrize("labels", [(3, 4), (4, 3), (3, 5), (3, 5, 4), ()])
def test_labels_of_another_shape_than_the_tokens_are_refused(labels: tuple[int, ...]) -> None:
    layer = nn.Dense(7)
    layer.build((4, 2))
    inputs = ops.constant(np.ones((3, 4, 2), np.float32))
    if labels == (3, 4):
        assert forward_step(layer, inputs, ops.constant(np.zeros(labels, int))).count == 12
        return
    words = f"softmax_cross_entropy: logits (3, 4, 7) and labels {labels} do not fit"
    with pytest.raises(ShapeError, match=re.escape(words)):
        forward_step(layer, inputs, ops.constant(np.zeros(labels, int)))


@pytest.mark.parametrize("sparse", [True, False])
def test_a_table_of_which_all_rows_are_used(sparse: bool) -> None:
    layer = nn.Embedding(5, 3, sparse=sparse)
    layer.build((4,))
    ids = np.array([[1, 1, 4, 0], [1, 0, 2, 2]])
    with md.GradientTape() as tape:
        total = ops.reduce_sum(layer(ids) * np.arange(4, dtype=np.float32).reshape(4, 1))
    gradient = tape.gradient(total, layer.table)
    assert isinstance(gradient, md.IndexedSlices) == sparse
    wanted = np.array([4, 1, 5, 0, 2], np.float32)[:, None].repeat(3, axis=1)
    np.testing.assert_array_equal(ops.as_tensor(gradient).numpy(), wanted)


# -- the model -------------------------------------------------------------------------------


def test_its_parameters() -> None:
    model = models.build("transformer", (TOKENS,), 256)
    found = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    width, blocks = 128, 4
    rows = (256 + TOKENS) * width
    attention = width * 3 * width + 3 * width + width * width + width
    dense = width * 4 * width + 4 * width + 4 * width * width + width
    norms = (2 * blocks + 1) * 2 * width
    last = width * 256 + 256
    assert found == rows + blocks * (attention + dense) + norms + last == 867_328


def batch(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sequences in which each token is the one before it plus one: easy to learn."""
    begins = np.random.default_rng(seed).integers(0, 256, (n, 1))
    tokens = (begins + np.arange(17)) % 256
    return tokens[:, :-1], tokens[:, 1:]


def trained(
    policy: str, devices: str, steps: int, dtype: str | None = None, n: int = 6, **options: Any
) -> tuple[list[float], list[np.ndarray]]:
    context.seed(3)
    inputs, labels = batch(n)
    with md.Strategy(devices, policy, **options) as strategy:
        with strategy.scope():
            model = models.build("transformer", (16,), 256)
        optimizer = md.optim.Adam(3e-3, gradient_clip_norm=1.0)
        losses = []
        for x, y in strategy.distribute_dataset([(inputs, labels)] * steps):
            results = strategy.run(train_step, model, optimizer, x, y, dtype=dtype)
            losses.append(mean_loss(strategy.local_results(results)))
        return losses, [weight.numpy().copy() for weight in model.trainable_variables]


POLICIES = [
    ("parameter_server", {}),
    ("replicated", {}),
    ("replicated", {"all_reduce_spec": "pscpu"}),
    ("collective_all_reduce", {}),
]


def test_all_policies_train_it_to_the_same_bits() -> None:
    found = [trained(policy, "cpu*2", 3, **options) for policy, options in POLICIES]
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        for got, want in zip(weights, found[0][1], strict=True):
            np.testing.assert_array_equal(got, want)


def test_replicas_train_it_as_one_device_does() -> None:
    """With a batch whose parts are unequal, and with one that leaves a replica empty."""
    for n in (5, 1):
        alone, together = (trained("replicated", devices, 3, n=n) for devices in ("cpu", "cpu*2"))
        np.testing.assert_allclose(together[0], alone[0], rtol=1e-4)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_it_learns(dtype: str | None) -> None:
    losses, weights = trained("replicated", "cpu*2", 25, dtype)
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < 1.5
    assert all(weight.dtype == np.float32 for weight in weights)


def test_activations_have_the_dtype_that_is_asked_for() -> None:
    model = models.build("transformer", (16,), 256)
    inputs, labels = (ops.constant(each) for each in batch(2))
    with context.entered(activations="bfloat16"):
        assert model(inputs).dtype.name == "bfloat16"
    result = forward_step(model, inputs, labels, dtype="bfloat16")
    assert result.count == 32  # of labels
    wide = forward_step(model, inputs, labels)
    assert 0 < abs(result.loss - wide.loss) < 0.01
    assert context.frame().activations is None


# -- the bench -------------------------------------------------------------------------------

TEXT = ("--model=transformer", "--data_name=text")
SHORT = (*TEXT, "--batch_size=2", "--num_eval_batches=3", *QUICK)


def test_flags_that_are_not_given_are_its_recipes() -> None:
    flags = parse(TEXT)
    found = flags.optimizer, flags.init_learning_rate, flags.batch_size, flags.num_epochs
    assert (*found, flags.gradient_clip_norm) == ("adam", 0.001, 8, 5, 1.0)
    other = parse([*TEXT, "--optimizer=sgd", "--gradient_clip=2", "--num_batches=7"])
    assert (other.init_learning_rate, other.gradient_clip_norm) == (0.2, None)
    assert (other.num_batches, other.num_epochs) == (7, None)


def test_rows_tell_of_tokens_and_no_byte_moves_that_was_not_predicted() -> None:
    found = run(*SHORT, "--print_training_accuracy")
    heading = "Step\tTokens/sec\ttotal_loss\ttop_1_accuracy\ttop_5_accuracy"
    assert heading in found.text and "images/sec" not in found.text
    assert re.search(r"^4\ttokens/sec: \d", found.text, re.M)
    assert re.search(r"^total tokens/sec: \d", found.text, re.M)
    assert f"[{3 * 4 * TOKENS} examples]" in found.text
    assert found.results["bytes"]["predicted"] == found.results["bytes"]["measured"]
    seconds = sum(step["seconds"] for step in found.results["steps"])
    assert found.results["unit"] == "tokens"
    assert found.results["images_per_sec"]["mean"] == pytest.approx(4 * 4 * TOKENS / seconds)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model=mlp", "--data_name=text"), "gives (256,) for an example of text, which needs"),
        (("--model=lenet", "--data_name=text"), "'conv', for examples of shape (64,)"),
        (("--model=transformer",), "'positions', for examples of shape (8, 8, 1, 128)"),
        ((*TEXT, "--data_format=NCHW"), "--data_format=NCHW is an order of images"),
    ],
)
def test_a_model_and_data_that_do_not_fit(arguments: tuple[str, ...], words: str) -> None:
    status, _, errors = call(*arguments, *QUICK)
    assert status == 2 and words in errors
