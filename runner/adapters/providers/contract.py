"""
What a provider module offers and the words it speaks in. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from runner.facts import Server, ServerState


@dataclass(frozen=True)
class Reply:
    """An answer. `status` 0: none came, `body` says why. Names of headers are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Send(Protocol):
    """One HTTP exchange with a time limit; never raises."""

    def __call__(self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None) -> Reply: ...


@dataclass(frozen=True)
class Keep:
    """What must survive the stop: a folder the provider saves, or nothing."""

    folder: str | None
    stop_anyway: bool = False  # when saving the folder fails: stop all the same


@dataclass(frozen=True)
class Answer:
    """What the provider said, in our words; `detail` is for a human."""

    state: ServerState
    detail: str = ""
    cost: str = ""  # decimal text, so far
    retry_after_s: float = 0.0


class Provider(Protocol):
    """What a provider module offers (PEP 544: a module satisfies a protocol)."""

    def identify(self, env: Mapping[str, str]) -> Server | None:
        """This server, from what the provider put into the environment; None if it is not one of theirs."""
        ...

    def read(self, server: Server, env: Mapping[str, str], send: Send) -> Answer:
        """The server's state. Harmless: preflight proves the key with it."""
        ...

    def stop(self, server: Server, keep: Keep, code: int, env: Mapping[str, str], send: Send) -> Answer:
        """Ask for the stop after a run that ended with exit `code`. Safe to repeat: a stopped server is not an error."""
        ...
