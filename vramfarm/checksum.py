"""
The checksums of a chunk, as fast as this installation has them.

CRC32 is what every reader compares. zlib's is always there, 1 to 7 GB/s a core; ISA-L's, where the
package `isal` is installed, is the same number at about 25. Beside a training on all cores that is
half of what a save costs them. CRC64NVME is what a store confirms best; Python has none, so that it is
there where the package `awscrt` is, and no reader needs it.
"""

import importlib
import zlib
from collections.abc import Callable
from functools import cache
from typing import Final

Summing = Callable[[bytes | memoryview, int], int]  # of these bytes, after those of which the number is the sum
_SAMPLE: Final = bytes(range(256)) * 5
_CHECK_64: Final = 0xAE8B14860A799888  # of b"123456789", as its standard says
_SUM_64: Final = 0x20B2E6D20677D312  # the sample's CRC64NVME


def _fastest() -> Summing:
    """What is installed may be anybody's: it must agree with zlib before it is believed."""
    try:
        found: Summing = importlib.import_module("isal.isal_zlib").crc32
        agrees = found(_SAMPLE, 7) == zlib.crc32(_SAMPLE, 7)
    except Exception:  # noqa: BLE001  # a broken package costs speed, never a checkpoint
        return zlib.crc32
    return found if agrees else zlib.crc32


_crc32: Final = _fastest()


def crc32(data: bytes | memoryview, before: int = 0) -> int:
    """Of these bytes, after those of which `before` is the CRC32. Other threads go on meanwhile."""
    return _crc32(data, before)


@cache
def find_crc64nvme() -> Summing | None:
    """What computes it here, if anything does: looked for at the first call, by whoever sums, since that takes 40 ms."""
    try:
        found: Summing = importlib.import_module("awscrt.checksums").crc64nvme
        agrees = found(b"123456789", 0) == _CHECK_64 and found(_SAMPLE[9:], found(_SAMPLE[:9], 0)) == _SUM_64
    except Exception:  # noqa: BLE001  # it is no checkpoint's condition
        return None
    return found if agrees else None
