"""Summaries as an event file, which TensorBoard shows; written here, so that no package is needed.

The format is TensorFlow's TFRecord: for each event eight bytes with its length, four with their
checksum, the event, four with its checksum. An event is a protobuf message; these are the fields
in use, by their numbers (tensorflow/core/util/event.proto, framework/summary.proto):

    Event      1 wall_time double, 2 step int64, 3 file_version string, 5 summary
    Summary    1 value: 1 tag string, 2 simple_value float, 5 histo
    Histogram  1 min, 2 max, 3 num, 4 sum, 5 sum_squares double, 6 bucket_limit, 7 bucket [double]
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import numpy as np

from minidist.errors import DataError
from minidist.summary.base import SummaryFile
from minidist.summary.histogram import Histogram

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # protobuf's wire types


class EventFile(SummaryFile):
    """An event for each number and each histogram; numbers are rounded to float32 there."""

    def scalar(self, step: int, tag: str, value: float) -> None:
        with np.errstate(over="ignore"):
            rounded = np.float32(value)
        self._event(step, tag, _field(2, FLOAT, struct.pack("<f", rounded)))

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        numbers = (
            histogram.statistics["min"],
            histogram.statistics["max"],
            histogram.statistics["count"],
            histogram.total,
            histogram.total_squares,
        )
        message = b"".join(
            _field(number, DOUBLE, struct.pack("<d", value))
            for number, value in enumerate(numbers, start=1)
        )
        for number, packed in ((6, histogram.edges[1:]), (7, histogram.counts)):
            message += _field(number, BYTES, struct.pack(f"<{len(packed)}d", *packed))
        self._event(step, tag, _field(5, BYTES, message))

    def _event(self, step: int, tag: str, what: bytes) -> None:
        value = _field(1, BYTES, tag.encode()) + what
        self._put(
            _record(
                _field(1, DOUBLE, struct.pack("<d", time.time()))
                + _field(2, VARINT, _varint(step % 2**64))
                + _field(5, BYTES, _field(1, BYTES, value))
            )
        )

    def _kept(self, old: bytes, resume_from: int | None) -> bytes:
        if not old:
            now = _field(1, DOUBLE, struct.pack("<d", time.time()))
            return _record(now + _field(3, BYTES, b"brain.Event:2"))
        kept = []
        for record, event in self._records(old):
            if resume_from is None or _step(event) <= resume_from:
                kept.append(record)
        return b"".join(kept)

    def _records(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Give each whole record and the event in it; what follows the last one is left out."""
        begin = 0
        while begin + 12 <= len(data):
            header = data[begin : begin + 8]
            end = begin + 16 + int.from_bytes(header, "little")
            if data[begin + 8 : begin + 12] != _checksum(header):
                raise DataError(f"{self.path}: is no event file, or damaged at byte {begin}")
            if end > len(data):
                return
            yield data[begin:end], data[begin + 12 : end - 4]
            begin = end


# --- TFRecord -----------------------------------------------------------------------------------


def _record(event: bytes) -> bytes:
    length = len(event).to_bytes(8, "little")
    return length + _checksum(length) + event + _checksum(event)


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_REMAINDERS = [_remainder(byte) for byte in range(256)]


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C (Castagnoli, 1993), rotated and shifted as TFRecord wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _REMAINDERS[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


# --- protobuf -----------------------------------------------------------------------------------


def _field(number: int, wire: int, value: bytes) -> bytes:
    size = _varint(len(value)) if wire == BYTES else b""
    return _varint(number << 3 | wire) + size + value


def _varint(value: int) -> bytes:
    """Return seven bits a byte, the lowest first, with bit 8 set where more follow."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def _step(event: bytes) -> int:
    """Return an event's step; where none is written it is 0."""
    at = 0
    while at < len(event):
        key, at = _read_varint(event, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _read_varint(event, at)
            if number == 2:
                return value - 2**64 if value >= 2**63 else value
        elif wire == BYTES:
            size, at = _read_varint(event, at)
            at += size
        else:
            at += 8 if wire == DOUBLE else 4
    return 0
