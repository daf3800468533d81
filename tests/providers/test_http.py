"""The one real `Send`, and the webhook: neither raises, hangs, or follows anybody."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from runner.adapters.notifiers import notify, notify_all
from runner.adapters.providers.http import make_send


@contextmanager
def serving(*pieces: bytes, pause_s: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """Answers every connection with these bytes, whatever is asked."""
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(5.0)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5.0)
                heard.append(_receive(connection))
                try:
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(pause_s)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/path", heard
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def _receive(connection: socket.socket) -> bytes:
    """A whole request, or as much as comes."""
    raw = b""
    while piece := connection.recv(65_536):
        raw += piece
        head, end, body = raw.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if end and len(body) >= int(length or 0):
            break
    return raw


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Thing: Yes\r\nConnection: close\r\n\r\n{}"


def test_status_body_and_headers_come_back():
    """
    Names of headers in lower case.
    """
    with serving(OK) as (url, _):
        reply = make_send(5.0)("GET", url, headers={})

    assert (200, b"{}", "Yes") == (reply.status, reply.body, reply.headers["x-thing"])


def test_an_error_of_the_server_is_an_answer_too():
    """
    With its body.
    """
    with serving(OK.replace(b"200 OK", b"503 No")) as (url, _):
        reply = make_send(5.0)("POST", url, headers={}, body=b"x")

    assert (503, b"{}") == (reply.status, reply.body)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((), id="closes at once"),
        pytest.param((b"garbage\r\n\r\n",), id="no HTTP"),
        pytest.param((b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",), id="cut"),
        pytest.param((b"HTTP/1.1 200 OK\r\n\r\n", b"x" * (2 << 20)), id="too long"),
    ],
)
def test_an_answer_that_is_none_has_status_0_and_says_why(pieces):
    """
    Nothing is raised.
    """
    with serving(*pieces) as (url, _):
        reply = make_send(5.0)("GET", url, headers={})

    assert 0 == reply.status
    assert b"no answer from" in reply.body


def test_a_server_that_drips_does_not_hold_us():
    """
    The time limit is for the whole answer.
    """
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    began = time.monotonic()
    with serving(head, *[b"x"] * 20, pause_s=0.1) as (url, _):
        reply = make_send(0.5)("GET", url, headers={})
        took = time.monotonic() - began

    assert 0 == reply.status
    assert took < 1.5


def test_nobody_there_is_an_answer_of_status_0():
    """
    Connection refused, no such host, no such scheme.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    send = make_send(2.0)

    replies = [send("GET", url, headers={}) for url in (f"http://127.0.0.1:{port}", "nonsense", "http://[", "http://")]

    assert [0] * 4 == [reply.status for reply in replies]


def test_a_key_that_cannot_be_sent_is_not_told():
    """
    The answer goes into logs.
    """
    send = make_send(2.0)

    replies = [send("GET", "http://127.0.0.1:9", headers={"Authorization": f"Bearer secret{c}x"}) for c in "\n\u20ac"]

    assert [0, 0] == [reply.status for reply in replies]
    assert not any(b"secret" in reply.body for reply in replies)


def test_a_redirect_is_not_followed():
    """
    The key would go to an address that nobody named.
    """
    with serving(OK) as (elsewhere, heard):
        redirect = OK.replace(b"200 OK", b"302 Found").replace(b"X-Thing: Yes", f"Location: {elsewhere}".encode())
        with serving(redirect) as (url, _):
            reply = make_send(5.0)("GET", url, headers={"Authorization": "Bearer key"})

    assert (302, []) == (reply.status, heard)


def test_no_proxy_stands_before_loopback(monkeypatch):
    """
    A proxy of the data centre cannot reach our own machine.
    """
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(OK) as (url, _):
        reply = make_send(5.0)("GET", url, headers={})

    assert 200 == reply.status


def test_a_webhook_is_posted_as_json():
    """
    "" says that it arrived.
    """
    with serving(OK) as (url, heard):
        error = notify(url, {"text": "done", "code": 0})

    assert "" == error
    assert {"text": "done", "code": 0} == json.loads(heard[0].partition(b"\r\n\r\n")[2])


def test_a_webhook_that_fails_says_why_without_its_address():
    """
    Addresses of webhooks are secrets.
    """
    with serving(OK.replace(b"200 OK", b"404 No")) as (url, _):
        errors = [
            notify(f"{url}/secret", {}),
            notify("http://127.0.0.1:9/secret", {}),
            notify("secret", {}),
            notify("http://[secret", {}),
            notify("nosuchkind://secret", {}),
            notify("json://127.0.0.1:9/secret", {"text": "x"}),
        ]

    assert all(errors)
    assert not any("secret" in error for error in errors)


@pytest.mark.skipif(find_spec("apprise") is None, reason="the notify extra is not installed")
@pytest.mark.filterwarnings("ignore")  # what its plugins import is not ours
def test_kinds_that_apprise_knows_are_told_by_it():
    """
    Title and text; the rest is for machines.
    """
    with serving(OK) as (url, heard):
        error = notify(url.replace("http://", "json://"), {"title": "job: ended", "text": "done", "event": "ended"})

    assert "" == error
    said = json.loads(heard[0].partition(b"\r\n\r\n")[2])
    assert ("job: ended", "done") == (said["title"], said["message"])


def test_all_are_told_at_once_and_one_that_hangs_costs_the_others_nothing():
    """
    Together they take no longer than one.
    """
    began = time.monotonic()
    with serving(b"", pause_s=5) as (deaf, _), serving(OK) as (url, heard):
        answers = notify_all([deaf, url, deaf], {"text": "x"}, timeout_s=1.0)
        took = time.monotonic() - began

    assert ("no answer within 1 s", "", "no answer within 1 s") == answers
    assert 1 == len(heard)
    assert took < 5.0


def test_a_webhook_that_drips_costs_no_more_than_its_time():
    """
    The server must not be kept from its stop by a message.
    """
    began = time.monotonic()
    with serving(b"HTTP/1.1 200 OK\r\n", *[b"X"] * 20, pause_s=0.1) as (url, _):
        error = notify(url, {}, timeout_s=0.3)
        took = time.monotonic() - began

    assert "no answer within 0.3 s" == error
    assert took < 1.0
