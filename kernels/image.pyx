"""Images of bytes on their way to a model: crop and mirror, resize, distort colours.

Images are uint8, results float32, both C-contiguous with channels last. A result is
byte * scale + shift, and both of these are float32 [channels]. A TypeError names the array of a
wrong type, a ValueError the one of a wrong size or layout. The GIL is released while they work.
"""

cimport numpy as cnp
from kernels.arrays cimport data
from libc.math cimport rintf
from libc.stdint cimport int64_t

cnp.import_array()

cdef extern from "image.h":
    ctypedef unsigned int md_u32
    ctypedef struct md_stream:
        md_u32[2] key
        md_u32[3] counter
    ctypedef struct md_crops:
        Py_ssize_t h, w, c, pad
        bint distort
        md_stream stream
    void md_crop_all(
        const md_crops &g, Py_ssize_t k, const unsigned char *images, const int64_t *numbers,
        const float *scale, const float *shift, float *out
    ) except + nogil
    ctypedef enum md_method:
        MD_BILINEAR, MD_NEAREST, MD_BICUBIC, MD_AREA
    cppclass md_taps:
        pass
    md_taps md_make_taps(
        md_method method, Py_ssize_t size, Py_ssize_t whole, Py_ssize_t begin, Py_ssize_t out,
        bint mirrored
    ) except + nogil
    void md_resize(
        Py_ssize_t w, const unsigned char *image, const md_taps &rows,
        const md_taps &columns, const float *scale, const float *shift, float *out
    ) except + nogil
    ctypedef struct md_colours:
        float brightness, contrast, saturation, hue
        bint linear
        float[9] matrix
        bint contrast_first
    void md_distort(
        const md_colours &how, Py_ssize_t n, const float *scale, const float *shift, float *pixels
    ) noexcept nogil

METHODS = {
    "bilinear": MD_BILINEAR, "nearest": MD_NEAREST, "bicubic": MD_BICUBIC, "area": MD_AREA
}


def crop(images, numbers, scale, shift, out, int pad=-1, key=(0, 0), counter=(0, 0)):
    """Copy the images [n, h, w, c] with these numbers, int64 [k], into out [k, h, w, c].

    With pad >= 0 each has so many rows and columns of zeros around it, a piece as large as it was
    is taken at random, and half of the pieces are mirrored. The words of that are Philox's with
    this key and, behind the image's number, these two words of the counter.
    """
    cdef str verb = "crop"
    cdef md_crops g
    if images.ndim != 4 or images.size == 0:
        raise ValueError(f"{verb}: images must be [n, h, w, c], none 0, got shape {images.shape}")
    cdef Py_ssize_t n = images.shape[0], k = numbers.size, i
    g.h, g.w, g.c = images.shape[1:]
    g.pad, g.distort = max(pad, 0), pad >= 0
    g.stream.key[0], g.stream.key[1] = key
    g.stream.counter[0] = 0
    g.stream.counter[1], g.stream.counter[2] = counter
    cdef void *pimages = data(verb, "images", images, cnp.NPY_UINT8, images.size, False)
    cdef int64_t *pnumbers = <int64_t *> data(verb, "numbers", numbers, cnp.NPY_INT64, k, False)
    cdef void *pscale = data(verb, "scale", scale, cnp.NPY_FLOAT, g.c, False)
    cdef void *pshift = data(verb, "shift", shift, cnp.NPY_FLOAT, g.c, False)
    cdef void *pout = data(verb, "out", out, cnp.NPY_FLOAT, k * g.h * g.w * g.c, True)
    for i in range(k):
        if not 0 <= pnumbers[i] < n:
            raise ValueError(f"{verb}: there is no image {pnumbers[i]} among {n}")
    with nogil:
        md_crop_all(
            g, k, <unsigned char *> pimages, pnumbers, <float *> pscale, <float *> pshift,
            <float *> pout
        )


def resize(
    image, str method, scale, shift, out, whole=None, Py_ssize_t top=0, Py_ssize_t left=0,
    bint mirrored=False
):
    """Resize an image [h, w, 3] into out [height, width, 3].

    method: a name in METHODS. whole: the size it is resized to, (rows, columns), where of that only
    the part from row `top` and column `left` on is wanted. mirrored: from right to left.
    """
    cdef str verb = "resize"
    if image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ValueError(f"{verb}: image must be [h, w, 3], not empty, got shape {image.shape}")
    if out.ndim != 3 or out.shape[2] != 3:
        raise ValueError(f"{verb}: out must be [height, width, 3], got shape {out.shape}")
    cdef Py_ssize_t h = image.shape[0], w = image.shape[1], rows, columns
    cdef Py_ssize_t height = out.shape[0], width = out.shape[1]
    rows, columns = (height, width) if whole is None else whole
    if not (0 <= top <= rows - height and 0 <= left <= columns - width):
        raise ValueError(
            f"{verb}: {height}x{width} from ({top}, {left}) on is no part of {rows}x{columns}"
        )
    cdef md_method how = METHODS[method]
    cdef void *pimage = data(verb, "image", image, cnp.NPY_UINT8, image.size, False)
    cdef void *pscale = data(verb, "scale", scale, cnp.NPY_FLOAT, 3, False)
    cdef void *pshift = data(verb, "shift", shift, cnp.NPY_FLOAT, 3, False)
    cdef void *pout = data(verb, "out", out, cnp.NPY_FLOAT, out.size, True)
    if out.size == 0:
        return
    with nogil:
        md_resize(
            w, <unsigned char *> pimage, md_make_taps(how, h, rows, top, height, False),
            md_make_taps(how, w, columns, left, width, mirrored), <float *> pscale,
            <float *> pshift, <float *> pout
        )


def distort(
    pixels, scale, shift, float brightness, float contrast, float saturation, float hue,
    matrix=None, bint contrast_first=False
):
    """Change the colours of pixels [..., 3], 0 to 1, in place, and put them in the model's range.

    In this order, or with contrast before the colour: `brightness` is added; a colour's saturation
    is multiplied and its hue turned by `hue` turns, in HSV, or `matrix`, float32 [3, 3], applied;
    the distance from the mean of each channel is multiplied by `contrast`. What is then not in 0 to
    1 is cut off, multiplied by `scale`, and `shift` added.
    """
    cdef str verb = "distort"
    cdef md_colours how
    how.brightness, how.contrast = brightness, contrast
    how.saturation, how.hue = saturation, hue - rintf(hue)
    how.contrast_first, how.linear = contrast_first, matrix is not None
    cdef float *pmatrix
    cdef int i
    if matrix is not None:
        pmatrix = <float *> data(verb, "matrix", matrix, cnp.NPY_FLOAT, 9, False)
        for i in range(9):
            how.matrix[i] = pmatrix[i]
    if pixels.ndim < 1 or pixels.shape[pixels.ndim - 1] != 3:
        raise ValueError(f"{verb}: pixels must be [..., 3], got shape {pixels.shape}")
    cdef Py_ssize_t n = pixels.size // 3
    cdef void *pscale = data(verb, "scale", scale, cnp.NPY_FLOAT, 3, False)
    cdef void *pshift = data(verb, "shift", shift, cnp.NPY_FLOAT, 3, False)
    cdef void *ppixels = data(verb, "pixels", pixels, cnp.NPY_FLOAT, pixels.size, True)
    with nogil:
        md_distort(how, n, <float *> pscale, <float *> pshift, <float *> ppixels)
