"""Example protos: against bytes that TensorFlow has written, and what is no Example is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.data import example
from minidist.errors import MalformedError
from minidist.protobuf import BYTES, EIGHT, FOUR, VARINT, field, fields, read_varint, varint

# tf.train.Example(...).SerializeToString(deterministic=True) of FEATURES, by TensorFlow 2.21.
FEATURES = {
    "image/encoded": [b"\xff\xd8jpeg"],
    "image/class/label": np.array([615]),
    "image/object/bbox/xmin": np.array([0.25, 0.5], np.float32),
    "image/class/text": ["knee pad ü".encode(), b""],
    "none": np.array([], np.int64),
    "nothing": [],
    "negative": np.array([-1, 0, 2**63 - 1]),
}
BY_TENSORFLOW = bytes.fromhex(
    "0aca010a1b0a11696d6167652f636c6173732f6c6162656c12061a040a02e7040a250a10696d6167652f636c6173732f"
    "7465787412110a0f0a0b6b6e65652070616420c3bc0a000a1b0a0d696d6167652f656e636f646564120a0a080a06ffd8"
    "6a7065670a260a16696d6167652f6f626a6563742f62626f782f786d696e120c120a0a080000803e0000003f0a240a08"
    "6e6567617469766512181a160a14ffffffffffffffffff0100ffffffffffffffff7f0a0a0a046e6f6e6512021a000a0d"
    "0a076e6f7468696e6712020a00"
)


def plain(features):
    """Return features as lists of Python's own values."""
    return {
        name: values.tolist() if isinstance(values, np.ndarray) else [bytes(v) for v in values]
        for name, values in features.items()
    }


def entry(name, feature):
    """Return an Example with one feature, given in bytes."""
    return field(1, BYTES, field(1, BYTES, field(1, BYTES, name) + field(2, BYTES, feature)))


def test_what_tensorflow_writes_is_read():
    found = example.parse(BY_TENSORFLOW, FEATURES)
    assert plain(found) == plain(FEATURES)
    assert found["image/object/bbox/xmin"].dtype == np.float32
    assert found["negative"].dtype == np.int64


def test_what_is_written_is_what_tensorflow_writes():
    assert example.build(FEATURES) == BY_TENSORFLOW


def test_only_what_is_wanted_is_read_and_bytes_are_not_copied():
    found = example.parse(BY_TENSORFLOW, {"image/encoded", "no such name"})
    assert list(found) == ["image/encoded"]
    assert found["image/encoded"][0].obj is BY_TENSORFLOW


values = st.one_of(
    st.lists(st.binary(max_size=40)),
    st.lists(st.floats(width=32, allow_nan=False)).map(lambda v: np.array(v, np.float32)),
    st.lists(st.integers(-(2**63), 2**63 - 1)).map(lambda v: np.array(v, np.int64)),
)


@given(st.dictionaries(st.text(max_size=10), values, max_size=6))
def test_what_is_written_is_read_again(features):
    assert plain(example.parse(example.build(features), features)) == plain(features)


def test_numbers_may_stand_in_a_field_each():
    integers = b"".join(field(1, VARINT, varint(n)) for n in (7, 300)) + field(
        1, BYTES, b"\x01\x02"
    )
    floats = field(1, FOUR, np.float32(0.5).tobytes()) + field(1, BYTES, np.float32(2).tobytes())
    assert plain(example.parse(entry(b"n", field(3, BYTES, integers)), "n")) == {
        "n": [7, 300, 1, 2]
    }
    assert plain(example.parse(entry(b"x", field(2, BYTES, floats)), "x")) == {"x": [0.5, 2]}


def test_fields_that_are_not_known_are_passed_over():
    beside = field(9, EIGHT, bytes(8)) + field(7, VARINT, b"\x05")
    feature = beside + field(3, BYTES, beside + field(1, BYTES, b"\x04"))
    assert plain(example.parse(beside + entry(b"n", feature) + beside, "n")) == {"n": [4]}


ONE = field(3, BYTES, field(1, BYTES, b"\x04"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x0a", "byte 1: the message ends in a number"),
        (b"\x0a\x05abcd", "byte 0: the message ends in field 1, of 5 bytes"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "in field 1, of 18446744073709551615"),
        (b"\x0a" + b"\xff" * 11, "byte 1: a number is longer than 64 bits"),
        (b"\x0a" + b"\xff" * 9 + b"\x02", "byte 1: a number is longer than 64 bits"),
        (b"\x00\x00", "byte 0: no field has the number 0"),
        (b"\x0b\x0c", "byte 0: a field is of kind 3, which is not in use"),
        (b"\x0f", "byte 0: a field is of kind 7"),
        (field(1, VARINT, b"\x05"), "the features: kind 0 on the wire, where 2 was expected"),
        (entry(b"n", ONE) * 2, "expected features once, and they are there 2 times"),
        (field(1, BYTES, field(1, VARINT, b"\x05")), "a feature: kind 0"),
        (b"", "expected features once, and they are there 0 times"),
        (field(1, BYTES, field(1, BYTES, field(2, BYTES, ONE))), "less than a name and a value"),
        (field(1, BYTES, field(1, BYTES, field(1, BYTES, b"n"))), "less than a name and a value"),
        (field(1, BYTES, field(1, BYTES, field(1, BYTES, b"n") * 2)), "more than one name and one"),
        (field(1, BYTES, field(1, BYTES, field(3, BYTES, b"n"))), "more than one name and one"),
        (entry(b"\xff", ONE), "the name of a feature is no UTF-8"),
        (field(1, BYTES, entry(b"n", ONE)[2:] * 2), "feature 'n' is there twice"),
        (entry(b"n", ONE * 2), "feature 'n': it has several lists of values"),
        (entry(b"n", ONE + field(1, BYTES, b"")), "feature 'n': it has several lists of values"),
        (entry(b"n", field(3, VARINT, b"\x04")), "feature 'n': its list of int64: kind 0"),
        (entry(b"n", field(3, BYTES, field(1, FOUR, bytes(4)))), "feature 'n': a value: kind 5"),
        (entry(b"n", field(3, BYTES, field(1, BYTES, b"\x80"))), "the message ends in a number"),
        (entry(b"n", field(2, BYTES, field(1, BYTES, bytes(7)))), "7 bytes are no whole number of"),
        (entry(b"n", field(2, BYTES, field(1, VARINT, b"\x04"))), "feature 'n': a value: kind 0"),
        (entry(b"n", field(1, BYTES, field(1, VARINT, b"\x04"))), "feature 'n': a value: kind 0"),
    ],
)  # fmt: skip
def test_what_is_no_example_is_refused(data, reason):
    with pytest.raises(MalformedError) as caught:
        example.parse(data, "n")
    assert reason in str(caught.value)


def test_mutated_examples_are_read_or_refused():
    """There is no checksum here, so some mean something else; none may fail in another way."""
    draw, refused = random.Random(1), 0
    for _ in range(3000):
        data = bytearray(BY_TENSORFLOW)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data))
            match draw.randrange(3):
                case 0:
                    data[place] = draw.randrange(256)
                case 1:
                    del data[place : place + draw.randint(1, 9)]
                case 2:
                    data[place:place] = draw.randbytes(draw.randint(1, 9))
        try:
            found = example.parse(bytes(data), FEATURES)
        except MalformedError:
            refused += 1
        else:
            assert set(found) <= set(FEATURES)
    assert refused > 2000


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3), st.binary(max_size=3))
def test_varints_are_read_where_they_are(value, before, behind):
    end = len(before) + len(varint(value))
    assert read_varint(before + varint(value) + behind, len(before)) == (value, end)


def test_fields_are_what_was_put_together():
    message = field(1, VARINT, varint(300)) + field(2, BYTES, b"abc") + field(3, EIGHT, bytes(8))
    assert [(n, kind, value, bytes(data)) for n, kind, value, data in fields(message)] == [
        (1, VARINT, 300, b""),
        (2, BYTES, 0, b"abc"),
        (3, EIGHT, 0, bytes(8)),
    ]
