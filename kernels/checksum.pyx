"""Checksums of bytes: see checksum.h."""

cdef extern from "checksum.h":
    unsigned int md_crc32c(const void *data, size_t count, bint tables) noexcept nogil


def crc32c(const unsigned char[::1] data not None, *, bint tables=False):
    cdef size_t count = <size_t> data.shape[0]
    cdef const void *first = &data[0] if count else NULL
    cdef unsigned int crc
    if count < 16384:  # letting go of the GIL would take longer
        return md_crc32c(first, count, tables)
    with nogil:
        crc = md_crc32c(first, count, tables)
    return crc
