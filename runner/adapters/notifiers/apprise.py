"""
Whatever the apprise library can reach: mail, Telegram, ntfy, Matrix and some hundred more. An
optional extra, imported only when an address asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.util import find_spec


def notify(url: str, message: Mapping[str, object], timeout_s: float = 10.0) -> str:
    """Tell `url` within `timeout_s`; never raises. Returns why it failed, or ""."""
    if find_spec("apprise") is None:
        return "this kind of address needs the apprise extra: pip install 'vramfarm-runner[notify]'"
    outcome = [f"no answer within {timeout_s:g} s"]

    def tell() -> None:
        outcome[0] = _tell(url, message)

    worker = threading.Thread(target=tell, name="notify", daemon=True)
    worker.start()
    worker.join(timeout_s)
    return outcome[0]


def _tell(url: str, message: Mapping[str, object]) -> str:
    try:
        import apprise  # noqa: PLC0415  # half a second, and perhaps not there

        told = apprise.Apprise()
        if not told.add(url):
            return "apprise does not understand this address"
        done = told.notify(title=str(message.get("title", "")), body=str(message.get("text", "")))
    except Exception as error:  # noqa: BLE001  # a plugin of many may raise anything; its text may repeat the address
        return type(error).__name__
    return "" if done else "apprise could not deliver it"
