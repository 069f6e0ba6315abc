"""Input for replicas: batches read ahead by a thread, split, and placed on the replicas' devices.

A global batch of b examples over n replicas is split along the first axis, larger parts first: the
first b mod n replicas get one example more. A replica may get an empty part; it still runs (its
loss is 0, its gradient zero, its count 0), so that all replicas make the same meetings. Data of
input functions comes as a batch for each replica; one that is left without gets an empty one.

One batch's way: `pipelines.py` who reads, `rounds.py` who gets what, `place.py` onto the devices,
`reader.py` ahead of time, `dataset.py` to the loop that asks.
"""

from __future__ import annotations

from minidist.input.dataset import DistributedDataset, DistributedIterator, OptionalBatch
from minidist.input.pipelines import InputContext, shard, sources
from minidist.input.rounds import deal, split, split_sizes

__all__ = [
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "OptionalBatch",
    "deal",
    "shard",
    "sources",
    "split",
    "split_sizes",
]
