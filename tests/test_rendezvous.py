"""The compiled meeting point: fences and rendezvous, with real threads."""

from __future__ import annotations

import threading

import pytest

from minidist.kernels.rendezvous import Fence, Rendezvous


def start(*functions):
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("spin", [0.0, 1e-4])
def test_fence_lets_pass_at_its_value_and_not_before(spin):
    fence = Fence(spin)
    assert fence.wait(0)
    assert not fence.wait(1, timeout=0.001)
    fence.advance()
    assert fence.wait(1) and fence.value == 1
    assert not fence.wait(3, timeout=0.0)
    fence.advance(2)
    assert fence.wait(3)


@pytest.mark.parametrize("spin", [0.0, 1e-4])
def test_two_threads_hand_a_turn_to_and_fro(spin):
    ping, pong, seen = Fence(spin), Fence(spin), []

    def answer():
        for i in range(1, 2001):
            ping.wait(i)
            seen.append(("pong", i))
            pong.advance()

    (thread,) = start(answer)
    for i in range(1, 2001):
        seen.append(("ping", i))
        ping.advance()
        assert pong.wait(i, timeout=30)
    thread.join(30)
    assert seen == [(who, i) for i in range(1, 2001) for who in ("ping", "pong")]


def test_a_lifted_fence_holds_nobody_back():
    fence = Fence()
    passed = []
    threads = start(
        lambda: passed.append(fence.wait(10)), lambda: passed.append(fence.wait(10**12))
    )
    fence.lift()
    for thread in threads:
        thread.join(30)
    assert passed == [True, True] and fence.lifted and fence.wait(5)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_everyone_leaves_each_meeting_with_its_result_and_the_last_one_holds_it(n):
    rendezvous = Rendezvous(n)
    results = [[] for _ in range(n)]
    lasts = []

    def thread(who):
        for round in range(300):
            meeting = rendezvous.arrive(who, (who, round))
            if meeting == 0:
                lasts.append(round)
                rendezvous.open(list(rendezvous.payloads))
                results[who].append([(i, round) for i in range(n)])
            else:
                results[who].append(rendezvous.wait(meeting))

    for running in start(*[lambda who=who: thread(who) for who in range(n)]):
        running.join(60)
    assert lasts == list(range(300))
    assert results == [[[(i, round) for i in range(n)] for round in range(300)]] * n
    assert rendezvous.meetings == 300 and rendezvous.arrived == 0 and not rendezvous.broken


def test_a_rendezvous_with_someone_gone_is_broken_once_the_rest_waits():
    rendezvous = Rendezvous(3)
    rendezvous.leave(2)
    rendezvous.leave(2)
    assert rendezvous.left == 1 and not rendezvous.broken
    assert rendezvous.arrive(0, "a") == 1 and not rendezvous.broken
    rendezvous.arrive(1, "b")
    assert rendezvous.broken and rendezvous.departed == [False, False, True]


def test_stop_ends_present_and_future_waiting():
    rendezvous = Rendezvous(2)
    ended = threading.Event()

    def wait():
        rendezvous.wait(rendezvous.arrive(0, "here"))
        ended.set()

    start(wait)
    rendezvous.stop()
    assert ended.wait(30) and rendezvous.stopped
    rendezvous.wait(10**6)
