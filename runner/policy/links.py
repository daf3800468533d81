"""What lies between the cards, and what it means for training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from runner.facts import Fabric, FabricState, Finding, Pair, PeerAccess, Topology
from runner.policy.findings import ok, refuse, swap, warn
from runner.policy.wires import SHARDED_STEP_GB, Wire, floor, possible_wires

_PCIE: Final = ("SYS", "SOC", "NODE", "PHB", "PXB", "PIX")  # weakest first
_NVLINK: Final = re.compile(r"NV(\d{1,2})")
_SWITCH_FROM: Final = 8  # a board with fewer links a pair has no NVSwitch, and its pairs may differ
_PATHS: Final = {
    "SYS": "a path across both CPUs, the slowest",
    "SOC": "a path across both CPUs, the slowest",
    "NODE": "a path across the CPU",
    "PHB": "the CPU's PCIe bridge",
    "PXB": "several PCIe switches",
    "PIX": "one PCIe switch",
}


class LinkClass(StrEnum):
    """NVLINK: every pair. MIXED: some. SINGLE: one card. NONE: no card. UNKNOWN: it cannot be read."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    MIXED = "mixed"
    SINGLE = "single"
    NONE = "none"
    UNKNOWN = "unknown"


def link_class(topology: Topology) -> LinkClass:
    if len(topology.gpus) < 2:  # noqa: PLR2004  # a pair
        return LinkClass.SINGLE if topology.gpus else LinkClass.NONE
    num_nvlink = sum(nvlinks(link) > 0 for _, _, link in topology.pairs)
    if num_nvlink == len(topology.pairs):
        return LinkClass.NVLINK
    return LinkClass.MIXED if num_nvlink else LinkClass.PCIE


def nvlinks(link: str) -> int:
    """How many NVLinks a link is made of; 0 for PCIe."""
    match = _NVLINK.fullmatch(link)
    return int(match[1]) if match else 0


def weakest_link(pairs: Iterable[Pair]) -> str | None:
    """The weakest link as it was printed: a ring of all cards is as slow as it."""
    return min((link for _, _, link in pairs), key=_rank, default=None)


def groups(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Cards that reach each other over NVLink, directly or over others. One group: a ring need not leave NVLink."""
    group_of = {int(gpu.removeprefix("GPU")): frozenset({int(gpu.removeprefix("GPU"))}) for gpu in topology.gpus}
    for one, other, link in topology.pairs:
        if nvlinks(link):
            joined = group_of[one] | group_of[other]
            group_of |= dict.fromkeys(joined, joined)
    return tuple(sorted(tuple(sorted(group)) for group in set(group_of.values())))


def wires(topology: Topology, models: Iterable[str] = (), *, peer: bool | None = None) -> tuple[Wire, ...]:
    """The kinds of link that set the pace of an all-reduce over all these cards."""
    most = max((nvlinks(link) for _, _, link in topology.pairs), default=0)
    unknown = topology.hides_nvlink and most == 0
    count = None if unknown else most if len(groups(topology)) == 1 else 0
    return possible_wires(models, num_cards=len(topology.gpus), nvlinks=count, peer=peer)


# -------------------------------------------------------------------------------- judgements


def judge_topology(topology: Topology) -> tuple[Finding, ...]:
    """What the links are, what they mean for DDP and for ZeRO-3 or FULL_SHARD, and what is odd about them."""
    found = [_describe(topology), _expect(topology), *_odd(topology)]
    return tuple(finding for finding in found if finding)


def _describe(topology: Topology) -> Finding:
    weakest = weakest_link(topology.pairs)
    match link_class(topology):
        case LinkClass.NONE | LinkClass.UNKNOWN:
            return refuse("links", "no card was found", "start the container with --gpus all")
        case LinkClass.SINGLE:
            return ok("links", "one card: nothing has to travel between cards")
        case LinkClass.NVLINK:
            message = f"every pair is linked by NVLink, {weakest} at the least: any strategy will do; {_SHARDED} takes a fraction of a second"
            return ok("links", message)
        case LinkClass.PCIE:
            told = warn if _is_far(weakest) else ok
            return told("links", f"no NVLink: {_over_pcie(weakest)}", _PCIE_HINT)
        case LinkClass.MIXED:
            return _mixed(topology, weakest)


_SHARDED: Final = f"what ZeRO-3 and FULL_SHARD send ({SHARDED_STEP_GB[0]} to {SHARDED_STEP_GB[1]} GB per card and step, 8B model on four cards)"
_PCIE_HINT: Final = (
    "DDP is fine for models that fit on one card (about 1.7 to 1.9 times the speed on two cards, 3 to 3.7 on four); "
    "else ZeRO-2 or SHARD_GRAD_OP before ZeRO-3, or a machine with SXM cards"
)


def _over_pcie(weakest: str | None) -> str:
    return f"the weakest pair goes over {weakest}, {_PATHS[weakest or 'SYS']}; {_SHARDED} takes seconds, and the cards wait"


def _mixed(topology: Topology, weakest: str | None) -> Finding:
    together = groups(topology)
    if len(together) == 1:
        message = "NVLink reaches every card, not every pair directly: rings go over NVLink, other traffic between distant cards is slower"
        return ok("links", message)
    told = ", ".join("-".join(map(str, group)) for group in together)
    message = f"NVLink joins the cards {told} only; between these groups {_over_pcie(weakest)}"
    return warn("links", message, "shard within a group (HYBRID_SHARD), or use the cards of one group")


def _expect(topology: Topology) -> Finding | None:
    """The speed to expect, and the floor: of all links that these may be, the lowest."""
    likely = wires(topology)
    lowest = floor(likely, len(topology.gpus))
    if lowest is None or not topology.pairs:
        return None
    speeds = {wire.title.partition(",")[0]: wire.speed for wire in likely if wire.speed}
    told = " or ".join(
        f"{title} ({low if low == high else f'{low} to {high}'} GB/s)" for title, (low, high) in speeds.items()
    )
    about = f"{told}: an" if told else "an"
    basis = "" if lowest.sourced else ", which is derived from the line rate"
    message = f"{about} all-reduce of 1 GiB is suspicious below {lowest.gb_per_s:g} GB/s of bus bandwidth{basis}"
    return ok("links.expected", message)


def _odd(topology: Topology) -> Iterable[Finding | None]:
    if topology.hides_nvlink:
        message = "this view (topo -mp) shows PCIe paths only: NVLink may be there and is hidden"
        yield warn("links.view", message, "read `nvidia-smi topo -m`")
    if topology.doubtful:
        told = ", ".join(f"{one}-{other}" for one, other, _ in topology.doubtful)
        yield warn("links.doubtful", f"the pairs {told} are told differently from either side", "read it once more")
    yield _uneven(topology)


def _uneven(topology: Topology) -> Finding | None:
    """Behind an NVSwitch all pairs have the same number of links; a card with fewer has lost some."""
    counts = [nvlinks(link) for _, _, link in topology.pairs]
    most = max(counts, default=0)
    if most < _SWITCH_FROM or min(counts) in {0, most}:
        return None
    short = Counter(gpu for one, other, link in topology.pairs for gpu in (one, other) if nvlinks(link) < most)
    worst = [gpu for gpu, times in short.items() if times == max(short.values())]
    told = ", ".join(f"GPU{gpu}" for gpu in sorted(worst))
    message = f"NVLink is uneven, {weakest_link(topology.pairs)} where others have NV{most}: links of {told} are down"
    return warn("links.uneven", message, "swap this machine and tell support")


def judge_peer_access(access: PeerAccess, *, link: LinkClass | None = None) -> tuple[Finding, ...]:
    """Whether cards read each other's memory. Without it data goes through system memory, and /dev/shm."""
    denied = [(one, other, status) for one, other, status in access.pairs if status != "OK"]
    if not access.pairs:
        return (ok("p2p", "one card: there is no peer to read from"),)
    if not denied:
        return (ok("p2p", "every pair may read the other's memory; only a communication test proves that it works"),)
    told = ", ".join(f"{one}-{other} ({_WHY.get(status, status)})" for one, other, status in denied[:6])
    more = f" and {len(denied) - 6} more" if len(denied) > 6 else ""  # noqa: PLR2004  # as many as are named
    message = f"no peer access: {told}{more}; data between them goes through system memory"
    if link is LinkClass.NVLINK:
        return (swap("p2p", f"{message}, although NVLink is there"),)
    hint = "usual on consumer cards: inference and DDP on small models are fine, ZeRO-3 and FULL_SHARD on large ones are slow"
    return (warn("p2p", message, hint),)


_WHY: Final = {
    "NS": "not supported",
    "CNS": "the chipset does not support it",
    "GNS": "the card does not support it",
    "TNS": "the topology does not support it",
    "DR": "switched off in the driver",
    "U": "unknown",
}


def fabric_applies(fabric: Fabric) -> bool:
    return any(_applies(card) for card in fabric.cards)


def fabric_ready(fabric: Fabric) -> bool | None:
    """Whether every card has joined its NVLink fabric and is well there; None where there is none to join."""
    return all(_is_ready(card) for card in fabric.cards if _applies(card)) if fabric_applies(fabric) else None


def judge_fabric(fabric: Fabric) -> tuple[Finding, ...]:
    """A fabric that is not ready is `system not yet initialized` in CUDA: nothing in the container mends it."""
    unready = [(at, card) for at, card in enumerate(fabric.cards) if _applies(card) and not _is_ready(card)]
    if not fabric_applies(fabric):
        return (ok("fabric", "these cards have no NVLink fabric to join"),)
    if not unready:
        message = "every card has joined the NVLink fabric"
        if any(card.health.lower() == "limited capacity" for card in fabric.cards):
            return (warn("fabric", f"{message}, with limited capacity"),)
        return (ok("fabric", message),)
    at, card = unready[0]
    detail = ", ".join(
        filter(None, (f"state {card.state}", card.status and f"status {card.status}", card.health, *card.troubles))
    )
    message = f"{len(unready)} of {len(fabric.cards)} cards are not ready in the NVLink fabric; card {at}: {detail}"
    if all(card.recovering for _, card in unready):
        hint = "wait a minute and read again; if it stays, swap this machine"
        return (warn("fabric", f"{message}: it is recovering", hint),)
    hint = "the host's fabric manager is down or a link is broken (CUDA says 'system not yet initialized'): swap this machine and tell support"
    return (refuse("fabric", message, hint),)


def _applies(card: FabricState) -> bool:
    return card.state.lower() not in {"", "n/a", "not supported", "[n/a]"}


def _is_ready(card: FabricState) -> bool:
    joined = card.state.lower() == "completed" and card.status.lower() in {"success", "n/a", ""}
    well = card.health.lower() == "healthy" or not (card.troubles or card.health.lower() == "unhealthy")
    return joined and well and not card.recovering


# ----------------------------------------------------------------------------------- helpers


def _rank(link: str) -> int:
    return 100 + nvlinks(link) if nvlinks(link) else _PCIE.index(link) if link in _PCIE else -1


def _is_far(link: str | None) -> bool:
    return link in {"SYS", "SOC", "NODE"}
