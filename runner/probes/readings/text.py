"""Text as people save and paste it, made plain: no colours, no prompts' control codes, bounded in every direction."""

from __future__ import annotations

import re
from typing import Final

MAX_BYTES: Final = 4 << 20  # `nvidia-smi -q` of sixteen cards is a tenth of it
_MAX_LINES: Final = 50_000
_MAX_LINE: Final = 8_000

_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)|[@-Z\\-_])")
_LONG_BLANKS: Final = re.compile(r"[ \t]{129,}")
_SIZE: Final = re.compile(r"(\d{1,20}(?:[.,]\d{1,9})?)\s?([KMGTPE]?)(i?B?)", re.IGNORECASE)
_POWERS: Final = "KMGTPE"


def plain_lines(raw: bytes | str) -> tuple[str, ...]:
    """
    Return the lines of a reading without colours, control characters and exotic blanks; tabs stay.

    Runs of blanks end after 128, so that no pattern can be kept busy by them; what is beyond 4 MiB, 50 000 lines or 8 000 characters of a line is left out.
    """
    text = raw[:MAX_BYTES] if isinstance(raw, str) else _decode(raw[:MAX_BYTES])
    text = (
        _LONG_BLANKS.sub(" " * 128, _ESCAPES.sub("", text))
        .replace("\r\n", "\n")
        .replace("\r", "\n")
        .replace("\u00a0", " ")
        .replace("\ufeff", "")
    )
    return tuple(_visible(line) for line in text.split("\n", _MAX_LINES)[:_MAX_LINES])


def is_binary(raw: bytes | str) -> bool:
    """Whether these bytes are no text at all."""
    head = raw[:4096] if isinstance(raw, bytes) else raw[:4096].encode(errors="replace")
    odd = sum(byte < 32 and byte not in b"\t\n\r\x1b\f\b" for byte in head)  # noqa: PLR2004  # control characters
    return b"\0" in head and not _is_utf16(head) if odd else False


def parse_size(text: str, *, unit_bytes: int = 1) -> int | None:
    """
    Return the bytes of `64M`, `2.0Ti`, `16 GiB` or a bare number of `unit_bytes`; None if it is no size.

    A letter is a power of 1024, as `df -h` and `free -h` write it.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, letter, _ = match.groups()
    unit = 1024 ** (_POWERS.index(letter.upper()) + 1) if letter else 1 if match[3] else unit_bytes
    return round(float(number.replace(",", ".")) * unit) if "." in number or "," in number else int(number) * unit


def _decode(raw: bytes) -> str:
    return raw.decode("utf-16" if _is_utf16(raw) else "utf-8", errors="replace")


def _is_utf16(raw: bytes) -> bool:
    return raw[:2] in {b"\xff\xfe", b"\xfe\xff"}  # what a redirect in PowerShell writes


def _visible(line: str) -> str:
    short = line[:_MAX_LINE]
    return short if short.isprintable() else "".join(c if c.isprintable() or c == "\t" else " " for c in short)
