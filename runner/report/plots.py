"""Plots as inline SVG: nothing is fetched, nothing is run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Final

from runner.facts import Attempt
from runner.figures import span
from runner.policy.goodput import Share, Spending

Point = tuple[float, float]

WIDTH: Final = 860
HEIGHT: Final = 268
_LEFT: Final = 76
_RIGHT: Final = 14
_TOP: Final = 12
_BOTTOM: Final = 58  # the numbers of an axis, and below them what they are; on a phone both are twice as large
_MAX_POINTS: Final = 400
_ROW: Final = 34
COLOURS: Final = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one attempt, by x."""

    label: str
    points: tuple[Point, ...]


def line_plot(title: str, x_label: str, curves: Sequence[Curve], *, bottom: float | None = None) -> str:
    """One curve an attempt; empty where there is nothing to show. `bottom`: where the axis begins."""
    shown = [Curve(c.label, thin([p for p in c.points if all(map(math.isfinite, p))])) for c in curves]
    shown = [curve for curve in shown if curve.points]
    if not shown:
        return ""
    xs, ys = zip(*(point for curve in shown for point in curve.points), strict=True)
    low, high = _widened(min(ys) if bottom is None else bottom, max(ys))
    frame = _Frame(*_widened(min(xs), max(xs)), low if bottom is None else bottom, high)
    body = [*frame.axes(x_label)]
    for number, curve in enumerate(shown):
        points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in curve.points)
        colour = COLOURS[number % len(COLOURS)]
        if len(curve.points) == 1:
            x, y = curve.points[0]
            body.append(f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="{colour}"/>')
        body.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6">'
            f"<title>{escape(curve.label)}</title></polyline>"
        )
    return _svg(title, HEIGHT, body)


def thin(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most some hundred points: the mean of each piece, so that no spike is invented or moved far."""
    size = -(-len(points) // _MAX_POINTS) or 1
    pieces = (points[at : at + size] for at in range(0, len(points), size))
    return tuple((sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in pieces)


def timeline(spendings: Sequence[Spending]) -> str:
    """One row a machine: starting, training that was kept, training in vain; what is empty was set-up or idle."""
    if not spendings:
        return ""
    begin = min(min(s.machine.paid_from, s.machine.opened_at) for s in spendings)
    end = max(s.machine.seen_at for s in spendings)
    total_s = max((end - begin).total_seconds(), 1.0)
    frame = _Frame(0.0, total_s, 0.0, 1.0)
    height = _TOP + _ROW * len(spendings) + _BOTTOM
    body = [*frame.time_axis(begin, total_s, height)]
    for row, spending in enumerate(spendings):
        body += _row(frame, row, spending, begin)
    return _svg("machines and attempts over time", height, body)


def _row(frame: _Frame, row: int, spending: Spending, begin: datetime) -> Iterator[str]:
    machine, y = spending.machine, _TOP + _ROW * row
    x, end = (
        frame.x((min(machine.paid_from, machine.opened_at) - begin).total_seconds()),
        frame.x((machine.seen_at - begin).total_seconds()),
    )
    yield f'<text x="4" y="{y + 19}" class="label">{row + 1}</text>'
    yield (
        f'<rect x="{x:.1f}" y="{y + 4}" width="{max(end - x, 1):.1f}" height="{_ROW - 10}" class="rented">'
        f"<title>{escape(machine.where)}: {escape(span(spending.total_s))}</title></rect>"
    )
    for attempt, share in zip(machine.attempts, spending.shares, strict=True):
        yield from _bars(frame, y, attempt, share, begin)


def _bars(frame: _Frame, y: int, attempt: Attempt, share: Share, begin: datetime) -> Iterator[str]:
    at = (attempt.launched_at - begin).total_seconds()
    for kind, seconds in (("starting", share.startup_s), ("kept", share.useful_s), ("vain", share.lost_s)):
        left, right = frame.x(at), frame.x(at + seconds)
        if seconds > 0:
            yield (
                f'<rect x="{left:.1f}" y="{y + 4}" width="{max(right - left, 0.8):.1f}" height="{_ROW - 10}" class="{kind}">'
                f"<title>attempt {attempt.number}: {escape(span(seconds))} {kind}</title></rect>"
            )
        at += seconds


@dataclass(frozen=True, slots=True)
class _Frame:
    """From data to the drawing's units."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, x_label: str) -> Iterator[str]:
        for value in ticks(self.y0, self.y1):
            y = self.y(value)
            yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" class="tick" text-anchor="end">{value:.4g}</text>'
        for value in ticks(self.x0, self.x1):
            yield (
                f'<text x="{self.x(value):.1f}" y="{HEIGHT - 36}" class="tick" text-anchor="middle">{_number(value)}</text>'
            )
        yield f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 10}" class="tick" text-anchor="end">{escape(x_label)}</text>'

    def time_axis(self, begin: datetime, total_s: float, height: int) -> Iterator[str]:
        for part in range(5):
            seconds = total_s * part / 4
            anchor = "start" if part == 0 else "end" if part == 4 else "middle"  # noqa: PLR2004  # the ends
            words = f"{begin:%H:%M} UTC" if part == 0 else f"+{span(seconds)}"
            x = self.x(seconds)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}" class="grid"/>'
            yield f'<text x="{x:.1f}" y="{height - 36}" class="tick" text-anchor="{anchor}">{words}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u2009") if abs(value) >= 10 else f"{value:.3g}"  # noqa: PLR2004


def ticks(low: float, high: float) -> list[float]:
    """Round numbers within, about five."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= raw)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _widened(low: float, high: float) -> tuple[float, float]:
    """Never empty."""
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _svg(title: str, height: int, body: Sequence[str]) -> str:
    inside = "\n".join(body)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">\n{inside}\n</svg>'
