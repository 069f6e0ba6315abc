"""The launcher: it says which rank died and how, ends the others, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal

import pytest
from launching import BEGIN, Launched, all_end, is_gone, launch, opened

from minidist.threads import cores

# Ranks say which process they are, and its supervisor's; and then wait for what comes.
WAIT = BEGIN + "print(os.getpid(), os.getppid(), flush=True); signal.pause()"


def waiting(*options, count=2, program=WAIT):
    """Return a launcher whose ranks all wait, and their processes and those of supervisors."""
    launched = Launched(*options, "-n", str(count), "-c", program)
    pairs = [line.split() for line in launched.read(count)]
    return launched, [pid for pid, _ in pairs], [parent for _, parent in pairs]


def ends_at(rank, what):
    """Return a program whose `rank` does something when it gets SIGUSR1; the others wait on."""
    return BEGIN + (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}); "
        "print(os.getpid(), rank, flush=True); signal.sigwait({signal.SIGUSR1}); "
        f"{what} if rank == {rank} else signal.pause()"
    )


def test_lines_of_all_ranks_come_whole():
    program = BEGIN + "[print(str(rank) * 9000) for _ in range(30)]"
    status, out, errors = launch("-n", "3", "-c", program)
    assert (status, errors) == (0, "")
    assert sorted(out.split()) == sorted(str(rank) * 9000 for rank in range(3) for _ in range(30))


def test_lines_are_tagged_if_wanted():
    program = BEGIN + "print('one\\ntwo'); print('three', file=sys.stderr)"
    status, out, errors = launch("-n", "2", "--tag_output", "-c", program)
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] one", "[0] two", "[1] one", "[1] two"]
    assert sorted(errors.splitlines()) == ["[0] three", "[1] three"]


def test_standard_input_is_empty_and_a_last_line_without_an_end_is_not_lost():
    program = BEGIN + "sys.stdout.write(repr(sys.stdin.read()))"
    assert launch("-n", "2", "-c", program) == (0, "''\n''\n", "")


def test_more_ranks_than_cores():
    count = cores() + 2
    status, out, _ = launch("-n", str(count), "-c", BEGIN + "print(rank)")
    assert status == 0
    assert sorted(map(int, out.split())) == list(range(count))


@pytest.mark.parametrize(
    ("what", "expected", "words"),
    [
        ("sys.exit(3)", 3, "has exited with status 3 after"),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "was killed by SIGKILL (by a system short of memory?) after",
        ),
        ("1 / 0", 1, "has exited with status 1 after"),
    ],
)
def test_the_rank_that_ends_badly_is_named_and_the_others_end(what, expected, words):
    launched = Launched("-n", "3", "-c", ends_at(1, what))
    pids = {rank: pid for pid, rank in map(str.split, launched.read(3))}
    os.kill(int(pids["1"]), signal.SIGUSR1)
    status, _, errors = launched.end()
    assert status == expected
    said = [line for line in errors.splitlines() if line.startswith("minidist.launch: ")]
    assert len(said) == 1, errors
    assert re.match(rf"minidist.launch: rank 1 on \S+ \(process {pids['1']}\) ", said[0])
    assert words in said[0]
    assert said[0].endswith("; the other 2 are ended")
    assert all(map(is_gone, pids.values()))


def test_ranks_that_fail_together_are_all_named():
    status, _, errors = launch("-n", "3", "-c", BEGIN + "sys.exit(5)")
    assert status == 5
    [sentence] = errors.splitlines()
    assert "has exited with status 5" in sentence
    named = [rank for ranks in re.findall(r"\branks? ([\d, ]+)", sentence)
             for rank in re.findall(r"\d", ranks)]  # fmt: skip
    ended = re.findall(r"the other (\w+) (?:are )?ended", sentence)  # who was too slow to fail
    assert len(set(named)) == len(named)
    assert len(named) + sum(1 if count == "is" else int(count) for count in ended) == 3


def test_a_killed_supervisor_takes_its_rank_with_it_and_the_others_end():
    launched, pids, supervisors = waiting()
    os.kill(int(supervisors[1]), signal.SIGKILL)
    status, _, errors = launched.end()
    assert status == 137
    assert "is gone with its supervisor" in errors
    assert all(map(is_gone, pids + supervisors))


def test_nothing_survives_a_killed_launcher():
    launched, pids, supervisors = waiting()
    descriptors = opened(pids + supervisors)
    assert len(descriptors) == 4
    launched.process.kill()
    assert all_end(descriptors)
    launched.end()


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_all(number, expected):
    launched, pids, supervisors = waiting()
    launched.process.send_signal(number)
    status, _, errors = launched.end()
    assert status == expected
    assert f"minidist.launch: {number.name}: all ranks are ended\n" in errors
    assert all(map(is_gone, pids + supervisors))


DEAF = BEGIN + (
    "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]; "
    "print(os.getpid(), os.getppid(), flush=True); [signal.pause() for _ in iter(int, 1)]"
)


def test_ranks_that_do_not_listen_are_killed():
    launched, pids, _ = waiting("--grace=0.1", program=DEAF)
    launched.process.send_signal(signal.SIGINT)
    status, _, errors = launched.end()
    assert status == 130
    assert "killed, 0.1 s were not enough to end" in errors
    assert all(map(is_gone, pids))


def test_a_second_interrupt_does_not_wait_for_them():
    launched, pids, _ = waiting("--grace=1000", program=DEAF)
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.stderr.readline() == "minidist.launch: SIGINT: all ranks are ended\n"
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 130
    assert all(map(is_gone, pids))


def test_what_a_rank_has_left_behind_ends_too():
    program = BEGIN + (
        "import subprocess; child = subprocess.Popen([sys.executable, '-c', "
        "'import os, signal; os.setsid(); print(os.getpid(), flush=True); signal.pause()'], "
        "stdout=subprocess.PIPE, text=True); print(child.stdout.readline().strip())"
    )
    status, out, _ = launch("-n", "2", "-c", program)
    assert status == 0
    assert len(out.split()) == 2 and all(map(is_gone, out.split()))


def test_an_output_that_nobody_reads_ends_all():
    program = BEGIN + "print(os.getpid(), flush=True)\nwhile True: print('more')"
    launched = Launched("-n", "2", "-c", program)
    pids = [line for line in launched.read(50) if line.isdigit()]
    launched.process.stdout.close()
    assert launched.process.wait(60) == 1
    assert launched.process.stderr.read() == ""
    launched.process.stderr.close()
    assert all(map(is_gone, pids))


# --- starting again


def failing_until(restart, status=3):
    return BEGIN + (
        "n = int(os.environ['MINIDIST_RESTART']); print(n, rank, flush=True); "
        f"sys.exit({status} if rank == 1 and n < {restart} else 0)"
    )


def test_a_job_is_started_again_until_it_succeeds():
    status, out, errors = launch("-n", "2", "--max_restarts=5", "-c", failing_until(2))
    assert status == 0
    assert {"0 1", "1 1", "2 0", "2 1"} <= set(out.splitlines())
    assert "this is restart 1 of 5\n" in errors and "this is restart 2 of 5\n" in errors
    assert errors.count("rank 1 on") == 2


def test_a_job_is_started_again_only_so_often():
    status, out, errors = launch("-n", "2", "--max_restarts", "1", "-c", failing_until(2))
    assert status == 3
    assert "1 1" in out.splitlines() and "2 1" not in out.splitlines()
    assert errors.count("rank 1 on") == 2


def test_a_wrong_command_line_is_not_tried_again():
    status, out, _ = launch("-n", "2", "--max_restarts=5", "-c", failing_until(2, status=2))
    assert status == 2
    assert "1 1" not in out.splitlines()


def test_an_interrupted_job_is_not_started_again():
    launched, _, _ = waiting("--max_restarts=5")
    launched.process.send_signal(signal.SIGINT)
    status, out, errors = launched.end()
    assert status == 130
    assert "restart" not in errors and out == ""
