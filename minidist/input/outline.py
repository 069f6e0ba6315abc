"""Outline: what a batch looks like, in words that another process can make an empty one from."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from minidist.dtypes import as_dtype
from minidist.values import PerReplica


def outline(batch: Any) -> str:
    """Return what a batch looks like as JSON; "" where it has parts that JSON has no names for.

    It may consist of lists, tuples, dicts with texts as keys, None and arrays.
    """
    try:
        return json.dumps(_said(batch))
    except TypeError:
        return ""


def _said(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, PerReplica):
        array = value.values[0].array
        return [str(array.dtype), *array.shape]
    if type(value) in (list, tuple):
        return {"kind": type(value).__name__, "parts": [_said(part) for part in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"kind": "dict", "parts": {key: _said(part) for key, part in value.items()}}
    raise TypeError(f"{type(value).__name__} has no name in JSON")


def empty(text: str, replicas: int) -> Any:
    """Return the batch of an outline for so many replicas, in the host's memory and empty."""

    def made(said: Any) -> Any:
        if said is None:
            return None
        if isinstance(said, list):
            dtype, *whole = said
            shape = (0, *whole[1:]) if whole else ()
            return PerReplica(None, [np.zeros(shape, as_dtype(dtype)) for _ in range(replicas)])
        parts = said["parts"]
        if said["kind"] == "dict":
            return {key: made(part) for key, part in parts.items()}
        return {"list": list, "tuple": tuple}[said["kind"]](map(made, parts))

    return made(json.loads(text))
