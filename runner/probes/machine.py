"""Which cards there are, and the training interpreter. Nothing here needs the network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

from runner.errors import JobError, MachineError
from runner.facts import CardState
from runner.probes.command import ask

_SMI_FIELDS: Final = ("index", "uuid", "name", "memory.total", "driver_version")
_SMI_LIMIT_S: Final = 30.0  # a first call may have to load the driver
_PYTHON_LIMIT_S: Final = 60.0  # torch's metadata may lie on a slow network disk
_MIB: Final = 1 << 20


# ----------------------------------------------------------------------------------- cards


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    index: int
    uuid: str
    name: str
    memory_bytes: int
    driver: str


def read_cards(*, program: str = "nvidia-smi", timeout_s: float = _SMI_LIMIT_S) -> tuple[Card, ...]:
    """
    Return the cards of this machine; none where there is no NVIDIA driver.

    `MachineError` if there is a driver and it does not answer: then there are cards that
    cannot be used.
    """
    argv = (program, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits")
    answer = ask(argv, timeout_s=timeout_s)
    if answer.missing:
        return ()
    if answer.code is None:
        raise MachineError(
            f"{program}: expected an answer within {timeout_s:.0f}s, got none: a card or the driver hangs",
            hint="this machine has to be restarted by its owner: rent another one",
        )
    if answer.code != 0:
        if "No devices were found" in answer.out + answer.err:
            return ()
        raise MachineError(
            f"{program}: expected a list of cards, got: {answer.first_line}",
            hint="the driver of this machine is broken or does not match the container: rent another one",
        )
    return tuple(_parse_card(line) for line in answer.out.splitlines() if line.strip())


def card_names() -> tuple[str, ...]:
    """Return the models of the cards that training may use: CUDA_VISIBLE_DEVICES counts where it is set."""
    return tuple(card.name for card in visible(read_cards(), os.environ.get("CUDA_VISIBLE_DEVICES")))


C = TypeVar("C", Card, CardState)


def visible(cards: Sequence[C], names: str | None) -> tuple[C, ...]:
    """Return the cards that CUDA_VISIBLE_DEVICES lets through: as CUDA does, up to the first it does not know."""
    if names is None:
        return tuple(cards)
    found: list[C] = []
    for name in names.split(","):
        card = next((c for c in cards if name.strip() and _is_called(c, name.strip())), None)
        if card is None:
            break
        found.append(card)
    return tuple(found)


def _parse_card(line: str) -> Card:
    index, uuid, name, memory, driver = (part.strip() for part in line.split(","))
    size = int(memory) * _MIB if memory.isdecimal() else 0  # "[N/A]" on some shared-memory chips
    return Card(index=int(index), uuid=uuid, name=name, memory_bytes=size, driver=driver)


def _is_called(card: Card | CardState, name: str) -> bool:
    return name == str(card.index) or (name.startswith("GPU-") and card.uuid.startswith(name))


# ---------------------------------------------------------------------------------- python


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """A training interpreter; `torch` is the version it has."""

    path: Path
    version: str
    torch: str


_ASK: Final = """
import sys
sys.path = [folder for folder in sys.path if folder]
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("torch")
try: torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError: torch = "unknown" if spec else ""
print(json.dumps({"version": sys.version.split()[0], "torch": torch if spec else ""}))
"""


def find_python(policy: str, *, path: str | None = None, timeout_s: float = _PYTHON_LIMIT_S) -> Python:
    """
    Return the training interpreter that `python:` in job.yaml asks for, or `JobError`.

    `auto`: the first of `python3` on PATH and the supervisor's own that has torch. Anything
    else is an interpreter, or a virtual environment. torch is looked for, not imported.
    """
    if policy == "auto":
        return _first_with_torch(path, timeout_s)
    program = _in_environment(Path(policy).expanduser())
    found = _ask(program, timeout_s) if program else None
    if found is None:
        raise JobError(
            f"python: expected an interpreter or a virtual environment, found none at {policy}",
            hint="give the path of python, or of the folder that holds bin/python",
        )
    if not found.torch:
        raise JobError(
            f"python: expected torch in {policy} (Python {found.version}), found none",
            hint="install torch there, or name the environment that has it",
        )
    return found


def _first_with_torch(path: str | None, timeout_s: float) -> Python:
    tried = []
    for program in _candidates(path):
        found = _ask(program, timeout_s)
        if found is not None and found.torch:
            return found
        tried.append(str(program))
    raise JobError(
        f"python: auto: expected torch, found none in {', '.join(tried) or 'PATH, which has no python3'}",
        hint="set `python:` to the interpreter or virtual environment that has torch",
    )


def _candidates(path: str | None) -> Iterable[Path]:
    on_path = shutil.which("python3", path=path)
    return dict.fromkeys(Path(program) for program in (on_path, sys.executable) if program)


def _in_environment(given: Path) -> Path | None:
    places = (given, given / "bin" / "python", given / "bin" / "python3")
    return next((place.absolute() for place in places if place.is_file() and os.access(place, os.X_OK)), None)


def _ask(program: Path, timeout_s: float) -> Python | None:
    # A torch.py in the working folder is not torch, and Python 3.10 has no -P. Never resolve(): a
    # virtual environment's python is a link, and is one by its name only.
    try:
        done = subprocess.run(
            (str(program), "-c", _ASK), cwd="/", capture_output=True, text=True, timeout=timeout_s, check=False
        )
        told = json.loads(done.stdout)
        return Python(path=program, version=str(told["version"]), torch=str(told["torch"]))
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return None


# --------------------------------------------------------------------------------- history


def first_boot_at(workspace: Path) -> datetime | None:
    """Return when this server was first seen, as the guardian wrote it down; None if it did not."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        fields = json.loads((workspace / ".vramfarm" / "guardian.json").read_bytes())
        return datetime.fromisoformat(fields["first_boot_at"])
    return None
