"""
No pickle out of a checkpoint, by whosoever's hand.

We write none and read none. But a module, an optimizer or a scheduler of the script's is given back what it said of itself,
and may unpickle that: it would run whatever a stranger's folder names. So while it has it, the interpreter lets no pickle name
anything (what names nothing can run nothing). The rule: whoever saves what could not be loaded so hears it at the first save.
"""

from __future__ import annotations

import contextlib
import io
import pickletools
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from vramfarm.staging import as_bytes
from vramfarm.typed import StateError

_NAMING: Final = frozenset({"GLOBAL", "STACK_GLOBAL", "INST"})
_here = threading.local()
_installing: Final = threading.Lock()
_installed: list[bool] = []


@contextlib.contextmanager
def forbidden(what: str) -> Iterator[None]:
    """Let nothing on this thread unpickle a name; `StateError` says that `what` tried to."""
    with _installing:
        if not _installed:
            sys.addaudithook(_look)
            _installed.append(True)
    before = getattr(_here, "what", "")
    _here.what = what
    try:
        yield
    finally:
        _here.what = before


def _look(event: str, arguments: tuple[object, ...]) -> None:
    """Every unpickler asks here before it imports what a pickle names, also those of other libraries."""
    if event == "pickle.find_class" and (what := getattr(_here, "what", "")):
        module, name = arguments
        raise StateError(f"{what}: unpickles what the checkpoint gives it, which names {module}.{name}; {_ADVICE}")


def refuse(what: str, value: object) -> None:
    """`StateError` if there is a pickle in it that names something: it could be saved, and never loaded again."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            refuse(f"{what}.{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            refuse(f"{what}[{number}]", inner)
    elif _is_naming(_raw(value)):
        raise StateError(f"{what}: cannot be saved: it is a pickle; {_ADVICE}")


def _raw(value: object) -> bytes:
    if isinstance(value, torch.Tensor):
        return as_bytes(value) if value.dtype is torch.uint8 and value.dim() == 1 else b""
    return bytes(value) if isinstance(value, bytes | bytearray) else b""


def _is_naming(raw: bytes) -> bool:
    """Whether it is a pickle, or what torch.save makes of one."""
    if not raw:
        return False
    try:
        if raw.startswith(b"PK"):
            return any(name.endswith(".pkl") for name in zipfile.ZipFile(io.BytesIO(raw)).namelist())
        return any(code.name in _NAMING for code, _, _ in pickletools.genops(raw))
    except Exception:  # noqa: BLE001  # other bytes fail in many ways
        return False


_ADVICE: Final = (
    "a pickle can run code, and whoever can write to the folder of checkpoints would run it here; "
    "where that is only you: Checkpointer(..., allow_pickle=True)"
)
