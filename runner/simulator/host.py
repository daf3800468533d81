"""
The machines' side: folders, disks and containers of servers. What exists is read from the
disk and from locks, so that a farm that was killed finds its servers again.

Here servers are processes, each in a folder of its own; in `engine.py` they are containers.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

from runner.errors import json_object
from runner.simulator import container
from runner.simulator.model import Policy
from runner.storage.disk import try_lock
from runner.supervise.process import Process, end_all, identify, kill

KILLED: Final = 137
WORKSPACE: Final = PurePosixPath("/workspace")  # what a server's disk is called in requests
OUR_IMAGE: Final = "vramfarm/runner"
IDLE: Final = ("sleep", "infinity")  # what a server without an image of its own runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What a server's container is started as, the `number`th time. `restore`: a save, and the folder it goes to."""

    image: str | None  # None: the provider's own, which does nothing
    args: tuple[str, ...]
    env: Mapping[str, str]
    policy: Policy
    number: int
    restore: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The newest life of a container, and whether it goes on. `is_coming`: the next one begins by itself."""

    number: int
    is_running: bool
    is_coming: bool = False


class Host(Protocol):
    """Everything of the servers that is not in the store."""

    saves: Saves

    def describe(self, server_id: str) -> str:
        """By which the server's container is found on this machine; empty if there is none."""

    def log(self, server_id: str) -> Path:
        """A file with what the container has printed up to now."""

    def has_image(self, image: str | None) -> bool:
        """Whether servers can be made of it."""

    def start(self, server_id: str, boot: Boot) -> None:
        """Start the container. Does nothing if it runs."""

    def look(self, server_id: str, number: int) -> Seen:
        """How it is, where life `number` is the newest that is known of."""

    def is_running(self, server_id: str) -> bool:
        """Whether the container runs, started by us or by a farm before us."""

    def any_running(self) -> bool:
        """Whether any does."""

    def exit_code(self, server_id: str, number: int) -> int:
        """The exit of a life that is over."""

    def hold(self, server_id: str) -> None:
        """From now on nobody but `start` starts it again."""

    def terminate(self, server_id: str) -> None:
        """SIGTERM to the container's process, and `hold`."""

    def kill(self, server_id: str, *, code: int, number: int) -> None:
        """SIGKILL to everything of the server; life `number` then has ended with `code`. And `hold`."""

    def keep(self, server_id: str, path: str, save_id: str) -> tuple[int, int]:
        """Save a folder of the disk; returns its bytes and files. OSError if that cannot be done."""

    def delete_disk(self, server_id: str) -> None:
        """Nothing of the server is left but its log."""

    def sweep(self, live: Collection[str]) -> None:
        """Remove what servers of this farm that are not among these have left behind."""


class Saves:
    """Folders that were kept of servers' disks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def place(self, save_id: str) -> Path:
        return self._folder / save_id

    def put(self, save_id: str, fill: Callable[[Path], object]) -> tuple[int, int]:
        """Keep what `fill` makes of a path that is not there yet; returns its bytes and files."""
        partial, target = self._folder / f".partial-{save_id}", self.place(save_id)
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in (partial, target):
            shutil.rmtree(old, ignore_errors=True)
        fill(partial)
        partial.rename(target)
        files = [file for file in target.rglob("*") if file.is_file() and not file.is_symlink()]
        return sum(file.stat().st_size for file in files), len(files)

    def delete(self, save_id: str) -> None:
        shutil.rmtree(self.place(save_id), ignore_errors=True)


class ProcessHost:
    """Servers are processes. `entrypoint` stands for our own image's; other images run their args as they are."""

    def __init__(self, state: Path, entrypoint: Sequence[str] = ()) -> None:
        self._servers = state / "servers"
        self.saves = Saves(state / "saves")
        self._entrypoint = tuple(entrypoint)
        self._children: list[subprocess.Popen[bytes]] = []

    def describe(self, server_id: str) -> str:
        fields = read_notes(self._servers / server_id / "pid.json")
        return f"pid {fields['pid']}" if "pid" in fields and self.is_running(server_id) else ""

    def disk(self, server_id: str) -> Path:
        return self._servers / server_id / "disk"

    def log(self, server_id: str) -> Path:
        return self._servers / server_id / "container.log"

    def has_image(self, image: str | None) -> bool:  # noqa: ARG002  # a process needs none
        return True

    # ----------------------------------------------------------------------- containers

    def start(self, server_id: str, boot: Boot) -> None:
        folder = self._servers / server_id
        self.disk(server_id).mkdir(parents=True, exist_ok=True)
        if boot.restore is not None:
            save_id, path = boot.restore
            shutil.copytree(self.saves.place(save_id), self._place(server_id, path), symlinks=True, dirs_exist_ok=True)
        is_ours = bool(self._entrypoint) and (boot.image or "").partition(":")[0] == OUR_IMAGE
        argv = (*self._entrypoint, *boot.args) if is_ours else boot.args or IDLE
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VRAMFARM_")}
        env = {**inherited, **boot.env, "VRAMFARM_WORKSPACE": str(self.disk(server_id).resolve())}
        lock = os.open(folder / "container.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(lock):
                spec = {"argv": list(argv), "env": env, "cwd": str(self.disk(server_id)), "number": boot.number}
                container.write_durably(folder / "container.json", spec)
                self._spawn(folder, lock)
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

    def look(self, server_id: str, number: int) -> Seen:
        return Seen(number=number, is_running=self.is_running(server_id))

    def is_running(self, server_id: str) -> bool:
        self._children = [child for child in self._children if child.poll() is None]
        try:
            lock = os.open(self._servers / server_id / "container.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(lock)
        finally:
            os.close(lock)

    def any_running(self) -> bool:
        return any(self.is_running(folder.name) for folder in self._servers.glob("srv_*"))

    def exit_code(self, server_id: str, number: int) -> int:
        end_all(lambda: container.members(self._servers / server_id), timeout_s=10.0)
        fields = read_notes(self._servers / server_id / "exit.json")
        return int(fields["code"]) if fields.get("number") == number else KILLED

    def hold(self, server_id: str) -> None:
        """Nobody else starts processes."""

    def terminate(self, server_id: str) -> None:
        fields = read_notes(self._servers / server_id / "pid.json")
        with suppress(KeyError):
            kill([Process(fields["pid"], fields["started"])], signal.SIGTERM)

    def kill(self, server_id: str, *, code: int, number: int) -> None:
        fields = read_notes(self._servers / server_id / "pid.json")
        with suppress(KeyError):
            kill([Process(fields["pid"], fields["started"])], signal.SIGKILL)
        end_all(lambda: container.members(self._servers / server_id), timeout_s=10.0)
        with suppress(FileNotFoundError):  # the whole folder may be gone
            container.write_durably(self._servers / server_id / "exit.json", {"number": number, "code": code})

    # ---------------------------------------------------------------------------- disks

    def keep(self, server_id: str, path: str, save_id: str) -> tuple[int, int]:
        source = self._find(server_id, path)
        return self.saves.put(save_id, lambda target: shutil.copytree(source, target, symlinks=True))

    def delete_disk(self, server_id: str) -> None:
        shutil.rmtree(self.disk(server_id), ignore_errors=True)
        (self._servers / server_id / "container.json").unlink(missing_ok=True)  # it has the secrets
        if self.disk(server_id).exists():
            raise OSError(f"{self.disk(server_id)}: still there")

    def sweep(self, live: Collection[str]) -> None:
        """Processes of a server end with it, and its folder is what it was known by."""

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


def read_notes(path: Path) -> dict[str, Any]:
    """What was written down there; nothing if it was not."""
    with suppress(OSError):
        return json_object(path.read_bytes())
    return {}
