"""Preflight on real cards: the verdict, then the communication test with faults that are injected, as a table."""

import os
import sys
import time
from pathlib import Path

from runner.facts import TrialEnding
from runner.job import Job
from runner.policy.comm import next_order
from runner.preflight import Mission, comm_setting, comm_wish, look_at_machine
from runner.probes.comm import try_all
from runner.probes.machine import read_cards, visible
from runner.probes.smi import read_report

FAULTS = {
    "none": {},
    "NCCL_P2P_DISABLE=1": {},
    "rank 1 stops (SIGSTOP)": {"rank": 1, "what": "stop", "where": "reduce"},
    "rank 1 sleeps before it joins": {"rank": 1, "what": "sleep", "where": "join"},
    "rank 1 raises": {"rank": 1, "what": "raise", "where": "reduce"},
    "rank 1 sums wrongly": {"rank": 1, "what": "wrong", "where": "reduce"},
}
EXPECTED = (
    TrialEnding.GOOD,
    TrialEnding.GOOD,
    TrialEnding.SILENT,
    TrialEnding.SILENT,
    TrialEnding.ERROR,
    TrialEnding.WRONG,
)


def mission(folder: Path) -> Mission:
    cards = len(visible(read_cards(), os.environ.get("CUDA_VISIBLE_DEVICES")))
    job = Job.model_validate({"command": "x", "checkpoint": {"dir": str(folder / "run" / "checkpoints")}})
    return Mission(
        job=job,
        python=sys.executable,
        num_procs=cards or 2,
        num_cards=cards,
        run_dir=folder / "run",
        workdir=folder,
        env=dict(os.environ),
    )


def main(folder: Path) -> int:
    asked = mission(folder)
    started = time.monotonic()
    for finding in look_at_machine(asked):
        print(f"{finding.severity:<8} {finding.name:<14} {finding.message}")
    print(f"all of preflight took {time.monotonic() - started:.1f} s\n")
    setting = comm_setting(asked)
    rows = ["| injected | found | named | bus bandwidth at the largest size | took |", "|---|---|---|---|---|"]
    failed = 0
    for (name, fault), expected in zip(FAULTS.items(), EXPECTED, strict=True):
        env = {"NCCL_P2P_DISABLE": "1"} if "=" in name else {}
        order = next_order((), setting)
        assert order is not None
        (trial,) = try_all(comm_wish(asked, fault=fault), order.groups, env, limit_s=60)
        speed = f"{trial.speeds[-1][1]:.1f} GB/s" if trial.speeds else "-"
        failed += trial.ending is not expected
        rows.append(
            f"| {name} | {trial.ending}: {trial.message or 'well'} | {trial.silent or '-'} | {speed} | {trial.took_s:.1f} s |"
        )
        print(rows[-1], flush=True)
    report = read_report()
    names = ", ".join(sorted({card.name for card in report.cards})) if report else "no card: two processes over gloo"
    text = "\n".join((f"{setting.num} x {names}\n", *rows, ""))
    (folder / "preflight.md").write_text(text)
    print(f"{failed} of {len(FAULTS)} were not as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
