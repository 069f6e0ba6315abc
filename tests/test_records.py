"""TFRecord files: checksums, shards and their order; whatever is wrong in one is found."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import tfrecord
from minidist.data import example, records
from minidist.data.records import Records
from minidist.data.shard import Shard
from minidist.errors import DataError, ImageError, MalformedError
from minidist.kernels import plain
from minidist.kernels.checksum import crc32c
from minidist.tensor_file import open_to_read

# What TensorFlow 2.21's TFRecordWriter makes of DATA.
DATA = [b"", b"one", bytes(range(40))]
BY_TENSORFLOW = bytes.fromhex(
    "000000000000000029039807d8ea82a2"
    "0300000000000000b099490e6f6e6501405508"
    "2800000000000000ff70164a000102030405060708090a0b0c0d0e0f10111213"
    "1415161718191a1b1c1d1e1f202122232425262775118983"
)


def image_record(image, label):
    """Return a record as ImageNet's files have it, but for a text in place of the image."""
    return tfrecord.frame(
        example.build({"image/encoded": [image], "image/class/label": np.array([label])})
    )


def write(path, content):
    path.write_bytes(content)
    return path


def content(shard):
    """Return the data of all records of a shard."""
    with open_to_read(shard.path) as file:
        return [bytes(shard.read(number, file)) for number in range(len(shard))]


# Checksums


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize(
    ("data", "checksum"),
    [  # RFC 3720, B.4, and the check value of the catalogues
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_checksums_are_those_of_the_standard(data, checksum, tables):
    assert crc32c(data, tables=tables) == checksum == plain.crc32c(data)


@given(st.binary(max_size=100), st.integers(0, 7))
def test_every_way_to_a_checksum_is_the_same(data, skipped):
    data = memoryview(data)[skipped:]  # at any address
    assert crc32c(data) == crc32c(data, tables=True) == plain.crc32c(data)


def test_a_checksum_of_many_bytes_is_taken_without_the_gil():
    data = np.random.default_rng(0).integers(0, 256, 2**20, dtype=np.uint8)
    assert crc32c(data) == crc32c(data, tables=True)


@pytest.mark.parametrize("wrong", [np.zeros(4, np.int32), np.zeros((2, 2), np.uint8), "text", None])
def test_a_checksum_is_one_of_bytes(wrong):
    with pytest.raises((TypeError, ValueError)):
        crc32c(wrong)


# Records


def test_what_tensorflow_writes_is_read_and_the_other_way_round(tmp_path):
    shard = Shard(write(tmp_path / "shard", BY_TENSORFLOW))
    assert shard.damage is None
    assert shard.offsets.tolist() == [0, 16, 35, 91]
    assert content(shard) == DATA
    assert b"".join(map(tfrecord.frame, DATA)) == BY_TENSORFLOW


def test_a_file_without_a_byte_has_no_record(tmp_path):
    shard = Shard(write(tmp_path / "shard", b""))
    assert (len(shard), shard.damage) == (0, None)


@pytest.mark.parametrize("end", range(len(BY_TENSORFLOW)))
def test_a_file_that_ends_too_early_is_damaged_there(end, tmp_path):
    shard = Shard(write(tmp_path / "shard", BY_TENSORFLOW[:end]))
    whole = sum(end >= offset for offset in (16, 35))
    assert content(shard) == DATA[:whole]
    assert (shard.damage is None) == (end in (0, 16, 35))
    if shard.damage:
        assert f"byte {[0, 16, 35][whole]}: record {whole}: the file ends in it" in str(
            shard.error(len(shard), shard.damage)
        )


def test_a_file_that_changes_is_found_out(tmp_path):
    path = write(tmp_path / "shard", BY_TENSORFLOW)
    shard = Shard(path)
    path.write_bytes(BY_TENSORFLOW[:40])
    with pytest.raises(DataError, match="the file ends here and did not when its records were"):
        content(shard)
    path.write_bytes(tfrecord.frame(b"other") + BY_TENSORFLOW)
    with pytest.raises(MalformedError, match="one of 5 bytes, which it was not before"):
        content(shard)


def test_records_that_no_memory_could_hold_are_refused(tmp_path):
    length = (2**62).to_bytes(8, "little")
    header = length + tfrecord.masked(length).to_bytes(4, "little")
    shard = Shard(write(tmp_path / "shard", header + bytes(100)))
    assert shard.damage == f"it has {2**62} bytes, and no record above {2**30} is read"


def test_a_compressed_file_says_so(tmp_path):
    import gzip

    shard = Shard(write(tmp_path / "shard", gzip.compress(BY_TENSORFLOW)))
    assert shard.damage == "the file is compressed: unpack it with gunzip"


def mutations(data, count):
    """Give so many other files: bytes changed, left out, put in, or the end cut off."""
    draw = random.Random(2)
    while count:
        mutated = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(max(1, len(mutated)))
            match draw.randrange(4):
                case 0:
                    mutated[place : place + 1] = draw.randbytes(1)
                case 1:
                    del mutated[place : place + draw.randint(1, 20)]
                case 2:
                    mutated[place:place] = draw.randbytes(draw.randint(1, 20))
                case 3:
                    del mutated[place:]
        if mutated != data:
            count -= 1
            yield bytes(mutated)


def test_no_mutated_file_is_taken_for_another_one(tmp_path):
    """What is read of it was written: anything else is an error with the file, byte and reason."""
    found = 0
    for name, data in enumerate(mutations(BY_TENSORFLOW, 2000)):
        shard, read = Shard(write(tmp_path / f"{name}", data)), []
        with open_to_read(shard.path) as file:
            for number in range(len(shard)):
                try:
                    read.append(bytes(shard.read(number, file)))
                except MalformedError:
                    read.append(None)
        assert all(data is None or data in DATA for data in read)
        if shard.damage is None and None not in read:  # whole records were left out
            assert data == b"".join(map(tfrecord.frame, read))
        found += shard.damage is not None or None in read
    assert found > 1900


# All files of a part


def part(folder, sizes):
    """Write files of so many records each, whose labels count on through all of them."""
    numbers = iter(range(sum(sizes)))
    return [
        write(
            folder / f"{file}",
            b"".join(image_record(b"%d" % n, n) for n in islice(numbers, size)),
        )
        for file, size in enumerate(sizes)
    ]


def test_records_are_numbered_file_after_file(tmp_path):
    found = Records(part(tmp_path, [2, 0, 3, 1]), classes=6, skip_bad_records=False)
    assert len(found) == 6
    assert [(bytes(image), label) for image, label in map(found.load, range(6))] == [
        (b"%d" % n, n) for n in range(6)
    ]
    assert [found.fellows(n) for n in range(6)] == [
        *[range(2)] * 2,
        *[range(2, 5)] * 3,
        range(5, 6),
    ]
    byte = 2 * len(image_record(b"2", 2))
    assert str(found.error(4, ImageError(0, "why"))).endswith(f"/2: byte {byte}: record 2: why")


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ({"image/class/label": np.array([1])}, "one text of bytes as 'image/encoded'"),
        ({"image/encoded": [b"x"]}, "one whole number as 'image/class/label'"),
        ({"image/encoded": [b"x", b"y"], "image/class/label": np.array([1])}, "one text of bytes"),
        ({"image/encoded": np.array([1]), "image/class/label": np.array([1])}, "one text of bytes"),
        ({"image/encoded": [b"x"], "image/class/label": [b"1"]}, "one whole number"),
        ({"image/encoded": [b"x"], "image/class/label": np.array([1, 2])}, "one whole number"),
        ({"image/encoded": [b"x"], "image/class/label": np.float32([1])}, "one whole number"),
        ({"image/encoded": [b"x"], "image/class/label": np.array([-1])}, "0 to 9, but found -1"),
        ({"image/encoded": [b"x"], "image/class/label": np.array([10])}, "0 to 9, but found 10"),
    ],
)
def test_examples_that_are_no_images_are_refused(features, reason, tmp_path):
    path = write(tmp_path / "shard", tfrecord.frame(example.build(features)))
    with pytest.raises(ImageError, match=reason):
        Records([path], classes=10, skip_bad_records=False).load(0)


def test_files_without_a_record_are_no_data(tmp_path):
    with pytest.raises(DataError, match=r"shard: there is no record in it, nor in any other"):
        Records([write(tmp_path / "shard", b"")], classes=10, skip_bad_records=False)
    with pytest.raises(DataError, match=r"other: there is no such file"):
        Records([tmp_path / "other"], classes=10, skip_bad_records=False)


def test_a_file_that_is_cut_off_is_an_error_or_read_up_to_there(tmp_path):
    paths = part(tmp_path, [2, 2])
    size = len(image_record(b"0", 0))
    paths[0].write_bytes(paths[0].read_bytes()[: size + 5])
    with pytest.raises(DataError, match=rf"0: byte {size}: record 1: the file ends in its header"):
        Records(paths, classes=4, skip_bad_records=False)
    found = Records(paths, classes=4, skip_bad_records=True)
    assert (len(found), found.cut_off) == (3, 1)
    assert [found.load(n)[1] for n in range(3)] == [0, 2, 3]


# The order of an epoch


def turns(sizes, files, cycle):
    """Return the numbers as the files, dealt to lanes, have their turns: plain loops."""
    begins = [sum(sizes[:file]) for file in range(len(sizes))]
    lanes = [
        [begins[file] + n for file in files[lane::cycle] for n in range(sizes[file])]
        for lane in range(cycle)
    ]
    order = []
    while any(lanes):
        order += [lane.pop(0) for lane in lanes if lane]
    return order


def test_files_are_gone_through_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "WINDOW", 1)
    monkeypatch.setattr(records, "CYCLE", 3)
    sizes = [4, 1, 0, 7, 3, 2, 5]
    found = Records(part(tmp_path, sizes), classes=100, skip_bad_records=False)
    for epoch in range(5):
        key = np.array([9, epoch], np.uint64)
        files = np.random.Generator(np.random.Philox(key=key)).permutation(len(sizes))
        assert found.order(9, epoch).tolist() == turns(sizes, files, 3)


def test_an_epoch_has_each_number_once_shuffled_in_windows(tmp_path, monkeypatch):
    found = Records(part(tmp_path, [50, 60, 70]), classes=200, skip_bad_records=False)
    orders = [found.order(seed, epoch).tolist() for seed, epoch in [(1, 0), (1, 1), (2, 0)]]
    assert all(sorted(order) == list(range(180)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert found.order(1, 1).tolist() == orders[1]
    monkeypatch.setattr(records, "WINDOW", 20)
    small = found.order(1, 0)
    monkeypatch.setattr(records, "WINDOW", 1)
    apart = found.order(1, 0)
    for begin in range(0, 180, 20):
        window = slice(begin, begin + 20)
        assert sorted(small[window]) == sorted(apart[window])
        assert small[window].tolist() != apart[window].tolist()


def test_no_more_files_are_kept_open_than_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "OPEN", 2)
    found = Records(part(tmp_path, [1] * 9), classes=9, skip_bad_records=False)
    opened = lambda: sum(  # noqa: E731
        str(tmp_path) in str(link.resolve()) for link in Path("/proc/self/fd").iterdir()
    )
    for number in range(9):
        assert found.load(number)[1] == number
        assert opened() <= 2
    del found
    assert opened() == 0
