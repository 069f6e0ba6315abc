"""auto: the spec that is the fastest on a kind of device, by measurement.

Only specs of the serial class are looked at, so that what `auto` picks changes no bit. Times over
that of copy in the same round, medians, by bench/reductions.py on two cores of the CPU:

    replicas  elements   copy  pscpu  pscpu#16  psgpu  psgpu#4
           2       1 K   1.00   3.67     30.26   3.92     9.62
           2      64 K   1.00   2.88      9.23   2.65     3.96
           2       1 M   1.00   1.73      1.76   1.66     2.08
           2      16 M   1.00   1.57      1.64   1.52     1.57
           8       1 K   1.00   3.47     22.09   3.48     7.41
           8      64 K   1.00   1.53      2.93   1.52     1.89
           8       1 M   1.00   1.05      2.20   1.03     1.31
           8      16 M   1.00   1.11      1.14   1.14     1.13
"""

from __future__ import annotations

from minidist.comm.spec import Spec, parse
from minidist.device import Device

SPECS = {"cpu": "copy", "host": "copy", "cuda": "copy"}


def fastest(device: Device) -> Spec:
    """Return what `auto` means where the replicas compute on devices of this one's kind."""
    return parse(SPECS[device.kind])
