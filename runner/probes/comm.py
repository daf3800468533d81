"""
One try of the communication test: a process a card, watched through their reports, ended at its limits.

A hang is silence, an error is said, and slow is measured: each is told apart. Nothing here decides what follows.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from runner.facts import Trial, TrialEnding
from vramfarm import protocol

SCRIPT: Final = Path(protocol.__file__).resolve().with_name("commtest.py")
CARD_SIZES: Final = (1 << 20, 32 << 20, 256 << 20, 1 << 30)
CPU_SIZES: Final = (1 << 16, 1 << 20, 8 << 20)
_LOOK_S: Final = 0.05
_ECHO_S: Final = 2.0  # after the first error the others are given this long to say theirs
_LEAVE_S: Final = 2.0
_TEXT: Final = 600
_DOING: Final[Mapping[str, str]] = {  # by the last phase that was said
    "": "starting",
    "import": "importing torch",
    "device": "starting the card",
    "computed": "before joining the others",
    "join": "joining the others",
    "reduce": "summing",
    "measured": "summing",
    "done": "ending",
}
_BEFORE: Final = ("", "import", "device")  # phases of a rank that is not yet up to talking


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What every try has in common. `fault` is for tests: what one rank is to do wrong."""

    python: str
    env: Mapping[str, str]
    on_cards: bool
    start_s: float = 40.0  # until torch is there and the card has computed
    silent_s: float = 20.0  # without a word, of a rank that is talking
    fault: Mapping[str, object] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return CARD_SIZES if self.on_cards else CPU_SIZES


def try_all(wish: Wish, groups: Sequence[tuple[int, ...]], env: Mapping[str, str], *, limit_s: float) -> list[Trial]:
    """One trial for each group of cards, all at once; back within `limit_s` and a few seconds."""
    folder = Path(tempfile.mkdtemp(prefix="vramfarm-comm-"))
    runs = [_Run(wish, group, env, folder / str(at), limit_s) for at, group in enumerate(groups)]
    try:
        while not all([run.look() for run in runs]):  # noqa: C419  # each is looked at
            time.sleep(_LOOK_S)
        return [run.trial() for run in runs]
    finally:
        for run in runs:
            run.end()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    report: Path
    offset: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> bool:
        """Whether it has said something new."""
        with suppress(OSError):
            raw = self.report.read_bytes()[self.offset :]
            whole = raw[: raw.rfind(b"\n") + 1]
            self.offset += len(whole)
            self.lines += [json.loads(line) for line in whole.splitlines()]
            return bool(whole)
        return False

    @property
    def phase(self) -> str:
        return str(self.lines[-1]["phase"]) if self.lines else ""

    @property
    def state(self) -> str:
        """T: stopped; D: hangs in the kernel."""
        with suppress(OSError, IndexError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return ""


class _Run:
    """The processes of one group."""

    def __init__(  # made in one place
        self, wish: Wish, cards: tuple[int, ...], env: Mapping[str, str], folder: Path, limit_s: float
    ) -> None:
        folder.mkdir()
        self._wish, self._cards, self._env, self._folder = wish, cards, env, folder
        self._began = time.monotonic()
        self._heard = self._began
        self._limit_s = limit_s
        self._failed_at: float | None = None
        self._why = ""
        self._ranks = [self._start(rank) for rank in range(len(cards))]

    def _start(self, rank: int) -> _Rank:
        wish, world = self._wish, len(self._cards)
        report = self._folder / f"rank-{rank}.jsonl"
        order = {
            "rank": rank,
            "world": world,
            "card": self._cards[rank] if wish.on_cards else None,
            "backend": "nccl" if wish.on_cards else "gloo",
            "store": str(self._folder / "store"),
            "report": str(report),
            "sizes": wish.sizes,
            "limit_s": int(self._limit_s) + 10,
            "fault": wish.fault or {},
        }
        env = {**wish.env, **self._env}
        with (self._folder / f"rank-{rank}.log").open("wb") as log:
            process = subprocess.Popen(
                (wish.python, "-I", str(SCRIPT), json.dumps(order)),
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return _Rank(process, report)

    def look(self) -> bool:
        """Whether it is over, one way or another."""
        now = time.monotonic()
        codes = [rank.process.poll() for rank in self._ranks]
        if any([rank.read() for rank in self._ranks]):  # noqa: C419  # each is read
            self._heard = now
        if all(code is not None for code in codes):
            return True
        if any(codes):
            self._failed_at = self._failed_at or now
        if self._failed_at is not None:
            return now > self._failed_at + _ECHO_S
        starting = any(rank.phase in _BEFORE for rank in self._ranks)
        patience = self._wish.start_s if starting else self._wish.silent_s
        if now > self._heard + patience:
            self._why = f"no word for {patience:.0f} s"
        elif now > self._began + self._limit_s:
            self._why = f"no end within {self._limit_s:.0f} s"
        return bool(self._why)

    def trial(self) -> Trial:
        ending, message, phase, silent = self._judge()
        measured = [line for line in self._ranks[0].lines if line["phase"] == "measured"]
        return Trial(
            cards=self._cards,
            ending=ending,
            env=self._env,
            message=message,
            phase=phase,
            silent=silent,
            speeds=tuple((line["size"], _bus_bandwidth(line, len(self._cards))) for line in measured),
            num_wrong=sum(line["wrong"] for rank in self._ranks for line in rank.lines if line["phase"] == "measured"),
            devices=tuple(line for rank in self._ranks for line in rank.lines if line["phase"] == "computed"),
            took_s=time.monotonic() - self._began,
        )

    def _judge(self) -> tuple[TrialEnding, str, str, tuple[int, ...]]:
        """How it ended, in words, in which phase, and who stayed behind."""
        errors = sorted(
            (line["at"], at, line["text"], rank.lines[-2]["phase"])
            for at, rank in enumerate(self._ranks)
            for line in rank.lines
            if line["phase"] == "error"
        )
        if errors:  # the first by the machine's clock: the others' are its echo
            _, at, text, phase = errors[0]
            if phase == "import":
                return TrialEnding.LATE, f"torch cannot be imported by itself (python -I): {_line(text)}", phase, ()
            return TrialEnding.ERROR, f"{self._name(at)}: {_line(text)}{self._warning(at)}", phase, ()
        dead = next((at for at, rank in enumerate(self._ranks) if rank.process.poll() not in {None, 0}), None)
        if dead is not None:
            return TrialEnding.ERROR, f"{self._name(dead)} died: {self._last_words(dead)}", self._ranks[dead].phase, ()
        if self._why:
            return self._judge_silence()
        wrong = any(line["wrong"] for rank in self._ranks for line in rank.lines if line["phase"] == "measured")
        return (TrialEnding.WRONG, "sums came out wrong", "done", ()) if wrong else (TrialEnding.GOOD, "", "done", ())

    def _judge_silence(self) -> tuple[TrialEnding, str, str, tuple[int, ...]]:
        """Who stayed behind; nobody where all stand at the same place."""
        told = [len(rank.lines) for rank in self._ranks]
        odd = tuple(at for at, rank in enumerate(self._ranks) if rank.state in {"T", "D"})
        behind = odd or tuple(at for at, count in enumerate(told) if count == min(told) < max(told))
        first = self._ranks[behind[0] if behind else 0]
        who = " and ".join(map(self._name, behind)) or "all of them"
        state = {"T": ", stopped", "D": ", hanging in the kernel"}.get(first.state, "")
        ending = TrialEnding.LATE if first.phase in {"", "import"} and not odd else TrialEnding.SILENT
        return ending, f"{self._why}: {who}, {_DOING[first.phase]}{state}", first.phase, behind

    def _name(self, rank: int) -> str:
        return f"card {self._cards[rank]}" if self._wish.on_cards else f"rank {rank}"

    def _log(self, rank: int) -> list[str]:
        return (self._folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()

    def _warning(self, rank: int) -> str:
        """What NCCL itself says is nearer to the cause than what torch makes of it."""
        found = next((line for line in self._log(rank) if "NCCL WARN" in line), "")
        return f" ({_line(found.partition('NCCL WARN')[2])})" if found else ""

    def _last_words(self, rank: int) -> str:
        lines = self._log(rank)
        code = self._ranks[rank].process.poll()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"{how}{f', {lines[-1]}' if lines else ''}"

    def end(self) -> None:
        """Ranks that hang in the kernel are left: their own alarm ends them, if anything does."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            _leave(rank.process)


def _leave(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.returncode = -9  # Popen must not complain of it


def _line(text: str) -> str:
    return " ".join(text.split())[:_TEXT]


def _bus_bandwidth(line: Mapping[str, Any], num_ranks: int) -> float:
    """GB/s as nccl-tests count it: what crosses the slowest link, whatever the number of cards."""
    return float(line["size"] / max(line["seconds"], 1e-9) * 2 * (num_ranks - 1) / num_ranks / 1e9)
