"""
Any S3 server as a store.

A file goes up in parts, several at a time, each with its CRC64NVME, and is completed with that
of the whole (`FULL_OBJECT`), which the server compares and reports from then on. Where its
manifest has none, or the server knows none, it is CRC32. A server may know less: only checksums
of parts (`COMPOSITE`), which our manifest can answer as well, or none; then each part carries its
MD5, and the caller reads the bytes back. Which it is, and whether a conditional write is
honoured, is found out once, by trying (`probe`).

Found with botocore, and answered here or by the callers' checksums: a ranged read hands over a
flipped byte, or a body that was cut short, as if nothing were wrong, and retries no body; a
`put_object` whose answer was lost is sent again, so that `If-None-Match` may be refused
because of ourselves; a HEAD of a bucket that is not there is a plain 404.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypedDict

import tenacity
from botocore.exceptions import ClientError, IncompleteReadError

from runner.storage.checksums import CRC32, CRC64NVME, Crc
from runner.storage.disk import pages
from runner.storage.offsite.bodies import open_part, read_into
from runner.storage.offsite.contract import (
    BLOCK_BYTES,
    MAX_SMALL_BYTES,
    PROBE,
    PROBED,
    Abilities,
    Block,
    Checksums,
    Entry,
    Head,
    LeftOut,
    OffsiteError,
    Place,
    Sent,
    Version,
    Where,
    agrees,
    is_key,
    replaced,
    run_all,
)
from runner.storage.offsite.cures import BUCKET_TWICE, DAMAGED, NO_ANSWER, code_of, plain_words
from runner.storage.offsite.pace import Pace
from runner.storage.offsite.wire import MAX_ATTEMPTS, TIMEOUTS_S, connect
from vramfarm.checksum import crc32
from vramfarm.protocol import CHUNK_BYTES, Shard

NUM_THREADS: Final = 16  # that send parts
_NUM_AT_FIRST: Final = 2  # parts on their way
_SOON_S: Final = 2.0  # where a part is there so soon, one more may be on its way
_AT_ONCE_S: Final = 0.25  # a part has left: no socket's memory takes so much
_SAME: Final = 1.2  # times the first one's: more beside it have cost a part nothing, so it is not the line that is slow
PART_CHUNKS: Final = 2  # chunks in a part
_NUM_CALLERS: Final = 12  # threads of callers, beside those that send parts
_MAX_PARTS: Final = 10_000
_COPY_CHUNKS: Final = 32  # in a part that the server copies: quick enough for any time limit
_HASH_BYTES: Final = 1 << 20
_UNABLE: Final = frozenset(
    {"NotImplemented", "InvalidArgument", "InvalidRequest", "MalformedXML", "UnsupportedArgument", "400", "501"}
)
_FORBIDDEN: Final = frozenset({"AccessDenied", "403"})
_SAMPLE: Final = b"vramfarm looks at what this store can do\n"
_SUMS: Final[Mapping[Crc, int]] = {CRC32: crc32(_SAMPLE), CRC64NVME: 0x8570EE8EB9BBE951}  # of the sample
_SAMPLE_SHARD: Final = Shard("sample", len(_SAMPLE), (_SUMS[CRC32],), (_SUMS[CRC64NVME],))
_WRONG: Final = 1  # the sum of other bytes


class S3Store:
    def __init__(  # noqa: PLR0913  # all but two by name
        self,
        offload: Where,
        env: Mapping[str, str],
        abilities: Abilities | None = None,
        *,
        part_chunks: int = PART_CHUNKS,
        copy_chunks: int = _COPY_CHUNKS,
        timeouts_s: tuple[float, float] = TIMEOUTS_S,
    ) -> None:
        self.address = offload.to or ""
        self._bucket, _, prefix = self.address.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._part_chunks, self._copy_chunks = part_chunks, copy_chunks
        self._abilities = abilities
        self._asks_checksums = True
        self._pool = ThreadPoolExecutor(NUM_THREADS)
        self._window = _Window()
        with self._plain_words(""):
            self._client = connect(
                offload,
                env,
                num_connections=NUM_THREADS + _NUM_CALLERS,
                pace=Pace(offload.max_bandwidth),
                timeouts_s=timeouts_s,
            )

    # --------------------------------------------------------------------------- abilities

    def probe(self) -> Abilities:
        if self._abilities is None:
            key = f"{PROBE}{secrets.token_hex(8)}"
            with self._plain_words(key):
                try:
                    self._abilities = self._try_out(key)
                finally:
                    with suppress(ClientError, *NO_ANSWER):  # what went wrong before is what is told
                        self._client.delete_object(**self._named(key))
        return self._abilities

    def _try_out(self, key: str) -> Abilities:
        self._client.put_object(**self._named(key), Body=_SAMPLE, **_with_md5(_SAMPLE))
        self._sweep_probes(key)
        conditional = self._refuses(key, {"IfNoneMatch": "*"}) and self._refuses(key, {"IfMatch": '"another"'})
        kinds = (kind for kind in (Checksums.WHOLE, Checksums.PARTS) if self._confirms(_Kind(CRC32, kind), key))
        return Abilities(
            crc64nvme=self._confirms(_Kind(CRC64NVME, Checksums.WHOLE), key),
            checksums=next(kinds, Checksums.NONE),
            conditional=conditional,
        )

    def _sweep_probes(self, key: str, age: timedelta = PROBED) -> None:
        """
        What killed looks have left, by the store's clock. To fail at it is no answer to what is asked here, but for
        an address that is wrong.
        """
        try:
            found = {entry.key: entry.modified_at for entry in self.list(PROBE)}
            before = found[key] - age if key in found else None
            for left in [k for k, modified_at in found.items() if before and modified_at < before]:
                self.delete(left)
            if before:
                self.abort(PROBE, before)
        except OffsiteError as error:
            if error.of_address:
                raise

    def _refuses(self, key: str, condition: _Condition) -> bool:
        """Whether a condition that does not hold keeps what is there."""
        try:
            self._client.put_object(**self._named(key), **condition, Body=_SAMPLE, **_with_md5(_SAMPLE))
        except ClientError as error:
            if code_of(error) in _UNABLE:
                return False
            if _is_taken(error):
                return True
            raise
        return False  # it was replaced: the condition was not looked at

    def _confirms(self, kind: _Kind, key: str) -> bool:
        """Whether other bytes than those of a checksum are refused, and a file of one part is there with its own."""
        put = partial(self._client.put_object, **self._named(key), Body=_SAMPLE)
        try:
            put(**kind.fields(_SUMS[kind.crc]))
            if not _is_refused(put, **kind.fields(_WRONG)) or not self._compares_parts(kind, key):
                return False
        except ClientError as error:
            if code_of(error) in _UNABLE or (kind.crc is CRC64NVME and not _is_servers(error)):
                return False  # what else may be wrong CRC32 tells, which is tried in any case
            raise
        head = self.head(key)
        return head is not None and kind.kept(head) is not None and agrees(head, _SAMPLE_SHARD) is True

    def _compares_parts(self, kind: _Kind, key: str) -> bool:
        upload = self._begin_upload(key, kind)
        named: dict[str, Any] = {**self._named(key), "UploadId": upload.id}
        put = partial(self._client.upload_part, **named, PartNumber=1, Body=_SAMPLE)
        try:
            if not _is_refused(put, **kind.fields(_WRONG)):
                return False
            right = kind.fields(_SUMS[kind.crc])
            parts = [{"PartNumber": 1, "ETag": put(**right)["ETag"], **right}]
            if kind.of is Checksums.WHOLE and not _is_refused(self._finish, upload, _WRONG, parts):
                return False
            self._finish(upload, _SUMS[kind.crc], parts)
        finally:
            with suppress(ClientError):  # it is complete, or what went wrong before is what is told
                self._client.abort_multipart_upload(**named)
        return True

    def find_missing_rights(self, folder: str) -> tuple[str, ...]:
        key = f"{folder}/{secrets.token_hex(8)}"
        with self._plain_words(key):
            upload = self._begin_upload(key, _Kind(CRC32, Checksums.NONE))
            named: dict[str, Any] = {**self._named(key), "UploadId": upload.id}
            put = self._client.upload_part(**named, PartNumber=1, Body=_SAMPLE, **_with_md5(_SAMPLE))
            tries: Mapping[str, Callable[[], object]] = {
                "s3:ListBucketMultipartUploads": lambda: list(self._list_unfinished(key)),
                "s3:ListMultipartUploadParts": lambda: self._parts_of(key, upload.id),
                "s3:AbortMultipartUpload": lambda: self._client.abort_multipart_upload(**named),
            }
            missing = tuple(right for right, call in tries.items() if _is_forbidden(call))
            if "s3:AbortMultipartUpload" in missing:  # what is complete can be deleted
                with suppress(ClientError):
                    self._finish(upload, 0, [{"PartNumber": 1, "ETag": put["ETag"]}])
                    self._client.delete_object(**self._named(key))
        return missing

    # --------------------------------------------------------------------------------- put

    def put_file(self, key: str, path: Path, shard: Shard, sent: Sent) -> None:
        if "\\" in key:  # some servers take it for "/", and so for another object
            raise OffsiteError(f"{self.address}/{key}: expected a name without a backslash", final=True, of_object=True)
        kind = self._kind(shard)
        with self._plain_words(key):
            try:
                self._send(key, path, shard, kind, sent)
            except ClientError as error:
                if kind.crc is not CRC64NVME or code_of(error) not in DAMAGED:
                    raise
                # refused each time, though the CRC32 was right as it left: the other list is not of these bytes, and would never be
                self._send(key, path, shard, _Kind(CRC32, self.probe().checksums), sent)

    def _send(self, key: str, path: Path, shard: Shard, kind: _Kind, sent: Sent) -> None:
        parts = _plan_parts(shard, kind.crc, self._part_chunks)
        if len(parts) == 1:
            self._put_whole(key, path, shard, parts[0], kind)
            sent(shard.size_bytes)
            return
        begun = self._find_upload(key, kind)
        if begun is None or not self._goes_on(begun, path, shard, parts, sent):
            self._put_parts(self._begin_upload(key, kind), path, shard, parts, sent)

    def _kind(self, shard: Shard) -> _Kind:
        abilities = self.probe()
        if abilities.crc64nvme and shard.crc64nvme:
            return _Kind(CRC64NVME, Checksums.WHOLE)
        return _Kind(CRC32, abilities.checksums)

    def _put_whole(self, key: str, path: Path, shard: Shard, part: _Part, kind: _Kind) -> None:
        with open_part(path, shard, part.first, part.num_chunks, is_compared=kind.is_compared) as body:
            self._client.put_object(
                **self._named(key), Body=body if part.size_bytes else b"", **_digest(kind, part, path, shard)
            )

    def _goes_on(self, begun: _Upload, path: Path, shard: Shard, parts: list[_Part], sent: Sent) -> bool:
        """
        False: it was begun by a checksum of another kind, as an older runner does, and is given up.

        Not every server tells by which (SeaweedFS), and none takes a part of another one.
        """
        try:
            self._put_parts(begun, path, shard, parts, sent)
        except ClientError as error:
            if code_of(error) not in _UNABLE:
                raise
            abort = partial(self._client.abort_multipart_upload, **self._named(begun.key), UploadId=begun.id)
            _is_forbidden(abort)  # if so it stays, and the one that is begun now is the newest
            return False
        return True

    def _put_parts(self, upload: _Upload, path: Path, shard: Shard, parts: list[_Part], sent: Sent) -> None:
        etags = run_all(self._pool, lambda part: self._put_part(upload, path, shard, part, sent), parts)
        self._complete(upload, shard, parts, etags)

    def _find_upload(self, key: str, kind: _Kind) -> _Upload | None:
        """The upload of this key that a killed process left, with the parts that arrived."""
        begun = [u for u in self._unfinished(key) if u["Key"] == self._prefix + key]
        if not begun:
            return None
        upload_id = max(begun, key=lambda u: u["Initiated"])["UploadId"]
        try:
            there = self._parts_of(key, upload_id)
        except ClientError as error:
            if code_of(error) not in _FORBIDDEN:
                raise
            return None
        return _Upload(key=key, id=upload_id, kind=kind, there=there)

    def _parts_of(self, key: str, upload_id: str) -> Mapping[int, Mapping[str, Any]]:
        pages = self._client.get_paginator("list_parts").paginate(**self._named(key), UploadId=upload_id)
        return {part["PartNumber"]: part for page in pages for part in page.get("Parts", [])}

    def _unfinished(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        """None, where the server cannot list them, or lets us not: then a killed upload begins anew."""
        try:
            yield from self._list_unfinished(prefix)
        except ClientError as error:
            if code_of(error) not in _UNABLE | _FORBIDDEN:
                raise

    def _list_unfinished(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        pages = self._client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
            yield from page.get("Uploads", [])

    def _begin_upload(self, key: str, kind: _Kind) -> _Upload:
        begun = self._client.create_multipart_upload(**self._named(key), **kind.wish())
        return _Upload(key=key, id=begun["UploadId"], kind=kind)

    def _put_part(self, upload: _Upload, path: Path, shard: Shard, part: _Part, sent: Sent) -> str:
        """Send a part, unless it is there, and return its tag."""
        there = upload.there.get(part.number)
        if there is not None and _is_same(there, upload.kind, path, shard, part):
            sent(part.size_bytes)
            return str(there["ETag"])
        is_compared = upload.kind.is_compared
        with (
            self._window.one() as left,
            open_part(path, shard, part.first, part.num_chunks, left, is_compared=is_compared) as body,
        ):
            answer = self._client.upload_part(
                **self._named(upload.key),
                UploadId=upload.id,
                PartNumber=part.number,
                Body=body,
                **_digest(upload.kind, part, path, shard),
            )
        sent(part.size_bytes)
        return answer["ETag"]

    def _complete(self, upload: _Upload, shard: Shard, parts: list[_Part], etags: list[str]) -> None:
        named: list[dict[str, Any]] = [
            {"PartNumber": part.number, "ETag": etag, **upload.kind.fields(part.checksum)}
            for part, etag in zip(parts, etags, strict=True)
        ]
        try:
            self._finish(upload, upload.kind.crc.of_shard(shard), named)
        except self._client.exceptions.NoSuchUpload:
            head = self.head(upload.key)
            if head is None or agrees(head, shard) is False:
                raise  # else it was completed, and only the answer was lost; who cannot tell reads it back

    def _finish(self, upload: _Upload, whole: int, parts: Any) -> None:  # noqa: ANN401  # the stubs' dicts
        of_all: dict[str, Any] = {}
        if upload.kind.of is Checksums.WHOLE:
            of_all = {**upload.kind.fields(whole), "ChecksumType": "FULL_OBJECT"}
        self._client.complete_multipart_upload(
            **self._named(upload.key), UploadId=upload.id, MultipartUpload={"Parts": parts}, **of_all
        )

    def put(self, key: str, content: bytes) -> None:
        digest = self._digest_of(content)
        with self._plain_words(key):
            self._client.put_object(**self._named(key), Body=content, **digest)

    def put_new(self, key: str, content: bytes) -> bool:
        abilities, digest = self.probe(), self._digest_of(content)
        if not abilities.conditional:  # who looks into the store has said what that means
            taken = self.head(key) is not None
            if not taken:
                self.put(key, content)
            return not taken
        with self._plain_words(key):
            try:
                self._client.put_object(**self._named(key), Body=content, IfNoneMatch="*", **digest)
            except ClientError as error:
                if _is_taken(error):
                    return False
                raise
            return True

    def put_if(self, key: str, content: bytes, tag: str | None) -> str | None:
        digest = self._digest_of(content)
        condition: _Condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        with self._plain_words(key):
            try:
                answer = self._client.put_object(**self._named(key), **condition, Body=content, **digest)
            except ClientError as error:
                gone = tag is not None and code_of(error) in {"404", "NoSuchKey"}
                if gone or code_of(error) in {"PreconditionFailed", "412"}:
                    return None
                raise
            return answer["ETag"]

    def get_version(self, key: str, limit_bytes: int = MAX_SMALL_BYTES) -> Version | None:
        with self._plain_words(key):
            return _retrying()(self._read_whole, key, limit_bytes)

    def _read_whole(self, key: str, limit_bytes: int) -> Version | None:
        try:
            answer = self._client.get_object(**self._named(key))
        except ClientError as error:
            if code_of(error) in {"404", "NoSuchKey"}:
                return None
            raise
        with closing(answer["Body"]) as body:
            told = answer.get("ContentLength", 0)  # a proxy may leave it out
            content = body.read(limit_bytes + 1) if told <= limit_bytes else b""
        if (size := max(told, len(content))) > limit_bytes:
            what = f"{self.address}/{key}: expected at most {limit_bytes} bytes, got {size}"
            raise OffsiteError(what, final=True, damaged=True)
        if len(content) < told:
            raise IncompleteReadError(actual_bytes=len(content), expected_bytes=told)
        return Version(content=content, tag=answer["ETag"])

    def _digest_of(self, content: bytes) -> Mapping[str, Any]:
        return _Kind(CRC32, self.probe().checksums).fields(crc32(content)) or _with_md5(content)

    def copy(self, source: str, key: str, shard: Shard) -> bool:
        """The bytes do not come here: the server copies, in parts that it completes in time."""
        kind = self._kind(shard)
        origin = {"Bucket": self._bucket, "Key": self._named(source)["Key"]}
        with self._plain_words(key):
            parts = _plan_parts(shard, kind.crc, self._copy_chunks)
            if len(parts) == 1:
                self._client.copy_object(**self._named(key), CopySource=origin)  # type: ignore[arg-type]  # as the stubs name it
                return True
            upload = self._begin_upload(key, kind)
            try:
                named = run_all(self._pool, partial(self._copy_part, upload, origin), parts)
                self._finish(upload, kind.crc.of_shard(shard), named)
            except ClientError:
                self._client.abort_multipart_upload(**self._named(key), UploadId=upload.id)
                raise
            return True

    def _copy_part(self, upload: _Upload, origin: Any, part: _Part) -> dict[str, Any]:  # noqa: ANN401  # the stubs' dict
        answer = self._client.upload_part_copy(
            **self._named(upload.key),
            UploadId=upload.id,
            PartNumber=part.number,
            CopySource=origin,
            CopySourceRange=f"bytes={part.offset}-{part.offset + part.size_bytes - 1}",
        )
        return {"PartNumber": part.number, "ETag": answer["CopyPartResult"]["ETag"]}

    # --------------------------------------------------------------------------------- get

    def get(self, key: str, limit_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        found = self.get_version(key, limit_bytes)
        return None if found is None else found.content

    def read(self, key: str, offset: int, num_bytes: int, tag: str = "") -> bytes:
        return bytes(next(self._blocks(key, offset, num_bytes, num_bytes, tag), b""))

    def stream(self, key: str, offset: int, num_bytes: int, tag: str = "") -> Iterator[Block]:
        return self._blocks(key, offset, num_bytes, BLOCK_BYTES, tag)

    def _blocks(self, key: str, offset: int, num_bytes: int, block_bytes: int, tag: str) -> Iterator[Block]:
        """Each block may be asked for so often; what came before it is not asked for again."""
        retrying = _retrying()
        reading = _Reading(partial(self._ask_range, key), offset, num_bytes, tag)
        with closing(reading):
            memory = pages(min(block_bytes, num_bytes)) if num_bytes else memoryview(b"")
            while reading.left:
                with self._plain_words(key):
                    block = retrying(reading.next_block, memory)
                yield block

    def _ask_range(self, key: str, begin: int, end: int, tag: str) -> Mapping[str, Any]:
        """Of the object with this tag, also where the server looks at no condition."""
        condition: _Condition = {"IfMatch": tag} if tag else {}
        try:
            answer = self._client.get_object(**self._named(key), Range=f"bytes={begin}-{end - 1}", **condition)
        except ClientError as error:
            raise replaced(f"{self.address}/{key}") if tag and _is_taken(error) else error from None
        if tag and answer.get("ETag", tag) != tag:
            answer["Body"].close()
            raise replaced(f"{self.address}/{key}")
        return answer

    def list(self, prefix: str, left_out: LeftOut = lambda _: None) -> Iterator[Entry]:
        with self._plain_words(prefix):
            for page in self._pages(prefix):
                for found in page.get("Contents", []):
                    key = found["Key"].removeprefix(self._prefix)
                    if is_key(key):
                        yield Entry(key=key, size_bytes=found["Size"], modified_at=found["LastModified"])
                    elif (
                        found["Size"] or f"/{key}"[-1] != "/"
                    ):  # else it stands for a folder, as web consoles make them
                        left_out(key)

    def _pages(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        pages = self._client.get_paginator("list_objects_v2")
        try:
            yield from pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
        except ClientError as error:
            if code_of(error) == "NoSuchKey":  # a list names none: the server took the bucket for an object
                what = f"{self.address}: asked for a list, the store looked for an object named {self._bucket}"
                raise OffsiteError(what, hint=BUCKET_TWICE, final=True, of_address=True) from None
            raise

    def head(self, key: str) -> Head | None:
        with self._plain_words(key):
            try:
                found = self._ask_head(key)
            except ClientError as error:
                if code_of(error) in {"404", "NoSuchKey"}:
                    return None
                self._client.get_object(**self._named(key), Range="bytes=0-0")["Body"].close()
                raise  # else the read has raised: its answer has a body that says why
            checksum = found.get("ChecksumCRC32", "") if self._is_word_good(CRC32) else ""
            further = found.get("ChecksumCRC64NVME", "") if self._is_word_good(CRC64NVME) else ""
            return Head(
                size_bytes=found["ContentLength"],
                crc32=_decode(CRC32, checksum),
                parts_crc32=_decode_parts(checksum),
                crc64nvme=_decode(CRC64NVME, further),
                md5=_plain_md5(found),
                tag=found.get("ETag", ""),
            )

    def _is_word_good(self, crc: Crc) -> bool:
        """Not where it was found out that this server repeats what it is told, whatever the bytes."""
        able = self._abilities
        return able is None or (able.crc64nvme if crc is CRC64NVME else able.checksums is not Checksums.NONE)

    def _ask_head(self, key: str) -> Mapping[str, Any]:
        """Some servers refuse a request that asks for checksums (`x-amz-checksum-mode`)."""
        if self._asks_checksums:
            try:
                return self._client.head_object(**self._named(key), ChecksumMode="ENABLED")
            except ClientError as error:
                if code_of(error) not in _UNABLE:
                    raise
        found = self._client.head_object(**self._named(key))
        self._asks_checksums = False
        return found

    # ------------------------------------------------------------------------------ remove

    def delete(self, key: str) -> None:
        with self._plain_words(key):
            self._client.delete_object(**self._named(key))

    def abort(self, prefix: str, before: datetime) -> None:
        with self._plain_words(prefix):
            for upload in list(self._unfinished(prefix)):
                named = {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                if upload["Initiated"] < before and _is_forbidden(
                    partial(self._client.abort_multipart_upload, **named)
                ):
                    return  # the first look has said so, and what it costs

    def _named(self, key: str) -> _Named:
        if not is_key(key) or not _can_be_spelled(key):
            what = f"{self.address}: expected a plain relative path for a key, got {key!r}"
            raise OffsiteError(what, final=True, of_object=True)
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _plain_words(self, key: str) -> AbstractContextManager[None]:
        return plain_words(f"{self.address}/{key}".rstrip("/"))


def warm_up() -> None:
    """Read what botocore has to say of S3; the next client costs a tenth of that."""
    S3Store(Place(to="s3://none"), {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"})


def _retrying() -> tenacity.Retrying:
    """Botocore asks again for an answer that did not come, never for a body that broke off."""
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(MAX_ATTEMPTS),
        wait=tenacity.wait_random_exponential(max=5),
        retry=tenacity.retry_if_exception(lambda e: isinstance(e, NO_ANSWER)),
        reraise=True,
    )


class _Window:
    """
    How many parts are on their way at once. Each keeps a server busy for a moment after its last byte, in which others
    should be sent, and a long way wants many. On a slow line that is nothing, and what is half there is lost with a
    kill: there they stay few, so that one after another is whole.
    """

    def __init__(self) -> None:
        self._slots = threading.Semaphore(_NUM_AT_FIRST)
        self._lock = threading.Lock()
        self._left = NUM_THREADS - _NUM_AT_FIRST
        self._first_s = 0.0

    @contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """Yields what is to be called when all bytes of the part have left, so many."""
        with self._slots:
            began = time.monotonic()
            yield lambda num_bytes: self.note_left(num_bytes, time.monotonic() - began)
            self._note(time.monotonic() - began)

    def note_left(self, num_bytes: int, took_s: float) -> None:
        """A fast line is known as such before the server has answered once, and all are wanted from then on."""
        if num_bytes < PART_CHUNKS * CHUNK_BYTES or took_s > _AT_ONCE_S:
            return
        with self._lock:
            left, self._left = self._left, 0
        if left:
            self._slots.release(left)

    def _note(self, took_s: float) -> None:
        with self._lock:
            if self._left and took_s < max(_SOON_S, _SAME * self._first_s):
                self._left -= 1
                self._slots.release()
            self._first_s = self._first_s or took_s


class _Reading:
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
            came = read_into(self._body, block)
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


class _Condition(TypedDict, total=False):
    IfNoneMatch: str
    IfMatch: str


class _Named(TypedDict):
    Bucket: str
    Key: str


@dataclass(frozen=True, slots=True)
class _Kind:
    """By which checksum a server compares a file, and of what."""

    crc: Crc
    of: Checksums

    @property
    def is_compared(self) -> bool:
        """Whether it refuses other bytes, which was found out by trying."""
        return self.of is not Checksums.NONE

    def wish(self) -> Mapping[str, Any]:
        """As an upload is begun."""
        wishes: Mapping[Checksums, Mapping[str, Any]] = {
            Checksums.WHOLE: {"ChecksumAlgorithm": self.crc.name, "ChecksumType": "FULL_OBJECT"},
            Checksums.PARTS: {"ChecksumAlgorithm": self.crc.name},
            Checksums.NONE: {},
        }
        return wishes[self.of]

    def fields(self, checksum: int) -> dict[str, Any]:
        return {} if self.of is Checksums.NONE else {f"Checksum{self.crc.name}": _encode(self.crc, checksum)}

    def kept(self, head: Head) -> object:
        """What the server tells of an object, if it keeps this kind."""
        if self.crc is CRC64NVME:
            return head.crc64nvme
        return head.crc32 if self.of is Checksums.WHOLE else head.parts_crc32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    number: int  # from 1
    first: int  # chunk
    num_chunks: int
    size_bytes: int
    checksum: int

    @property
    def offset(self) -> int:
        return self.first * CHUNK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upload:
    key: str
    id: str
    kind: _Kind
    there: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


def _can_be_spelled(key: str) -> bool:
    """S3 has UTF-8 only, and not in every answer a way to write what XML has none for."""
    return not re.search("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", key)


def _plan_parts(shard: Shard, crc: Crc, part_chunks: int) -> list[_Part]:
    """Parts of whole chunks, as few chunks as asked for if the shard is not too large for that."""
    num_chunks = len(shard.checksums)
    step = max(part_chunks, -(-num_chunks // _MAX_PARTS))
    firsts = range(0, max(1, num_chunks), step)
    return [_part(shard, crc, number, first, step) for number, first in enumerate(firsts, 1)]


def _part(shard: Shard, crc: Crc, number: int, first: int, num_chunks: int) -> _Part:
    checksums = crc.of_chunks(shard)[first : first + num_chunks]
    size = min(len(checksums) * CHUNK_BYTES, shard.size_bytes - first * CHUNK_BYTES)
    return _Part(
        number=number,
        first=first,
        num_chunks=len(checksums),
        size_bytes=size,
        checksum=crc.combine_chunks(checksums, size),
    )


def _digest(kind: _Kind, part: _Part, path: Path, shard: Shard) -> Mapping[str, Any]:
    """By what the server compares a body: always by something."""
    return kind.fields(part.checksum) or {"ContentMD5": base64.b64encode(_md5(path, shard, part)).decode()}


def _is_same(there: Mapping[str, Any], kind: _Kind, path: Path, shard: Shard, part: _Part) -> bool:
    """Whether a part in the store is ours. Not every server tells the checksum of a part (SeaweedFS); all tell the MD5."""
    if told := there.get(f"Checksum{kind.crc.name}"):
        return bool(told == _encode(kind.crc, part.checksum))
    return bool(there["ETag"].strip('"') == _md5(path, shard, part).hex())


def _md5(path: Path, shard: Shard, part: _Part) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    with open_part(path, shard, part.first, part.num_chunks) as body:
        while block := body.read(_HASH_BYTES):
            digest.update(block)
    return digest.digest()


def _plain_md5(found: Mapping[str, Any]) -> str:
    """The MD5 of an object that came in one piece and is not encrypted with a key of somebody's; else empty."""
    tag = str(found.get("ETag", "")).strip('"')
    sealed = found.get("SSECustomerAlgorithm") or str(found.get("ServerSideEncryption", "")).startswith("aws:kms")
    return tag if len(tag) == 32 and "-" not in tag and not sealed else ""  # noqa: PLR2004  # hexadecimal digits


def _with_md5(content: bytes) -> dict[str, Any]:
    """A bucket with a default retention (Object Lock) takes nothing without a digest."""
    return {"ContentMD5": base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()}


def _encode(crc: Crc, checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(crc.num_bits // 8, "big")).decode()


def _decode(crc: Crc, text: str) -> int | None:
    """None for no checksum, and for a checksum of checksums (`…-3`), which says nothing of the whole."""
    raw = base64.b64decode(text) if "-" not in text else b""
    return int.from_bytes(raw, "big") if len(raw) == crc.num_bits // 8 else None


def _decode_parts(text: str) -> tuple[int, int] | None:
    """(checksum of the parts' checksums, number of parts) of `…-3`; None if it is none."""
    of_all, _, number = text.partition("-")
    checksum = _decode(CRC32, of_all)
    return None if checksum is None or not number.isdecimal() else (checksum, int(number))


def _is_refused(call: Callable[..., Any], *args: Any, **fields: Any) -> bool:  # noqa: ANN401  # botocore's
    """Whether what is wrong in a request is told; a server that fails says nothing."""
    try:
        call(*args, **fields)
    except ClientError as error:
        if _is_servers(error):
            raise
        return True
    return False


def _is_servers(error: ClientError) -> bool:
    """Whether it is the server's own fault, which says nothing of what it was asked."""
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500  # noqa: PLR2004


def _is_forbidden(call: Callable[[], object]) -> bool:
    try:
        call()
    except ClientError as error:
        if code_of(error) in _FORBIDDEN:
            return True
        if code_of(error) not in _UNABLE:  # what a server cannot do, no right gives
            raise
    return False


def _is_taken(error: ClientError) -> bool:
    return code_of(error) in {"PreconditionFailed", "412"}
