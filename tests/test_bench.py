"""`python -m minidist.bench` as its users meet it: what it prints, writes, refuses; how it ends."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benching import (
    ACCURACY,
    COMMAND,
    ENVIRONMENT,
    ESCAPES,
    PLAIN_SGD,
    QUICK,
    ROW,
    TOTAL,
    Output,
    call,
    command,
    fresh,
    refused,
    run,
)

from minidist import context, models
from minidist.bench.__main__ import main
from minidist.bench.flags import LEARNING_RATES, Flags
from minidist.data import cifar10
from minidist.device import cpu_linear
from minidist.variable_mgr import POLICIES

LINKS = ("cpu:0->cpu:1", "cpu:1->cpu:0")

# --- what it prints -----------------------------------------------------------------------------


def test_the_main_job_as_a_user_sees_it() -> None:
    done = command("--num_batches=25")
    assert (done.returncode, done.stderr) == (0, "")
    before, _, after = done.stdout.partition("\n==========\n")
    assert re.fullmatch(
        r"minidist:    \d+\.\d+\.\d+\n"
        r"Model:       lenet\n"
        r"Dataset:     digits\n"
        r"Mode:        training\n"
        r"Batch size:  64 global\n"
        r"             32 per device\n"
        r"Num batches: 25\n"
        r"Num epochs:  1\.09\n"
        r"Devices:     \['cpu:0', 'cpu:1'\]\n"
        r"Data format: NHWC\n"
        r"Optimizer:   momentum\n"
        r"Variables:   replicated\n"
        r"AllReduce:   auto\n"
        r"Consistency: strong\n"
        r"Precision:   float32",
        before,
    )
    lines = after.splitlines()
    assert lines[:4] == [
        "Generating training model",
        "Running warm up",
        "Done warm up",
        "Step\tImg/sec\ttotal_loss",
    ]
    rows = [match.groups() for match in ROW.finditer(after)]
    assert [int(row[0]) for row in rows] == [1, 10, 20, 25]
    assert lines[4:8] == [match.group() for match in ROW.finditer(after)]
    assert float(rows[-1][4]) < float(rows[0][4])
    assert TOTAL.search(after)
    accuracy = ACCURACY.fullmatch(lines[-1])
    assert accuracy is not None
    assert 0.5 < float(accuracy[1]) <= float(accuracy[2]) <= 1
    assert int(accuracy[3]) == 360
    assert [line.split() for line in lines[11:16]] == [
        ["Bytes", "per", "step", "predicted", "measured"],
        *([link, "755,240", "755,240"] for link in LINKS),
        ["Age", "of", "gradients,", "in", "updates"],
        ["0", "█" * 40, "400"],  # 8 variables, 2 replicas, 25 steps
    ]
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout


def test_on_a_terminal_there_is_a_bar_and_rows_are_as_ever() -> None:
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(
        [*COMMAND, "--num_batches=12", "--display_every=4"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        os.close(theirs)
        screen = b"".join(iter(lambda: _read(ours), b"")).decode()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    os.close(ours)
    assert process.returncode == 0
    assert "\x1b[2K" in screen
    text = ESCAPES.sub("", screen.replace("\r\n", "\n"))
    assert " 1/12" in text
    assert "12/12" in text
    lines = [line.rpartition("\r")[2] for line in text.splitlines()]
    rows = [match for match in map(ROW.match, lines) if match is not None]
    assert [row[1] for row in rows] == ["1", "4", "8", "12"]
    assert TOTAL.search("\n".join(lines))
    assert ACCURACY.fullmatch(lines[-1])


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so when the other side has closed
        return b""


def test_a_row_comes_every_display_every_steps_the_first_and_the_last() -> None:
    output = run(*QUICK, "--display_every=3")
    assert [match[1] for match in ROW.finditer(output.text)] == ["1", "3", "4"]
    for match in ROW.finditer(output.text):
        assert float(match[5]) == pytest.approx(output.losses[int(match[1]) - 1], abs=6e-4)


def test_training_accuracy_adds_two_columns() -> None:
    output = run(*QUICK, "--print_training_accuracy")
    assert "\nStep\tImg/sec\ttotal_loss\ttop_1_accuracy\ttop_5_accuracy\n" in output.text
    rows = [line.split("\t") for line in output.text.splitlines() if "(jitter" in line]
    assert [len(row) for row in rows] == [5, 5]
    for row in rows:
        assert 0 <= float(row[3]) <= float(row[4]) <= 1
    assert output.losses == run(*QUICK).losses


def test_help_fits_100_columns_and_names_every_flag() -> None:
    done = command("--help", COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100
    for item in fields(Flags):
        for name in (item.name, *item.metadata["aliases"]):
            assert re.search(rf"^  --{name}\b", done.stdout, re.M), name


def test_version() -> None:
    done = command("--version")
    assert re.fullmatch(r"minidist \d+\.\d+\.\d+\n", done.stdout)
    assert (done.returncode, done.stderr) == (0, "")


# --- what it writes -----------------------------------------------------------------------------


def test_the_json_is_schema_1_and_complete() -> None:
    results = run(*QUICK).results
    assert list(results) == [
        "schema",
        "config",
        "devices",
        "unit",
        "steps",
        "images_per_sec",
        "total_images_per_sec",
        "accuracy",
        "evaluations",
        "bytes",
        "staleness",
        "phases",
        "hidden_share",
        "replicas",
        "profile",
        "global_step",
        "resumed_at",
        "weights_checksum",
        "parameters",
        "skipped_records",
        "peak_memory_bytes",
        "versions",
    ]
    assert results["schema"] == 1
    assert list(results["config"]) == [item.name for item in fields(Flags)]
    assert results["config"]["optimizer"] == "momentum"
    assert results["config"]["num_batches"] == 4
    assert results["config"]["kernels"] == cpu_linear.kernels() is not None
    assert results["devices"] == ["cpu:0", "cpu:1"]
    assert [step["step"] for step in results["steps"]] == [1, 2, 3, 4]
    for step in results["steps"]:
        assert list(step) == ["step", "loss", "seconds"]
        assert step["seconds"] > 0
    speed = results["images_per_sec"]
    assert list(speed) == ["mean", "uncertainty", "jitter", "p50", "p90", "p99"]
    seconds = sum(step["seconds"] for step in results["steps"])
    assert speed["mean"] == pytest.approx(4 * 64 / seconds)
    assert speed["p50"] <= speed["p90"] <= speed["p99"]
    assert 0 < results["total_images_per_sec"] < speed["mean"]
    assert list(results["accuracy"]) == ["top_1", "top_5"]
    assert 0 <= results["accuracy"]["top_1"] <= results["accuracy"]["top_5"] <= 1
    assert (results["evaluations"], results["global_step"]) == ([], 1 + 4)
    assert results["resumed_at"] is None
    assert list(results["weights_checksum"]) == ["0", "1"]
    assert all(re.fullmatch("[0-9a-f]{64}", text) for text in run(*QUICK).checksums)
    # Two convolutions of 5×5 and two dense layers, over 8×8 pooled twice: kernels and biases.
    assert results["parameters"] == (
        (25 * 1 * 32 + 32) + (25 * 32 * 64 + 64) + (2 * 2 * 64 * 512 + 512) + (512 * 10 + 10)
    )
    assert results["peak_memory_bytes"] > 2**20
    assert set(results["versions"]) == {"minidist", "python", "numpy", "platform"}


def test_the_accuracy_in_the_json_is_the_one_that_is_printed() -> None:
    output = run(*QUICK)
    printed = ACCURACY.search(output.text)
    assert printed is not None
    assert float(printed[1]) == pytest.approx(output.results["accuracy"]["top_1"], abs=6e-5)
    assert float(printed[2]) == pytest.approx(output.results["accuracy"]["top_5"], abs=6e-5)


def test_the_json_may_go_to_a_pipe() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as results:
        process = subprocess.Popen(
            [*COMMAND, "--num_batches=1", f"--json=/dev/fd/{writer}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writer],
        )
        os.close(writer)
        assert json.load(results)["schema"] == 1
        assert process.wait(60) == 0


# --- the same and different results -------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits_also_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert command(*QUICK, f"--json={file}").returncode == 0
    other = Output("", json.loads(file.read_text()))
    for again in (fresh(*QUICK), other):
        assert again.losses == run(*QUICK).losses
        assert again.checksums == run(*QUICK).checksums
        assert again.results["accuracy"] == run(*QUICK).results["accuracy"]


def test_another_seed_gives_other_numbers() -> None:
    assert run(*QUICK, "--seed=1234").losses == run(*QUICK).losses
    other = run(*QUICK, "--tf_random_seed=1235")
    assert all(a != b for a, b in zip(other.losses, run(*QUICK).losses, strict=True))
    assert set(other.checksums).isdisjoint(run(*QUICK).checksums)


@pytest.mark.parametrize("optimizer", LEARNING_RATES)
def test_synchronous_policies_give_the_same_bits(optimizer: str) -> None:
    flags = (*QUICK, f"--optimizer={optimizer}", "--num_devices=3")
    replicated = run(*flags, "--variable_update=replicated")
    assert len(set(replicated.checksums)) == 1
    for place in ("cpu", "device"):
        served = run(
            *flags, "--variable_update=parameter_server", f"--local_parameter_device={place}"
        )
        assert served.checksums == replicated.checksums
        assert served.losses == replicated.losses
        assert served.results["accuracy"] == replicated.results["accuracy"]


def test_every_optimizer_goes_its_own_way() -> None:
    outputs = [
        run(*QUICK, f"--optimizer={optimizer}", "--num_devices=3", "--variable_update=replicated")
        for optimizer in LEARNING_RATES
    ]
    assert len({output.checksums[0] for output in outputs}) == len(outputs)


def test_independent_replicas_drift_apart() -> None:
    output = run(*QUICK, "--num_devices=3", "--variable_update=independent")
    assert len(set(output.checksums)) == 3
    assert "\nVariables:   independent\n" in output.text


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_devices(count: int) -> None:
    output = run(*QUICK, f"--num_devices={count}", "--batch_size=7")
    assert output.results["devices"] == [f"cpu:{i}" for i in range(count)]
    assert list(output.results["weights_checksum"]) == [str(i) for i in range(count)]
    assert len(set(output.checksums)) == 1
    assert f"\nBatch size:  {7 * count} global\n             7 per device\n" in output.text


def test_an_uneven_last_batch_trains_as_one_device_would() -> None:
    """1,437 = 2 · 718 + 1: of the third batch one replica gets an example, the other none."""
    flags = ("--num_batches=4", "--num_warmup_batches=0", *PLAIN_SGD, "--init_learning_rate=0.05")
    two = run(*flags, "--num_devices=2", "--batch_size=359")
    one = run(*flags, "--num_devices=1", "--batch_size=718")
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    assert len(set(two.checksums)) == 1
    steps = two.results["steps"]
    seconds = sum(step["seconds"] for step in steps)
    assert two.results["images_per_sec"]["mean"] == pytest.approx((718 * 3 + 1) / seconds)


def test_turns_give_the_bits_of_concurrent_replicas() -> None:
    for spelling in ("--concurrent=false", "--noconcurrent"):
        turns = run(*QUICK, spelling)
        assert turns.losses == run(*QUICK).losses
        assert turns.checksums == run(*QUICK).checksums


def test_the_data_format_changes_nothing() -> None:
    output = run(*QUICK, "--data_format=NCHW")
    assert "\nData format: NCHW\n" in output.text
    assert output.losses == run(*QUICK).losses
    assert output.checksums == run(*QUICK).checksums
    assert output.results["accuracy"] == run(*QUICK).results["accuracy"]


def test_nesterov_is_a_choice() -> None:
    plain = run(*QUICK, "--nonesterov")
    assert plain.checksums != run(*QUICK).checksums
    assert plain.results["config"]["nesterov"] is False
    without = run(*QUICK, "--nonesterov", "--momentum=0", "--init_learning_rate=0.1")
    sgd = run(*QUICK, "--optimizer=sgd", "--init_learning_rate=0.1")
    assert without.losses == pytest.approx(sgd.losses, rel=1e-5)


def test_the_original_gradient_scale_sums_under_replicated() -> None:
    summed = run(*QUICK, *PLAIN_SGD, "--init_learning_rate=0.05", "--gradient_scale=original")
    mean = run(*QUICK, *PLAIN_SGD, "--init_learning_rate=0.05")
    doubled = run(*QUICK, *PLAIN_SGD, "--init_learning_rate=0.1")
    assert summed.losses != mean.losses
    assert summed.losses == pytest.approx(doubled.losses, rel=1e-4)


def test_forward_only_leaves_the_weights_alone() -> None:
    once = run("--forward_only", "--num_batches=1", "--num_warmup_batches=0")
    more = run("--forward_only", "--num_batches=3")
    still = run(*QUICK, *PLAIN_SGD, "--init_learning_rate=0")
    assert once.checksums == more.checksums == still.checksums
    assert more.checksums != run(*QUICK).checksums
    assert "\nMode:        forward-only\n" in more.text
    assert "Accuracy @" not in more.text
    assert more.results["accuracy"] is None


def test_the_losses_of_the_first_step_differ_by_the_share_of_the_weights() -> None:
    first = ("--num_batches=1", "--num_warmup_batches=0")
    total = run(*first, "--weight_decay=0.01")
    base = run(*first, "--weight_decay=0.01", "--loss_type_to_report=base_loss")
    assert "\nStep\tImg/sec\tbase_loss\n" in base.text
    context.seed(1234)
    weights = [np.asarray(v.read()) for v in models.build("lenet", (8, 8, 1), 10).variables]
    share = 0.01 * sum((w.astype(np.float64) ** 2).sum() for w in weights) / 2
    assert total.losses[0] - base.losses[0] == pytest.approx(share, rel=1e-5)
    assert total.checksums == base.checksums, "what is reported changes nothing"


def test_without_weight_decay_both_losses_are_the_same() -> None:
    total = run(*QUICK, "--weight_decay=0")
    base = run(*QUICK, "--weight_decay=0", "--loss_type_to_report=base_loss")
    assert total.losses == base.losses
    assert total.checksums != run(*QUICK).checksums


def test_a_schedule_takes_effect_at_its_epoch() -> None:
    """Batches of 480 make an epoch of three steps, after which the rate is 0."""
    flags = (*PLAIN_SGD, "--batch_size=240", "--num_warmup_batches=0")
    epoch = run(*flags, "--num_batches=3", "--init_learning_rate=0.1")
    stopped = run(*flags, "--num_batches=5", "--piecewise_learning_rate_schedule=0.1;1;0")
    slower = run(*flags, "--num_batches=5", "--piecewise_learning_rate_schedule=0.1;1;0.05")
    assert stopped.losses[:3] == slower.losses[:3] == epoch.losses
    assert stopped.checksums == epoch.checksums
    assert slower.checksums != epoch.checksums
    assert stopped.results["config"]["piecewise_learning_rate_schedule"] == "0.1;1;0"


def test_epochs_of_the_warm_up_count_for_the_schedule() -> None:
    flags = (*PLAIN_SGD, "--batch_size=240", "--num_batches=2")
    still = run(*flags, "--num_warmup_batches=0", "--forward_only")
    first = run(*flags, "--num_warmup_batches=1", "--piecewise_learning_rate_schedule=0.1;0.3;0")
    only = run(*flags, "--num_warmup_batches=3", "--piecewise_learning_rate_schedule=0.1;0.3;0")
    assert first.checksums == only.checksums
    assert first.checksums != still.checksums, "a warm-up trains too"


@pytest.mark.parametrize(
    ("flag", "steps", "epochs"),
    [
        ("--num_batches=2", 2, "0.09"),
        ("--num_epochs=0.1", 3, "0.13"),
        ("--num_epochs=1", 23, "1.00"),
    ],
)
def test_the_length_is_in_batches_or_epochs(flag: str, steps: int, epochs: str) -> None:
    output = run(flag, "--num_warmup_batches=0")
    assert len(output.losses) == steps
    assert f"\nNum batches: {steps}\nNum epochs:  {epochs}\n" in output.text


# --- data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_name", ["mnist", "cifar10"])
def test_made_up_images_have_no_accuracy(data_name: str) -> None:
    output = run(*QUICK, f"--data_name={data_name}", "--model=mlp", "--batch_size=4")
    assert f"\nDataset:     {data_name} (synthetic)\n" in output.text
    assert "Accuracy @" not in output.text
    assert output.results["accuracy"] is None


def write_mnist(folder: Path, *, compress: bool) -> None:
    """Write a small MNIST of 40 training and 12 test images, 8×8."""
    generator = np.random.default_rng(5)
    for part, count in (("train", 40), ("t10k", 12)):
        images = generator.integers(256, size=(count, 8, 8), dtype=np.uint8)
        labels = generator.integers(10, size=count, dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
            content = header + array.tobytes()
            name = f"{part}-{kind}-ubyte{'.gz' if compress else ''}"
            (folder / name).write_bytes(gzip.compress(content) if compress else content)


def test_mnist_from_files_plain_and_gzip(tmp_path: Path) -> None:
    outputs = []
    for compress in (False, True):
        folder = tmp_path / f"gzip {compress}"
        folder.mkdir()
        write_mnist(folder, compress=compress)
        outputs.append(fresh(*QUICK, "--data_name=mnist", f"--data_dir={folder}", "--batch_size=8"))
    plain, packed = outputs
    assert "\nDataset:     mnist\n" in plain.text
    assert "[12 examples]" in plain.text
    assert plain.results["accuracy"] is not None
    assert plain.losses == packed.losses
    assert plain.checksums == packed.checksums


def test_cifar10_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "RECORDS", 8)
    generator = np.random.default_rng(6)
    for name in cifar10.TRAIN_FILES + cifar10.TEST_FILES:
        records = generator.integers(256, size=(8, cifar10.RECORD_BYTES), dtype=np.uint8)
        records[:, 0] %= 10
        (tmp_path / name).write_bytes(records.tobytes())
    output = fresh(
        "--num_batches=2",
        "--num_warmup_batches=0",
        "--data_name=cifar10",
        f"--data_dir={tmp_path}",
        "--batch_size=20",
    )
    assert "\nDataset:     cifar10\n" in output.text
    assert "[8 examples]" in output.text


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def spoil(file: Path) -> None:
    file.write_bytes(b"\x00\x00\x0d" + file.read_bytes()[3:])


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (Path.unlink, "a file of MNIST is missing: expected one of train-images-idx3-ubyte"),
        (truncate, r"train-images-idx3-ubyte: byte \d+: the file ends .*expected 2560 bytes"),
        (spoil, r"train-images-idx3-ubyte: byte 2: expected element type 8 .*but found 13"),
    ],
)
def test_bad_data_files_are_named_with_the_byte(
    damage: Any, complaint: str, tmp_path: Path
) -> None:
    write_mnist(tmp_path, compress=False)
    damage(tmp_path / "train-images-idx3-ubyte")
    status, sentence = refused("--data_name=mnist", f"--data_dir={tmp_path}")
    assert status == 3
    assert re.search(complaint, sentence)
    assert str(tmp_path) in sentence


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    for name in ("mnist", "cifar10"):
        status, sentence = refused(f"--data_name={name}", f"--data_dir={folder}")
        assert status == 3
        assert f"{folder}: data_dir does not exist" in sentence


# --- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--modle=lenet"], r"--modle is not a flag; did you mean --model\? Flags are --model, "),
        (["--model=resnet"], r"--model=resnet is not trivial, mlp, lenet, .*vgg16, .* or "),
        (["--variable_update=horovod"], f"is not {', '.join(POLICIES)} or all"),
        (["--num_devices=0"], "--num_devices=0 is not a whole number from 1 to"),
        (["--num_gpus=0"], "--num_gpus=0 is not a whole number from 1 to"),
        (["--batch_size=0"], "--batch_size=0 is not a whole number from 1 to"),
        (["--num_batches=3", "--num_epochs=1"], "--num_batches and --num_epochs contradict"),
        (["--init_learning_rate=1", "--piecewise_learning_rate_schedule=1"], "contradict"),
        (["--batch_size=719"], "=719 times --num_devices=2 is a batch of 1438 .* has only 1437"),
        (["--data_dir=."], "'digits' reads no data_dir .*: leave data_dir out"),
        (["--data_name=folder"], "data set .folder. has to be read: give its data_dir"),
        (["--kernels="], "--kernels= is not auto, gemm, onednn or a file"),
        (["--kernels=GEMM"], "`GEMM` is neither auto, gemm, onednn nor a file"),
    ],
)
def test_wrong_flags_are_answered_with_what_is_allowed(arguments: list[str], sentence: str) -> None:
    status, answer = refused(*arguments)
    assert status == 2
    assert re.search(sentence, answer)


def test_a_wrong_flag_as_a_user_sees_it() -> None:
    done = command("--optimizer=adagrad")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "minidist.bench: --optimizer=adagrad is not sgd, momentum, rmsprop or adam\n"
    )


@pytest.mark.parametrize("policy", ["replicated", "parameter_server", "independent"])
def test_a_loss_that_is_not_a_number_names_its_step_and_replica(policy: str) -> None:
    status, sentence = refused(
        "--optimizer=sgd", "--init_learning_rate=1e30", f"--variable_update={policy}"
    )
    assert status == 1
    assert re.match(r"the loss of replica [01] is (nan|inf|-inf) in step 2\b", sentence)


def test_wrong_kernels_are_refused_before_anything_is_printed() -> None:
    done = command(MINIDIST_KERNELS="direct")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "minidist.bench: `direct` is neither auto, gemm, onednn nor a file: "
    )


def test_a_failing_run_as_a_user_sees_it(tmp_path: Path) -> None:
    done = command(
        "--optimizer=sgd", "--init_learning_rate=1e30", f"--json={tmp_path / 'results.json'}"
    )
    assert done.returncode == 1
    assert done.stderr.startswith("minidist.bench: the loss of replica ")
    assert done.stderr.count("\n") == 1, "no traceback, no warnings"
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_memory_holds_is_a_sentence() -> None:
    status, sentence = refused("--data_name=imagenet", "--batch_size=1000000000")
    assert status == 1
    assert re.match("not enough memory .*: make --batch_size or --num_devices smaller", sentence)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no file")
def test_a_json_file_that_cannot_be_written_is_refused_before_the_training() -> None:
    status, text, errors = call(*QUICK, "--json=/proc/results.json")
    assert (status, text) == (2, "")
    assert re.fullmatch(
        r"minidist\.bench: --json: '/proc/results\.json' cannot be written: .*\n", errors
    )


# --- how it ends --------------------------------------------------------------------------------


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let processes started here notice SIGINT, also where this one was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("turns", ["--concurrent", "--noconcurrent"])
def test_ctrl_c_ends_a_run_at_once(turns: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    with subprocess.Popen(
        [*COMMAND, "--num_batches=1000000", turns, f"--json={file}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        try:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("10\t"):
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "minidist.bench: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["minidist.bench.crew", "minidist.bench.making"])
def test_ctrl_c_while_modules_are_read_is_a_sentence_too(module: str) -> None:
    program = f"""
import runpy, sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_module("minidist.bench", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr == b"minidist.bench: interrupted\n"


def test_a_reader_that_leaves_ends_the_run_quietly() -> None:
    with subprocess.Popen(
        [*COMMAND, "--num_batches=1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("minidist: ")
            process.stdout.close()
            assert process.stderr is not None
            assert process.stderr.read() == ""
            assert process.wait(30) == 1
        finally:
            process.kill()


@pytest.mark.parametrize("flag", ["--help", "--version", "--num_batches=1"])
def test_a_reader_that_was_never_there_is_no_traceback(flag: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = command(flag, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full disk")
def test_a_full_disk_is_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = command("--num_batches=1", stdout=full)
    assert done.returncode == 1
    assert re.fullmatch(r"minidist\.bench: standard output: .*No space left.*\n", done.stderr)
    status, sentence = refused("--num_batches=1", "--json=/dev/full")
    assert status == 1
    assert re.match("--json=/dev/full: the results could not be written: No space", sentence)


def test_a_name_too_long_and_links_in_a_circle_are_refused_before_the_training(tmp_path, capsys):
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for path in (tmp_path / ("a" * 300), circle):
        assert main([f"--json={path}", "--num_batches=1"]) == 2
        assert "--json: " in capsys.readouterr().err


def test_a_closed_standard_output_is_no_failure():
    command = f"{sys.executable} -m minidist.bench --num_batches=2 --num_warmup_batches=0 >&-"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
