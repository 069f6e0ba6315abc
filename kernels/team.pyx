"""The one team of threads of this process, handed to the other kernel modules as capsules.

Each compiled module is a library of its own, so a team inside a header would be a team for each of
them. Here is the only one. `parallel`, `offer` and `help` are its entry points (see team.h), which
the others call through the pointers in the capsules.
"""

from cpython.pycapsule cimport PyCapsule_New

cdef extern from "team.h":
    ctypedef void (*md_parallel)(
        Py_ssize_t n, Py_ssize_t grain, int threads, void *body, void *context
    ) noexcept nogil
    int md_start_team() noexcept
    void md_team_parallel() noexcept nogil
    void md_team_offer(int by) noexcept nogil
    bint md_team_help() noexcept nogil

if md_start_team() != 0:
    raise MemoryError("team: no memory to register the handler for forked processes")

parallel = PyCapsule_New(<void *> md_team_parallel, "minidist.kernels.team.parallel", NULL)
offer = PyCapsule_New(<void *> md_team_offer, "minidist.kernels.team.offer", NULL)
help = PyCapsule_New(<void *> md_team_help, "minidist.kernels.team.help", NULL)
