"""TFRecord, the frame around each record of a file: its length, and checksums of both.

    uint64 length · uint32 checksum of the length · the data · uint32 checksum of the data

All are little-endian; a file is such records one behind the other, and nothing else. A checksum is
a CRC-32C, rotated and shifted so that a record may hold records
(tensorflow/core/lib/io/record_writer.h, tsl/lib/hash/crc32c.h).
"""

from __future__ import annotations

import struct

from minidist.errors import MalformedError
from minidist.kernels.checksum import crc32c

HEADER, FOOTER = 12, 4  # bytes before and behind the data
_HEADER, _FOOTER = struct.Struct("<QI"), struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def frame(data: bytes) -> bytes:
    """Return the record of these data."""
    length = len(data)
    header = _HEADER.pack(length, masked(_LENGTH.pack(length)))
    return b"".join((header, data, _FOOTER.pack(masked(data))))


def length(header: bytes | memoryview) -> int:
    """Return the length of the data behind a header of 12 bytes.

    The number has been checked, but not whether the file goes on that far.
    """
    size, checksum = _HEADER.unpack(header)
    if masked(header[:8]) != checksum:
        raise MalformedError("the length of a record is damaged: its checksum is another one")
    return int(size)


def data(record: bytes | memoryview) -> memoryview:
    """Return the data in a whole record, without a copy. Raises MalformedError if it is damaged."""
    whole = memoryview(record)
    size = length(whole[:HEADER])
    if len(whole) != HEADER + size + FOOTER:
        raise MalformedError(f"the record is one of {size} bytes, which it was not before")
    inside = whole[HEADER : HEADER + size]
    if masked(inside) != _FOOTER.unpack_from(whole, HEADER + size)[0]:
        raise MalformedError("the data of the record are damaged: their checksum is another one")
    return inside


def masked(data: bytes | memoryview) -> int:
    """Return the checksum that TFRecord has of bytes."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
