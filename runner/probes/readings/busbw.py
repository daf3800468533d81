"""All-reduce measurements: nccl-tests of any age, torch benchmarks, the article's ten lines, and what people write down."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from runner.facts import Broken, BusBandwidth, ReadingKind
from runner.probes.readings.text import parse_size

_GIB: Final = 1 << 30
_BILLION: Final = 1e9
_ROUNDING: Final = 0.02
_NUMBER: Final = r"(\d{1,7}(?:\.\d{1,9})?)"

# nccl-tests
_HEAD: Final = re.compile(r"#?\s*size\s+count\s+type\b.*\bbusbw\b")
_RANK: Final = re.compile(r"#?\s*Rank\s+(\d{1,5})\b.*?\bdevice\s+\S+\s+\[[^\]]{1,20}\]\s*(.{0,80})")
_NUM_GPUS: Final = re.compile(r"#?\s*nThreads?:?\s+(\d{1,4})\s+nGpus:?\s+(\d{1,4})")
_AVERAGE: Final = re.compile(rf"Av(?:era)?g(?:e)? bus (?:bandwidth|bw)\s*:\s*{_NUMBER}", re.IGNORECASE)
_WRONG: Final = re.compile(r"Out of bounds values\s*:\s*(\d{1,15})\s+(?:FAILED|OK)")
_TIMES: Final = ("time", "algbw", "busbw", "wrong")
_DEFAULT_HEAD: Final = ("size", "count", "type", "redop", "root", *_TIMES, *_TIMES)
_FAILURE: Final = re.compile(
    r"Test (?:NCCL|CUDA) failure|unhandled (?:system|cuda) error|NCCL WARN .{0,200}(?:failed|error)"
)

# the rest
_RANKS: Final = re.compile(r"\b(\d{1,5})\s*(?:x\s*)?(?:GPUs?|ranks?|cards?)\b", re.IGNORECASE)
_BUS: Final = re.compile(
    rf"\b(?:bus[\s_]?(?:bw|bandwidth)|bw[\s_]?bus)\b\W{{0,20}}{_NUMBER}\s*(GB/?p?s|Gb/?p?s)\b", re.IGNORECASE
)
_ALG: Final = re.compile(rf"\balg(?:orithm)?[\s_]?(?:bw|bandwidth)\b\W{{0,20}}{_NUMBER}\s*GB/?p?s\b", re.IGNORECASE)
_PAYLOAD: Final = re.compile(r"\b(\d{1,7}(?:\.\d+)?\s?[KMG]i?B)\s+payload", re.IGNORECASE)
_PER_SECOND: Final = re.compile(rf"{_NUMBER} all-reduces of {_NUMBER} ?GiB per second")
_IS_AVERAGE: Final = re.compile(r"\b(?:average|avg|mean)\b.{0,12}\bbus|\bavg\b", re.IGNORECASE)


def recognise(lines: Sequence[str]) -> bool:
    anywhere, at_start = (_BUS, _PER_SECOND, _AVERAGE), (_HEAD, _RANK, _NUM_GPUS)
    signs = (
        any(sign.search(line) for sign in anywhere) or any(sign.match(line) for sign in at_start) for line in lines
    )
    return any(signs) or bool(_rows(lines))


def parse(lines: Sequence[str]) -> BusBandwidth | Broken:
    rows = _rows(lines)
    if rows:
        return _from_table(lines, rows)
    if any(sign.match(line) for line in lines for sign in (_HEAD, _RANK, _NUM_GPUS)):
        failure = next((line.strip() for line in lines if _FAILURE.search(line)), "")
        what = f"it failed: {failure[:200]!r}" if failure else "its beginning is there, no measurement is"
        return _broken(f"the test has no result: {what}")
    return _from_sentence(lines) or _from_words(lines) or _broken("expected a bus bandwidth in GB/s, found none")


# ------------------------------------------------------------------------------ nccl-tests


@dataclass(frozen=True, slots=True)
class _Row:
    size_bytes: int
    best: tuple[float, float]  # busbw, algbw
    mean: float  # busbw
    num_wrong: int


def _rows(lines: Sequence[str]) -> list[_Row]:
    head = next((_names(line) for line in lines if _HEAD.match(line)), _DEFAULT_HEAD)
    return [row for line in lines if (row := _row(line.split(maxsplit=32), head))]


def _names(line: str) -> tuple[str, ...]:
    return tuple(line.replace("#wrong", "wrong").replace("#", " ").split())


def _row(tokens: Sequence[str], head: Sequence[str]) -> _Row | None:
    """A measurement: a word under each name of the head; `redop` and `root` may have been left out."""
    missing = len(head) - len(tokens)
    names = head if missing == 0 else tuple(n for n in head if n not in {"redop", "root"})
    if len(names) != len(tokens) or not (tokens[0].isdecimal() and tokens[1].isdecimal()):
        return None
    under = list(zip(names, tokens, strict=True))
    bus, alg = ([_float(token) for name, token in under if name == which] for which in ("busbw", "algbw"))
    pairs = [(b, a) for b, a in zip(bus, alg, strict=False) if b is not None and a is not None]
    if not pairs or len(tokens[0]) > 15:  # noqa: PLR2004  # a petabyte
        return None
    wrong = sum(int(token) for name, token in under if name == "wrong" and token.isdecimal())
    return _Row(int(tokens[0]), max(pairs), sum(b for b, _ in pairs) / len(pairs), wrong)


def _float(token: str) -> float | None:
    return float(token) if re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", token) else None


def _from_table(lines: Sequence[str], rows: Sequence[_Row]) -> BusBandwidth:
    row = max(rows, key=lambda row: row.size_bytes)
    cards = {int(match[1]): match[2].strip() for line in lines if (match := _RANK.match(line))}
    started = next((match for line in lines if (match := _NUM_GPUS.match(line))), None)
    ranks = max(cards) + 1 if cards else int(started[1]) * int(started[2]) if started else _count(lines)
    wrong = max((int(match[1]) for line in lines if (match := _WRONG.search(line))), default=0)
    average, mean = _average(lines), sum(row.mean for row in rows) / len(rows)
    return BusBandwidth(
        ranks=ranks,
        size_bytes=row.size_bytes,
        algbw=row.best[1],
        busbw=row.best[0],
        average=average,
        rows_omitted=average is not None and abs(average - mean) > _ROUNDING * mean,
        models=tuple(sorted(set(cards.values()) - {""})),
        num_wrong=max(wrong, row.num_wrong),
    )


def _average(lines: Sequence[str]) -> float | None:
    return next((float(match[1]) for line in lines if (match := _AVERAGE.search(line))), None)


# ------------------------------------------------------------------------- words, sentences


def _from_sentence(lines: Sequence[str]) -> BusBandwidth | None:
    """The article's test tells how often a second, not how many cards."""
    match = next((match for line in lines if (match := _PER_SECOND.search(line))), None)
    if match is None:
        return None
    size = round(float(match[2]) * _GIB)
    algbw = round(float(match[1]) * size / _BILLION, 2)
    ranks = _count(lines)
    busbw = round(algbw * 2 * (ranks - 1) / ranks, 2) if ranks else None
    return BusBandwidth(ranks=ranks, size_bytes=size, algbw=algbw, busbw=busbw)


def _from_words(lines: Sequence[str]) -> BusBandwidth | None:
    told = [(ranks, busbw) for line in lines for ranks, busbw in _told(line)]
    if not told:
        return None
    ranks, busbw = max(told, key=lambda pair: (pair[0] or 0, pair[1]))
    payload = next((match[1] for line in lines if (match := _PAYLOAD.search(line))), "")
    return BusBandwidth(
        ranks=ranks or _count(lines),
        size_bytes=parse_size(payload) if payload else None,
        algbw=next((float(match[1]) for line in lines if (match := _ALG.search(line))), None),
        busbw=busbw,
        average=_average(lines),
        others=tuple(sorted((r, b) for r, b in told if r and r != ranks)),
    )


def _told(line: str) -> Iterator[tuple[int | None, float]]:
    """Bus bandwidths of a line that are no averages, with the number of cards where the line has it."""
    if _IS_AVERAGE.search(line):
        return
    for match in _BUS.finditer(line):
        bits = match[2].startswith("Gb")
        yield _count([line]), round(float(match[1]) / (8 if bits else 1), 3)


def _count(lines: Sequence[str]) -> int | None:
    return max((int(match[1]) for line in lines for match in _RANKS.finditer(line)), default=None)


def _broken(message: str) -> Broken:
    hint = "save the whole output of `all_reduce_perf -b 1G -e 8G -f 2 -g <cards>`"
    return Broken(kind=ReadingKind.BUSBW, message=message, hint=hint)
