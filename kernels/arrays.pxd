"""Checks that every kernel makes on its arguments, and the reading of lists into a table.

Each function is inline: a module that cimports it has its own copy, and nothing is imported when
the program runs.
"""

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer
from libcpp.vector cimport vector

cdef extern from "Python.h":
    ctypedef struct PyThreadState
    PyThreadState *PyEval_SaveThread() noexcept
    void PyEval_RestoreThread(PyThreadState *state) noexcept

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
    return PyEval_SaveThread() if elements > 16384 else NULL


cdef inline void take_back(PyThreadState *state) noexcept:
    if state != NULL:
        PyEval_RestoreThread(state)


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

    The tensors of a row must have the same size, and all of them the dtype of the very first.
    """
    cdef Py_ssize_t width = len(columns), rows = len(columns[0]), row, column, size
    cdef int kind = cnp.NPY_FLOAT
    cdef bint output
    cdef list lists = [list(tensors) for tensors in columns]
    for column in range(width):
        if len(lists[column]) != rows:
            raise ValueError(
                f"{verb}: {names[0]} has {rows} tensors, "
                f"but {names[column]} has {len(lists[column])}"
            )
    if rows > 0:
        kind = float_kind(verb, f"{names[0]}[0]", lists[0][0])
    table.start(rows, width, 4 if kind == cnp.NPY_FLOAT else 8)
    for row in range(rows):
        size = -1
        for column in range(width):
            item = (<list> lists[column])[row]
            if size < 0 and cnp.PyArray_Check(item):
                size = cnp.PyArray_SIZE(<cnp.ndarray> item)
            output = column < written
            if not fits(item, kind, size, output):
                complain(verb, f"{names[column]}[{row}]", item, kind, size, output)
            table.at.push_back(cnp.PyArray_DATA(<cnp.ndarray> item))
        table.add_row(size)
    return 0
