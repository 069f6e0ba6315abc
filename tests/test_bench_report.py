"""The benchmark's statistics against numbers worked out by hand, its lines and its JSON."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import data
from minidist.bench import report
from minidist.bench.flags.parse import parse
from minidist.bench.progress import Progress
from minidist.bench.report import Evaluated, Speed, Step
from minidist.train import Accuracy


def test_speed_of_four_steps_by_hand() -> None:
    # 100 images in 1, 2, 4 and 5 seconds: 100, 50, 25 and 20 images/sec, 400 images in 12 s.
    got = report.speed([100] * 4, [1.0, 2.0, 4.0, 5.0])
    assert got.mean == pytest.approx(400 / 12)
    mean = (100 + 50 + 25 + 20) / 4
    variance = ((100 - mean) ** 2 + (50 - mean) ** 2 + (25 - mean) ** 2 + (20 - mean) ** 2) / 4
    assert got.uncertainty == pytest.approx(math.sqrt(variance) / 2)
    assert got.p50 == pytest.approx(37.5)
    # Distances from 37.5: 62.5, 12.5, 12.5 and 17.5, whose median is 15.
    assert got.jitter == pytest.approx(1.4826 * 15)
    assert got.p90 == pytest.approx(50 + 0.7 * 50)  # at 0.9 · 3 = 2.7 of 20, 25, 50, 100
    assert got.p99 == pytest.approx(50 + 0.97 * 50)


def test_speed_with_exponential_weights_by_hand() -> None:
    # The newest step counts once, the one before half, the first a quarter.
    got = report.speed([100, 100, 50], [1.0, 2.0, 4.0], 0.5)
    assert got.mean == pytest.approx((25 + 50 + 50) / (0.25 + 1 + 4))
    plain = report.speed([100, 100, 50], [1.0, 2.0, 4.0])
    assert got[1:] == plain[1:], "only the mean is weighted"
    assert report.speed([100, 50], [1.0, 2.0], 1.0).mean == 25, "of the newest alone"


@given(st.integers(1, 1000), st.floats(1e-6, 1e3), st.integers(1, 20))
def test_equal_steps_have_no_spread(batch: int, seconds: float, count: int) -> None:
    got = report.speed([batch] * count, [seconds] * count)
    rate = batch / seconds
    assert got == pytest.approx((rate, 0, 0, rate, rate, rate), rel=1e-9, abs=1e-9 * rate)


def test_a_short_last_batch_counts_as_what_it_is() -> None:
    got = report.speed([100, 50], [1.0, 0.5])
    assert got == pytest.approx((100, 0, 0, 100, 100, 100))


@pytest.mark.parametrize(
    ("images", "seconds"), [([], []), ([1], [1.0, 1.0]), ([1], [0.0]), ([1], [-1.0])]
)
def test_speed_needs_steps_that_took_time(images: list[int], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one step and a duration above 0"):
        report.speed(images, seconds)


def test_rows_are_the_ancestors() -> None:
    speed = Speed(1234.56, 7.89, 0.04, 0.0, 0.0, 0.0)
    assert report.columns("total_loss", accuracy=False) == "Step\tImg/sec\ttotal_loss"
    assert report.row(10, speed, 2.3456) == ("10\timages/sec: 1234.6 +/- 7.9 (jitter = 0.0)\t2.346")
    assert report.columns("base_loss", accuracy=True) == (
        "Step\tImg/sec\tbase_loss\ttop_1_accuracy\ttop_5_accuracy"
    )
    assert report.row(1, speed, 2, Accuracy(0.5, 1, 8)) == (
        "1\timages/sec: 1234.6 +/- 7.9 (jitter = 0.0)\t2.000\t0.500\t1.000"
    )


def test_closing_lines_are_the_ancestors() -> None:
    assert report.closing(1234.567) == ["-" * 64, "total images/sec: 1234.57", "-" * 64]
    assert report.accuracy_line(Accuracy(0.97222, 1, 360)) == (
        "Accuracy @ 1 = 0.9722 Accuracy @ 5 = 1.0000 [360 examples]"
    )
    assert report.eval_row(10, 1234.56) == "10\t1234.6 examples/sec"


def test_the_header_describes_the_run() -> None:
    flags = parse(["--model=mlp", "--batch_size=4", "--forward_only", "--num_batches=5"])
    made = data.load("mnist", examples=8)
    lines = report.header(flags, made, ["cpu:0", "cpu:1", "cpu:2"], 5, 7.5)
    assert lines[0].startswith("minidist:    0.")
    assert lines[1:] == [
        "Model:       mlp",
        "Dataset:     mnist (synthetic)",
        "Mode:        forward-only",
        "Batch size:  12 global",
        "             4 per device",
        "Num batches: 5",
        "Num epochs:  7.50",
        "Devices:     ['cpu:0', 'cpu:1', 'cpu:2']",
        "Data format: NHWC",
        "Optimizer:   momentum",
        "Variables:   replicated",
        "AllReduce:   auto",
        "Consistency: strong",
        "Precision:   float32",
        "==========",
    ]
    lines = report.header(parse([]), data.load("digits"), ["cpu:0"], 1, 1)
    assert "Dataset:     digits" in lines
    assert "Mode:        training" in lines


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], ["AllReduce:   auto", "Consistency: strong", "Precision:   float32"]),
        (["--hierarchical_copy"], ["AllReduce:   hierarchical_copy"]),
        (["--all_reduce_spec=pscpu:2k:xring#2"], ["AllReduce:   pscpu:2K:xring#2"]),
        (["--variable_consistency=relaxed"], ["Consistency: relaxed"]),
        (["--variable_update=parameter_server"], ["Staged vars: False"]),
        (["--variable_update=parameter_server", "--staged_vars"], ["Staged vars: True"]),
        (["--use_fp16"], ["Precision:   float16"]),
        (["--use_bf16"], ["Precision:   bfloat16"]),
        (["--eval", "--train_dir=x", "--eval_batch_size=3"], ["Mode:        evaluation"]),
        (["--eval", "--train_dir=x", "--eval_batch_size=3"], ["             3 per device"]),
        (["--eval_during_training_every_n_steps=3"], ["Mode:        training + evaluation"]),
    ],
)
def test_the_header_says_what_the_flags_choose(arguments: list[str], wanted: list[str]) -> None:
    lines = report.header(parse(arguments), data.load("digits"), ["cpu:0"], 1, 1, "Resumes here")
    assert set(wanted) <= set(lines)
    assert lines[-2:] == ["Resumes here", "=========="]


def test_independent_has_no_all_reduce() -> None:
    lines = report.header(
        parse(["--variable_update=independent"]), data.load("digits"), ["cpu:0"], 1, 1
    )
    assert not any(line.startswith(("AllReduce", "Consistency", "Staged")) for line in lines)


def document(loss: float = 0.5) -> dict[str, object]:
    return report.document(
        flags=parse(["--num_batches=1"]),
        devices=["cpu:0", "cpu:1"],
        unit="images",
        steps=[Step(1, loss, 0.25)],
        speed=report.speed([64], [0.25]),
        total_images_per_sec=250.0,
        accuracy=Accuracy(0.5, 0.75, 360),
        evaluations=[Evaluated(1, Accuracy(0.25, 1, 8))],
        watched={"bytes": None},
        weights_checksum=["aa", "bb"],
        parameters=7,
        skipped_records=2,
        peak_memory_bytes=report.peak_memory_bytes(),
        global_step=11,
        resumed_at=10,
    )


def test_the_json_has_the_keys_of_schema_1(tmp_path: Path) -> None:
    report.write(tmp_path / "results.json", document())
    got = json.loads((tmp_path / "results.json").read_text())
    assert list(got) == [
        "schema",
        "config",
        "devices",
        "unit",
        "steps",
        "images_per_sec",
        "total_images_per_sec",
        "accuracy",
        "evaluations",
        "bytes",
        "global_step",
        "resumed_at",
        "weights_checksum",
        "parameters",
        "skipped_records",
        "peak_memory_bytes",
        "versions",
    ]
    assert got["schema"] == 1
    assert got["config"]["num_batches"] == 1
    assert got["devices"] == ["cpu:0", "cpu:1"]
    assert got["steps"] == [{"step": 1, "loss": 0.5, "seconds": 0.25}]
    assert got["images_per_sec"] == {
        "mean": 256,
        "uncertainty": 0,
        "jitter": 0,
        "p50": 256,
        "p90": 256,
        "p99": 256,
    }
    assert (got["total_images_per_sec"], got["unit"]) == (250, "images")
    assert got["accuracy"] == {"top_1": 0.5, "top_5": 0.75}
    assert got["evaluations"] == [{"step": 1, "top_1": 0.25, "top_5": 1}]
    assert (got["global_step"], got["resumed_at"]) == (11, 10)
    assert got["weights_checksum"] == {"0": "aa", "1": "bb"}
    assert (got["parameters"], got["skipped_records"]) == (7, 2)
    assert got["peak_memory_bytes"] > 2**20
    assert got["versions"]["numpy"] == np.__version__


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_become_null(loss: float, tmp_path: Path) -> None:
    report.write(tmp_path / "results.json", document(loss))
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text)["steps"][0]["loss"] is None
    assert "NaN" not in text
    assert "Infinity" not in text


def test_the_json_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    report.write(file, {"old": 1})
    with pytest.raises(TypeError):
        report.write(file, {"new": object()})

    def fail(source: Path, target: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        report.write(file, {"new": 1})
    assert json.loads(file.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "results.json")
    report.write(tmp_path / "link.json", {"new": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "results.json").read_text()) == {"new": 1}


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        report.write(pipe, {"new": 1})
        assert json.loads(os.read(reader, 1000)) == {"new": 1}
    finally:
        os.close(reader)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_rows_are_plain_lines() -> None:
    stream = io.StringIO()
    with Progress(3, stream) as progress:
        for step in (1, 2, 3):
            progress.update(step)
        progress.row("3\timages/sec: [1.0]")
    assert stream.getvalue() == "3\timages/sec: [1.0]\n"


def test_without_a_terminal_rich_is_not_imported() -> None:
    program = (
        "import sys; from minidist.bench.progress import Progress\n"
        "with Progress(1) as progress: progress.row('row')\n"
        "assert 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "row\n", "")


def test_on_a_terminal_there_is_a_bar_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with Progress(3, stream) as progress:
        progress.update(1)
        progress.row("1\timages/sec: [1.0]")
        progress.update(3)
    progress.row("after")
    text = stream.getvalue()
    assert "1/3" in text
    assert "3/3" in text
    assert "images/sec: [1.0]" in text
    assert text.endswith("after\n")
