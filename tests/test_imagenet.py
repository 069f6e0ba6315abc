"""ImageNet's files: which are read, what their labels mean, and what becomes of damaged records."""

from __future__ import annotations

import random
import re
from itertools import islice

import numpy as np
import pytest

pytest.importorskip("PIL")

from photos import jpeg

from minidist import data, tfrecord
from minidist.data import Batches, Settings, example
from minidist.data.imagenet import shard_name
from minidist.data.shard import Shard
from minidist.errors import DataError, UsageError

SHAPE = (16, 16, 3)
SIZES = [3, 4, 2]  # records in each file to train on


def record(number, label, image=None):
    """Return a record as the ancestor's tools write it, with more in it than is read."""
    features = {
        "image/encoded": [image or jpeg(number)],
        "image/class/label": np.array([label]),
        "image/class/text": [b"tabby cat"],
        "image/object/bbox/xmin": np.array([0.25], np.float32),
        "image/filename": [b"%d.JPEG" % number],
    }
    return tfrecord.frame(example.build(features))


@pytest.fixture
def shards(tmp_path):
    """A folder with three files to train on and one to test on; a label is the image's number."""
    numbers = iter(range(100))
    for file, size in enumerate(SIZES):
        records = [record(n, n) for n in islice(numbers, size)]
        (tmp_path / shard_name("train", file, 3)).write_bytes(b"".join(records))
    (tmp_path / shard_name("validation", 0, 1)).write_bytes(record(50, 1000) + record(51, 1))
    return tmp_path


def load(path, **settings):
    return data.load("imagenet", path, image_shape=SHAPE, settings=Settings(**settings))


def read(split, numbers=None):
    """Return inputs and labels of some examples, or of all."""
    numbers = np.arange(len(split)) if numbers is None else np.array(numbers)
    inputs = np.full((len(numbers), *split.shape), np.nan, split.dtype)
    labels = np.full(len(numbers), -1)
    split.read(numbers, 3, 1, inputs, labels)
    return inputs, labels


def test_labels_are_those_of_the_files(shards):
    found = load(shards)
    assert (found.name, found.classes, found.synthetic) == ("imagenet", 1001, False)
    assert found.names == ()
    assert read(found.train)[1].tolist() == list(range(9))
    assert read(found.test)[1].tolist() == [1000, 1]


def test_the_names_of_the_classes_say_how_many_there_are(shards):
    (shards / "labels.txt").write_text("".join(f" class {n}\n" for n in range(1, 11)))
    with pytest.raises(DataError, match=r"validation-.*: byte 0: record 0: .* 0 to 10, .* 1000"):
        read(load(shards).test)
    (shards / shard_name("validation", 0, 1)).write_bytes(record(50, 10))
    found = load(shards)
    assert found.classes == 11
    assert (found.names[0], found.names[10]) == ("background", "class 10")
    assert read(found.test)[1].tolist() == [10]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "expected the name of a class on each line, but there is none"),
        (b"a\n\nb\n", "line 2: expected the name of a class"),
        (b"a\n\xff\n", "byte 2: expected UTF-8"),
    ],
)
def test_names_that_are_none_are_refused(content, reason, shards):
    (shards / "labels.txt").write_bytes(content)
    with pytest.raises(DataError, match=f"labels.txt: {reason}"):
        load(shards)


def test_some_files_of_a_set_are_a_smaller_one(shards):
    (shards / shard_name("train", 1, 3)).unlink()
    assert read(load(shards).train)[1].tolist() == [0, 1, 2, 7, 8]


def test_a_folder_without_the_files_says_which_are_missing(shards):
    (shards / shard_name("train", 0, 5)).write_bytes(b"")
    with pytest.raises(DataError, match=r"files of several sets .*, of 00003 and of 00005 files"):
        load(shards)
    for file in shards.glob("train-*"):
        file.unlink()
    with pytest.raises(DataError, match=r"'train': .* named as train-00000-of-01024"):
        load(shards)


def test_the_number_of_classes_is_that_of_the_files(shards):
    with pytest.raises(UsageError, match="'imagenet' here is real data"):
        data.load("imagenet", shards, classes=10)


# Damaged records


def damage(shards, number):
    """Change a byte of the record's data, or, of every other one, of the image within it."""
    file = next(file for file in range(3) if number < sum(SIZES[: file + 1]))
    place = number - sum(SIZES[:file])
    shard = Shard(shards / shard_name("train", file, 3))
    begin, end = shard.offsets[place : place + 2]
    content = bytearray(shard.path.read_bytes())
    if number % 2:
        content[begin + 40] ^= 1
    else:
        content[begin:end] = record(number, number, jpeg(number)[:300])
    shard.path.write_bytes(content)
    return shard.path, begin, place


@pytest.mark.parametrize("number", [1, 4])
def test_a_damaged_record_is_an_error_that_names_it(number, shards):
    path, begin, place = damage(shards, number)
    found = load(shards).train
    with pytest.raises(
        DataError,
        match=rf"{re.escape(str(path))}: byte {begin}: record {place}: (the data|this)",
    ):
        read(found)
    others = [n for n in range(9) if n != number]
    assert read(found, others)[1].tolist() == others
    assert found.skipped == []


def test_a_damaged_record_is_replaced_by_the_next_good_one_of_its_file(shards):
    wanted, _ = read(load(shards).train)
    for number in (1, 4, 5, 6):  # of the second file only the first is left
        damage(shards, number)
    found = load(shards, skip_bad_records=True).train
    inputs, labels = read(found)
    assert labels.tolist() == [0, 2, 2, 3, 3, 3, 3, 7, 8]
    for number in (0, 2, 3, 7, 8):
        assert inputs[number].tobytes() == wanted[number].tobytes()
    assert len(found.skipped) == 4


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_is_skipped_is_the_same_for_any_number_of_workers(workers, shards):
    for number in (1, 4, 8):
        damage(shards, number)
    found = load(shards, skip_bad_records=True).train
    batches = Batches(found, 4, seed=5, epochs=2, workers=workers)
    inputs, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    numbers = np.concatenate([found.order(5, epoch) for epoch in range(2)])
    stand_in = {1: 2, 4: 5, 8: 7}
    assert labels.tolist() == [stand_in.get(number, number) for number in numbers.tolist()]
    assert len(found.skipped) == 3
    again = np.full((9, *SHAPE), np.nan, np.float32)
    found.read(numbers[9:], 5, 1, again, np.empty(9, np.int64))
    assert inputs[9:].tobytes() == again.tobytes()


def test_a_file_that_is_cut_off_counts_once(shards):
    path = shards / shard_name("train", 1, 3)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train-00001-of-00003: byte \d+: record 3: the file ends"):
        load(shards)
    found = load(shards, skip_bad_records=True).train
    assert (len(found), found.skipped) == (8, [-1])


def test_files_without_a_good_record_are_no_data(shards):
    for number in (7, 8):
        damage(shards, number)
    found = load(shards, skip_bad_records=True).train
    with pytest.raises(DataError, match=r"train-00002-of-00003: .* so is everything that could"):
        read(found)


def test_a_file_that_hides_all_its_records_is_an_error_in_any_case(shards):
    path = shards / shard_name("train", 1, 3)
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    with pytest.raises(DataError, match="train-00001-of-00003: byte 0: record 0"):
        load(shards, skip_bad_records=True)


def test_compressed_files_are_not_passed_over(shards):
    path = shards / shard_name("train", 1, 3)
    path.rename(f"{path}.gz")
    with pytest.raises(DataError, match=r"train-00001-of-00003\.gz: the file is compressed"):
        load(shards)


def test_mutated_files_are_named(shards):
    """Whatever is changed in a file is found, and the file, the byte and the reason are said."""
    draw = random.Random(6)
    path = shards / shard_name("train", 0, 3)
    whole = path.read_bytes()
    for _ in range(100):
        mutated = bytearray(whole)
        place = draw.randrange(len(mutated))
        if draw.random() < 0.5:
            mutated[place] ^= draw.randrange(1, 256)
        else:
            del mutated[place : place + draw.randint(1, 9)]
        path.unlink()
        path.write_bytes(mutated)
        with pytest.raises(DataError, match=r"train-00000-of-00003: byte \d+: record \d: .*"):
            read(load(shards).train, [0, 1, 2])
