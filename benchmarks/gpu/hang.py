"""
Hangs of real ranks, by the real runner: how soon they are found, who is named, and what the evidence has.

    python benchmarks/gpu/hang.py FOLDER [--cases NAME ...]

On cards with NCCL, else two processes with gloo. Each case is a job in FOLDER/hang/NAME whose limit of a step is set to
ten seconds; it trains well for some seconds, hangs, and is to be found, named, killed and started again.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import page
from first_error import end_with

sys.path.insert(0, str(page.ROOT))
from runner.storage import journal
from runner.supervise import process
from runner.supervise.cards import QUERY as CARDS_QUERY
from vramfarm.protocol import Env

FAILING = Path(__file__).with_name("failing.py")
LIMIT_S = 10
JOB = """
name: job
command: {failing} {kind} {seconds} {work}
{place}
python: {python}
preflight: {{comm_test: false}}
restart: {{initial_delay: 100ms, grace_period: 10s}}
hang: {{startup_timeout: 120s, step_timeout: {limit}s}}
provider: {{kind: none}}
limits: {{max_duration: 5m}}
"""
SAID = {
    "found": "nothing explains it",
    "evidence": "evidence/attempt-0001 has",
    "killed": "kill the attempt",
    "again": "launch attempt 2",
}
DUMP = re.compile(r"rank \d+: collective_seq_id=")
QUERY = "index,utilization.gpu,utilization.memory,power.draw,clocks.sm"


@dataclass(frozen=True)
class Case:
    """What is true: who hangs, and the labels that say so."""

    what: str
    rank: int | None
    labels: tuple[str, ...] = ("rank_stuck",)


DIFFER = ("collective_mismatch",)
CASES = {
    "asleep": Case("rank 1 sleeps, in Python", 1),
    "mismatch": Case("rank 0: all_reduce, rank 1: all_gather", None, DIFFER),
    "stopped": Case("rank 1 is stopped (SIGSTOP)", 1),
    "loader": Case("rank 1 waits for a data worker", 1),
    "sizes": Case("rank 0 and 1: all_reduce, of different sizes", None, DIFFER),
}


@dataclass
class Watched:
    """What was seen while a case ran; times are seconds since 1970."""

    times: dict = field(default_factory=dict)
    lines: list = field(default_factory=list)
    samples: list = field(default_factory=list)  # (time, card, use, memory use, watts, MHz)
    code: int | None = None


def watch_cards(seen: Watched, over: threading.Event) -> None:
    while not over.wait(1):
        now = time.time()
        for line in page.ask("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits").splitlines():
            fields = [field.strip() for field in line.split(",")]
            if all(field.replace(".", "", 1).isdecimal() for field in fields):  # and not [N/A]
                seen.samples.append((now, *map(float, fields)))


def run(kind: str, folder: Path, found: threading.Event, *, on_cards: bool, timeout_s: float) -> Watched:
    """The whole run; `found` is set when the hang is: from then on the cards are free for the next one."""
    shutil.rmtree(folder, ignore_errors=True)  # a run that ended would go on from there
    folder.mkdir(parents=True)
    job = JOB.format(
        failing=FAILING,
        kind=kind,
        seconds=6 if on_cards else 4,
        work="8192 40" if on_cards else "64 1",
        place=f"cards: {page.num_ranks()}" if on_cards else "cpu_processes: 2",
        python=sys.executable,
        limit=LIMIT_S,
    )
    (folder / "job.yaml").write_text(job)
    env = page.environment(VRAMFARM_WORKSPACE=str(folder), OMP_NUM_THREADS="1", FAILS_MARK=str(folder / "failed"))
    seen, over = Watched(), threading.Event()
    eye = threading.Thread(target=watch_cards, args=(seen, over), daemon=True)
    eye.start()
    child = subprocess.Popen(
        (sys.executable, "-m", "runner", "run", "--config", "job.yaml"),
        cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    stop = threading.Timer(timeout_s, child.send_signal, (signal.SIGKILL,))
    stop.start()
    try:
        for line in child.stderr:
            seen.lines.append(line.rstrip())
            for name, words in SAID.items():
                if words in line:
                    seen.times.setdefault(name, time.time())
                    found.set()
        seen.code = child.wait()
    finally:
        found.set()
        stop.cancel()
        over.set()
        eye.join(10)
        process.end_all(lambda: process.find(Env.RUN, str(folder / "job")), timeout_s=20)
    (folder / "runner.log").write_text("\n".join(seen.lines) + "\n")
    (folder / "cards.csv").write_text(
        "".join(",".join(map(str, sample)) + "\n" for sample in [("time", *QUERY.split(",")), *seen.samples])
    )
    return seen


def power(seen: Watched, begin: float, end: float) -> str:
    """Medians of each card between two times: use, use of its memory, and power."""
    told = []
    for card in sorted({sample[1] for sample in seen.samples}):
        mine = [sample for sample in seen.samples if sample[1] == card and begin <= sample[0] <= end]
        if mine:
            use, memory, watts = (statistics.median(sample[at] for sample in mine) for at in (2, 3, 4))
            told.append(f"{use:.0f} %, memory {memory:.0f} %, {watts:.0f} W")
    return "; ".join(told) or "-"


def judge(case: Case, folder: Path, seen: Watched) -> tuple[list[str], list[str]]:
    """A row of the table, and what is not as it should be."""
    mark = folder / "failed"
    hung_at = mark.stat().st_mtime if mark.exists() else None
    attempts = journal.read(folder / "job" / "journal.jsonl").attempts
    found = attempts[0].diagnosis if attempts else None
    evidence = folder / "job" / "evidence" / "attempt-0001"
    flight = evidence / "flight-recorder.txt"
    recorded = flight.read_text().splitlines() if flight.exists() else []
    hang = json.loads((evidence / "hang.json").read_text()) if (evidence / "hang.json").exists() else {}
    by_spy = sorted(path.name for path in evidence.glob("stack-*-*.txt"))
    by_signal = sorted(path.name for path in evidence.glob("stack-*.txt") if path.name.count("-") == 1)
    wrong = []
    if hung_at is None:
        wrong.append("nothing was marked")
    if "found" not in seen.times:
        wrong.append("not found")
    elif hung_at and seen.times["found"] - hung_at > LIMIT_S + 60:
        wrong.append("found late")
    if found is None or found.label not in case.labels or found.rank != case.rank:
        wrong.append(f"named {found.label if found else None}, rank {found.rank if found else None}")
    if page.cards() and (not recorded or DUMP.match(recorded[0])):
        wrong.append("the flight recorder names nobody")
    if not by_spy and not by_signal:
        wrong.append("no stacks")
    if seen.code != 0:
        wrong.append(f"the run ended with {seen.code}")
    since = {name: f"{at - hung_at:.1f}" if hung_at else "?" for name, at in seen.times.items()}
    healthy = power(seen, hung_at - 5, hung_at) if hung_at else "-"
    waiting = power(seen, hung_at + 3, seen.times.get("found", time.time())) if hung_at else "-"
    row = [
        case.what,
        *(since.get(name, "-") for name in SAID),
        f"{found.label}, rank {'-' if found.rank is None else found.rank}" if found else "-",
        hang.get("reason", "-"),
        healthy,
        waiting,
        f"{len(by_spy)} by py-spy, {len(by_signal)} by the signal",
        _by_recorder(recorded),
        "; ".join(wrong) or "yes",
    ]
    for line in (*recorded, *(f"attempt {a.number}: {a.reason}" for a in attempts)):
        print(f"    {line[:600]}", flush=True)
    return row, wrong


def _by_recorder(lines: list[str]) -> str:
    """Whom the dumps name, and how many ranks wrote one."""
    dumps = [line for line in lines if DUMP.match(line)]
    return "; ".join([*(line for line in lines if line not in dumps), f"{len(dumps)} dumps"]) if dumps else "-"


RESULTS: dict = {}


def one(name: str, args: argparse.Namespace, found: threading.Event, on_cards: bool) -> None:
    """One case to its end, beside the start of the next one."""
    folder = args.folder.resolve() / "hang" / name
    print(f"{name} ({CASES[name].what}) at {time.strftime('%H:%M:%S')}", flush=True)
    try:
        seen = run(name, folder, found, on_cards=on_cards, timeout_s=args.limit_s)
        RESULTS[name] = judge(CASES[name], folder, seen)
    except Exception as error:  # noqa: BLE001  # the other cases count, too
        RESULTS[name] = [CASES[name].what, *"-" * 10, repr(error)[:200]], ["failed"]
    print(name, *RESULTS[name][0], sep=" | ", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", choices=list(CASES))
    parser.add_argument("--limit-s", type=float, default=100, help="of one case")
    parser.add_argument("--budget-s", type=float, default=240, help="of all: what does not begin in time is left out")
    args = parser.parse_args()
    on_cards = len(page.cards()) > 1
    places = [args.folder.resolve() / "hang" / name for name in CASES]
    end_with([*(("VRAMFARM_WORKSPACE", place) for place in places), *((Env.RUN, place / "job") for place in places)])
    readings = args.folder / "hang"
    readings.mkdir(parents=True, exist_ok=True)
    asked = page.ask("nvidia-smi", f"--query-gpu={CARDS_QUERY}", "--format=csv,noheader,nounits")
    (readings / "query.txt").write_text(f"{CARDS_QUERY}\n{asked}")
    print(f"what the runner asks the cards: {asked or 'no answer'}", flush=True)
    began, cases = time.monotonic(), []
    usual = [name for name in CASES if not on_cards or name != "sizes"]  # NCCL lets that pass, without a word
    for name in args.cases or usual:
        if time.monotonic() - began > args.budget_s - 45:
            print(f"{name}: left out, for want of time", flush=True)
            continue
        found = threading.Event()
        case = threading.Thread(target=one, args=(name, args, found, on_cards), daemon=True)
        case.start()
        found.wait(args.limit_s + 30)
        cases.append((name, case))
    rows, failed = [], []
    for name, case in cases:
        case.join(args.limit_s + 60)
        row, wrong = RESULTS.get(name, ([CASES[name].what, *"-" * 10, "it did not end"], ["it did not end"]))
        rows.append(row)
        failed += [f"{name}: {'; '.join(wrong)}"] if wrong else []
    head = ["what hangs", "found, s", "evidence, s", "killed, s", "started again, s", "triage", "why it is a hang",
            "cards in training", "cards in the hang", "stacks", "flight recorder", "right"]  # fmt: skip
    page.write(
        args.folder,
        "hang",
        f"## Hangs, with a limit of {LIMIT_S} s for a step",
        page.machine() + ". Seconds since the hang began.",
        page.table(head, rows),
        f"{len(rows) - len(failed)} of {len(rows)} right" + "".join(f"\n- {line}" for line in failed),
    )
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.pop("RANK", None)
    sys.exit(main())
