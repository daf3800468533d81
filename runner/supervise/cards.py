"""
What the cards do, asked of nvidia-smi: rarely, in a process of its own, and never waited for. A
card that is lost makes it hang, so it has a time limit and whoever asks goes on without an answer.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import takewhile
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
    "uuid",
    "utilization.gpu",
    "utilization.memory",
    "power.draw",
    "enforced.power.limit",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    *(f"clocks_throttle_reasons.{reason}" for reason in _REASONS),
])  # fmt: skip
_NUM_FIELDS: Final = 9
_MIB: Final = 1 << 20


class Cards:
    """
    Asks at most every so often; the last answer stays until there is a newer one.

    Of the cards that CUDA_VISIBLE_DEVICES, `visible`, lets through only the first `count` are told, numbered
    as training numbers them: what somebody else does on the others is no sign of life.
    """

    def __init__(self, program: str = "nvidia-smi", *, visible: str | None = None, count: int | None = None) -> None:
        self._program, self._visible, self._count = shutil.which(program), visible, count
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
        told = self._answer.read(1 << 16).decode(errors="replace") if code == 0 else ""
        self.last = parse(told, self._visible)[: self._count]
        self._answer.close()
        self._asking = self._answer = None


def parse(table: str, visible: str | None = None) -> tuple[CardPulse, ...]:
    """One card a line; `[N/A]` and the like are not known. With `visible`, those cards, in that order."""
    rows = [[field.strip() for field in line.split(",")] for line in table.splitlines()]
    known = [row for row in rows if len(row) == _NUM_FIELDS + len(_REASONS) and row[0].isdecimal()]
    if visible is None:
        return tuple(_card(int(row[0]), row) for row in known)
    wanted = [name.strip() for name in visible.split(",") if name.strip()]
    found = (next((row for row in known if _is_called(row, name)), None) for name in wanted)
    return tuple(_card(at, row) for at, row in enumerate(takewhile(lambda row: row is not None, found)) if row)


def _is_called(row: Sequence[str], name: str) -> bool:
    return name == row[0] or (name.startswith("GPU-") and row[1].startswith(name))


def _card(index: int, row: Sequence[str]) -> CardPulse:
    use, memory, power, limit, used, total, temperature = (_number(field) for field in row[2:_NUM_FIELDS])
    held = [words for words, told in zip(_REASONS.values(), row[_NUM_FIELDS:], strict=True) if told == "Active"]
    return CardPulse(
        index=index,
        use_percent=use,
        memory_percent=memory,
        power_w=power,
        limit_w=limit,
        used_bytes=None if used is None else int(used * _MIB),
        total_bytes=None if total is None else int(total * _MIB),
        temperature=temperature,
        throttled=tuple(dict.fromkeys(held)),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
