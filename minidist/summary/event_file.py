"""Summaries as an event file, which TensorBoard shows; written here, so that no package is needed.

Each event is a record of a TFRecord file, and a protobuf message; these are the fields in use, by
their numbers (tensorflow/core/util/event.proto, framework/summary.proto):

    Event      1 wall_time double, 2 step int64, 3 file_version string, 5 summary
    Summary    1 value: 1 tag string, 2 simple_value float, 5 histo
    Histogram  1 min, 2 max, 3 num, 4 sum, 5 sum_squares double, 6 bucket_limit, 7 bucket [double]
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import numpy as np

from minidist import tfrecord
from minidist.errors import DataError, MalformedError
from minidist.protobuf import BYTES, EIGHT, FOUR, VARINT, field, fields, varint
from minidist.summary.base import SummaryFile
from minidist.summary.histogram import Histogram


class EventFile(SummaryFile):
    """An event for each number and each histogram; numbers are rounded to float32 there."""

    def scalar(self, step: int, tag: str, value: float) -> None:
        with np.errstate(over="ignore"):
            rounded = np.float32(value)
        self._event(step, tag, field(2, FOUR, struct.pack("<f", rounded)))

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        numbers = (
            histogram.statistics["min"],
            histogram.statistics["max"],
            histogram.statistics["count"],
            histogram.total,
            histogram.total_squares,
        )
        message = b"".join(
            field(number, EIGHT, struct.pack("<d", value))
            for number, value in enumerate(numbers, start=1)
        )
        for number, packed in ((6, histogram.edges[1:]), (7, histogram.counts)):
            message += field(number, BYTES, struct.pack(f"<{len(packed)}d", *packed))
        self._event(step, tag, field(5, BYTES, message))

    def _event(self, step: int, tag: str, what: bytes) -> None:
        value = field(1, BYTES, tag.encode()) + what
        self._put(
            tfrecord.frame(
                field(1, EIGHT, struct.pack("<d", time.time()))
                + field(2, VARINT, varint(step % 2**64))
                + field(5, BYTES, field(1, BYTES, value))
            )
        )

    def _kept(self, old: bytes, resume_from: int | None) -> bytes:
        if not old:
            now = field(1, EIGHT, struct.pack("<d", time.time()))
            return tfrecord.frame(now + field(3, BYTES, b"brain.Event:2"))
        begin, kept = 0, []
        try:
            for record in _records(old):
                if resume_from is None or _step(tfrecord.data(record)) <= resume_from:
                    kept.append(record)
                begin += len(record)
        except MalformedError as error:
            raise DataError(
                f"{self.path}: is no event file, or damaged at byte {begin}: {error}"
            ) from error
        return b"".join(kept)


def _records(data: bytes) -> Iterator[memoryview]:
    """Give each whole record; what follows the last one is left out."""
    rest = memoryview(data)
    while len(rest) >= tfrecord.HEADER:
        size = tfrecord.HEADER + tfrecord.length(rest[: tfrecord.HEADER]) + tfrecord.FOOTER
        if size > len(rest):
            return
        yield rest[:size]
        rest = rest[size:]


def _step(event: memoryview) -> int:
    """Return an event's step; where none is written it is 0."""
    for number, kind, value, _ in fields(event):
        if number == 2 and kind == VARINT:
            return value - 2**64 if value >= 2**63 else value
    return 0
