"""The most that a core can do in float32, measured: see peak.h."""

cdef extern from "peak.h":
    double md_peak(Py_ssize_t steps) noexcept nogil


def multiply_add(Py_ssize_t steps):
    cdef double operations
    with nogil:
        operations = md_peak(steps)
    return operations
