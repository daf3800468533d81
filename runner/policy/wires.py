"""
What runs between cards, how fast it is, and below which all-reduce it is suspicious. Data, with its sources.

Floors are about three quarters of the lowest healthy figure that was published for such a machine
(bus bandwidth, 1 GiB or more, GB/s of 10^9 bytes). Those without a published figure are derived
from the line rate: a machine is never refused on a derived one alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Floor:
    """Suspicious below `gb_per_s`; `sourced`: healthy machines were published."""

    gb_per_s: float
    sourced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """
    One kind of link. `floors` is by number of cards; `nvlinks` are the counts that `topo -m` shows (NV12);
    `gen` is of PCIe, 0 for NVLink; `speed` is GB/s as the vendor counts, from and to, where it is told.
    """

    title: str
    floors: Mapping[int, Floor]
    models: re.Pattern[str]
    nvlinks: frozenset[int] = frozenset()
    gen: int = 0
    peer: bool = True
    switched: bool = False
    max_cards: int = 1024
    speed: tuple[int, int] | None = None
    sharp_below: float = 0.0  # 8 cards below it: in-switch reduction (NVLS) is off; a remark, not a fault
    source: str = ""


def _floors(**by_cards: tuple[float, str]) -> dict[int, Floor]:
    """`n8=(190, "S")`: 190 GB/s with 8 cards, sourced; D is derived."""
    return {int(name[1:]): Floor(value, sourced=basis == "S") for name, (value, basis) in by_cards.items()}


_GEN3: Final = re.compile(r"RTX 20\d0|TITAN|T4\b|P100|P40|GTX|V100-PCI|RTX [568]000$|Quadro", re.IGNORECASE)
_GEN5: Final = re.compile(r"RTX 50\d0|RTX PRO|H100 PCIe|H100 NVL|H200 NVL", re.IGNORECASE)
_GEN4: Final = re.compile(r"RTX [34]0\d0|\bA(?:2|10|10G|16|30|40|4000|5000|6000)\b|\bL4\b|\bL40S?\b|A[18]00.*PCI|Ada")

WIRES: Final = (
    Wire(
        title="PCIe 3.0 x16, through system memory",
        floors=_floors(n2=(4, "D"), n4=(3, "D"), n8=(3, "D")),
        models=_GEN3,
        gen=3,
        peer=False,
        source="half of PCIe 4.0",
    ),
    Wire(
        title="PCIe 3.0 x16, peer to peer",
        floors=_floors(n2=(8, "D"), n4=(8, "D"), n8=(6, "D")),
        models=_GEN3,
        gen=3,
        source="12 to 13 GB/s usable",
    ),
    Wire(
        title="PCIe 4.0 x16, through system memory",
        floors=_floors(n2=(8, "D"), n4=(7, "D"), n8=(7, "S")),
        models=_GEN4,
        gen=4,
        peer=False,
        speed=(25, 32),
        source="8 x RTX 4090: 14.5; 2 to 4 is known bad",
    ),
    Wire(
        title="PCIe 4.0 x16, peer to peer",
        floors=_floors(n2=(17, "D"), n4=(17, "S"), n8=(12, "D")),
        models=_GEN4,
        gen=4,
        speed=(25, 32),
        source="RTX 4090: 25.3 (4), 24.6 (6); A100 PCIe across pairs: 20, NVIDIA/nccl-tests#178",
    ),
    Wire(
        title="PCIe 5.0 x16, through system memory",
        floors=_floors(n2=(15, "D"), n4=(20, "S"), n8=(15, "S")),
        models=_GEN5,
        gen=5,
        peer=False,
        speed=(50, 64),
        source="RTX 5090: 35 (4), 28 (8), NVIDIA/nccl#1639; 8.1 is known bad",
    ),
    Wire(
        title="PCIe 5.0 x16, peer to peer",
        floors=_floors(n2=(28, "S"), n4=(25, "S"), n8=(18, "S")),
        models=_GEN5,
        gen=5,
        speed=(50, 64),
        source="RTX PRO 6000: 30 to 39 (4), 22 untuned to 46 (8), local-inference-lab/rtx6kpro; 40.7 (2)",
    ),
    Wire(
        title="NVLink bridge of two links",
        floors=_floors(n2=(28, "D")),
        models=re.compile(r"RTX 20\d0|TITAN RTX|RTX [568]000$|Quadro RTX", re.IGNORECASE),
        nvlinks=frozenset({1, 2}),
        max_cards=2,
        source="50 GB/s on the wire",
    ),
    Wire(
        title="NVLink bridge of four links",
        floors=_floors(n2=(30, "D")),
        models=re.compile(r"RTX 3090|\bA(?:30|40|5000|6000)\b"),
        nvlinks=frozenset({4}),
        max_cards=2,
        speed=(112, 112),
        source="56 GB/s on the wire in each direction",
    ),
    Wire(
        title="NVLink bridge of twelve links",
        floors=_floors(n2=(150, "S")),
        models=re.compile(r"A[18]00.*PCI|H100 (?:PCIe|NVL)|H200 NVL", re.IGNORECASE),
        nvlinks=frozenset({12}),
        max_cards=2,
        speed=(600, 600),
        source="A100 PCIe: 208, NVIDIA/nccl-tests#178; Azure asks for 193 and 208; 115 is known bad, NVIDIA/nccl#1161",
    ),
    Wire(
        title="V100 board, NVLink mesh with single links",
        floors=_floors(n2=(15, "D"), n4=(40, "D"), n8=(95, "S")),
        models=re.compile(r"V100-SXM"),
        nvlinks=frozenset({1, 2, 3}),
        source="8 x V100: 129 to 135; Azure asks for 110",
    ),
    Wire(
        title="A100 four-card board, NVLink mesh",
        floors=_floors(n2=(60, "D"), n4=(130, "D")),
        models=re.compile(r"A100-SXM"),
        nvlinks=frozenset({4}),
        max_cards=4,
        speed=(600, 600),
        source="77 a pair, all-to-all 175 to 183",
    ),
    Wire(
        title="H100 four-card board, NVLink mesh",
        floors=_floors(n2=(90, "D"), n4=(195, "D")),
        models=re.compile(r"GH200|H[12]00(?!.*(?:PCIe|NVL))", re.IGNORECASE),
        nvlinks=frozenset({6}),
        max_cards=4,
        speed=(900, 900),
        source="1.5 times the A100 board",
    ),
    Wire(
        title="A100 NVSwitch",
        floors=_floors(n2=(170, "D"), n4=(180, "D"), n8=(190, "S")),
        models=re.compile(r"A100-SXM"),
        nvlinks=frozenset({12}),
        switched=True,
        speed=(600, 600),
        source="228 to 235, Azure/AI-benchmarking-guide, stas00/ml-engineering, NVIDIA/nccl-tests#149, #175",
    ),
    Wire(
        title="H800 or A800 NVSwitch",
        floors=_floors(n2=(110, "D"), n4=(130, "D"), n8=(150, "S")),
        models=re.compile(r"[AH]800(?!.*PCI)", re.IGNORECASE),
        nvlinks=frozenset({8}),
        switched=True,
        speed=(400, 400),
        source="8 x H800: 215, NVIDIA/nccl#1374; A800 is derived",
    ),
    Wire(
        title="H100 or H200 NVSwitch",
        floors=_floors(n2=(240, "D"), n4=(280, "S"), n8=(330, "S")),
        models=re.compile(r"H[12]00(?!.*(?:PCIe|NVL))", re.IGNORECASE),
        nvlinks=frozenset({18}),
        switched=True,
        speed=(900, 900),
        sharp_below=420,
        source="363 (4), ring 366 and NVLS 480 (8), stas00/ml-engineering, Azure/AI-benchmarking-guide, NVIDIA/nccl-tests#212",
    ),
    Wire(
        title="B200 NVSwitch",
        floors=_floors(n2=(420, "D"), n4=(520, "S"), n8=(600, "S")),
        models=re.compile(r"B[23]00"),
        nvlinks=frozenset({18}),
        switched=True,
        sharp_below=760,
        source="673 (4), ring 682 and NVLS 838 (8), stas00/ml-engineering",
    ),
)

# Whatever the link, these are broken.
DEAD_BELOW: Final = 3.0  # two cards and more
DEAD_PAIR_BELOW: Final = 30.0  # a pair on NVLink
DEAD_SWITCH_BELOW: Final = 100.0  # NVSwitch: NVLink is not used at all

# An 8B model on four cards, ZeRO-3 or FULL_SHARD: what travels per card and step.
SHARDED_STEP_GB: Final = (35, 50)


def possible_wires(
    models: Iterable[str] = (),
    *,
    num_cards: int,
    nvlinks: int | None = None,
    peer: bool | None = None,
) -> tuple[Wire, ...]:
    """
    Return the kinds of link that such a machine may have, from what is known of it.

    `nvlinks` is the largest count of NVLinks of a pair, 0 where the topology shows PCIe only,
    None where it was not read.
    """
    known = tuple(models)
    fitting = [
        wire
        for wire in WIRES
        if num_cards <= wire.max_cards
        and (nvlinks is None or (nvlinks in wire.nvlinks if nvlinks else wire.gen))
        and (peer is None or not wire.gen or wire.peer is peer)
    ]
    named = [wire for wire in fitting if known and all(wire.models.search(model) for model in known)]
    return tuple(named or fitting)


def floor(wires: Iterable[Wire], num_cards: int) -> Floor | None:
    """Return the lowest floor of these links for this many cards."""
    found = [lowest for wire in wires if (lowest := _between(wire.floors, num_cards))]
    return min(found, key=lambda one: one.gb_per_s, default=None)


def _between(floors: Mapping[int, Floor], num_cards: int) -> Floor | None:
    """The floor for this number, or the lower one of its neighbours'; more than the most is taken for the most."""
    if num_cards in floors:
        return floors[num_cards]
    below = [n for n in floors if n < num_cards]
    above = [n for n in floors if n > num_cards]
    near = [floors[n] for n in (max(below, default=0), min(above, default=0)) if n]
    return min(near, key=lambda one: one.gb_per_s, default=None)
