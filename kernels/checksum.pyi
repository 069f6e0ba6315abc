from minidist.dtypes import HostArray

def crc32c(data: bytes | bytearray | memoryview | HostArray, *, tables: bool = False) -> int:
    """Return the CRC-32C of contiguous bytes; from 16 KiB on without the GIL.

    `tables` asks for the way of processors that have no instruction for it.
    """
