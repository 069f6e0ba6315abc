"""`python -m minidist.data`: what it writes and shows, and how it ends."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")

from photos import album, jpeg
from PIL import Image

from minidist import data
from minidist.data import example, writing
from minidist.data.__main__ import main
from minidist.data.shard import Shard
from minidist.data.showing import GAP, TILE
from minidist.tensor_file import open_to_read

SHAPE = (16, 16, 3)


@pytest.fixture
def photos(tmp_path):
    return album(tmp_path / "photos", {"cat": 4, "dog": 3, "Emu": 2}, {"cat": 1, "dog": 2})


def examples(path):
    """Return the features of all records of a file."""
    shard = Shard(path)
    assert shard.damage is None
    names = ("encoded", "format", "filename", "height", "width", "class/label", "class/text")
    wanted = {f"image/{name}" for name in names}
    with open_to_read(path) as file:
        found = [example.parse(shard.read(n, file), wanted) for n in range(len(shard))]
    assert all(set(features) == wanted for features in found)
    return [{name: features[f"image/{name}"][0] for name in names} for features in found]


def rows(split):
    """Return the inputs of all examples with their labels, in any order."""
    inputs = np.empty((len(split), *split.shape), split.dtype)
    labels = np.empty(len(split), np.int64)
    split.read(np.arange(len(split)), 0, 0, inputs, labels)
    return sorted(zip(labels.tolist(), map(bytes, inputs), strict=True))


def said(capsys):
    out, error = capsys.readouterr()
    return out.splitlines(), error


# Writing


def test_what_is_written_is_the_folder(photos, tmp_path, capsys):
    target = tmp_path / "shards"
    assert main(["write", str(photos), str(target), "--shard_images=4"]) == 0
    assert said(capsys)[0] == [
        "train-00000-of-00003: 3 images",
        "train-00001-of-00003: 3 images",
        "train-00002-of-00003: 3 images",
        "validation-00000-of-00001: 3 images",
    ]
    assert (target / "labels.txt").read_text() == "Emu\ncat\ndog\n"
    found = data.load("imagenet", target, image_shape=SHAPE)
    wanted = data.load("folder", photos, image_shape=SHAPE)
    assert found.names == ("background", *wanted.names)
    assert rows(found.test) == [(label + 1, image) for label, image in rows(wanted.test)]
    assert [label for label, _ in rows(found.train)] == [1] * 2 + [2] * 4 + [3] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "shards"]


def test_records_say_what_they_are(photos, tmp_path):
    main(["write", str(photos), str(tmp_path / "shards")])
    found = examples(tmp_path / "shards" / "train-00000-of-00001")
    assert len(found) == 9
    for one in found:
        name, number = bytes(one["class/text"]).decode(), bytes(one["filename"]).decode()
        assert bytes(one["encoded"]) == (photos / "train" / name / number).read_bytes()
        assert one["class/label"] == 1 + ["Emu", "cat", "dog"].index(name)
        assert (bytes(one["format"]), one["height"], one["width"]) == (b"JPEG", 24, 20)
    labels = [one["class/label"] for one in found]
    assert labels != sorted(labels)  # shuffled


def test_the_same_images_become_the_same_bytes(photos, tmp_path):
    for name in "ab":
        assert main(["write", str(photos), str(tmp_path / name), "--shard_images=5"]) == 0
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_damaged_image_is_an_error_or_left_out_and_nothing_half_is_left(photos, tmp_path, capsys):
    broken = photos / "train" / "cat" / "001.jpg"
    broken.write_bytes(jpeg(0)[:300])
    target = tmp_path / "shards"
    assert main(["write", str(photos), str(target)]) == 3
    assert f"minidist.data: {broken}: byte " in said(capsys)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    assert main(["write", str(photos), str(target), "--skip_bad_records"]) == 0
    assert said(capsys)[0][:2] == [
        "train-00000-of-00001: 8 images",
        "train: 1 damaged images were left out",
    ]
    assert len(data.load("imagenet", target).train) == 8


def test_what_is_there_is_not_written_over(photos, tmp_path, capsys):
    (tmp_path / "shards").mkdir()
    assert main(["write", str(photos), str(tmp_path / "shards")]) == 3
    assert "shards: is there already: name a folder that is to be made" in said(capsys)[1]
    (tmp_path / "other.partial").mkdir()
    assert main(["write", str(photos), str(tmp_path / "other")]) == 3
    assert "other.partial: somebody is writing it now, or was killed" in said(capsys)[1]
    assert (tmp_path / "other.partial").exists()
    assert main(["write", str(photos), str(tmp_path / "no" / "such")]) == 3
    assert "such.partial: cannot be made: No such file" in said(capsys)[1]


def test_a_class_that_no_line_can_hold_is_refused(photos, tmp_path, capsys):
    (photos / "train" / "two\nlines").mkdir()
    (photos / "train" / "two\nlines" / "one.jpg").write_bytes(jpeg(0))
    assert main(["write", str(photos), str(tmp_path / "shards")]) == 3
    assert r"the class 'two\nlines' has a name that no line of labels.txt" in said(capsys)[1]


def test_an_interrupt_leaves_nothing(photos, tmp_path, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(writing.example, "build", interrupted)
    assert main(["write", str(photos), str(tmp_path / "shards")]) == 130
    assert said(capsys)[1] == "minidist.data: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_full_disk_is_named_and_leaves_nothing(photos, tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        assert main(["write", str(photos), str(tmp_path / "shards")]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "shards: cannot be written: File too large" in said(capsys)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


# Showing


def test_digits_are_shown_as_they_are(tmp_path, capsys):
    file = tmp_path / "digits.png"
    assert main(["show", "digits", str(file), "--examples=3", "--epochs=2"]) == 0
    found = data.load("digits").train
    numbers = found.order(1234, 0)[:3]
    assert said(capsys)[0] == [f"{n}\tlabel {found.labels[n]}" for n in numbers]
    picture = np.asarray(Image.open(file)).astype(int)
    assert picture.shape == (3 * (TILE + GAP) - GAP, 2 * (TILE + GAP) - GAP, 3)
    for row, number in enumerate(numbers):
        for column in range(2):
            top, left = row * (TILE + GAP), column * (TILE + GAP)
            tile = picture[top : top + TILE, left : left + TILE]
            wanted = np.rint((found.images[number] + 1) * 127.5)
            assert np.array_equal(tile, np.kron(wanted, np.ones((8, 8, 3))))
    assert (picture[TILE : TILE + GAP] == 255).all()
    assert (picture[:, TILE : TILE + GAP] == 255).all()


def test_each_column_is_an_epoch(photos, tmp_path, capsys):
    file = tmp_path / "photos.png"
    flags = ["--examples=2", "--epochs=3", f"--data_dir={photos}"]
    assert main(["show", "folder", str(file), *flags]) == 0
    found = data.load("folder", photos)
    names = [line.split("\t")[2] for line in said(capsys)[0]]
    images = np.asarray(Image.open(file)).reshape(-1, 3 * (224 + GAP) - GAP, 3)
    for row, number in enumerate(found.train.order(1234, 0)[:2]):
        for epoch in range(3):
            inputs, labels = np.empty((1, 224, 224, 3), np.float32), np.empty(1, np.int64)
            found.train.read(np.array([number]), 1234, epoch, inputs, labels)
            top, left = row * (224 + GAP), epoch * (224 + GAP)
            tile = images[top : top + 224, left : left + 224]
            assert np.abs(tile - (inputs[0] + 1) * 127.5).max() <= 0.501
            assert found.names[labels[0]] == names[row]


def test_texts_are_said_and_need_no_picture(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 300)
    assert main(["show", "text", f"--data_dir={tmp_path}", "--examples=2"]) == 0
    lines, _ = said(capsys)
    assert len(lines) == 2 and all("quick brown fox" in line for line in lines)
    assert main(["show", "text", str(tmp_path / "text.png")]) == 2
    assert "text has texts: no picture shows them" in said(capsys)[1]


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (["digits"], 2, "digits has images: name the PNG file to show them in"),
        (["digits", "digits.jpg"], 2, "digits.jpg: the picture is a PNG file: let its name end in"),
        (["digits", "/no/such/folder/x.png"], 3, "x.png: cannot be saved: No such file"),
        (["digits", "x.png", "--data_dir=."], 2, "data set 'digits' reads no data_dir"),
        (["folder", "x.png"], 2, "data set 'folder' has to be read: give its data_dir"),
        (["imagenet", "x.png", "--data_dir=no"], 3, "no: data_dir does not exist"),
        (["imagenet", "x.png", "--resize_method=best"], 2, "resize_method must be one of bilinear"),
    ],
)
def test_what_cannot_be_shown_says_why(arguments, status, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["show", *arguments]) == status
    assert reason in said(capsys)[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["show", "mnits"], "invalid choice: 'mnits'"),
        (["show", "text", "--tf_random_seed=-1"], "expected a whole number from 0 to 2**64 - 1"),
        (["show", "digits", "--examples=0"], "expected a whole number above 0, and not '0'"),
        (["write", "a"], "the following arguments are required: target"),
        (["write", "a", "b", "--shards=3"], "unrecognized arguments: --shards=3"),
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments, reason, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert reason in said(capsys)[1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full disk")
def test_an_output_that_takes_no_more_ends_it(tmp_path):
    command = [sys.executable, "-m", "minidist.data", "show", "digits", str(tmp_path / "x.png")]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (
        1,
        "minidist.data: standard output: [Errno 28] No space left on device\n",
    )


def test_a_reader_that_leaves_ends_it_in_silence(tmp_path):
    command = [sys.executable, "-m", "minidist.data", "show", "digits", str(tmp_path / "x.png")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
