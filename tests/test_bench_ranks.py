"""`python -m minidist.bench` as several processes: one program, one report, one way to end."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import ranks
from benching import ENVIRONMENT, ROW, TOTAL
from benching import run as run_alone

from minidist.bench import crew, merging
from minidist.bench.__main__ import main
from minidist.bench.compare import BASELINE, SERVED, SUMMED
from minidist.bench.figures import Figures
from minidist.bench.flags.parse import parse
from minidist.cluster import alone
from minidist.trace.phases import PHASES
from minidist.train import StepResult

QUICK = ("--num_batches=4", "--num_warmup_batches=1", "--batch_size=16")
SUMS = (*QUICK, "--num_devices=1", "--variable_update=collective_all_reduce")
SERVES = (*QUICK, "--num_devices=1", "--variable_update=parameter_server", "--num_ps=1")


# --- in ranks -----------------------------------------------------------------------------------


def bench(cluster, *flags):
    """Run the command as the ranks of a cluster; return its status, and what it printed here."""
    with (
        mock.patch.object(crew, "connect", return_value=cluster),
        mock.patch.object(crew, "_company", return_value=cluster.size),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as errors,
    ):
        status = main([*flags])
    if cluster.job == "worker":
        cluster.leave()  # as a worker does when it ends; the ps then end too
    return status, out.getvalue(), errors.getvalue()


def results(cluster, *flags):
    """Run a command that goes well, and return in the chief what its JSON holds, and its text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder if cluster.rank == 0 else os.devnull, "results.json")
        with mock.patch.object(crew, "OWN", (*crew.OWN, "json")):
            json_flag = f"--json={file if cluster.rank == 0 else os.devnull}"
            status, text, errors = bench(cluster, *flags, json_flag)
        assert (status, errors) == (0, ""), errors
        if cluster.rank != 0:
            assert text == ""
            return None, text
        return json.loads(file.read_text()), text


# What is to be compared with a run of one process, which is done before.
FOUR = ("--num_epochs=0.2", "--num_warmup_batches=1", "--batch_size=9")
LONGER = (*QUICK, "--num_batches=7")
EARLY = (
    *QUICK,
    "--num_batches=40",
    "--eval_during_training_every_n_steps=2",
    "--stop_at_top_1_accuracy=0.3",
)
ALONE = (QUICK, (*FOUR, "--num_devices=4"), LONGER, EARLY)


def by_one_process(*flags):
    """Return what the JSON of a run of one process holds."""
    found = json.loads(Path(os.environ["MINIDIST_TEST_FOLDER"], "alone.json").read_text())
    return found[" ".join(flags)]


def same_training(found, other):
    assert set(found["weights_checksum"].values()) == set(other["weights_checksum"].values())
    assert len(found["weights_checksum"]) == len(other["weights_checksum"])
    assert [step["loss"] for step in found["steps"]] == [step["loss"] for step in other["steps"]]
    assert found["accuracy"] == other["accuracy"]
    assert found["evaluations"] == other["evaluations"]
    assert found["global_step"] == other["global_step"]


def sums(cluster):
    """Two workers with a device each compute what one process with two devices does."""
    found, text = results(cluster, *SUMS, "--print_training_accuracy")
    if found is None:
        return
    same_training(found, by_one_process(*QUICK))
    assert found["devices"] == ["worker:0/cpu:0", "worker:1/cpu:0"]
    assert list(found["replicas"][0]["phases"]) == list(PHASES)
    assert [each["replica"] for each in found["replicas"]] == [0, 1]
    assert "Batch size:  32 global\n             16 per device\n" in text
    assert "\nProcesses:   2 workers\n" in text
    assert TOTAL.search(text) and "[360 examples]" in text


def sums_of_two_devices_each(cluster):
    flags = ("--num_devices=2", "--variable_update=distributed_all_reduce")
    found, _ = results(cluster, *FOUR, *flags)
    if found is not None:
        same_training(found, by_one_process(*FOUR, "--num_devices=4"))


def served(cluster):
    """Synchronous policies with a parameter server give the same again, and count their bytes."""
    for name in ("parameter_server", "distributed_replicated"):
        part = cluster.part(cluster.workers, cluster.servers)
        found, text = results(
            part, *QUICK, "--num_devices=1", f"--variable_update={name}", "--num_ps=1"
        )
        if found is None:
            continue
        same_training(found, by_one_process(*QUICK))
        assert found["bytes"]["predicted"] == found["bytes"]["measured"]
        assert {"worker:1->ps:0", "ps:0->worker:0"} <= set(found["bytes"]["measured"])
        assert found["staleness"] == {"histogram": {"0": 2 * 8 * 4}}
        assert "\nProcesses:   2 workers, 1 ps\nSync:        True\n" in text


def each_on_its_own(cluster):
    """Workers that are not in step have the same number of steps, and data of their own."""
    found, text = results(cluster, *SERVES, "--nocross_replica_sync", "--staleness_bound=2")
    if found is not None:
        assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4]
        assert len(set(found["weights_checksum"].values())) == 1
        assert found["bytes"]["input"] == {"host->cpu:0": 2 * 16 * (8 * 8 * 4 + 8)}
        assert sum(found["staleness"]["histogram"].values()) == 2 * 8 * 4
        assert "\nSync:        False\n" in text and "[360 examples]" in text


def all_policies(cluster):
    found, text = results(
        cluster,
        "--num_batches=2",
        "--num_warmup_batches=1",
        "--batch_size=16",
        "--num_devices=1",
        "--num_ps=1",
        "--variable_update=all",
        "--eval_during_training_every_n_steps=2",
        "--nocross_replica_sync",
        "--staleness_bound=1",
    )
    if found is not None:
        assert list(found["runs"]) == [BASELINE, *SERVED, *SUMMED]
        for name, of in found["runs"].items():
            config = of["config"]
            asynchronous = name == "parameter_server+async"
            assert config["cross_replica_sync"] is not asynchronous
            assert config["staleness_bound"] == (1 if asynchronous else None)
            assert bool(of["evaluations"]) is not (asynchronous or "staged" in name)
            assert len(set(of["weights_checksum"].values())) == 1 + (name == BASELINE)
        for name in ("distributed_replicated", "collective_all_reduce", "distributed_all_reduce"):
            same_training(found["runs"][name], found["runs"]["parameter_server"])
        assert "collective_all_reduce+relaxed" in text.partition("┏")[2]


def kept(cluster, folder):
    """A training goes on in several processes, and then in one, to the same bits."""
    keeping = (f"--train_dir={folder}/kept", "--save_summaries_steps=2", "--save_model_secs=0.001")
    results(cluster, *SUMS, *keeping)
    found, text = results(cluster, *SUMS, "--num_batches=7", *keeping)
    if found is not None:
        assert found["resumed_at"] == 5 and "Resumes at:  step 5 of 8" in text
        same_training({**found, "steps": []}, {**by_one_process(*LONGER), "steps": []})
        lines = Path(folder, "kept", "summaries.jsonl").read_text().splitlines()
        assert {json.loads(line)["step"] for line in lines} == {2, 4, 6, 8}
    found, text = results(cluster, *SUMS, f"--train_dir={folder}/kept", "--eval")
    if found is not None:
        assert found["accuracy"] == by_one_process(*LONGER)["accuracy"]
        assert found["global_step"] == 8


def stopping_early(cluster):
    found, text = results(cluster, *SUMS, *EARLY)
    if found is not None:
        same_training(found, by_one_process(*EARLY))
        assert len(found["steps"]) < 40 and "Stopping, as eval accuracy" in text


def traced(cluster, folder):
    """Each worker has a file of its own; the sentences are about the replicas of all."""
    _, text = results(cluster, *SUMS, f"--trace_file={folder}/t.json", "--inject=slow:1:200")
    name = "t.json" if cluster.is_chief else "t.worker-1.json"
    assert json.loads(Path(folder, name).read_text())["traceEvents"]
    if cluster.is_chief:
        assert re.search(r"^Replica 1 \(cpu:0\) was slow: .* than replica 0", text, re.M)
        waited = re.search(r"^Meanwhile replica 0 waited for it: (\S+) ms", text, re.M)
        assert waited is not None and float(waited[1]) > 0


def ended(cluster, *flags):
    """Return the status of a command that must fail, and what the chief says; others are silent."""
    status, _, errors = bench(cluster, *flags)
    if not cluster.is_chief:
        assert errors == "", errors
    return status, errors.removeprefix("minidist.bench: ").rstrip("\n")


def failures(cluster):
    """Whoever fails, all end with the status that this has, and the chief says it once."""
    chief = cluster.is_chief
    for flags, expected, sentence in [
        (("--inject=fail:1:2",), 1, "worker:1: replica 1 was made to fail in step 2, by --inject"),
        (("--inject=fail:0:3",), 1, "worker:0: replica 0 was made to fail in step 3, by --inject"),
        (
            ("--inject=slow:2:3",),
            2,
            "--inject=slow:2:3 names replica 2, but --num_devices=1 in each of 2 workers has "
            "replicas 0 to 1",
        ),
        (("--batch_size=zero",), 2, "--batch_size=zero is not a whole number from 1 to 1000000000"),
        (
            (f"--batch_size={16 + cluster.task}",),
            2,
            "--batch_size is 16 in worker:0 and 17 in worker:1: give all ranks the same flags",
        ),
        (
            ("--batch_size=16" if chief else "--batch_size=x",),
            2,
            "worker:1: --batch_size=x is not a whole number from 1 to 1000000000",
        ),
        (
            ("--batch_size=719",),
            2,
            "--batch_size=719 times --num_devices=1 times 2 workers is a batch of 1438 examples, "
            "but digits has only 1437 to train on: make one of the two smaller",
        ),
        (
            ("--variable_update=replicated",),
            2,
            "--variable_update=replicated is for one process, but there are 2 workers: choose "
            "distributed_all_reduce, collective_all_reduce, parameter_server, "
            "distributed_replicated or independent",
        ),
        (
            ("--variable_update=parameter_server",),
            2,
            "--variable_update=parameter_server of 2 workers needs parameter servers: start more "
            "processes, and say with --num_ps how many they are",
        ),
        (("--json=/dev/full",), 1, "worker:0: --json=/dev/full: the results could not be written"),
    ]:
        part = cluster.part(cluster.workers)
        status, said = ended(part, *SUMS, *flags)
        assert status == expected, (flags, status, said)
        assert not chief or said.startswith(sentence), said


def data_that_is_missing_in_one_rank(cluster):
    folder = "/" if cluster.is_chief else "/nowhere"
    with mock.patch.object(crew, "OWN", (*crew.OWN, "data_dir")):
        status, said = ended(cluster, *SUMS, "--data_name=mnist", f"--data_dir={folder}")
    assert status == 3
    if cluster.is_chief:
        assert re.fullmatch(r"(worker:\d: .*\n?)*", said.replace("minidist.bench: ", ""))
        assert "worker:1: /nowhere: data_dir does not exist" in said


def a_loss_that_is_not_a_number(cluster):
    status, said = ended(cluster, *SUMS, "--init_learning_rate=1e30")
    assert status == 1
    if cluster.is_chief:
        assert re.match(r"worker:\d: the loss of replica \d is (nan|inf)", said)


def servers_with_nothing_to_do(cluster):
    status, said = ended(cluster, *SUMS, "--num_ps=1")
    assert status == 2
    if cluster.is_chief:
        assert said == (
            "--variable_update=collective_all_reduce has nothing to do for 1 parameter servers: "
            "leave out --num_ps and --ps_hosts"
        )


def a_worker_that_fails_before_a_server(cluster):
    """The ps ends too, and in peace."""
    status, said = ended(cluster, *SERVES, "--inject=fail:1:2")
    assert status == (1 if cluster.job == "worker" else 0)
    if cluster.is_chief:
        assert said == "worker:1: replica 1 was made to fail in step 2, by --inject"


def in_a_folder(case):
    """Let a case have a folder that all its ranks know."""

    def with_folder(cluster):
        case(cluster, os.environ["MINIDIST_TEST_FOLDER"])

    return with_folder


CASES = {
    "sums": (2, 0, sums),
    "sums of two devices each": (2, 0, sums_of_two_devices_each),
    "served": (2, 1, served),
    "each on its own": (2, 1, each_on_its_own),
    "all": (2, 1, all_policies),
    "kept": (2, 0, in_a_folder(kept)),
    "stopping early": (2, 0, stopping_early),
    "traced": (2, 0, in_a_folder(traced)),
    "failures": (2, 0, failures),
    "missing data": (2, 0, data_that_is_missing_in_one_rank),
    "loss that is not a number": (2, 0, a_loss_that_is_not_a_number),
    "servers with nothing to do": (2, 1, servers_with_nothing_to_do),
    "failing before a server": (2, 1, a_worker_that_fails_before_a_server),
}


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    alone = {" ".join(flags): run_alone(*flags).results for flags in ALONE}
    (folder / "alone.json").write_text(json.dumps(alone))
    env = {"MINIDIST_TEST_FOLDER": str(folder)}
    return ranks.run(__file__, 3, *ranks.chosen(request, CASES), env=env)


@pytest.mark.parametrize("case", CASES)
def test_case(outcome, case):
    outcome.check(case)


# --- as its users start it ----------------------------------------------------------------------


def command(count, *flags):
    return [ranks.mpiexec(), "-n", str(count), sys.executable, "-m", "minidist.bench", *flags]


def test_two_ranks_print_and_write_what_one_process_does(tmp_path):
    file = tmp_path / "results.json"
    done = subprocess.run(
        command(2, *SUMS, f"--json={file}"),
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [row[1] for row in ROW.finditer(done.stdout)] == ["1", "4"]
    assert done.stdout.count("Running warm up") == 1
    same_training(json.loads(file.read_text()), run_alone(*QUICK).results)


def test_an_error_appears_once_and_is_the_status_of_all():
    done = subprocess.run(
        command(2, *SUMS, "--num_batches=none"),
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "minidist.bench: --num_batches=none is not a whole number from 1 to 1000000000\n"
    )


def test_help_appears_once():
    done = subprocess.run(
        command(2, "--help"), capture_output=True, text=True, timeout=60, env=ENVIRONMENT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: ") == 1


def test_ctrl_c_ends_all_ranks():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with subprocess.Popen(
            command(3, *SERVES, "--num_batches=100000"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("10\t"):
                assert process.poll() is None
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode != 0
    assert "Traceback" not in errors
    assert "interrupted" in errors and errors.count("minidist.bench: interrupted\n") <= 1


# --- alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["distributed_all_reduce", "collective_all_reduce", "distributed_replicated"]
)
def test_policies_of_several_processes_work_in_one(name):
    found = run_alone(*QUICK, f"--variable_update={name}").results
    same_training(found, run_alone(*QUICK).results)
    assert found["devices"] == ["cpu:0", "cpu:1"]


class OfTwo:
    """Stands for a crew of two workers, of which the other one has brought these."""

    def __init__(self, others):
        self.others = iter(others)

    def exchange(self, what, item):
        return [json.loads(json.dumps(item)), json.loads(json.dumps(next(self.others)))]


def test_a_step_is_that_of_all_workers():
    """Losses are weighted by examples; seconds are the mean of the workers'."""
    theirs = [[2, 0.25, 3.0, [[4.0, 1, 0, 1]]]]
    figures = Figures(OfTwo([theirs, [[], 9.0]]), in_step=True)
    figures.add(2, [StepResult(1.0, 3, 2, 3)], 0.25, 1.0)
    figures.settle()
    assert figures.steps == [(2, (3 * 1.0 + 4.0) / 4 + 0.25, 2.0)]
    assert (figures.images, figures.loss) == ([4], 2.0)
    assert (figures.accuracy.top_1, figures.accuracy.top_5) == (0.5, 1.0)
    figures.finish(5.0)
    assert figures.elapsed == 9.0 and len(figures.steps) == 1


def test_workers_that_are_not_in_step_settle_at_the_end():
    theirs = [[[1, 0.0, 1.0, [[4.0, 1, 0, 0]]], [2, 0.0, 1.0, [[2.0, 1, 0, 0]]]], 1.0]
    figures = Figures(OfTwo([theirs]), in_step=False)
    figures.add(1, [StepResult(1.0, 1)], 0.0, 1.0)
    figures.settle()
    assert figures.steps == [(1, 1.0, 1.0)] and figures.images == [1]
    figures.add(2, [StepResult(1.0, 1)], 0.0, 1.0)
    figures.finish(1.0)
    assert figures.steps == [(1, 2.5, 1.0), (2, 1.5, 1.0)] and figures.images == [2, 2]


def test_counts_are_added_up_by_link_and_age():
    one = {
        "bytes": {"predicted": {"a->b": 3}, "measured": {"a->b": 3}, "input": {}},
        "staleness": {"histogram": {"0": 2, "10": 1}},
    }
    two = {
        "bytes": {"predicted": {"a->b": 4}, "measured": {"a->b": 4, "c->a": 1}, "input": {"h": 2}},
        "staleness": {"histogram": {"2": 2, "0": 1}},
    }
    assert merging.counts([one, two]) == {
        "bytes": {"predicted": {"a->b": 7}, "measured": {"a->b": 7, "c->a": 1}, "input": {"h": 2}},
        "staleness": {"histogram": {"0": 3, "2": 2, "10": 1}},
    }
    nothing = {"bytes": None, "staleness": None}
    assert merging.counts([nothing, nothing]) == nothing
    without = {**one, "bytes": {**one["bytes"], "predicted": None}}
    assert merging.counts([without, without])["bytes"]["predicted"] is None


def of_worker(own, waiting, waited_for=(), share=None):
    """Return phases of a worker, as JSON has them, with replicas that spent so much."""
    replicas = [
        {
            "replica": k,
            "device": f"cpu:{k}",
            "phases": {**dict.fromkeys(PHASES, 0.0), "waiting": waiting[k], "forward": own[k]},
            "own": own[k],
            "behind": 0.0,
            "waited_for": dict(waited_for) if k == 0 else {},
        }
        for k in range(len(own))
    ]
    return {"steps": 5, "step": 10.0, "phases": {}, "hidden_share": share, "replicas": replicas}


def test_phases_are_of_all_replicas_and_name_who_was_slow():
    found = merging.phases(
        [of_worker([2.0, 3.0], [8.0, 7.0], {"1": 1.0}, 0.5), None, of_worker([10.0], [0.0])]
    )
    assert found is not None
    assert [(each.replica, each.device) for each in found.replicas] == [
        (0, "cpu:0"),
        (1, "cpu:1"),
        (2, "cpu:0"),
    ]
    assert [each.behind for each in found.replicas] == [0.0, 1.0, 8.0]
    assert [each.waited_for for each in found.replicas] == [{1: 1.0, 2: 7.0}, {2: 7.0}, {}]
    assert (found.phases["waiting"], found.phases["forward"]) == (5.0, 5.0)
    assert (found.hidden_share, found.steps, found.step) == (0.5, 5, 10.0)
    assert merging.phases([None]) is None


def test_files_of_several_workers_have_names_of_their_own():
    alone_crew = crew.Crew()
    assert alone_crew.own_file("a/steps.html") == "a/steps.html"
    assert alone_crew.for_chief(["x"]) == ["x"]
    other = crew.Crew()
    other.cluster = mock.Mock(is_chief=False, me="worker:3")
    assert other.own_file("a/steps.html") == "a/steps.worker-3.html"
    assert other.for_chief(["x"]) == ()


def test_a_crew_of_one_agrees_with_itself():
    alone_crew = crew.Crew()
    alone_crew.join(parse([]))
    assert alone_crew.cluster.size == alone().size == 1
    assert alone_crew.exchange("anything", [1, None]) == [[1, None]]
    assert alone_crew.chiefs("anything", True) is True


if __name__ == "__main__":
    logging.disable()  # of waits for a rank that is late
    ranks.main(CASES)
