"""A training of several processes, one of which is killed while it saves, goes on from its folder.

Each time it goes on as other processes; the end is that of a training that nobody has killed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import ranks
from killing import STEPS
from launching import launch
from test_sharded_ranks import STRONG, Training

import minidist as md

PROGRAM = Path(__file__).with_name("killed_ranks.py")
STARTS = [  # policy, workers, devices of each, ps, who is killed
    ("collective_all_reduce", 2, 1, 0, "worker:1"),
    ("parameter_server", 1, 2, 2, "ps:1"),
    ("collective_all_reduce", 3, 1, 0, "worker:0"),
    ("parameter_server", 2, 1, 1, "ps:0"),
    ("collective_all_reduce", 1, 2, 0, "worker:0"),
]


def whole_steps(folder, training):
    """Return the steps that are there, each of which must be whole."""
    if not folder.exists():
        return ()
    looking = md.TrainDir(folder, write=False, cluster=md.cluster.alone())
    for step in looking.steps():
        assert looking.load(*training.what, step=step).step == step
        assert training.optimizer.iterations == step
    return looking.steps()


@pytest.mark.parametrize("seed", range(1, 6 if os.environ.get("MINIDIST_TEST_ALL") == "1" else 2))
def test_a_training_killed_again_and_again_ends_with_the_same_bits(tmp_path, seed):
    generator = random.Random(seed)
    folder = tmp_path / "run"
    last = 0
    with Training(None, "replicated", 1, STRONG) as training:
        training.train(STEPS)
        expected = training.state()
        for policy, workers, devices, ps, who in generator.sample(STARTS, len(STARTS)):
            line = generator.randrange(1, 60)
            outcome = ranks.run(PROGRAM, workers + ps, folder, policy, devices, ps, who, line)
            assert outcome.code not in (0, None), outcome  # it was killed, and the others ended
            steps = whole_steps(folder, training)
            assert len(steps) <= 3 and list(steps) == sorted(steps)
            newest = steps[-1] if steps else 0
            assert newest >= last, (newest, last)
            last = newest
            if last == STEPS:
                break
        done = ranks.run(PROGRAM, 2, folder, "collective_all_reduce", 2, 0, "nobody", 0)
        done.require_success()
        assert whole_steps(folder, training)[-1] == STEPS
        assert training.state() == expected
        names = [path.name for path in folder.iterdir() if path.name != "lock"]
        assert all("partial" not in name for name in names)


@pytest.mark.parametrize(("policy", "ps", "who"), [("parameter_server", 1, "worker:1")])
def test_the_launcher_starts_again_from_the_newest_checkpoint(tmp_path, policy, ps, who):
    folder = tmp_path / "run"
    of_program = [PROGRAM, folder, policy, 1, ps, who, 60]
    status, out, errors = launch(f"-n={2 + ps}", "--max_restarts=3", *map(str, of_program))
    assert status == 0, (out, errors)
    assert "this is restart 2 of 3" in errors and "this is restart 3" not in errors
    with Training(None, "replicated", 1, STRONG) as training:
        training.train(STEPS)
        expected = training.state()
        assert whole_steps(folder, training)[-1] == STEPS
        assert training.state() == expected
