"""The MPI that there is: loaded, but not started. The only module that imports mpi4py."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from minidist.errors import ClusterError


def load() -> Any:
    """Return mpi4py's module; importing it starts nothing.

    Raises ClusterError where mpi4py or its MPI is missing.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as cause:
        raise ClusterError(
            f"MPI cannot be used here: {cause}. pip install 'minidist[mpi]' brings mpi4py and "
            "an MPI with its mpiexec; python -m minidist.doctor tells more"
        ) from cause
    return MPI


def vendor() -> tuple[str, str]:
    """Return who has made the MPI that is loaded, as "MPICH" or "Open MPI", and its version.

    Raises ClusterError as `load` does.
    """
    name, version = load().get_vendor()
    return name, ".".join(map(str, version))


def version() -> str:
    """Return the first line of what the loaded MPI says of itself. Raises as `load` does."""
    return str(load().Get_library_version()).split("\n")[0].strip("\0 ")


def take_names_off() -> None:
    """Take their names off the files in memory that MPICH's ranks of one machine share.

    All ranks that need one must have it open. It then lasts until the last of them has ended, even
    if that is killed; with its name it would stay.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        paths = {line[line.find("/") :].strip() for line in maps if "/dev/shm/mpich_shm_" in line}
        for path in paths:
            with contextlib.suppress(OSError):  # another rank was quicker
                os.unlink(path)
