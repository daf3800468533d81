"""
How a person hears of a run. A notifier is a module with `notify` and a line in `NOTIFIERS`.

Addresses are secrets: they come from the environment, and no answer repeats them. The guardian
uses this, too: nothing but the standard library may be imported before an address asks for more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from runner.adapters.notifiers import apprise, webhook


class Notifier(Protocol):
    """What a notifier module offers. Whoever calls it waits in a thread: a listener that drips, or a name server, may hold it."""

    def notify(self, url: str, message: Mapping[str, object], timeout_s: float) -> str:
        """Tell `url`; never raises. Returns why it failed, without the address: it may hold a secret; "" if it did not."""
        ...


NOTIFIERS: Final[Mapping[str, Notifier]] = {
    "http": webhook,
    "https": webhook,
}
LIMIT_S: Final = 10.0


def notify(url: str, message: Mapping[str, object], timeout_s: float = LIMIT_S) -> str:
    """Tell one address; never raises. Returns why it failed, or ""."""
    return notify_all((url,), message, timeout_s)[0]


def notify_all(urls: Sequence[str], message: Mapping[str, object], timeout_s: float = LIMIT_S) -> tuple[str, ...]:
    """Tell all addresses at once, whatever their kinds, within `timeout_s`; never raises. Returns why each failed, or ""."""
    answers = [f"no answer within {timeout_s:g} s"] * len(urls)

    def tell(number: int) -> None:
        answers[number] = _tell(
            urls[number].strip(), message, timeout_s + 1.0
        )  # so that the same words tell of whoever is late

    workers = [threading.Thread(target=tell, args=(number,), daemon=True) for number in range(len(urls))]
    for worker in workers:
        worker.start()
    ends = time.monotonic() + timeout_s
    for worker in workers:
        worker.join(max(ends - time.monotonic(), 0.0))
    return tuple(answers)


def _tell(url: str, message: Mapping[str, object], timeout_s: float) -> str:
    scheme, found, _ = url.partition("://")
    if not found:
        return "expected an address such as https://… or another kind of apprise's, got none"
    return NOTIFIERS.get(scheme.lower(), apprise).notify(url, message, timeout_s)
