"""minidist: data-parallel training, small enough to read.

    import minidist as md

    strategy = md.Strategy(md.devices("cpu*2"), variable_update="replicated")

docs/layout.md is the tour of the code.
"""

from __future__ import annotations

from importlib import import_module as _import_module

from minidist.errors import NotBuiltError as _NotBuiltError

try:
    _import_module("minidist.kernels.rendezvous")
except ImportError as _cause:
    raise _NotBuiltError(
        "minidist's compiled parts are not there for this Python; in a clone, run "
        "'pip install -e .' (or 'make'), elsewhere 'pip install minidist'"
    ) from _cause

from minidist import data, errors, models, nn, ops, optim, random
from minidist.context import (
    device_scope as device,
)
from minidist.context import (
    get_cross_replica_context,
    get_replica_context,
    get_strategy,
    get_update_device,
    has_strategy,
    in_cross_replica_context,
    name_scope,
    variable_creator_scope,
)
from minidist.device import devices
from minidist.ops import constant
from minidist.strategy import Strategy
from minidist.tape import GradientTape
from minidist.tensor import Tensor
from minidist.values import (
    Mirrored,
    PerReplica,
    local_results,
    regroup,
    select_device_mirrored,
    select_replica,
)
from minidist.variable import Variable, VariableAggregation, VariableSynchronization

__version__ = "0.1.0"

__all__ = [
    "GradientTape",
    "Mirrored",
    "PerReplica",
    "Strategy",
    "Tensor",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "constant",
    "data",
    "device",
    "devices",
    "errors",
    "get_cross_replica_context",
    "get_replica_context",
    "get_strategy",
    "get_update_device",
    "has_strategy",
    "in_cross_replica_context",
    "local_results",
    "models",
    "name_scope",
    "nn",
    "ops",
    "optim",
    "random",
    "regroup",
    "select_device_mirrored",
    "select_replica",
    "variable_creator_scope",
]
