"""Out of memory: which layer, how many bytes, and a batch that fits."""

from __future__ import annotations

import re

import numpy as np
import pytest

import minidist as md
from minidist import nn
from minidist.device import room
from minidist.errors import OutOfMemoryError

HUGE = 1 << 20  # squared and times 4 bytes it is more than there is


def model() -> nn.Sequential:
    inner = nn.Sequential([nn.Dense(1), nn.Dense(HUGE, name="wide")], name="inner")
    return nn.Sequential([nn.Flatten(), inner, nn.Dense(1)], name="outer")


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
@pytest.mark.parametrize("training", [False, True])
def test_the_layer_the_bytes_and_a_batch_that_fits(monkeypatch, training, devices):
    monkeypatch.setattr(room, "of_host", lambda: 100 * HUGE)
    with md.Strategy(devices) as strategy:
        with strategy.scope():
            made = model()
            made.build((1,))
        x = np.ones((HUGE, 1), "float32")
        with pytest.raises(MemoryError) as caught:
            strategy.run(made, x, training)
    error = caught.value
    assert isinstance(error, OutOfMemoryError)
    assert (error.name, error.nbytes) == ("outer/inner/wide", HUGE * HUGE * 4)
    assert "layer 'outer/inner/wide' finds no memory for 4,398,046,511,104 bytes" in str(error)
    assert "in a batch of 1,048,576 examples" in str(error)
    fit = int(re.search(r"a batch of about ([\d,]+) on each replica would fit", str(error))[1])
    # Of an example all results and two of the largest, 12 bytes a column in training, or only
    # these two, 8 bytes; 100 bytes a column are free, for all replicas on the host.
    each = 100 // len(strategy.devices)
    assert fit == pytest.approx(each // 12 if training else each // 8, abs=1)


class Greedy(nn.Layer):
    """Finds no memory, whatever the batch."""

    def _call(self, x: md.Tensor, training: bool) -> md.Tensor:
        np.empty((HUGE, HUGE), np.float64)
        return x


@pytest.mark.parametrize("examples", [1, 2])
def test_only_of_a_batch_of_one_it_is_sure_that_nothing_fits(monkeypatch, examples):
    monkeypatch.setattr(room, "of_host", lambda: 0)
    made = nn.Sequential([Greedy()])
    made.build((1,))
    says = "not even one example fits" if examples == 1 else "try a smaller batch"
    with pytest.raises(OutOfMemoryError, match=says):
        made(np.ones((examples, 1), "float32"))


class OutOfRoom(nn.Residual):
    """A block that finds no memory for the sum."""

    def _pass(self, x: md.Tensor, training: bool) -> md.Tensor:
        super()._pass(x, training)
        raise MemoryError("for the sum")


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_what_the_batch_and_all_replicas_hold_would_be_smaller_too(monkeypatch, devices):
    """No room is left, but a batch of ten has just filled it: so fewer examples would fit."""
    monkeypatch.setattr(room, "of_host", lambda: 0)
    with md.Strategy(devices) as strategy:
        with strategy.scope():
            made = nn.Sequential([nn.ReLU(), nn.ReLU(), OutOfRoom([nn.ReLU(), nn.ReLU()])])
            made.build((8,))
        x = np.ones((10, 8), "float32")
        with pytest.raises(OutOfMemoryError) as caught:
            strategy.run(made, x, True)
        # Held are the batch and the results of three layers; what is needed is the batch,
        # those of four, and two more on the way back.
        assert f"a batch of about {10 * 4 // 7} on each replica would fit" in str(caught.value)
        first = nn.Sequential([Greedy()])
        first.build((8,))
        with pytest.raises(OutOfMemoryError, match="a batch of about 3 on each"):
            strategy.run(first, x, False)  # the batch, of which nothing is computed yet: 10 // 3


def test_what_was_asked_for():
    with pytest.raises(MemoryError) as caught:
        np.empty((HUGE, HUGE), np.float64)
    assert room.asked(caught.value) == HUGE * HUGE * 8
    assert room.asked(MemoryError("somebody else's")) is None


def test_the_room_of_the_host(monkeypatch, tmp_path):
    free = room.of_host()
    assert 0 < free < 1 << 50
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(room, "_GROUP", tmp_path)
    assert room.of_host() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert room.of_host() > 3000
