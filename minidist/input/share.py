"""Share: which replicas are this process's own, and so which part of the data.

Replicas are numbered through all workers, and everything about input follows from that: worker w
with L of n replicas reads the rows of a global batch that are its own replicas', or makes pipeline
w of those that an input function describes. No worker needs to hear from another for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from minidist.cluster.site import Site


@dataclass(frozen=True, slots=True)
class Share:
    """The replicas `first`, first + 1, … of `replicas`, `count` in all, on worker number `worker`.

    workers: how many workers there are.
    """

    count: int
    first: int
    replicas: int
    worker: int = 0
    workers: int = 1

    @classmethod
    def whole(cls, replicas: int) -> Share:
        """Return that of the only worker."""
        return cls(replicas, 0, replicas)

    @classmethod
    def of(cls, site: Site) -> Share:
        """Return that of this process, of all workers of a strategy, whether in step or not."""
        everywhere = site.everywhere
        first = site.first_everywhere
        return cls(len(site.devices), first, sum(everywhere), site.files.me, len(everywhere))

    def ends(self, examples: int) -> list[int]:
        """Return where the parts of a global batch begin and end, own part by own part.

        That is one number more than there are own replicas; the last is where the last part ends.
        """
        sizes = split_sizes(examples, self.replicas)
        begin = sum(sizes[: self.first])
        return list(accumulate(sizes[self.first : self.first + self.count], initial=begin))

    def rows(self, examples: int) -> slice:
        """Return which rows of a global batch are this process's."""
        ends = self.ends(examples)
        return slice(ends[0], ends[-1])


def split_sizes(examples: int, replicas: int) -> list[int]:
    """Return how many of a global batch's examples each replica gets, larger parts first."""
    share, more = divmod(examples, replicas)
    return [share + (replica < more) for replica in range(replicas)]
