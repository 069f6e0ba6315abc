"""Checks that every kernel makes on its arguments, and the reading of lists into a table.

Each function is inline: a module that cimports it has its own copy, and nothing is imported when
the program runs.
"""

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer
from libcpp.vector cimport vector

cdef extern from "gil.h":
    ctypedef struct PyThreadState
    PyThreadState *md_let_go() noexcept
    void md_take_back(PyThreadState *state) noexcept

cdef extern from "arrays.h":
    ctypedef void (*md_parallel)(
        Py_ssize_t n, Py_ssize_t grain, int threads, void *body, void *context
    ) noexcept nogil
    cppclass md_table:
        Py_ssize_t elements
        vector[void *] at
        vector[Py_ssize_t] size
        void start(Py_ssize_t rows, Py_ssize_t columns, Py_ssize_t itemsize) except +
        void add_row(Py_ssize_t count) except +
        bint wide() noexcept


cdef inline md_parallel the_team(object capsule) except NULL:
    return <md_parallel> PyCapsule_GetPointer(capsule, "minidist.kernels.team.parallel")


# The GIL is let go for work above 16 Ki elements; below, keeping it is cheaper.
cdef inline PyThreadState *let_go(Py_ssize_t elements) noexcept:
    return md_let_go() if elements > 16384 else NULL


cdef inline void take_back(PyThreadState *state) noexcept:
    if state != NULL:
        md_take_back(state)


cdef inline str describe(object item):
    if cnp.PyArray_Check(item):
        return f"{item.dtype} of shape {item.shape}"
    return f"{type(item).__name__}"


cdef inline int float_kind(str verb, str name, object item) except -1:
    """The type number of a float32 or float64 array; a TypeError for anything else."""
    cdef int kind
    if cnp.PyArray_Check(item):
        kind = cnp.PyArray_TYPE(<cnp.ndarray> item)
        if kind == cnp.NPY_FLOAT or kind == cnp.NPY_DOUBLE:
            return kind
    raise TypeError(
        f"{verb}: {name} must be a NumPy array of float32 or float64, got {describe(item)}"
    )


# bfloat16 is a type that ml_dtypes adds to NumPy; its number depends on what else was added.
cdef inline int any_float_kind(str verb, str name, object item) except -1:
    """The type number of an array of float16, bfloat16, float32 or float64; else a TypeError."""
    cdef int kind
    if cnp.PyArray_Check(item):
        kind = cnp.PyArray_TYPE(<cnp.ndarray> item)
        if (
            kind == cnp.NPY_FLOAT or kind == cnp.NPY_DOUBLE or kind == cnp.NPY_FLOAT16
            or item.dtype.name == "bfloat16"
        ):
            return kind
    raise TypeError(
        f"{verb}: {name} must be a NumPy array of float16, bfloat16, float32 or float64, "
        f"got {describe(item)}"
    )


cdef inline Py_ssize_t size_of(int kind) noexcept:
    """Bytes of an element of one of these types."""
    return 8 if kind == cnp.NPY_DOUBLE else 4 if kind == cnp.NPY_FLOAT else 2


cdef inline bint fits(object item, int kind, Py_ssize_t size, bint written) noexcept:
    """Whether a kernel may run over this: right type and size, plain C-ordered memory."""
    cdef int flags = cnp.NPY_ARRAY_C_CONTIGUOUS | cnp.NPY_ARRAY_ALIGNED
    if written:
        flags |= cnp.NPY_ARRAY_WRITEABLE
    return (
        cnp.PyArray_Check(item)
        and cnp.PyArray_TYPE(<cnp.ndarray> item) == kind
        and cnp.PyArray_SIZE(<cnp.ndarray> item) == size
        and cnp.PyArray_CHKFLAGS(<cnp.ndarray> item, flags)
        and cnp.PyArray_ISNOTSWAPPED(<cnp.ndarray> item)
    )


cdef inline int complain(
    str verb, str name, object item, int kind, Py_ssize_t size, bint written
) except -1:
    """Raise the error that says why `fits` said no."""
    wanted = cnp.PyArray_DescrFromType(kind)
    if not cnp.PyArray_Check(item) or item.dtype != wanted:
        raise TypeError(f"{verb}: {name} must be a NumPy array of {wanted}, got {describe(item)}")
    if item.size != size:
        raise ValueError(f"{verb}: {name} must have {size} elements, got {describe(item)}")
    if written and not item.flags.writeable:
        raise ValueError(f"{verb}: {name} is written to, but it is read-only; pass a copy")
    raise ValueError(
        f"{verb}: {name} must be C-contiguous and aligned to its elements; "
        "pass np.ascontiguousarray of it, or a copy"
    )


cdef inline void *data(
    str verb, str name, object item, int kind, Py_ssize_t size, bint written
) except? NULL:
    """The address of the first element, after all checks."""
    if not fits(item, kind, size, written):
        complain(verb, name, item, kind, size, written)
    return cnp.PyArray_DATA(<cnp.ndarray> item)


cdef inline int read_table(
    md_table &table, str verb, list columns, list names, Py_ssize_t written
) except -1:
    """Fill the table from one list of tensors per column, the first `written` of them written to.

    The tensors of a row must have the same size, and all of them the dtype of the very first,
    float32 or float64.
    """
    cdef list lists = [list(tensors) for tensors in columns]
    cdef int kind = cnp.NPY_FLOAT
    if lists[0]:
        kind = float_kind(verb, f"{names[0]}[0]", lists[0][0])
    return read_columns(table, verb, lists, names, written, kind, kind)


cdef inline int read_columns(
    md_table &table, str verb, list lists, list names, Py_ssize_t written, int to, int kind
) except -1:
    """Fill the table from lists, the first `written` of type number `to`, the others of `kind`."""
    cdef Py_ssize_t width = len(lists), rows = len(lists[0]), row, column, size
    cdef int own
    cdef bint output
    for column in range(width):
        if len(lists[column]) != rows:
            raise ValueError(
                f"{verb}: {names[0]} has {rows} tensors, "
                f"but {names[column]} has {len(lists[column])}"
            )
    table.start(rows, width, min(size_of(to), size_of(kind)))
    for row in range(rows):
        size = -1
        for column in range(width):
            item = (<list> lists[column])[row]
            if size < 0 and cnp.PyArray_Check(item):
                size = cnp.PyArray_SIZE(<cnp.ndarray> item)
            output = column < written
            own = to if output else kind
            if not fits(item, own, size, output):
                complain(verb, f"{names[column]}[{row}]", item, own, size, output)
            table.at.push_back(cnp.PyArray_DATA(<cnp.ndarray> item))
        table.add_row(size)
    return 0
