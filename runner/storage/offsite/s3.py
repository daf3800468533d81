"""
Any S3 server as a store.

A file goes up in parts, several at a time, each with its CRC32, and is completed with the
CRC32 of the whole (`FULL_OBJECT`), which the server compares and reports from then on. AWS
and SeaweedFS do, and refuse a wrong one. A server that reports no such checksum is usable:
`head` has none, and the caller reads the bytes back.

Found with boto3, and answered here or by the callers' checksums: a ranged read hands over a
flipped byte, or a body that was cut short, as if nothing were wrong, and retries no body; a
`put_object` whose answer was lost is sent again, so that `If-None-Match` may be refused
because of ourselves; a HEAD of a bucket that is not there is a plain 404.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

import boto3
import tenacity
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from runner.job import OffloadPolicy
from runner.storage.checksums import combine_chunks, crc32
from runner.storage.offsite.contract import (
    MAX_SMALL_BYTES,
    Entry,
    Head,
    OffsiteError,
    Sent,
    Version,
    in_parallel,
    is_key,
    read_chunks,
)
from vramfarm.protocol import CHUNK_BYTES, Shard

if TYPE_CHECKING:  # stubs only, not installed with the runner
    from mypy_boto3_s3 import S3Client

NUM_THREADS: Final = 8
PART_CHUNKS: Final = 2  # chunks in a part; memory is this times the chunk times the threads
_MAX_PARTS: Final = 10_000
_CONNECT_TIMEOUT_S: Final = 10
_READ_TIMEOUT_S: Final = 60
_MAX_ATTEMPTS: Final = 4

_HINTS: Final[Mapping[str, str]] = {
    "AccessDenied": "the key may not do this: check its rights and the bucket's policy (list, get, put, delete)",
    "403": "wrong key, or one that may not do this: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and its rights",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID: this server does not know it",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY: it does not belong to this key",
    "ExpiredToken": "the credentials have expired: get new ones",
    "InvalidToken": "check AWS_SESSION_TOKEN: it does not belong to this key",
    "NoSuchBucket": "make the bucket, or correct offload.to",
    "InvalidBucketName": "correct the bucket's name in offload.to",
    "PermanentRedirect": "the bucket is in another region: set offload.region",
    "301": "the bucket is in another region: set offload.region",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set offload.region",
    "IllegalLocationConstraintException": "the bucket is in another region: set offload.region",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it (timedatectl, ntpdate)",
    "NotImplemented": "this server cannot do what is needed: CRC32 checksums and conditional writes",
}
_NO_ANSWER: Final = (BotoConnectionError, HTTPClientError, IncompleteReadError)
_UNREACHABLE: Final = "check offload.endpoint and the network; it is tried again"
_PASSING: Final = frozenset(
    {"BadDigest", "RequestTimeout", "IncompleteBody", "XAmzContentSHA256Mismatch", "NoSuchUpload", "NoSuchKey"}
)
_PASSING_STATUS: Final = frozenset({404, 408, 409, 412, 425, 429})


def connect(offload: OffloadPolicy, env: Mapping[str, str], *, timeout_s: float = _READ_TIMEOUT_S) -> S3Client:
    """A client with time limits and bounded retries. `timeout_s`: for one answer. Credentials come from `env`, else from where boto3 looks."""
    endpoint = offload.endpoint or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
    session = boto3.session.Session(
        aws_access_key_id=env.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=env.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=env.get("AWS_SESSION_TOKEN"),
        region_name=offload.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1",
    )
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=timeout_s,
        retries={"mode": "standard", "total_max_attempts": _MAX_ATTEMPTS},
        max_pool_connections=NUM_THREADS,
        tcp_keepalive=True,
        s3={"addressing_style": "path" if endpoint else "auto"},
        request_checksum_calculation="when_required",  # we send our own
        response_checksum_validation="when_required",
    )
    try:
        return session.client("s3", endpoint_url=endpoint, config=config)
    except ValueError as error:
        raise OffsiteError(f"offload.endpoint: {error}", hint="expected https://host", final=True) from error


class S3Store:
    def __init__(
        self,
        offload: OffloadPolicy,
        env: Mapping[str, str],
        *,
        part_chunks: int = PART_CHUNKS,
        timeout_s: float = _READ_TIMEOUT_S,
    ) -> None:
        self.address = offload.to or ""
        self._bucket, _, prefix = self.address.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._part_chunks = part_chunks
        self._pace = _Pace(offload.max_bandwidth)
        with self._plain_words(""):
            self._client = connect(offload, env, timeout_s=timeout_s)

    def put_file(self, key: str, path: Path, shard: Shard, sent: Sent) -> None:
        parts = _plan_parts(shard, self._part_chunks)
        with self._plain_words(key):
            if len(parts) == 1:
                self._put_whole(key, path, shard, parts[0])
                sent(shard.size_bytes)
                return
            upload = self._find_upload(key) or self._begin_upload(key)
            etags = in_parallel(lambda part: self._put_part(upload, path, shard, part, sent), parts, NUM_THREADS)
            self._complete(upload, shard, parts, etags)

    def _put_whole(self, key: str, path: Path, shard: Shard, part: _Part) -> None:
        body = read_chunks(path, shard, part.first, part.num_chunks)
        self._pace.take(len(body))
        self._client.put_object(**self._named(key), Body=body, ChecksumCRC32=_encode(part.crc32))

    def _find_upload(self, key: str) -> _Upload | None:
        """The upload of this key that a killed process left, with the parts that arrived."""
        begun = [u for u in self._unfinished(key) if u["Key"] == self._prefix + key]
        if not begun:
            return None
        upload_id = max(begun, key=lambda u: u["Initiated"])["UploadId"]
        pages = self._client.get_paginator("list_parts").paginate(**self._named(key), UploadId=upload_id)
        there = {part["PartNumber"]: part for page in pages for part in page.get("Parts", [])}
        return _Upload(key=key, id=upload_id, there=there)

    def _unfinished(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        pages = self._client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
            yield from page.get("Uploads", [])

    def _begin_upload(self, key: str) -> _Upload:
        begun = self._client.create_multipart_upload(
            **self._named(key), ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT"
        )
        return _Upload(key=key, id=begun["UploadId"])

    def _put_part(self, upload: _Upload, path: Path, shard: Shard, part: _Part, sent: Sent) -> str:
        """Send a part, unless it is there, and return its tag."""
        body = read_chunks(path, shard, part.first, part.num_chunks)
        there = upload.there.get(part.number)
        if there is not None and _is_same(there, part, body):
            sent(part.size_bytes)
            return str(there["ETag"])
        self._pace.take(len(body))
        answer = self._client.upload_part(
            **self._named(upload.key),
            UploadId=upload.id,
            PartNumber=part.number,
            Body=body,
            ChecksumCRC32=_encode(part.crc32),
        )
        sent(part.size_bytes)
        return answer["ETag"]

    def _complete(self, upload: _Upload, shard: Shard, parts: list[_Part], etags: list[str]) -> None:
        whole = combine_chunks(shard.checksums, shard.size_bytes)
        try:
            self._client.complete_multipart_upload(
                **self._named(upload.key),
                UploadId=upload.id,
                ChecksumCRC32=_encode(whole),
                ChecksumType="FULL_OBJECT",
                MultipartUpload={
                    "Parts": [
                        {"PartNumber": part.number, "ETag": etag, "ChecksumCRC32": _encode(part.crc32)}
                        for part, etag in zip(parts, etags, strict=True)
                    ]
                },
            )
        except self._client.exceptions.NoSuchUpload:
            if self.head(upload.key) != Head(size_bytes=shard.size_bytes, crc32=whole):
                raise  # else it was completed, and only the answer was lost

    def put(self, key: str, content: bytes) -> None:
        with self._plain_words(key):
            self._client.put_object(**self._named(key), Body=content, ChecksumCRC32=_encode(crc32(content)))

    def put_new(self, key: str, content: bytes) -> bool:
        with self._plain_words(key):
            try:
                self._client.put_object(
                    **self._named(key), Body=content, ChecksumCRC32=_encode(crc32(content)), IfNoneMatch="*"
                )
            except ClientError as error:
                if _code(error) in {"PreconditionFailed", "412"}:
                    return False
                raise
            return True

    def put_if(self, key: str, content: bytes, tag: str | None) -> str | None:
        condition: _Condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        with self._plain_words(key):
            try:
                answer = self._client.put_object(
                    **self._named(key), **condition, Body=content, ChecksumCRC32=_encode(crc32(content))
                )
            except ClientError as error:
                gone = tag is not None and _code(error) in {"404", "NoSuchKey"}
                if gone or _code(error) in {"PreconditionFailed", "412"}:
                    return None
                raise
            return answer["ETag"]

    def get_version(self, key: str, limit_bytes: int = MAX_SMALL_BYTES) -> Version | None:
        with self._plain_words(key):
            try:
                answer = self._client.get_object(**self._named(key))
            except ClientError as error:
                if _code(error) in {"404", "NoSuchKey"}:
                    return None
                raise
            with closing(answer["Body"]) as body:
                content = body.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise OffsiteError(f"{self.address}/{key}: expected at most {limit_bytes} bytes, got more", final=True)
        return Version(content=content, tag=answer["ETag"])

    def get(self, key: str, limit_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        head = self.head(key)
        if head is None:
            return None
        if head.size_bytes > limit_bytes:
            raise OffsiteError(
                f"{self.address}/{key}: expected at most {limit_bytes} bytes, got {head.size_bytes}", final=True
            )
        return self.read(key, 0, head.size_bytes)

    def read(self, key: str, offset: int, num_bytes: int) -> bytes:
        if num_bytes == 0:
            return b""
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(_MAX_ATTEMPTS),
            wait=tenacity.wait_random_exponential(max=5),
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, _NO_ANSWER)),
            reraise=True,
        )
        with self._plain_words(key):
            return retrying(self._read_once, key, offset, num_bytes)

    def _read_once(self, key: str, offset: int, num_bytes: int) -> bytes:
        answer = self._client.get_object(**self._named(key), Range=f"bytes={offset}-{offset + num_bytes - 1}")
        with closing(answer["Body"]) as body:
            content = body.read(num_bytes)  # a server that ignores the range cannot fill our memory
        expected = min(num_bytes, answer["ContentLength"])
        if len(content) != expected:
            raise IncompleteReadError(actual_bytes=len(content), expected_bytes=expected)
        return content

    def list(self, prefix: str) -> Iterator[Entry]:
        with self._plain_words(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                for found in page.get("Contents", []):
                    key = found["Key"].removeprefix(self._prefix)
                    if is_key(key):
                        yield Entry(key=key, size_bytes=found["Size"], modified_at=found["LastModified"])

    def head(self, key: str) -> Head | None:
        with self._plain_words(key):
            try:
                found = self._client.head_object(**self._named(key), ChecksumMode="ENABLED")
            except ClientError as error:
                if _code(error) in {"404", "NoSuchKey"}:
                    return None
                raise
            return Head(size_bytes=found["ContentLength"], crc32=_decode(found.get("ChecksumCRC32", "")))

    def delete(self, key: str) -> None:
        with self._plain_words(key):
            self._client.delete_object(**self._named(key))

    def abort(self, prefix: str, before: datetime, keep: Callable[[str], bool]) -> None:
        with self._plain_words(prefix):
            for upload in list(self._unfinished(prefix)):
                key = upload["Key"].removeprefix(self._prefix)
                if upload["Initiated"] < before and not keep(key):
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )

    def _named(self, key: str) -> _Named:
        if not is_key(key):
            raise OffsiteError(f"{self.address}: expected a plain relative path for a key, got {key!r}", final=True)
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    @contextmanager
    def _plain_words(self, key: str) -> Iterator[None]:
        where = f"{self.address}/{key}".rstrip("/")
        try:
            yield
        except ClientError as error:
            raise _refused(where, error) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise OffsiteError(f"{where}: expected credentials, found none", hint=hint, final=True) from error
        except _NO_ANSWER as error:
            hint = "check the certificate and offload.endpoint" if isinstance(error, SSLError) else ""
            raise OffsiteError(f"{where}: no answer: {error}", hint=hint or _UNREACHABLE, final=False) from error
        except BotoCoreError as error:
            raise OffsiteError(f"{where}: {error}", hint="check offload in job.yaml", final=True) from error


class _Pace:
    """No more than so many bytes a second, all threads together."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int) -> None:
        if not self._rate:
            return
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + num_bytes / self._rate
        time.sleep(max(0.0, start - time.monotonic()))


class _Condition(TypedDict, total=False):
    IfNoneMatch: str
    IfMatch: str


class _Named(TypedDict):
    Bucket: str
    Key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    number: int  # from 1
    first: int  # chunk
    num_chunks: int
    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upload:
    key: str
    id: str
    there: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


def _plan_parts(shard: Shard, part_chunks: int) -> list[_Part]:
    """Parts of whole chunks, as few chunks as asked for unless there were too many parts."""
    num_chunks = len(shard.checksums)
    step = max(part_chunks, -(-num_chunks // _MAX_PARTS))
    return [_part(shard, number, first, step) for number, first in enumerate(range(0, max(1, num_chunks), step), 1)]


def _part(shard: Shard, number: int, first: int, num_chunks: int) -> _Part:
    checksums = shard.checksums[first : first + num_chunks]
    size = min(len(checksums) * CHUNK_BYTES, shard.size_bytes - first * CHUNK_BYTES)
    return _Part(
        number=number,
        first=first,
        num_chunks=len(checksums),
        size_bytes=size,
        crc32=combine_chunks(checksums, size),
    )


def _is_same(there: Mapping[str, Any], part: _Part, body: bytes) -> bool:
    """Whether a part in the store is ours. Not every server tells the CRC32 of a part (SeaweedFS); all tell the MD5."""
    if there.get("ChecksumCRC32"):
        return bool(there["ChecksumCRC32"] == _encode(part.crc32))
    return bool(there["ETag"].strip('"') == hashlib.md5(body, usedforsecurity=False).hexdigest())


def _encode(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _decode(text: str) -> int | None:
    """None for no checksum, and for a checksum of checksums (`…-3`), which says nothing of the whole."""
    raw = base64.b64decode(text) if "-" not in text else b""
    return int.from_bytes(raw, "big") if len(raw) == 4 else None  # noqa: PLR2004  # 32 bits


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _refused(where: str, error: ClientError) -> OffsiteError:
    code, said = _code(error), error.response.get("Error", {}).get("Message", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    passing = code in _PASSING or status >= 500 or status in _PASSING_STATUS  # noqa: PLR2004  # the server's fault
    final = code in _HINTS or not passing
    return OffsiteError(f"{where}: the store answered {status} {code}: {said}", hint=_HINTS.get(code, ""), final=final)
