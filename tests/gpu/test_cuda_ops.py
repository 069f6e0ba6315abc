"""Every verb of `device.ops` on the stand-in gives what it gives on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from verbs import BOUND, CASES, DTYPES, FLOATS_ONLY, Case, call, compare, placed, seen

from minidist.device import Device, get
from minidist.device.ops import WRITES, Ops
from minidist.dtypes import is_narrow


def test_every_verb_has_a_case() -> None:
    elsewhere = {"host_view", "share_memory", "at_once"}
    assert {*CASES, *FLOATS_ONLY} == Ops.__abstractmethods__ - elsewhere


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("verb", [*CASES, *FLOATS_ONLY])
def test_a_verb_does_what_the_cpus_does(cupy: Any, verb: str, dtype: str) -> None:
    cases = {**CASES, **FLOATS_ONLY}[verb]
    if verb in FLOATS_ONLY and is_narrow(Case(dtype)(1).dtype):
        cases = FLOATS_ONLY["sum"] if verb == "sum" else lambda c: []
    with np.errstate(all="ignore"):
        many = list(zip(cases(Case(dtype)), cases(Case(dtype)), strict=True))
    for ours, theirs in many:
        with np.errstate(all="ignore"):
            want = call(get("cpu:0"), verb, theirs)
        compare(call(get("cuda:0"), verb, ours), want, BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_verbs_are_rounded_as_one(cupy: Any, dtype: str) -> None:
    x, y = Case(dtype)(20), Case(dtype)(20)

    def twice(device: Device) -> Any:
        ops = device.ops
        return ops.at_once(
            lambda a, b: (ops.multiply(ops.add(a, b), b), ops.exp(a)),
            device.copy_in(x),
            device.copy_in(y),
        )

    here, there = get("cuda:0"), get("cpu:0")
    compare(seen(twice(here), here), seen(twice(there), there), BOUND[dtype] / 4)


def test_arrays_that_share_memory(cupy: Any) -> None:
    device = get("cuda:0")
    a, b = (device.ops.full((10,), 0, "float32") for _ in range(2))
    shared = device.ops.share_memory
    assert shared(a, a) and shared(a[:6], a[5:]) and shared(a, a.reshape(2, 5))
    assert not shared(a, b) and not shared(a[:5], a[5:])


def writing() -> list[tuple[str, int, Any]]:
    """Give each verb that changes an argument, and where it is."""
    cases = {**CASES, **FLOATS_ONLY}
    cases["matmul"] = lambda c: [(c(3, 4), c(4, 5), False, False, c(3, 5))]
    return [(verb, i, cases[verb]) for verb in WRITES for i in WRITES[verb] if isinstance(i, int)]


@pytest.mark.parametrize("home", ["cuda:1", "host"])
@pytest.mark.parametrize(("verb", "place", "cases"), writing())
def test_what_a_verb_changes_may_be_elsewhere(
    standin: Any, verb: str, place: int, cases: Any, home: str
) -> None:
    here, there = get("cuda:0"), get(home)
    for ours, theirs in zip(cases(Case("float32")), cases(Case("float32")), strict=True):
        options = ours[-1] if isinstance(ours[-1], dict) else {}
        given = [
            placed(value, there if i == place else here)
            for i, value in enumerate(ours[: -1 if options else None])
        ]
        getattr(here.ops, verb)(*given, **options)
        got = [seen(v, there if i == place else here) for i, v in enumerate(given)]
        compare(got, call(get("cpu:0"), verb, theirs)[1], BOUND["float32"])
