"""Sums over replicas, casts, packing into one buffer, and what is asked of all tensors together.

Tensors are C-contiguous arrays, float32 or float64, all of one dtype in a call, and for sums and
casts also float16 or ml_dtypes.bfloat16. At most `threads` threads share the work; the result is
the same for any number of them. A TypeError names the array of a wrong type, a ValueError the one
of a wrong size or layout, or the list of a wrong length.
"""

cimport numpy as cnp
from kernels.arrays cimport (
    PyThreadState,
    any_float_kind,
    data,
    float_kind,
    let_go,
    md_parallel,
    md_table,
    read_columns,
    read_table,
    size_of,
    take_back,
    the_team,
)
from libcpp.vector cimport vector

from minidist.kernels import team

cnp.import_array()

cdef extern from "reduce.h":
    ctypedef enum md_type:
        MD_FLOAT16, MD_BFLOAT16, MD_FLOAT32, MD_FLOAT64
    void md_sum(
        md_parallel team, const md_table &table, md_type to, md_type kind,
        Py_ssize_t destinations, const double *weights, double scale, int threads,
    ) noexcept nogil
    void md_cast(
        md_parallel team, const md_table &table, md_type to, md_type kind, int threads
    ) noexcept nogil
    void md_copy(md_parallel team, const md_table &table, int threads) noexcept nogil
    Py_ssize_t md_first_nonfinite(
        md_parallel team, const md_table &table, int threads
    ) noexcept nogil
    double md_sum_squares(md_parallel team, const md_table &table, int threads) noexcept nogil

cdef md_parallel parallel = the_team(team.parallel)


cdef md_type type_of(int kind) noexcept:
    if kind == cnp.NPY_FLOAT:
        return MD_FLOAT32
    if kind == cnp.NPY_DOUBLE:
        return MD_FLOAT64
    return MD_FLOAT16 if kind == cnp.NPY_FLOAT16 else MD_BFLOAT16


cdef object dtype_of(int kind):
    return cnp.PyArray_DescrFromType(kind)


def sum(destinations, sources, *, weights=None, double scale=1.0, int threads=1):
    """Store the sum over replicas in every destination, in one pass over memory.

    `sources` has a list of tensors per replica, `destinations` a list of as many tensors each:
    destinations[d][t] = (((w0 s0[t] + w1 s1[t]) + w2 s2[t]) ...) scale, in replica order, where
    the weights are 1 unless given. A destination may be the very same array as a source, but must
    not overlap one in any other way. Sources of 16 bits are added up in float32; their destinations
    are float32, or of the sources' dtype and rounded to once.
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
    cdef list columns = [list(tensors) for tensors in (*destinations, *sources)]
    cdef int to = cnp.NPY_FLOAT, kind = cnp.NPY_FLOAT
    if columns[0] and columns[into]:
        to = any_float_kind("sum", "destinations[0][0]", columns[0][0])
        kind = any_float_kind("sum", "sources[0][0]", columns[into][0])
    if to != kind and not (to == cnp.NPY_FLOAT and size_of(kind) == 2):
        raise TypeError(
            f"sum: destinations of {dtype_of(to)} do not take sums of {dtype_of(kind)}; give them "
            "the sources' dtype, or float32 for those of 16 bits"
        )
    cdef md_table table
    read_columns(table, "sum", columns, names, into, to, kind)

    cdef PyThreadState *state = let_go(table.elements)
    md_sum(
        parallel, table, type_of(to), type_of(kind), into, factors.data(), scale, threads
    )
    take_back(state)


def alike(rows):
    """Whether all rows have as many arrays, those of a number being of one shape and dtype.

    A quick look: False also where arrays are not NumPy's.
    """
    cdef Py_ssize_t i
    cdef tuple first = tuple(rows[0]), row
    for other in rows:
        if other is rows[0]:
            continue
        row = tuple(other)
        if len(row) != len(first):
            return False
        for i in range(len(first)):
            if not (
                cnp.PyArray_Check(first[i]) and cnp.PyArray_Check(row[i])
                and cnp.PyArray_SAMESHAPE(<cnp.ndarray> first[i], <cnp.ndarray> row[i])
                and cnp.PyArray_EquivArrTypes(<cnp.ndarray> first[i], <cnp.ndarray> row[i])
            ):
                return False
    return True


def cast(destinations, sources, *, int threads=1):
    """Convert each source, a list of tensors, into the destination of its number.

    One side is float32, the other float16 or bfloat16 (else a TypeError); to these the nearest
    number is taken, of two equally near the even one.
    """
    cdef list columns = [list(destinations), list(sources)]
    cdef int to = cnp.NPY_FLOAT, kind = cnp.NPY_FLOAT16
    if columns[0] and columns[1]:
        to = any_float_kind("cast", "destinations[0]", columns[0][0])
        kind = any_float_kind("cast", "sources[0]", columns[1][0])
    if cnp.NPY_FLOAT not in (to, kind) or size_of(to) + size_of(kind) != 6:
        raise TypeError(
            f"cast: from {dtype_of(kind)} to {dtype_of(to)}, but one of them must be float32 and "
            "the other float16 or bfloat16"
        )
    cdef md_table table
    read_columns(table, "cast", columns, ["destinations", "sources"], 1, to, kind)

    cdef PyThreadState *state = let_go(table.elements)
    md_cast(parallel, table, type_of(to), type_of(kind), threads)
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


def sum_squares(tensors, *, int threads=1):
    """Return the sum of the squares of all elements, in float64, in an order of its own.

    The order depends on the sizes of the tensors only: the bits are the same for any number of
    threads.
    """
    cdef md_table table
    read_table(table, "sum_squares", [tensors], ["tensors"], 0)

    cdef PyThreadState *state = let_go(table.elements)
    cdef double total = md_sum_squares(parallel, table, threads)
    take_back(state)
    return total
