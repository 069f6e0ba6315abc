"""Protocol buffers on the wire: a message is fields, each a number, a kind and a value.

A key is number · 8 + kind. The kinds in use are a varint (seven bits a byte, the lowest first, bit
8 set where more follow), eight bytes, four bytes, and bytes behind their length, which may be a
text, another message or many numbers (https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Iterator

from minidist.errors import MalformedError

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
SIZES = {EIGHT: 8, FOUR: 4}
NUMBER_LIMIT = 2**29  # field numbers are below it


def varint(value: int) -> bytes:
    """Return a whole number of 0 to 2**64 - 1 as a varint."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def field(number: int, kind: int, value: bytes) -> bytes:
    """Return a field: value is a varint, or the bytes themselves."""
    size = varint(len(value)) if kind == BYTES else b""
    return b"".join((varint(number << 3 | kind), size, value))


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the varint that begins at byte `at`, below 2**64, and where it ends.

    Raises MalformedError where the data end in it, or it does not end in time.
    """
    if at < len(data) and data[at] < 0x80:  # as most are
        return data[at], at + 1
    value = shift = 0
    for place in range(at, len(data)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, place + 1
        shift += 7
        if shift == 70:
            break
    else:
        raise MalformedError(f"byte {at}: the message ends in a number")
    raise MalformedError(f"byte {at}: a number is longer than 64 bits")


def fields(data: bytes | memoryview) -> Iterator[tuple[int, int, int, memoryview]]:
    """Give of each field of a message its number, its kind, its varint and its bytes.

    One of the latter two is what there is, the other 0 or b"". Raises MalformedError, which names
    the byte, where the data are no message: where they end in a field, at a number or kind that
    there is none of, and at groups, which nobody writes any more.
    """
    whole = memoryview(data)
    at, end = 0, len(whole)
    nothing = whole[:0]
    while at < end:
        begin = at
        key, at = read_varint(whole, at)
        number, kind = key >> 3, key & 7
        if not 0 < number < NUMBER_LIMIT:
            raise MalformedError(f"byte {begin}: no field has the number {number}")
        if kind == VARINT:
            value, at = read_varint(whole, at)
            yield number, kind, value, nothing
            continue
        if kind == BYTES:
            size, at = read_varint(whole, at)
        elif kind in SIZES:
            size = SIZES[kind]
        else:
            raise MalformedError(f"byte {begin}: a field is of kind {kind}, which is not in use")
        if size > end - at:
            raise MalformedError(
                f"byte {begin}: the message ends in field {number}, of {size} bytes"
            )
        yield number, kind, 0, whole[at : at + size]
        at += size
