"""bench/compare.py: what it makes of the lines of peers; and the workloads that peers share."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
PEER = """
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if flags["--workload"] == "input":
    print("usage: some", "input is not mine", sep="\\n", file=sys.stderr)
    sys.exit(2)
if flags["--workload"] == "mlp":
    sys.exit("no such luck")
print("a warning")
print(json.dumps({"workload": flags["--workload"], "steps": flags["--steps"]}))
"""


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


sys.path.append(str(BENCH))  # last, for it has files that are called as some of these here
compare = load(BENCH / "compare.py", "compare_of_bench")
networks = load(BENCH / "peers" / "networks.py", "networks_of_bench")
job = load(BENCH / "peers" / "job.py", "job_of_bench")


def line(peer, rate, round_, workload="mlp", variant="x", unit="images/s", batch=64):
    return {
        "peer": peer,
        "rate": rate,
        "round": round_,
        "workload": workload,
        "variant": variant,
        "unit": unit,
        "batch": batch,
        "peak_rss_mb": 10.0,
    }


def test_ratios_are_of_one_round_and_to_the_peer_with_the_best_median():
    lines = [line("minidist", rate, n) for n, rate in enumerate((10, 40, 90))]
    lines += [line("torch", rate, n) for n, rate in enumerate((5, 10, 15))]
    lines += [line("jax", rate, n) for n, rate in enumerate((100, 8, 9))]
    (case,) = compare.cases(lines)
    assert [row.side for row in case.peers] == ["torch x", "jax x"]
    assert case.ratios(case.peers[0]) == [2, 4, 6]
    said = list(compare.table([case]))
    assert said[0] == "mlp, images/s"
    assert said[1].endswith("×4.00 of the best, target: at least 1.4, target: at most 200 MB")
    assert said[2].endswith("minidist ×4 [2 .. 6]  best")
    assert not said[3].endswith("best")


def test_of_a_time_the_smaller_is_the_better_one():
    lines = [line("minidist", 2, 0, "merge_call", "merge_call", "us")]
    lines += [line("tensorflow", 8, 0, "merge_call", "merge_call", "us")]
    (case,) = compare.cases(lines)
    assert case.ratios(case.peers[0]) == [4]


def test_a_round_that_one_of_two_was_not_in_has_no_ratio():
    lines = [line("minidist", 3, n) for n in (0, 1)] + [line("mpi", 1, n) for n in (1, 2)]
    (case,) = compare.cases(lines)
    assert case.ratios(case.peers[0]) == [3]


def test_sizes_and_rules_are_cases_and_an_empty_call_is_nobodys_best():
    lines = [
        line("jax", rate, 0, "allreduce", variant, "GB/s", size)
        for size in (4, 256)
        for variant, rate in (("psum", 1), ("empty", 9))
    ]
    lines += [
        line("torch", 5, 0, "optimizer", f"{rule}-fused", "GB/s") for rule in ("sgdm", "adam")
    ]
    found = compare.cases(lines)
    assert [case.name for case in found] == ["4 KB", "256 KB", "sgdm", "adam"]
    assert [row.side for row in found[0].peers] == ["jax psum"]
    assert [row.side for row in found[2].peers] == ["torch fused"]


def test_a_side_says_what_it_has(tmp_path, capsys):
    program = tmp_path / "peer.py"
    program.write_text(PEER)
    side = compare.Side("some", [sys.executable, str(program)])
    assert side.measure("lenet", ["--steps", "3"]) == [{"workload": "lenet", "steps": "3"}]
    assert side.measure("input", []) == []
    assert side.lacks == {"input"}
    assert capsys.readouterr().err == "some has no input: input is not mine\n"
    assert side.measure("mlp", []) == []  # it has failed, and the others go on
    assert "no such luck" in capsys.readouterr().err


def test_the_table_of_an_earlier_run_is_printed_again(tmp_path):
    file = tmp_path / "lines.json"
    file.write_text(json.dumps({"machine": "a machine", "lines": [line("minidist", 7, 0)]}))
    command = [sys.executable, str(BENCH / "compare.py"), "--read", str(file)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines()[0] == "a machine"
    assert "minidist" in said


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--torch", "/nonexist"], "--torch=/nonexist is no program; it wants the Python that has"),
        (["--read", "/nonexist.json"], "--read=/nonexist.json cannot be read: .*No such file"),
        (["--read", str(BENCH / "compare.py")], "compare.py cannot be read: Extra data"),
        (["--read", "{a list}"], "cannot be read: it is no file that --json has written"),
        (["--rounds", "0"], "argument --rounds: 0 is too few, it must be at least 1"),
        (["--replicas", "-1"], "argument --replicas: -1 is less than 0"),
        (["--only", "mlp,foo"], "there is no workload 'foo'; choose from mlp"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(flags, why, tmp_path, capsys, monkeypatch):
    other = tmp_path / "list.json"
    other.write_text("[]")
    flags = [str(other) if flag == "{a list}" else flag for flag in flags]
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    monkeypatch.setattr(compare, "rounds", None)  # nothing is run
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert re.search(why, capsys.readouterr().err.splitlines()[-1])


def test_it_says_what_it_does_and_that_it_has_no_peer(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compare.Side, "measure", lambda side, *_: [line("x", 7, 0)])
    monkeypatch.setattr(sys, "argv", ["compare.py", "--only=mlp", "--rounds=2"])
    compare.main()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "minidist alone, for no peer is given: --torch, --tensorflow, --jax, --mpi"
    assert said[1:] == ["round 0: mlp, minidist", "round 1: mlp, minidist"]


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--replicas", "0", "0 is too few, it must be at least 1"),
        ("--warmup", "-1", "-1 is less than 0"),
        ("--variable-update", "foo", "invalid choice: 'foo'"),
    ],
)
def test_minidists_wrong_command_line_is_one_sentence(flag, value, why):
    command = [sys.executable, str(BENCH / "minidist_peer.py"), "--workload", "mlp", flag, value]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"argument {flag}: {why}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("mlp", 6, 1_863_690),
        ("lenet", 8, 1_663_370),
        ("resnet20", 65, 272_474),
        ("resnet50", 161, 25_557_032),
    ],
)
def test_networks_have_their_parameters(name, tensors, parameters):
    shapes = networks.shapes(name)
    assert (len(shapes), sum(map(prod, shapes))) == (tensors, parameters)


def test_minidists_models_are_the_peers_networks():
    import minidist as md

    for name in ("mlp", "lenet", "resnet20"):
        network = networks.NETWORKS[name]
        with md.Strategy("cpu*1") as strategy, strategy.scope():
            model = md.models.build(name, network.image, network.classes)
        own = sorted(variable.shape for variable in model.trainable_variables)
        assert own == sorted(networks.shapes(name))


def test_minidist_answers_as_its_peers_do():
    flags = ["--replicas", "2", "--batch", "2", "--steps", "2", "--warmup", "1"]
    command = [sys.executable, str(BENCH / "minidist_peer.py"), "--workload", "mlp", *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (said,) = map(json.loads, done.stdout.splitlines())
    assert (said["peer"], said["workload"], said["unit"]) == ("minidist", "mlp", "images/s")
    assert (said["replicas"], said["batch"], said["params"]) == (2, 2, 1_863_690)
    assert said["rate"] == pytest.approx(4 / said["step_s"])
    assert 0 < said["p10_s"] <= said["step_s"] <= said["p90_s"]
    assert compare.cases([{**said, "round": 0}])[0].own is not None


def test_a_workload_that_a_peer_has_not_is_refused_without_loading_it():
    command = [sys.executable, str(BENCH / "peers" / "jax_peer.py"), "--workload", "input"]
    assert subprocess.run(command, capture_output=True).returncode == 2


def test_what_a_package_takes_on_disk_counts_its_dependencies():
    assert job.megabytes("numpy") > 10
    assert job.megabytes("minidist") > job.megabytes("numpy")
