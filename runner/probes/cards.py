"""What the cards are doing now: use, memory, power, temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from runner.probes.command import ask

_FIELDS: Final = "index,utilization.gpu,memory.used,memory.total,power.draw,power.limit,temperature.gpu"
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """One card; None where the driver does not say. Use in percent, power in watts, temperature in °C."""

    index: int
    use: float | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: float | None = None


def read_cards(timeout_s: float = 5.0) -> tuple[CardUse, ...]:
    """Ask `nvidia-smi`; nothing where there is none, it fails, or it does not answer in time."""
    answer = ask(("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"), timeout_s=timeout_s)
    return parse_cards(answer.out) if answer.code == 0 else ()


def parse_cards(text: str) -> tuple[CardUse, ...]:
    """The table that `read_cards` asks for; a line that is not of it is passed over."""
    return tuple(card for line in text.splitlines() if (card := _parse(line)) is not None)


def _parse(line: str) -> CardUse | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != _FIELDS.count(",") + 1 or not fields[0].isdecimal():
        return None
    use, used, total, power, limit, temperature = map(_number, fields[1:])
    return CardUse(
        index=int(fields[0]),
        use=use,
        used_bytes=None if used is None else int(used * _MIB),
        total_bytes=None if total is None else int(total * _MIB),
        power=power,
        power_limit=limit,
        temperature=temperature,
    )


def _number(text: str) -> float | None:
    """`[N/A]`, `[Not Supported]`, `[Unknown Error]` are no numbers."""
    try:
        return float(text)
    except ValueError:
        return None
