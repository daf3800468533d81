"""
Bodies of requests and answers, between files and sockets.

Found with botocore: while a body is sent the *connect* time-out holds, and it holds for one
`sendall`; a part that is handed over as bytes is one `sendall`, and on a slow line it never
gets through. So bodies are handed over as files, and leave block by block, or by the kernel.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any, Final, cast

from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError

from runner.storage.offsite.contract import Block, OffsiteError, other_bytes
from runner.storage.offsite.pace import PACED_BYTES, Pace
from vramfarm.checksum import crc32
from vramfarm.protocol import CHUNK_BYTES, Shard

_CANNOT: Final = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
)  # send from this file system, or into this socket


class Leaving:
    """
    A body on its way out. Reads of any size give one block: http.client asks for 16 KiB, which costs.

    Once it is told the `connection`, which is one of plain http, and `may_pass`, the first read sends all of it unseen.
    """

    def __init__(self, body: Any, pace: Pace, *, may_pass: bool) -> None:  # noqa: ANN401  # anything that reads
        self._body, self._pace = body, pace
        self._may_pass = may_pass and not pace.is_limited and isinstance(body, FilePart) and body.is_compared
        self.connection: Any = None

    def read(self, _: int = -1) -> Block:
        if self.connection and self._may_pass:
            self._may_pass = False  # what is left, if anything, is read
            if self._body.pass_to(self.connection.sock):
                return b""
        block: Block = self._body.read(self._pace.block_bytes)
        self._pace.take(len(block))
        return block

    def seek(self, offset: int) -> None:
        """Botocore goes back to the start before it tries again."""
        self._body.seek(offset)


@contextmanager
def open_part(  # noqa: PLR0913  # all but two by name
    path: Path,
    shard: Shard,
    first: int,
    num_chunks: int,
    left: Callable[[int], None] = lambda _: None,
    *,
    is_compared: bool = False,
) -> Iterator[IO[bytes]]:
    """
    Some chunks of a local file, as a body; `left` is called when all of its bytes have left. What is wrong with the file is raised when the context ends,
    whatever botocore made of it: `damaged` for other bytes than the shard's. Those never leave whole, unless `is_compared`: the store refuses them.
    """
    try:
        part = FilePart(path, shard, first, num_chunks, left, is_compared=is_compared)
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        yield cast("IO[bytes]", part)
    except Exception:
        if part.problem:
            raise part.problem from None
        raise
    finally:
        part.close()


def _unreadable(path: Path, error: OSError) -> OffsiteError:
    return OffsiteError(f"{path}: {error.strerror}", final=False)


class FilePart:
    """Read once, when it is needed, into memory that is used again, and summed while it is warm; or not read at all."""

    def __init__(  # noqa: PLR0913  # as `open_part` has them
        self,
        path: Path,
        shard: Shard,
        first: int,
        num_chunks: int,
        left: Callable[[int], None],
        *,
        is_compared: bool,
    ) -> None:
        self._left, self.is_compared = left, is_compared
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._path, self._shard, self._first = path, shard, first
        self._size = min(num_chunks * CHUNK_BYTES, shard.size_bytes - first * CHUNK_BYTES)
        self._memory = memoryview(b"")
        self._at = self._checksum = 0
        self.problem: OffsiteError | None = None

    def read(self, num_bytes: int = -1) -> memoryview:
        """Some of them, none at the end; there until the next call. No block has bytes of two chunks."""
        self._memory = self._memory or memoryview(bytearray(PACED_BYTES))
        index, begin = divmod(self._at, CHUNK_BYTES)
        end = min(CHUNK_BYTES, self._size - index * CHUNK_BYTES)
        wanted = self._memory[: end - begin]
        block = self._load(wanted if num_bytes < 0 else wanted[:num_bytes])
        self._checksum = crc32(block, self._checksum if begin else 0)
        cut = len(block) == 0 and len(wanted) > 0 and num_bytes != 0
        done = len(block) > 0 and begin + len(block) == end
        if cut or (done and self._checksum != self._shard.checksums[self._first + index]):
            self.problem = other_bytes(self._path, self._first + index)
            raise self.problem
        self._at += len(block)
        if len(block) > 0 and self._at == self._size:
            self._left(self._size)
        return block

    def pass_to(self, sock: socket.socket) -> bool:
        """
        All bytes from the file to a socket by the kernel, which takes neither a copy nor Python's lock: between two blocks
        that are read a thread would wait for those of all the other parts. False: it cannot, and none has left.

        The socket's time limit holds for each 64 KiB and is the kernel's (Python's own would need a call for each
        filling of the socket's memory). Whatever fails is told by whoever reads the part at the next attempt.
        """
        limit_s = sock.gettimeout() or 0.0
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6)))
        sock.settimeout(None)
        try:
            while self._at < self._size:
                self._at += self._pass_some(sock.fileno())
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        except OSError as error:
            if error.errno in _CANNOT and not self._at:
                return False
            raise
        finally:
            sock.settimeout(limit_s or None)
        self._left(self._size)
        return True

    def _pass_some(self, to: int) -> int:
        sent = os.sendfile(to, self._fd, self._first * CHUNK_BYTES + self._at, self._size - self._at)
        if not sent:
            raise OSError(errno.ENODATA, "the file is too short", str(self._path))
        return sent

    def _load(self, memory: memoryview) -> memoryview:
        try:
            return memory[: os.preadv(self._fd, [memory], self._first * CHUNK_BYTES + self._at)]
        except OSError as error:
            self.problem = _unreadable(self._path, error)
            raise self.problem from None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        os.close(self._fd)


def _read_into(body: Any, memory: memoryview) -> int:  # noqa: ANN401  # botocore's streaming body
    """
    Fill memory from an answer's body; fewer bytes only at its end.

    Straight from the socket, where urllib3 would make new bytes for each block and copy them.
    """
    over: Any = getattr(body, "_raw_stream", None)
    answer = getattr(over, "_original_response", None)
    if not isinstance(answer, HTTPResponse):
        return cast("int", body.readinto(memory))
    try:
        came = answer.readinto(memory)
    except TimeoutError as error:
        raise ReadTimeoutError(endpoint_url=over.url or "", error=error) from error
    except (OSError, HTTPException) as error:
        raise ResponseStreamingError(error=error) from error
    if answer.isclosed():  # all came: the connection can take the next request
        over.release_conn()
    return came


class Reading:
    """A range of one object on its way. After an error it goes on where the last whole block ended."""

    def __init__(self, ask: Callable[..., Mapping[str, Any]], offset: int, num_bytes: int, tag: str) -> None:
        self._ask, self._tag = ask, tag
        self._at = offset
        self._body: Any = None
        self.left = num_bytes

    def next_block(self, memory: memoryview) -> memoryview:
        if self._body is None:
            answer = self._ask(self._at, self._at + self.left, self._tag)
            self._body, self.left = answer["Body"], min(self.left, answer["ContentLength"])
            self._tag = answer.get("ETag", "")
        block, came = memory[: self.left], 0  # no more: a server that ignores the range cannot fill our memory
        try:
            came = _read_into(self._body, block)
        finally:
            if came != len(block):
                self.close()
        if came != len(block):
            raise IncompleteReadError(actual_bytes=came, expected_bytes=len(block))
        self._at, self.left = self._at + came, self.left - came
        return block

    def close(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None
