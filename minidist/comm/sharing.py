"""Sharing: what every rank brings is handed to all of them, in the order of the ranks.

For values, which are few and small: nothing is summed on the way, so that all ranks can do the
same arithmetic in the same order, and come to the same bits.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from minidist import observe
from minidist.comm.peers import Peers
from minidist.dtypes import HostArray, as_dtype
from minidist.errors import MergeMismatchError

INSIDE = 4096  # bytes that travel with a meeting's words; more of them have messages of their own
HEAD = struct.Struct("<II?")  # bytes that are brought, bytes of outlines, arrays follow inside
DIGEST = 8  # bytes


def agree(peers: Peers, what: str, details: Sequence[str], brought: bytes = b"") -> list[bytes]:
    """Meet, see to it that all bring the same details, and return what else each has brought.

    what: as for `meet`. Raises MergeMismatchError naming the first detail that differs, and what
    `meet` raises.
    """
    if peers.count == 1:
        return [brought]
    digest = hashlib.blake2b("\0".join(details).encode(), digest_size=DIGEST).digest()
    met = peers.meet(what, digest + brought)
    if any(each[:DIGEST] != digest for each in met):
        every = peers.meet(f"{what}, which they mean otherwise", json.dumps(details).encode())
        difference = _difference(peers, [json.loads(each) for each in every])
        raise MergeMismatchError(f"the ranks {what}, but differ: {difference}")
    return [each[DIGEST:] for each in met]


def _difference(peers: Peers, every: Sequence[Sequence[str]]) -> str:
    """Say in which detail the ranks differ first."""
    for i in range(max(map(len, every))):
        by_detail: dict[str, list[str]] = {}
        for name, details in zip(peers.names, every, strict=True):
            by_detail.setdefault(details[i] if i < len(details) else "nothing", []).append(name)
        if len(by_detail) > 1:
            return "; ".join(f"{', '.join(names)}: {detail}" for detail, names in by_detail.items())
    return "in what, they cannot say"


def share(
    peers: Peers,
    what: str,
    arrays: Sequence[HostArray],
    *,
    brought: bytes = b"",
    kind: str = "values",
) -> tuple[list[bytes], list[list[HostArray]]]:
    """Return what each peer has brought: some bytes, and arrays of any shapes and dtypes.

    what: as for `meet`. kind: what the arrays are counted as; see observe.Observer.moved.
    """
    own = [np.asarray(array, order="C") for array in arrays]  # which leaves a scalar one
    if peers.count == 1:
        return [brought], [own]
    nbytes = sum(array.nbytes for array in own)
    inside = nbytes <= INSIDE
    outlines = json.dumps([[str(array.dtype), array.shape] for array in own]).encode()
    head = HEAD.pack(len(brought), len(outlines), inside)
    follow = [array.tobytes() for array in own] if inside else []
    met = peers.meet(what, b"".join([head, brought, outlines, *follow]))
    others = [peer for peer in range(peers.count) if peer != peers.me]
    if observe.counting:
        for peer in others:
            observe.moved(peers.names[peers.me], peers.names[peer], nbytes, kind)
    words: list[bytes] = []
    theirs: list[list[HostArray]] = []
    pendings = []
    for peer, message in enumerate(met):
        first, second, theirs_inside = HEAD.unpack_from(message)
        start = HEAD.size + first
        words.append(message[HEAD.size : start])
        if peer == peers.me:
            theirs.append(own)
            continue
        here = list(_empty(message[start : start + second]))
        theirs.append(here)
        start += second
        for array in filter(np.size, here):
            if theirs_inside:
                flat = np.frombuffer(message[start : start + array.nbytes], array.dtype)
                array[...] = flat.reshape(array.shape)
                start += array.nbytes
            else:
                pendings.append((peer, peers.receive(peer, array)))
    if not inside:
        pendings += [(to, peers.send(to, array)) for array in filter(np.size, own) for to in others]
    peers.wait(pendings, what)
    return words, theirs


def of_first(peers: Peers, what: str, array: HostArray) -> HostArray:
    """Return the array that the first peer has brought; `what` as for `meet`."""
    _, every = share(peers, what, [array] if peers.me == 0 else [])
    return every[0][0]


def _empty(outlines: bytes) -> Iterator[HostArray]:
    """Return arrays of some outlines, with nothing in them yet."""
    for dtype, shape in json.loads(outlines):
        yield np.empty(shape, as_dtype(dtype))
