"""What it costs to line up what the replicas hold: 161 gradients, as many as ResNet-50 has.

    python bench/regroup.py

Each figure is the median over rounds of a round's median, with the lowest and highest round beside
it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from overhead import ROUNDS, median_time, show

import minidist as md

GRADIENTS = 161
CALLS = 200


def main() -> None:
    for n, target in ((1, ""), (2, "target: 200"), (8, "")):
        devices = tuple(md.devices(f"cpu*{n}"))
        each = [[md.constant(np.zeros(1, "float32")) for _ in range(GRADIENTS)] for _ in range(n)]
        named = [{f"layer_{i}": x for i, x in enumerate(row)} for row in each]
        grouped = md.regroup(each, devices=devices)
        for what, call, aim in (
            ("regroup a list", partial(md.regroup, each, devices=devices), target),
            ("regroup a dict", partial(md.regroup, named, devices=devices), target),
            ("select from the list", partial(md.select_replica, 0, grouped), ""),
        ):
            rounds = [median_time(call, CALLS) * 1e6 for _ in range(ROUNDS)]
            show(f"{what} of {GRADIENTS} tensors, {n} replicas", rounds, "us", aim)


if __name__ == "__main__":
    main()
