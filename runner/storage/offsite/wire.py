"""
What lies between the S3 store and the network: the client, its time limits, and the pace at which
bodies leave.

Found with botocore: while a body is sent the *connect* time-out holds, and it holds for one
`sendall`; a part that is handed over as bytes is one `sendall`, and on a slow line it never
gets through. So bodies are handed over as files, and leave block by block.
"""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

from botocore.exceptions import ReadTimeoutError, ResponseStreamingError

from runner.storage.offsite.contract import PROBE, Addressing, Block, OffsiteError, Where, other_bytes
from runner.storage.offsite.cures import DAMAGED, misconfigured
from runner.storage.offsite.hidden import hidden
from runner.storage.offsite.pace import PACED_BYTES, Pace
from vramfarm.checksum import crc32
from vramfarm.protocol import CHUNK_BYTES, Shard

with hidden("awscrt"):  # botocore would import it, for 40 ms and 7 MB, and sign with it instead of by itself
    import botocore.session
    from botocore.config import Config
    from botocore.loaders import JSONFileLoader, Loader

if TYPE_CHECKING:  # stubs only, not installed with the runner
    from mypy_boto3_s3 import S3Client

MAX_ATTEMPTS: Final = 4
TIMEOUTS_S: Final = (15.0, 60.0)  # to connect, and for a block of a body; between two pieces of an answer


def connect(
    offload: Where, env: Mapping[str, str], *, num_connections: int, pace: Pace, timeouts_s: tuple[float, float]
) -> S3Client:
    """
    A client with time limits and bounded retries.

    Credentials come from `env`, else from where botocore looks; those of an instance role or of STS are
    renewed by botocore while the client lives. What `offload` leaves open is as `env` says, else as the
    profile of the AWS configuration files does.
    """
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    profile = _profile(session)
    endpoint = offload.endpoint or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or profile.endpoint
    region = offload.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or profile.region
    config = Config(
        connect_timeout=timeouts_s[0],
        read_timeout=timeouts_s[1],
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        max_pool_connections=num_connections,
        tcp_keepalive=True,
        s3={
            "addressing_style": _addressing(offload, endpoint, profile),
            "payload_signing_enabled": False,  # each body has a digest among the headers, which are signed
        },
        request_checksum_calculation="when_required",  # we send our own
        response_checksum_validation="when_required",
    )
    try:
        client = session.create_client(
            "s3",
            region_name=region or "us-east-1",
            endpoint_url=endpoint or None,
            verify=_own_ca(env, profile),
            aws_access_key_id=_key(env, "AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=_key(env, "AWS_SECRET_ACCESS_KEY"),
            aws_session_token=_key(env, "AWS_SESSION_TOKEN"),
            config=config,
        )
    except ValueError as error:
        raise misconfigured(offload.to or "", error) from error
    client.meta.events.register("before-send.s3", lambda request, **_: _send_in_blocks(request, pace))
    client.meta.events.register_last("before-parameter-build.s3", _ends_here)
    client.meta.events.register("needs-retry.s3", _damaged_on_its_way)  # type: ignore[arg-type]  # its answer counts
    return cast("S3Client", client)


def _ends_here(model: Any, context: dict[str, Any], **_: Any) -> None:  # noqa: ANN401  # botocore's
    """
    Botocore asks the bucket for its region where an answer leads elsewhere without saying where; where that answer
    leads elsewhere, too, it asks the bucket again, until Python has no stack left.
    """
    if model.name == "HeadBucket":
        context["s3_redirect"] = {**context.get("s3_redirect", {}), "redirected": True}


class _Files(JSONFileLoader):
    def load_file(self, file_path: str) -> Any:  # noqa: ANN401  # JSON
        """Botocore's descriptions are kept to the end: looking through them for garbage, again and again, takes longer than reading them."""
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().load_file(file_path)
        finally:
            gc.freeze()
            if collects:
                gc.enable()


class _Loader(Loader):
    """Botocore's own looks into the folders of all its four hundred services for the name of one; and each session has another."""

    FILE_LOADER_CLASS = _Files

    def list_available_services(self, type_name: str) -> list[str]:
        del type_name
        return [name for folder in self.search_paths if Path(folder).is_dir() for name in os.listdir(folder)]  # noqa: PTH208  # names only


@cache
def _loader(more: str | None) -> _Loader:
    """What one client has read from botocore's files, the next one need not."""
    return _Loader(extra_search_paths=more.split(os.pathsep) if more else None)


def _key(env: Mapping[str, str], name: str) -> str | None:
    """Whatever is around it, such as the line's end of a file, is none of it; what is in it would be told in an error."""
    value = env.get(name, "").strip()
    if not all("!" <= character <= "~" for character in value):
        hint = "is it cut in two, or quoted twice?"
        raise OffsiteError(f"{name}: expected one word, found more", hint=hint, final=True, curable=True)
    return value or None


def _damaged_on_its_way(response: Any, attempts: int, request_dict: Any, **_: Any) -> float | None:  # noqa: ANN401  # botocore's
    """Seconds to wait before a request is sent again that the server refused for its bytes; botocore takes that for our fault."""
    code = response[1].get("Error", {}).get("Code") if response else None
    if code not in DAMAGED or attempts >= MAX_ATTEMPTS or PROBE in request_dict["url_path"]:
        return None
    return 0.2 * attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    """What the AWS configuration files say of the store, in the profile that counts. Empty: nothing."""

    endpoint: str
    region: str
    addressing: str
    ca_bundle: str


def _profile(session: botocore.session.Session) -> _Profile:
    scoped = session.get_scoped_config()
    own = session.full_config.get("services", {}).get(scoped.get("services"), {}).get("s3", {})
    s3 = scoped.get("s3", {})
    return _Profile(
        endpoint=own.get("endpoint_url") or scoped.get("endpoint_url", ""),
        region=scoped.get("region", ""),
        addressing=s3.get("addressing_style", "") if isinstance(s3, dict) else "",
        ca_bundle=scoped.get("ca_bundle", ""),
    )


def _addressing(offload: Where, endpoint: str, profile: _Profile) -> Addressing:
    """Every server but AWS understands the bucket in the path; AWS wants it in the host's name."""
    if offload.addressing != "auto":
        return offload.addressing
    if profile.addressing in {"path", "virtual"}:
        return cast("Addressing", profile.addressing)
    return "path" if endpoint else "auto"


def _own_ca(env: Mapping[str, str], profile: _Profile) -> str | None:
    bundle = env.get("AWS_CA_BUNDLE") or profile.ca_bundle or None
    if bundle and not Path(bundle).is_file():
        raise OffsiteError(
            f"AWS_CA_BUNDLE: expected a file of certificates, found none at {bundle}",
            hint="in a container, mount it first",
            final=True,
        )
    return bundle


# ------------------------------------------------------------------------------------ bodies


def _send_in_blocks(request: Any, pace: Pace) -> None:  # noqa: ANN401  # botocore's prepared request
    """
    After it was signed, so that only what leaves is paced, not what is read for the signature.

    Nobody waits for a server's word before a body (`Expect`), which costs each part a turn, and a long one where the server is busy. A server
    that does not want it closes the connection, and may not be heard; so from the second attempt on it is asked first.
    """
    if request.body:
        if request.headers.get("amz-sdk-request", b"").startswith(b"attempt=1"):
            request.headers.pop("Expect", None)
        body = io.BytesIO(request.body) if isinstance(request.body, bytes | bytearray) else request.body
        request.body = _Leaving(body, pace)


class _Leaving:
    """A body on its way out. Reads of any size give one block: http.client asks for 16 KiB, which costs."""

    def __init__(self, body: Any, pace: Pace) -> None:  # noqa: ANN401  # anything that reads
        self._body, self._pace = body, pace

    def read(self, _: int = -1) -> Block:
        block: Block = self._body.read(self._pace.block_bytes)
        self._pace.take(len(block))
        return block

    def seek(self, offset: int) -> None:
        """Botocore goes back to the start before it tries again."""
        self._body.seek(offset)


@contextmanager
def open_part(
    path: Path, shard: Shard, first: int, num_chunks: int, left: Callable[[int], None] = lambda _: None
) -> Iterator[IO[bytes]]:
    """
    Some chunks of a local file, as a body; `left` is called when all of its bytes are read. What is wrong with the file is raised when the context ends,
    whatever botocore made of it: `damaged` for other bytes than the shard's, which never leave whole.
    """
    try:
        part = _FilePart(path, shard, first, num_chunks, left)
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


class _FilePart:
    """Read once, when it is needed, into memory that is used again, and summed while it is warm."""

    def __init__(self, path: Path, shard: Shard, first: int, num_chunks: int, left: Callable[[int], None]) -> None:
        self._left = left
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._path, self._shard, self._first = path, shard, first
        self._size = min(num_chunks * CHUNK_BYTES, shard.size_bytes - first * CHUNK_BYTES)
        self._memory = memoryview(bytearray(PACED_BYTES))
        self._at = self._checksum = 0
        self.problem: OffsiteError | None = None

    def read(self, num_bytes: int = -1) -> memoryview:
        """Some of them, none at the end; there until the next call. No block has bytes of two chunks."""
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


def read_into(body: Any, memory: memoryview) -> int:  # noqa: ANN401  # botocore's streaming body
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
