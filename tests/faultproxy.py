"""
A proxy between a client and a real S3 server that breaks what it is told to break.

It knows the operations of S3 by name, and leaves every signature valid. A fault is taken once
per request that it fits, `times` in all; `taken` has the operations that met one.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

_BLOCK_BYTES = 64 << 10
_HEAD_BYTES = 1 << 20
_LATE_S = 0.05
_HELD_S = 0.01
_CHECKSUMS = (b"x-amz-checksum-crc64nvme", b"x-amz-checksum-crc32")
_DIGESTS = {*_CHECKSUMS, b"content-md5"}
_NOD = b'HTTP/1.1 200 OK\r\netag: "new"\r\ncontent-length: 4\r\n\r\n<a/>'


@dataclass(kw_only=True)
class Fault:
    """What happens to a request that fits."""

    operation: str = ".*"  # a regular expression: UploadPart, GetObject, ListObjectsV2, ...
    path: str = ".*"  # the same, of bucket and key
    times: float = float("inf")
    answer: tuple[int, str] | None = None  # a status and S3's code, in place of the server's answer
    hang_s: float = 0.0  # silence, then a reset
    held: bool = False  # silence until it is healed, then a reset; with `lost` the server has done it
    reset: bool = False  # before the server has seen anything
    cut_up: int | None = None  # a reset after so many bytes of the request's body
    cut_down: int | None = None  # a reset after so many bytes of the answer's body
    end_early: int | None = None  # a polite end there, as if that had been all
    flip: int | None = None  # this byte of the answer's body is another one
    flip_up: int | None = None  # this byte of the request's body is another one
    lost: bool = False  # the server does it, the client never hears
    taken: list[str] = field(default_factory=list)


class FaultProxy:
    """Runs in a thread of its own while the context lasts."""

    def __init__(self, endpoint: str, *, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: speak https to the client."""
        self._target = urlsplit(endpoint)
        self._tls = tls
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._up = _Line()
        self.faults: list[Fault] = []
        self.operations: list[str] = []  # all that came
        self.hosts: set[str] = set()  # what they were addressed to; `http_proxy` brings any name here
        self.without_headers: tuple[str, ...] = ()  # what the answers are robbed of: x-amz-checksum-…
        self.refused_headers: tuple[str, ...] = ()  # requests with one are answered 501 NotImplemented
        self.answers: dict[
            tuple[str, ...], tuple[int, str]
        ] = {}  # to requests with all of these: `name` or `name: value`
        self.ignored_headers: tuple[str, ...] = ()  # puts with one succeed, whatever the header asked for
        self.wants_digests = False  # as a bucket with a default retention does
        self.repeats_checksums = False  # it compares none, and says of an object what it was told
        self._checksums: dict[str, tuple[bytes, bytes]] = {}

    def __enter__(self):
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def num_bytes_up(self) -> int:
        return self._up.num_bytes

    def limit_up(self, bytes_per_s: float) -> None:
        """The line of a rented machine: all connections together."""
        self._up.bytes_per_s = bytes_per_s

    def add(self, **what) -> Fault:
        with self._lock:
            self.faults.append(Fault(**what))
            return self.faults[-1]

    def heal(self) -> None:
        with self._lock:
            self.faults.clear()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(ready))

    async def _serve(self, ready: threading.Event) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=_HEAD_BYTES, ssl=self._tls)
        self._port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _take(self, operation: str, path: str) -> Fault:
        with self._lock:
            self.operations.append(operation)
            for fault in self.faults:
                if fault.times > 0 and re.fullmatch(fault.operation, operation) and re.fullmatch(fault.path, path):
                    fault.times -= 1
                    fault.taken.append(operation)
                    return fault
        return Fault()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, EOFError, _CutError):
            _reset(writer)
        except asyncio.CancelledError:
            writer.transport.abort()

    async def _one(self, reader, writer) -> bool:
        """One request and its answer; whether the connection goes on."""
        head = await _read_head(reader)
        if head is None:
            writer.close()
            return False
        self.hosts.add(head.fields.get(b"host", b"").decode())
        fault = self._take(head.operation, head.path)
        if fault.hang_s:
            await asyncio.sleep(fault.hang_s)
            raise _CutError
        if fault.held and not fault.lost:
            await self._hold(fault)
        if fault.reset:
            raise _CutError
        if b"100-continue" in head.fields.get(b"expect", b""):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        fault = self._refusal(head) or fault
        if fault.answer:
            async for _ in _body(reader, head):
                pass
            writer.write(_error(head, *fault.answer))
            await writer.drain()
            return True
        if any(name.encode() in head.fields for name in self.ignored_headers):
            async for _ in _body(reader, head):
                pass
            writer.write(b'HTTP/1.1 200 OK\r\netag: "new"\r\ncontent-length: 0\r\n\r\n')
            await writer.drain()
            return True
        return await self._pass_on(head, reader, writer, fault)

    async def _hold(self, fault: Fault) -> None:
        while fault in self.faults:  # noqa: ASYNC110  # it is healed from another thread
            await asyncio.sleep(_HELD_S)
        raise _CutError

    def _refusal(self, head: _Head) -> Fault | None:
        answers = {(name,): (501, "NotImplemented") for name in self.refused_headers} | self.answers
        for headers, answer in answers.items():
            if all(head.has(header) for header in headers):
                return Fault(answer=answer)
        if self.wants_digests and head.operation in {"PutObject", "UploadPart"} and not _DIGESTS & head.fields.keys():
            return Fault(answer=(400, "InvalidRequest"))
        return None

    async def _pass_on(self, head: _Head, reader, writer, fault: Fault) -> bool:
        far_reader, far = await asyncio.open_connection(self._target.hostname, self._target.port, limit=_HEAD_BYTES)
        try:
            await self._forward(reader, head, far, fault)
            answer = await self._read_answer(head, far_reader)
            if self.repeats_checksums and answer is not None and answer.status == 400:
                writer.write(_NOD)
                return True
            return await self._answer(head, answer, far_reader, writer, fault)
        finally:
            _reset(far)

    async def _forward(self, reader, head: _Head, far, fault: Fault) -> None:
        far.write(head.without(b"expect", b"connection"))
        seen = 0
        async for block in _body(reader, head):
            await self._up.take(len(block))
            if fault.cut_up is not None and seen + len(block) > fault.cut_up:
                far.write(block[: fault.cut_up - seen])
                await far.drain()
                raise _CutError
            far.write(_flipped(block, seen, fault.flip_up))
            await far.drain()
            seen += len(block)

    async def _read_answer(self, head: _Head, far_reader) -> _Head | None:
        answer = await _read_head(far_reader)
        while answer is not None and answer.status == 100:
            answer = await _read_head(far_reader)
        if self.repeats_checksums and answer is not None:
            self._repeat_checksum(head, answer)
        return answer

    def _repeat_checksum(self, head: _Head, answer: _Head) -> None:
        told = next(((name, head.fields[name]) for name in _CHECKSUMS if name in head.fields), None)
        if told is not None and head.operation in {"PutObject", "CompleteMultipartUpload"}:
            self._checksums[head.path] = told
        if head.method == "HEAD" and head.path in self._checksums:
            answer.raw = [line for line in answer.raw if not line.lower().startswith(_CHECKSUMS)]
            answer.raw.append(b": ".join(self._checksums[head.path]))

    async def _answer(self, head: _Head, answer: _Head | None, far_reader, writer, fault: Fault) -> bool:
        if fault.held:
            await self._hold(fault)
        if answer is None or fault.lost:
            raise _CutError
        writer.write(answer.without(*(name.encode() for name in self.without_headers), b"connection"))
        seen = 0
        has_body = head.method != "HEAD" and answer.status not in {204, 304}
        async for block in _body(far_reader, answer) if has_body else _nothing():
            end = fault.cut_down if fault.cut_down is not None else fault.end_early
            if end is not None and seen + len(block) > end:
                writer.write(block[: end - seen])
                await writer.drain()
                if fault.cut_down is not None:
                    raise _CutError
                writer.close()
                return False
            writer.write(_flipped(block, seen, fault.flip))
            await writer.drain()
            seen += len(block)
        await writer.drain()
        return True


class _CutError(Exception):
    """This connection ends here."""


class _Line:
    """All bodies on their way up, together. What a busy machine kept from passing in time may follow, a moment's worth at most."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self.num_bytes = 0
        self._free_at = 0.0

    async def take(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.bytes_per_s:
            self._free_at = max(self._free_at, time.monotonic() - _LATE_S) + num_bytes / self.bytes_per_s
            await asyncio.sleep(self._free_at - time.monotonic())


@dataclass
class _Head:
    raw: list[bytes]
    fields: dict[bytes, bytes]

    @property
    def method(self) -> str:
        return self.raw[0].split(b" ")[0].decode()

    @property
    def status(self) -> int:
        return int(self.raw[0].split(b" ")[1])

    @property
    def path(self) -> str:
        return self.raw[0].split(b" ")[1].decode().partition("?")[0]

    @property
    def operation(self) -> str:
        return _operation(self.method, self.raw[0].split(b" ")[1].decode(), self.fields)

    def has(self, header: str) -> bool:
        name, _, value = header.encode().partition(b": ")
        return name in self.fields and value in {b"", self.fields[name]}

    def without(self, *names: bytes) -> bytes:
        kept = [line for line in self.raw[1:] if line.partition(b":")[0].strip().lower() not in names]
        return b"\r\n".join([self.raw[0], *kept]) + b"\r\n\r\n"


async def _read_head(reader) -> _Head | None:
    try:
        raw = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    pairs = (line.partition(b":") for line in raw[1:])
    return _Head(raw, {name.strip().lower(): value.strip() for name, _, value in pairs})


async def _body(reader, head: _Head):
    if b"chunked" in head.fields.get(b"transfer-encoding", b""):
        while size := int(line := await reader.readline(), 16):
            yield line
            yield await reader.readexactly(size + 2)
        yield line + await reader.readline()
        return
    left = int(head.fields.get(b"content-length", b"0"))
    while left:
        block = await reader.read(min(left, _BLOCK_BYTES))
        if not block:
            raise _CutError
        left -= len(block)
        yield block


async def _nothing():
    return
    yield


def _flipped(block: bytes, seen: int, at: int | None) -> bytes:
    if at is None or not seen <= at < seen + len(block):
        return block
    changed = bytearray(block)
    changed[at - seen] ^= 0xFF
    return bytes(changed)


def _error(head: _Head, status: int, code: str) -> bytes:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as told</Message></Error>".encode()
    body = b"" if head.method == "HEAD" else text
    return (
        f"HTTP/1.1 {status} Told\r\ncontent-type: application/xml\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


def _reset(writer) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


_OF_OBJECTS = {
    ("PUT", "partNumber"): "UploadPart",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("GET", "uploadId"): "ListParts",
}
_PLAIN = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}


def _operation(method: str, target: str, fields: dict[bytes, bytes]) -> str:
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    _, _, key = parts.path.strip("/").partition("/")
    if not key:
        return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2" if "list-type" in query else "Bucket"
    named = next((name for (m, word), name in _OF_OBJECTS.items() if m == method and word in query), "")
    name = named or _PLAIN.get(method, method)
    return {"UploadPart": "UploadPartCopy", "PutObject": "CopyObject"}[name] if b"x-amz-copy-source" in fields else name
