"""Together: ranks do a thing with files, each its part, and all of them know how it went.

Where one of them fails, all raise an error of the same type, which names it: so a program that
goes on after an error goes on in all ranks, and they stay in step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from minidist import context, errors
from minidist.cluster.site import Site
from minidist.comm.peers import Patience, Peers
from minidist.errors import ContextError, MinidistError, PeerError

MOST = 4  # failures that an error tells about
SLOW = 10e6  # bytes a second: who writes or reads as slowly as that is still waited for


class Together:
    """The peers that save and load together.

    patience: how long each waits for the others, beside what they write or read meanwhile.
    """

    def __init__(self, peers: Peers, patience: Patience | None = None) -> None:
        self.peers = peers
        self.patience = patience or peers.patience

    @classmethod
    def of(cls, site: Site) -> Together:
        """Return all workers of a strategy's site. Those that are not in step wait for ever."""
        usual = site.files.patience
        in_step = site.peers.count == site.files.count
        return cls(site.files, usual if in_step else lambda: (usual()[0], math.inf))

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.peers.count == 1

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once for all."""
        return self.peers.me == 0

    def who(self, peer: int) -> str:
        """Return what a peer is called, and where it is."""
        return f"{self.peers.names[peer]} (on {self.peers.hosts[peer]})"

    def do(
        self,
        what: str,
        work: Callable[[], Any],
        *,
        undo: Callable[[], None] = lambda: None,
        nbytes: int = 0,
    ) -> list[Any]:
        """Let each peer call its `work`, and return what each has returned, in their order.

        what: in words that are the same in all peers. `work` returns what JSON can hold.
        nbytes: how much is written or read meanwhile, for which the others have patience.
        Where it has failed anywhere, `undo` is called everywhere, then all raise: minidist's own
        errors in the type of the first of them, others as PeerError, or as themselves where they
        were raised.
        """
        if not self.alone and context.has_strategy() and not context.in_cross_replica_context():
            raise ContextError(
                f"the ranks {what} together, which was called in {context.describe()}; do it "
                "outside run, or inside merge_call"
            )
        failure: Exception | None = None
        said: dict[str, Any] = {}
        try:
            said["done"] = work()
        except Exception as error:
            failure = error
            said["failed"] = [type(error).__name__, str(error) or type(error).__name__]
        except BaseException as error:
            self.peers.fail(error)
            raise
        every = [json.loads(each) for each in self._meet(what, json.dumps(said).encode(), nbytes)]
        failed = {peer: each["failed"] for peer, each in enumerate(every) if "failed" in each}
        if not failed:
            return [each["done"] for each in every]
        undo()
        self._meet(f"{what}: undo", b"", nbytes)
        if failure is not None and (self.alone or not isinstance(failure, MinidistError)):
            raise failure
        kind, _ = failed[min(failed)]
        raise _type(kind)(self._message(failed)) from failure

    def first(
        self, what: str, work: Callable[[], Any], *, undo: Callable[[], None] = lambda: None
    ) -> Any:
        """Let the first peer alone do something, and return in all what it has returned."""
        return self.do(what, work if self.is_first else lambda: None, undo=undo)[0]

    def _meet(self, what: str, brought: bytes, nbytes: int) -> list[bytes]:
        usual = self.peers.patience
        report_after, deadline = self.patience()
        self.peers.patience = lambda: (report_after, deadline + nbytes / SLOW)
        try:
            return self.peers.meet(what, brought)
        finally:
            self.peers.patience = usual

    def _message(self, failed: dict[int, tuple[str, str]]) -> str:
        """Say what went wrong and where; what is the same everywhere, once."""
        by_message: dict[str, list[str]] = {}
        for peer, (_, message) in failed.items():
            by_message.setdefault(message, []).append(self.who(peer))
        if len(by_message) == 1 and len(failed) == self.peers.count:
            return next(iter(by_message))
        lines = [f"{', '.join(who)}: {message}" for message, who in by_message.items()]
        more = f"; and {len(lines) - MOST} more" if len(lines) > MOST else ""
        return "; ".join(lines[:MOST]) + more


def _type(name: str) -> type[Exception]:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, MinidistError) else PeerError
