"""
The cards as `nvidia-smi` sees them. A program, and not NVML in our own process: a call into a driver that hangs
cannot be taken back, a program can be left behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from xml.etree import ElementTree as ET  # what the driver prints

from runner.errors import MachineError
from runner.facts import CardReport, CardState, FabricState, PcieLink
from runner.probes.command import ask

_LIMIT_S: Final = 30.0
_LOG_LIMIT_S: Final = 5.0
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")
_MIB: Final = 1 << 20
_XID: Final = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)")
_SLOWDOWNS: Final[Mapping[str, str]] = {
    "hw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "power brake",
    "hw_slowdown": "hardware slowdown",
}


def read_report(program: str) -> CardReport | None:
    """All that the driver says of the cards; None where there is no driver. `MachineError` if it does not answer."""
    answer = ask((program, "-q", "-x"), timeout_s=_LIMIT_S)
    if answer.missing:
        return None
    if answer.code is None:
        raise MachineError(
            f"{program} -q: no answer within {_LIMIT_S:.0f}s: a card or the driver hangs",
            hint="only the machine's owner can restart it: rent another one, and tell support",
        )
    if answer.code != 0:
        raise MachineError(f"{program} -q: {answer.first_line}", hint="rent another machine, and tell support")
    return parse_report(answer.out)


def parse_report(text: str) -> CardReport:
    """`MachineError` if it is not what `nvidia-smi -q -x` prints."""
    start = text.find("<nvidia_smi_log")
    try:
        root = ET.fromstring(text[start:])  # noqa: S314  # without its document type: no entities
    except ET.ParseError as error:
        raise MachineError(f"nvidia-smi -q -x: expected XML, got {text[:60]!r} ({error})") from None
    return CardReport(
        cards=tuple(_card(at, gpu) for at, gpu in enumerate(root.iter("gpu"))),
        driver=_said(root, "driver_version"),
        cuda=_said(root, "cuda_version"),
    )


def _card(at: int, gpu: ET.Element) -> CardState:
    remapped = gpu.find("remapped_rows")
    remapped = ET.Element("none") if remapped is None else remapped
    power = next(
        (found for name in ("gpu_power_readings", "power_readings") if (found := gpu.find(name)) is not None), gpu
    )
    return CardState(
        index=at,
        name=_said(gpu, "product_name"),
        uuid=_said(gpu, "uuid"),
        memory_bytes=_mib(gpu, "fb_memory_usage/total"),
        used_bytes=_mib(gpu, "fb_memory_usage/used"),
        processes=tuple(_process(found) for found in gpu.iter("process_info")),
        uncorrected=_uncorrected(gpu),
        remap_pending=_said(remapped, "remapped_row_pending").lower() == "yes",
        remap_failed=_said(remapped, "remapped_row_failure").lower() == "yes",
        recovery=_asked_for(_said(gpu, "gpu_recovery_action")),
        mig=_said(gpu, "mig_mode/current_mig").lower() == "enabled",
        compute_mode=_said(gpu, "compute_mode") or "Default",
        power_limit_w=_number(power, "current_power_limit") or _number(power, "enforced_power_limit"),
        power_default_w=_number(power, "default_power_limit"),
        slowdowns=_slowdowns(gpu),
        fabric=_fabric(gpu),
        pcie=_pcie(gpu),
    )


def _asked_for(action: str) -> str:
    return "" if action.lower() in {"none", "n/a"} else action


def _process(found: ET.Element) -> str:
    return f"{_said(found, 'process_name') or '?'} (pid {_said(found, 'pid')}, {_said(found, 'used_memory')})"


def _uncorrected(gpu: ET.Element) -> int:
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return 0
    found = [node.text or "" for node in volatile.iter() if "uncorrect" in node.tag or node.tag == "double_bit_total"]
    return sum(int(text) for text in found if text.strip().isdecimal())


def _slowdowns(gpu: ET.Element) -> tuple[str, ...]:
    """`clocks_event_reasons`, which older drivers call `clocks_throttle_reasons`."""
    active = {
        node.tag.split("_reason_")[-1]
        for node in gpu.iter()
        if "_reason_" in node.tag and (node.text or "") == "Active"
    }
    return tuple(told for name, told in _SLOWDOWNS.items() if name in active)


def _fabric(gpu: ET.Element) -> FabricState | None:
    if gpu.find("fabric") is None:
        return None
    return FabricState(
        state=_said(gpu, "fabric/state"),
        status=_said(gpu, "fabric/status"),
        health=_said(gpu, "fabric/health/summary"),
    )


def _pcie(gpu: ET.Element) -> PcieLink:
    info = "pci/pci_gpu_link_info"
    gens, widths = f"{info}/pcie_gen", f"{info}/link_widths"
    found = (
        _number(gpu, path)
        for path in (
            f"{gens}/current_link_gen",
            f"{gens}/max_link_gen",
            f"{widths}/current_link_width",
            f"{widths}/max_link_width",
        )
    )
    gen, gen_max, width, width_max = (None if number is None else int(number) for number in found)
    return PcieLink(gen=gen, gen_max=gen_max, width=width, width_max=width_max)


def _said(node: ET.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()


def _number(node: ET.Element, path: str) -> float | None:
    match = _NUMBER.match(_said(node, path))
    return float(match[0]) if match else None


def _mib(node: ET.Element, path: str) -> int:
    return int((_number(node, path) or 0) * _MIB)


def read_table(program: str, *arguments: str) -> str | None:
    """What `nvidia-smi` (`program`) prints for a person, such as `topo -m`; None if it did not answer."""
    answer = ask((program, *arguments), timeout_s=_LIMIT_S)
    return None if answer.code is None else f"{answer.out}\n{answer.err}"


def read_xids(program: str = "dmesg") -> tuple[tuple[str, int], ...]:
    """Errors that the driver wrote to the kernel's log, (card, number), where we may read it."""
    found = _XID.findall(ask((program,), timeout_s=_LOG_LIMIT_S).out)
    return tuple(dict.fromkeys((where, int(number)) for where, number in found))
