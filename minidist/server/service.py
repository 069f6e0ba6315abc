"""Service: one thread of a ps, to which the calls of all workers come.

Calls of different workers arrive at the same time and are done one after the other, each by as many
threads as there are cores. Where nothing arrives it sleeps.
"""

from __future__ import annotations

import logging

from minidist.cluster import Cluster
from minidist.cluster.calls import CLOSE, OPEN, Desk, Letter
from minidist.errors import UsageError
from minidist.server.shelf import Shelf

log = logging.getLogger("minidist")

TICK = 0.2  # seconds between two looks at signals and at calls that have waited for long


def serve(cluster: Cluster) -> None:
    """Hold variables for the workers of a cluster until all of them have left it.

    Raises UsageError in a process that is no ps of the cluster.
    """
    if cluster.rank not in cluster.servers:
        raise UsageError(
            f"{cluster.me} is no ps, so it cannot serve; the ps of {cluster!r} are "
            f"{', '.join(map(cluster.name, cluster.servers)) or 'none'}"
        )
    desk = Desk(cluster)
    shelves: dict[int, Shelf] = {}  # by the channel of their strategies
    while there := desk.workers:
        due = min([shelf.due for shelf in shelves.values()], default=TICK)
        for letter in desk.letters(min(TICK, due)):
            try:
                _take(letter, cluster, desk, shelves)
            except Exception as failure:  # it is the worker's, which asked for it
                log.exception("%s could not do what worker:%d asked", cluster.me, letter.worker)
                letter.refuse(failure)
        left = set(there).difference(desk.workers)
        for shelf in shelves.values():
            for worker in left:
                shelf.leave(worker)
            shelf.expire()


def _take(letter: Letter, cluster: Cluster, desk: Desk, shelves: dict[int, Shelf]) -> None:
    channel = letter.head.strategy
    shelf = shelves.get(channel)
    if shelf is None:
        if letter.head.what != OPEN:
            raise UsageError(f"{cluster.me} holds nothing of this strategy any more: it was closed")
        shelf = shelves[channel] = Shelf(cluster, desk, letter.said)
    if letter.head.what == CLOSE:
        letter.answer()
        shelf.leave(letter.worker)
        if shelf.forgotten:
            del shelves[channel]
    else:
        shelf.take(letter)
