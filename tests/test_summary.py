"""Summaries: three formats, written by one replica, and cut off where a training goes on."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import resource
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.errors import DataError, UsageError

NAMES = ["log.jsonl", "log.csv", "log.tfevents"]


@pytest.fixture(params=NAMES)
def path(request, tmp_path):
    return tmp_path / request.param


def numbers(path):
    """Return {(step, tag): value} as another reader of the format finds them."""
    if path.suffix == ".csv":
        rows = list(csv.DictReader(path.read_text().splitlines()))
        found = {
            (int(row["step"]), tag): float(value)
            for row in rows
            for tag, value in row.items()
            if tag != "step" and value
        }
        assert len({row["step"] for row in rows}) == len(rows)
    elif path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found = {(line["step"], line["tag"]): float(line["value"]) for line in lines}
        assert len(found) == len(lines)
    else:
        found = events(path)
    return found


def events(path):
    """Read an event file by its bytes: the frames of TFRecord, and the fields of protobuf."""
    data, found = io.BytesIO(path.read_bytes()), {}
    while header := data.read(12):
        event = data.read(int.from_bytes(header[:8], "little"))
        assert len(data.read(4)) == 4
        fields = protobuf(event)
        if 5 in fields:
            value = protobuf(protobuf(fields[5])[1])
            found[fields[2], value[1].decode()] = float(np.frombuffer(value[2], "<f4")[0])
    return found


def protobuf(message):
    """Return the last value of each field, by number; the fields that summaries have."""
    data, fields = io.BytesIO(message), {}

    def varint():
        value, shift = 0, 0
        while (byte := data.read(1)[0]) > 127:
            value, shift = value | (byte & 127) << shift, shift + 7
        return value | byte << shift

    while data.tell() < len(message):
        key = varint()
        wire = key & 7
        fields[key >> 3] = (
            varint() if wire == 0 else data.read({1: 8, 2: None, 5: 4}[wire] or varint())
        )
    return fields


# --- what is written ----------------------------------------------------------------------------


def test_numbers_of_all_formats_are_those_that_were_written(path):
    with md.SummaryWriter(path) as writer:
        writer.scalar("loss", 0.5, step=1)
        writer.scalar("rate", 0.25, step=1)
        writer.scalar("loss", md.constant(0.125), step=2)
        writer.scalar("later", 3, step=7)
    assert numbers(path) == {
        (1, "loss"): 0.5,
        (1, "rate"): 0.25,
        (2, "loss"): 0.125,
        (7, "later"): 3.0,
    }


def test_replica_0_alone_writes(path):
    with md.Strategy("cpu*3") as strategy, md.SummaryWriter(path) as writer:

        def step():
            replica = md.get_replica_context()
            writer.scalar("id", replica.replica_id)
            replica.merge_call(lambda s: writer.scalar("merged", 1))

        strategy.run(step)
        strategy.run(step)
    assert numbers(path) == {
        (step, tag): float(tag == "merged") for step in (1, 2) for tag in ("id", "merged")
    }


def test_a_number_is_in_the_file_at_once(path):
    with md.SummaryWriter(path) as writer:
        for step in range(3):
            for tag in ("a", "b"):
                writer.scalar(tag, step, step=step)
                assert numbers(path)[step, tag] == step


def test_what_is_not_finite_is_kept(path):
    with md.SummaryWriter(path) as writer:
        for step, value in enumerate((math.inf, -math.inf, math.nan)):
            writer.scalar("x", value, step=step)
    found = list(numbers(path).values())
    assert found[:2] == [math.inf, -math.inf] and math.isnan(found[2])


def test_a_table_gets_a_column_for_each_tag_when_it_comes(tmp_path):
    path = tmp_path / "table.csv"
    with md.SummaryWriter(path) as writer:
        writer.scalar("a", 1, step=1)
        writer.scalar("a", 2, step=2)
        writer.scalar("b, or not", 3, step=2)
        writer.scalar("a", 20, step=2)  # the last one of a step counts
        writer.scalar("c", 5, step=3)
        writer.scalar("a", 4, step=3)
    assert path.read_text() == 'step,a,"b, or not",c\n1,1.0,,\n2,20.0,3.0,\n3,4.0,,5.0\n'
    assert os.listdir(tmp_path) == [path.name]


def test_a_table_goes_forward_only(tmp_path):
    path = tmp_path / "table.csv"
    for first in (True, False):  # also where another writer has begun it
        with md.SummaryWriter(path) as writer:
            if first:
                writer.scalar("a", 1, step=5)
            with pytest.raises(UsageError, match="has a row of step 5 already"):
                writer.scalar("a", 1, step=4)
            writer.scalar("b", 2, step=5)
    assert path.read_text() == "step,a,b\n5,1.0,2.0\n"


def test_an_event_file_has_the_bytes_that_tensorboard_would_write(tmp_path, monkeypatch):
    """Taken from TensorBoard 2.21's RecordWriter and protobuf classes; a hash of the histogram."""
    monkeypatch.setattr("time.time", lambda: 1.5)
    path = tmp_path / "events.out.tfevents.1"
    with md.SummaryWriter(path) as writer:
        writer.scalar("loss", 0.1, 300)
        writer.scalar("Größe", math.inf, -1)
        begin = path.read_bytes().hex()
        writer.histogram("w", [1.0, 2.0, 4.0, 31.0], 300)
    assert begin == (
        "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c"
        "1b000000000000001a0d9e1309000000000000f83f10ac022a0d0a0b0a046c6f737315cdcccc3d7a"
        "d096042600000000000000734fe30009000000000000f83f10ffffffffffffffffff012a100a0e0a"
        "074772c3b6c39f65150000807fc613351f"
    )
    assert hashlib.sha256(path.read_bytes()).hexdigest() == (
        "20fc64050b3bc438bba8ba8bf4366b450677294033c63a629b3ac6da533c1aaa"
    )


def test_tensorboard_reads_it(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    with md.SummaryWriter(tmp_path / "events.out.tfevents.1") as writer:
        for step in range(3):
            writer.scalar("loss", step / 4, step)
            writer.histogram("w", np.arange(10), step)
    found = accumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [
        (0, 0.0),
        (1, 0.25),
        (2, 0.5),
    ]
    assert [event.histogram_value.num for event in found.Histograms("w")] == [10] * 3


# --- histograms ---------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 3))
def test_a_histogram_says_what_pythons_statistics_say(values, others):
    with_others = values + [math.nan, math.inf, -math.inf][:others]
    histogram = md.summary.Histogram.of(np.array(with_others))
    said = histogram.statistics
    assert (said["count"], said["nonfinite"]) == (len(values), others)
    assert (said["min"], said["max"]) == (min(values), max(values))
    assert said["mean"] == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert said["50%"] == pytest.approx(statistics.median(values), abs=1e-9)
    assert said["min"] <= said["5%"] <= said["25%"] <= said["50%"] <= said["75%"] <= said["95%"]
    if len(values) > 1:
        cuts = statistics.quantiles(values, n=20, method="inclusive")
        got = [said["5%"], said["25%"], said["75%"], said["95%"]]
        assert got == pytest.approx([cuts[0], cuts[4], cuts[14], cuts[18]], abs=1e-6)
    assert sum(histogram.counts) == len(values)
    assert len(histogram.edges) == len(histogram.counts) + 1


@pytest.mark.parametrize(
    "values",
    [
        [0.0, 5e-324],
        [5e-324, 5e-323],
        [1.0, 1.0 + 2**-52],
        [-1.0, -1.0 - 2**-52, -1.0 - 2**-51],
        [1e17],
        [1e150, 1e150],
        [1e150, -1e150, 0.0],
        [3e38, -3e38],
    ],
)
def test_a_histogram_of_numbers_that_are_neighbours_or_huge(values):
    for scale in (1.0, 1e150):  # which is too much for squares
        with np.errstate(over="ignore"):
            histogram = md.summary.Histogram.of(np.array(values) * scale)
        assert sum(histogram.counts) == len(values)
        edges = histogram.edges
        assert len(edges) == len(histogram.counts) + 1
        assert list(edges) == sorted(edges)
        assert edges[0] <= min(values) * scale <= max(values) * scale <= edges[-1]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_every_number_is_in_a_bucket(values):
    with np.errstate(over="ignore"):
        assert sum(md.summary.Histogram.of(np.array(values)).counts) == len(values)


def test_histograms_of_a_variable_in_lines_and_tables(tmp_path):
    names = ["count", "nonfinite", "min", "5%", "25%", "50%", "75%", "95%", "max", "mean"]
    expected = [3, 0, 1.0, 1.1, 1.5, 2.0, 3.0, 3.8, 4.0, 7 / 3]
    with md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            v = md.Variable([1.0, 2.0, 4.0], name="v")
        for name in ("log.jsonl", "log.csv"):
            with md.SummaryWriter(tmp_path / name) as writer:
                writer.histogram("v", v, step=3)
                writer.histogram("none", np.array([math.nan]), step=3)
    of_v, of_none = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert list(of_v["histogram"]) == names
    assert list(of_v["histogram"].values()) == pytest.approx(expected)
    assert of_none["histogram"]["nonfinite"] == 1 and of_none["histogram"]["mean"] == "nan"
    (row,) = csv.DictReader((tmp_path / "log.csv").read_text().splitlines())
    assert [float(row[f"v/{name}"]) for name in names] == pytest.approx(expected)
    assert math.isnan(float(row["none/max"])) and float(row["none/count"]) == 0


# --- going on -----------------------------------------------------------------------------------


def write(writer, steps):
    for step in steps:
        writer.scalar("x", step / 4, step=step)
        writer.scalar("y", step / 2, step=step)


def test_later_steps_are_cut_off_when_a_training_goes_on(path):
    with md.SummaryWriter(path) as writer:
        write(writer, range(10))
    with md.SummaryWriter(path) as writer:
        write(writer, range(10, 13))
    everything = path.read_bytes()
    for last in (12, 7, 3, 0):
        with md.SummaryWriter(path, resume_from=last) as writer:
            write(writer, range(last + 1, 13))
        assert numbers(path) == {
            (step, tag): step / by for step in range(13) for tag, by in (("x", 4), ("y", 2))
        }
        if path.suffix != ".tfevents":  # in which the time stands
            assert path.read_bytes() == everything


def test_a_file_that_a_killed_writer_left_at_any_byte_can_be_gone_on_from(path):
    with md.SummaryWriter(path) as writer:
        write(writer, range(2))
        size = path.stat().st_size
        write(writer, range(2, 4))
    everything = path.read_bytes()
    for end in range(size, len(everything)):
        path.write_bytes(everything[:end])
        with md.SummaryWriter(path, resume_from=1) as writer:
            write(writer, [2])
        expected = {(step, tag): step / by for step in range(3) for tag, by in (("x", 4), ("y", 2))}
        assert numbers(path) == expected
        path.write_bytes(everything[:end])
        with md.SummaryWriter(path) as writer:  # what is whole stays
            writer.scalar("x", 1.0, step=9)
        found = numbers(path)
        assert found.items() >= {(0, "x"): 0.0, (1, "y"): 0.5, (9, "x"): 1.0}.items()


def test_lines_of_others_stay(tmp_path):
    path = tmp_path / "log.jsonl"
    others = 'said by others\n{"step": "x"}\n[7]\n'
    path.write_text(others + '{"step": 5, "tag": "x", "value": 1.0}\n')
    md.SummaryWriter(path, resume_from=4).close()
    assert path.read_text() == others


def test_links_and_modes_stay(path):
    with md.SummaryWriter(path) as writer:
        write(writer, range(5))
    path.chmod(0o640)
    link = path.with_name(f"link{path.suffix}")
    link.symlink_to(path)
    md.SummaryWriter(link, resume_from=2).close()
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert max(numbers(path)) == (2, "y")


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "step,a\n1,2\nx,3\n", "step,a\n\n", "{}\n"])
def test_another_programs_table(tmp_path, content):
    path = tmp_path / "table.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=f"{path}: is no table of summaries"):
        md.SummaryWriter(path)
    assert path.read_text() == content


def test_another_programs_event_file(tmp_path):
    path = tmp_path / "x.tfevents"
    path.write_text("something else of some length")
    with pytest.raises(DataError, match="is no event file, or damaged at byte 0"):
        md.SummaryWriter(path)


def test_what_cannot_be_opened(tmp_path):
    for path in (tmp_path, tmp_path / "no folder" / "log.jsonl"):
        with pytest.raises(DataError, match=str(path)):
            md.SummaryWriter(path)


def test_what_is_no_array_of_numbers(path):
    with md.SummaryWriter(path) as writer, pytest.raises(UsageError, match="takes numbers"):
        writer.histogram("x", "text", step=0)


def test_a_full_disk_is_said_and_leaves_a_file_that_goes_on(path):
    with md.SummaryWriter(path) as writer:
        write(writer, range(3))
        whole = numbers(path)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
        try:
            with pytest.raises(DataError, match="summaries cannot be written: File too large"):
                writer.scalar("x", 1 / 3, step=3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert numbers(path) == whole
        writer.scalar("x", 1.0, step=3)
    assert numbers(path) == {**whole, (3, "x"): 1.0}
