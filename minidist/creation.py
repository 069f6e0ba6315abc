"""Creation: what a variable is asked to be, who is asked, and how replicas make one together.

The creator scopes are asked first, the innermost before the others, each on the thread that wants
the variable; then the strategy. In a replica that is a meeting: all replicas must ask for the same
variable, and all get the one that is made, so the order of creation never depends on timing.
"""

from __future__ import annotations

import enum
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minidist import context, dtypes
from minidist.errors import MergeMismatchError, UsageError
from minidist.structure import leaf
from minidist.tensor import Tensor
from minidist.values import local_results


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought into step."""

    NONE = "none"  # never: no strategy can keep such a variable
    AUTO = "auto"  # as the policy does it, which is on write
    ON_WRITE = "on_write"  # whoever assigns, assigns to all
    ON_READ = "on_read"  # each replica has its own; reading for all replicas aggregates them


class VariableAggregation(enum.Enum):
    """How values that differ between replicas become one."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


def create(
    initial_value: Any,
    *,
    name: str | None = None,
    dtype: Any = None,
    trainable: bool | None = None,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
    decays: bool = True,
) -> Any:
    """Return a new variable of the current strategy; see Variable."""
    if name is not None and not isinstance(name, str):
        raise UsageError(f"a variable's name is a string, not {name!r}")
    creator: Callable[..., Any] = _for_all
    for scope in context.frame().creators:
        creator = _Asks(scope, creator)
    return creator(
        initial_value=initial_value,
        name=context.frame().name_scope + (name or "Variable"),
        dtype=dtype,
        trainable=trainable,
        synchronization=synchronization,
        aggregation=aggregation,
        decays=decays,
    )


class _Asks:
    """A creator scope that knows whom to ask next."""

    def __init__(self, scope: Callable[..., Any], following: Callable[..., Any]) -> None:
        self.scope, self.following = scope, following

    def __call__(self, **kwargs: Any) -> Any:
        return self.scope(self.following, **kwargs)


def _for_all(initial_value: Any, **options: Any) -> Any:
    """Make the variable in cross-replica context; in a replica, meet the others there first."""
    options = _settled(**options)
    initial = initial_value if callable(initial_value) else lambda: initial_value
    frame = context.frame()
    if frame.replica is not None:
        wish = _Wish(as_array(initial(), options["dtype"]), options)
        return frame.replica.merge_call(_together, wish)
    strategy = frame.strategy
    return strategy.variable_mgr.create(strategy, [initial] * len(strategy.devices), **options)


def _settled(
    *,
    name: str = "Variable",
    dtype: Any = None,
    trainable: bool | None = None,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
    decays: bool = True,
    beside: Any = None,
    **unknown: Any,
) -> dict[str, Any]:
    """Check the options that the creator scopes have left, and return what follows from them."""
    if unknown:
        raise UsageError(
            f"variable {name!r}: a creator scope asks for {', '.join(unknown)}, which no variable "
            "has; it may pass on name, dtype, trainable, synchronization, aggregation and decays"
        )
    for option, kind in (
        (synchronization, VariableSynchronization),
        (aggregation, VariableAggregation),
    ):
        if not isinstance(option, kind):
            raise UsageError(
                f"variable {name!r}: {option!r} is no {kind.__name__}; it may be "
                + ", ".join(member.name for member in kind)
            )
    if synchronization is VariableSynchronization.NONE:
        raise UsageError(
            f"variable {name!r} cannot have synchronization NONE: its copies would never be in "
            "step; use AUTO, or ON_READ for a value that is each replica's own"
        )
    if trainable is None:
        trainable = synchronization is not VariableSynchronization.ON_READ
    return {
        "name": name,
        "trainable": trainable,
        "dtype": dtype,
        "synchronization": synchronization,
        "aggregation": aggregation,
        "decays": decays,
        "beside": beside,
    }


# --- in a meeting -------------------------------------------------------------------------------


@leaf
@dataclass(frozen=True)
class _Wish:
    """What one replica asks for when it creates a variable."""

    value: np.ndarray[Any, Any]
    options: dict[str, Any]

    def essence(self, replica: int) -> dict[str, Any]:
        """Return what must be the same in all replicas: of the name, without its own scope."""
        name = self.options["name"].replace(f"replica_{replica}/", "", 1)
        return {
            **self.options,
            "name": canonical_name(name),
            "shape": self.value.shape,
            "dtype": self.value.dtype,
        }


def _together(strategy: Any, wishes: Any) -> Any:
    asked: Sequence[_Wish] = local_results(wishes)
    ours, first = asked[0].essence(0), strategy.first_replica
    for i, wish in enumerate(asked):
        for what, theirs in wish.essence(i).items():
            if theirs != ours[what]:
                raise MergeMismatchError(
                    f"the replicas create different variables: {what} is {ours[what]!r} in replica "
                    f"{first} and {theirs!r} in replica {first + i}; all replicas must create the "
                    "same variables in the same order"
                )
    initial = [partial(operator.attrgetter("value"), wish) for wish in asked]
    return strategy.variable_mgr.create(strategy, initial, **asked[0].options)


def canonical_name(name: str | None) -> str:
    """Return a name without what only tells several of the same name apart.

    That is a number `_N` at the end of any of its parts: "dense_1/kernel_2" is "dense/kernel".
    """
    return re.sub(r"_\d+(?=/|(?::\d+)?$)", "", name) if name else "Variable"


def as_array(value: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Return an initial value as a host array; floats without a dtype become the default one."""
    if hasattr(value, "read"):  # a variable
        value = value.read()
    if isinstance(value, Tensor):
        value = value.numpy()
    try:
        array = dtypes.as_array(value, dtype)
        whole = array.dtype.kind in "iu" and dtypes.kind(np.asarray(value).dtype) == "f"
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"no variable can start from {value!r}: {error}") from None
    if whole and not np.array_equal(array, value):
        raise UsageError(f"a variable of {array.dtype} cannot start from {value!r}; round it first")
    if dtype is None and not hasattr(value, "dtype") and array.dtype == np.float64:
        array = dtypes.as_array(array, context.frame().dtype)
    if dtypes.kind(array.dtype) not in "biuf":
        raise UsageError(
            f"no variable can start from {value!r}, {array.dtype}; give numbers or booleans"
        )
    return array
