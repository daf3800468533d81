"""
One round of the storm: a whole run on a disk of its own, struck, begun again until it is done, and compared with an undisturbed one.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.chaos.disk import Folder, PowerDisk, written
from benchmarks.chaos.offsite import Bucket, Shelf
from benchmarks.chaos.plan import POINTS, STORE_POINTS, Blow, Plan
from runner.job import OffloadPolicy
from runner.storage.journal import events
from runner.storage.offsite import open_store, surveying
from runner.supervise import page as pages
from runner.supervise.process import end_all, find, kill
from tests.chaos.parts import sort_parts
from tests.chaos.witness import check_checkpoint
from tests.fake_trainer import content
from tests.faultproxy import Fault
from vramfarm.folder import committed
from vramfarm.protocol import Decision, Env, Slot, Word

ROOT = Path(__file__).parents[2]
MARK = "VRAMFARM_CHAOS"  # in the environment of all that a round starts
STEPS = 90
BYTES = 300_000  # of a rank without torch
PAUSE_S = 0.04
# Struck at the store: an upload takes seconds on a busy machine, and old copies go when no newer one waits for it.
STORE_PAUSE_S, SAVE_EVERY, STORE_SAVE_EVERY = 0.25, "600ms", "5s"
PATIENCE_S = 240.0  # from one start of the guardian to the end, or to the next blow
MOMENT_S = 90.0
POLL_S = 0.005
DYING_S = 120.0  # even that takes processor time
TRIES = 6  # where nobody was there to be killed
NOBODY = "nobody there"
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
checkpoint: {{save_interval: {every}, keep_last: 2}}
offload: {{to: "{to}", keep_last: 1}}
restart: {{max_restarts_without_progress: 1000, initial_delay: 0s, backoff_coefficient: 1, grace_period: 20s}}
finish: {{hold: 0s}}
"""


@dataclass
class Result:
    seed: int
    blows: list[str]
    struck: list[str] = field(default_factory=list)
    met: list[tuple[str, str]] = field(default_factory=list)  # when and whom, of blows that struck somebody there
    reached: list[str] = field(default_factory=list)  # named points at which a process stood
    kills: int = 0
    power: int = 0
    restores: int = 0  # beginnings on an empty disk
    spared: int = 0  # power that this machine cannot lose
    shelved: bool = False  # its store was a folder
    attempts: list[int] = field(default_factory=list)  # the step each began at
    seconds: float = 0.0
    cpu_s: float = 0.0
    wrong: str = ""


class Round:
    """One run on a disk of its own."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        endpoint: str | None,
        library: Path,
        reference: "Reference | None",
        *,
        python: str,
        images: Path | None,
    ) -> None:
        """`endpoint`: of an S3 server; None: copies go to a folder. `python`: an interpreter that has the runner."""
        self.plan, self.folder, self.reference, self.python = plan, folder, reference, python
        self.has_power = images is not None
        self.dice = random.Random(plan.seed + 1)
        self.result = Result(plan.seed, [str(blow) for blow in plan.blows], shelved=endpoint is None)
        self.id = f"{os.getpid()}-{plan.seed}-{time.monotonic_ns()}"
        self.store = Bucket(endpoint, f"chaos-{self.id}") if endpoint else Shelf(folder / "store")
        self.work = folder / "disk"
        image = images / f"chaos-disk-{self.id}" if images else None
        self.disk = PowerDisk(self.work, image, plan.options) if image else Folder(self.work)
        self.held: Fault | None = None
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
        with self.store:
            self.env |= self.store.env
            return self._play()

    def _play(self) -> Result:
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
            try:
                self._end_all()
            finally:
                self.disk.close()
            self.result.seconds = round(time.monotonic() - began, 1)
        return self.result

    # ------------------------------------------------------------------------------------- lives

    def _start(self, ranks: int) -> None:
        self.num_ranks = ranks
        job = self.folder / "job.yaml"
        at_store = any(blow.when in STORE_POINTS for blow in self.plan.blows)
        job.write_text(
            (JOB + (REAL if self.reference else FAKE)).format(
                root=ROOT,
                bytes=BYTES,
                steps=STEPS,
                pause=STORE_PAUSE_S if at_store else PAUSE_S,
                every=STORE_SAVE_EVERY if at_store else SAVE_EVERY,
                dropout=self.plan.dropout,
                ranks=ranks,
                python=sys.executable,
                to=self.store.to,
            )
        )
        change = ["--accept-change"] if self.accepting or ranks != 2 else []
        self.accepting = bool(change)
        guard = ROOT / "tests/chaos/guard.py"
        with self.log.open("ab") as log:
            log.write(f"--- chaos: started with {ranks} ranks\n".encode())
            self.guardian = subprocess.Popen(
                [self.python, "-I", str(guard), "--config", str(job), *change],
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
        left = end_all(self._processes, timeout_s=DYING_S)
        assert not left, f"these do not die: {left}"
        if self.guardian is not None:
            self.guardian.wait(DYING_S)

    # ------------------------------------------------------------------------------------- blows

    def _strike(self, blow: Blow) -> bool:
        """False: the run ended before that."""
        if blow.whom == "power" and not self.has_power:
            blow = replace(blow, whom="all")
            self.result.spared += 1
        for _ in range(TRIES):
            self._wait_for(blow)
            if self.guardian.poll() is not None:
                self._note(f"{blow}: too late")
                return False
            is_there = self._is_there(blow)
            number = self._kill(blow)
            self._release()
            if number:
                break
        if is_there and number:
            self.result.met.append((blow.when, blow.whom))
        self._note(f"{blow}: {number or NOBODY}{'' if is_there else ', not at that point'}")
        return True

    def _is_there(self, blow: Blow) -> bool:
        if blow.when in STORE_POINTS:
            return bool(self.held and self.held.taken)
        return blow.when not in POINTS or self.here.exists()

    def _wait_for(self, blow: Blow) -> None:
        if blow.when in {*POINTS, *STORE_POINTS}:
            if blow.when in STORE_POINTS and blow.whom == "ranks":
                self._watch(lambda: self._step() > 0)  # requests go on without them, and the first ones are earlier
            self._order(blow.when)
            self._watch(lambda: self._is_there(blow))
            if self._is_there(blow):
                self.result.reached.append(blow.when)
        else:
            self._watch(self._claim(blow.when))
            time.sleep(self.dice.choice((0, 0, 0.002, 0.02, 0.2)))
        if self.guardian.poll() is not None:
            self._release()

    def _release(self) -> None:
        self.orders.unlink(missing_ok=True)
        self.here.unlink(missing_ok=True)
        self.store.release()
        self.held = None

    def _order(self, name: str) -> None:
        time.sleep(self.dice.choice((0, 0, 0.5, 1.5)))  # not always the first of its kind
        if name in STORE_POINTS:
            operation, path, how = STORE_POINTS[name]
            self.held = self.store.hold(operation, path, how)
            return
        operation, pattern = POINTS[name].format(c="chaos/checkpoints").split()
        self.here.unlink(missing_ok=True)  # who was let go may have said so once more
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

    def _kill(self, blow: Blow) -> int:
        """How many were."""
        if blow.whom in {"all", "power"}:
            return self._kill_all(blow)
        parts = sort_parts(self._processes())
        if blow.whom == "rank":
            chosen = [self.dice.choice(parts["ranks"])] if parts["ranks"] else []
        else:
            chosen = parts[blow.whom]
        kill(chosen, signal.SIGKILL)
        self.result.kills += len(chosen)
        if blow.whom == "guardian" and chosen:
            self.guardian.wait(DYING_S)
            self._start(self.num_ranks)
        return len(chosen)

    def _kill_all(self, blow: Blow) -> int:
        self._look()
        self.floor = max(self.floor, self._word(Word.COMMITTED_STEP))
        number = len(self._processes())
        self._end_all()
        self._release()
        for path in Path("/dev/shm").glob(f"{pages._prefix(self.run_dir)}*"):
            if blow.whom == "power" or blow.wiped:
                path.unlink()
        if blow.whom == "power":
            self.disk.lose_power(self.dice)
            self.result.power += 1
        self.result.kills += number
        if blow.wiped:
            self.floor = self.known = 0
            self.disk.wipe()
            self.result.restores += 1
        self._start(blow.ranks)
        return number

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
        found = surveying.survey(open_store(OffloadPolicy(to=self.store.to), self.env), "chaos")
        assert found.unusable == (), found.unusable
        assert found.outcome is not None
        assert found.outcome["outcome"] == "succeeded"
        newest = max(checkpoint.ref for checkpoint in found.checkpoints)
        assert newest.step == STEPS, f"the newest in the store is of step {newest.step}"
        place = self.folder / "offsite" / newest.name
        self.store.fetch(f"chaos/checkpoints/{newest.name}", place)
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
