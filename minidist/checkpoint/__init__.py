"""Checkpoints: a training's state in files, saved at once and loaded after a look at all of it.

The arrays are those of minidist.state. A process alone saves them as one safetensors file
(minidist.tensor_file), several ranks each a part of them as a file of its own, with an index
(`shards.py`). What is no array stands as JSON beside them: the optimizer's iterations, the
strategy's step, and where the random numbers are (`about.py`).

`saving.py` has `save`, and `by_ranks.py` its steps where there are several ranks; `loading.py` has
`load`. `training.py` says what there is, `fitting.py` whether it fits, `opened.py` reads.
`together.py` lets ranks know how a thing went, and `serving.py` is what parameter servers do.
"""

from __future__ import annotations

from minidist.checkpoint.fitting import Keys
from minidist.checkpoint.loading import load
from minidist.checkpoint.saving import save

__all__ = ["Keys", "load", "save"]
