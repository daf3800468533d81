"""
Kill -9 in the middle of training and of a save: how long until the next step, what is lost, is the loss the same?

    python benchmarks/gpu/kill.py FOLDER [--limit-s 130] [--steps 110] [--size "--layers 12 --hidden 1024 --per-card 24 …"]

A reference trains undisturbed. Then the runner trains the same, and three times something is killed: one rank between
two saves, one rank while its state is being staged, all ranks when all is staged and nothing is on the disk yet.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import page
from drive import HERE, LARGE, SMALL, end, finish, has_cards, launch, lines, runner_python, size_of, tail, torchrun

from vramfarm.protocol import Arena, ControlPage, Phase, Slot, Word

RANKS = page.num_ranks()
PARTS = (
    "launcher ended",
    "cleaned up",
    "launched",
    "torchrun started",
    "torch",
    "FSDP",
    "vramfarm",
    "cards joined",
    "model built",
    "restored",
    "a step",
)


class LateError(Exception):
    """The time for this part is over, or the run is."""


class Run:
    """A run of the runner, as its files and its control page show it."""

    def __init__(self, folder, deadline, steps, size, interval):
        self.out, self.folder, self.deadline = folder / "out", folder / "job", deadline
        self.out.mkdir(parents=True)
        job = {
            "name": "job",
            "command": f"{HERE / 'train.py'} --out {self.out} --steps {steps} {size}",
            "workdir": str(HERE),
            "python": sys.executable,
            "framework": "vramfarm",
            "cpu_processes": RANKS,
            "checkpoint": {"save_interval": interval, "keep_last": 2},
            "preflight": {"comm_test": False},
            "restart": {"initial_delay": "0s", "max_restarts_without_progress": 5},
            "limits": {"max_duration": "15m"},
            "finish": {"on_success": "keep", "on_failure": "keep", "hold": "0s"},
            "provider": {"kind": "none"},
        }
        (folder / "job.yaml").write_text(json.dumps(job, indent=1))  # JSON is YAML
        self.log = folder / "runner.log"
        argv = [runner_python(folder), "-m", "runner", "run", "--config", str(folder / "job.yaml")]
        self.process = launch(argv, self.log, VRAMFARM_WORKSPACE=str(folder))

    def until(self, look, pause_s=0.02):
        """What `look` finds at last."""
        while not (found := look()):
            if time.monotonic() > self.deadline:
                raise LateError("the time is over")
            if self.process.poll() is not None:
                raise LateError(f"the runner ended with {self.process.returncode}")
            if pause_s:
                time.sleep(pause_s)
        return found

    def events(self, name, rank=0):
        return [one for one in lines(self.out / f"events-{rank}.jsonl") if one["event"] == name]

    def page(self, attempt):
        """The control page of an attempt that trains."""
        self.until(lambda: len(self.events("restored")) >= attempt)
        page = ControlPage.open(self.events("process")[attempt - 1]["control"])
        self.until(lambda: page.get(0, Slot.PHASE) == Phase.TRAINING)
        return page

    def journal(self, event):
        return [one for one in lines(self.folder / "journal.jsonl") if one["event"] == event]


def between_saves(run, page):
    run.until(
        lambda: (
            page[Word.NUM_COMMITTED]
            and not page[Word.SAVING_STEP]
            and page.get(0, Slot.STEP) >= page[Word.COMMITTED_STEP] + 5
        ),
        0.002,
    )
    return [1]


def while_staging(run, page):
    run.until(lambda: page[Word.SAVING_STEP], 0.001)
    run.until(lambda: page.get(1, Slot.ARENA_STATE) in {Arena.FILLING, Arena.READY}, 0)
    return [1]


def when_staged(run, page):
    run.until(lambda: page[Word.SAVING_STEP], 0.001)
    run.until(lambda: all(page.get(rank, Slot.ARENA_STATE) == Arena.READY for rank in range(RANKS)), 0)
    return list(range(RANKS))


KILLS = {
    "one rank, between two saves": between_saves,
    "all ranks, when all is staged": when_staged,
    "one rank, while its state is staged": while_staging,
}


def kill(run, attempt, wait):
    page = run.page(attempt)
    ranks = wait(run, page)
    pids = [page.get(rank, Slot.PID) for rank in ranks]
    states = [Arena(page.get(rank, Slot.ARENA_STATE)).name.lower() for rank in ranks]
    committed = page[Word.NUM_COMMITTED]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    at = time.time()
    kept = page[Word.COMMITTED_STEP] or run.events("restored")[attempt - 1]["step"]
    found = {"at": at, "step": page.get(0, Slot.STEP), "saving": page[Word.SAVING_STEP], "kept": kept, "states": states}
    found["too_late"] = wait is when_staged and page[Word.NUM_COMMITTED] != committed
    page.close()
    return found


def broken_down(run, attempt, found):
    """Seconds of each part from the kill of an attempt to the first step of the next."""
    run.until(lambda: len(run.events("restored")) > attempt)
    pid = run.events("restored")[attempt]["pid"]
    run.until(lambda: any(one["pid"] == pid for one in lines(run.out / "curve.jsonl")))
    first = next(one for one in lines(run.out / "curve.jsonl") if one["pid"] == pid)
    exited = json.loads((run.folder / f"logs/attempt-{attempt:04}/exit.json").read_text())
    moments = [
        found["at"],
        _seconds(exited["at"]),
        _seconds(run.journal("exited")[attempt - 1]["at"]),
        _seconds(run.journal("launched")[attempt]["at"]),
    ]
    names = ("process", "torch", "fsdp", "imported", "joined", "built", "restored")
    moments += [max(run.events(name, rank)[attempt]["at"] for rank in range(RANKS)) for name in names]
    moments.append(first["at"])
    found["parts"] = dict(zip(PARTS, (b - a for a, b in pairwise(moments)), strict=True))
    found["total_s"] = moments[-1] - moments[0]
    found["resumed"] = run.events("restored")[attempt]["step"]
    found["lost"] = found["step"] - found["resumed"]
    return found


def _seconds(text):
    return datetime.fromisoformat(text).timestamp()


def compare(reference, curve):
    """
    What the disturbed run's losses are to the reference's, bit for bit.

    Up to the first kill that is a second undisturbed run: if those differ, it is the training that does.
    """
    there = {one["step"]: one["loss"] for one in reference}
    known = [one for one in curve if one["step"] in there]
    first = [one for one in known if one["pid"] == known[0]["pid"]]
    return {
        "losses": len(known),
        "steps": len({one["step"] for one in known}),
        "wrong": [one for one in known if one["loss"] != there[one["step"]]],
        "before": len(first),
        "wrong_before": sum(one["loss"] != there[one["step"]] for one in first),
    }


def main():
    arguments = parse_arguments()
    began = time.monotonic()
    folder = Path(arguments.folder).resolve() / "kill"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "reference").mkdir(parents=True)
    deadline = began + arguments.limit_s
    failures, results = [], {}

    def say(text):
        print(f"{time.monotonic() - began:6.1f} {text}", flush=True)

    size = [*size_of(arguments.size, RANKS), "--steps", str(arguments.steps)]
    reference = [*size, "--out", str(folder / "reference"), "--dir", str(folder / "saves"), "--interval", "24h"]
    code = finish(launch(torchrun(RANKS, "train.py", reference), folder / "reference.log"), arguments.limit_s / 2)
    shutil.rmtree(folder / "saves", ignore_errors=True)
    there = lines(folder / "reference/curve.jsonl")
    if code or len(there) != arguments.steps:
        failures.append(f"the reference ended with {code} after {len(there)} of {arguments.steps} steps")
        say(tail(folder / "reference.log"))
    say(f"reference: {len(there)} steps, {_step_s(there):.3f} s each, exit {code}")

    run = Run(folder, deadline - 12, arguments.steps, " ".join(size_of(arguments.size, RANKS)), arguments.interval)
    try:
        for attempt, (name, wait) in enumerate(KILLS.items(), 1):
            found = kill(run, attempt, wait)
            say(
                f"killed {name}: step {found['step']}, saving {found['saving']}, newest {found['kept']}, {found['states']}"
            )
            results[name] = broken_down(run, attempt, found)
            parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in found["parts"].items())
            say(f"  next step after {found['total_s']:.2f} s ({parts}), {found['lost']} steps lost")
        say(f"waiting for the end, {max(0, run.deadline - time.monotonic()):.0f} s at most")
        code = finish(run.process, run.deadline - time.monotonic())
        if code == -9:
            say("the time is over before the last step; what was trained counts")
        elif code:
            failures.append(f"the runner ended with {code}")
    except LateError as late:
        failures.append(f"{len(results)} of {len(KILLS)} kills were done in the time: {late}")
    except Exception as error:  # noqa: BLE001  # what was found counts
        failures.append(repr(error))
    finally:
        end(run.process, 12)
    curve = lines(run.out / "curve.jsonl")
    compared = compare(there, curve)
    wrong = compared["wrong"]
    if wrong or not curve:
        failures.append(
            f"{len(wrong)} of {compared['losses']} losses differ, the first at step {wrong[0]['step'] if wrong else '-'}"
        )
    staged = results.get("all ranks, when all is staged")
    if staged and not staged["too_late"] and staged["resumed"] != staged["saving"]:
        failures.append(f"the save of step {staged['saving']} was staged and is lost")
    if failures:
        say(tail(run.log, 25))
        for path in sorted(run.folder.glob("logs/attempt-*/launcher.log"))[-2:]:
            say(f"{path}:\n{tail(path)}")
    write(folder.parent, arguments, there, results, compared=compared, failures=failures)
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    sys.exit(bool(failures))


def _step_s(curve):
    times = [b["at"] - a["at"] for a, b in pairwise(curve)]
    return sorted(times)[len(times) // 2] if times else 0.0


def write(folder, arguments, reference, results, *, compared, failures):
    from model import about

    lines_of_text = [
        f"{about()}; {arguments.size}; a step of {_step_s(reference):.3f} s, a save every {arguments.interval}",
        "",
        f"| killed | {' | '.join(PARTS)} | from the kill to the first step, s | steps lost |",
        "|---" * (len(PARTS) + 3) + "|",
    ]
    for name, found in results.items():
        parts = " | ".join(f"{seconds:.2f}" for seconds in found["parts"].values())
        lines_of_text.append(f"| {name} | {parts} | {found['total_s']:.2f} | {found['lost']} |")
    wrong, losses, before = compared["wrong"], compared["losses"], compared["before"]
    first = f"; the first that differs: step {wrong[0]['step']}" if wrong else ""
    equal = f"{losses - len(wrong)} equal the undisturbed run's bit for bit{first}"
    twice = (
        f"Up to the first kill, which is two undisturbed runs: {before - compared['wrong_before']} of {before} equal"
    )
    lines_of_text += ["", f"Losses of {compared['steps']} steps, written {losses} times: {equal}. {twice}.", ""]
    for name, found in results.items():
        lines_of_text.append(
            f"- {name}: killed at step {found['step']}, newest then {found['kept']}"
            + (f", a save of step {found['saving']} on its way" if found["saving"] else "")
            + f"; went on from {found['resumed']}."
        )
    lines_of_text += [f"FAILED: {one}" for one in failures]
    text = "\n".join(lines_of_text) + "\n"
    (folder / "kill.md").write_text(text)
    print(text, flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--limit-s", type=float, default=130 if has_cards() else 400)
    parser.add_argument("--steps", type=int, default=110 if has_cards() else 100)
    parser.add_argument("--size", default=LARGE if has_cards() else f"{SMALL} --pause 0.1")
    parser.add_argument("--interval", default="2s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
