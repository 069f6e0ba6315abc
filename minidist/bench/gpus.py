"""Whose GPUs are whose, where several processes of a machine see the same ones."""

from __future__ import annotations

import json
import os
import socket

from minidist.comm.peers import Peers


def own_gpus(peers: Peers, count: int) -> str:
    """Return the next `count` GPUs of those that this process sees, as `md.devices` reads them.

    Peers that see the same GPUs of a machine take them one after the other; all must ask.
    """
    seen = json.dumps([socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")]).encode()
    before = peers.meet("share GPUs", seen)[: peers.me]
    first = before.count(seen) * count
    return "cuda:" + ",".join(str(first + k) for k in range(count))
