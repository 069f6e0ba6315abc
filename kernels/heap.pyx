"""Heaps: where the arrays that a thread makes get their memory, and get it again in every step.

NumPy asks a handler for the memory of each new array, and whoever frees the array gives it back to
the same one (NEP 49). The handler in use belongs to the context: a thread that asked for a heap has
it, and whoever runs in a copy of its context.
"""

cimport numpy as cnp
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.string cimport strcpy

import numpy as np

cnp.import_array()

cdef extern from "heap.h" namespace "minidist" nogil:
    struct State "minidist::Heap::State":
        size_t mapped
        size_t in_use
        size_t requests
    cdef cppclass Count "std::atomic<int>":
        void fetch_add(int by)
    Count poisoners "minidist::Heap::poisoners"
    cdef cppclass CHeap "minidist::Heap":
        CHeap() except +
        void *allocate(size_t bytes) noexcept
        void *allocate_zeros(size_t count, size_t bytes) noexcept
        void *reallocate(void *data, size_t bytes) noexcept
        void free(void *data) noexcept
        void trim() noexcept
        State state() noexcept


cdef void *allocate(void *heap, size_t bytes) noexcept nogil:
    return (<CHeap *> heap).allocate(bytes)


cdef void *allocate_zeros(void *heap, size_t count, size_t bytes) noexcept nogil:
    return (<CHeap *> heap).allocate_zeros(count, bytes)


cdef void *reallocate(void *heap, void *data, size_t bytes) noexcept nogil:
    return (<CHeap *> heap).reallocate(data, bytes)


cdef void free(void *heap, void *data, size_t bytes) noexcept nogil:
    (<CHeap *> heap).free(data)


cdef const char *NAME = "mem_handler"  # what NumPy wants such a capsule to be called


cdef void forget(object capsule) noexcept:
    """Called once neither a Heap nor any array has the handler."""
    cdef cnp.PyDataMem_Handler *handler = <cnp.PyDataMem_Handler *> PyCapsule_GetPointer(
        capsule, NAME
    )
    cdef CHeap *heap = <CHeap *> handler.allocator.ctx
    del heap
    PyMem_RawFree(handler)


cdef class Heap:
    """Memory for arrays, kept for the next ones when they are gone; see heap.h for its promises.

    Any number of threads may use one heap. It is there as long as anybody has it, or an array of
    its memory.
    """

    cdef CHeap *heap  # the handler's
    cdef object handler

    def __cinit__(self):
        cdef cnp.PyDataMem_Handler *handler = <cnp.PyDataMem_Handler *> PyMem_RawMalloc(
            sizeof(cnp.PyDataMem_Handler)
        )
        if handler is NULL:
            raise MemoryError("there is no memory for a heap")
        strcpy(<char *> handler.name, "minidist heap")
        handler.version = 1
        try:
            self.heap = new CHeap()
        except MemoryError:
            PyMem_RawFree(handler)
            raise
        handler.allocator.ctx = self.heap
        handler.allocator.malloc = allocate
        handler.allocator.calloc = allocate_zeros
        handler.allocator.realloc = reallocate
        handler.allocator.free = free
        self.handler = PyCapsule_New(handler, NAME, forget)

    def use(self):
        """From now on let the arrays that this thread makes, in its present context, lie here."""
        cnp.PyDataMem_SetHandler(self.handler)

    def empty(self, shape, dtype):
        """Return an uninitialised C-contiguous array that lies here."""
        before = cnp.PyDataMem_SetHandler(self.handler)
        try:
            return np.empty(shape, dtype)
        finally:
            cnp.PyDataMem_SetHandler(before)

    def trim(self):
        """Give back to the system what is free, as far as it fills huge pages.

        And until the next array is made, what is freed at the end.
        """
        with nogil:
            self.heap.trim()

    @property
    def mapped(self):
        """Bytes of address space that the heap has from the system."""
        return self.heap.state().mapped

    @property
    def in_use(self):
        """Bytes of them that arrays have."""
        return self.heap.state().in_use

    @property
    def requests(self):
        """How often the heap has asked the system for memory."""
        return self.heap.state().requests


def poison(int by):
    """Fill memory of all heaps with NaN when it is handed out and when it is freed.

    As long as the sum of what this was called with is above 0: 1 begins it, -1 ends it. Who reads
    what was never written, or is gone, finds bytes that are NaN in floating point, -1 in integers.
    """
    poisoners.fetch_add(by)
