"""With caching, replicas fetch from a cache near them, which is filled once a step."""

from __future__ import annotations

import numpy as np
import pytest
from policies import CACHING

import minidist as md
from minidist.device.cpu import CpuDevice
from minidist.variable_mgr.read import LARGE


@pytest.fixture
def copied(monkeypatch):
    """What is copied, as (array to, array from, device that it is copied to)."""
    copies = []
    original = CpuDevice.copy

    def copy(device, destination, source):
        copies.append((destination, source, device.short))
        original(device, destination, source)

    monkeypatch.setattr(CpuDevice, "copy", copy)
    return copies


def links(copied, variables):
    """Return the links that copies went over; an array that was filled has a place from then on."""
    where = {v.copies[0].array.ctypes.data: v.copies[0].device.short for v in variables}
    found = []
    for destination, source, device in sorted(copied, key=lambda c: c[1].ctypes.data not in where):
        found.append((where[source.ctypes.data], device))
        where[destination.ctypes.data] = device
    copied.clear()
    return sorted(found)


def make(policy, n, sizes):
    name, options = CACHING[policy]
    strategy = md.Strategy(f"cpu*{n}", name, **options)
    with strategy.scope():
        return strategy, [md.Variable(np.zeros(size), name="v") for size in sizes]


def read(strategy, variables):
    return strategy.run(lambda: [v.numpy().sum() for v in variables])


def test_large_variables_go_over_the_hosts_link_once_a_step(copied):
    strategy, variables = make("parameter_server_caching", 3, [LARGE, LARGE - 1, LARGE + 1])
    with strategy:
        for _ in range(2):
            copied.clear()
            read(strategy, variables)
            assert links(copied, variables) == sorted(
                [
                    *[("host", "cpu:0"), ("cpu:0", "cpu:1"), ("cpu:0", "cpu:2")],  # the first
                    *[("host", f"cpu:{i}") for i in range(3)],  # the small one
                    *[("host", "cpu:1"), ("cpu:1", "cpu:0"), ("cpu:1", "cpu:2")],  # the last
                ]
            )


def test_small_variables_on_the_devices_are_cached_on_the_host(copied):
    strategy, variables = make("parameter_server_device_caching", 2, [3])
    with strategy:
        copied.clear()
        read(strategy, variables)
        # replica 0 computes where the variable is
        assert links(copied, variables) == [("cpu:0", "host"), ("host", "cpu:1")]


@pytest.mark.parametrize("policy", CACHING)
def test_within_a_step_it_is_fetched_again_only_if_it_has_changed(policy, copied):
    strategy, (v,) = make(policy, 2, [LARGE])
    with strategy:
        v.aggregation = md.VariableAggregation.MEAN

        def step():
            for _ in range(3):
                v.read()
            v.assign_add(md.constant(np.ones(LARGE)))
            return [v.numpy().max(), v.numpy().min()]

        for k in range(1, 4):
            assert strategy.run(step)[0].values == (k, k)
        copied.clear()
        strategy.run(lambda: [v.read() for _ in range(3)])
        thrice = len(copied)
        copied.clear()
        strategy.run(lambda: [v.read()])
        assert len(copied) == thrice > 0
