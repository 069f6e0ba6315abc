"""Verbs: what else a worker can ask a ps to do, by name.

Each is called with the shelf of the worker's strategy and with what the worker says about it, and
returns what it is to be told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minidist.checkpoint import serving

if TYPE_CHECKING:
    from minidist.server.shelf import Shelf

Verb = Callable[["Shelf", dict[str, Any]], dict[str, Any]]

VERBS: dict[str, Verb] = {**serving.VERBS}
