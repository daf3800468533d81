"""
What the cards do, asked of nvidia-smi: rarely, in a process of its own, and never waited for. A
card that is lost makes it hang, so it has a time limit and whoever asks goes on without an answer.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from typing import IO, Final

from runner.facts import CardPulse
from runner.supervise import process

_ANSWER_S: Final = 20.0
_REASONS: Final = {
    "hw_thermal_slowdown": "too hot",
    "sw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "power brake",
    "hw_slowdown": "hardware slowdown",
}
QUERY: Final = ",".join([
    "index",
    "utilization.gpu",
    "power.draw",
    "enforced.power.limit",
    *(f"clocks_throttle_reasons.{reason}" for reason in _REASONS),
])  # fmt: skip
_NUM_NUMBERS: Final = 4


class Cards:
    """Asks at most every so often; the last answer stays until there is a newer one."""

    def __init__(self, program: str = "nvidia-smi") -> None:
        self._program = shutil.which(program)
        self._asked_s: float | None = None
        self._asking: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None
        self.last: tuple[CardPulse, ...] = ()

    def look(self, now_s: float, *, every_s: float) -> tuple[CardPulse, ...]:
        """Return the last answer; ask again if it is time. None are known where nobody answers."""
        if self._asking is not None:
            self._collect(now_s)
        due = self._asked_s is None or now_s - self._asked_s >= every_s
        if self._program and self._asking is None and due:
            self._asked_s, self._answer = now_s, tempfile.TemporaryFile()  # noqa: SIM115  # closed when the answer is read
            argv = (self._program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
            self._asking = process.spawn(argv, env=process.environ(), cwd="/", stdout=self._answer)
        return self.last

    def _collect(self, now_s: float) -> None:
        assert self._asking is not None
        assert self._answer is not None
        assert self._asked_s is not None
        code = self._asking.poll()
        if code is None and now_s - self._asked_s < _ANSWER_S:
            return
        if code is None:
            self._asking.kill()  # in the kernel it may stay; what it knew is old by now
        self._answer.seek(0)
        self.last = parse(self._answer.read(1 << 16).decode(errors="replace")) if code == 0 else ()
        self._answer.close()
        self._asking = self._answer = None


def parse(table: str) -> tuple[CardPulse, ...]:
    """One card a line; `[N/A]` and the like are not known."""
    cards = []
    for line in table.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != _NUM_NUMBERS + len(_REASONS) or not fields[0].isdecimal():
            continue
        held = dict.fromkeys(
            words for words, told in zip(_REASONS.values(), fields[_NUM_NUMBERS:], strict=True) if told == "Active"
        )
        use, power, limit = (_number(field) for field in fields[1:_NUM_NUMBERS])
        cards.append(
            CardPulse(index=int(fields[0]), use_percent=use, power_w=power, limit_w=limit, throttled=tuple(held))
        )
    return tuple(cards)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
