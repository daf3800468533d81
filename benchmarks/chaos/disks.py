"""
Whole runs on a disk in trouble: full, read-only, slow, or failing, below everything that a run writes.

    make chaos-disks        or: PYTHONPATH=. python benchmarks/chaos/disks.py [NAME ...]

Real filesystems where there is one for it; else what the C library answers is changed (tests/vramfarm/trouble.c). The
run is the whole chain with a trainer without torch, a file:// store on another disk. Trouble comes when two
checkpoints are there, stays for some saves, and goes where it can. Each log is kept in build/chaos.
"""

import argparse
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.chaos.disk import run, written
from runner.supervise import page as pages
from runner.supervise.process import end_all, find
from tests.chaos.witness import check_checkpoint
from tests.fake_trainer import content
from vramfarm.folder import committed
from vramfarm.protocol import ControlPage, Env, Slot, Word

ROOT = Path(__file__).parents[2]
MARK = "VRAMFARM_CHAOS"
BYTES = 300_000
STAYS_S = 6.0
PATIENCE_S = 120.0
FAKE = """
command: python {root}/tests/chaos/launch_ranks.py 2 {root}/tests/fake_trainer.py --steps {steps} --step-time 0.02 --bytes {bytes}
launcher: command
"""
JOB = """
name: trouble
cpu_processes: 2
preflight: {{comm_test: false}}
python: {python}
checkpoint: {{save_interval: {save_interval}, keep_last: 2}}
offload: {{to: "{store}", keep_last: 2}}
restart: {{initial_delay: 0s, max_restarts_without_progress: 3}}
finish: {{hold: 0s}}
"""


class Night:
    """One run on a disk of its own."""

    def __init__(
        self,
        folder: Path,
        library: Path,
        *,
        kind: str = "ext4",
        size: int = 64 << 20,
        steps: int,
        train: str = FAKE,
        store: str = "",
        save_interval: str = "500ms",
        more: str = "",
        log: str = "log",
        **env: str,
    ) -> None:
        """`more`: for job.yaml; `log`: where, below the folder."""
        self.folder, self.id = folder, uuid.uuid4().hex
        self.place, self.image = folder / "disk", Path("/dev/shm") / f"chaos-{self.id}"
        self.orders = folder / "orders"
        self.place.mkdir()
        self.is_mounted = kind != "folder"
        if kind == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.place)
        elif self.is_mounted:
            with self.image.open("wb") as file:
                file.truncate(size)
            run("mkfs.ext4", "-q", "-m", "0", "-J", "size=4", self.image)
            run("mount", "-o", "loop,errors=remount-ro", self.image, self.place)
        self.run_dir = self.place / "trouble"
        values = {"root": ROOT, "steps": steps, "bytes": BYTES, "python": sys.executable}
        values |= {"store": store or f"file://{folder / 'store'}", "save_interval": save_interval}
        (folder / "job.yaml").write_text((train + JOB).format(**values) + more)
        env = {
            **os.environ,
            MARK: self.id,
            "VRAMFARM_WORKSPACE": str(self.place),
            "RUNNER_HOLD_S": "0",
            "LD_PRELOAD": str(library),
            "TROUBLE_ROOT": str(self.place),
            "TROUBLE_ORDERS": str(self.orders),
            **env,
        }
        guard = (sys.executable, "-I", str(ROOT / "tests/chaos/guard.py"), "--config", str(folder / "job.yaml"))
        self.log_path = folder / log
        with self.log_path.open("ab") as file:
            self.guardian = subprocess.Popen(
                guard, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=folder
            )

    @property
    def device(self) -> str:
        return subprocess.run(
            ["findmnt", "-no", "SOURCE", self.place], check=True, capture_output=True, text=True
        ).stdout.strip()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def committed(self) -> list[int]:
        return [one.manifest.step for one in committed(self.run_dir / "checkpoints")]

    def page(self) -> ControlPage | None:
        prefix = pages._prefix(self.run_dir)
        for path in sorted(Path("/dev/shm").glob(f"{prefix}*"), key=written)[-1:]:
            with suppress(OSError, ValueError):
                return ControlPage.open(path)
        return None

    def step(self) -> int:
        page = self.page()
        return min(page.get(rank, Slot.STEP) for rank in range(2)) if page else 0

    def num_committed(self) -> int:
        page = self.page()
        return page[Word.NUM_COMMITTED] if page else 0

    def until(self, claim, what: str, seconds: float = PATIENCE_S) -> None:
        ends = time.monotonic() + seconds
        while not claim():
            assert time.monotonic() < ends, f"not within {seconds:g} s: {what}"
            assert self.guardian.poll() is None, f"the run ended with {self.guardian.returncode}: {what}"
            time.sleep(0.05)

    def give(self, text: str) -> None:
        self.orders.with_suffix(".new").write_text(text)
        self.orders.with_suffix(".new").rename(self.orders)

    def end(self) -> None:
        self.orders.unlink(missing_ok=True)
        left = end_all(lambda: {*find(Env.RUN, str(self.run_dir)), *find(MARK, self.id)}, timeout_s=20.0)
        assert not left, left
        with suppress(subprocess.TimeoutExpired):
            self.guardian.wait(10)
        for path in Path("/dev/shm").glob(f"{pages._prefix(self.run_dir)}*"):
            path.unlink()
        if self.is_mounted:
            run("umount", "-l", self.place)
        self.image.unlink(missing_ok=True)


@contextmanager
def frozen(night: Night) -> Iterator[None]:
    """Whoever changes anything on the disk hangs in the kernel, where no signal reaches. It thaws however we end."""
    argv = ["sh", "-c", 'cat >/dev/null; exec fsfreeze -u "$1"', "sh", str(night.place)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True):  # leaving it closes the pipe, and waits
        run("fsfreeze", "-f", night.place)
        yield


def fill(night: Night) -> None:
    with (night.place / "filler").open("wb", buffering=0) as file, suppress(OSError):
        for size in (65536, 512):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


def unfill(night: Night) -> None:
    (night.place / "filler").unlink()


def ordered(text: str):
    return lambda night: night.give(text)


def over(night: Night) -> None:
    night.orders.unlink()


def break_it(night: Night) -> None:
    """As after a bad block: the kernel mounts it read-only."""
    Path(f"/sys/fs/ext4/{Path(night.device).name}/trigger_fs_error").write_text("1")


def throttle(night: Night, rate: int) -> None:
    number = Path(night.device).stat().st_rdev
    group = Path("/sys/fs/cgroup/blkio") / f"chaos-{night.id}"
    group.mkdir(exist_ok=True)
    (group / "blkio.throttle.write_bps_device").write_text(f"{os.major(number)}:{os.minor(number)} {rate}")
    for process in {*find(Env.RUN, str(night.run_dir)), *find(MARK, night.id)}:
        with suppress(OSError):
            (group / "cgroup.procs").write_text(str(process.pid))


def unthrottle(night: Night) -> None:
    group = Path("/sys/fs/cgroup/blkio") / f"chaos-{night.id}"
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):
            Path("/sys/fs/cgroup/blkio/cgroup.procs").write_text(pid)
    with suppress(OSError):
        group.rmdir()


# name: (filesystem, what begins, what ends it or None: it stays, words that the log must have)
TROUBLES = {
    "full ext4": ("ext4", fill, unfill, "free some space there"),
    "full tmpfs": ("tmpfs", fill, unfill, "free some space there"),
    "read-only after an error": ("ext4", break_it, None, "mounted read-only"),
    "slow: 200 kB/s": ("ext4", lambda night: throttle(night, 200_000), unthrottle, None),
    "EIO on fsync": ("folder", ordered(f"fsync {errno.EIO} 0\n"), over, "the disk, or the server behind it, fails"),
    "EIO on write": ("folder", ordered(f"write {errno.EIO} 0\n"), over, "the disk, or the server behind it, fails"),
    "ENOSPC on write": ("folder", ordered(f"write {errno.ENOSPC} 0\n"), over, "free some space there"),
    "ENOSPC on open": (
        "folder",
        ordered(f"open {errno.ENOSPC} 0\nmkdir {errno.ENOSPC} 0\n"),
        over,
        "free some space there",
    ),
    "EDQUOT on write": ("folder", ordered(f"write {errno.EDQUOT} 0\n"), over, "Disk quota exceeded"),
    "EROFS": (
        "folder",
        ordered("".join(f"{o} {errno.EROFS} 0\n" for o in ("open", "mkdir", "rename", "write", "truncate"))),
        over,
        "mounted read-only",
    ),
    "fsync does not answer": ("folder", ordered("fsync -1 0\n"), over, None),
}


def play(name: str, folder: Path, library: Path, *, stays_s: float = STAYS_S, steps: int = 700) -> dict[str, object]:
    kind, begin, finish, words = TROUBLES[name]
    night = Night(folder, library, kind=kind, steps=steps)
    try:
        night.until(lambda: len(night.committed()) >= 2, "two checkpoints")
        before, at = night.committed(), len(night.log())
        begin(night)
        time.sleep(1.0)
        step, began = night.step(), time.monotonic()
        time.sleep(stays_s)
        rate = (night.step() - step) / (time.monotonic() - began)
        kept = night.committed()
        said = [line for line in night.log()[at:].splitlines() if not line.startswith("  | ")]
        count = night.num_committed()
        attempts = len(re.findall("launch attempt", night.log()))
        alive = night.guardian.poll() is None
        if finish:
            finish(night)
            if alive and night.step() < steps - 100:
                night.until(lambda: night.num_committed() > count, "the next save is there", 60)
        ended = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            night.guardian.wait(PATIENCE_S)
        code = night.guardian.poll()
        good = [
            check_checkpoint(one.path, lambda rank, step: content(rank, step, BYTES))
            for one in committed(night.run_dir / "checkpoints")
        ]
        wrong = []
        wrong += ["training stood still"] if rate < 5 else []
        wrong += [f"{len(kept)} checkpoints in the trouble"] if len(kept) < 2 else []
        wrong += ["nothing said"] if words and not any(words in line for line in said) else []
        wrong += [f"exit code {code}"] if finish and code != 0 else []
        wrong += ["it does not end"] if code is None else []
        wrong += [f"{len(good)} good at the end"] if len(good) < 2 else []
        wrong += [f"{attempts} attempts"] if attempts > 1 else []
        return {
            "name": name,
            "rate": round(rate, 1),
            "kept": kept,
            "before": before,
            "said": said,
            "code": code,
            "good": good,
            "end_s": round(time.monotonic() - ended, 1),
            "wrong": wrong,
            "log": night.log(),
        }
    finally:
        night.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*TROUBLES])
    parser.add_argument("--out", type=Path, default=ROOT / "build/chaos")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="chaos-disks-", ignore_cleanup_errors=True) as work:
        library = Path(work) / "trouble.so"
        source = ROOT / "tests/vramfarm/trouble.c"
        run("gcc", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread")
        for number, name in enumerate(args.names):
            folder = Path(work) / str(number)
            folder.mkdir()
            found = play(name, folder, library)
            (args.out / f"disk-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log").write_text(found.pop("log"))
            bad += bool(found["wrong"])
            said = found.pop("said")
            print(name, found, *(line[:240] for line in said), sep="\n   ", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
