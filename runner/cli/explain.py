"""`explain`: what a saved reading of a machine means, in plain words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, assert_never

from runner.cli.output import out, out_json
from runner.errors import JobError
from runner.facts import (
    Broken,
    BusBandwidth,
    CardTable,
    Fabric,
    MemoryLimit,
    Pair,
    PeerAccess,
    Reading,
    ReadingKind,
    Severity,
    SharedMemory,
    Topology,
)
from runner.policy.links import LinkClass, fabric_applies, fabric_ready, link_class, weakest_link
from runner.policy.readings import judge, judge_bandwidth, memory_limit_verdict, shared_memory_verdict
from runner.probes.readings import MAX_BYTES, read

_UNREADABLE: Final = JobError.exit_code
_MARKS: Final = {Severity.OK: "ok", Severity.WARN: "warning", Severity.REFUSE: "refuse"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="saved output of a program, or - for standard input")
    parser.add_argument("--json", action="store_true", help="the facts and findings as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        raw = _bytes(args.file)
    except OSError as error:
        raise JobError(
            f"{args.file}: expected a file that can be read, got: {error.strerror}",
            hint="give the path of the saved output, or - to paste it",
        ) from None
    reading = read(raw)
    fields = as_json(reading) | {"truncated": len(raw) > MAX_BYTES}
    if args.json:
        out_json(fields)
    else:
        _tell(reading)
        if fields["truncated"]:
            out(f"warning: only the first {MAX_BYTES >> 20} MiB were read")
    return _UNREADABLE if fields["error"] else 0


def _bytes(name: str) -> bytes:
    """The first bytes of a file: one more than are read, so that a longer one is noticed."""
    if name == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    with Path(name).open("rb") as file:
        return file.read(MAX_BYTES + 1)


# -------------------------------------------------------------------------------------- text


def _tell(reading: Reading) -> None:
    out(_title(reading))
    for finding in judge(reading):
        out(f"{_MARKS[finding.severity]}: {finding.message}")
        if finding.hint:
            out(f"hint: {finding.hint}")


def _title(reading: Reading) -> str:  # noqa: PLR0911  # one for each kind
    match reading:
        case Topology():
            weakest = weakest_link(reading.pairs)
            links = f", link class {link_class(reading)}, weakest link {weakest}" if weakest else ""
            return f"topology: {_cards(len(reading.gpus))}{links}"
        case PeerAccess():
            num_ok = sum(status == "OK" for _, _, status in reading.pairs)
            return f"peer access: {_cards(len(reading.gpus))}, {num_ok} of {len(reading.pairs)} pairs"
        case Fabric():
            return f"NVLink fabric: {_cards(len(reading.cards))} with a fabric block"
        case CardTable():
            return f"cards: {len(reading.rows)} rows"
        case SharedMemory():
            return "shared memory"
        case MemoryLimit():
            return "memory limit of the container"
        case BusBandwidth():
            return "all-reduce measurement"
        case Broken():
            return f"{reading.kind}: {'no usable card' if reading.no_cards else 'cannot be read'}"
    assert_never(reading)


def _cards(count: int) -> str:
    return f"{count} card{'' if count == 1 else 's'}"


# -------------------------------------------------------------------------------------- JSON


def as_json(reading: Reading) -> dict[str, Any]:
    """A reading as scripts get it: its kind's fields, `error`, `message` where it is broken, and the findings."""
    fields = _fields(reading)
    findings = [asdict(finding) for finding in judge(reading)]
    for finding in findings:
        del finding["facts"]
    return {**fields, "error": fields.get("error", False), "findings": findings}


def _fields(reading: Reading) -> dict[str, Any]:  # noqa: PLR0911  # one for each kind
    match reading:
        case Topology():
            return _topology(reading.gpus, reading.pairs, link_class(reading)) | {
                "hidden_nvlink_possible": reading.hides_nvlink
            }
        case PeerAccess():
            return _peer_access(reading.gpus, reading.pairs)
        case Fabric():
            return _fabric(reading)
        case CardTable():
            return _card_table(reading)
        case SharedMemory():
            return {"kind": ReadingKind.SHM} | asdict(reading) | {"verdict": shared_memory_verdict(reading)}
        case MemoryLimit():
            return {
                "kind": ReadingKind.SHM,
                "limit_bytes": reading.limit_bytes,
                "current_bytes": reading.current_bytes,
                "host_total_reported": reading.host_text or None,
                "verdict": memory_limit_verdict(reading),
            }
        case BusBandwidth():
            return _bandwidth(reading)
        case Broken():
            return _broken(reading)
    assert_never(reading)


def _topology(gpus: Iterable[str], pairs: tuple[Pair, ...], links: LinkClass) -> dict[str, Any]:
    return {
        "kind": ReadingKind.TOPO,
        "gpus": list(gpus),
        "pairs": [list(pair) for pair in pairs],
        "link_class": links,
        "weakest_link": weakest_link(pairs),
        "all_pairs_nvlink": links is LinkClass.NVLINK,
    }


def _peer_access(gpus: Iterable[str], pairs: tuple[Pair, ...]) -> dict[str, Any]:
    not_ok = [list(pair) for pair in pairs if pair[2] != "OK"]
    all_ok = not not_ok if pairs else None
    return {
        "kind": ReadingKind.P2P,
        "gpus": list(gpus),
        "pairs": [list(pair) for pair in pairs],
        "p2p_ok": all_ok,
        "p2p_all_ok": all_ok,
        "p2p_any_ok": any(pair[2] == "OK" for pair in pairs),
        "not_ok": not_ok,
    }


def _fabric(fabric: Fabric) -> dict[str, Any]:
    health = [card.health for card in fabric.cards if card.health]
    return {
        "kind": ReadingKind.FABRIC,
        "fabric": [{"state": card.state, "status": card.status} for card in fabric.cards],
        "ready": fabric_ready(fabric),
        "applies": fabric_applies(fabric),
        "health": next((word for word in health if word.lower() != "healthy"), next(iter(health), None)),
        "transient": any(card.recovering for card in fabric.cards),
    }


def _card_table(table: CardTable) -> dict[str, Any]:
    return {
        "kind": ReadingKind.QUERY,
        "rows": len(table.rows),
        "columns": list(table.columns),
        "names": list(table.names),
        "pcie": [{name: value for name, value in asdict(link).items() if value is not None} for link in table.pcie],
        "problems": list(table.problems),
        "error": bool(table.problems),
        **({"message": table.problems[0]} if table.problems else {}),
    }


def _bandwidth(measured: BusBandwidth) -> dict[str, Any]:
    judged = judge_bandwidth(measured)
    return {
        "kind": ReadingKind.BUSBW,
        "ranks": measured.ranks,
        "size_bytes": measured.size_bytes,
        "algbw": measured.algbw,
        "busbw": measured.busbw,
        "avg_bus_bandwidth": measured.average,
        "rows_omitted": measured.rows_omitted,
        "num_wrong": measured.num_wrong,
        "verdict": judged.verdict,
        "suspicious_below": judged.floor.gb_per_s if judged.floor else None,
        **{f"busbw_{ranks}": busbw for ranks, busbw in measured.others},
    }


def _broken(broken: Broken) -> dict[str, Any]:
    links = LinkClass.NONE if broken.no_cards else LinkClass.UNKNOWN
    empty: dict[ReadingKind, dict[str, Any]] = {
        ReadingKind.TOPO: _topology(broken.gpus, broken.pairs, links),
        ReadingKind.P2P: _peer_access(broken.gpus, broken.pairs) | {"p2p_ok": None, "p2p_all_ok": None},
        ReadingKind.FABRIC: {"fabric": [], "ready": None, "applies": None},
        ReadingKind.QUERY: {"rows": 0},
        ReadingKind.SHM: {"size_bytes": None, "limit_bytes": None, "verdict": None},
        ReadingKind.BUSBW: {"ranks": None, "size_bytes": None, "busbw": None, "verdict": None},
    }
    return {**empty.get(broken.kind, {}), "kind": broken.kind, "error": True, "message": broken.message}
