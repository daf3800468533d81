"""
Step time over time with each engine's save marked, as an SVG that is readable on light and on dark. No torch.

    python benchmarks/picture.py DIR/checkpoint.json >steps.svg
"""

import json
import sys
from html import escape
from pathlib import Path

WIDTH, PLOT, LEFT, RIGHT, TOP, ROW, COLUMNS = 960, 250, 52, 12, 64, 18, 2
AROUND = 6  # quiet steps to see before and behind a save
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-size: 15px; font-weight: 600 }
.small { font-size: 11px; fill: #57606a } .axis { stroke: #d0d7de } .steps { fill: none; stroke: #57606a }
.save { fill: #cf222e; opacity: .15 } .stall { fill: #cf222e; font-weight: 600 }
.ours .save { fill: #1a7f37; opacity: .3 } .ours .stall { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .axis { stroke: #3d444d } .steps { stroke: #b1bac4 }
  .save { fill: #ff7b72; opacity: .25 } .stall { fill: #ff7b72 }
  .ours .save { fill: #3fb950; opacity: .4 } .ours .stall { fill: #3fb950 }
}
"""


def draw(seconds, spans, caption):
    """`seconds` of all steps; `spans` are the saves, as checkpoint.py notes them. Steps far from a save are left out."""
    spans = [span for span in spans if not span["failed"]]
    kept = sorted({i for span in spans for i in range(max(span["first"] - AROUND, 0), span["end"] + AROUND)})
    kept = [i for i in kept if i < len(seconds)]
    begins, now = {}, 0.0
    for i in kept:
        begins[i] = now
        now += seconds[i]
    wide = (WIDTH - LEFT - RIGHT) / now
    high = PLOT / (1.08 * max(seconds[i] for i in kept))
    names = list(dict.fromkeys(span["name"] for span in spans))
    rows = -(-len(names) // COLUMNS)
    height = TOP + PLOT + 48 + ROW * rows
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="22">How long each training step takes, with saves by each engine</text>',
        f'<text class="small" x="{LEFT}" y="40">{escape(caption)}; shaded: until all is fsynced</text>',
        *_axis(high),
        *(_save(span, names, begins, seconds, wide) for span in spans),
        f'<path class="steps" d="{_path(kept, begins, seconds, wide, high)}"/>',
        f'<text class="small" x="{WIDTH - RIGHT}" y="{TOP + PLOT + 16}" text-anchor="end">{now:.0f} s of training</text>',
        *(_legend(at, name, spans, rows) for at, name in enumerate(names)),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _axis(high):
    top = PLOT / high
    step = next(tick for tick in TICKS if top / tick <= 5 or tick == TICKS[-1])
    for count in range(int(top / step) + 1):
        y = TOP + PLOT - count * step * high
        yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="small" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{count * step:g} s</text>'


def _save(span, names, begins, seconds, wide):
    last = span["end"] - 1
    x = LEFT + begins[span["first"]] * wide
    width = max((begins[last] + seconds[last] - begins[span["first"]]) * wide, 1)
    return (
        f'<g class="{_kind(span["name"])}"><rect class="save" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{PLOT}"/>'
        f'<text class="stall" x="{x + width / 2:.1f}" y="{TOP - 5}" text-anchor="middle">{names.index(span["name"]) + 1}</text></g>'
    )


def _path(kept, begins, seconds, wide, high):
    """A stair: each step as wide as it is high."""
    points = []
    for i in kept:
        y = TOP + PLOT - seconds[i] * high
        points += [f"{LEFT + begins[i] * wide:.1f},{y:.1f}", f"{LEFT + (begins[i] + seconds[i]) * wide:.1f},{y:.1f}"]
    return "M" + " L".join(points)


def _legend(at, name, spans, rows):
    mine = [span for span in spans if span["name"] == name]
    x = LEFT + at // rows * (WIDTH - LEFT) / COLUMNS
    y = TOP + PLOT + 42 + at % rows * ROW
    stalls = ", ".join(f"{span['stall_s']:+.3f}" if span["stall_s"] < 1 else f"{span['stall_s']:+.1f}" for span in mine)
    synced = ", ".join(f"{span['synced_s']:.1f}" for span in mine)
    return (
        f'<g class="{_kind(name)}"><text x="{x:.0f}" y="{y}"><tspan class="stall">{at + 1}</tspan> {escape(name)}: '
        f'<tspan class="stall">{stalls} s</tspan>, fsynced after {synced} s</text></g>'
    )


def _kind(name):
    return "ours" if name == "vramfarm" else "peer"


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    sys.stdout.write(draw(found["seconds"], found["spans"], found["caption"]))
