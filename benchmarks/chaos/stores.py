"""
Whole runs whose store is down, full, broken or silent: a real S3 server that is killed, and a proxy before it.

    make chaos-stores [STORES="down-for-a-while ..."]     or: PYTHONPATH=. python benchmarks/chaos/stores.py [--stays-s 1200] [NAME ...]

Printed is what the training did meanwhile, how the run ended, and each line that was said of the store, with how often.
Each log is kept in build/chaos.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos.disks import ROOT, Night
from benchmarks.chaos.storm import build
from runner.storage.journal import events
from tests.faultproxy import FaultProxy
from tests.s3server import BUCKET, S3Server

PAUSE_S = 0.1
STAYS_S = 1200.0
REAL = """
command: {root}/benchmarks/chaos/train.py --steps {steps} --pause 0.1
batch: {{global: 2, per_card: 1}}
env: {{OMP_NUM_THREADS: "1"}}
"""
STORE = f"s3://{BUCKET}/night"


class Watch:
    """How training goes on."""

    def __init__(self, night: Night) -> None:
        self.night, self.step, self.moved, self.longest = night, night.step(), time.monotonic(), 0.0

    def look(self) -> None:
        step = self.night.step()
        if step > self.step:
            self.longest = max(self.longest, time.monotonic() - self.moved)
            self.step, self.moved = step, time.monotonic()

    def for_s(self, seconds: float) -> float:
        """Steps a second in this time."""
        began, before = time.monotonic(), self.step
        while time.monotonic() < began + seconds and self.night.guardian.poll() is None:
            self.look()
            time.sleep(0.05)
        return round((self.step - before) / (time.monotonic() - began), 2)


class Stage:
    """A server and a run that begins beside it."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder, self.library = folder, library
        (folder / "s3").mkdir()
        self.server = S3Server(folder / "s3")
        self.server.start()
        self.nights: list[Night] = []

    def start(self, *, endpoint: str = "", name: str = "run", **options) -> Night:
        folder = self.folder / name
        folder.mkdir()
        env = {
            **self.server.env,
            "AWS_ENDPOINT_URL": endpoint or self.server.endpoint,
            "CHAOS_TRACE": str(folder / "trace"),
        }
        night = Night(folder, self.library, kind="folder", store=STORE, **env, **options)
        self.nights.append(night)
        return night

    def end(self) -> None:
        for night in self.nights:
            night.end()
        with suppress(Exception):
            self.server.stop()


def in_store(night: Night) -> int:
    return len(re.findall(r"is in the store:", night.log()))


def verified(stage: Stage, endpoint: str = "") -> str:
    """What `checkpoints verify` says of the newest in the store."""
    env = {**stage.server.env, "AWS_ENDPOINT_URL": endpoint or stage.server.endpoint, "PATH": "/usr/bin:/bin"}
    argv = [sys.executable, "-I", "-m", "runner", "checkpoints", "verify", f"{STORE}/trouble"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    return f"exit {done.returncode}: {done.stdout.strip()[-300:]} {done.stderr.strip()[-300:]}"


def finish(night: Night, watch: Watch, seconds: float) -> dict[str, object]:
    began = time.monotonic()
    while night.guardian.poll() is None and time.monotonic() < began + seconds:
        watch.look()
        time.sleep(0.1)
    journal = events(night.run_dir / "journal.jsonl")
    return {
        "exit code": night.guardian.poll(),
        "ended after": f"{time.monotonic() - began:.0f} s",
        "longest between two steps": f"{watch.longest:.2f} s",
        "attempts": sum(event["event"] == "launched" for event in journal),
        "here": night.committed(),
        "in the store": in_store(night),
    }


def down_for_a_while(stage: Stage, stays_s: float) -> dict[str, object]:
    """With torchrun. At the end all must be there, and verified."""
    steps = int((stays_s * 1.1 + 100) / PAUSE_S)
    night = stage.start(steps=steps, train=REAL, save_interval=f"{max(1.0, stays_s / 60):g}s")
    night.until(lambda: in_store(night) >= 2, "two checkpoints are in the store")
    watch = Watch(night)
    before = watch.for_s(20)
    stage.server.stop()
    count = night.num_committed()
    meanwhile = watch.for_s(stays_s)
    saves, longest = night.num_committed() - count, watch.longest
    stage.server.start()
    came_back, there = time.monotonic(), in_store(night)
    night.until(lambda: in_store(night) > there, "the next one is in the store", 400)
    back = time.monotonic() - came_back
    found = finish(night, Watch(night), 300 + stays_s / 2)
    return (
        {
            "steps a second before": before,
            "meanwhile": meanwhile,
            "longest between two steps meanwhile": f"{longest:.2f} s",
            "saves meanwhile": saves,
            "first copy after": f"{back:.0f} s",
        }
        | found
        | {"verify": verified(stage)}
    )


def down_for_ever(stage: Stage, _: float) -> dict[str, object]:
    """There is a deadline."""
    night = stage.start(steps=1_000_000, more="limits: {max_duration: 150s}\n")
    night.until(lambda: in_store(night) >= 2, "two checkpoints are in the store")
    watch = Watch(night)
    stage.server.stop()
    return finish(night, watch, 400)


def _first_start(stage: Stage, seconds: float, **fault) -> dict[str, object]:
    with FaultProxy(stage.server.endpoint) as proxy:
        proxy.add(**fault)
        night = stage.start(endpoint=proxy.endpoint, steps=2000)
        found = finish(night, Watch(night), seconds)
        return found | {"requests": Counter(proxy.operations).most_common(8), "step": night.step()}


def first_start_full(stage: Stage, _: float) -> dict[str, object]:
    """Nothing can be written, as on a disk that is full: 507."""
    return _first_start(
        stage, 240, operation="PutObject|UploadPart|CreateMultipartUpload", answer=(507, "InsufficientStorage")
    )


def first_start_quota(stage: Stage, _: float) -> dict[str, object]:
    return _first_start(
        stage, 240, operation="PutObject|UploadPart|CreateMultipartUpload", answer=(403, "QuotaExceeded")
    )


def first_start_500(stage: Stage, _: float) -> dict[str, object]:
    return _first_start(stage, 240, answer=(500, "InternalError"))


def first_start_hangs(stage: Stage, _: float) -> dict[str, object]:
    return _first_start(stage, 240, hang_s=3600)


def first_start_500_for_a_while(stage: Stage, _: float) -> dict[str, object]:
    """Forty requests long."""
    return _first_start(stage, 240, answer=(500, "InternalError"), times=40)


def two_writers(stage: Stage, _: float) -> dict[str, object]:
    """The second begins while the first trains, on another disk."""
    first = stage.start(name="first", steps=1500)
    first.until(lambda: in_store(first) >= 2, "two checkpoints are in the store")
    second = stage.start(name="second", steps=1500)
    two = finish(second, Watch(second), 200)
    one = finish(first, Watch(first), 200)
    said = [line for line in second.log().splitlines() if not line.startswith("  | ")][-3:]
    return {"first": one, "second": two, "second said": said, "verify": verified(stage)}


PLAYS = {
    play.__name__.replace("_", "-"): play
    for play in (
        down_for_a_while,
        down_for_ever,
        first_start_full,
        first_start_quota,
        first_start_500,
        first_start_500_for_a_while,
        first_start_hangs,
        two_writers,
    )
}


def said(log: str) -> list[str]:
    """Lines about the store, without numbers, and how often each came."""
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in log.splitlines() if not line.startswith("  | ")]
    about = [line for line in lines if re.search(r"store|S3|lease|upload|503|507|500|alert|end", line)]
    counted = Counter(re.sub(r"[0-9a-f]{8}\b|\d[\d.,:/]*", "#", line)[:400] for line in about)
    return [f"{count} x {line}" for line, count in counted.most_common()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*PLAYS])
    parser.add_argument("--stays-s", type=float, default=STAYS_S, help="how long the store is down for a while")
    parser.add_argument("--out", type=Path, default=ROOT / "build/chaos")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        with tempfile.TemporaryDirectory(prefix="chaos-stores-", ignore_cleanup_errors=True) as work:
            library = Path(work) / "trouble.so"
            build(library)
            stage = Stage(Path(work), library)
            try:
                found = PLAYS[name](stage, args.stays_s)
            except AssertionError as error:
                found = {"wrong": error}
            finally:
                stage.end()
            print(f"\n## {name}", *(f"{key}: {value}" for key, value in found.items()), sep="\n", flush=True)
            for night in stage.nights:
                shutil.copy(night.log_path, args.out / f"store-{name}-{night.folder.name}.log")
                print(*said(night.log()), sep="\n   ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
