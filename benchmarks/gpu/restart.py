"""
What a checkpoint adds to a start: from the start of the launcher to the end of the first step, as processes.

    python benchmarks/gpu/restart.py FOLDER [--limit-s 270] [--rounds 3] [--size "--layers 4 --hidden 4096 ..."]

A training writes one checkpoint with ours and one with torch's DCP. Then starts take turns: without a checkpoint, with
ours, with ours read ahead as the supervisor does it, with `dcp.load`; in each round what the disk gives to a direct read of
our shards. All are started by the supervisor's own shim and torchrun; before each the checkpoints leave the page cache,
while the libraries stay there. What is over its time is ended and said; the page is written after each start.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import page
from drive import ROOT, end, finish, has_cards, launch, lines, tail, torchrun

sys.path.append(str(ROOT))
from benchmarks.raw import forget, seconds_to_read

CARDS = "--layers 4 --hidden 4096 --vocabulary 32000 --sequence 2048 --per-card 4 --global-batch 8"
NO_CARDS = "--layers 4 --hidden 512 --vocabulary 2048 --sequence 16 --per-card 1 --global-batch 2"
WITHOUT, OURS, AHEAD, DCP = "without a checkpoint", "vramfarm", "vramfarm, read ahead", "dcp.load"
EVENTS = ("process", "torch", "fsdp", "imported", "joined", "built", "restored", "stepped")
PARTS = ("launcher", "import torch", "FSDP", "vramfarm", "process group", "model built", "restored", "first step")
DEPTHS = (4, 8)


class FailedError(Exception):
    """A start did not come to its first step."""


class Starts:
    """Starts of train.py, each bounded, and what they wrote down."""

    def __init__(self, folder, size, ranks, limit_s):
        self.folder, self.size, self.ranks, self.limit_s = folder, size, ranks, limit_s
        self.ours, self.dcp = folder / "ours", folder / "dcp"
        self.number = 0

    def make(self):
        """The checkpoints. Return the newest of ours."""
        options = [*self.size, "--steps", "2", "--out", str(self.folder / "make"), "--dir", str(self.ours), "--quit"]
        log = self.folder / "make.log"
        options += ["--interval", "24h", "--dcp-save", str(self.dcp)]
        code = finish(launch(torchrun(self.ranks, "train.py", options), log), self.limit_s)
        if code:
            raise FailedError(f"no checkpoint was made: exit {code}: {tail(log)}")
        return max(one for one in self.ours.iterdir() if (one / "MANIFEST.json").exists())

    def time(self, kind, checkpoint):
        """Seconds of each part of one start."""
        self.number += 1
        out = self.folder / f"start-{self.number}"
        (out / "attempt").mkdir(parents=True)
        forget(self.ours)
        forget(self.dcp)
        where = self.ours if kind in {OURS, AHEAD} else out / "empty"
        options = [
            *self.size,
            "--steps",
            "1000",
            "--out",
            str(out),
            "--dir",
            str(where),
            "--interval",
            "24h",
            "--parts",
        ]
        options += ["--dcp", str(self.dcp)] if kind == DCP else []
        shim = [sys.executable, "-I", str(ROOT / "runner" / "supervise" / "shim.py"), str(out / "attempt")]
        ahead = str(checkpoint) if kind == AHEAD else "none"
        began = time.time()
        process = launch([*shim, *torchrun(self.ranks, "train.py", options)], out / "log", VRAMFARM_RESUME=ahead)
        try:
            found = self._parts(out, process, began)
        finally:
            end(process, 0)
        shutil.rmtree(out / "empty", ignore_errors=True)
        if kind in {OURS, AHEAD} and not found["step"]:
            raise FailedError("nothing was restored")
        return found

    def _parts(self, out, process, began):
        until = time.monotonic() + self.limit_s
        while not (first := lines(out / "curve.jsonl")):
            if process.poll() is not None or time.monotonic() > until:
                log = out / "attempt" / "launcher.log"
                raise FailedError(f"exit {process.poll()} after {time.time() - began:.0f} s: {tail(log)[-1500:]}")
            time.sleep(0.02)
        events = [{one["event"]: one for one in lines(out / f"events-{rank}.jsonl")} for rank in range(self.ranks)]
        moments = [began, *(max(one[name]["at"] for one in events) for name in EVENTS[:-1]), first[0]["at"]]
        parts = dict(zip(PARTS, (b - a for a, b in pairwise(moments)), strict=True))
        restored = [one["restored"] for one in events]
        inside = {name: max(one["inside"].get(name, 0) for one in restored) for name in restored[0]["inside"]}
        return {"total": moments[-1] - began, "parts": parts, "inside": inside, "step": restored[0]["step"]}


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main():
    arguments = parse_arguments()
    base = Path(arguments.folder).resolve()
    folder, began = base / "restart", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    starts = Starts(folder, arguments.size.split(), arguments.ranks, arguments.start_limit_s)

    def say(text):
        print(f"{time.monotonic() - began:6.1f} {text}", flush=True)

    found = {
        "starts": {},
        "read": {depth: [] for depth in DEPTHS},
        "failed": [],
        "bytes": 0,
        "load": os.getloadavg()[0],
    }

    def keep():
        write(base, arguments, found)

    try:
        checkpoint = starts.make()
        found["bytes"] = size_of(checkpoint)
        say(f"{checkpoint.name}: {found['bytes'] / 1e9:.2f} GB")
        for number in range(arguments.rounds):
            a_round(starts, checkpoint, found, say=say, until=began + arguments.limit_s, number=number, write=keep)
    except FailedError as error:
        say(f"failed: {error}")
        found["failed"].append(str(error)[:200])
    keep()
    print((base / "restart.md").read_text(), flush=True)
    shutil.rmtree(starts.ours, ignore_errors=True)
    shutil.rmtree(starts.dcp, ignore_errors=True)
    sys.exit(bool(found["failed"] or not found["starts"].get(OURS)))


def a_round(starts, checkpoint, found, *, say, until, number, write):
    """One start of each kind, the order turned in every other round, and the disk between them."""
    kinds = [WITHOUT, OURS, AHEAD, DCP]
    shards = sorted(checkpoint.glob("*.safetensors"))
    for at, kind in enumerate(kinds if number % 2 == 0 else [OURS, AHEAD, WITHOUT, DCP]):
        if at < len(DEPTHS):
            depth = DEPTHS[(at + number) % len(DEPTHS)]
            forget(starts.ours)
            found["read"][depth].append(seconds_to_read(shards, depth // starts.ranks, starts.ranks))
            say(f"direct read, {depth} in flight in all: {found['read'][depth][-1]:.2f} s")
        before = [one["total"] for one in found["starts"].get(kind, [])]
        if time.monotonic() + max(before, default=0) + 5 > until:
            say(f"no time is left for another start {kind}")
            return
        try:
            one = starts.time(kind, checkpoint)
        except FailedError as error:
            found["failed"].append(f"{kind}: {error}"[:300])
            say(f"{kind}: failed: {error}")
            continue
        found["starts"].setdefault(kind, []).append({"round": number, **one})
        write()
        told = ", ".join(f"{name} {value:.4g}" for name, value in {**one["parts"], **one["inside"]}.items())
        say(f"{kind}: {one['total']:.2f} s: {told}")


def write(base, arguments, found):
    (base / "restart.json").write_text(json.dumps({"size": arguments.size, **found}, indent=1))
    read = min((middle(several) for several in found["read"].values() if several), default=float("nan"))
    without = {one["round"]: one["total"] for one in found["starts"].get(WITHOUT, [])}
    reads = {depth: spread(several) for depth, several in found["read"].items() if several}
    text = [
        page.machine(),
        "",
        f"{found['bytes'] / 1e9:.2f} GB, ranks: {arguments.ranks}; {arguments.size}. Medians and ranges in seconds; a part ends when both ranks have.",
        "",
        f"| start | {' | '.join(PARTS)} | in all | beyond the same without | × the direct read |",
        "|---" * (len(PARTS) + 4) + "|",
    ]
    for kind, several in found["starts"].items():
        parts = " | ".join(f"{middle([one['parts'][name] for one in several]):.2f}" for name in PARTS)
        more = middle([one["total"] - without[one["round"]] for one in several if one["round"] in without])
        compared = "| | |" if kind == WITHOUT else f"| {more:.2f} | {more / read:.2f} |"
        text.append(f"| {kind} | {parts} | {spread([one['total'] for one in several])} {compared}")
    text += [
        "",
        f"Direct read of the same shards, by as many processes as there are ranks, by pieces in flight in all: {reads}; the better median, {read:.2f} s, is what counts. Beyond: medians of what each round had more than its own start without.",
    ]
    for kind, several in found["starts"].items():
        if kind in {OURS, AHEAD}:
            names = several[0]["inside"]
            inside = ", ".join(
                f"{name} {middle([one['inside'].get(name, 0) for one in several]):.4g}" for name in names
            )
            text.append(f"Inside {kind}, the slower rank: {inside}.")
    text += [f"FAILED: {one}" for one in found["failed"]]
    (base / "restart.md").write_text("## Restart\n\n" + "\n".join(text) + "\n")


def middle(values):
    return statistics.median(values) if values else float("nan")


def spread(values):
    return f"{middle(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--limit-s", type=float, default=270 if has_cards() else 380)
    parser.add_argument("--start-limit-s", type=float, default=90, help="for one start")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=min(2, page.num_ranks()))
    parser.add_argument("--size", default=CARDS if has_cards() else NO_CARDS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
