"""minidist: data-parallel training, small enough to read.

    import minidist as md

    strategy = md.Strategy(md.devices("cpu*2"), variable_update="replicated")

docs/layout.md is the tour of the code.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from os import environ as _environ
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# NumPy first, and from here: when it is imported from deep inside other imports, its own calls can
# come to lie at the border of two chunks of CPython's frame stack, which each of them maps anew.
import numpy as _numpy  # noqa: F401

from minidist.errors import NotBuiltError as _NotBuiltError

try:
    _import_module("minidist.kernels.rendezvous")
except ImportError as _cause:
    raise _NotBuiltError(
        "minidist's compiled parts are not there for this Python; in a clone, run "
        "'pip install -e .' (or 'make'), elsewhere 'pip install minidist'"
    ) from _cause

from minidist import errors, ops, random
from minidist.cluster.cluster import set_service as _set_service
from minidist.context import (
    default_dtype,
    get_cross_replica_context,
    get_replica_context,
    get_strategy,
    get_update_device,
    has_strategy,
    in_cross_replica_context,
    name_scope,
    set_strategy,
    variable_creator_scope,
)
from minidist.context import (
    device_scope as device,
)
from minidist.creation import VariableAggregation, VariableSynchronization
from minidist.default_strategy import install as _install_default_strategy
from minidist.device import devices
from minidist.device_map import ReplicaDeviceMap, SingleDeviceMap, WorkerDeviceMap
from minidist.increment import increment_var
from minidist.indexed_slices import IndexedSlices
from minidist.input import InputContext, shard
from minidist.moving_average import assign_moving_average
from minidist.ops import constant
from minidist.reduction import ReduceOp
from minidist.regrouping import regroup, value_container
from minidist.steps import MultiStepContext
from minidist.strategy import Strategy
from minidist.structure import leaf
from minidist.sync_on_read import SyncOnReadVariable
from minidist.tape import GradientTape
from minidist.tensor import Tensor
from minidist.values import (
    Mirrored,
    PerReplica,
    is_tensor_like,
    local_results,
    select_device_mirrored,
    select_replica,
)
from minidist.variable import AggregatingVariable, MirroredVariable, Variable

if _TYPE_CHECKING:
    from minidist import data, metrics, models, nn, optim
    from minidist.checking import check
    from minidist.checkpoint import load, save
    from minidist.cluster import Cluster, connect
    from minidist.instruments.bytes import Bytes
    from minidist.instruments.profile import Profile
    from minidist.instruments.staleness import Staleness
    from minidist.padding import Padded, pad
    from minidist.staging import StagingArea
    from minidist.summary import SummaryWriter
    from minidist.trace import trace
    from minidist.train_dir import TrainDir

_install_default_strategy()
_set_service(lambda cluster: _import_module("minidist.server").serve(cluster))

# What not every program uses is imported when it is first asked for.
_LATER = {
    "Bytes": "minidist.instruments.bytes",
    "Cluster": "minidist.cluster",
    "Padded": "minidist.padding",
    "Profile": "minidist.instruments.profile",
    "Staleness": "minidist.instruments.staleness",
    "StagingArea": "minidist.staging",
    "SummaryWriter": "minidist.summary",
    "TrainDir": "minidist.train_dir",
    "check": "minidist.checking",
    "connect": "minidist.cluster",
    "data": "minidist.data",
    "load": "minidist.checkpoint",
    "metrics": "minidist.metrics",
    "models": "minidist.models",
    "nn": "minidist.nn",
    "nvtx": "minidist.instruments.nvtx",
    "optim": "minidist.optim",
    "pad": "minidist.padding",
    "save": "minidist.checkpoint",
    "trace": "minidist.trace",
}


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module 'minidist' has no attribute {name!r}")
    module = _import_module(_LATER[name])
    value = module if module.__name__ == f"minidist.{name}" else getattr(module, name)
    globals()[name] = value
    return value


if _environ.get("NVTX_INJECTION64_PATH"):  # an NVIDIA profiler asks for ranges
    _import_module("minidist.instruments.nvtx").begin()
if _environ.get("MINIDIST_CHECK", "").strip().lower() not in ("", "0", "false", "no", "off"):
    __getattr__("check")()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "AggregatingVariable",
    "Bytes",
    "Cluster",
    "GradientTape",
    "IndexedSlices",
    "InputContext",
    "Mirrored",
    "MirroredVariable",
    "MultiStepContext",
    "Padded",
    "PerReplica",
    "Profile",
    "ReduceOp",
    "ReplicaDeviceMap",
    "SingleDeviceMap",
    "StagingArea",
    "Staleness",
    "Strategy",
    "SummaryWriter",
    "SyncOnReadVariable",
    "Tensor",
    "TrainDir",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "WorkerDeviceMap",
    "assign_moving_average",
    "check",
    "connect",
    "constant",
    "data",
    "default_dtype",
    "device",
    "devices",
    "errors",
    "get_cross_replica_context",
    "get_replica_context",
    "get_strategy",
    "get_update_device",
    "has_strategy",
    "in_cross_replica_context",
    "increment_var",
    "is_tensor_like",
    "leaf",
    "load",
    "local_results",
    "metrics",
    "models",
    "name_scope",
    "nn",
    "nvtx",
    "ops",
    "optim",
    "pad",
    "random",
    "regroup",
    "save",
    "select_device_mirrored",
    "select_replica",
    "set_strategy",
    "shard",
    "trace",
    "value_container",
    "variable_creator_scope",
]
