"""Ranks that are threads of one process, for what ranks do with files.

Each thread has a strategy, variables and an optimizer of its own, and meets the others as ranks do.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import minidist as md
from minidist.comm.peers import Peers
from minidist.errors import MergeMismatchError, PeerError


class Meeting:
    """Where so many threads meet. hosts: the machines that they believe to be on."""

    def __init__(self, count, hosts=None):
        self.names = tuple(f"worker:{i}" for i in range(count))
        self.hosts = tuple(hosts or ["here"] * count)
        self.changed = threading.Condition()
        self.said = {}  # by the number of a meeting
        self.failure = None


class ThreadPeers(Peers):
    """One thread's peers."""

    def __init__(self, meeting, me):
        self.meeting = meeting
        self.me = me
        self.names, self.hosts = meeting.names, meeting.hosts
        self.met = 0

    def meet(self, what, brought=b""):
        meeting = self.meeting
        self.met += 1
        with meeting.changed:
            said = meeting.said.setdefault(self.met, {})
            said[self.me] = (what, brought)
            meeting.changed.notify_all()
            whole = meeting.changed.wait_for(
                lambda: len(said) == self.count or meeting.failure is not None, 60
            )
            assert whole, f"{said} is all that came"
            if len(said) < self.count:
                raise PeerError(f"another one has failed: {meeting.failure!r}")
        if len({what for what, _ in said.values()}) > 1:
            raise MergeMismatchError(f"the ranks do different things: {said}")
        return [said[peer][1] for peer in range(self.count)]

    def fail(self, failure):
        with self.meeting.changed:
            self.meeting.failure = self.meeting.failure or failure
            self.meeting.changed.notify_all()


class ThreadCluster:
    """What one thread knows of all; each group that it makes is the next one of all threads'."""

    def __init__(self, meetings, me):
        self.meetings = meetings
        self.me = me
        self.made = 0

    def peers(self):
        peers = ThreadPeers(self.meetings[self.made], self.me)
        self.made += 1
        return peers

    def fail(self, failure):
        for meeting in self.meetings:
            ThreadPeers(meeting, self.me).fail(failure)


def as_ranks(work, count, devices="cpu", policy="replicated", hosts=None):
    """Call `work(strategy, rank)` in so many threads; return what each has returned or raised.

    The strategies are those of `count` workers in step, as far as it concerns what is saved. Their
    `site.cluster` is for a TrainDir of all.
    """
    meetings = [Meeting(count, hosts) for _ in range(8)]
    results = [None] * count

    def run(rank):
        cluster = ThreadCluster(meetings, rank)
        peers = cluster.peers()
        try:
            with md.Strategy(devices, policy) as strategy:
                counts = (len(strategy.devices),) * count
                strategy.site = replace(
                    strategy.site, cluster=cluster, peers=peers, files=peers, counts=counts
                )
                strategy.variable_mgr.site = strategy.site
                results[rank] = work(strategy, rank)
        except BaseException as failure:
            results[rank] = failure
            cluster.fail(failure)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
