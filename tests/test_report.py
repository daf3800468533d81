"""The report: from a folder and from the store, for people, scripts and a browser."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from runner.facts import Attempt, Ending, Exit, Machine
from runner.job import OffloadPolicy
from runner.policy.ledger import dump
from runner.report import as_json, gather_folder, gather_store, page, text
from runner.report.plots import Curve, line_plot, thin, ticks
from runner.storage.offsite import open_store
from vramfarm.protocol import Ref

START = datetime(2026, 1, 1, 22, tzinfo=UTC)


def at(minutes):
    return START + timedelta(minutes=minutes)


def attempt(number, times, steps, ending, reason=""):
    launched, first_step, ended = times
    return Attempt(
        number=number,
        id=f"id-{number}",
        resume=Ref(1, steps[0], number, "0" * 8) if steps[0] else None,
        lineage=1,
        boot_id="b",
        launched_at=at(launched),
        first_step_at=at(first_step),
        ended_at=at(ended),
        ending=ending,
        exit=Exit(code=1 if ending is Ending.FAILED else 0),
        step=steps[1],
        reason=reason,
    )


REASON = "rank 3: torch.OutOfMemoryError: <b>CUDA out of memory</b>; see logs/attempt-0001"
FIRST = Machine(
    id="a",
    where="server srv_a, gpu-7:/workspace/night",
    price_per_hour="12",
    opened_at=at(2),
    paid_from=START,
    seen_at=at(180),
    attempts=(
        attempt(1, (10, 14, 74), (0, 600), Ending.FAILED, REASON),
        attempt(2, (75, 78, 170), (500, 1400), Ending.INTERRUPTED),
    ),
)
SECOND = Machine(
    id="b",
    where="server srv_b, gpu-9:/workspace/night",
    price_per_hour="14",
    opened_at=at(201),
    paid_from=at(200),
    seen_at=at(300),
    outcome="succeeded",
    attempts=(attempt(3, (208, 212, 295), (1300, 2000), Ending.SUCCEEDED),),
)
STATUS = {
    "job": "night",
    "outcome": "succeeded",
    "exit_code": 0,
    "reason": "training is done",
    "step": 2000,
    "max_steps": 2000,
    "loss": 1.8342,
    "updated_at": at(300).isoformat(),
    "checkpoints": [
        {"step": 2000, "id": "0123abcd", "local": True, "offsite": True, "written_at": at(294).isoformat()}
    ],
}


def samples(number, begin, steps, minutes):
    """As the runner writes them: a line every ten seconds."""
    (first, last), total = steps, minutes * 6
    for n in range(total):
        step = first + (last - first) * n // total
        line = {
            "at": (at(begin) + timedelta(seconds=10 * n)).isoformat(),
            "attempt": number,
            "step": step,
            "loss": 1.8 + 6 * 0.998**step + (n * 7919 % 13) / 60,
            "steps_per_s": 0.166 + (n * 104729 % 11) / 400,
        }
        yield json.dumps(line)


def write_run(root):
    """A night on two machines, as a store has it."""
    folder = root / "night"
    metrics = {
        1: [*samples(1, 14, (0, 600), 60), *samples(2, 78, (500, 1400), 92), "torn {"],
        2: [*samples(3, 212, (1300, 2000), 83)],
    }
    for number, lines in metrics.items():
        place = folder / "machines" / f"{number:04d}"
        place.mkdir(parents=True)
        (place / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "ledger.json").write_text(json.dumps(dump((FIRST, SECOND))))
    (folder / "status.json").write_text(json.dumps({**STATUS, "machines": dump((FIRST, SECOND))["machines"]}))
    (folder / "job.json").write_text(json.dumps({"command": "train.py --lr 2e-5"}))
    return folder


@pytest.fixture
def stored(tmp_path):
    write_run(tmp_path / "store")
    return open_store(OffloadPolicy(to=f"file://{tmp_path}/store"), {})


def test_a_night_on_two_machines_is_told_in_a_screen(stored):
    """
    How it ended, where time and money went, what each attempt came to and its first error.
    """
    told = "\n".join(text(gather_store(stored, "night")))

    assert told.startswith("night  succeeded (exit code 0) at step 2000/2000: training is done\n  train.py --lr 2e-5\n")
    assert "became training that was kept" in told
    assert "59.33 EUR by the providers' prices" in told
    assert (
        f"  attempt 1  failed at step 600 (exit 1), from step 0: 50m 00s kept, 10m 00s in vain, 4m 00s starting\n    {REASON}"
        in told
    )
    assert (
        "machine 2  server srv_b, gpu-9:/workspace/night  2026-01-02 01:21 UTC, 1h 40m at 14 EUR/h: 23.33, succeeded"
        in told
    )


def test_a_checkpoint_that_never_left_its_machine_is_in_the_report_of_the_store(stored, tmp_path):
    """
    A newer one went in its place: whoever knows of it from the log looks for it here. No training counts for it.
    """
    alone = {"step": 1900, "id": "89abcdef", "local": True, "offsite": False, "written_at": at(290).isoformat()}
    plain = gather_store(stored, "night")
    (tmp_path / "store" / "night" / "status.json").write_text(json.dumps({**STATUS, "checkpoints": [alone]}))

    told = gather_store(stored, "night")

    (line,) = [line for line in text(told) if "step-00001900-89abcdef" in line]
    assert "in the disk of its machine, as that last said" in line
    assert plain.spendings == told.spendings


def test_scripts_get_it_as_data(stored):
    """
    Seconds and decimal texts, each machine with its attempts.
    """
    told = as_json(gather_store(stored, "night"))

    assert ("succeeded", 0, [1, 2, 3]) == (
        told["outcome"],
        told["exit_code"],
        [a["number"] for machine in told["machines"] for a in machine["attempts"]],
    )
    assert Decimal("59.33") == sum(Decimal(machine["cost"]) for machine in told["machines"])
    assert json.loads(json.dumps(told)) == told


def test_the_page_needs_nothing_and_runs_nothing(stored):
    """
    No script, no address that is fetched; whatever the run said is text, not markup. Every plot is well-formed.
    """
    html = page(gather_store(stored, "night"))
    plots = re.findall(r"<svg.*?</svg>", html, re.DOTALL)

    assert [] == re.findall(r"<script|https?://|src=|@import|url\(", html)
    assert "&lt;b&gt;CUDA out of memory&lt;/b&gt;" in html
    assert "<b>CUDA" not in html
    assert 3 == len([ET.fromstring(plot) for plot in plots])
    assert (
        3
        == html.count("<title>attempt 1</title>")
        + html.count("<title>attempt 2</title>")
        + html.count("<title>attempt 3</title>")
        - 3
    )


def test_a_folder_is_reported_like_the_store(tmp_path):
    """
    Before anything left the machine; where a checkpoint is, is said.
    """
    folder = write_run(tmp_path)
    (folder / "metrics.jsonl").write_text("\n".join(samples(3, 212, (1300, 2000), 83)))

    report = gather_folder(folder)

    assert (["disk and store"], 2, {2}) == (
        [saved.where for saved in report.checkpoints],
        len(report.spendings),
        {sample.machine for sample in report.samples},
    )


HOSTILE = json.dumps(
    {
        "outcome": ["x"],
        "at": "2026-01-01T00:00:00",
        "attempt": 1,
        "step": 10**400,
        "command": ["x"],
        "machines": [{**dump((FIRST,))["machines"][0], "attempts": [{"number": 1, "step": 10**400}]}],
    }
).encode()


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"machines": 3}', b'{"checkpoints": [1, {"step": "x"}]}', HOSTILE])
def test_what_cannot_be_read_is_left_out(tmp_path, raw):
    """
    A report of a bucket that somebody else wrote is poor, and no traceback.
    """
    folder = tmp_path / "night"
    folder.mkdir()
    for name in ("status.json", "ledger.json", "job.json", "metrics.jsonl"):
        (folder / name).write_bytes(raw)
    store = open_store(OffloadPolicy(to=f"file://{tmp_path}"), {})

    for report in (gather_folder(folder), gather_store(store, "night")):
        assert list(text(report))
        assert "</html>" in page(report)


def test_a_plot_of_little_is_a_plot():
    """
    No points, one point, one value, and what is no number.
    """
    assert "" == line_plot("t", "x", [Curve("a", ())])
    assert "circle" in line_plot("t", "x", [Curve("a", ((1.0, 2.0),))])
    assert "polyline" in line_plot("t", "x", [Curve("a", ((1.0, 2.0), (2.0, 2.0)))])
    assert "" == line_plot("t", "x", [Curve("a", ((1.0, float("nan")),))])


def test_thinned_points_keep_the_range():
    """
    A day of samples fits the page.
    """
    points = [(float(n), float(n % 7)) for n in range(8640)]

    assert len(thin(points)) <= 400
    assert points[:5] == list(thin(points[:5]))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 2000.0), (1.8, 1.81), (1e-9, 2e-9)])
def test_ticks_are_few_and_inside(low, high):
    """
    Two to seven of them.
    """
    found = ticks(low, high)

    assert 2 <= len(found) <= 7
    assert low <= min(found) <= max(found) <= high


def test_an_attempt_that_vanished_is_not_called_running(tmp_path):
    """
    Its machine never told its end; only of the last machine that may mean that it runs.
    """
    folder = write_run(tmp_path)
    silent = replace(FIRST, attempts=(replace(FIRST.attempts[0], ending=None, ended_at=None, exit=None),))
    running = replace(SECOND, attempts=(replace(SECOND.attempts[0], ending=None, ended_at=None, exit=None),))
    (folder / "status.json").write_text(json.dumps({"machines": dump((silent, running))["machines"], "step": 84}))

    told = [line for line in text(gather_folder(folder)) if line.startswith("  attempt")]

    assert "  attempt 1  was lost with its machine at step 600, from step 0" == told[0].partition(":")[0]
    assert "  attempt 3  runs at step 2000, from step 1300" == told[1].partition(":")[0]
    assert "at step 2000" in "\n".join(text(gather_folder(folder)))


def test_a_label_of_an_axis_lies_on_nothing_and_is_not_cut():
    """
    It has a line of its own below the numbers, with room for its tails.
    """
    plot = line_plot("Loss", "step", [Curve("a", ((0.0, 2.0), (300.0, 1.0)))])

    below = {float(y): text for y, text in re.findall(r'y="([0-9.]+)" class="tick" text-anchor="\w+">([^<]*)<', plot)}
    label, number = (max(y for y, text in below.items() if (text == "step") is is_label) for is_label in (True, False))
    assert label - number >= 11
    assert label + 4 <= float(re.search(r'viewBox="0 0 \d+ (\d+)"', plot)[1])


def test_a_rate_that_hardly_moves_does_not_look_as_if_it_collapsed(tmp_path):
    """
    Its axis begins at 0; and a run of some minutes has an axis in minutes.
    """
    at_ = [datetime(2026, 1, 1, 3, minute, tzinfo=UTC).isoformat() for minute in range(10)]
    lines = [{"at": a, "attempt": 1, "step": n, "loss": 1.0, "steps_per_s": 9.4 + n / 300} for n, a in enumerate(at_)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    plot = page(gather_folder(tmp_path)).partition("<h2>Steps a second</h2>")[2].partition("</svg>")[0]

    assert ">0</text>" in plot
    assert (">minutes</text>" in plot, ">hours</text>" in plot) == (True, False)


def test_heads_of_tables_are_not_broken_on_a_telephone(tmp_path):
    """
    Cells wrap anywhere, for long names; the word `attempt` is whole.
    """
    style = page(gather_folder(tmp_path)).partition("<style>")[2].partition("</style>")[0]

    rules = re.findall(r"([^{}]*)\{([^{}]*)\}", style)
    assert any("white-space: nowrap" in body for names, body in rules if names.strip() == "th")
