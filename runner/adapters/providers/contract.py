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
    """What the provider said, in our words; `detail` is for a human, amounts are decimal text."""

    state: ServerState
    detail: str = ""
    cost: str = ""  # so far
    retry_after_s: float = 0.0
    refused: bool = False  # the key is not accepted; another one may be
    price_per_hour: str = ""  # where the environment does not tell it
    ends_at: str = ""  # end of the rental, the same
    keeping: str = ""  # what a kept disk costs, in words


class Provider(Protocol):
    """What a provider module offers (PEP 544: a module satisfies a protocol)."""

    def identify(self, env: Mapping[str, str]) -> Server | None:
        """This server, from what the provider put into the environment; None if it is not one of theirs."""
        ...

    def read(self, server: Server, env: Mapping[str, str], send: Send) -> Answer:
        """The server's state. Harmless: the key is proved with it."""
        ...

    def stop(self, server: Server, keep: Keep, code: int, env: Mapping[str, str], send: Send) -> Answer:
        """Ask for the stop after a run that ended with exit `code`. Safe to repeat: a stopped server is not an error."""
        ...

    def explain(self, keep: Keep, seen: Answer) -> str:
        """What such a stop does to the disk, and what is billed after it."""
        ...
