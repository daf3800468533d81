"""
Servers that are containers of this machine's Docker engine, each with a volume of its own as its disk.

The rule: what is ours carries a label with this farm's id; nothing else on the engine is looked
at, let alone touched. Containers are on the host's network, because the simulator, and a store
beside it, listen on loopback alone: so one address holds inside and outside, and nobody else
gets a way in. Whether a container is started again is the engine's own restart policy.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, Final

import docker
import docker.errors

from runner.simulator.container import write_durably
from runner.simulator.host import IDLE, KILLED, WORKSPACE, Boot, Saves, Seen, read_notes
from runner.simulator.model import Policy

FARM: Final = "vramfarm.simulator"  # the label, and whose it is
_SERVER: Final = "vramfarm.server"
_POLICIES: Final = {Policy.ALWAYS: "always", Policy.ON_FAILURE: "on-failure", Policy.NEVER: "no"}
_SHM: Final = "16g"  # a bound, not a reservation
_TIMEOUT_S: Final = 60
_TRIES: Final = 5
_IS_FOLDER: Final = 1 << 31  # in the engine's modes
_LIVE: Final = {"running", "restarting", "paused"}


def connect() -> Any:  # noqa: ANN401  # the SDK has no types of its own
    """The engine of this machine. OSError, with the reason, if none answers that could run a farm's servers."""
    address = os.environ.get("DOCKER_HOST") or "unix://"
    if not address.startswith("unix://"):
        raise OSError(f"the engine at {address} is another machine's: its containers would not reach the simulator")
    try:
        engine = docker.from_env(version="auto", timeout=_TIMEOUT_S)
    except docker.errors.DockerException as error:
        raise OSError(f"no Docker engine answers: {error}") from error
    return engine


def has_image(engine: Any, image: str) -> bool:  # noqa: ANN401  # as above
    """Whether containers can be made of it at once."""
    try:
        engine.images.get(image)
    except docker.errors.ImageNotFound:
        return False
    return True


class DockerHost:
    """Servers are containers. `farm_id` is in their labels; `image` is what a server without one runs."""

    def __init__(self, state: Path, engine: Any, *, farm_id: str, image: str) -> None:  # noqa: ANN401  # as above
        self._servers = state / "servers"
        self.saves = Saves(state / "saves")
        self._engine = engine
        self._farm_id = farm_id
        self._image = image
        self._log_lock = Lock()
        self._logged: dict[str, bytes] = {}  # server -> the moment of its last line in the file

    def describe(self, server_id: str) -> str:
        container = self._find(server_id)
        return f"container {container.short_id}" if container is not None else ""

    def has_image(self, image: str | None) -> bool:
        return has_image(self._engine, image or self._image)

    # ----------------------------------------------------------------------- containers

    def start(self, server_id: str, boot: Boot) -> None:
        (self._servers / server_id).mkdir(parents=True, exist_ok=True)
        container = self._find(server_id)
        if container is not None and container.status in _LIVE:
            return
        if container is not None and container.status == "created":  # its farm was killed: half restored, perhaps
            container.remove(force=True)
            container = None
        ended = "" if container is None else container.attrs["State"]["StartedAt"]
        container = container or self._create(server_id, boot)
        # The engine counts restarts from here on. With `after`, a start that did not come to pass is told from one that did.
        self._note(server_id, "life.json", {"number": boot.number, "after": ended})
        container.update(restart_policy={"Name": _POLICIES[boot.policy]})
        container.start()

    def _create(self, server_id: str, boot: Boot) -> Any:  # noqa: ANN401  # as above
        labels = {FARM: self._farm_id, _SERVER: server_id}
        self._engine.volumes.create(self._name(server_id), labels=labels)
        idle = {"entrypoint": list(IDLE)} if boot.image is None else {}
        container = self._engine.containers.create(
            boot.image or self._image,
            list(boot.args),
            name=self._name(server_id),
            environment=dict(boot.env),
            labels=labels,
            network_mode="host",
            shm_size=_SHM,
            volumes={self._name(server_id): {"bind": str(WORKSPACE), "mode": "rw"}},
            **idle,
        )
        if boot.restore is not None:
            self._restore(container, *boot.restore)
        return container

    def look(self, server_id: str, number: int) -> Seen:
        return self._see(self._find(server_id), server_id, number)

    def _see(self, container: Any, server_id: str, number: int) -> Seen:  # noqa: ANN401  # as above
        if container is None or container.status == "created":  # somebody removed it, or it never began
            return Seen(number=number, is_running=False)
        state, begun = container.attrs["State"], read_notes(self._servers / server_id / "life.json")
        first = int(begun.get("number", 0))
        if state["StartedAt"] == begun.get("after"):
            return Seen(number=first - 1, is_running=False)
        newest = first + int(container.attrs["RestartCount"])
        if state["Restarting"]:
            return Seen(number=newest - 1, is_running=False, is_coming=True)
        return Seen(number=newest, is_running=bool(state["Running"]))

    def is_running(self, server_id: str) -> bool:
        return self.look(server_id, 0).is_running

    def any_running(self) -> bool:
        return any(container.status in _LIVE for container in self._ours())

    def exit_code(self, server_id: str, number: int) -> int:
        asked = read_notes(self._servers / server_id / "exit.json")
        if asked.get("number") == number:
            return int(asked["code"])
        for _ in range(_TRIES):
            container = self._find(server_id)
            if container is None:
                return KILLED
            seen = self._see(container, server_id, number)
            if seen.number == number and not seen.is_running:
                return int(container.attrs["State"]["ExitCode"])
            codes = self._recall(container)
            if seen == self.look(server_id, number):  # else one more life has ended, perhaps: whose is the last code?
                ended_since = seen.number - seen.is_running - number
                return codes[-1 - ended_since] if ended_since < len(codes) else KILLED
        return KILLED

    def _recall(self, container: Any) -> list[int]:  # noqa: ANN401  # as above
        """The exits of a container's lives, as the engine remembers them for a while; the newest last."""
        until = f"{datetime.now(UTC).timestamp():.6f}"
        about = {"container": container.id, "event": "die"}
        since = int(datetime.fromisoformat(container.attrs["Created"][:19] + "+00:00").timestamp())
        with closing(self._engine.events(since=since, until=until, filters=about, decode=True)) as told:
            return [int(event["Actor"]["Attributes"].get("exitCode", KILLED)) for event in told]

    def hold(self, server_id: str) -> None:
        for tries_left in reversed(range(_TRIES)):
            container = self._find(server_id)
            if container is None or container.status == "created":
                return
            try:
                container.update(restart_policy={"Name": "no"})
                if container.status == "restarting":
                    container.stop(timeout=0)
            except docker.errors.APIError:  # it ended or began just now
                if not tries_left:
                    raise
            else:
                return

    def terminate(self, server_id: str) -> None:
        self._signal(server_id, "SIGTERM")

    def kill(self, server_id: str, *, code: int, number: int) -> None:
        with suppress(FileNotFoundError):  # the whole folder may be gone
            self._note(server_id, "exit.json", {"number": number, "code": code})
        self._signal(server_id, "SIGKILL")

    def _signal(self, server_id: str, signal: str) -> None:
        self.hold(server_id)
        container = self._find(server_id)
        if container is None:
            return
        try:
            container.kill(signal)
        except docker.errors.APIError as error:
            if error.status_code not in {404, 409}:  # it is gone, or does not run
                raise

    # ---------------------------------------------------------------------------- disks

    def keep(self, server_id: str, path: str, save_id: str) -> tuple[int, int]:
        container, asked = self._find(server_id), PurePosixPath(path)
        if container is None or not asked.is_relative_to(WORKSPACE) or ".." in asked.parts:
            raise FileNotFoundError(f"{path}: not on this server's disk")
        for folder in [*reversed(asked.parents), asked]:
            if folder.is_relative_to(WORKSPACE):
                _check_folder(container, folder)
        return self.saves.put(save_id, lambda target: _copy_out(container, asked, target))

    def _restore(self, container: Any, save_id: str, path: str) -> None:  # noqa: ANN401  # as above
        asked = PurePosixPath(path)
        if not asked.is_relative_to(WORKSPACE) or ".." in asked.parts:
            raise FileNotFoundError(f"{path}: not on this server's disk")
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                archive.add(self.saves.place(save_id), arcname=str(asked.relative_to("/")))
            file.seek(0)
            container.put_archive("/", file)

    def delete_disk(self, server_id: str) -> None:
        self.log(server_id)  # what it printed last
        container = self._find(server_id)
        if container is not None:
            self._remove(container)
        self._remove_volume(self._name(server_id))

    def sweep(self, live: Collection[str]) -> None:
        for container in self._ours():
            if container.labels.get(_SERVER) not in live:
                self._remove(container)
        for volume in self._engine.volumes.list(filters={"label": f"{FARM}={self._farm_id}"}):
            if (volume.attrs.get("Labels") or {}).get(_SERVER) not in live:
                self._remove_volume(volume.name)

    @staticmethod
    def _remove(container: Any) -> None:  # noqa: ANN401  # as above
        with suppress(docker.errors.NotFound):
            container.remove(force=True, v=True)

    def _remove_volume(self, name: str) -> None:
        with suppress(docker.errors.NotFound):
            self._engine.volumes.get(name).remove(force=True)

    # ------------------------------------------------------------------------------ log

    def log(self, server_id: str) -> Path:
        path = self._servers / server_id / "container.log"
        with suppress(OSError), self._log_lock:  # what came before is still in the file
            self._pull(server_id, path)
        return path

    def _pull(self, server_id: str, path: Path) -> None:
        """Append what is new; a farm that was just started writes the file anew."""
        container = self._find(server_id)
        if container is None:
            return
        last = self._logged.get(server_id, b"")
        since = int(datetime.fromisoformat(last[:19].decode() + "+00:00").timestamp()) if last else 0
        told = container.logs(stream=True, follow=False, timestamps=True, **({"since": since} if since else {}))
        with path.open("ab" if last else "wb") as file:
            for entry in told:  # one write of the container each
                moment, _, text = entry.partition(b" ")
                if moment > last:
                    file.write(text)
                    self._logged[server_id] = moment

    # ------------------------------------------------------------------------------ ours

    def _name(self, server_id: str) -> str:
        return f"vramfarm-{self._farm_id}-{server_id}"

    def _find(self, server_id: str) -> Any:  # noqa: ANN401  # as above
        try:
            return self._engine.containers.get(self._name(server_id))
        except docker.errors.NotFound:
            return None

    def _ours(self) -> list[Any]:
        return list(self._engine.containers.list(all=True, filters={"label": f"{FARM}={self._farm_id}"}))

    def _note(self, server_id: str, name: str, fields: dict[str, object]) -> None:
        write_durably(self._servers / server_id / name, fields)


def _check_folder(container: Any, path: PurePosixPath) -> None:  # noqa: ANN401  # as above
    """A link would lead off the disk."""
    try:
        stream, found = container.get_archive(str(path))
    except docker.errors.NotFound:
        raise FileNotFoundError(f"{path}: no such folder on this server") from None
    stream.close()
    if not found["mode"] & _IS_FOLDER:
        raise FileNotFoundError(f"{path}: not a folder of this server's disk")


def _copy_out(container: Any, path: PurePosixPath, target: Path) -> None:  # noqa: ANN401  # as above
    """The archive has the folder under its own name; no member of it lands outside of `target`."""
    stream, _ = container.get_archive(str(path))
    with closing(stream), tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as around:
        with tarfile.open(fileobj=io.BufferedReader(_Pieces(stream)), mode="r|") as archive:
            archive.extractall(around, filter="tar")
        Path(around, path.name).rename(target)


class _Pieces(io.RawIOBase):
    """An iterator of bytes, read as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  # a writable buffer
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
