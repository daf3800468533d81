"""
The one real `Send`: urllib, a time limit, no surprises.

Everything it needs from the disk (certificates, codecs) is loaded when it is made.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # else the first look-up of a name would import it
import http.client
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from typing import IO, Final
from urllib.parse import unquote, urlsplit

from runner.adapters.providers.contract import Reply, Send

_LIMIT_BYTES: Final = 1 << 20
_UNIX: Final = "http+unix://"  # the socket's path, quoted, stands where a host would
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to an address that nobody named."""

    def redirect_request(self, *_: object) -> None:  # None: answer with the redirect itself
        return None


def make_send(timeout_s: float = 10.0) -> Send:
    """A `Send` that gives up after about `timeout_s` and needs no file afterwards."""
    tls = urllib.request.HTTPSHandler(context=ssl.create_default_context())
    direct = urllib.request.build_opener(_NoRedirect, tls, urllib.request.ProxyHandler({}))
    outside = urllib.request.build_opener(_NoRedirect, tls)

    def send(method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None) -> Reply:
        try:
            if url.startswith(_UNIX):
                return _over_socket(method, url, headers, body, timeout_s)
            opener = direct if urlsplit(url).hostname in _LOOPBACK else outside
            request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)  # noqa: S310
            return _exchange(opener, request, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            return Reply(0, f"no answer from {url}: {_reason(error)}".encode())
        except ValueError:  # its text repeats headers, and so the key
            return Reply(0, f"no answer from {url}: the address or the key has characters that cannot be sent".encode())

    return send


def _exchange(opener: urllib.request.OpenerDirector, request: urllib.request.Request, timeout_s: float) -> Reply:
    ends = time.monotonic() + timeout_s
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return Reply(response.status, _read(response, ends), _lower(response.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, _read(error, ends), _lower(error.headers))


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, as Docker's engine speaks it."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _over_socket(method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float) -> Reply:
    place, _, rest = url.removeprefix(_UNIX).partition("/")
    ends = time.monotonic() + timeout_s
    connection = _SocketConnection(unquote(place), timeout_s)
    try:
        connection.request(method, f"/{rest}", body=body, headers=dict(headers))
        response = connection.getresponse()
        return Reply(response.status, _read(response, ends), _lower(response.headers))
    finally:
        connection.close()


def _read(response: IO[bytes], ends: float) -> bytes:
    """The body, up to the limits of size and time: a server that drips must not hold us."""
    body = bytearray()
    while len(body) < _LIMIT_BYTES and time.monotonic() < ends:
        piece = response.read1(1 << 16)  # type: ignore[attr-defined]  # http.client's has it
        if not piece and getattr(response, "length", None):
            raise ConnectionError(f"the answer ended early, after {len(body)} bytes")
        if not piece:
            return bytes(body)
        body += piece
    raise TimeoutError(f"the answer was not whole after {len(body)} bytes")


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(reason) or type(reason).__name__
