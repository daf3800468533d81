"""
What lies between the S3 store and the network: the client, its time limits, the pace at which
bodies leave, and what the answers mean in plain words.

Found with botocore: while a body is sent the *connect* time-out holds, and it holds for one
`sendall`; a part that is handed over as bytes is one `sendall`, and on a slow line it never
gets through. So bodies are handed over as files, and leave block by block.
"""

from __future__ import annotations

import io
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal, cast
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from urllib3.exceptions import (
    HTTPError as BrokenAnswer,
)  # botocore lets it through where the body of a refusal breaks off

from runner.job import OffloadPolicy
from runner.storage.offsite.contract import PROBE, Block, OffsiteError, other_bytes
from vramfarm.checksum import crc32
from vramfarm.protocol import CHUNK_BYTES, Shard

if TYPE_CHECKING:  # stubs only, not installed with the runner
    from mypy_boto3_s3 import S3Client

MAX_ATTEMPTS: Final = 4
NO_ANSWER: Final = (BotoConnectionError, HTTPClientError, IncompleteReadError, BrokenAnswer)
TIMEOUTS_S: Final = (15.0, 60.0)  # to connect, and for a block of a body; between two pieces of an answer
_BLOCK_BYTES: Final = 256 << 10
_LEAST_BLOCK_BYTES: Final = 16 << 10
_LATE_S: Final = 0.25
_BLOCKS_PER_S: Final = 50  # a paced body leaves in so many at least: no bursts

_REGION_HINT: Final = "the bucket is in another region: set offload.region"
_HINTS: Final[Mapping[str, str]] = {
    "AccessDenied": "the key may not do this: check its rights and the bucket's policy (list, get, put, delete)",
    "403": "wrong key, or one that may not do this: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and its rights",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID: this server does not know it",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY: it does not belong to this key",
    "ExpiredToken": "the credentials have expired: get new ones, or ones that are renewed (an instance role)",
    "TokenRefreshRequired": "the credentials have expired: get new ones, or ones that are renewed (an instance role)",
    "InvalidToken": "check AWS_SESSION_TOKEN: it does not belong to this key",
    "NoSuchBucket": "make the bucket, or correct offload.to",
    "InvalidBucketName": "correct the bucket's name in offload.to",
    "PermanentRedirect": _REGION_HINT,
    "301": _REGION_HINT,
    "AuthorizationHeaderMalformed": _REGION_HINT,
    "IllegalLocationConstraintException": _REGION_HINT,
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it (timedatectl set-ntp true, or ntpdate)",
    "AccountProblem": "the store's owner must settle the account",
    "QuotaExceeded": "the store is full: make room, raise the quota, or keep fewer (offload.keep_last)",
    "NotImplemented": "this server cannot do what is needed: write, list, read and delete of plain objects, and parts",
}
_CURABLE_STATUS: Final = frozenset({401, 403})  # whoever says no may say yes tomorrow, or to a new key
_CURABLE: Final = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidIdentityToken"}
    | {"QuotaExceeded"}
)
_UNREACHABLE: Final = "check offload.endpoint and the network"
_NO_ROLE: Final = "the credentials of this machine's role did not come: does it still have one?"
_DAMAGED: Final = frozenset({"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"})
_SHORT: Final[Mapping[type[Exception], str]] = {
    ConnectTimeoutError: "no connection in time",
    ReadTimeoutError: "nothing came in time",
    ConnectionClosedError: "the connection was closed",
}
_PASSING: Final = _DAMAGED | {"RequestTimeout", "NoSuchUpload", "NoSuchKey"}
_PASSING_STATUS: Final = frozenset({404, 408, 409, 412, 425, 429})
_MAX_SAID: Final = 300


def connect(
    offload: OffloadPolicy, env: Mapping[str, str], *, num_connections: int, pace: Pace, timeouts_s: tuple[float, float]
) -> S3Client:
    """
    A client with time limits and bounded retries.

    Credentials come from `env`, else from where botocore looks; those of an instance role or of STS are
    renewed by botocore while the client lives. What `offload` leaves open is as `env` says, else as the
    profile of the AWS configuration files does.
    """
    session = botocore.session.get_session()
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
            aws_access_key_id=env.get("AWS_ACCESS_KEY_ID") or None,
            aws_secret_access_key=env.get("AWS_SECRET_ACCESS_KEY") or None,
            aws_session_token=env.get("AWS_SESSION_TOKEN") or None,
            config=config,
        )
    except ValueError as error:
        raise OffsiteError(f"offload.endpoint: {error}", hint="expected https://host", final=True) from error
    client.meta.events.register("before-send.s3", lambda request, **_: _send_in_blocks(request, pace))
    client.meta.events.register("needs-retry.s3", _damaged_on_its_way)  # type: ignore[arg-type]  # its answer counts
    return cast("S3Client", client)


def _damaged_on_its_way(response: Any, attempts: int, request_dict: Any, **_: Any) -> float | None:  # noqa: ANN401  # botocore's
    """Seconds to wait before a request is sent again that the server refused for its bytes; botocore takes that for our fault."""
    code = response[1].get("Error", {}).get("Code") if response else None
    if code not in _DAMAGED or attempts >= MAX_ATTEMPTS or PROBE in request_dict["url_path"]:
        return None
    return 0.2 * attempts


Addressing = Literal["auto", "path", "virtual"]


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


def _addressing(offload: OffloadPolicy, endpoint: str, profile: _Profile) -> Addressing:
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
    """After it was signed, so that only what leaves is paced, not what is read for the signature."""
    if request.body:
        body = io.BytesIO(request.body) if isinstance(request.body, bytes | bytearray) else request.body
        request.body = _Leaving(body, pace)


class Pace:
    """
    No more than so many bytes a second, all threads together. What a busy machine kept from leaving
    in time may follow, a quarter of a second's worth at most, so that the mean is kept as well.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at: float | None = None
        at_rate = _BLOCK_BYTES if bytes_per_s is None else bytes_per_s // _BLOCKS_PER_S
        self.block_bytes = min(_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, at_rate))

    def take(self, num_bytes: int) -> None:
        """Returns when so many bytes may leave."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now - _LATE_S, now if self._free_at is None else self._free_at)
            self._free_at = start + num_bytes / self._rate
        time.sleep(max(0.0, start - now))


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
def open_part(path: Path, shard: Shard, first: int, num_chunks: int) -> Iterator[IO[bytes]]:
    """
    Some chunks of a local file, as a body. What is wrong with the file is raised when the context ends,
    whatever botocore made of it: `damaged` for other bytes than the shard's, which never leave whole.
    """
    try:
        part = _FilePart(path, shard, first, num_chunks)
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

    def __init__(self, path: Path, shard: Shard, first: int, num_chunks: int) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._path, self._shard, self._first = path, shard, first
        self._size = min(num_chunks * CHUNK_BYTES, shard.size_bytes - first * CHUNK_BYTES)
        self._memory = memoryview(bytearray(_BLOCK_BYTES))
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


# ------------------------------------------------------------------------------- plain words


@contextmanager
def plain_words(where: str) -> Iterator[None]:
    """Whatever botocore raises, as an `OffsiteError` that says what to do."""
    try:
        yield
    except ClientError as error:
        raise _refused(where, error) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the server a role"
        raise OffsiteError(f"{where}: expected credentials, found none", hint=hint, final=True, curable=True) from error
    except NO_ANSWER as error:
        raise _unanswered(where, error) from error
    except (CredentialRetrievalError, MetadataRetrievalError) as error:
        raise OffsiteError(f"{where}: {error}", hint=_NO_ROLE, final=False) from error
    except BotoCoreError as error:
        raise OffsiteError(f"{where}: {error}", hint="check offload in job.yaml", final=True) from error


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _refused(where: str, error: ClientError) -> OffsiteError:
    code, fields = code_of(error), error.response.get("Error", {})
    answer = error.response.get("ResponseMetadata", {})
    status = answer.get("HTTPStatusCode", 0)
    said = " ".join(str(fields.get("Message", "")).split())[:_MAX_SAID]
    said = "".join(c if c.isprintable() else "?" for c in said)
    passing = code in _PASSING or status >= 500 or status in _PASSING_STATUS  # noqa: PLR2004  # the server's fault
    hint = _HINTS.get(code, "")
    region = fields.get("Region") or answer.get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if hint == _REGION_HINT and region:
        hint = f"{hint} to {region}"
    final, curable = bool(hint) or not passing, code in _CURABLE or status in _CURABLE_STATUS
    what = f"{where}: the store answered {status} {code}: {said}"
    return OffsiteError(what, hint=hint, final=final, curable=curable)


def _unanswered(where: str, error: Exception) -> OffsiteError:
    what = f"{where}: no answer{_from(getattr(error, 'kwargs', {}))}: {_why(error)}"
    if not isinstance(error, SSLError):
        return OffsiteError(what, hint=_UNREACHABLE, final=False)
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "a server with a CA of its own: put the CA's certificate into a file, name it in AWS_CA_BUNDLE; is the clock right?"
        return OffsiteError(f"{what}: its certificate is not trusted", hint=hint, final=True)
    return OffsiteError(what, hint="check offload.endpoint: is it https there, or http?", final=False)


def _from(told: Mapping[str, Any]) -> str:
    """Of an address its host: there may be a password before it."""
    proxy, server = (urlsplit(told.get(name, "")).netloc.rpartition("@")[2] for name in ("proxy_url", "endpoint_url"))
    return f" from the proxy {proxy}" if proxy else f" from {server}" if server else ""


def _why(error: Exception) -> str:
    """In a few words: botocore repeats the whole address, urllib3 names its own objects."""
    if type(error) in _SHORT:
        return _SHORT[type(error)]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) and cause.reason:
            return cause.reason.replace("_", " ").lower()
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
        cause = cause.__cause__ or cause.__context__
    return str(error)
