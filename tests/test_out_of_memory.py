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


def test_where_nothing_fits(monkeypatch):
    monkeypatch.setattr(room, "of_host", lambda: 0)
    made = model()
    made.build((1,))
    with pytest.raises(OutOfMemoryError, match="not even one example fits"):
        made(np.ones((HUGE, 1), "float32"))


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
