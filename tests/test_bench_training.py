"""Long trainings of the benchmark: evaluations on the way, checkpoints, resuming, summaries."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benching import ACCURACY, COMMAND, ENVIRONMENT, PLAIN_SGD, fresh, refused, run

from minidist.bench.compare import POLICIES
from minidist.bench.evaluation import due
from minidist.bench.flags.parse import parse

SMALL = ("--num_warmup_batches=2", "--batch_size=16")
KINDS = {
    name: [f"--{flag}={value}" for flag, value in chosen.items()]
    for name, chosen in POLICIES.items()
}


def weights(results: dict[str, Any]) -> list[str]:
    return list(results["weights_checksum"].values())


# --- evaluation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "steps"),
    [
        ("every_n_steps=4", [4, 8, 12]),
        # Three batches make an epoch, so half of one is over after 1.5, 3, 4.5, … of them.
        ("every_n_epochs=0.5", [2, 3, 5, 6, 8, 9, 11, 12]),
        ("every_n_epochs=2", [6, 12]),
        ("every_n_epochs=0.1", list(range(1, 13))),
        ("at_specified_steps=9,2,50", [2, 9]),
        ("at_specified_epochs=0.5,1,2.1", [2, 3, 7]),
    ],
)
def test_when_evaluations_are_due(flag: str, steps: list[int]) -> None:
    is_due = due(parse([f"--eval_during_training_{flag}"]), 3)
    assert [step for step in range(1, 13) if is_due(step)] == steps


def test_without_such_a_flag_none_is_due() -> None:
    assert not any(map(due(parse([]), 3), range(1, 13)))


@pytest.mark.parametrize("name", [name for name in POLICIES if "staged" not in name])
def test_evaluations_on_the_way_change_no_bit(name: str) -> None:
    flags = (*SMALL, *KINDS[name], "--num_batches=8", "--num_devices=3")
    plain = run(*flags)
    watched = run(*flags, "--eval_during_training_every_n_steps=3")
    assert watched.losses == plain.losses
    assert watched.checksums == plain.checksums
    assert watched.results["accuracy"] == plain.results["accuracy"]
    assert [found["step"] for found in watched.results["evaluations"]] == [3, 6]
    assert len(ACCURACY.findall(watched.text)) == 3
    assert "\nMode:        training + evaluation\n" in watched.text


def test_evaluations_leave_dropout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from minidist import nn
    from minidist.models import MODELS, Model

    def dropping(shape: tuple[int, ...], classes: int) -> nn.Sequential:
        return nn.Sequential([nn.Flatten(), nn.Dropout(0.5), nn.Dense(classes)], "dropping")

    monkeypatch.setitem(MODELS, "mlp", Model(dropping))
    flags = (*SMALL, "--model=mlp", "--num_batches=5")
    plain = fresh(*flags)
    watched = fresh(*flags, "--eval_during_training_every_n_steps=1")
    assert watched.losses == plain.losses
    assert watched.checksums == plain.checksums


def test_an_evaluation_finds_what_a_shorter_training_ends_with() -> None:
    flags = (*SMALL, "--eval_during_training_at_specified_steps=3,5")
    long = run(*flags, "--num_batches=6")
    for found, steps in zip(long.results["evaluations"], (3, 5), strict=True):
        short = run(*SMALL, f"--num_batches={steps}")
        assert found == {"step": steps, **short.results["accuracy"]}


def test_the_last_evaluation_is_the_runs_own_accuracy() -> None:
    output = run(*SMALL, "--num_batches=6", "--eval_during_training_every_n_steps=6")
    assert output.results["evaluations"] == [{"step": 6, **output.results["accuracy"]}]


def test_a_training_stops_when_it_is_good_enough(tmp_path: Path) -> None:
    flags = (*SMALL, "--num_batches=60", "--eval_during_training_every_n_steps=2")
    stopped = fresh(*flags, "--stop_at_top_1_accuracy=0.5", f"--train_dir={tmp_path}")
    *below, last = stopped.results["evaluations"]
    assert all(found["top_1"] < 0.5 for found in below)
    assert last["top_1"] >= 0.5
    steps = last["step"]
    assert [step["step"] for step in stopped.results["steps"]] == list(range(1, steps + 1))
    assert steps < 60
    assert "\nStopping, as eval accuracy at least 0.5 was reached\n" in stopped.text
    assert (tmp_path / f"step-{2 + steps}.safetensors").exists()


def test_a_part_of_the_test_part_or_more_than_it() -> None:
    flags = (*SMALL, "--num_batches=1")
    for flag, examples in (
        ("--num_eval_batches=2", 64),
        ("--num_eval_epochs=0.25", 96),  # of 12 batches three
        ("--num_eval_epochs=2", 720),
        ("--eval_batch_size=100", 360),
    ):
        match = ACCURACY.search(run(*flags, flag).text)
        assert match is not None
        assert int(match[3]) == examples
    whole = run(*flags).results["accuracy"]
    assert run(*flags, "--num_eval_epochs=2").results["accuracy"] == whole
    assert run(*flags, "--eval_batch_size=7").results["accuracy"] == whole


@pytest.mark.parametrize("other", ["parameter_server", "replicated"])
def test_a_checkpoint_is_evaluated_under_any_policy(other: str, tmp_path: Path) -> None:
    flags = (*SMALL, f"--train_dir={tmp_path}")
    trained = fresh(*flags, "--num_batches=5", *KINDS["parameter_server+staged_vars"])
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    output = fresh(*flags, "--eval", f"--variable_update={other}", "--display_every=5")
    assert output.results["accuracy"] == trained.results["accuracy"]
    assert weights(output.results) == weights(trained.results)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files
    assert "\nMode:        evaluation\n" in output.text
    assert "\nNum batches: 12\nNum epochs:  1.00\n" in output.text
    assert "\nCheckpoint:  step 7\n==========\n" in output.text
    rows = re.findall(r"^(\d+)\t\d+\.\d examples/sec$", output.text, re.M)
    assert rows == ["5", "10"]
    assert re.search(r"^-{64}\ntotal images/sec: \d+\.\d\d\n-{64}$", output.text, re.M)
    assert (output.results["steps"], output.results["images_per_sec"]) == ([], None)
    assert output.results["global_step"] == 7


def test_made_up_images_can_be_evaluated_if_that_is_asked_for(tmp_path: Path) -> None:
    flags = (*SMALL, "--data_name=mnist", "--batch_size=4", f"--train_dir={tmp_path}")
    trained = fresh(*flags, "--num_batches=2", "--eval_during_training_every_n_steps=1")
    assert trained.results["accuracy"] is not None
    assert fresh(*flags, "--eval").results["accuracy"] == trained.results["accuracy"]


def test_where_there_is_no_checkpoint_nothing_is_evaluated(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        status, sentence = refused(*SMALL, "--eval", f"--train_dir={folder}")
        assert status == 3
        assert str(folder) in sentence
        assert list(tmp_path.iterdir()) == []


# --- checkpoints and resuming -------------------------------------------------------------------


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(file.stem.split("-")[1]) for file in folder.glob("step-*.safetensors"))


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], [12]),
        (["--save_model_steps=5"], [5, 10, 12]),
        (["--save_model_steps=6"], [6, 12]),
        (["--save_model_steps=1"], [8, 9, 10, 11, 12]),
        (["--save_model_steps=1", "--max_ckpts_to_keep=2"], [11, 12]),
        (["--save_model_steps=2", "--max_ckpts_to_keep=0"], [2, 4, 6, 8, 10, 12]),
        (["--save_model_secs=1000"], [12]),
        (["--save_model_secs=1e-9", "--max_ckpts_to_keep=0"], list(range(1, 13))),
        # An update takes five steps, and within one nothing is saved.
        (["--save_model_steps=2", "--gradient_accumulation_steps=5"], [5, 10]),
    ],
)
def test_which_checkpoints_there_are(flags: list[str], steps: list[int], tmp_path: Path) -> None:
    fresh(*SMALL, "--num_batches=10", f"--train_dir={tmp_path}", *flags)
    assert checkpoints(tmp_path) == steps


VARIANTS = [
    *KINDS.values(),
    ["--optimizer=adam", "--num_epochs_per_decay=0.1", "--learning_rate_decay_factor=0.5"],
    ["--gradient_accumulation_steps=2"],
    ["--use_fp16", "--fp16_enable_auto_loss_scale", "--fp16_inc_loss_scale_every_n=3"],
    ["--save_summaries_steps=1", "--eval_during_training_every_n_steps=2"],
]


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_a_resumed_training_ends_with_the_same_bits(variant: list[str], tmp_path: Path) -> None:
    flags = (*SMALL, *variant, "--num_devices=3")
    whole = fresh(*flags, "--num_batches=10", f"--train_dir={tmp_path / 'whole'}")
    parts = f"--train_dir={tmp_path / 'parts'}"
    first = fresh(*flags, "--num_batches=4", parts)
    assert (first.results["global_step"], first.results["resumed_at"]) == (6, None)
    second = fresh(*flags, "--num_batches=10", parts)
    assert "\nResumes at:  step 6 of 12, the warm-up counted\n==========\n" in second.text
    assert [step["step"] for step in second.results["steps"]] == list(range(5, 11))
    assert (second.results["global_step"], second.results["resumed_at"]) == (12, 6)
    assert first.losses + second.losses == whole.losses
    assert second.checksums == whole.checksums
    assert second.results["accuracy"] == whole.results["accuracy"]


def test_a_training_may_be_interrupted_in_its_warm_up(tmp_path: Path) -> None:
    flags = (*SMALL, "--num_batches=3")
    whole = run(*flags)
    saved = fresh(*SMALL, "--num_warmup_batches=0", "--num_batches=1", f"--train_dir={tmp_path}")
    assert saved.results["global_step"] == 1
    assert fresh(*flags, f"--train_dir={tmp_path}").checksums == whole.checksums


def test_a_training_that_is_done_is_only_evaluated_again(tmp_path: Path) -> None:
    flags = (*SMALL, "--num_batches=3", f"--train_dir={tmp_path}")
    done, again = fresh(*flags), fresh(*flags)
    assert again.checksums == done.checksums
    assert again.results["accuracy"] == done.results["accuracy"]
    assert (again.results["steps"], again.results["images_per_sec"]) == ([], None)


def test_two_trainings_do_not_share_a_folder(tmp_path: Path) -> None:
    from minidist.train_dir import TrainDir

    with TrainDir(tmp_path):
        status, sentence = refused(*SMALL, "--num_batches=3", f"--train_dir={tmp_path}")
    assert status == 3
    assert "another training" in sentence


@pytest.mark.parametrize("name", ["parameter_server+staged_vars", "replicated+relaxed"])
def test_a_training_that_was_killed_goes_on(name: str, tmp_path: Path) -> None:
    flags = [*SMALL, *KINDS[name], "--display_every=1"]
    training = [*COMMAND, *flags, f"--train_dir={tmp_path}", "--save_model_steps=3"]
    with subprocess.Popen(
        [*training, "--num_batches=100000"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("9\t"):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    newest = checkpoints(tmp_path)[-1]
    flags.append(f"--num_batches={newest}")  # after two of warm-up: two more than were saved
    resumed = fresh(*flags, f"--train_dir={tmp_path}")
    assert resumed.results["resumed_at"] == newest
    assert resumed.checksums == fresh(*flags).checksums


# --- summaries ----------------------------------------------------------------------------------


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "summaries.jsonl").read_text().splitlines()]


def test_summaries_say_what_the_results_say(tmp_path: Path) -> None:
    flags = (*SMALL, "--num_batches=9", "--save_summaries_steps=4", f"--train_dir={tmp_path}")
    output = fresh(*flags, *PLAIN_SGD, "--piecewise_learning_rate_schedule=0.2;0.1;0.1")
    lines = read_lines(tmp_path)
    tags = ["total_loss", "learning_rate", "images_per_sec", "top_1_accuracy", "top_5_accuracy"]
    assert [line["tag"] for line in lines] == 2 * tags
    assert [line["step"] for line in lines] == 5 * [4] + 5 * [8]
    values = {(line["tag"], line["step"]): line["value"] for line in lines}
    assert [values["total_loss", step] for step in (4, 8)] == [
        output.losses[step - 2 - 1] for step in (4, 8)
    ]
    # 45 batches of 32 make an epoch, so that the rate falls before the step with four others.
    assert [values["learning_rate", step] for step in (4, 8)] == [0.2, 0.1]
    assert values["images_per_sec", 8] > 0
    with (tmp_path / "summaries.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", *tags]
    assert [[float(cell) for cell in row] for row in rows[1:]] == [
        [step, *(values[tag, step] for tag in tags)] for step in (4, 8)
    ]
    assert (tmp_path / "events.out.tfevents.minidist").stat().st_size > 100


def test_summaries_of_weights_are_a_matter_of_verbosity(tmp_path: Path) -> None:
    flags = (*SMALL, "--num_batches=2", "--save_summaries_steps=2")
    for verbosity, names in ((1, []), (2, ["weights"]), (3, ["weights", "dense/kernel"])):
        folder = tmp_path / str(verbosity)
        output = fresh(*flags, f"--summary_verbosity={verbosity}", f"--train_dir={folder}")
        last = {line["tag"]: line for line in read_lines(folder) if line["step"] == 4}
        histograms = {tag: line["histogram"] for tag, line in last.items() if "histogram" in line}
        assert set(names) <= set(histograms)
        assert bool(names) == bool(histograms)
        if names:
            assert histograms["weights"]["count"] == output.results["parameters"]
    assert sum(found["count"] for found in histograms.values()) == 2 * output.results["parameters"]


def test_an_automatic_loss_scale_is_in_the_summaries(tmp_path: Path) -> None:
    """After two finite steps that are counted the next one doubles it; steps 1 and 2 warm up."""
    flags = ("--use_fp16", "--fp16_enable_auto_loss_scale", "--fp16_inc_loss_scale_every_n=2")
    some = ("--num_batches=7", "--save_summaries_steps=1", f"--train_dir={tmp_path}")
    fresh(*SMALL, *flags, "--fp16_loss_scale=8", *some)
    scales = [line["value"] for line in read_lines(tmp_path) if line["tag"] == "loss_scale"]
    assert scales == [16, 16, 16, 32, 32, 32, 64]  # from step 3 on


def test_evaluations_are_in_the_summaries(tmp_path: Path) -> None:
    output = fresh(
        *SMALL,
        "--num_batches=4",
        "--save_summaries_steps=100",
        "--eval_during_training_every_n_steps=2",
        f"--train_dir={tmp_path}",
    )
    found = {(line["tag"], line["step"]): line["value"] for line in read_lines(tmp_path)}
    assert found == {
        (f"eval/Accuracy@{k}", 2 + evaluation["step"]): evaluation[f"top_{k}"]
        for evaluation in output.results["evaluations"]
        for k in (1, 5)
    }


def test_summaries_of_steps_that_were_lost_are_written_once(tmp_path: Path) -> None:
    flags = (*SMALL, "--save_summaries_steps=1", f"--train_dir={tmp_path}")
    fresh(*flags, "--num_batches=3")
    with (tmp_path / "summaries.jsonl").open("a") as file:  # as a killed training leaves them
        file.write('{"step": 6, "tag": "total_loss", "value": 9.0}\n')
    fresh(*flags, "--num_batches=5")
    steps = [line["step"] for line in read_lines(tmp_path) if line["tag"] == "total_loss"]
    assert steps == [3, 4, 5, 6, 7]


# --- what is done to the update -----------------------------------------------------------------


def test_accumulated_batches_make_one_update_of_all_their_examples() -> None:
    """The first four batches of 8 are the first one of 32."""
    flags = (*PLAIN_SGD, "--num_warmup_batches=0", "--num_devices=1")
    one = run(*flags, "--batch_size=32", "--num_batches=1", "--init_learning_rate=0.1")
    four = run(
        *flags,
        "--batch_size=8",
        "--num_batches=4",
        "--init_learning_rate=0.1",
        "--gradient_accumulation_steps=4",
    )
    assert np.mean(four.losses) == pytest.approx(one.losses[0], rel=1e-5)
    assert four.results["accuracy"] == one.results["accuracy"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--gradient_clip=1e-4"],
        ["--gradient_clip_norm=1e-3"],
        ["--compact_gradient_transfer"],
        ["--compact_gradient_transfer=bfloat16"],
        ["--use_bf16"],
        ["--use_fp16"],
        ["--num_learning_rate_warmup_epochs=1"],
        ["--num_epochs_per_decay=0.1", "--learning_rate_decay_factor=0.5"],
        ["--gradient_accumulation_steps=3"],
        ["--variable_consistency=relaxed"],
        KINDS["parameter_server+staged_vars"],
    ],
    ids=" ".join,
)
def test_flags_that_change_the_training(flags: list[str]) -> None:
    changed = run(*SMALL, "--num_batches=4", *flags)
    assert changed.checksums != run(*SMALL, "--num_batches=4").checksums
    assert np.isfinite(changed.losses).all()


@pytest.mark.parametrize(
    "flags",
    [
        ["--gradient_clip=1e6"],
        ["--gradient_clip_norm=1e6"],
        ["--all_reduce_spec=copy"],
        ["--all_reduce_spec=pscpu"],
        ["--all_reduce_spec=psgpu#2"],
        ["--gradient_repacking=2"],
        ["--agg_small_grads_max_bytes=4096"],
        ["--overlap"],
        ["--overlap", "--bucket_cap_mb=0.001"],
        ["--nooverlap"],
        ["--variable_update=parameter_server", "--caching"],
        ["--display_perf_ewma=0.3"],
    ],
    ids=" ".join,
)
def test_flags_that_change_no_bit(flags: list[str]) -> None:
    same = run(*SMALL, "--num_batches=4", "--num_devices=3", *flags)
    assert same.checksums == run(*SMALL, "--num_batches=4", "--num_devices=3").checksums


@pytest.mark.parametrize("spec", ["xring", "xring#2", "rechd", "pscpu:1k:xring"])
def test_other_orders_of_the_sum_differ_by_their_rounding(spec: str) -> None:
    other = run(*SMALL, "--num_batches=4", "--num_devices=3", f"--all_reduce_spec={spec}")
    assert len(set(other.checksums)) == 1
    plain = run(*SMALL, "--num_batches=4", "--num_devices=3")
    assert other.losses == pytest.approx(plain.losses, rel=1e-4)
