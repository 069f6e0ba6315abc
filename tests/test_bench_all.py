"""`--variable_update=all`: every policy on the same data and start, and one table."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
from benching import COMMAND, ENVIRONMENT, ROW, call, fresh, refused, run

from minidist.bench import compare
from minidist.bench.flags.parse import parse

NAMES = [
    "independent",
    "parameter_server",
    "parameter_server+staged_vars",
    "replicated",
    "replicated+relaxed",
]
SMALL = ("--num_warmup_batches=1", "--num_batches=3", "--batch_size=16")


def rows(text: str, table: int = 0) -> dict[str, list[str]]:
    """Return the rows of the first or second table by their first cell."""
    cells = [re.split(r"\s*[│|]\s*", line.strip())[1:-1] for line in text.splitlines()]
    found = [row for row in cells if len(row) == 5 and row[0] in NAMES]
    return {row[0]: row[1:] for row in found[table * len(found) // 2 :][: len(found) // 2]}


def test_every_policy_runs_in_turn_and_a_table_compares_them() -> None:
    output = run(*SMALL, "--variable_update=all")
    results = output.results
    assert list(results) == ["schema", "config", "runs", "versions"]
    assert (results["schema"], results["config"]["variable_update"]) == (1, "all")
    assert list(results["runs"]) == NAMES
    assert [match[1] for match in ROW.finditer(output.text)] == ["1", "3"] * len(NAMES)
    table = rows(output.text)
    assert list(table) == NAMES
    independent = results["runs"]["independent"]["images_per_sec"]["mean"]
    for name, (speed, ratio, loss, accuracy) in table.items():
        found = results["runs"][name]
        assert float(speed) == pytest.approx(found["images_per_sec"]["mean"], abs=0.06)
        assert float(ratio) == pytest.approx(
            found["images_per_sec"]["mean"] / independent, abs=6e-4
        )
        assert float(loss) == pytest.approx(found["steps"][-1]["loss"], abs=6e-4)
        assert float(accuracy) == pytest.approx(found["accuracy"]["top_1"], abs=6e-5)


def test_every_policy_says_what_it_moves_and_how_old_its_gradients_are() -> None:
    """With a warm-up of one step, the staged policy and the relaxed one are in their stride."""
    output = run(*SMALL, "--variable_update=all")
    costs = rows(output.text, table=1)
    for name, found in output.results["runs"].items():
        moved, age = found["bytes"], "1" if "+" in name else "0"
        assert moved["measured"] == moved["predicted"]
        assert bool(moved["measured"]) == (name != "independent")
        assert list(found["staleness"]["histogram"]) == [age]
        assert costs[name][1] == age
        total = sum(moved["measured"].values())
        assert costs[name][0] == (f"{total / 1e6:.3g} MB" if total else "0 B")
        assert moved["input"].keys() == {"host->cpu:0", "host->cpu:1"}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_among_all_is_the_run_alone(name: str) -> None:
    among = run(*SMALL, "--variable_update=all").results["runs"][name]
    chosen = compare.POLICIES[name]
    alone = run(*SMALL, *(f"--{flag}={value}" for flag, value in chosen.items())).results
    assert among["weights_checksum"] == alone["weights_checksum"]
    assert [step["loss"] for step in among["steps"]] == [step["loss"] for step in alone["steps"]]
    assert among["accuracy"] == alone["accuracy"]
    assert list(among) == list(alone)
    for config in (among["config"], alone["config"]):
        del config["json"]
    assert among["config"] == alone["config"]


def test_flags_that_do_not_fit_a_policy_are_left_out_for_it() -> None:
    flags = parse(
        [
            "--variable_update=all",
            "--caching",
            "--batch_size=5",
            "--all_reduce_spec=xring",
            "--eval_during_training_every_n_steps=2",
            "--stop_at_top_1_accuracy=0.5",
            "--train_dir=here",
        ]
    )
    for name in NAMES:
        chosen = compare.flags_of(name, flags, compare.POLICIES[name])
        assert (chosen.batch_size, chosen.all_reduce_spec) == (5, "xring")
        assert chosen.train_dir == f"here/{name}"
        assert chosen.caching is (name == "parameter_server")
        assert chosen.staged_vars is ("staged" in name)
        assert chosen.variable_consistency == ("relaxed" if "relaxed" in name else "strong")
        staged = "staged" in name
        assert (chosen.stop_at_top_1_accuracy is None) is staged
        assert chosen.evaluates_during_training is not staged


def test_each_policy_has_a_folder_and_goes_on_there(tmp_path: Path) -> None:
    flags = (*SMALL, "--variable_update=all", f"--train_dir={tmp_path}")
    first = fresh(*flags)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted(NAMES)
    again = fresh(*flags)
    for name in NAMES:
        one, other = first.results["runs"][name], again.results["runs"][name]
        assert one["weights_checksum"] == other["weights_checksum"]
        assert (other["steps"], other["resumed_at"]) == ([], 4)
    assert rows(again.text)["replicated"][:3] == ["-", "-", "-"]


def test_without_training_there_is_a_comparison_too() -> None:
    output = run(*SMALL, "--variable_update=all", "--forward_only")
    assert {row[3] for row in rows(output.text).values()} == {"-"}


def test_a_policy_that_fails_is_named_and_the_others_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(compare.POLICIES["replicated"], "init_learning_rate", 1e30)
    file = tmp_path / "results.json"
    status, text, errors = call(*SMALL, "--variable_update=all", f"--json={file}")
    assert status == 1
    assert re.match(r"minidist\.bench: replicated: the loss of replica \d is ", errors)
    assert errors.count("\n") == 1
    assert list(rows(text)) == NAMES[:3]
    assert not file.exists()


def test_what_all_lack_is_said_before_the_first() -> None:
    status, sentence = refused("--variable_update=all", "--batch_size=719")
    assert status == 2
    assert re.search("has only 1437", sentence)


def test_ctrl_c_prints_what_is_done(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        flags = [*SMALL, "--num_batches=60", "--variable_update=all", "--display_every=20"]
        with subprocess.Popen(
            [*COMMAND, *flags, f"--json={tmp_path / 'results.json'}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        ) as process:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("parameter_server (2 of 5)"):
                assert process.poll() is None
            while not process.stdout.readline().startswith("1\t"):
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            text, errors = process.communicate(timeout=30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (process.returncode, errors) == (130, "minidist.bench: interrupted\n")
    assert list(rows(text))[:1] == ["independent"]
    assert len(rows(text)) < 5
    assert list(tmp_path.iterdir()) == []


def test_the_table_says_what_its_speeds_count(capsys: pytest.CaptureFixture[str]) -> None:
    runs = run(*SMALL, "--variable_update=all").results["runs"]
    compare.print_table(runs, "tokens")
    said = capsys.readouterr().out
    assert said.count("tokens/sec") == 2 and "images" not in said


def test_the_table_fits_80_columns() -> None:
    table = run(*SMALL, "--variable_update=all").text.partition("5 of 5")[2].partition("┏")[2]
    assert "parameter_server+staged_vars" in table
    assert max(map(len, table.splitlines())) <= 80
