"""Example protos: named lists of bytes, float32 or int64, as TensorFlow keeps them in records.

These are their fields, by number (tensorflow/core/example/example.proto, feature.proto):

    Example     1 features: 1 feature (any number, each an entry of a map): 1 key, 2 value
    value       1 bytes_list | 2 float_list | 3 int64_list, each with 1 value (any number)

Numbers may stand in a field each or, as they are written today, in one field for all. Fields of
other numbers are passed over, as protobuf does. It takes the last of several where there should be
one; here they are an error.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from minidist.errors import MalformedError
from minidist.protobuf import BYTES, FOUR, VARINT, field, fields, read_varint, varint

BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3
KINDS = {BYTES_LIST: "bytes", FLOAT_LIST: "float", INT64_LIST: "int64"}

Values = list[memoryview] | NDArray[np.float32] | NDArray[np.int64]
Given = Sequence[bytes] | NDArray[np.float32] | NDArray[np.int64]


# --- reading ------------------------------------------------------------------------------------


def parse(data: bytes | memoryview, wanted: Container[str]) -> dict[str, Values]:
    """Return the features of an Example whose names are wanted, those that it has.

    Bytes are views of `data`. A feature without a value is an empty list. Takes time and memory in
    proportion to the data. Raises MalformedError where they are no Example.
    """
    found: dict[str, Values] = {}
    for entry in _messages(_one(_messages(data, "the features")), "a feature"):
        name, values = _named(entry)
        if name not in wanted:
            continue
        if name in found:
            raise MalformedError(f"feature {name!r} is there twice")
        try:
            found[name] = _values(values)
        except MalformedError as error:
            raise MalformedError(f"feature {name!r}: {error}") from None
    return found


def _messages(data: bytes | memoryview, what: str) -> Iterator[memoryview]:
    """Give the bytes of each field 1, and pass over others."""
    for number, kind, _, value in fields(data):
        if number == 1:
            _is(kind, BYTES, what)
            yield value


def _is(kind: int, expected: int, what: str) -> None:
    if kind != expected:
        raise MalformedError(f"{what}: kind {kind} on the wire, where {expected} was expected")


def _one(messages: Iterator[memoryview]) -> memoryview:
    found = list(messages)
    if len(found) != 1:
        raise MalformedError(f"expected features once, and they are there {len(found)} times")
    return found[0]


def _named(entry: memoryview) -> tuple[str, memoryview]:
    """Return the name and the value of a feature; in an entry of a map nothing else may be."""
    found: dict[int, memoryview] = {}
    for number, kind, _, value in fields(entry):
        if number not in (1, 2) or kind != BYTES or number in found:
            raise MalformedError("a feature is more than one name and one value")
        found[number] = value
    if len(found) < 2:
        raise MalformedError("a feature is less than a name and a value")
    try:
        return str(found[1], "utf-8"), found[2]
    except UnicodeDecodeError:
        raise MalformedError("the name of a feature is no UTF-8") from None


def _values(feature: memoryview) -> Values:
    lists = [(number, kind, value) for number, kind, _, value in fields(feature) if number in KINDS]
    if not lists:
        return []
    if len(lists) > 1:
        raise MalformedError("it has several lists of values")
    number, kind, values = lists[0]
    _is(kind, BYTES, f"its list of {KINDS[number]}")
    if number == BYTES_LIST:
        return list(_messages(values, "a value"))
    if number == FLOAT_LIST:
        return np.frombuffer(b"".join(_floats(values)), "<f4").astype(np.float32, copy=False)
    return np.array(list(_integers(values)), np.uint64).view(np.int64)


def _floats(values: memoryview) -> Iterator[memoryview]:
    for number, kind, _, value in fields(values):
        if number == 1:
            if kind != FOUR:
                _is(kind, BYTES, "a value")
            if len(value) % 4:
                raise MalformedError(f"{len(value)} bytes are no whole number of floats")
            yield value


def _integers(values: memoryview) -> Iterator[int]:
    for number, kind, integer, packed in fields(values):
        if number != 1:
            continue
        if kind == VARINT:
            yield integer
            continue
        _is(kind, BYTES, "a value")
        at = 0
        while at < len(packed):
            integer, at = read_varint(packed, at)
            yield integer


# --- writing ------------------------------------------------------------------------------------


def build(features: Mapping[str, Given]) -> bytes:
    """Return the Example with these features: bytes, float32 [n] or int64 [n] by name.

    They are sorted by name, so that the same features are the same bytes.
    """
    entries = [
        field(1, BYTES, field(1, BYTES, name.encode()) + field(2, BYTES, _feature(values)))
        for name, values in sorted(features.items())
    ]
    return field(1, BYTES, b"".join(entries))


def _feature(values: Given) -> bytes:
    if not isinstance(values, np.ndarray):
        return field(BYTES_LIST, BYTES, b"".join(field(1, BYTES, value) for value in values))
    if values.dtype == np.float32:
        number, packed = FLOAT_LIST, values.astype("<f4").tobytes()
    else:
        integers = values.astype(np.int64).view(np.uint64).tolist()
        number, packed = INT64_LIST, b"".join(map(varint, integers))
    return field(number, BYTES, field(1, BYTES, packed) if packed else b"")
