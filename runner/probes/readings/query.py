"""`nvidia-smi --query-gpu=… --format=csv`, with and without its head, and what `nvidia-smi` says instead of a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from runner.facts import Broken, CardTable, PcieLink, ReadingKind
from runner.probes.readings import refusals

_MAX_ROWS: Final = 4096
_COLUMN: Final = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*(?: \[[^\]]{1,16}\])?")
_ERROR: Final = re.compile(r"\[(?!N/A\]|Not Supported\]|Not Found\])[^\]]{1,80}\]")
_LOST: Final = re.compile(r"\[(?:GPU requires reset|GPU is lost|Unknown Error)\]", re.IGNORECASE)
_CELL: Final = re.compile(
    r"\[[^\]]{1,80}\]|N/A|-?\d[\d.]*(?: ?(?:%|[KMGT]i?B|[MG]Hz|W|C|ms))?"
    r"|P\d{1,2}|Enabled|Disabled|Active|Not Active|Yes|No|Default|0x[0-9A-Fa-f]+"
    r"|(?:NVIDIA |Tesla |Quadro |GeForce |TITAN |GRID |[A-Z]{1,2}\d{2,4}[- ])[^,]{1,80}|GPU-[0-9a-f\-]{8,}|[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d"
)
_PCIE: Final = {
    "pcie.link.gen.current": "gen",
    "pcie.link.gen.gpucurrent": "gen",
    "pcie.link.width.current": "width",
    "pcie.link.gen.max": "gen_max",
    "pcie.link.width.max": "width_max",
}


def recognise(lines: Sequence[str]) -> bool:
    return any(_is_head(line) or _is_row(line) for line in lines)


def parse(lines: Sequence[str]) -> CardTable | Broken:
    start = next((at for at, line in enumerate(lines) if _is_head(line)), None)
    columns = () if start is None else tuple(_bare(cell) for cell in _split(lines[start]))
    body = lines if start is None else lines[start + 1 :]
    wanted = len(columns) or next((len(_split(line)) for line in body if _is_row(line)), 0)
    filled = [_split(line) for line in body if line.strip() and not refusals.recognise([line])][:_MAX_ROWS]
    table = [cells for cells in filled if len(cells) == wanted and (columns or _is_row(", ".join(cells)))]
    table = [cells for cells in table if tuple(map(_bare, cells)) != columns]  # a loop prints its head again
    cut = [f"a row is cut: {', '.join(cells)[:80]!r}" for cells in filled if 1 < len(cells) < wanted]
    lost = [refusals.parse([line]).message for line in body if refusals.recognise([line])]
    rows = tuple(cells for cells in table if not all(map(_ERROR.fullmatch, cells)))
    if not table:
        return Broken(
            kind=ReadingKind.QUERY,
            message="the head of the table is there, and no row for a card",
            hint="save the whole output of `nvidia-smi --query-gpu=… --format=csv`",
        )
    return CardTable(
        columns=columns,
        rows=rows,
        names=_column(columns, rows, "name") or _column(columns, rows, "gpu_name"),
        pcie=_pcie(columns, rows),
        problems=(*(told for at, cells in enumerate(rows) if (told := _problem(columns, cells, at))), *cut, *lost),
        silent_rows=len(table) - len(rows),
    )


def _split(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.split(",", 256))


def _bare(cell: str) -> str:
    return cell.partition(" [")[0].strip().lower()


def _is_head(line: str) -> bool:
    cells = _split(line)
    known = any("." in cell or _bare(cell) in {"index", "name", "uuid", "driver_version", "gpu_name"} for cell in cells)
    return known and all(map(_COLUMN.fullmatch, cells)) and not line.strip().endswith(".")


def _is_row(line: str) -> bool:
    cells = _split(line)
    return len(cells) > 1 and all(map(_CELL.fullmatch, cells))


def _column(columns: Sequence[str], rows: Sequence[tuple[str, ...]], name: str) -> tuple[str, ...]:
    return tuple(cells[columns.index(name)] for cells in rows) if name in columns else ()


def _pcie(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> tuple[PcieLink, ...]:
    places = {field: at for at, column in enumerate(columns) if (field := _PCIE.get(column))}
    if not columns:
        places = _pcie_by_shape(rows)
    if not places:
        return ()
    return tuple(PcieLink(**{field: _whole(cells[at]) for field, at in places.items()}) for cells in rows)


def _pcie_by_shape(rows: Sequence[tuple[str, ...]]) -> dict[str, int]:
    """
    Without a head: the one place where generation and width stand twice in a row, what can be and what is.

    What is never exceeds what can be; where all are equal it does not matter which is which.
    """
    width = len(rows[0]) if rows else 0
    found = [at for at in range(width - 3) if all(map(_is_link_twice, (cells[at : at + 4] for cells in rows)))]
    if len(found) != 1:
        return {}
    at = found[0]
    first_is_most = all(int(cells[at]) >= int(cells[at + 2]) for cells in rows)
    names = ("gen_max", "width_max", "gen", "width") if first_is_most else ("gen", "width", "gen_max", "width_max")
    return {name: at + place for place, name in enumerate(names)}


def _is_link_twice(cells: Sequence[str]) -> bool:
    gens, widths = cells[::2], cells[1::2]
    return set(gens) <= {*"123456"} and set(widths) <= {"1", "2", "4", "8", "16", "32"}


def _whole(cell: str) -> int | None:
    return int(cell) if cell.isdecimal() and len(cell) < 6 else None  # noqa: PLR2004  # a generation, a width


def _problem(columns: Sequence[str], cells: Sequence[str], at: int) -> str:
    said = next((cell for cell in cells if _LOST.fullmatch(cell)), "")
    if not said:
        return ""
    number = cells[columns.index("index")] if "index" in columns else str(at)
    return f"gpu {number} {said.strip('[]').removeprefix('GPU ').lower()}"
