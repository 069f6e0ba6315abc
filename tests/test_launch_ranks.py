"""The launcher and ranks that know each other: who fails first is named, not who fails of it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from launching import Launched, launch

# Some MPIs print warnings of their own besides.
OURS = re.compile(r"^(?:\[?worker:\d|minidist\.launch:).*", re.M)
PROGRAM = str(Path(__file__).with_name("connecting.py"))


def test_an_exception_is_printed_with_its_rank_and_the_rank_is_named():
    status, _, errors = launch("-n", "2", PROGRAM, "fail", "")
    assert status == 1
    lines = OURS.findall(errors)
    assert all(line.startswith("[worker:1 on ") for line in lines[:-1])
    assert lines[-2].endswith("] ValueError: one of them fails")
    assert lines[-1].startswith("minidist.launch: rank 1 on ")
    assert "has exited with status 1 after" in lines[-1]


def test_who_ends_too_early_is_named_though_the_others_fail_of_it():
    status, _, errors = launch("-n", "2", PROGRAM, "exit_early", "3")
    assert status == 3
    assert "PeerError: worker:1" in errors
    sentence = OURS.findall(errors)[-1]
    assert sentence.startswith("minidist.launch: rank 1 on "), errors
    assert "has exited with status 3" in sentence


def test_who_takes_fewer_steps_makes_the_other_fail():
    status, _, errors = launch("-n", "2", PROGRAM, "one_step_fewer", "")
    assert status == 1, errors
    assert re.search(r"PeerError: worker:1 \(on .*\) has ended after", errors), errors
    sentence = OURS.findall(errors)[-1]
    assert sentence.startswith("minidist.launch: rank 0 on "), errors
    assert "has exited with status 1" in sentence


def test_who_ends_before_there_is_a_strategy_is_named():
    status, _, errors = launch("-n", "2", PROGRAM, "exit_at_once", "3")
    assert status == 3, errors
    assert re.search(r"PeerError: worker:1 \(on .*\) has ended after", errors), errors
    sentence = OURS.findall(errors)[-1]
    assert sentence.startswith("minidist.launch: rank 1 on "), errors
    assert "has exited with status 3" in sentence


def test_a_killed_rank_leaves_no_shared_memory_behind():
    status, out, errors = launch("-n", "2", PROGRAM, "die", "")
    [sentence] = OURS.findall(errors)
    assert (status, sentence.split(" on ")[0]) == (137, "minidist.launch: rank 1"), errors
    assert [path for path in out.split() if os.path.exists(path)] == []


def test_an_interrupt_is_told_by_each_rank_in_one_line():
    launched = Launched("-n", "2", PROGRAM, "hold")
    assert sorted(launched.read(2)) == ["worker:0", "worker:1"]
    launched.process.send_signal(signal.SIGINT)
    status, _, errors = launched.end()
    assert status == 130
    lines = sorted(OURS.findall(errors))
    assert len(lines) == 3, errors
    assert lines[0] == "minidist.launch: SIGINT: all ranks are ended"
    assert [line.split()[0] for line in lines[1:]] == ["worker:0", "worker:1"]
    assert all(line.endswith(" was interrupted") for line in lines[1:])
