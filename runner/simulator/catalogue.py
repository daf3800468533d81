"""
Machines that can be rented here, and which of them fits a wish.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from runner.simulator.model import Machine, ServerCreate


def _machine(  # noqa: PLR0913, PLR0917  # a row of a table
    id_: str, card: tuple[str, str, int], count: int, price: str, cores: int, ram: int, pcie: float, country: str
) -> Machine:
    gpu, name, vram = card
    return Machine.model_validate(
        {
            "id": id_,
            "gpu": gpu,
            "gpu_name": name,
            "count": count,
            "vram_gb_per_card": vram,
            "vram_gb": vram * count,
            "cpu_cores": cores,
            "ram_gb": ram,
            "disk_gb": 500 * count,
            "pcie_gb_s": pcie,
            "driver": "570.124",
            "cuda": "12.8",
            "country": country,
            "max_rental_days": 30,
            "price_per_hour": price,
        }
    )


_4090 = ("rtx-4090", "RTX 4090", 24)
_5090 = ("rtx-5090", "RTX 5090", 32)
_H100 = ("h100", "H100 SXM", 80)
_H200 = ("h200", "H200 SXM", 141)

MACHINES: Final = (
    _machine("m_4090x1", _4090, 1, "0.59", 8, 32, 24.5, "NL"),
    _machine("m_4090x2", _4090, 2, "1.18", 16, 64, 24.5, "NL"),
    _machine("m_4090x4", _4090, 4, "2.36", 32, 128, 24.5, "NL"),
    _machine("m_5090x2", _5090, 2, "1.90", 32, 128, 52.0, "DE"),
    _machine("m_h100x4", _H100, 4, "15.60", 96, 512, 55.0, "FI"),
    _machine("m_h100x8", _H100, 8, "31.20", 192, 1024, 55.0, "FI"),
    _machine("m_h200x8", _H200, 8, "36.00", 192, 2048, 55.0, "FI"),
)


def numbers(text: str) -> tuple[int, ...]:
    """A version to compare number by number: 12.10 is above 12.4."""
    return tuple(int(part) for part in text.split("."))


def choose(machines: Sequence[Machine], wish: ServerCreate) -> Machine | None:
    """The cheapest machine that fits, or None."""
    fitting = [machine for machine in machines if _fits(machine, wish)]
    return min(fitting, key=lambda machine: machine.price_per_hour, default=None)


def _fits(machine: Machine, wish: ServerCreate) -> bool:
    return (
        machine.available
        and wish.machine_id in {None, machine.id}
        and wish.gpu in {None, machine.gpu}
        and wish.count == machine.count
        and wish.disk_gb <= machine.disk_gb
        and wish.rental_days <= machine.max_rental_days
        and (wish.max_price or Decimal("Infinity")) >= machine.price_per_hour
        and (wish.min_ram_gb or 0) <= machine.ram_gb
        and (wish.min_cpu_cores or 0) <= machine.cpu_cores
        and (wish.min_pcie_gb_s or 0) <= machine.pcie_gb_s
        and numbers(wish.min_cuda or "0") <= numbers(machine.cuda)
        and (not wish.countries or machine.country in wish.countries)
    )
