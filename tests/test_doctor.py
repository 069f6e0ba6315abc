"""The doctor: it says what there is, and of what is wrong also the cure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ranks

from minidist.device import cpu_linear
from minidist.doctor import gpus, kernels, machine, packages, processes
from minidist.doctor.report import as_json, as_text, merged
from minidist.errors import ClusterError
from minidist.launch import mpiexec

DOCTOR = [sys.executable, "-m", "minidist.doctor"]


def run(*arguments, launcher=(), **variables):
    done = subprocess.run(
        [*launcher, *DOCTOR, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **variables},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def whats(found):
    return [problem.what for problem in found.problems]


def test_one_process_is_told_of_everything():
    status, out, errors = run("--json", MINIDIST_ANYTHING="there")
    told = json.loads(out)
    assert errors == ""
    assert status == (1 if told["problems"] else 0)
    assert told["minidist"]["compiled"] is True
    assert told["python"]["executable"] == sys.executable
    assert {"numpy", "optree", "mpi4py"} <= {each["name"] for each in told["packages"]}
    assert told["machine"]["threads"] >= 1
    assert told["mpi"]["vendor"].split()[0] in processes.DIALECTS
    assert told["mpi"]["mpiexec"][0]["path"] == ranks.mpiexec()
    assert told["launcher"]["winner"] is None and "ranks" not in told
    assert told["environment"]["MINIDIST_ANYTHING"] == "there"


def test_the_text_names_what_the_facts_name():
    found = everything()
    text = as_text(found)
    facts = json.loads(as_json(found))
    for each in facts["packages"]:
        assert (each["version"] is None) or f"{each['name']} {each['version']}" in text
    assert facts["mpi"]["mpiexec"][0]["path"] in text
    assert facts["launcher"]["why"] in text
    assert text.endswith("Nothing is missing.") is (not found.problems)


def test_all_ranks_meet_and_the_first_one_tells():
    launcher = (ranks.mpiexec(), "-n", "3")
    status, out, errors = run("--json", "--num_ps=1", launcher=launcher)
    told = json.loads(out)  # of one report
    assert (status, errors) == (1 if told["problems"] else 0, "")
    assert [each["name"] for each in told["ranks"]] == ["worker:0", "worker:1", "ps:0"]
    assert told["me"] == "worker:0"
    assert "rank 0 of 3" in told["launcher"]["why"]


def test_a_contradiction_is_a_problem():
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}
    status, out, errors = run(**variables)
    assert (status, errors) == (1, "")
    assert "PROBLEM     the environment contradicts itself" in out


def test_a_wrong_flag_is_refused():
    status, out, errors = run("--jsn")
    assert (status, out) == (2, "")
    assert "unrecognized arguments: --jsn" in errors


def test_a_missing_package_is_a_problem_unless_it_is_extra(monkeypatch):
    there = packages.version
    missing = ("optree", "pillow")
    monkeypatch.setattr(packages, "version", lambda n: None if n in missing else there(n))
    found = packages.find()
    assert whats(found) == ["optree is missing"]
    assert found.problems[0].cure.startswith("pip install 'optree>=")
    text = as_text(everything(packages=found))
    assert "without pillow: for image files, pip install 'minidist[images]'" in text


def test_choices_that_cannot_be_kept_are_a_problem(monkeypatch, tmp_path):
    before = cpu_linear.kernels()
    (tmp_path / "taken").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    try:
        cpu_linear.set_kernels("auto")
        found = kernels.find()
        text = as_text(everything(kernels=found))
    finally:
        monkeypatch.undo()
        cpu_linear.set_kernels(before)
    assert "cannot be kept" in whats(found)[0] and "every process measures anew" in whats(found)[0]
    assert "XDG_CACHE_HOME" in found.problems[0].cure
    assert " choices in " not in text
    if before == "auto":
        assert kernels.find().problems == [] and " choices in " in as_text(everything())


def test_no_mpi_is_told_with_the_cure(monkeypatch):
    def missing():
        raise ClusterError("MPI cannot be used here: pip install 'minidist[mpi]'")

    monkeypatch.setattr(processes.implementation, "vendor", missing)
    found = processes.find({})
    assert (found.facts["mpi"]["vendor"], found.problems) == (None, [])
    assert "minidist[mpi]" in as_text(everything(processes=found))


@pytest.mark.parametrize(
    ("dialects", "words", "cure"),
    [
        ([], "no mpiexec beside this Python", "pip install mpich"),
        (["openmpi"], "/0/mpiexec, is not of the MPI that mpi4py uses, MPICH", "install mpi4py"),
        (["openmpi", "mpich"], "/0/mpiexec, is not of the MPI", "use /1/mpiexec"),
        (["mpich", "openmpi"], None, None),
    ],
)
def test_an_mpiexec_of_another_mpi_is_a_problem(dialects, words, cure, monkeypatch):
    paths = [f"/{i}/mpiexec" for i in range(len(dialects))]
    there = {
        path: mpiexec.Mpiexec(path, dialect, "5")
        for path, dialect in zip(paths, dialects, strict=True)
    }
    monkeypatch.setattr(processes.mpiexec, "candidates", lambda: paths)
    monkeypatch.setattr(processes.mpiexec, "find", there.__getitem__)
    monkeypatch.setattr(processes.implementation, "vendor", lambda: ("MPICH", "5.0"))
    problems = processes.find({}).problems
    assert (len(problems) == 0) if words is None else words in problems[0].what
    assert cure is None or problems[0].cure.startswith(cure)


def everything(**replaced):
    parts = {
        "packages": packages.find(),
        "processes": processes.find({}),
        "machine": machine.find(),
        "kernels": kernels.find(),
        "gpus": gpus.find(),
    }
    return merged([*(parts | replaced).values()])


TOLD = {
    "cupy": "14.2.0",
    "toolkit": "12.9",
    "nvrtc": "12.9",
    "cublas": "12.9.1",
    "nccl": "2.32.3",
    "cudnn": "none (No module named 'cudnn')",
    "supports": "13.0",
    "devices": [
        {"name": "NVIDIA X", "memory": 80 << 30, "capability": "9.0", "reaches": [1]},
        {"name": "NVIDIA Y", "memory": 40 << 30, "capability": "8.0", "reaches": []},
    ],
}


def saying(text, status=0, errors=""):
    """Return what is to be run in place of the process that asks CUDA."""

    def run(command, **how):
        assert command[1:] == ["-m", "minidist.doctor.cuda"] and how["timeout"] > 0
        return subprocess.CompletedProcess(command, status, text, errors)

    return run


def asking(monkeypatch, run):
    names = ("DEVNULL", "TimeoutExpired")
    rest = {name: getattr(subprocess, name) for name in names}
    monkeypatch.setattr(gpus, "subprocess", SimpleNamespace(run=run, **rest))


def test_without_a_driver_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(gpus, "_driver", lambda: None)
    asking(monkeypatch, None)  # nobody is asked
    found = gpus.find()
    assert found.problems == []
    lines = as_text(everything(gpus=found)).splitlines()
    assert [line for line in lines if "cuda" in line] == [
        " " * 12 + "no cuda: there is no driver of NVIDIA's here"
    ]


@pytest.mark.parametrize(
    ("driver", "extra"), [("570.1", "cuda12"), ("580.65.06", "cuda13"), ("unknown", "cuda13")]
)
def test_without_cupy_the_driver_says_which_to_install(driver, extra, monkeypatch):
    monkeypatch.setattr(gpus, "_driver", lambda: driver)
    monkeypatch.setattr(packages, "version", lambda name: None)
    text = as_text(everything(packages=packages_there(), gpus=gpus.find()))
    assert f"cuda: driver {driver}, without CuPy: pip install 'minidist[{extra}]'" in text


def packages_there():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "version", lambda name: "1")
        return packages.find()


def cupy_is_there(monkeypatch, names=("cupy-cuda13x",)):
    there = packages.version
    monkeypatch.setattr(gpus, "_driver", lambda: "580.65.06")
    monkeypatch.setattr(packages, "version", lambda n: "14" if n in names else there(n))


def test_gpus_are_told_with_their_libraries_and_peers(monkeypatch):
    cupy_is_there(monkeypatch)
    asking(monkeypatch, saying(json.dumps(TOLD)))
    found = gpus.find()
    text = as_text(everything(gpus=found))
    for line in (
        "cuda: driver 580.65.06 for CUDA up to 13.0, CuPy 14.2.0 with CUDA 12.9, NVRTC 12.9, "
        "cuBLAS 12.9.1",
        "cuda:0, NVIDIA X, compute capability 9.0, 80 GB, reaches cuda:1",
        "cuda:1, NVIDIA Y, compute capability 8.0, 40 GB",
        "NCCL 2.32.3",
        "without cuDNN, so convolutions are columns and matrix products: pip install 'minidist[",
    ):
        assert f"\n{'':12}{line}" in text
    assert found.facts["gpus"]["devices"] == TOLD["devices"]


@pytest.mark.parametrize(("library", "words"), [("nvrtc", "NVRTC"), ("cublas", "cuBLAS")])
def test_what_cupy_cannot_do_without_is_a_problem(library, words, monkeypatch):
    cupy_is_there(monkeypatch)
    asking(monkeypatch, saying(json.dumps(TOLD | {library: "none (no libx.so.12)"})))
    (problem,) = gpus.find().problems
    assert problem.what.startswith(f"CuPy does not load {words}, which")
    assert problem.what.endswith(": (no libx.so.12)")
    assert problem.cure == "pip install 'minidist[cuda13]', which brings it with CuPy's [ctk]"


def test_a_driver_that_cannot_be_used_is_a_problem(monkeypatch):
    cupy_is_there(monkeypatch)
    run = saying("", 1, "Traceback\ncudaErrorInsufficientDriver: CUDA driver is insufficient\n")
    asking(monkeypatch, run)
    found = gpus.find()
    assert "CUDA cannot be used: cudaErrorInsufficientDriver" in whats(found)[0]
    assert found.problems[0].cure.startswith("pip install 'minidist[cuda13]'")
    assert "no cuda: driver 580.65.06 and cupy-cuda13x show no GPU" in as_text(
        everything(gpus=found)
    )

    def hangs(command, **how):
        raise subprocess.TimeoutExpired(command, how["timeout"])

    asking(monkeypatch, hangs)
    assert whats(gpus.find()) == ["CUDA has said nothing for 60 s"]


def test_two_packages_of_cupy_and_default_streams_by_thread_are_problems(monkeypatch):
    cupy_is_there(monkeypatch, ("cupy-cuda12x", "cupy-cuda13x"))
    asking(monkeypatch, None)
    monkeypatch.setenv("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "1")
    both, streams = gpus.find().problems
    assert "cupy-cuda12x and cupy-cuda13x are both installed" in both.what
    assert both.cure.startswith("pip uninstall -y cupy-cuda12x cupy-cuda13x, then pip install")
    assert streams.cure == "unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"


def test_little_shared_memory_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SHARED", tmp_path)
    usage = SimpleNamespace(total=64 << 20, used=0, free=60 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    left = tmp_path / "mpich_shm_1_0"
    left.write_bytes(bytes(3 << 20))
    (tmp_path / "something_else").write_bytes(b"x")
    found = machine.find()
    assert "has only 60 MB free" in whats(found)[0]
    assert found.problems[0].cure.startswith(f"rm {left}, or start a container with more")
    assert found.facts["machine"]["shared_memory"]["left_behind"] == [str(left)]
    usage.free = 1 << 40
    found = machine.find()
    assert found.problems == []
    text = as_text(everything(machine=found))
    assert "1 files of 3 MB in it are of killed jobs" in text
