"""
What `attach` shows, as lines of text: the run above, its log below. Pure: it knows no terminal.

It must be readable at 80 columns, without colour, and say first what a person at night wants to
know: does it run, how far is it, what is safe, what does it cost.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from runner.facts import CardPulse
from runner.figures import size, span
from runner.supervise.logs import Line

BEGINS: Final = "attempt"  # the stream of a line that nobody printed: an attempt begins here
_KEYS: Final = "q detach (the run goes on)  0-9 one rank  l launcher  a all ranks  space hold"
_BAR: Final = 24
_MIN_LOG_LINES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that is shown. `alive`: whether a runner holds the run; `rank` None shows all."""

    status: Mapping[str, Any]
    alive: bool
    now: datetime
    cards: Sequence[CardPulse] = ()
    lines: Sequence[Line] = ()
    rank: int | None = None
    held: bool = False


def screen(view: View, *, width: int, height: int) -> list[str]:
    """`height` lines of at most `width` columns."""
    above = [clip(line, width) for line in _above(view, width)]
    room = max(height - len(above) - 2, _MIN_LOG_LINES)
    shown = [clip(line, width) for line in _log(view, room)]
    shown += [""] * (room - len(shown))
    rule = clip(f"-- {_filter(view)} ".ljust(width, "-"), width)
    return [*above[: max(height - _MIN_LOG_LINES - 2, 1)], rule, *shown, clip(_KEYS, width)][:height]


def clip(text: str, width: int) -> str:
    """As much of the text as fits into so many columns of a terminal: some characters take two, or none."""
    columns, kept = 0, []
    for character in text:
        columns += _columns(character)
        if columns > width:
            break
        kept.append(character)
    return "".join(kept)


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in {"Cf", "Cc"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1


# ------------------------------------------------------------------------------------ above


def _above(view: View, width: int) -> Iterator[str]:
    status = view.status
    head = f"{status.get('job', '?')}  {_phase(view)}  attempt {status.get('attempt', 0)}"
    clock = f"{view.now.astimezone():%H:%M:%S}"
    yield head.ljust(width - len(clock) - 1)[: width - len(clock) - 1] + " " + clock
    yield from _wrap(_progress(status, min(_BAR, width // 4)), width)
    yield from _wrap(_times(view), width)
    yield from _checkpoints(view, width)
    for task in status.get("tasks") or ():
        note = f" ({task['note']})" if task.get("note") else ""
        yield f"{task.get('kind')}  {task.get('subject')}  {task.get('progress', 0):.0%}{note}"
    yield from _cards(view.cards, width)
    if message := status.get("message"):
        yield f"last  {message}"


def _wrap(parts: Sequence[str], width: int) -> Iterator[str]:
    """Beside each other as far as they fit, and then below: nothing that matters is cut off."""
    line = ""
    for part in parts:
        if line and len(line) + len(part) + 2 > width:
            yield line
            line = ""
        line = f"{line}  {part}" if line else part
    if line:
        yield line


def _phase(view: View) -> str:
    if outcome := view.status.get("outcome"):
        return f"{str(outcome).upper()} (exit code {view.status.get('exit_code')})"
    if not view.alive:
        return "NOT RUNNING (start it again, and it goes on)"
    return str(view.status.get("phase", "?"))


def _progress(status: Mapping[str, Any], bar: int) -> list[str]:
    step, total = int(status.get("step") or 0), int(status.get("max_steps") or 0)
    if total:
        done = min(step / total, 1.0)
        parts = [f"[{'#' * int(done * bar):<{bar}}] {done:.1%}", f"step {step:,}/{total:,}"]
    else:
        parts = [f"step {step:,}"]
    if (loss := status.get("loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if rate := status.get("steps_per_s"):
        parts.append(f"{rate:.2f} steps/s" if rate >= 0.1 else f"{1 / rate:.1f} s/step")  # noqa: PLR2004
    return parts


def _times(view: View) -> list[str]:
    status, parts = view.status, list[str]()
    over = bool(status.get("outcome"))
    if (left := status.get("eta_s")) is not None and not over:
        parts.append(f"about {span(left)} left")
    if (deadline := _moment(status.get("deadline_at"))) and not over:
        parts.append(f"deadline in {span((deadline - view.now).total_seconds())}")
    if cost := status.get("cost"):
        parts.append(f"cost {cost}")
    if server := status.get("server"):
        parts.append(f"server {server}")
    if updated := _moment(status.get("updated_at")):
        age = (view.now - updated).total_seconds()
        parts += [f"as of {span(age)} ago"] if age > 10 else []  # noqa: PLR2004  # the runner writes it every 2 s
    return parts


def _checkpoints(view: View, width: int) -> Iterator[str]:
    checkpoints = list(view.status.get("checkpoints") or ())
    if not checkpoints:
        yield "checkpoint  none yet"
    for checkpoint in reversed(checkpoints[-2:]):
        written = _moment(checkpoint.get("written_at"))
        age = f", {span((view.now - written).total_seconds())} ago" if written else ""
        parts = f"checkpoint  step {checkpoint.get('step', 0):,}{age}", _where(checkpoint, view.status)
        line = ", ".join(parts)
        yield from (line,) if len(line) <= width else (f"{parts[0]},", f"  {parts[1]}")


def _where(checkpoint: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if checkpoint.get("offsite"):
        return "in the store" if not checkpoint.get("local") else "here and in the store"
    return "here, not in the store yet" if status.get("store") else "only on this disk"


def _cards(cards: Sequence[CardPulse], width: int) -> Iterator[str]:
    """As many beside each other as fit."""
    texts = [_card(card) for card in cards]
    if not texts:
        return
    column = max(map(len, texts)) + 3
    per_line = max(width // column, 1)
    for first in range(0, len(texts), per_line):
        yield "".join(text.ljust(column) for text in texts[first : first + per_line]).rstrip()


def _card(card: CardPulse) -> str:
    parts = [f"card {card.index}"]
    parts += [f"{card.use_percent:3.0f}%"] if card.use_percent is not None else []
    if card.used_bytes is not None and card.total_bytes is not None:
        parts.append(f"{size(card.used_bytes)} of {size(card.total_bytes)}")
    parts += [f"{card.power_w:.0f} W"] if card.power_w is not None else []
    parts += [f"{card.temperature:.0f} °C"] if card.temperature is not None else []
    return "  ".join(parts)


def _moment(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(value)) if value else None
    except ValueError:
        return None


# -------------------------------------------------------------------------------------- log


def _filter(view: View) -> str:
    what = "all ranks" if view.rank is None else "launcher" if view.rank < 0 else f"rank {view.rank}"
    return f"{what}, held" if view.held else what


def _log(view: View, room: int) -> list[str]:
    chosen = [line for line in view.lines if view.rank is None or line.rank == view.rank or line.stream == BEGINS]
    return [_log_line(line) for line in chosen[-room:]]


def _log_line(line: Line) -> str:
    if line.stream == BEGINS:
        return f"== {line.text} =="
    return f"{'launcher' if line.rank < 0 else line.rank} | {line.text}"
