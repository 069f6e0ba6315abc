"""Input for replicas: batches read ahead by a thread, split, and placed on the replicas' devices.

A global batch of b examples over n replicas is split along the first axis, larger parts first: the
first b mod n replicas get one example more. A replica may get an empty part; it still runs (its
loss is 0, its gradient zero, its count 0), so that all replicas make the same meetings. Data of
input functions comes as a batch for each replica; one that is left without gets an empty one.

Several workers read apart from each other: of a global batch each takes the rows of its own
replicas, and an input function makes a pipeline of its own in each.

One batch's way: `share.py` which part is this worker's, `pipelines.py` who reads, `rounds.py` who
gets what, `place.py` onto the devices, `reader.py` ahead of time, `together.py` in step with other
workers, `dataset.py` to the loop that asks.
"""

from __future__ import annotations

from minidist.input.dataset import DistributedDataset, DistributedIterator, OptionalBatch
from minidist.input.pipelines import InputContext, shard, sources
from minidist.input.rounds import Divisible, Part, deal, own_part, split
from minidist.input.share import Share, split_sizes
from minidist.input.together import ENDS

__all__ = [
    "ENDS",
    "DistributedDataset",
    "DistributedIterator",
    "Divisible",
    "InputContext",
    "OptionalBatch",
    "Part",
    "Share",
    "deal",
    "own_part",
    "shard",
    "sources",
    "split",
    "split_sizes",
]
