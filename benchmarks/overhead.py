"""
What supervision costs while training runs: processor time and memory of guardian and runner,
beside eight ranks that print a thousand lines a second each.

    python benchmarks/overhead.py [--ranks 8] [--lines 1000] [--seconds 60]

The ranks are started by real torchrun and print as training scripts do; what they use
themselves is shown beside, as is the launcher. Start-up, until ten seconds after the last rank began, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

START_UP_S = 10.0  # after the ranks are there
PATIENCE_S = 120.0
TICKS = os.sysconf("SC_CLK_TCK")
PRINTER = """
import sys, time
lines, ends = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
step = 0
while time.monotonic() < ends:
    began = time.monotonic()
    for _ in range(lines // 10):
        step += 1
        print(f"step {step} loss {1 / step:.6f} lr 0.0001 grad_norm 0.123456 tokens/s 12345.6", flush=True)
    time.sleep(max(0.0, began + 0.1 - time.monotonic()))
"""


@dataclass(frozen=True)
class Use:
    """Processor time since its start, in seconds, and resident memory, in bytes, shared pages by halves."""

    cpu_s: float
    memory: int


def use(pid: int) -> Use:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = sum(map(int, fields[11:15])) / TICKS  # its own and its dead children's: tasks count
    pss = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return Use(cpu_s, int(pss.split()[1]) * 1024)


def descendants(pid: int) -> dict[int, str]:
    """Pids below `pid`, with their command lines."""
    parents = {int(stat.parent.name): _parent(stat) for stat in Path("/proc").glob("[0-9]*/stat")}
    found, grown = {pid}, True
    while grown:
        below = {child for child, parent in parents.items() if parent in found} - found
        grown, found = bool(below), found | below
    return {each: Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode() for each in found}


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has just ended
        return 0


def who(command: str) -> str:
    """Whose process it is."""
    known = {
        "guardian.py": "guardian",
        "runner loop": "runner",
        "shim.py": "shim",
        "torch.distributed.run": "torchrun",
        "printer.py": "ranks",
    }
    return next((name for mark, name in known.items() if mark in command), "other")


def measure(pid: int, seconds: float, num_ranks: int) -> dict[str, dict[str, float]]:
    """Per kind of process: percent of one core over the time, and MB at its end."""
    began = time.monotonic()
    while list(map(who, descendants(pid).values())).count("ranks") < num_ranks:
        assert time.monotonic() < began + PATIENCE_S, "the ranks did not start"
        time.sleep(0.5)
    time.sleep(START_UP_S)
    kinds = {each: who(command) for each, command in descendants(pid).items()}
    before, began = {each: use(each) for each in kinds}, time.monotonic()
    time.sleep(seconds)
    left = [each for each in kinds if Path(f"/proc/{each}").exists()]  # a task that ended counts with its parent
    after, took = {each: use(each) for each in left}, time.monotonic() - began
    return {kind: _sum(kind, kinds, before, after, took) for kind in sorted(set(kinds.values()))}


def _sum(
    kind: str, kinds: dict[int, str], before: dict[int, Use], after: dict[int, Use], took: float
) -> dict[str, float]:
    mine: Iterable[int] = [pid for pid, its in kinds.items() if its == kind and pid in after]
    cpu_s = sum(after[pid].cpu_s - before[pid].cpu_s for pid in mine)
    return {
        "processes": len(list(mine)),
        "percent_of_a_core": round(100 * cpu_s / took, 3),
        "mb": round(sum(after[pid].memory for pid in mine) / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "printer.py").write_text(PRINTER)
        job = {
            "name": "overhead",
            "command": f"printer.py {args.lines} {args.seconds + START_UP_S + 40}",
            "cpu_processes": args.ranks,
        }
        (place / "job.yaml").write_text(json.dumps(job))
        command = (sys.executable, "-I", "-m", "runner", "run", "--config", str(place / "job.yaml"))
        env = {**os.environ, "VRAMFARM_WORKSPACE": str(place), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        try:
            result = measure(process.pid, args.seconds, args.ranks)
        finally:
            process.terminate()
            process.wait(60)
    print("| process | number | % of one core | MB |\n|---|---|---|---|")
    for kind, row in result.items():
        print(f"| {kind} | {row['processes']} | {row['percent_of_a_core']} | {row['mb']} |")


if __name__ == "__main__":
    main()
