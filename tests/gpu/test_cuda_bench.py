"""The bench's command on GPUs: the flags that say which, and the same training as on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from devices import REAL, cuda

from minidist.bench import gpus
from minidist.bench.__main__ import main


def run(folder: Path, *flags: str) -> Any:
    """Run the command; return its JSON."""
    path = folder / "report.json"
    what = ["--model=mlp", "--batch_size=8", "--num_batches=3", "--num_warmup_batches=1"]
    assert main([*what, "--num_devices=2", f"--json={path}", *flags]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("where", "device", "names"),
    [
        (0, "cuda", ["cuda:0", "cuda:1"]),
        (0, "cuda:1", ["cuda:1.0", "cuda:1.1"]),
        pytest.param(REAL, "cuda:0", ["cuda:0.0", "cuda:0.1"], marks=pytest.mark.gpu),
    ],
)
def test_the_command_trains_on_gpus_as_on_the_cpu(
    libraries: Path, tmp_path: Path, where: Any, device: str, names: list[str]
) -> None:
    want = run(tmp_path)
    with cuda(libraries, where):
        got = run(tmp_path, f"--device={device}")
    assert got["devices"] == names
    assert len(set(got["weights_checksum"].values())) == 1
    losses = [[step["loss"] for step in told["steps"]] for told in (got, want)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("seen", "devices"),
    [
        ([["a", None]], "cuda:0,1"),
        ([["a", None], ["b", None], ["a", None]], "cuda:2,3"),
        ([["a", "0,1"], ["a", "2,3"]], "cuda:0,1"),
        ([["a", "0,1"]] * 3, "cuda:4,5"),
    ],
)
def test_workers_of_one_machine_share_its_gpus(seen: list[Any], devices: str) -> None:
    """The last of those that have `seen` machines and GPUs asks."""
    every = [json.dumps(each).encode() for each in seen]
    peers: Any = SimpleNamespace(me=len(seen) - 1, meet=lambda what, data: every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus.socket, "gethostname", lambda: seen[-1][0])
        if seen[-1][1] is None:
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            patch.setenv("CUDA_VISIBLE_DEVICES", seen[-1][1])
        assert gpus.own_gpus(peers, 2) == devices
