"""
Whatever the apprise library can reach: mail, Telegram, ntfy, Matrix and some hundred more. An
optional extra, imported only when an address asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec


def notify(url: str, message: Mapping[str, object], timeout_s: float) -> str:  # noqa: ARG001  # its plugins have limits of their own
    """Tell `url`; never raises. Returns why it failed, or ""."""
    if find_spec("apprise") is None:
        return "this kind of address needs the apprise extra: pip install 'vramfarm-runner[notify]'"
    try:
        import apprise  # noqa: PLC0415  # half a second, and perhaps not there

        told = apprise.Apprise()
        if not told.add(url):
            return "apprise does not understand this address"
        done = told.notify(title=str(message.get("title", "")), body=str(message.get("text", "")))
    except Exception as error:  # noqa: BLE001  # a plugin of many may raise anything; its text may repeat the address
        return type(error).__name__
    return "" if done else "apprise could not deliver it"
