"""Sums over replicas, packing into one buffer, and the finite check, over lists of tensors.

Tensors are C-contiguous arrays, float32 or float64, all of one dtype in a call. At most `threads`
threads share the work; the result is the same for any number of them. A TypeError names the array
of a wrong type, a ValueError the one of a wrong size or layout, or the list of a wrong length.
"""

cimport numpy as cnp
from kernels.arrays cimport (
    PyThreadState,
    data,
    float_kind,
    let_go,
    md_parallel,
    md_table,
    read_table,
    take_back,
    the_team,
)
from libcpp.vector cimport vector

from minidist.kernels import team

cnp.import_array()

cdef extern from "reduce.h":
    void md_sum(
        md_parallel team, const md_table &table, Py_ssize_t destinations, const double *weights,
        double scale, int threads,
    ) noexcept nogil
    void md_copy(md_parallel team, const md_table &table, int threads) noexcept nogil
    Py_ssize_t md_first_nonfinite(
        md_parallel team, const md_table &table, int threads
    ) noexcept nogil

cdef md_parallel parallel = the_team(team.parallel)


def sum(destinations, sources, *, weights=None, double scale=1.0, int threads=1):
    """Store the sum over replicas in every destination, in one pass over memory.

    `sources` has a list of tensors per replica, `destinations` a list of as many tensors each:
    destinations[d][t] = (((w0 s0[t] + w1 s1[t]) + w2 s2[t]) ...) scale, in replica order, where
    the weights are 1 unless given. A destination may be the very same array as a source, but must
    not overlap one in any other way.
    """
    cdef Py_ssize_t into = len(destinations), replicas = len(sources), i
    if into == 0 or replicas == 0:
        raise ValueError(
            f"sum: needs a destination and a source, got {into} destinations and {replicas} sources"
        )
    cdef list names = [f"destinations[{i}]" for i in range(into)]
    names += [f"sources[{i}]" for i in range(replicas)]
    cdef vector[double] factors
    if weights is None:
        factors.assign(replicas, 1.0)
    else:
        factors = weights
    if <Py_ssize_t> factors.size() != replicas:
        raise ValueError(f"sum: {factors.size()} weights for {replicas} sources")
    cdef md_table table
    read_table(table, "sum", [*destinations, *sources], names, into)

    cdef PyThreadState *state = let_go(table.elements)
    md_sum(parallel, table, into, factors.data(), scale, threads)
    take_back(state)


def offsets(shapes, Py_ssize_t itemsize):
    """Return where tensors of these shapes lie in one buffer, and how long it is, in elements.

    Each begins at a multiple of 64 bytes, and so ends the buffer. `itemsize` is in bytes; a
    ValueError if it is not a power of two up to 64.
    """
    if itemsize < 1 or 64 % itemsize != 0:
        raise ValueError(f"offsets: itemsize must be a power of two up to 64, got {itemsize}")
    cdef Py_ssize_t step = 64 // itemsize, total = 0, size, length
    cdef list starts = []
    for shape in shapes:
        size = 1
        for length in shape:
            size *= length
        starts.append(total)
        total += (size + step - 1) // step * step
    return starts, total


cdef int read_packed(
    md_table &table, str verb, object flat, object tensors, object offsets, bint packing
) except -1:
    """Fill a table of two columns, first what is written: places in `flat`, and the tensors."""
    cdef int kind = float_kind(verb, "flat", flat)
    cdef Py_ssize_t room = cnp.PyArray_SIZE(<cnp.ndarray> flat), itemsize = flat.itemsize
    cdef Py_ssize_t size, offset, i
    cdef char *base = <char *> data(verb, "flat", flat, kind, room, packing)
    cdef void *place
    cdef void *tensor
    if len(tensors) != len(offsets):
        raise ValueError(f"{verb}: {len(tensors)} tensors, but {len(offsets)} offsets")
    table.start(len(tensors), 2, itemsize)
    for i, item in enumerate(tensors):
        size = cnp.PyArray_SIZE(<cnp.ndarray> item) if cnp.PyArray_Check(item) else 0
        tensor = data(verb, f"tensors[{i}]", item, kind, size, not packing)
        offset = offsets[i]
        if offset < 0 or offset > room - size:
            raise ValueError(
                f"{verb}: tensors[{i}] of {size} elements at offset {offset} does not fit into "
                f"flat, which has {room}"
            )
        place = base + offset * itemsize
        table.at.push_back(place if packing else tensor)
        table.at.push_back(tensor if packing else place)
        table.add_row(size)
    return 0


def pack(flat, tensors, offsets, *, int threads=1):
    """Copy each tensor to its offset (in elements) in `flat`; what lies between stays as it is."""
    cdef md_table table
    read_packed(table, "pack", flat, tensors, offsets, True)

    cdef PyThreadState *state = let_go(table.elements)
    md_copy(parallel, table, threads)
    take_back(state)


def unpack(tensors, flat, offsets, *, int threads=1):
    """Copy each tensor from its offset (in elements) in `flat`: the way back from `pack`."""
    cdef md_table table
    read_packed(table, "unpack", flat, tensors, offsets, False)

    cdef PyThreadState *state = let_go(table.elements)
    md_copy(parallel, table, threads)
    take_back(state)


def first_nonfinite(tensors, *, int threads=1):
    """Return the index of the first tensor with a NaN or an infinity, -1 if all are finite."""
    cdef md_table table
    read_table(table, "first_nonfinite", [tensors], ["tensors"], 0)

    cdef PyThreadState *state = let_go(table.elements)
    cdef Py_ssize_t found = md_first_nonfinite(parallel, table, threads)
    take_back(state)
    return found
