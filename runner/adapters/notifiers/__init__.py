"""
How a person hears of the end. A notifier is a module with `notify` and a line in `NOTIFIERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from runner.adapters.notifiers import webhook


class Notifier(Protocol):
    """What a notifier module offers."""

    def notify(self, url: str, message: Mapping[str, object], timeout_s: float = 10.0) -> str:
        """Tell `url`; never raises. Returns why it failed, without the address: it may hold a secret; "" if it did not."""
        ...


NOTIFIERS: Final[Mapping[str, Notifier]] = {
    "http": webhook,
    "https": webhook,
}


def notify(url: str, message: Mapping[str, object]) -> str:
    """Tell one address, whatever its kind; never raises. Returns why it failed, or ""."""
    scheme = url.partition("://")[0].lower()
    if scheme not in NOTIFIERS:
        return f"expected an address that begins with {' or '.join(f'{s}://' for s in NOTIFIERS)}, got another kind"
    return NOTIFIERS[scheme].notify(url, message)
