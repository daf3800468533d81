"""By which checksum an S3 server compares bytes, and how a checksum is written there."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from runner.storage.checksums import CRC32, CRC64NVME, Crc
from runner.storage.offsite.contract import Checksums, Head


@dataclass(frozen=True, slots=True)
class Kind:
    """By which checksum a server compares a file, and of what."""

    crc: Crc
    of: Checksums

    @property
    def is_compared(self) -> bool:
        """Whether it refuses other bytes, which was found out by trying."""
        return self.of is not Checksums.NONE

    def wish(self) -> Mapping[str, Any]:
        """As an upload is begun."""
        wishes: Mapping[Checksums, Mapping[str, Any]] = {
            Checksums.WHOLE: {"ChecksumAlgorithm": self.crc.name, "ChecksumType": "FULL_OBJECT"},
            Checksums.PARTS: {"ChecksumAlgorithm": self.crc.name},
            Checksums.NONE: {},
        }
        return wishes[self.of]

    def fields(self, checksum: int) -> dict[str, Any]:
        return {} if self.of is Checksums.NONE else {f"Checksum{self.crc.name}": encode(self.crc, checksum)}

    def kept(self, head: Head) -> object:
        """What the server tells of an object, if it keeps this kind."""
        if self.crc is CRC64NVME:
            return head.crc64nvme
        return head.crc32 if self.of is Checksums.WHOLE else head.parts_crc32


def plain_md5(found: Mapping[str, Any]) -> str:
    """The MD5 of an object that came in one piece and is not encrypted with a key of somebody's; else empty."""
    tag = str(found.get("ETag", "")).strip('"')
    sealed = found.get("SSECustomerAlgorithm") or str(found.get("ServerSideEncryption", "")).startswith("aws:kms")
    return tag if len(tag) == 32 and "-" not in tag and not sealed else ""  # noqa: PLR2004  # hexadecimal digits


def with_md5(content: bytes) -> dict[str, Any]:
    """A bucket with a default retention (Object Lock) takes nothing without a digest."""
    return {"ContentMD5": base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()}


def encode(crc: Crc, checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(crc.num_bits // 8, "big")).decode()


def decode(crc: Crc, text: str) -> int | None:
    """None for no checksum, for nonsense, and for a checksum of checksums (`…-3`), which says nothing of the whole."""
    raw = b""
    with suppress(ValueError):
        raw = base64.b64decode(text, validate=True)
    return int.from_bytes(raw, "big") if len(raw) == crc.num_bits // 8 else None


def decode_parts(text: str) -> tuple[int, int] | None:
    """(checksum of the parts' checksums, number of parts) of `…-3`; None if it is none."""
    of_all, _, number = text.partition("-")
    checksum = decode(CRC32, of_all)
    return None if checksum is None or not number.isdecimal() else (checksum, int(number))
