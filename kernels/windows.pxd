"""The geometry of windows over images, checked, for all kernels that take some.

The function is inline: a module that cimports it has its own copy.
"""

cdef extern from "window.h":
    cppclass md_windows:
        Py_ssize_t n, h, w, c, rows, columns
        Py_ssize_t kh, kw, stride_h, stride_w, pad_top, pad_left


cdef inline md_windows read_windows(
    str verb, str name, object images, object windows, Py_ssize_t kh, Py_ssize_t kw,
    Py_ssize_t stride_h, Py_ssize_t stride_w, Py_ssize_t pad_top, Py_ssize_t pad_left,
) except *:
    """The geometry of windows [n, rows, columns, ...] over images [n, h, w, c], checked."""
    cdef md_windows g
    if images.ndim != 4 or windows.ndim != 4 or images.shape[0] != windows.shape[0]:
        raise ValueError(
            f"{verb}: needs images [n, h, w, c] and {name} [n, rows, columns, ...], "
            f"got shapes {images.shape} and {windows.shape}"
        )
    g.n, g.h, g.w, g.c = images.shape
    g.rows, g.columns = windows.shape[1:3]
    g.kh, g.kw, g.stride_h, g.stride_w = kh, kw, stride_h, stride_w
    g.pad_top, g.pad_left = pad_top, pad_left
    if min(kh, kw, stride_h, stride_w) < 1:
        raise ValueError(
            f"{verb}: window {kh}x{kw} and strides {stride_h}x{stride_w} must be positive"
        )
    if not (
        0 <= pad_top < kh and 0 <= pad_left < kw
        and (g.rows == 0 or (g.rows - 1) * stride_h - pad_top < g.h)
        and (g.columns == 0 or (g.columns - 1) * stride_w - pad_left < g.w)
    ):
        raise ValueError(
            f"{verb}: some of the {g.rows}x{g.columns} windows of {kh}x{kw}, strides "
            f"{stride_h}x{stride_w}, padding {pad_top} above and {pad_left} to the left, "
            f"lie wholly outside of images of {g.h}x{g.w}"
        )
    return g
