"""The harness: what goes wrong in a rank is told with its number; nothing runs past its limit."""

from __future__ import annotations

import os
import threading

import pytest
import ranks


def fails(cluster):
    if cluster.task == 1:
        raise ZeroDivisionError("planted")


def dies(cluster):
    if cluster.rank == 1:
        os._exit(3)
    threading.Event().wait()


def hangs(cluster):
    threading.Event().wait()


CASES = {
    "fails": (2, 0, fails),
    "goes well": (1, 1, lambda cluster: None),
    "dies": (2, 0, dies),
    "hangs": (2, 0, hangs),
}


def test_a_failure_in_one_rank_is_told_and_the_next_case_goes_on():
    outcome = ranks.run(__file__, 2, "fails", "goes well")
    outcome.require_success()
    outcome.check("goes well")
    with pytest.raises(AssertionError, match=r"(?s)^fails failed\nrank 1: .*planted"):
        outcome.check("fails")
    with pytest.raises(AssertionError, match="no rank has begun 'dies'"):
        outcome.check("dies")


def test_a_rank_that_dies_ends_the_others():
    outcome = ranks.run(__file__, 2, "dies", limit=20)
    with pytest.raises(AssertionError, match=r"(?s)rank 1: it did not come to the end.*mpiexec"):
        outcome.check("dies")
    with pytest.raises(AssertionError, match=r"(?s)mpiexec ended with \d+"):
        outcome.require_success()


def test_ranks_that_hang_end_at_their_limit_and_say_where_they_are():
    outcome = ranks.run(__file__, 2, "hangs", limit=8)
    with pytest.raises(AssertionError, match=r"(?s)did not come.*rank 0 printed.*in hangs"):
        outcome.check("hangs")


if __name__ == "__main__":
    ranks.main(CASES)
