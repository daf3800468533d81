"""
Ranks that fail in a known way: who speaks first, whom torchrun names, whom our triage names.

    python benchmarks/gpu/first_error.py FOLDER [--cases NAME ...] [--at-once 20]

A rank on each card with NCCL, else two processes with gloo. Leaves the logs of each case in FOLDER/errors/NAME: `ranks` as the
runner keeps them (one file a rank and stream, the launcher's own), and `merged.log`, as a terminal shows them.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import page

sys.path.insert(0, str(page.ROOT))
from runner.facts import Exit
from runner.supervise import process
from runner.supervise.attempt import PREVENTION
from runner.supervise.triage import first_error
from vramfarm.protocol import Env

FAILING = Path(__file__).with_name("failing.py")
ERRORS = re.compile(
    r"Traceback|^\S*(?:Error|Exception)\b|Fatal Python error|Watchdog caught|terminate called|NCCL WARN|Assertion|CUDA error"
)
STAMP = re.compile(r"^\[rank\d+\]:(?:\[[EW]\d+ [\d:.]+ )?\s?")
PREFIX = re.compile(r"\[default(\d+)\]:")
ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s+: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)


@dataclass(frozen=True)
class Case:
    """`rank` and `labels` are what is true; `labels` on cards may differ, as NCCL says other things than gloo."""

    kind: str
    what: str
    labels: tuple[str, ...]
    rank: int | None = 1
    timeout_s: int = 600
    options: tuple[str, ...] = ()
    env: dict = field(default_factory=lambda: dict(PREVENTION))
    on_cards: bool | None = None  # None: there and on the CPU
    ends_it: signal.Signals | None = None  # what torchrun itself gets


WAITS = (  # of the rank that did not come
    "rank_stuck",
    "nccl_timeout_missing_rank",
)
DIFFERS = ("collective_mismatch", "uneven_data")
CASES = {
    "value_error": Case("value", "rank 1 raises ValueError", ("user_exception",)),
    "sigkill": Case("kill", "rank 1 gets SIGKILL", ("sigkill_unknown",)),
    "segfault": Case("segv", "rank 1 reads address 0", ("segfault",)),
    "segfault_bare": Case("segv", "the same, no variable set by the runner", ("segfault",), env={}),
    "abort": Case("abort", "rank 1 aborts", ("segfault",)),
    "exit_1": Case("exit1", "rank 1: sys.exit(1)", ("user_exception",)),
    "exit_0": Case("exit0", "rank 1: sys.exit(0), early", ("uneven_data", *WAITS), timeout_s=10),
    "hang": Case("asleep", "rank 1 sleeps, time-out 10 s", WAITS, timeout_s=10),
    "import_error": Case("import", "every rank: ImportError", ("missing_module",), rank=None),
    "before_init": Case("before", "rank 0 raises before it joins", ("user_exception",), rank=0, timeout_s=30),
    "restarts": Case("key", "--max-restarts 1, rank 1: KeyError", ("user_exception",), options=("--max-restarts=1",)),
    "recorded": Case("recorded", "rank 1 raises in a main that has @record", ("user_exception",)),
    "sigkill_0": Case("kill0", "rank 0 gets SIGKILL", ("sigkill_unknown",), rank=0),
    "sigterm": Case("none", "torchrun gets SIGTERM", ("sigterm_external",), rank=None, ends_it=signal.SIGTERM),
    "sighup": Case("none", "torchrun gets SIGHUP", ("sighup",), rank=None, ends_it=signal.SIGHUP),
    "sigint": Case("none", "torchrun gets SIGINT", ("sigterm_external",), rank=None, ends_it=signal.SIGINT),
    "sizes": Case(
        "sizes", "all_reduce of different sizes, time-out 10 s", DIFFERS, rank=None, timeout_s=10, on_cards=False
    ),
    "mismatch": Case("mismatch", "all_reduce beside all_gather, time-out 10 s", DIFFERS, rank=None, timeout_s=10),
    "sizes_detail": Case(
        "sizes",
        "the same with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        ("collective_mismatch",),
        rank=None,
        timeout_s=10,
        env={**PREVENTION, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ),
    "out_of_memory": Case("memory", "rank 1 asks for more memory than the card has", ("cuda_oom",), on_cards=True),
    "illegal_access": Case("access", "rank 1 writes where nothing is", ("cuda_illegal_access",), on_cards=True),
    "device_assert": Case("assert", "rank 1: an index outside of its table", ("device_side_assert",), on_cards=True),
}


def launch(case: Case, folder: Path, limit_s: float) -> tuple[int | None, float]:
    """Run it to its end; torchrun's exit code, None where it had to be killed, and the seconds it took."""
    ranks = folder / "ranks"
    ranks.mkdir(parents=True, exist_ok=True)
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={page.num_ranks()}"),
        *("--max-restarts=0", f"--log-dir={ranks}", "--tee=3", *case.options),
        *(str(FAILING), case.kind, "2", "64", "1", str(case.timeout_s)),
    ]  # fmt: skip
    began = time.monotonic()
    with (folder / "merged.log").open("wb") as log:
        env = page.environment(
            **case.env, OMP_NUM_THREADS="1", FAILS_MARK=str(folder / "failed"), **{Env.RUN: str(folder)}
        )
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=folder)
        try:
            if case.ends_it:
                end_when_it_trains(child, folder / "merged.log", case.ends_it)
            return child.wait(timeout=limit_s), time.monotonic() - began
        except subprocess.TimeoutExpired:
            return None, time.monotonic() - began
        finally:
            process.end_all(lambda: process.find(Env.RUN, str(folder)), timeout_s=10)


def end_when_it_trains(child: subprocess.Popen, log: Path, number: signal.Signals) -> None:
    deadline = time.monotonic() + 60
    while b"step 20 " not in log.read_bytes() and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.2)
    child.send_signal(number)


def part(folder: Path) -> None:
    """The launcher's own lines, as the runner has them: without what ranks said."""
    lines = (folder / "merged.log").read_text(errors="replace").splitlines()
    own = [line for line in lines if not PREFIX.match(line)]
    (folder / "ranks" / "launcher.log").write_text("\n".join(own) + "\n")


def first_printed(merged: str) -> str:
    for line in merged.splitlines():
        text = PREFIX.sub("", line)
        if ERRORS.search(re.sub(r"^\[rank\d+\]:\s?", "", text)):
            who = PREFIX.match(line)
            return f"rank {who[1]}: {STAMP.sub('', text)[:90]}" if who else "nothing by a rank"
    return "nothing"


def judge(name: str, case: Case, folder: Path, ended: tuple[int | None, float]) -> tuple[list[str], bool]:
    part(folder)
    merged = (folder / "merged.log").read_text(errors="replace")
    named = ROOT_CAUSE.search(merged)
    said, right = [], True
    for path in (folder / "ranks", folder / "merged.log"):
        found = first_error(path, Exit(code=ended[0]))
        good = found.label in case.labels and (case.rank is None or found.rank == case.rank)
        right &= good
        said.append(f"{found.label}, rank {'-' if found.rank is None else found.rank}{'' if good else ' (WRONG)'}")
        print(f"{name}: {path.name}: {found.label} rank {found.rank}: {found.summary[:200]}", flush=True)
    table_says = f"rank {named[1]}, {named[2]}" if named else "no table"
    row = [
        case.what,
        first_printed(merged),
        table_says,
        said[0],
        said[1],
        f"{ended[1]:.0f} s" + (" (killed)" if ended[0] is None else ""),
    ]
    return row, right


def end_with(names) -> None:
    """Whoever ends this script ends what it started, in whatever session that is: what has these variables."""

    known = tuple(names)

    def end(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        for name, value in known:
            process.end_all(lambda name=name, value=value: process.find(name, str(value)), timeout_s=2)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", choices=list(CASES))
    parser.add_argument(
        "--at-once", type=int, help="cases that run beside each other; default: as many as there are cores for"
    )
    parser.add_argument("--limit-s", type=float, default=100, help="of one case")
    args = parser.parse_args()
    on_cards = bool(page.cards())
    chosen = {
        name: case
        for name, case in CASES.items()
        if name in (args.cases or CASES) and case.on_cards in {None, on_cards}
    }  # fmt: skip
    folder = args.folder.resolve() / "errors"
    end_with((Env.RUN, folder / name) for name in CASES)
    at_once = args.at_once or max(1, (os.cpu_count() or 2) // page.num_ranks() if on_cards else 2)

    def one(item):
        name, case = item
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        try:
            ended = launch(case, folder / name, args.limit_s)
            return judge(name, case, folder / name, ended)
        except Exception as error:  # noqa: BLE001  # the other cases count, too
            print(f"{name}: {error!r}", flush=True)
            return [case.what, repr(error), "-", "-", "-", "-"], False

    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(one, chosen.items()))
    wrong = [name for name, (_, right) in zip(chosen, results, strict=True) if not right]
    head = [
        "what happens",
        "printed first",
        "torchrun's root cause",
        "triage of the run",
        "triage of one merged log",
        "took",
    ]
    page.write(
        args.folder,
        "first_error",
        "## Who failed first",
        page.machine(),
        page.table(head, [row for row, _ in results]),
        f"{len(results) - len(wrong)} of {len(results)} right" + (f"; not: {', '.join(wrong)}" if wrong else ""),
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
