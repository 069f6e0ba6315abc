"""Whether a thread has the GIL and lets go of it soon: one flag for all kernels of the process.

Each compiled module is a library of its own, so a flag in a header would be a flag for each of
them. Here is the only one, in a capsule; gil.h says what it is for.
"""

from cpython.pycapsule cimport PyCapsule_New
from libcpp cimport bool as cppbool

cdef extern from "<atomic>" namespace "std" nogil:
    cdef cppclass atomic[T]:
        pass

cdef atomic[cppbool] flag

is_held = PyCapsule_New(<void *> &flag, "minidist.kernels.gil.is_held", NULL)
