"""The team of threads: several callers, lent threads, forked children, the interpreter's end."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from minidist.kernels import reduce

KERNELS = Path(__file__).parents[1] / "kernels"

WORK = """
import os, threading
import numpy as np
from minidist.kernels import reduce

x = np.arange(1 << 18, dtype=np.float64)

def work(threads=3):
    out = np.zeros_like(x)
    reduce.sum([[out]], [[x], [x]], threads=threads)
    assert (out == 2 * x).all()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WORK + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_several_callers_at_once_do_not_disturb_each_other() -> None:
    sources = [np.full(1 << 19, i, np.float32) for i in range(4)]
    failures: list[int] = []
    begin = threading.Barrier(4)

    def call(caller: int) -> None:
        out = np.empty_like(sources[0])
        begin.wait()
        for _ in range(50):
            out.fill(np.nan)
            reduce.sum([[out]], [[sources[caller]], [sources[3]]], threads=1 + caller)
            if not (out == caller + 3).all():
                failures.append(caller)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not failures


def test_a_forked_child_has_a_team_of_its_own() -> None:
    done = run(
        """
work()
for _ in range(5):
    child = os.fork()
    if child == 0:
        work()
        work()
        os._exit(7)
    work()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    )
    assert done.returncode == 0, done.stderr


def test_fork_while_the_team_is_at_work() -> None:
    done = run(
        """
stop = threading.Event()
def keep_working():
    while not stop.is_set():
        work()
busy = threading.Thread(target=keep_working)
busy.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        work()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stop.set()
busy.join()
"""
    )
    assert done.returncode == 0, done.stderr


def test_nothing_hangs_when_the_interpreter_ends() -> None:
    assert run("work()").returncode == 0
    at_work = """
def keep_working():
    while True:
        work()
threading.Thread(target=keep_working, daemon=True).start()
work()
"""
    done = run(at_work)
    assert done.returncode == 0, done.stderr


# --- threads that wait lend themselves ------------------------------------------------------------

# Two callers share loops, at once and one after the other, while three threads wait at a fence,
# lending themselves, sometimes to sleep at once. Each loop must touch each element once.
LENDING = """
#include <stdio.h>
#include <stdlib.h>
#include <vector>

#include "rendezvous.h"
#include "team.h"

enum { LOOPS = 300, N = 5000 };
const ptrdiff_t GRAINS[] = {1, 100, 1600, 2500};
const minidist::Lending lending{md_team_offer, md_team_help};
minidist::Fence loops;

static void call(int caller) {
    std::vector<int> counts(N);
    for (int i = 0; i < LOOPS; ++i) {
        md_share(md_team_parallel, N, GRAINS[(i + caller) % 4], 2 + i % 3,
                 [&](ptrdiff_t first, ptrdiff_t last) {
                     for (; first < last; ++first) ++counts[first];
                 });
        loops.advance(1);
    }
    for (int count : counts)
        if (count != LOOPS) exit(2);
}

static void wait(int waiter) {
    for (int i = 1; i <= 2 * LOOPS; ++i) {
        const int64_t spin_ns = (i + waiter) % 7 ? 100000 : 0;
        if (!loops.wait(i, spin_ns, 60000000000, &lending)) exit(3);
    }
}

// Loops of two elements, until one was shared with the thread that waits.
static void find_lender() {
    minidist::Fence found;
    std::thread waiter([&] { found.wait(1, 60000000000, 60000000000, &lending); });
    std::atomic<bool> helped{false};
    while (!helped)
        md_share(md_team_parallel, 2, 1, 2, [&](ptrdiff_t, ptrdiff_t) {
            if (std::this_thread::get_id() == waiter.get_id()) helped = true;
            for (int looks = 0; looks < 10000 && !helped; ++looks) std::this_thread::yield();
        });
    found.advance(1);
    waiter.join();
}

int main() {
    if (md_start_team() != 0) return 4;
    find_lender();
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) threads.emplace_back(call, i);
    for (int i = 0; i < 3; ++i) threads.emplace_back(wait, i);
    for (auto &thread : threads) thread.join();
    puts("right");
}
"""


@pytest.mark.parametrize("watched", [False, True], ids=["as it is built", "races are reported"])
def test_lent_threads_touch_each_element_once(watched: bool, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = tmp_path / "lending"
    options = ["-O1", "-fsanitize=thread"] if watched else ["-O2"]
    command = [compiler, "-std=c++17", "-pthread", f"-I{KERNELS}", *options, "-x", "c++", "-"]
    built = subprocess.run(
        [*command, "-o", str(program)], input=LENDING, capture_output=True, text=True, check=False
    )
    if watched and built.returncode != 0 and "tsan" in built.stderr:
        pytest.skip("this compiler has no library to find races with")
    assert built.returncode == 0, built.stderr
    for _ in range(3):
        done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
        if watched and "unexpected memory mapping" in done.stderr:
            pytest.skip("the race detector does not run on this system")
        assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


MEETINGS = """
import minidist as md

GRADIENTS = [np.arange(n, dtype=np.float32) for n in (7, 30000, 70001)]

@md.structure.leaf
class Row(list):
    pass

def merge(strategy, rows, fail):
    if fail:
        raise ValueError("in the merge function")
    rows = strategy.local_results(rows)
    for length in (2, 3, 1):
        parts = [row[:length] for row in rows]
        reduce.sum([row.total[:length] for row in rows], parts, threads=2)

def replica(meetings, fail=None, at=-1):
    ctx = md.get_replica_context()
    rank, n = ctx.replica_id, ctx.num_replicas
    row = Row([(rank + 1) * g for g in GRADIENTS])
    row.total = [np.empty_like(g) for g in GRADIENTS]
    for i in range(meetings):
        if i == at and fail == "replica" and rank == n - 1:
            raise KeyError("in a replica")
        if i == at and fail == "leave" and rank == 0:
            return
        ctx.merge_call(merge, row, i == at and fail == "merge")
        for g, total in zip(GRADIENTS, row.total):
            assert (total == n * (n + 1) // 2 * g).all()

ENDS = {"replica": KeyError, "merge": ValueError, "leave": md.errors.MergeMismatchError}
"""


@pytest.mark.parametrize("replicas", [2, 5])
def test_meetings_whose_loops_are_shared(replicas: int) -> None:
    done = run(
        MEETINGS
        + f"""
with md.Strategy("cpu*{replicas}") as strategy:
    for repeat in range(10):
        strategy.run(replica, 40)
        for fail, kind in ENDS.items():
            try:
                strategy.run(replica, 40, fail, 7 * repeat % 40)
            except kind:
                continue
            raise AssertionError(fail)
"""
    )
    assert done.returncode == 0, done.stderr


def test_two_strategies_share_one_team() -> None:
    done = run(
        MEETINGS
        + """
def train(replicas):
    with md.Strategy(f"cpu*{replicas}") as strategy:
        for _ in range(5):
            strategy.run(replica, 40)
    finished.append(replicas)

finished = []
threads = [threading.Thread(target=train, args=(replicas,)) for replicas in (2, 3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert sorted(finished) == [2, 3]
"""
    )
    assert done.returncode == 0, done.stderr


def test_fork_while_replicas_lend_their_threads() -> None:
    done = run(
        MEETINGS
        + """
def train():
    with md.Strategy("cpu*2") as strategy:
        while not stop.is_set():
            strategy.run(replica, 20)

stop = threading.Event()
busy = threading.Thread(target=train)
busy.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        work()
        with md.Strategy("cpu*2") as strategy:
            strategy.run(replica, 20)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stop.set()
busy.join()
"""
    )
    assert done.returncode == 0, done.stderr
