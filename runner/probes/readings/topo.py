"""`nvidia-smi topo -m`: how the cards are linked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from runner.facts import Broken, ReadingKind, Topology
from runner.probes.readings import matrix as table
from runner.probes.readings.matrix import Matrix

_WORDS: Final = ("SYS", "SOC", "NODE", "PHB", "PXB", "PIX")  # weakest first; SOC is the old name of SYS
_LINK: Final = re.compile(rf"NV\d{{1,2}}|{'|'.join(_WORDS)}")
_WEAKER: Final = {word: at for at, word in enumerate(_WORDS)} | {f"NV{count}": 100 + count for count in range(100)}
_LEGEND_PCIE: Final = re.compile(r"\s*PIX\s+=")
_LEGEND_NVLINK: Final = re.compile(r"\s*NV#\s+=")
_PATHS_ONLY: Final = re.compile(r"topo\s+-mp\b")


def recognise(lines: Sequence[str]) -> bool:
    found = table.find_matrix(lines, _LINK)
    if found is None:
        return False
    if not found.rows:
        return not any("-p2p" in line for line in lines)
    return bool(found.vocabulary()) or found.has_affinity or any(_LEGEND_PCIE.match(line) for line in lines)


def parse(lines: Sequence[str]) -> Topology | Broken:
    found = table.find_matrix(lines, _LINK) or Matrix()
    pairs, doubtful = table.pair_up(found, _WEAKER)
    if complaint := table.complaint(found, len(pairs)):
        hint = "save the whole output of `nvidia-smi topo -m`"
        return Broken(kind=ReadingKind.TOPO, message=complaint, hint=hint, gpus=found.gpus, pairs=tuple(pairs))
    return Topology(
        gpus=found.gpus, pairs=tuple(pairs), hides_nvlink=_hides_nvlink(lines, found), doubtful=tuple(doubtful)
    )


def _hides_nvlink(lines: Sequence[str], found: Matrix) -> bool:
    """The legend names what the view can show: that of `topo -mp` knows no NV#."""
    if any(cell.startswith("NV") for cell in found.vocabulary()):
        return False
    says_pcie, says_nvlink = (any(legend.match(line) for line in lines) for legend in (_LEGEND_PCIE, _LEGEND_NVLINK))
    return any(_PATHS_ONLY.search(line) for line in lines) or (says_pcie and not says_nvlink)
