"""JPEGs decoded, or only a part of one, with the GIL released; jpeg.h says which kinds.

The pixels are those of libjpeg with its defaults.
"""

cimport numpy as cnp
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from kernels.arrays cimport data
from libcpp.memory cimport unique_ptr

cnp.import_array()

cdef extern from "jpeg.h":
    cppclass md_jpeg:
        Py_ssize_t width, height
        bint supported
    ctypedef struct md_damage:
        size_t byte
        const char *what
    md_damage md_open_jpeg(
        const unsigned char *content, size_t size, unique_ptr[md_jpeg] &jpeg
    ) noexcept nogil
    md_damage md_decode_jpeg(
        md_jpeg &jpeg, Py_ssize_t top, Py_ssize_t left, Py_ssize_t h, Py_ssize_t w,
        unsigned char *out
    ) noexcept nogil


class Damaged(ValueError):
    """These bytes are no JPEG, or a damaged one; `byte` is where that was noticed."""

    def __init__(self, byte, message):
        super().__init__(message)
        self.byte = byte


cdef int check(md_damage damage) except -1:
    if damage.what == NULL:
        return 0
    if damage.what[0] == 0:
        raise MemoryError("there is no memory to decode a JPEG")
    raise Damaged(damage.byte, damage.what.decode("ascii"))


cdef class Jpeg:
    """The JPEG in some bytes, of which the headers are read at once. Decode it once.

    Raises Damaged where there is none. `supported`: whether it is of a kind that can be decoded.
    """

    cdef unique_ptr[md_jpeg] jpeg
    cdef Py_buffer content
    cdef readonly Py_ssize_t width, height
    cdef readonly bint supported

    def __cinit__(self, content):
        PyObject_GetBuffer(content, &self.content, PyBUF_SIMPLE)
        check(md_open_jpeg(
            <const unsigned char *> self.content.buf, self.content.len, self.jpeg
        ))
        self.width, self.height = self.jpeg.get().width, self.jpeg.get().height
        self.supported = self.jpeg.get().supported

    def __dealloc__(self):
        PyBuffer_Release(&self.content)

    def decode(self, out, Py_ssize_t top=0, Py_ssize_t left=0):
        """Write the part of the image that begins at (top, left) into out, uint8 [h, w, 3].

        Raises Damaged where what is needed for it is. What lies below is not looked at, but that
        the image has an end.
        """
        cdef str verb = "decode"
        if not self.supported or self.jpeg.get() == NULL:
            raise ValueError(f"{verb}: this JPEG was decoded, or is of a kind that cannot be")
        cdef md_damage damage
        if out.ndim != 3 or out.shape[2] != 3 or out.size == 0:
            raise ValueError(f"{verb}: out must be [h, w, 3], not empty, got shape {out.shape}")
        cdef Py_ssize_t h = out.shape[0], w = out.shape[1]
        if not (0 <= top <= self.height - h and 0 <= left <= self.width - w):
            raise ValueError(
                f"{verb}: {h}x{w} from ({top}, {left}) on is no part of the image, which is "
                f"{self.height}x{self.width}"
            )
        cdef void *pout = data(verb, "out", out, cnp.NPY_UINT8, out.size, True)
        with nogil:
            damage = md_decode_jpeg(
                self.jpeg.get()[0], top, left, h, w, <unsigned char *> pout
            )
            self.jpeg.reset()
        check(damage)
