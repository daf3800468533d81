"""
Preflight on real cards: what nvidia-smi says and how we read it, the verdict and its time, the communication test with faults.

    python benchmarks/gpu/preflight.py FOLDER

Without cards two processes with gloo, and the faults only.
"""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import page

sys.path.insert(0, str(page.ROOT))
from runner.facts import TrialEnding
from runner.job import Job
from runner.policy.comm import judge_trials, next_order
from runner.preflight import Mission, comm_setting, comm_wish
from runner.probes.comm import try_all
from runner.probes.machine import read_cards, visible

FLOOR_GB_PER_S, VERDICT_S = 300, 60  # of two H100 or H200 on NVLink
READINGS = {"topo": "topo -m", "p2p": "topo -p2p r", "query": "-q"}
SLOW = "are slow|suspicious below"  # below the user's floor, or below one that is derived from the links
FAULTS = {  # what the try ends with, and what the finding is to say
    "rank 1 stops (SIGSTOP)": ({"rank": 1, "what": "stop", "where": "reduce"}, TrialEnding.SILENT, "no word for"),
    "rank 1 sleeps before it joins": ({"rank": 1, "what": "sleep", "where": "join"}, TrialEnding.SILENT, "no word for"),
    "rank 1 is slow: late by 0.3 s at every sum": (
        {"rank": 1, "what": "slow", "where": "reduce"},
        TrialEnding.GOOD,
        SLOW,
    ),
    "rank 1 raises": ({"rank": 1, "what": "raise", "where": "reduce"}, TrialEnding.ERROR, "do not talk"),
    "rank 1 sums wrongly": ({"rank": 1, "what": "wrong", "where": "reduce"}, TrialEnding.WRONG, "sums are wrong"),
}


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
        env={**os.environ, **page.environment()},
    )


def explained(folder: Path) -> dict:
    """What `explain` makes of each reading, which stay in the folder for whoever wants them."""
    found = {}
    for name, words in READINGS.items():
        path = folder / f"{name}.txt"
        path.write_text(page.ask("nvidia-smi", *words.split()))
        argv = (sys.executable, "-m", "runner", "explain", str(path), "--json")
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=60, env=page.environment(), cwd=folder, check=False
        )
        try:
            found[name] = json.loads(done.stdout)
        except ValueError:
            found[name] = {"error": True, "message": done.stderr[:200]}
        (folder / f"{name}.json").write_text(json.dumps(found[name], indent=1))
    return found


def verdict(folder: Path) -> tuple[dict, float]:
    """What `vramfarm-runner preflight` says, and how long that took."""
    (folder / "train.py").write_text("import torch\n")
    (folder / "job.yaml").write_text(
        f"name: job\ncommand: train.py\npython: {sys.executable}\nprovider: {{kind: none}}\nlimits: {{max_duration: 1h}}\n"
        + ("" if page.cards() else "cpu_processes: 2\n")
    )
    argv = (sys.executable, "-m", "runner", "preflight", "--config", "job.yaml", "--json")
    began = time.monotonic()
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=180,
        env=page.environment(VRAMFARM_WORKSPACE=str(folder)),
        cwd=folder,
        check=False,
    )
    took = time.monotonic() - began
    print(done.stderr, flush=True)
    (folder / "verdict.json").write_text(done.stdout)
    try:
        return json.loads(done.stdout), took
    except ValueError:
        return {"verdict": f"exit code {done.returncode}: {done.stderr[:200]}", "findings": [], "reasons": []}, took


def trial(asked: Mission, setting, env: dict, fault: dict | None):
    order = next_order((), setting)
    assert order is not None
    wish = replace(comm_wish(asked, fault=fault), start_s=100)  # of a machine that is busy with others of these
    (found,) = try_all(wish, order.groups, env, limit_s=130)
    return found


def row_of(name: str, found, setting) -> list[str]:
    speed = f"{found.speeds[-1][1]:.3g}" if found.speeds else "-"
    said = judge_trials((found,), setting)[0].message
    row = [name, found.ending, said, speed, f"{found.took_s:.1f}"]
    print(*row, sep=" | ", flush=True)
    return row


def main(folder: Path) -> int:
    kept = folder.resolve() / "preflight"
    kept.mkdir(parents=True, exist_ok=True)
    wrong, names = [], page.cards()
    on_nvlink = any("H200" in name or "H100 80GB HBM3" in name for name in names) and len(names) > 1
    said = explained(kept) if names else {}
    for name, found in said.items():
        print(f"explain {name}: {json.dumps(found)[:400]}", flush=True)
    linked = ""
    if on_nvlink:
        wrong += [] if said["topo"].get("link_class") == "nvlink" else [f"link class {said['topo'].get('link_class')}"]
        wrong += [] if page.link() == "NV18" else [f"nvidia-smi topo -m says {page.link()}, not NV18"]
        report = page.ask("nvidia-smi", "-q", "-x")
        (kept / "smi.xml").write_text(report)
        fabric = report.count("<state>Completed</state>")
        wrong += [] if fabric == len(names) else [f"fabric Completed on {fabric} of {len(names)} cards"]
        linked = f"Link class: {said['topo'].get('link_class')} ({page.link()}); fabric: Completed on {fabric} of {len(names)} cards."
    judged, took = verdict(kept)
    for finding in judged["findings"]:
        print(f"{finding['severity']:<8} {finding['name']:<14} {finding['message']}", flush=True)
    wrong += [] if judged["verdict"] in {"go", "changes"} else [f"verdict {judged['verdict']}"]
    wrong += [] if took < VERDICT_S else [f"verdict after {took:.0f} s"]
    asked = mission(kept)
    setting = comm_setting(asked)
    rows, healthy = [], 0.0
    for name, env in {"nothing": {}, "NCCL_P2P_DISABLE=1": {"NCCL_P2P_DISABLE": "1"}}.items():
        found = trial(asked, setting, env, None)
        rows.append(row_of(name, found, setting))
        healthy = healthy or (found.speeds[-1][1] if found.speeds else 0.0)
        wrong += [] if found.ending is TrialEnding.GOOD else [f"{name}: {found.ending}"]
        for size, speed in found.speeds:
            print(f"    {size >> 10} KiB: {speed:.2f} GB/s", flush=True)
        if on_nvlink and not env and found.speeds and found.speeds[-1][1] < FLOOR_GB_PER_S:
            wrong.append(f"bus bandwidth {found.speeds[-1][1]:.0f} GB/s, at least {FLOOR_GB_PER_S} expected")
    at_once = max(1, min(len(FAULTS), (os.cpu_count() or 1) // (2 * setting.num)))  # how fast they are says nothing
    with ThreadPoolExecutor(at_once) as pool:
        found_all = list(pool.map(lambda fault: trial(asked, setting, {}, fault[0]), FAULTS.values()))
    if setting.floor is None and not on_nvlink:  # where links say nothing of how fast they must be
        setting = replace(setting, floor=healthy / 10)
    for (name, (_, expected, words)), found in zip(FAULTS.items(), found_all, strict=True):
        rows.append(row_of(name, found, setting))
        is_told = found.ending is expected and re.search(words, rows[-1][2])
        wrong += [] if is_told else [f"{name}: {found.ending}, {rows[-1][2]}"]
    reasons = "".join(f"\n- {reason}" for reason in judged["reasons"])
    page.write(
        folder,
        "preflight",
        "## Preflight and the communication test",
        page.machine(),
        linked,
        f"Verdict: {judged['verdict']}, after {took:.1f} s, the communication test included.{reasons}",
        page.table(
            ["changed or injected", "the try ends", "what is said", "GB/s at the largest size", "took, s"], rows
        ),
        "not as expected: " + "; ".join(wrong) if wrong else "",
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
