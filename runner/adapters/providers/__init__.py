"""
Where the server was rented. Standard library only: the guardian calls these when all else is broken.

To add one: a module here with the functions of `Provider`, a line in `PROVIDERS`, a recorded
exchange in the conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from runner.adapters.providers import command, docker, runpod, vast, vramfarm
from runner.adapters.providers.contract import Answer, Keep, Provider, Reply, Send
from runner.adapters.secrets import FOLDER, find_values
from runner.facts import Server

__all__ = [
    "NAMES",
    "PROVIDERS",
    "SECRETS",
    "Answer",
    "Keep",
    "Provider",
    "Reply",
    "Send",
    "find_server",
    "keyrings",
    "with_each",
    "with_secrets",
]

PROVIDERS: Final[Mapping[str, Provider]] = {
    "vramfarm": vramfarm,
    "runpod": runpod,
    "vast": vast,
    "docker": docker,
    "command": command,
}

SECRETS: Final = (vramfarm.KEY, runpod.KEY, vast.KEY)  # never handed to the training command
NAMES: Final = frozenset(name for module in (vramfarm, runpod, vast, docker, command) for name in module.NAMES)
"""By which a server and its key are found; where all of them are empty there is none."""
_INIT: Final = Path("/proc/1/environ")  # a session over SSH has not what the provider told PID 1


def find_server(env: Mapping[str, str], kind: str = "auto") -> Server | None:
    """
    The rented server we are in, of whatever provider (`auto`) or of this one. None on a machine of
    one's own, where there is nothing to stop.
    """
    asked = PROVIDERS if kind == "auto" else {name: PROVIDERS[name] for name in PROVIDERS if name == kind}
    found = (provider.identify(env) for provider in asked.values())
    return next((server for server in found if server is not None), None)


def with_secrets(env: Mapping[str, str], folder: Path = FOLDER, init: Path = _INIT) -> dict[str, str]:
    """
    The environment, with what PID 1 was told of the server and the providers' keys that came as
    files. Read once: the disk may be gone later.
    """
    return {**_of_init(init), **_of_files(folder), **env}


def keyrings(env: Mapping[str, str], folder: Path = FOLDER, init: Path = _INIT) -> tuple[Mapping[str, str], ...]:
    """
    The same with each key that there is: first as the environment has it, then as files and PID 1 do.
    A key that was set for something else must not hide the one that stops the server.
    """
    first = with_secrets(env, folder, init)
    told = _of_init(init)
    others = (_of_files(folder), {name: told[name] for name in SECRETS if name in told})
    rings = [first]
    rings += [ring for ring in ({**first, **other} for other in others) if ring not in rings]
    return tuple(rings)


def with_each(rings: Sequence[Mapping[str, str]], act: Callable[[Mapping[str, str]], Answer]) -> Answer:
    """What the first key gets that is not refused; if all are, what the first got."""
    answers: list[Answer] = []
    for ring in rings:
        answers.append(act(ring))
        if not answers[-1].refused:
            return answers[-1]
    return answers[0]


def _of_files(folder: Path) -> dict[str, str]:
    return find_values(SECRETS, {}, folder)


def _of_init(path: Path) -> dict[str, str]:
    return {name: value for name, value in _entries(_read(path)) if name in NAMES and value}


def _entries(text: str) -> Iterator[tuple[str, str]]:
    for entry in text.split("\0"):
        name, _, value = entry.partition("=")
        yield name, value


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""  # no such file, not ours to read, or no text: the provider will say that it has no key
