"""
PID 1 of a simulated server: starts the container's process and, when it ends, everything else
of the server, as the end of a PID namespace would; records the exit durably.

It lives in a session of its own and holds a lock that was taken before it was started: the
lock is free exactly when no container runs. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

if __package__ in {None, ""}:  # started by its path under -I: last, so that it shadows nothing
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from runner.supervise.process import Process, be_subreaper, current, end_all, find, identify

NOT_STARTED: Final = 127
MARK: Final = "VRAMFARM_SERVER_ID"


def main(folder: Path) -> None:
    """Live the container's life once, as `container.json` says."""
    be_subreaper()
    spec = json.loads((folder / "container.json").read_bytes())
    me = current()
    write_pid(folder, me)  # who started us writes it too, unless it was killed
    code = _live(spec["argv"], spec["env"], spec["cwd"])
    end_all(lambda: [process for process in members(folder) if process != me], timeout_s=10.0)
    write_durably(folder / "exit.json", {"number": spec["number"], "code": code})


def members(folder: Path) -> tuple[Process, ...]:
    """
    Processes of the server, PID 1 too: those that carry its mark, their descendants, and those
    that lost both, but name the server's folder in their environment.
    """
    named = os.fsencode(folder) + b"/"
    strays = [process for process in map(_identify, _pids()) if process and named in _environ(process.pid)]
    return tuple({*find(MARK, folder.name), *strays})


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _identify(pid: int) -> Process | None:
    try:
        return identify(pid)
    except ProcessLookupError:
        return None


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()  # a zombie's is empty
    except OSError:
        return b""


def write_pid(folder: Path, process: Process) -> None:
    write_durably(folder / "pid.json", {"pid": process.pid, "started": process.started})


def write_durably(path: Path, fields: dict[str, object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:  # secrets are in it
        json.dump(fields, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _live(argv: list[str], env: dict[str, str], cwd: str) -> int:
    asked = False

    def pass_on(*_: object) -> None:
        nonlocal asked
        asked = True
        if child is not None:
            with suppress(ProcessLookupError):  # it ended just now; an error here would cost its exit code
                os.kill(child.pid, signal.SIGTERM)

    child: subprocess.Popen[bytes] | None = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    try:
        child = subprocess.Popen(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(f"cannot start {argv[0]}: {error}\n")
        return NOT_STARTED
    if asked:
        child.terminate()
    while True:
        pid, status = os.wait()  # adopted ones too
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    main(Path(sys.argv[1]))
