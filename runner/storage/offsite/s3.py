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

import re
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import tenacity
from botocore.exceptions import ClientError, IncompleteReadError

from runner.storage.checksums import CRC32, CRC64NVME, Crc
from runner.storage.disk import pages
from runner.storage.offsite.bodies import Reading, open_part
from runner.storage.offsite.contract import (
    BLOCK_BYTES,
    MAX_SMALL_BYTES,
    PROBE,
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
    too_large,
)
from runner.storage.offsite.cures import BUCKET_TWICE, DAMAGED, NO_ANSWER, NONE_OF_S3, code_of, plain_words
from runner.storage.offsite.digests import Kind, decode, decode_parts, plain_md5, with_md5
from runner.storage.offsite.multipart import Named, Upload, Uploads
from runner.storage.offsite.pace import Pace
from runner.storage.offsite.parts import NUM_THREADS, PART_CHUNKS, Part, Window, digest_of, is_same, plan_parts
from runner.storage.offsite.probing import Look
from runner.storage.offsite.refusals import UNABLE, Condition, is_forbidden, is_taken
from runner.storage.offsite.wire import MAX_ATTEMPTS, TIMEOUTS_S, connect
from vramfarm.checksum import crc32
from vramfarm.protocol import Shard

_OF_LISTS: Final = frozenset({"IsTruncated", "KeyCount", "MaxKeys", "Name", "Contents"})  # some of these every list has
_NUM_CALLERS: Final = 12  # threads of callers, beside those that send parts
_COPY_CHUNKS: Final = 32  # in a part that the server copies: quick enough for any time limit


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
        self._window = Window()
        with self._plain_words(""):
            self._client = connect(
                offload,
                env,
                num_connections=NUM_THREADS + _NUM_CALLERS,
                pace=Pace(offload.max_bandwidth),
                timeouts_s=timeouts_s,
            )
        self._uploads = Uploads(self._client, self._bucket, self._prefix, self._named)

    # --------------------------------------------------------------------------- abilities

    def probe(self) -> Abilities:
        if self._abilities is None:
            key = f"{PROBE}{secrets.token_hex(8)}"
            with self._plain_words(key):
                try:
                    self._abilities = self._look(key).find_abilities()
                finally:
                    with suppress(ClientError, *NO_ANSWER):  # what went wrong before is what is told
                        self._client.delete_object(**self._named(key))
        return self._abilities

    def find_missing_rights(self, folder: str) -> tuple[str, ...]:
        key = f"{folder}/{secrets.token_hex(8)}"
        with self._plain_words(key):
            return self._look(key).find_missing_rights()

    def _look(self, key: str) -> Look:
        return Look(self, self._client, self._uploads, key, self._named(key))

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
                self._send(key, path, shard, Kind(CRC32, self.probe().checksums), sent)

    def _send(self, key: str, path: Path, shard: Shard, kind: Kind, sent: Sent) -> None:
        parts = plan_parts(shard, kind.crc, self._part_chunks)
        if len(parts) == 1:
            self._put_whole(key, path, shard, parts[0], kind)
            sent(shard.size_bytes)
            return
        begun = self._uploads.find(key, kind)
        if begun is None or not self._goes_on(begun, path, shard, parts, sent):
            self._put_parts(self._uploads.begin(key, kind), path, shard, parts, sent)

    def _kind(self, shard: Shard) -> Kind:
        abilities = self.probe()
        if abilities.crc64nvme and shard.crc64nvme:
            return Kind(CRC64NVME, Checksums.WHOLE)
        return Kind(CRC32, abilities.checksums)

    def _put_whole(self, key: str, path: Path, shard: Shard, part: Part, kind: Kind) -> None:
        with open_part(path, shard, part.first, part.num_chunks, is_compared=kind.is_compared) as body:
            self._client.put_object(
                **self._named(key), Body=body if part.size_bytes else b"", **digest_of(kind, part, path, shard)
            )

    def _goes_on(self, begun: Upload, path: Path, shard: Shard, parts: list[Part], sent: Sent) -> bool:
        """
        False: it was begun by a checksum of another kind, as an older runner does, and is given up.

        Not every server tells by which (SeaweedFS), and none takes a part of another one.
        """
        try:
            self._put_parts(begun, path, shard, parts, sent)
        except ClientError as error:
            if code_of(error) not in UNABLE:
                raise
            is_forbidden(
                partial(self._uploads.abort, begun)
            )  # if so it stays, and the one that is begun now is the newest
            return False
        return True

    def _put_parts(self, upload: Upload, path: Path, shard: Shard, parts: list[Part], sent: Sent) -> None:
        etags = run_all(self._pool, lambda part: self._put_part(upload, path, shard, part, sent), parts)
        self._complete(upload, shard, parts, etags)

    def _put_part(self, upload: Upload, path: Path, shard: Shard, part: Part, sent: Sent) -> str:
        """Send a part, unless it is there, and return its tag."""
        there = upload.there.get(part.number)
        if there is not None and is_same(there, upload.kind, path, shard, part):
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
                **digest_of(upload.kind, part, path, shard),
            )
        sent(part.size_bytes)
        return answer["ETag"]

    def _complete(self, upload: Upload, shard: Shard, parts: list[Part], etags: list[str]) -> None:
        named: list[dict[str, Any]] = [
            {"PartNumber": part.number, "ETag": etag, **upload.kind.fields(part.checksum)}
            for part, etag in zip(parts, etags, strict=True)
        ]
        try:
            self._uploads.finish(upload, upload.kind.crc.of_shard(shard), named)
        except self._client.exceptions.NoSuchUpload:
            head = self.head(upload.key)
            if head is None or agrees(head, shard) is False:
                raise  # else it was completed, and only the answer was lost; who cannot tell reads it back

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
                if is_taken(error):
                    return False
                raise
            return True

    def put_if(self, key: str, content: bytes, tag: str | None) -> str | None:
        digest = self._digest_of(content)
        condition: Condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
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
            raise too_large(f"{self.address}/{key}", limit_bytes, size)
        if len(content) < told:
            raise IncompleteReadError(actual_bytes=len(content), expected_bytes=told)
        return Version(content=content, tag=answer["ETag"])

    def _digest_of(self, content: bytes) -> Mapping[str, Any]:
        return Kind(CRC32, self.probe().checksums).fields(crc32(content)) or with_md5(content)

    def copy(self, source: str, key: str, shard: Shard) -> bool:
        """The bytes do not come here: the server copies, in parts that it completes in time."""
        kind = self._kind(shard)
        origin = {"Bucket": self._bucket, "Key": self._named(source)["Key"]}
        with self._plain_words(key):
            parts = plan_parts(shard, kind.crc, self._copy_chunks)
            if len(parts) == 1:
                self._client.copy_object(**self._named(key), CopySource=origin)  # type: ignore[arg-type]  # as the stubs name it
                return True
            upload = self._uploads.begin(key, kind)
            try:
                named = run_all(self._pool, partial(self._copy_part, upload, origin), parts)
                self._uploads.finish(upload, kind.crc.of_shard(shard), named)
            except ClientError:
                self._uploads.abort(upload)
                raise
            return True

    def _copy_part(self, upload: Upload, origin: Any, part: Part) -> dict[str, Any]:  # noqa: ANN401  # the stubs' dict
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
        reading = Reading(partial(self._ask_range, key), offset, num_bytes, tag)
        with closing(reading):
            memory = pages(min(block_bytes, num_bytes)) if num_bytes else memoryview(b"")
            while reading.left:
                with self._plain_words(key):
                    block = retrying(reading.next_block, memory)
                yield block

    def _ask_range(self, key: str, begin: int, end: int, tag: str) -> Mapping[str, Any]:
        """Of the object with this tag, also where the server looks at no condition."""
        condition: Condition = {"IfMatch": tag} if tag else {}
        try:
            answer = self._client.get_object(**self._named(key), Range=f"bytes={begin}-{end - 1}", **condition)
        except ClientError as error:
            raise replaced(f"{self.address}/{key}") if tag and is_taken(error) else error from None
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
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                if not _OF_LISTS & page.keys():  # a gateway's page is no empty list: a run would begin at step 0
                    what = f"{self.address}/{prefix}: expected a list of objects, got an answer that is none"
                    raise OffsiteError(what, hint=NONE_OF_S3, final=False)
                yield page
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
                crc32=decode(CRC32, checksum),
                parts_crc32=decode_parts(checksum),
                crc64nvme=decode(CRC64NVME, further),
                md5=plain_md5(found),
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
                if code_of(error) not in UNABLE:
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
            self._uploads.forget(prefix, before)

    def _named(self, key: str) -> Named:
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


def _can_be_spelled(key: str) -> bool:
    """S3 has UTF-8 only, and not in every answer a way to write what XML has none for."""
    return not re.search("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", key)
