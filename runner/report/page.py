"""`report.html`: one file that needs no other and runs nothing. Everything of a run is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Final

from runner.figures import span
from runner.policy.goodput import goodput
from runner.report.model import Report, Sample
from runner.report.plots import COLOURS, Curve, line_plot, timeline
from runner.report.text import clock, describe_attempt, describe_money, headline, last_step
from runner.words import describe_goodput

_LONG_S: Final = 2 * 3600.0  # from there on an axis is in hours
_STYLE: Final = """
:root { color-scheme: light dark; --fg: #1c2430; --dim: #64707f; --line: #e3e7ec; --card: #f7f8fa; --bg: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e4e8ee; --dim: #93a0b0; --line: #2c3440; --card: #1a2029; --bg: #12161c; } }
body { margin: 2rem auto; max-width: 900px; padding: 0 1rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
code, td.n { font-family: ui-monospace, monospace; font-size: .88em; }
.dim, .tick, .label { color: var(--dim); fill: var(--dim); } .tick, .label { font-size: 11px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .6rem; margin: 1.2rem 0; }
.tile { background: var(--card); border-radius: 8px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.25rem; } .tile span { color: var(--dim); font-size: .85rem; }
svg { width: 100%; height: auto; } .grid { stroke: var(--line); stroke-width: 1; }
.rented { fill: var(--line); } .starting { fill: #94a3b8; } .kept { fill: #16a34a; } .vain { fill: #dc2626; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .3rem .6rem .3rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; } th { color: var(--dim); font-weight: 500;
  overflow-wrap: normal; white-space: nowrap; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .3em; vertical-align: -.05em; }
.legend { color: var(--dim); display: flex; flex-wrap: wrap; gap: 0 1em; }
.bad { color: #dc2626; } .good { color: #16a34a; }
@media (prefers-color-scheme: dark) { .bad { color: #f87171; } .good { color: #4ade80; } }
@media (max-width: 500px) { body { margin: 1rem auto; } .tick, .label { font-size: 22px; } polyline { stroke-width: 3; } }
"""


def page(report: Report) -> str:
    """The whole document."""
    job = escape(str(report.status.get("job", "run")))
    body = "\n".join(_body(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width"><title>{job}</title><style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _body(report: Report) -> Iterator[str]:
    outcome = str(report.status.get("outcome") or "")
    tone = {"succeeded": "good", "": ""}.get(outcome, "bad")
    yield f"<h1>{escape(str(report.status.get('job', 'run')))}</h1>"
    yield f'<div class="{tone}">{escape(headline(report))}</div>'
    yield f'<div class="dim"><code>{escape(report.command)}</code><br>{escape(report.address)}</div>'
    yield from _tiles(report)
    yield from _timeline(report)
    yield from _plots(report)
    yield from _machines(report)
    yield from _checkpoints(report)
    yield f'<p class="dim">as of {escape(str(report.status.get("updated_at", "?"))[:19])} UTC</p>'


def _tiles(report: Report) -> Iterator[str]:
    total_s = sum(spending.total_s for spending in report.spendings)
    attempts = sum(len(spending.machine.attempts) for spending in report.spendings)
    loss = report.status.get("loss")
    money, after = describe_money(report), str(report.status.get("afterwards") or "")
    tiles = {
        "goodput": f"{goodput(report.spendings):.0%}",
        "time": span(total_s),
        "paid": " ".join(money.split()[:2]) if money else "",
        "attempts": str(attempts),
        "machines": str(len(report.spendings)),
        "step": str(last_step(report)),
        "last loss": f"{loss:.4g}" if isinstance(loss, int | float) else "",
    }
    inside = "".join(f"<div class=tile><b>{escape(v)}</b><span>{k}</span></div>" for k, v in tiles.items() if v)
    yield f'<div class="tiles">{inside}</div>'
    yield "".join(f"<div>{escape(line)}</div>" for line in (describe_goodput(report.spendings), money, after) if line)


def _timeline(report: Report) -> Iterator[str]:
    if plot := timeline(report.spendings):
        kinds = (
            ("starting", "starting"),
            ("kept", "training that was kept"),
            ("vain", "in vain"),
            ("rented", "set-up, idle"),
        )
        colours = {"starting": "#94a3b8", "kept": "#16a34a", "vain": "#dc2626", "rented": "var(--line)"}
        legend = _keys((colours[kind], words) for kind, words in kinds)
        yield f"<h2>Machines and attempts</h2>{legend}{plot}"


def _plots(report: Report) -> Iterator[str]:
    begin = report.samples[0].at if report.samples else None
    loss = [(sample, (float(sample.step), sample.loss)) for sample in report.samples if sample.loss is not None]
    long_s = max(((sample.at - begin).total_seconds() for sample in report.samples if begin), default=0.0)
    unit, unit_s = ("hours", 3600) if long_s >= _LONG_S else ("minutes", 60)
    rate = [
        (sample, ((sample.at - begin).total_seconds() / unit_s, sample.steps_per_s))
        for sample in report.samples
        if begin and sample.steps_per_s
    ]
    # a rate is looked at for how much of it is lost, so its axis begins at nothing
    for title, x_label, points, bottom in (("Loss", "step", loss, None), ("Steps a second", unit, rate, 0.0)):
        if plot := line_plot(title, x_label, _curves(points), bottom=bottom):
            yield f"<h2>{title}</h2>{_legend(points)}{plot}"


def _curves(points: Sequence[tuple[Sample, tuple[float, float]]]) -> list[Curve]:
    """One an attempt, in order."""
    grouped = groupby(points, key=lambda found: found[0].attempt)
    return [Curve(f"attempt {number}", tuple(point for _, point in group)) for number, group in grouped]


def _legend(points: Sequence[tuple[Sample, tuple[float, float]]]) -> str:
    numbers = [number for number, _ in groupby(found[0].attempt for found in points)]
    if not 1 < len(numbers) <= len(COLOURS):
        return ""
    return _keys((colour, f"attempt {number}") for number, colour in zip(numbers, COLOURS, strict=False))


def _keys(entries: Iterable[tuple[str, str]]) -> str:
    """A word never stands in another line than its colour."""
    spans = (f'<span><i class="key" style="background:{colour}"></i>{words}</span>' for colour, words in entries)
    return f'<div class="legend">{"".join(spans)}</div>'


def _machines(report: Report) -> Iterator[str]:
    for number, spending in enumerate(report.spendings, 1):
        machine = spending.machine
        price = f", {machine.price_per_hour} {machine.currency}/h: {spending.cost}" if machine.price_per_hour else ""
        words = f"{machine.where}, {clock(machine.opened_at)}, {span(spending.total_s)}{price}"
        yield f'<h2>Machine {number}</h2><div class="dim">{escape(words)}</div>'
        rows = "".join(
            f'<tr><td class="n">{attempt.number}</td><td>{escape(describe_attempt(attempt, share, is_last=number == len(report.spendings)))}'
            + "".join(f'<br><span class="dim">{escape(told)}</span>' for told in (attempt.reason, attempt.left) if told)
            + "</td></tr>"
            for attempt, share in zip(machine.attempts, spending.shares, strict=True)
        )
        yield (
            f"<table><tr><th>attempt</th><th>what became of it</th></tr>{rows}</table>"
            if rows
            else "<div>no attempt</div>"
        )


def _checkpoints(report: Report) -> Iterator[str]:
    rows = "".join(
        f'<tr><td class="n">{escape(s.name)}</td><td>{escape(s.where)}</td><td>{escape(s.written_at[:19])}</td></tr>'
        for s in report.checkpoints
    )
    if rows:
        yield f"<h2>Checkpoints</h2><table><tr><th>name</th><th>in</th><th>written (UTC)</th></tr>{rows}</table>"
