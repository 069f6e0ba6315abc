"""bench/across.py measures what it says, however short: two ranks, two processes, and a peer."""

from __future__ import annotations

import runpy
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ACROSS = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "across.py"))
PEER = """
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if flags["--workload"] == "allreduce":
    for kb, seconds in ((4, 3e-6), (4, 2e-6), (17, 1.0), (4096, 5e-4)):
        print(json.dumps({"batch": kb, "step_s": seconds}))
elif flags["--workload"] == "mlp":
    assert flags["--replicas"] == "2" and flags["--batch"] == "64", flags
    print(json.dumps({"rate": 250.0}))
else:
    sys.exit(2)
"""


@pytest.fixture
def peer(tmp_path):
    program = tmp_path / "a peer.py"
    program.write_text(PEER)
    return f"{sys.executable} '{program}'"


def test_sums_are_timed_in_every_way():
    times = ACROSS["sum_times"]("4K", 2, check=True)
    assert list(times) == list(ACROSS["WAYS"])
    assert all(microseconds > 0 for microseconds in times.values())


def test_ranks_and_processes_apart_train():
    for rates in (ACROSS["ranks_rates"]("mlp", 2), ACROSS["rates_apart"]("mlp", 2)):
        assert len(rates) == 2
        assert min(rates) > 0


def test_a_peer_says_what_it_has(peer):
    assert ACROSS["peer_sums"](peer) == pytest.approx({"4K": 2.0, "4M": 500.0})
    assert ACROSS["peer_lines"](peer, "mlp", 3, "--batch", "64") == [{"rate": 250.0}]
    assert ACROSS["peer_lines"](peer, "lenet", 3) == []


def test_phases_of_each_rank_add_up_to_the_step(monkeypatch, capsys):
    monkeypatch.setitem(ACROSS["print_phases"].__globals__, "JOBS", {"mlp": 3})
    ACROSS["print_phases"](Namespace())
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["worker:0", "worker:1"]
    for row in rows:
        step, *phases = map(float, row.split()[1:])
        assert sum(phases) == pytest.approx(step, abs=0.05)
