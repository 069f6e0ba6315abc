"""A training that is killed at any moment and gone on with ends with the bits of one that was not.

First in one process: from what was saved after every step, under every policy with every optimizer.
Then real ones: `python -m minidist.bench` is killed while it computes and while it saves, again and
again. What they are compared with is the training that nobody has interrupted, or even saved.
"""

from __future__ import annotations

import csv
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minidist as md
from minidist import context
from minidist.bench.__main__ import main as bench
from minidist.train import weights_checksums

POLICIES = {
    "independent": ("independent", {}),
    "parameter_server": ("parameter_server", {}),
    "parameter_server+staged_vars": ("parameter_server", {"staged_vars": True}),
    "replicated": ("replicated", {}),
    "replicated+relaxed": ("replicated", {"variable_consistency": "relaxed"}),
}
OPTIMIZERS = {
    "sgd": lambda **how: md.optim.SGD(schedule, gradient_clip=0.5, **how),
    "momentum": lambda **how: md.optim.Momentum(schedule, nesterov=True, weight_decay=0.1, **how),
    "rmsprop": lambda **how: md.optim.RMSProp(schedule, **how),
    "adam": lambda **how: md.optim.Adam(schedule, gradient_clip_norm=0.5, **how),
}
STEPS = 6


def schedule(step):
    """Return a learning rate that is another one in each step."""
    return 0.1 / (step + 1)


class Training:
    """All that has a state: batch norm, dropout, slots, a loss scale, shuffled and uneven batches.

    In step 3 the gradients are not finite, which an automatic loss scale notices.
    """

    def __init__(self, policy, optimizer, *, seed, loss_scale=False, accumulate=1, dtype="float32"):
        context.seed(seed)
        variable_update, options = POLICIES[policy]
        self.strategy = md.Strategy("cpu*2", variable_update, **options)
        self.accumulate, self.overflows, self.dtype = accumulate, loss_scale, dtype
        with self.strategy.scope():
            self.model = md.nn.Sequential(
                [md.nn.Dense(5), md.nn.BatchNorm(), md.nn.Dropout(0.4), md.nn.Dense(1)]
            )
            self.model.build((3,))
            self.follower = md.Variable(np.zeros(1, "f4"), name="follower", trainable=False)
            self.updates = md.Variable(0, name="updates", trainable=False)
        how = {"gradient_accumulation_steps": accumulate}
        if loss_scale:
            how["loss_scale"] = md.optim.LossScale(8.0, automatic=True, every_n=1)
        self.optimizer = OPTIMIZERS[optimizer](**how)
        self.variables = [self.model, self.follower, self.updates]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.strategy.close()

    def go(self, first, folder=None):
        """Train from one step to the end; save after each in a folder, if there is one."""
        generator = np.random.default_rng(7)
        images = generator.normal(size=(11, 3, 1, 1)).astype("f4")
        examples = md.data.Examples(images, np.arange(11))
        batches = md.data.Batches(examples, 4, seed=3, start=first * self.accumulate)
        feed = iter(self.strategy.distribute_dataset(batches))
        for step in range(first, STEPS):
            for _ in range(self.accumulate):
                images, labels = next(feed)
                huge = np.float32(1e30 if self.overflows and step == 3 else 1)
                self.strategy.run(self._step, images, labels, huge)
            if folder is not None:
                folder.save(step + 1, self.variables, self.optimizer)
        feed.close()

    def _step(self, images, labels, huge):
        count = images.shape[0]
        x = md.ops.cast(md.ops.reshape(images, (count, 3)), self.dtype)
        y = md.ops.reshape(md.ops.cast(labels, "float32"), (count, 1))

        def loss():
            prediction = md.ops.cast(self.model(x, training=True), "float32")
            return md.ops.reduce_mean(md.ops.square((prediction - y) * huge)) * huge

        self.optimizer.minimize(loss, self.model.trainable_variables, count=count)
        md.assign_moving_average(
            self.follower,
            y[:1, 0] if count else np.zeros(1, "f4"),
            0.9,
            count=count,
            updates=self.updates,
        )

    def state(self):
        """Return all that there is, and what replicas compute with next, comparable."""
        of_model = self.model.variables
        slots = [
            self.optimizer.slot(v, slot)
            for v in self.model.trainable_variables
            for slot in self.optimizer.slots
        ]
        copies = {
            copy.name: copy.tensor.numpy().tobytes()
            for v in [*of_model, self.follower, self.updates, *slots]
            for copy in v.copies
        }
        scale = self.optimizer.loss_scale
        places = range(len(of_model[0].copies))
        return {
            **copies,
            "computed with": weights_checksums(self.strategy, self.model),
            "iterations": [self.optimizer.iterations_at(place) for place in places],
            "loss scale": scale and (scale.value, scale.counter),
            "step": self.strategy.step,
            "random": context.random_state(),
        }


VARIANTS = [
    *[(policy, optimizer, {}) for policy in POLICIES for optimizer in OPTIMIZERS],
    *[(policy, "momentum", {"loss_scale": True}) for policy in POLICIES],
    *[(policy, "adam", {"accumulate": 2}) for policy in POLICIES],
    *[(policy, "sgd", {"dtype": "float16", "loss_scale": True}) for policy in POLICIES],
    ("replicated", "momentum", {"dtype": "bfloat16"}),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what overflows on purpose
@pytest.mark.parametrize(("policy", "optimizer", "options"), VARIANTS)
def test_from_every_step_a_training_goes_on_with_the_same_bits(
    tmp_path, policy, optimizer, options
):
    with Training(policy, optimizer, seed=5, **options) as training:
        training.go(0)
        expected = training.state()
    if options.get("loss_scale"):
        assert expected["loss scale"] != (8.0, 0)
    with (
        md.TrainDir(tmp_path, keep=None) as folder,
        Training(policy, optimizer, seed=5, **options) as training,
    ):
        training.go(0, folder)
        assert training.state() == expected  # to save changes nothing
        assert folder.steps() == tuple(range(1, STEPS + 1))
        for step in folder.steps():
            with Training(policy, optimizer, seed=6, **options) as resumed:
                folder.load(resumed.variables, resumed.optimizer, step=step)
                resumed.go(step)
                assert resumed.state() == expected


# --- real processes -----------------------------------------------------------------------------

FLAGS = ["--model=trivial", "--batch_size=3", "--num_warmup_batches=2", "--num_batches=9"]
FLAGS += ["--display_every=1", "--seed=1"]  # with which the model's single unit is alive
FLAGS += ["--piecewise_learning_rate_schedule=0.05;0.02;0.01"]
SAVING = ["--save_model_steps=2", "--max_ckpts_to_keep=2", "--save_summaries_steps=1"]
LOSS_SCALE = ["--use_fp16", "--fp16_enable_auto_loss_scale", "--fp16_inc_loss_scale_every_n=2"]
RUNS = {
    "independent": ["--variable_update=independent", "--optimizer=adam"],
    "parameter_server": ["--variable_update=parameter_server", *LOSS_SCALE],
    "parameter_server+staged_vars": [
        "--variable_update=parameter_server",
        "--staged_vars",
        "--optimizer=rmsprop",
    ],
    "replicated": ["--variable_update=replicated", "--num_devices=3"],
    "replicated+relaxed": [
        "--variable_update=replicated",
        "--variable_consistency=relaxed",
        "--optimizer=sgd",
    ],
}


def checksum(json_file):
    return json.loads(json_file.read_text())["weights_checksum"]


def killed_after_a_row(flags, row):
    """Run the bench until it has printed the row of a step."""
    command = [sys.executable, "-m", "minidist.bench", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while not process.stdout.readline().startswith(f"{row}\t"):
            assert process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL


def killed_while_saving(flags, line):
    """Run the bench until it would run the n-th line of what saves."""
    program = Path(__file__).parent / "killed_bench.py"
    done = subprocess.run([sys.executable, program, str(line), *flags], stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("policy", RUNS)
def test_a_killed_benchmark_goes_on_to_the_same_weights(policy, tmp_path, capsys):
    generator = random.Random(policy)
    flags = [*FLAGS, *RUNS[policy]]
    assert bench([*flags, f"--json={tmp_path / 'whole.json'}"]) == 0
    expected = checksum(tmp_path / "whole.json")
    folder = tmp_path / "run"
    kept = [*flags, *SAVING, f"--train_dir={folder}"]
    killed_while_saving(kept, generator.randrange(1, 300))
    killed_after_a_row(kept, generator.randrange(5, 9))
    capsys.readouterr()
    assert bench([*kept, f"--json={tmp_path / 'resumed.json'}"]) == 0
    assert "Resumes at" in capsys.readouterr().out
    assert checksum(tmp_path / "resumed.json") == expected
    with open(folder / "summaries.csv") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == list(range(steps[0], 12))
    assert md.TrainDir(folder).steps() == (10, 11)


def test_a_benchmark_that_stopped_because_it_was_good_enough_does_not_go_on(tmp_path, capsys):
    """Killed after its last checkpoint, or simply started once more."""
    flags = ["--model=mlp", "--num_batches=30", "--save_model_steps=7"]
    flags += [f"--train_dir={tmp_path}", "--eval_during_training_every_n_steps=5"]
    saved = []
    for accuracy in (0.2, 0.1, 0.2, 0.97):
        more = [f"--stop_at_top_1_accuracy={accuracy}", f"--json={tmp_path / 'out.json'}"]
        assert bench([*flags, *more]) == 0
        saved.append((md.TrainDir(tmp_path, write=False).newest(), checksum(tmp_path / "out.json")))
    assert saved[0] == saved[1] == saved[2]
    assert saved[3][0] > saved[2][0]  # more was asked for: it went on
