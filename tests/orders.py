"""The orders in which algorithms sum, as plain NumPy, and the specs under test by name.

Nothing of minidist is used here. Each function sums one tensor of n replicas, element by element
in the order that it spells out, every step in the tensors' own dtype.
"""

from __future__ import annotations

import numpy as np

ORDER = {  # of each spec under test
    "auto": "serial",
    "copy": "serial",
    "pscpu": "serial",
    "pscpu#3": "serial",
    "psgpu": "serial",
    "psgpu#2": "serial",
    "xring": "ring",
    "xring#3": "ring",
    "rechd": "tree",
    "hierarchical_copy": "tree",
    "pscpu:4:xring#2:1K:rechd": "mixed",
    "auto:4:psgpu#2": "serial",
}


def serial(parts):
    """((g0 + g1) + g2) …"""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def ring(parts):
    """Of L elements those from ⌊cL/n⌋ to ⌊(c+1)L/n⌋: ((g_c + g_{c+1}) …) + g_{c+n-1}, modulo n."""
    n, size = len(parts), parts[0].size
    flats = [np.ravel(part) for part in parts]
    total = np.empty(size, parts[0].dtype)
    for c in range(n):
        chunk = slice(c * size // n, (c + 1) * size // n)
        total[chunk] = serial([flats[(c + k) % n][chunk] for k in range(n)])
    return total.reshape(parts[0].shape)


def tree(parts):
    """The sum of the first half, the larger one, plus that of the second."""
    if len(parts) == 1:
        return parts[0]
    middle = -(-len(parts) // 2)
    return tree(parts[:middle]) + tree(parts[middle:])


def mixed(parts):
    """In the order of the spec "pscpu:4:xring#2:1K:rechd"."""
    size = parts[0].size
    return (serial if size <= 4 else ring if size <= 1024 else tree)(parts)


SUMS = {"serial": serial, "ring": ring, "tree": tree, "mixed": mixed}


def summed(spec, rows, weights=None, scale=1.0):
    """Return Σ(w_i·x_i)·scale for each tensor of the rows, in the order of a spec."""
    totals = []
    for parts in zip(*rows, strict=True):
        kind = parts[0].dtype.type
        if weights is not None:
            parts = [kind(weight) * part for weight, part in zip(weights, parts, strict=True)]
        with np.errstate(over="ignore"):
            total = SUMS[ORDER[spec]](parts)
        totals.append(np.asarray(total if scale == 1 else total * kind(scale)))
    return totals
