"""
Whole runs, killed: guardian, runner, shim, torchrun, two ranks, saver, uploads to a real S3 server, on a disk that loses power.

    make chaos ROUNDS=300          or: PYTHONPATH=. python benchmarks/chaos/storm.py --rounds 300 --parallel 2

One round is one run from its seed: struck at up to three points, begun again until it is done, and compared with an
undisturbed one: the loss of every sample at every step, every bit of the last weights and optimizer, here and in the
store. DIR/rounds.jsonl gets a line for each, DIR/chaos.md the table of all that is there. The exit code is 1 if a round failed.
    --seed 17 --rounds 1           the same choices again; when a process reaches which line is the machine's
    --fake                         without torch: a launcher and ranks that start in milliseconds
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.disk import OPTIONS, PowerDisk, written
from runner.job import OffloadPolicy
from runner.storage.journal import events
from runner.storage.offsite import open_store, surveying
from runner.supervise import page as pages
from runner.supervise.process import end_all, find, kill
from tests.chaos.parts import sort_parts
from tests.chaos.witness import check_checkpoint
from tests.fake_trainer import content
from tests.s3server import BUCKET, S3Server
from vramfarm.folder import committed
from vramfarm.protocol import Decision, Env, Slot, Word

ROOT = Path(__file__).parents[2]
MARK = "VRAMFARM_CHAOS"  # in the environment of all that a round starts
STEPS = 90
BLOWS = 3
BYTES = 300_000  # of a rank without torch
PAUSE_S = 0.04
PATIENCE_S = 240.0  # from one start of the guardian to the end, or to the next blow
MOMENT_S = 90.0
POLL_S = 0.005
DROPOUT = 0.1
REAL = """
command: {root}/benchmarks/chaos/train.py --steps {steps} --pause {pause} --dropout {dropout}
batch: {{global: 2, per_card: 1}}
"""
FAKE = """
command: python {root}/tests/chaos/launch_ranks.py {ranks} {root}/tests/fake_trainer.py --steps {steps} --step-time {pause} --bytes {bytes}
launcher: command
"""
JOB = """
name: chaos
cpu_processes: {ranks}
preflight: {{comm_test: false}}
python: {python}
env: {{OMP_NUM_THREADS: "1"}}
checkpoint: {{save_interval: 600ms, keep_last: 2}}
offload: {{to: "s3://{bucket}/{prefix}", keep_last: 2}}
restart: {{max_restarts_without_progress: 1000, initial_delay: 0s, backoff_coefficient: 1, grace_period: 20s}}
finish: {{hold: 0s}}
"""

# Where in a save, or beside one: an operation of the process that makes it, which stands still there while others are killed.
POINTS = {
    "folder made": "mkdir {c}/.tmp-*",
    "shard opened": "open {c}/.tmp-*/shard-*",
    "shard written": "write {c}/.tmp-*/shard-*",
    "shard cut to size": "truncate {c}/.tmp-*/shard-*",
    "shard synced": "fsync {c}/.tmp-*/shard-*",
    "manifest opened": "open {c}/.tmp-*/MANIFEST.json.partial",
    "manifest written": "write {c}/.tmp-*/MANIFEST.json.partial",
    "manifest synced": "fsync {c}/.tmp-*/MANIFEST.json.partial",
    "manifest named": "rename {c}/.tmp-*/MANIFEST.json.partial",
    "folder synced": "fsync {c}/.tmp-*",
    "commit": "rename {c}/.tmp-*",
    "commit synced": "fsync {c}",
    "old one renamed": "rename {c}/step-*",
    "old one removed": "remove {c}/.removed-*/*",
    "end recorded": "rename chaos/logs/attempt-*/end.json.partial",
    "exit recorded": "rename chaos/logs/attempt-*/exit.json.tmp",
    "journal written": "write chaos/journal.jsonl",
    "journal synced": "fsync chaos/journal.jsonl",
}
MOMENTS = ("any time", "starting", "training", "proposed", "staging", "uploading", "ending")
NAMES = {
    "all": "all at once",
    "power": "power lost",
    "tasks": "uploads and other tasks",
    "rank": "one rank",
    "ranks": "all ranks",
}
VICTIMS = ("rank", "ranks", "saver", "launcher", "shim", "guardian", "runner", "tasks", "all", "power")


@dataclass(frozen=True)
class Blow:
    """`whom` at `when`: a moment or a named point. After `all` and `power` the run is begun again with `ranks`."""

    when: str
    whom: str
    ranks: int = 2
    wiped: bool = False  # the next start finds an empty disk

    def __str__(self) -> str:
        after = f", then {self.ranks} rank" if self.ranks != 2 else ""
        return f"{self.whom} at: {self.when}{after}{', then an empty disk' if self.wiped else ''}"


@dataclass
class Plan:
    seed: int
    blows: list[Blow]
    dropout: float
    options: str


@dataclass
class Result:
    seed: int
    blows: list[str]
    struck: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)  # the step each began at
    seconds: float = 0.0
    cpu_s: float = 0.0  # of all rounds so far
    wrong: str = ""


def plan(seed: int) -> Plan:
    """All that is by chance, from the seed. Blows take turns, so that every point meets every victim."""
    dice = random.Random(seed)
    pairs = [(when, whom) for when in (*POINTS, *MOMENTS) for whom in VICTIMS]
    random.Random(0).shuffle(pairs)
    blows = [_blow(dice, *pairs[(BLOWS * seed + number) % len(pairs)]) for number in range(BLOWS)]
    same = all(blow.ranks == 2 for blow in blows)
    return Plan(seed, blows, DROPOUT if same else 0.0, dice.choice(OPTIONS))


def _blow(dice: random.Random, when: str, whom: str) -> Blow:
    wiped = whom == "all" and dice.random() < 0.35
    ranks = 1 if whom in {"all", "power"} and dice.random() < 0.35 else 2
    return Blow(when, whom, ranks, wiped)


# ------------------------------------------------------------------------------------------- a round


class Round:
    """One run on a disk of its own."""

    def __init__(
        self, plan: Plan, folder: Path, server: S3Server, library: Path, reference: "Reference | None"
    ) -> None:
        self.plan, self.folder, self.server, self.reference = plan, folder, server, reference
        self.dice = random.Random(plan.seed + 1)
        self.result = Result(plan.seed, [str(blow) for blow in plan.blows])
        self.id = f"{os.getpid()}-{plan.seed}-{time.monotonic_ns()}"
        self.prefix = f"chaos-{self.id}"
        self.work = folder / "disk"
        self.disk = PowerDisk(self.work, Path("/dev/shm") / f"chaos-disk-{self.id}", plan.options)
        self.run_dir = self.work / "chaos"
        self.trace, self.orders, self.log = folder / "trace", folder / "orders", folder / "log"
        self.here = folder / "orders.here"
        self.guardian: subprocess.Popen[bytes] | None = None
        self.floor = 0  # nobody may begin before it
        self.known = 0  # attempts that were looked at
        self.accepting = False
        self.content = None if reference else lambda rank, step: content(rank, step, BYTES)
        self.env = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("VRAMFARM_", "RUNNER_", "AWS_"))
            },
            **server.env,
            "AWS_ENDPOINT_URL": server.endpoint,
            "VRAMFARM_WORKSPACE": str(self.work),
            "RUNNER_HOLD_S": "0",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "CHAOS_TRACE": str(self.trace),
            "LD_PRELOAD": str(library),
            "TROUBLE_ROOT": str(self.work),
            "TROUBLE_ORDERS": str(self.orders),
            MARK: self.id,
        }

    def play(self) -> Result:
        began = time.monotonic()
        try:
            self._start(2)
            for blow in self.plan.blows:
                if not self._strike(blow):
                    break
            self._finish()
            self._check()
        except Exception as error:  # noqa: BLE001  # it is told, with its seed
            self.result.wrong = f"{error!r}"[:2000] or "?"
            self.result.wrong += "".join(traceback.format_exc(limit=-1).splitlines(keepends=True)[-4:-1])
            shutil.copytree(
                self.run_dir, self.folder / "left", ignore_dangling_symlinks=True, dirs_exist_ok=True
            ) if self.run_dir.exists() else None
        finally:
            self.orders.unlink(missing_ok=True)
            self._end_all()
            self.disk.close()
            self.result.seconds = round(time.monotonic() - began, 1)
        return self.result

    # ------------------------------------------------------------------------------------- lives

    def _start(self, ranks: int) -> None:
        self.num_ranks = ranks
        job = self.folder / "job.yaml"
        job.write_text(
            (JOB + (REAL if self.reference else FAKE)).format(
                root=ROOT,
                bytes=BYTES,
                steps=STEPS,
                pause=PAUSE_S,
                dropout=self.plan.dropout,
                ranks=ranks,
                python=sys.executable,
                bucket=BUCKET,
                prefix=self.prefix,
            )
        )
        change = ["--accept-change"] if self.accepting or ranks != 2 else []
        self.accepting = bool(change)
        guard = ROOT / "tests/chaos/guard.py"
        with self.log.open("ab") as log:
            log.write(f"--- chaos: started with {ranks} ranks\n".encode())
            self.guardian = subprocess.Popen(
                [sys.executable, "-I", str(guard), "--config", str(job), *change],
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _finish(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.guardian.poll() is None:
            assert time.monotonic() < until, f"not done within {PATIENCE_S:g} s"
            self._look()
            time.sleep(0.2)
        assert self.guardian.returncode == 0, f"exit code {self.guardian.returncode}"

    def _processes(self):
        return sorted({*find(Env.RUN, str(self.run_dir)), *find(MARK, self.id)}, key=lambda p: p.pid)

    def _end_all(self) -> None:
        left = end_all(self._processes, timeout_s=20.0)
        assert not left, f"these do not die: {left}"
        if self.guardian is not None:
            self.guardian.wait(20)

    # ------------------------------------------------------------------------------------- blows

    def _strike(self, blow: Blow) -> bool:
        """False: the run ended before that."""
        if blow.when in POINTS:
            self._order(POINTS[blow.when])
            self._watch(self.here.exists)
        else:
            self._watch(self._claim(blow.when))
            time.sleep(self.dice.choice((0, 0, 0.002, 0.02, 0.2)))
        if self.guardian.poll() is not None:
            self.orders.unlink(missing_ok=True)
            self._note(f"{blow}: too late")
            return False
        stood = self.here.exists()
        found = self._kill(blow)
        self.orders.unlink(missing_ok=True)
        self.here.unlink(missing_ok=True)
        self._note(f"{blow}: {found}{'' if stood or blow.when in MOMENTS else ', not at that point'}")
        return True

    def _order(self, point: str) -> None:
        operation, pattern = point.format(c="chaos/checkpoints").split()
        time.sleep(self.dice.choice((0, 0, 0.5, 1.5)))  # not always the first of its kind
        partial = self.folder / "orders.new"
        partial.write_text(f"{operation} -1 0 {pattern}\n")
        partial.rename(self.orders)

    def _claim(self, when: str):
        begun = time.monotonic()
        wait_s = self.dice.uniform(0, 14)
        steps = self.dice.randrange(1, STEPS)
        return {
            "any time": lambda: time.monotonic() - begun > wait_s,
            "starting": self._page_after(self.dice.uniform(0, 8)),
            "training": lambda: self._step() >= steps,
            "proposed": lambda: self._word(Word.DECISION) == Decision.PROPOSED,
            "staging": lambda: self._word(Word.DECISION) == Decision.COMMITTED,
            "uploading": self._uploads,
            "ending": lambda: any(self.run_dir.glob("logs/attempt-*/end.json")),
        }[when]

    def _page_after(self, wait_s: float):
        """A while after an attempt was launched: torchrun and ranks come up."""
        seen = []

        def claim() -> bool:
            if not seen and (page := self._page()):
                page.close()
                seen.append(time.monotonic())
            return bool(seen) and time.monotonic() - seen[0] > wait_s

        return claim

    def _uploads(self) -> bool:
        return any((self.run_dir / "logs/tasks").glob("upload*"))

    def _page(self):
        prefix = pages._prefix(self.run_dir)
        found = sorted(Path("/dev/shm").glob(f"{prefix}*"), key=written)
        return next((page for path in found[-1:] if (page := _open(path))), None)

    def _word(self, word: Word) -> int:
        page = self._page()
        if page is None:
            return 0
        value = page[word]
        page.close()
        return value

    def _step(self) -> int:
        page = self._page()
        if page is None:
            return 0
        step = page.get(0, Slot.STEP)
        page.close()
        return step

    def _watch(self, claim) -> None:
        until = time.monotonic() + MOMENT_S
        next_look = 0.0
        while time.monotonic() < until and self.guardian.poll() is None and not claim():
            if time.monotonic() > next_look:
                self._look()
                next_look = time.monotonic() + 0.2
            time.sleep(POLL_S)

    def _kill(self, blow: Blow) -> str:
        if blow.whom in {"all", "power"}:
            self._look()
            self.floor = max(self.floor, self._word(Word.COMMITTED_STEP))
            self._end_all()
            for path in Path("/dev/shm").glob(f"{pages._prefix(self.run_dir)}*"):
                if blow.whom == "power" or blow.wiped:
                    path.unlink()
            if blow.whom == "power":
                self.disk.lose_power(self.dice)
            if blow.wiped:
                self.floor = self.known = 0
                self.disk.wipe()
            self._start(blow.ranks)
            return blow.whom
        parts = sort_parts(self._processes())
        if blow.whom == "rank":
            chosen = [self.dice.choice(parts["ranks"])] if parts["ranks"] else []
        else:
            chosen = parts[blow.whom]
        kill(chosen, signal.SIGKILL)
        if blow.whom == "guardian" and chosen:
            self.guardian.wait(20)
            self._start(self.num_ranks)
        return f"{len(chosen)} killed"

    def _note(self, text: str) -> None:
        self.result.struck.append(text)
        with self.log.open("a") as log:
            log.write(f"--- chaos: {text}\n")

    # ------------------------------------------------------------------------------------ checks

    def _look(self) -> None:
        """What must hold at any time: what is committed is whole, and no attempt begins before it."""
        launched = [event for event in events(self.run_dir / "journal.jsonl") if event["event"] == "launched"]
        for attempt in launched[self.known :]:
            begins = attempt["resume"]["step"] if attempt["resume"] else 0
            self.result.attempts.append(begins)
            assert begins >= self.floor, f"attempt {attempt['number']} began at {begins}, {self.floor} was committed"
        self.known = len(launched)
        if self.known:
            self.floor = max(self.floor, self._word(Word.COMMITTED_STEP))

    def _check(self) -> None:
        reference = self.reference.of(self.plan.dropout) if self.reference else None
        if reference:
            found = [line for line in self.trace.read_text().splitlines() if line]
            wrong = [line for line in found if line not in reference.losses]
            assert not wrong, f"losses of another run: {wrong[:5]}"
            missing = reference.losses - set(found)
            assert not missing, f"never trained: {sorted(missing)[:5]}"
        here = committed(self.run_dir / "checkpoints")
        done = [e for e in events(self.run_dir / "journal.jsonl") if e["event"] == "concluded"]
        assert [e["outcome"] for e in done][-1:] == ["succeeded"], done
        if here:  # a run that was over when its disk went has none, and needs none
            assert here[0].manifest.step == STEPS, f"the newest here is of step {here[0].manifest.step}"
            assert not reference or tensors(here[0].path) == reference.tensors, "the last state is another one"
            assert len(here) <= 2, [one.path.name for one in here]
        for one in here:
            assert check_checkpoint(one.path, self.content) == one.manifest.step
        self._check_store(reference)
        assert not self._processes(), self._processes()
        assert not list(Path("/dev/shm").glob(f"{pages._prefix(self.run_dir)}*")), "a page is left"

    def _check_store(self, reference) -> None:
        policy = OffloadPolicy(to=f"s3://{BUCKET}/{self.prefix}")
        store = open_store(policy, self.env)
        found = surveying.survey(store, "chaos")
        assert found.unusable == (), found.unusable
        assert found.outcome is not None
        assert found.outcome["outcome"] == "succeeded"
        newest = max(checkpoint.ref for checkpoint in found.checkpoints)
        assert newest.step == STEPS, f"the newest in the store is of step {newest.step}"
        client, place = self.server.client(), self.folder / "offsite" / newest.name
        place.mkdir(parents=True)
        for entry in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{self.prefix}/chaos/checkpoints/{newest.name}/")[
            "Contents"
        ]:
            client.download_file(BUCKET, entry["Key"], str(place / Path(entry["Key"]).name))
        client.close()
        assert check_checkpoint(place, self.content) == STEPS
        assert not reference or tensors(place) == reference.tensors, "the last state in the store is another one"


def _open(path: Path):
    from vramfarm.protocol import ControlPage, ProtocolError

    with suppress(OSError, ProtocolError):
        return ControlPage.open(path)
    return None


def tensors(folder: Path) -> dict[str, bytes]:
    """Every number of a checkpoint by name; what several ranks have is put together by where it belongs."""
    found: dict[str, dict] = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, one in header.items():
            if not re.search(r"rng|random", name):
                a, b = one["data_offsets"]
                found.setdefault(name, {})[path.name] = raw[8 + length + a : 8 + length + b]
    return {name: b"".join(parts.values()) for name, parts in sorted(found.items())}


# ---------------------------------------------------------------------------------------- the undisturbed run


class Reference:
    """What a run without a supervisor, in one go, comes to."""

    def __init__(self, at: Path) -> None:
        self._at = at
        self.losses: set[str] = set()
        self.tensors: dict[str, bytes] = {}

    def of(self, dropout: float) -> "Reference":
        folder = self._at / f"{STEPS}-steps-dropout-{dropout}"
        made = Reference(self._at)
        (stored, *_) = committed(folder / "checkpoints")
        made.losses = set((folder / "trace").read_text().splitlines())
        made.tensors = tensors(stored.path)
        return made

    def make(self, dropout: float) -> None:
        folder = self._at / f"{STEPS}-steps-dropout-{dropout}"
        if (folder / "done").exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        argv = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        script = [str(ROOT / "benchmarks/chaos/train.py"), f"--steps={STEPS}", f"--dropout={dropout}"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CHAOS_TRACE": str(folder / "trace")}
        subprocess.run([*argv, *script], env=env, cwd=folder, check=True, timeout=180, capture_output=True)
        (folder / "done").touch()


# ------------------------------------------------------------------------------------------------- all of it


def table(out: Path) -> str:
    """Who was struck, in how many rounds and where, and what became of them."""
    found = {name: _read(out / f"{name}.jsonl") for name in ("rounds", "fake")}
    lines = [
        "| killed | with torchrun | at a named point | without torch | at a named point |",
        "|---|---|---|---|---|",
    ]
    for whom in VICTIMS:
        cells = [str(count) for rounds in found.values() for count in _count(rounds, whom)]
        lines.append(f"| {NAMES.get(whom, whom)} | {' | '.join(cells)} |")
    for name, rounds in found.items():
        again = sum(len(one["attempts"]) for one in rounds) - len(rounds)
        bad = [one["seed"] for one in rounds if one["wrong"]]
        blows = sum(sum(_count(rounds, whom)[:1]) for whom in VICTIMS)
        lines.append(
            f"\n{name}: {len(rounds)} runs, {blows} blows, {again} attempts more, {len(bad)} failed {bad or ''}"
        )
    return "\n".join(lines) + "\n"


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _count(rounds: list[dict], whom: str) -> tuple[int, int]:
    """Blows that struck somebody; of these, at a named point."""
    struck = [text for one in rounds for text in one["struck"] if text.startswith(f"{whom} at: ")]
    struck = [text for text in struck if not text.endswith("too late") and ": 0 killed" not in text]
    when = [text.split(" at: ")[1].split(":")[0].split(",")[0] for text in struck if "not at that point" not in text]
    return len(struck), sum(one in POINTS for one in when)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next has the next")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no round after this")
    parser.add_argument("--keep", action="store_true", help="the folder of a good round, too")
    parser.add_argument("--out", type=Path, default=ROOT / "build/chaos")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)))
        library = work / "trouble.so"
        source = ROOT / "tests/vramfarm/trouble.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True, timeout=60)
        reference = None if args.fake else Reference(out / "reference")
        for dropout in (0.0, DROPOUT) if reference else ():
            reference.make(dropout)
        server = S3Server(work / "s3")
        (work / "s3").mkdir()
        server.start()
        stack.callback(server.stop)

        def play(seed: int) -> Result | None:
            if time.monotonic() - began > args.limit_s:
                return None
            folder = work / str(seed)
            folder.mkdir()
            round_ = Round(plan(seed), folder, server, library, reference)
            result = round_.play()
            result.cpu_s = round(sum(os.times()[2:4]), 1)
            with (out / ("fake.jsonl" if args.fake else "rounds.jsonl")).open("a") as file:
                file.write(json.dumps(vars(result)) + "\n")
            print(
                f"seed {seed}: {result.wrong or 'good'}; {result.struck}, began at {result.attempts}, {result.seconds} s",
                flush=True,
            )
            if result.wrong or args.keep:
                shutil.copytree(
                    folder,
                    out / f"round-{seed}",
                    symlinks=True,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("disk", "lib"),
                )
            shutil.rmtree(folder, ignore_errors=True)
            return result

        with ThreadPoolExecutor(args.parallel) as pool:
            results = [one for one in pool.map(play, range(args.seed, args.seed + args.rounds)) if one]
    (out / "chaos.md").write_text(table(out))
    bad = [one for one in results if one.wrong]
    print(f"{len(results)} rounds, {len(bad)} failed{': seeds ' + str([one.seed for one in bad]) if bad else ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
