"""NCCL within machines and MPI between them, and sums of GPUs by way of the host: real ranks.

Each is a machine with GPUs of its own, on a stand-in of its own.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import pytest
import ranks
from devices import cuda
from heard import Heard
from nccl_standin import nccl
from summing import on, out, same, sums, whole_numbers

import minidist as md
from minidist import comm, observe
from minidist.comm.peers import Ranks
from minidist.comm.row import placed
from minidist.traffic import Outline

DEVICES = "cuda:0.0,cuda:1.0,cuda:0.1"
SPECS = ["nccl/xring", "nccl/rechd", "nccl/pscpu#2", "nccl/collective", "auto", "xring"]


def group(cluster: Any, machines: str) -> Ranks:
    names = [cluster.name(rank) for rank in cluster.workers]
    return Ranks(
        cluster.engine,
        cluster.channel(),
        cluster.workers,
        names,
        lambda: (60.0, 90.0),
        list(machines),
    )


def check_sums(cluster: Any, spec: str) -> None:
    """Of processes that are each alone on a machine, as their NCCL knows only itself."""
    peers = group(cluster, "ab")
    with (
        tempfile.TemporaryDirectory() as folder,
        cuda(Path(folder), 1) as cupy,
        nccl(cupy) as there,
    ):
        devices = md.devices(DEVICES)
        one = comm.make(spec, devices, peers=peers, counts=[3, 3])
        first = 3 * peers.me
        for dtype in ("float32", "bfloat16", "int32"):
            rows = whole_numbers(6, dtype)
            weighted = [None] if dtype == "int32" else [None, [1.0, 0.0, 2.0, 1.0, 1.0, 3.0]]
            for weights in weighted:
                scale = 1.0 if dtype == "int32" else 0.5
                sources = on(devices, rows[first:][:3])
                wanted = on(devices, rows[:3])
                outlines = [Outline.of(array) for array in rows[0]]
                places = [row.devices for row in placed(wanted, devices)]
                heard = Heard()
                with observe.attached(heard):
                    one.all_reduce(sources, wanted, weights, scale=scale, threads=1)
                for device, row in zip(devices, wanted, strict=True):
                    same(out(device, row), sums(rows, weights, scale))
                if weights is None:
                    predicted = one.predicted_bytes(outlines, places)
                    assert heard.links == predicted, (dict(heard.links), dict(predicted))
        for root in range(6):
            row = on(devices, rows[first:][:3])
            one.broadcast(row, root)
            same(out(devices[2], row[2]), rows[root])
        for k, row in enumerate(one.all_gather(on(devices, rows[first:][:3]))):
            same(out(row.devices[0], row), rows[k])
        one.close()
        assert there.live == 0 and bool(there.handles) == spec.startswith("nccl")


CASES = {spec: (2, 0, partial(check_sums, spec=spec)) for spec in SPECS}


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest) -> Any:
    return ranks.run(__file__, 2, *ranks.chosen(request, CASES))


@pytest.mark.parametrize("case", CASES)
def test_case(outcome: Any, case: str) -> None:
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
