"""Programs that may never answer. `nvidia-smi` on a lost card cannot even be killed: it is left behind then."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

_LEAVE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a program said. `code` None: it did not end in time, or there is no such program (`missing`)."""

    code: int | None
    out: str = ""
    err: str = ""
    missing: bool = False

    @property
    def first_line(self) -> str:
        said = self.err.strip() or self.out.strip() or f"exit code {self.code}"
        return said.splitlines()[0]


def ask(argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, cwd: str = "/") -> Answer:
    """Run a program; back within `timeout_s` and a second, whatever it does."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd)
        except OSError as error:
            return Answer(code=None, err=error.strerror or str(error), missing=True)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _leave(child)
            code = None
        return Answer(code=code, out=_text(out), err=_text(err))


def _leave(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    try:
        child.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        child.returncode = -9  # it hangs in the kernel: nobody will ever wait for it, and Popen must not complain


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(1 << 22).decode(errors="replace")
