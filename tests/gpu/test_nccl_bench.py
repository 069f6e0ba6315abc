"""NCCL's lines of comm_bench, on the stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
from summing import world

from minidist.comm_bench.__main__ import main

FEW = ["-b=64", "-e=256", "--iters=2", "--warmup_iters=1"]
VERBS = {"all_reduce", "reduce", "broadcast", "reduce_scatter"}


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_it_times_and_checks_every_verb(
    libraries: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with world(libraries) as there:
        asked = [
            "--all_reduce_spec=nccl,copy",
            f"--device={device}",
            "-d=float32,bfloat16",
            "-o=all",
        ]
        assert main([*FEW, *asked]) == 0
        assert there.handles and there.live == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# Out of bounds values : 0 OK" in lines
    where = "cuda:0, cuda:1" if device == "cuda" else "cuda:0.0, cuda:0.1"
    assert any(line.endswith(where) for line in lines)
    own = [line.split() for line in lines if " nccl " in line]
    assert {words[4] for words in own} == VERBS and {words[-1] for words in own} == {"0"}


def test_all_has_it_and_leaves_mpi_out(libraries: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with world(libraries):
        assert main([*FEW, "--all_reduce_spec=all", "--device=cuda", "--verb=all_reduce"]) == 0
    said = capsys.readouterr().out
    assert " nccl " in said and "# not here: mpi: mpi is MPI's own call between processes" in said


def test_without_gpus_all_says_why_it_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FEW, "--all_reduce_spec=all", "--verb=all_reduce"]) == 0
    assert "# not here: nccl: nccl sums on GPUs, and cpu:0 is none" in capsys.readouterr().out
