"""What a reading of memory, cards or bandwidth means, and one function for all kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

from runner.facts import (
    Broken,
    BusBandwidth,
    CardTable,
    Fabric,
    Finding,
    MemoryLimit,
    PeerAccess,
    Reading,
    Severity,
    SharedMemory,
    Topology,
)
from runner.policy.findings import ok, refuse, warn
from runner.policy.links import judge_fabric, judge_peer_access, judge_topology
from runner.policy.wires import (
    DEAD_BELOW,
    DEAD_PAIR_BELOW,
    DEAD_SWITCH_BELOW,
    Floor,
    Wire,
    floor,
    possible_wires,
)

_GIB: Final = 1 << 30
_MIB: Final = 1 << 20
_SHARED_MEMORY_NEED: Final = _GIB  # NCCL takes 10 MB a peer and channel, loaders a batch or two a worker


def judge(reading: Reading) -> tuple[Finding, ...]:  # noqa: PLR0911  # one for each kind
    """What a reading means, without knowing more of the machine than it says itself."""
    match reading:
        case Topology():
            return judge_topology(reading)
        case PeerAccess():
            return judge_peer_access(reading)
        case Fabric():
            return judge_fabric(reading)
        case CardTable():
            return judge_cards(reading)
        case SharedMemory():
            return judge_shared_memory(reading)
        case MemoryLimit():
            return judge_memory_limit(reading)
        case BusBandwidth():
            return judge_bandwidth(reading).findings
        case Broken():
            told = refuse if reading.no_cards else warn
            return (told("reading", reading.message, reading.hint),)
    assert_never(reading)


# ------------------------------------------------------------------------------------ memory


class ShmVerdict(StrEnum):
    OK = "ok"
    TOO_SMALL = "too_small"
    FULL = "full"
    TOO_SMALL_AND_FULL = "too_small_and_full"


def shared_memory_verdict(memory: SharedMemory) -> ShmVerdict:
    if memory.size_bytes is None:
        return ShmVerdict.TOO_SMALL  # a program asked in vain
    is_small = memory.size_bytes < _SHARED_MEMORY_NEED
    is_full = memory.free_bytes is not None and memory.free_bytes < memory.size_bytes // 20
    if is_small:
        return ShmVerdict.TOO_SMALL_AND_FULL if is_full else ShmVerdict.TOO_SMALL
    return (
        ShmVerdict.FULL
        if is_full or (memory.free_bytes or _SHARED_MEMORY_NEED) < _SHARED_MEMORY_NEED
        else ShmVerdict.OK
    )


def judge_shared_memory(memory: SharedMemory) -> tuple[Finding, ...]:
    """NCCL and loader workers die of `bus error` or a failed posix_fallocate when it is full."""
    size = memory.size_bytes
    told = f"shared memory (/dev/shm) has {_size(size)}" if size is not None else "shared memory (/dev/shm) ran out"
    asked = f" ({_size(memory.need_bytes)} at once)" if memory.need_bytes else ""
    match shared_memory_verdict(memory):
        case ShmVerdict.OK:
            return (ok("shared_memory", f"{told}: enough for NCCL and loader workers"),)
        case ShmVerdict.FULL:
            hint = "remove what earlier runs left there (ls /dev/shm), or stop what uses it"
            return (warn("shared_memory", f"{told}, {_size(memory.free_bytes)} free: it is full", hint),)
        case ShmVerdict.TOO_SMALL | ShmVerdict.TOO_SMALL_AND_FULL:
            message = f"{told}{asked}: expected {_size(_SHARED_MEMORY_NEED)} or more; NCCL and loader workers will fail with a bus error"
            hint = "start the container with --ipc=host or --shm-size=16g; where that cannot be done: fewer num_workers, NCCL_SHM_DISABLE=1"
            return (warn("shared_memory", message, hint),)


class LimitVerdict(StrEnum):
    UNLIMITED = "unlimited"
    LIMITED = "limited"
    LIMIT_BELOW_HOST = "limit_below_host"


def memory_limit_verdict(limit: MemoryLimit) -> LimitVerdict:
    if limit.limit_bytes is None:
        return LimitVerdict.UNLIMITED
    below = limit.host_bytes is not None and limit.limit_bytes < limit.host_bytes
    return LimitVerdict.LIMIT_BELOW_HOST if below else LimitVerdict.LIMITED


def judge_memory_limit(limit: MemoryLimit) -> tuple[Finding, ...]:
    """What counts for checkpoint staging and loaders is the limit, not what `free` shows."""
    if limit.limit_bytes is None:
        return (ok("memory_limit", "the container's memory has no limit of its own: the machine's counts"),)
    used = f", {_size(limit.current_bytes)} in use" if limit.current_bytes is not None else ""
    host = f"; `free` shows the host's {_size(limit.host_bytes)}, which cannot be used" if limit.host_bytes else ""
    hint = "keep it at or above the cards' memory taken together: checkpoints are staged in it"
    return (ok("memory_limit", f"the container may use {_size(limit.limit_bytes)}{used}{host}", hint),)


# ------------------------------------------------------------------------------------- cards


def judge_cards(table: CardTable) -> tuple[Finding, ...]:
    """Cards that are lost, cards that differ, and PCIe links that are narrower than card and slot allow."""
    found = [
        refuse("cards", problem, "swap this machine: only its owner can reset the card") for problem in table.problems
    ]
    if not found:
        names = sorted(set(table.names))
        told = f": {', '.join(names)}" if names else ""
        say = warn if len(names) > 1 else ok
        found.append(say("cards", f"{len(table.rows)} card{'s' if len(table.rows) != 1 else ''}{told}"))
    if table.silent_rows:
        message = f"{table.silent_rows} lines hold nothing but errors"
        hint = "ask once at a time, without -l; if it stays, the card is in trouble"
        found.append(warn("cards.silent", message, hint))
    narrow = [at for at, link in enumerate(table.pcie) if link.width and link.width_max and link.width < link.width_max]
    if narrow:
        message = f"the PCIe link of card {', '.join(map(str, narrow))} is narrower than its slot allows"
        hint = "loading data is slower there; read it again under load before judging"
        found.append(warn("cards.pcie", message, hint))
    return tuple(found)


# --------------------------------------------------------------------------------- bandwidth

_TRUSTED_FROM: Final = 256 * _MIB  # smaller ones measure the start of a transfer
_PAIR: Final = 2
_TELLING_FROM: Final = 16 * _MIB  # and still smaller ones nothing but that


class BandwidthVerdict(StrEnum):
    """INCONCLUSIVE: too small a size, or too little is known. WRONG: the sums are not correct."""

    OK = "ok"
    SUSPICIOUS = "suspicious"
    INCONCLUSIVE = "inconclusive"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """`floor` is what it was compared with; None where nothing is known of such a machine."""

    verdict: BandwidthVerdict
    floor: Floor | None
    findings: tuple[Finding, ...]


def judge_bandwidth(measured: BusBandwidth, wires: Sequence[Wire] = ()) -> Bandwidth:
    """
    Compare a measurement with the floor of its machine. Without `wires` the models it names must do.

    Refused are wrong sums, what is dead on any link, and what is below a floor that was published;
    a derived floor only warns.
    """
    if measured.num_wrong:
        message = f"{measured.num_wrong} sums came out wrong: no training on these cards can be trusted"
        return _result(BandwidthVerdict.WRONG, None, Severity.REFUSE, message, "swap this machine and tell support")
    ranks, busbw = measured.ranks, _at_most(measured)
    if busbw is None or (ranks is not None and ranks < _PAIR):
        message = "one card has no bus bandwidth" if busbw is not None else "expected a bus bandwidth, found none"
        return _result(
            BandwidthVerdict.INCONCLUSIVE, None, Severity.OK, message, "give the number of cards, and measure 1 GiB"
        )
    likely = tuple(wires) or _by_model(measured)
    lowest = floor(likely, ranks) if ranks else None
    told = f"{busbw:g} GB/s between {ranks or 'an unknown number of'} cards"
    if _is_dead(busbw, ranks, likely):
        return _dead(measured, told, lowest)
    if ranks is None or measured.busbw is None:
        hint = "give the number of cards: bus bandwidth is twice (cards - 1) / cards of it"
        return _result(BandwidthVerdict.INCONCLUSIVE, None, Severity.OK, f"{told} at most", hint)
    if lowest is None or busbw >= lowest.gb_per_s:
        return Bandwidth(
            verdict=BandwidthVerdict.OK,
            floor=lowest,
            findings=(_well(told, lowest), *_remarks(busbw, ranks, likely, measured)),
        )
    return _low(measured, told, lowest)


def _at_most(measured: BusBandwidth) -> float | None:
    """The bus bandwidth, or without the number of cards the most that it can be."""
    return 2 * measured.algbw if measured.busbw is None and measured.algbw is not None else measured.busbw


def _by_model(measured: BusBandwidth) -> tuple[Wire, ...]:
    """Without a model nobody knows that there is NVLink: compared with PCIe."""
    return possible_wires(measured.models, num_cards=measured.ranks or 2, nvlinks=None if measured.models else 0)


def _is_dead(busbw: float, ranks: int | None, wires: Sequence[Wire]) -> bool:
    if busbw < DEAD_BELOW:
        return True
    if not wires or any(wire.gen for wire in wires):
        return False
    return (busbw < DEAD_SWITCH_BELOW and all(wire.switched for wire in wires)) or (
        ranks == _PAIR and busbw < DEAD_PAIR_BELOW
    )


def _dead(measured: BusBandwidth, told: str, lowest: Floor | None) -> Bandwidth:
    if measured.size_bytes is not None and measured.size_bytes < _TELLING_FROM:
        return _too_small(measured, told, lowest)
    hint = "look for NCCL_P2P_DISABLE or NCCL_SHM_DISABLE in the environment and at the fabric; else swap this machine"
    return _result(
        BandwidthVerdict.SUSPICIOUS, lowest, Severity.REFUSE, f"{told}: far too little for any healthy link", hint
    )


def _low(measured: BusBandwidth, told: str, lowest: Floor) -> Bandwidth:
    if measured.size_bytes is not None and measured.size_bytes < _TRUSTED_FROM:
        return _too_small(measured, told, lowest)
    severity = Severity.REFUSE if lowest.sourced else Severity.WARN
    basis = (
        "healthy machines like it do more"
        if lowest.sourced
        else "derived from the line rate: measure again before judging"
    )
    message = f"{told}: suspicious below {lowest.gb_per_s:g} ({basis})"
    return _result(
        BandwidthVerdict.SUSPICIOUS,
        lowest,
        severity,
        message,
        "look at the links with `nvidia-smi topo -m`; swap this machine if it stays",
    )


def _too_small(measured: BusBandwidth, told: str, lowest: Floor | None) -> Bandwidth:
    message = f"{told} at {_size(measured.size_bytes)}: too small a size to judge by"
    return _result(BandwidthVerdict.INCONCLUSIVE, lowest, Severity.OK, message, "measure at 1 GiB or more")


def _well(told: str, lowest: Floor | None) -> Finding:
    against = (
        f"suspicious would be less than {lowest.gb_per_s:g}" if lowest else "no figure is known to compare it with"
    )
    return ok("bandwidth", f"{told}: {against}")


def _remarks(busbw: float, ranks: int, wires: Sequence[Wire], measured: BusBandwidth) -> Iterator[Finding]:
    sharp = min((wire.sharp_below for wire in wires), default=0.0)
    if ranks == 8 and busbw < sharp:  # noqa: PLR2004  # NVLS figures are of eight cards
        yield ok("bandwidth.nvls", f"below {sharp:g}: in-switch reduction (NVLS) seems to be off; slower, not broken")
    if not measured.models and all(wire.gen for wire in wires):
        yield ok("bandwidth.model", "the text names no card, so it was compared with PCIe; on NVLink it would be slow")


def _result(verdict: BandwidthVerdict, lowest: Floor | None, severity: Severity, message: str, hint: str) -> Bandwidth:
    return Bandwidth(verdict=verdict, floor=lowest, findings=(Finding("bandwidth", severity, message, hint),))


# ----------------------------------------------------------------------------------- helpers


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "an unknown size"
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.1f} GiB"
    return f"{size_bytes / _MIB:.1f} MiB" if size_bytes >= _MIB else f"{size_bytes} bytes"
