"""The compiled meeting point: fences and rendezvous, with real threads."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import numpy as np
import pytest

from minidist.kernels import gil, layer
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


def flag():
    """Return the byte that says whether somebody has the GIL."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_bool.from_address(pointer_of(gil.is_held, b"minidist.kernels.gil.is_held"))


@pytest.mark.parametrize("before", [False, True])
def test_a_wrong_hint_of_who_has_the_gil_holds_nobody_up_for_ever(before):
    x, y = np.full(1 << 15, -1.0, "f4"), np.ones(1 << 15, "f4")
    held = flag()
    held.value = before
    layer.relu(x, y)
    assert held.value and not y.any()
    fence = Fence(1e-4)
    waiting = start(lambda: fence.wait(1))
    held.value = before
    fence.advance()
    waiting[0].join(60)
    assert not waiting[0].is_alive()


def test_threads_that_come_out_of_kernels_together_all_go_on():
    begin = threading.Barrier(4)
    done = []

    def work():
        x, y = np.full(1 << 15, -1.0, "f4"), np.ones(1 << 15, "f4")
        begin.wait()
        for _ in range(200):
            layer.relu(x, y)
        done.append(y.any())

    for thread in start(*[work] * 4):
        thread.join(60)
    assert done == [False] * 4


FIRST_USE = """
import sys, threading
import numpy as np
from minidist.kernels import layer

assert "minidist.kernels.gil" not in sys.modules
begun = threading.Event()
arrays = np.ones((4, 1 << 15), "f4")

def work():
    begun.set()
    layer.relu(arrays[0], arrays[1])

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "minidist.kernels.gil" and not begun.is_set():
            threading.Thread(target=work).start()
            begun.wait()

sys.meta_path.insert(0, Finder())
layer.relu(arrays[2], arrays[3])
"""


def test_two_threads_may_ask_who_has_the_gil_for_the_first_time_at_once():
    """An import lets go of the GIL, also that of the flag."""
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True, timeout=30)
