"""
Square tables of cards, as `nvidia-smi topo` prints them.

The columns are what the head names; the cells of a row are the words in it that are links, in
order, and the self entry must lie under the row's own name. So affinity columns may be there
or not, empty, anywhere, or run together; network cards may stand anywhere; lines may be wrapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

SELF: Final = "X"
MAX_GPUS: Final = 128
_MAX_COLUMNS: Final = 512
_MAX_ROWS: Final = 1024
_GPU: Final = re.compile(r"GPU(\d{1,4})")
_AFFINITY: Final = re.compile(r"CPU\s*Affinity|NUMA\s*Affinity|GPU\s*NUMA\s*ID|CPU\s*List", re.IGNORECASE)
_GLUED_NAMES: Final = re.compile(r"(?<=\d)(?=GPU\d|NIC\d|mlx\d_)")
_OF_AFFINITY: Final = re.compile(r"[\d,\-]{0,2000}(?:N/A)?")
_ODD_CELL: Final = re.compile(r"(?!N/A)[A-Z?][A-Z0-9?!/]{0,15}")  # a link that we do not know
_NAME: Final = re.compile(r"[A-Za-z][\w.\-]{0,63}")


@dataclass(slots=True, kw_only=True)
class Matrix:
    """Names over the columns, and per row its cells in their order; a cell that cannot be told is empty."""

    columns: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)
    has_affinity: bool = False

    @property
    def gpus(self) -> tuple[str, ...]:
        """Every card that is named, over a column or before a row, in the order of their numbers."""
        names = {name for name in (*self.columns, *self.rows) if _GPU.fullmatch(name)}
        return tuple(sorted(names, key=number))

    def cell(self, row: str, column: str) -> str:
        """What stands there; empty if that part is missing."""
        cells = self.rows.get(row, [])
        at = self.columns.index(column) if column in self.columns else len(cells)
        return cells[at] if at < len(cells) else ""

    def vocabulary(self) -> set[str]:
        return {cell for cells in self.rows.values() for cell in cells} - {SELF, ""}


def number(gpu: str) -> int:
    """The number in a card's name."""
    return int(gpu[3:])


def find_matrix(lines: Iterable[str], link: re.Pattern[str]) -> Matrix | None:
    """
    Return the first table of cards whose cells match `link`, as far as it goes; None if there is none.

    A table whose head was cut off gets its columns from the self entries.
    """
    matrix = Matrix()
    wrapped = ""  # the row that a narrow terminal may have broken
    for raw in lines:
        line = raw.replace("|", " ").replace("\t", " ").lstrip("> ")  # tables and quotes of Markdown
        cells_of = _row(line, link, matrix.columns)
        if cells_of is not None:
            wrapped = cells_of[0]
            if wrapped in matrix.rows or len(matrix.rows) >= _MAX_ROWS:
                break  # the same table once more
            matrix.rows[wrapped] = cells_of[1]
        elif wrapped and (more := _continuation(line, link, matrix, wrapped)):
            matrix.rows[wrapped] += more
        elif columns := _head(line, link):
            if matrix.rows:
                break
            begins_anew = columns[0] in matrix.columns
            matrix.columns = [*([] if begins_anew else matrix.columns), *columns][:_MAX_COLUMNS]
            matrix.has_affinity = _AFFINITY.search(line) is not None
        elif line.strip():
            if not matrix.rows:
                matrix.columns = []  # words that looked like a head
            wrapped = ""
    return _with_columns(matrix)


def pair_up(matrix: Matrix, weaker: Mapping[str, int]) -> tuple[list[tuple[int, int, str]], list[tuple[int, int, str]]]:
    """
    Return the cell of each pair of cards, and those told differently from either side.

    A cell that one side lacks is taken from the other; of two that differ the weaker counts
    (the lower in `weaker`). A pair that neither side tells is left out.
    """
    pairs, doubtful = [], []
    gpus = matrix.gpus[: MAX_GPUS + 1]
    for i, first in enumerate(gpus):
        for second in gpus[i + 1 :]:
            told = {cell for cell in (matrix.cell(first, second), matrix.cell(second, first)) if cell}
            if not told:
                continue
            pair = (number(first), number(second), min(sorted(told), key=lambda cell: weaker.get(cell, 0)))
            pairs.append(pair)
            if len(told) > 1:
                doubtful.append(pair)
    return pairs, doubtful


def complaint(matrix: Matrix, num_pairs: int) -> str:
    """What is wrong with the table; empty if every card has its row or its column, and each pair its cell."""
    if not matrix.rows:
        return "the head of the table is there, its rows are missing"
    if len(matrix.gpus) > MAX_GPUS:
        return f"expected at most {MAX_GPUS} cards, got {len(matrix.gpus)}"
    for name, cells in matrix.rows.items():
        at = matrix.columns.index(name) if name in matrix.columns else None
        if at is None or (at < len(cells) and cells[at] not in {SELF, ""}) or SELF in cells[:at] + cells[at + 1 :]:
            return f"row {name}: expected the self entry X under {name}, found it elsewhere: the columns are not those of the head"
    if "" in matrix.columns:
        return "the head of the table is missing: nobody can tell what its columns are"
    expected = len(matrix.gpus) * (len(matrix.gpus) - 1) // 2
    if num_pairs < expected:
        return f"the table is cut: {num_pairs} of {expected} pairs of {len(matrix.gpus)} cards can be read"
    return ""


def _row(line: str, link: re.Pattern[str], columns: Sequence[str]) -> tuple[str, list[str]] | None:
    name, _, rest = line.strip().partition(" ")
    if "=" in rest or not (_GPU.fullmatch(name) or (name in columns)):
        return None
    cells = _cells_of(rest.split(maxsplit=_MAX_COLUMNS), link)
    return None if cells is None else (name, cells)


def _cells_of(tokens: Iterable[str], link: re.Pattern[str]) -> list[str] | None:
    """The cells among the words of a row; None if one of the words belongs in no row, or no cell is there."""
    cells: list[str] = []
    for token in tokens:
        if found := _cells(token, link):
            cells += found
        elif _ODD_CELL.fullmatch(token):
            cells.append("")
        elif not _OF_AFFINITY.fullmatch(token):
            return None
    return cells if any(cells) else None


def _continuation(line: str, link: re.Pattern[str], matrix: Matrix, row: str) -> list[str]:
    """Cells of a line that a narrow terminal broke off the row above."""
    tokens = line.split(maxsplit=_MAX_COLUMNS)
    short = len(matrix.rows[row]) < len(matrix.columns)
    if not (short and tokens and "=" not in line and _cells(tokens[0], link)):
        return []
    return _cells_of(tokens, link) or []


def _head(line: str, link: re.Pattern[str]) -> list[str]:
    if "GPU" not in line or "=" in line:
        return []
    names = _GLUED_NAMES.sub(" ", _AFFINITY.sub(" ", line)).split(maxsplit=_MAX_COLUMNS)
    fits = all(_NAME.fullmatch(name) and not _is_link(name, link) for name in names)
    return names if fits and any(_GPU.fullmatch(name) for name in names) else []


def _is_link(token: str, link: re.Pattern[str]) -> bool:
    return token == SELF or link.fullmatch(token) is not None


def _cells(token: str, link: re.Pattern[str]) -> list[str]:
    """
    Cells of one word: usually one or none, several where blanks were lost.

    After a link its affinity may follow at once (`SYS0-23`). In `NV120-23` nobody can tell
    where the link ends: that cell stays empty, and the other side of the pair tells it.
    """
    found: list[str] = []
    at = 0
    while at < len(token):
        match = link.match(token, at)
        if match is None and token[at] == SELF:
            found.append(SELF)
            at += 1
            continue
        if match is None or match.end() == at:
            break
        found.append(match[0])
        at = match.end()
    rest = token[at:]
    if not found or not _OF_AFFINITY.fullmatch(rest):
        return []
    if rest and found[-1][-1].isdigit():
        found[-1] = ""
    return found


def _with_columns(matrix: Matrix) -> Matrix | None:
    names = [name for name in matrix.rows if _GPU.fullmatch(name)]
    if matrix.rows and not names:
        return None
    if matrix.rows and not matrix.columns:
        matrix.columns = _columns_by_self(matrix.rows)
    has_cards = any(_GPU.fullmatch(name) for name in matrix.columns) or names
    return matrix if has_cards and (matrix.rows or matrix.has_affinity or len(matrix.columns) > 1) else None


def _columns_by_self(rows: Mapping[str, Sequence[str]]) -> list[str]:
    width = max(map(len, rows.values()))
    columns = [""] * width
    for name, cells in rows.items():
        if cells.count(SELF) == 1:
            columns[cells.index(SELF)] = name
    return columns
