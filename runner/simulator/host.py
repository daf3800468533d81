"""
The machines' side: folders, disks and containers of servers. What exists is read from the
disk and from locks, so that a farm that was killed finds its servers again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from runner.simulator import container
from runner.supervise.process import Process, end_all, identify, kill

KILLED: Final = 137
WORKSPACE: Final = PurePosixPath("/workspace")  # what a server's disk is called in requests


class Host:
    """Everything of the servers that is not in the store."""

    def __init__(self, state: Path) -> None:
        self._servers = state / "servers"
        self._saves = state / "saves"
        self._children: list[subprocess.Popen[bytes]] = []

    def disk(self, server_id: str) -> Path:
        return self._servers / server_id / "disk"

    def log(self, server_id: str) -> Path:
        return self._servers / server_id / "container.log"

    # ----------------------------------------------------------------------- containers

    def start(self, server_id: str, argv: Sequence[str], env: Mapping[str, str], number: int) -> None:
        """Start the server's process, the `number`th time. Does nothing if one runs."""
        folder = self._servers / server_id
        self.disk(server_id).mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "container.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            spec = {"argv": list(argv), "env": dict(env), "cwd": str(self.disk(server_id)), "number": number}
            container.write_durably(folder / "container.json", spec)
            self._spawn(folder, lock)
        except BlockingIOError:
            return
        finally:
            os.close(lock)

    def _spawn(self, folder: Path, lock: int) -> None:
        argv = (sys.executable, "-I", str(Path(container.__file__).resolve()), str(folder))
        with (folder / "container.log").open("ab") as log:
            child = subprocess.Popen(
                argv,
                env=os.environ | {container.MARK: folder.name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,
            )
        self._children.append(child)
        container.write_pid(folder, identify(child.pid))  # a stop may come before it has begun

    def is_running(self, server_id: str) -> bool:
        """Whether the container runs, started by us or by a farm before us."""
        self._children = [child for child in self._children if child.poll() is None]
        try:
            lock = os.open(self._servers / server_id / "container.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def any_running(self) -> bool:
        return any(self.is_running(folder.name) for folder in self._servers.glob("srv_*"))

    def exit_code(self, server_id: str, number: int) -> int:
        """The exit of the container that does not run any more; its strays are ended."""
        end_all(lambda: container.members(self._servers / server_id), timeout_s=10.0)
        fields = _read(self._servers / server_id / "exit.json")
        return int(fields["code"]) if fields.get("number") == number else KILLED

    def terminate(self, server_id: str) -> None:
        """SIGTERM to the container's process."""
        fields = _read(self._servers / server_id / "pid.json")
        with suppress(KeyError):
            kill([Process(fields["pid"], fields["started"])], signal.SIGTERM)

    def kill(self, server_id: str, *, code: int, number: int) -> None:
        """SIGKILL to everything of the server; its container then has ended with `code`."""
        fields = _read(self._servers / server_id / "pid.json")
        with suppress(KeyError):
            kill([Process(fields["pid"], fields["started"])], signal.SIGKILL)
        end_all(lambda: container.members(self._servers / server_id), timeout_s=10.0)
        with suppress(FileNotFoundError):  # the whole folder may be gone
            container.write_durably(self._servers / server_id / "exit.json", {"number": number, "code": code})

    # ---------------------------------------------------------------------------- disks

    def keep(self, server_id: str, path: str, save_id: str) -> tuple[int, int]:
        """Save a folder of the disk; returns its bytes and files. OSError if that cannot be done."""
        source = self._find(server_id, path)
        target = self._saves / save_id
        partial = self._saves / f".partial-{save_id}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, partial, symlinks=True)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        files = [file for file in target.rglob("*") if file.is_file() and not file.is_symlink()]
        return sum(file.stat().st_size for file in files), len(files)

    def restore(self, server_id: str, path: str, save_id: str) -> None:
        target = self._place(server_id, path)
        shutil.copytree(self._saves / save_id, target, symlinks=True, dirs_exist_ok=True)

    def delete_disk(self, server_id: str) -> None:
        shutil.rmtree(self.disk(server_id), ignore_errors=True)
        (self._servers / server_id / "container.json").unlink(missing_ok=True)  # it has the secrets
        if self.disk(server_id).exists():
            raise OSError(f"{self.disk(server_id)}: still there")

    def delete_save(self, save_id: str) -> None:
        shutil.rmtree(self._saves / save_id, ignore_errors=True)

    def _find(self, server_id: str, path: str) -> Path:
        place = self._place(server_id, path)
        if not place.is_dir():
            raise FileNotFoundError(f"{path}: no such folder on this server")
        return place

    def _place(self, server_id: str, path: str) -> Path:
        """Where a folder of the server is: processes see the disk by its real name, clients as /workspace."""
        disk = self.disk(server_id).resolve()
        asked = PurePosixPath(path)
        place = disk / asked.relative_to(WORKSPACE) if asked.is_relative_to(WORKSPACE) else Path(asked)
        place = place.resolve()
        if not place.is_relative_to(disk):
            raise FileNotFoundError(f"{path}: not on this server's disk")
        return place


def _read(path: Path) -> dict[str, int]:
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}
