"""
How a person hears of a run. A notifier is a module with `notify` and a line in `NOTIFIERS`.

Addresses are secrets: they come from the environment, and no answer repeats them. The guardian
uses this, too: nothing but the standard library may be imported before an address asks for more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from runner.adapters.notifiers import apprise, webhook


class Notifier(Protocol):
    """What a notifier module offers."""

    def notify(self, url: str, message: Mapping[str, object], timeout_s: float = 10.0) -> str:
        """Tell `url`; never raises. Returns why it failed, without the address: it may hold a secret; "" if it did not."""
        ...


NOTIFIERS: Final[Mapping[str, Notifier]] = {
    "http": webhook,
    "https": webhook,
}
LIMIT_S: Final = 10.0


def notify(url: str, message: Mapping[str, object], timeout_s: float = LIMIT_S) -> str:
    """Tell one address, whatever its kind; never raises. Returns why it failed, or ""."""
    scheme, found, _ = url.strip().partition("://")
    if not found:
        return "expected an address such as https://… or another kind of apprise's, got none"
    return NOTIFIERS.get(scheme.lower(), apprise).notify(url.strip(), message, timeout_s)


def notify_all(urls: Sequence[str], message: Mapping[str, object], timeout_s: float = LIMIT_S) -> tuple[str, ...]:
    """Tell all addresses at once, so that together they take no longer than one. Returns what each says."""
    answers = [f"no answer within {timeout_s:g} s"] * len(urls)

    def tell(number: int) -> None:
        answers[number] = notify(urls[number], message, timeout_s)

    workers = [threading.Thread(target=tell, args=(number,), daemon=True) for number in range(len(urls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout_s)
    return tuple(answers)
