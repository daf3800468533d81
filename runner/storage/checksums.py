"""
Checksums of pieces and of the whole.

A manifest has those of each chunk; a store wants one a part and one a file. They are remainders by
one polynomial, so the larger ones are sums over the smaller ones and no byte is read twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from vramfarm.checksum import crc32
from vramfarm.protocol import CHUNK_BYTES, Shard

_MAX_STEPS = 64
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Crc:
    """A checksum of so many bits whose polynomial is reflected, and whose register begins and ends inverted."""

    name: str  # as S3 has it
    num_bits: int
    polynomial: int

    def combine(self, first: int, second: int, second_size: int) -> int:
        """Of two pieces joined, from that of each and the size of the second."""
        return _multiply(self, _shift(self, second_size), first) ^ second

    def combine_chunks(self, checksums: Iterable[int], size_bytes: int) -> int:
        """Of `size_bytes` in chunks of `CHUNK_BYTES`, the last of which may be short."""
        whole, left = 0, size_bytes
        for checksum in checksums:
            chunk = min(CHUNK_BYTES, left)
            whole, left = self.combine(whole, checksum, chunk), left - chunk
        return whole

    def of_chunks(self, shard: Shard) -> tuple[int, ...]:
        """What a manifest says of the chunks; nothing, where it does not know this one."""
        return shard.checksums if self is CRC32 else shard.crc64nvme

    def of_shard(self, shard: Shard) -> int:
        return self.combine_chunks(self.of_chunks(shard), shard.size_bytes)


CRC32: Final = Crc("CRC32", 32, 0xEDB88320)
CRC64NVME: Final = Crc("CRC64NVME", 64, 0x9A6C9329AC4BC9B5)


def is_sum_of_parts(checksum: int, num_parts: int, checksums: Sequence[int], size_bytes: int) -> bool:
    """Whether a checksum of parts' checksums is of these chunks, cut evenly into so many parts in some way."""
    return any(checksum == _sum_of_parts(checksums, size_bytes, step) for step in _steps(num_parts, len(checksums)))


def _steps(num_parts: int, num_chunks: int) -> Iterable[int]:
    """How many chunks a part may have had."""
    if not 0 < num_parts <= num_chunks:
        return ()
    least = -(-num_chunks // num_parts)
    most = num_chunks if num_parts == 1 else (num_chunks - 1) // (num_parts - 1)
    return range(least, min(most, least + _MAX_STEPS) + 1)


def _sum_of_parts(checksums: Sequence[int], size_bytes: int, step: int) -> int:
    whole, left = 0, size_bytes
    for first in range(0, len(checksums), step):
        part = checksums[first : first + step]
        size = min(len(part) * CHUNK_BYTES, left)
        whole, left = crc32(CRC32.combine_chunks(part, size).to_bytes(4, "big"), whole), left - size
    return whole


def describe_file(path: Path, name: str) -> Shard:
    """Size and checksums of a file as it is now; one block in memory at a time."""
    size, checksums = 0, list[int]()
    with path.open("rb", buffering=0) as file:
        while block := file.read(min(_BLOCK_BYTES, CHUNK_BYTES - size % CHUNK_BYTES)):
            if size % CHUNK_BYTES == 0:
                checksums.append(0)
            size += len(block)
            checksums[-1] = crc32(block, checksums[-1])
    return Shard(name, size, tuple(checksums))


@cache
def _shift(crc: Crc, num_bytes: int) -> int:
    """x to the power of 8 * num_bytes, modulo the polynomial: appends that many zero bytes."""
    one = 1 << (crc.num_bits - 1)  # the polynomial 1: coefficients are reflected
    power, square, bits = one, one >> 1, 8 * num_bytes
    while bits:
        if bits & 1:
            power = _multiply(crc, square, power)
        square, bits = _multiply(crc, square, square), bits >> 1
    return power


def _multiply(crc: Crc, a: int, b: int) -> int:
    product, one, mask = 0, 1 << (crc.num_bits - 1), (1 << crc.num_bits) - 1
    while a and b:
        if a & one:
            product ^= b
        a = (a << 1) & mask
        b = (b >> 1) ^ (crc.polynomial if b & 1 else 0)
    return product
