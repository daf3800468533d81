"""
What an S3 server can do, found out by trying with a few bytes.

No page of a store is believed: a server may refuse a checksum, ignore it, or repeat what it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import ClientError

from runner.storage.checksums import CRC32, CRC64NVME, Crc
from runner.storage.offsite.contract import PROBE, PROBED, Abilities, Checksums, OffsiteError, Store, agrees
from runner.storage.offsite.cures import code_of
from runner.storage.offsite.digests import Kind, with_md5
from runner.storage.offsite.multipart import Named, Uploads
from runner.storage.offsite.refusals import UNABLE, Condition, is_forbidden, is_refused, is_servers, is_taken
from vramfarm.checksum import crc32
from vramfarm.protocol import Shard

if TYPE_CHECKING:  # stubs only, not installed with the runner
    from mypy_boto3_s3 import S3Client

_SAMPLE: Final = b"vramfarm looks at what this store can do\n"
_SUMS: Final[Mapping[Crc, int]] = {CRC32: crc32(_SAMPLE), CRC64NVME: 0x8570EE8EB9BBE951}  # of the sample
_SAMPLE_SHARD: Final = Shard("sample", len(_SAMPLE), (_SUMS[CRC32],), (_SUMS[CRC64NVME],))
_WRONG: Final = 1  # the sum of other bytes


class Look:
    """At one key, `named` for the server, which whoever looks removes again."""

    def __init__(self, store: Store, client: S3Client, uploads: Uploads, key: str, named: Named) -> None:
        self._store, self._client, self._uploads = store, client, uploads
        self._key, self._named = key, named

    def find_abilities(self) -> Abilities:
        self._client.put_object(**self._named, Body=_SAMPLE, **with_md5(_SAMPLE))
        self._sweep()
        conditional = self._refuses({"IfNoneMatch": "*"}) and self._refuses({"IfMatch": '"another"'})
        kinds = (kind for kind in (Checksums.WHOLE, Checksums.PARTS) if self._confirms(Kind(CRC32, kind)))
        return Abilities(
            crc64nvme=self._confirms(Kind(CRC64NVME, Checksums.WHOLE)),
            checksums=next(kinds, Checksums.NONE),
            conditional=conditional,
        )

    def _sweep(self, age: timedelta = PROBED) -> None:
        """
        What killed looks have left, by the store's clock. To fail at it is no answer to what is asked here, but for
        an address that is wrong.
        """
        try:
            found = {entry.key: entry.modified_at for entry in self._store.list(PROBE)}
            before = found[self._key] - age if self._key in found else None
            for left in [k for k, modified_at in found.items() if before and modified_at < before]:
                self._store.delete(left)
            if before:
                self._store.abort(PROBE, before)
        except OffsiteError as error:
            if error.of_address:
                raise

    def _refuses(self, condition: Condition) -> bool:
        """Whether a condition that does not hold keeps what is there."""
        try:
            self._client.put_object(**self._named, **condition, Body=_SAMPLE, **with_md5(_SAMPLE))
        except ClientError as error:
            if code_of(error) in UNABLE:
                return False
            if is_taken(error):
                return True
            raise
        return False  # it was replaced: the condition was not looked at

    def _confirms(self, kind: Kind) -> bool:
        """Whether other bytes than those of a checksum are refused, and a file of one part is there with its own."""
        put = partial(self._client.put_object, **self._named, Body=_SAMPLE)
        try:
            put(**kind.fields(_SUMS[kind.crc]))
            if not is_refused(put, **kind.fields(_WRONG)) or not self._compares_parts(kind):
                return False
        except ClientError as error:
            if code_of(error) in UNABLE or (kind.crc is CRC64NVME and not is_servers(error)):
                return False  # what else may be wrong CRC32 tells, which is tried in any case
            raise
        head = self._store.head(self._key)
        return head is not None and kind.kept(head) is not None and agrees(head, _SAMPLE_SHARD) is True

    def _compares_parts(self, kind: Kind) -> bool:
        upload = self._uploads.begin(self._key, kind)
        named: dict[str, Any] = {**self._named, "UploadId": upload.id}
        put = partial(self._client.upload_part, **named, PartNumber=1, Body=_SAMPLE)
        try:
            if not is_refused(put, **kind.fields(_WRONG)):
                return False
            right = kind.fields(_SUMS[kind.crc])
            parts = [{"PartNumber": 1, "ETag": put(**right)["ETag"], **right}]
            if kind.of is Checksums.WHOLE and not is_refused(self._uploads.finish, upload, _WRONG, parts):
                return False
            self._uploads.finish(upload, _SUMS[kind.crc], parts)
        finally:
            with suppress(ClientError):  # it is complete, or what went wrong before is what is told
                self._uploads.abort(upload)
        return True

    def find_missing_rights(self) -> tuple[str, ...]:
        upload = self._uploads.begin(self._key, Kind(CRC32, Checksums.NONE))
        put = self._client.upload_part(
            **self._named, UploadId=upload.id, PartNumber=1, Body=_SAMPLE, **with_md5(_SAMPLE)
        )
        tries: Mapping[str, Callable[[], object]] = {
            "s3:ListBucketMultipartUploads": lambda: list(self._uploads.list_unfinished(self._key)),
            "s3:ListMultipartUploadParts": lambda: self._uploads.parts_of(self._key, upload.id),
            "s3:AbortMultipartUpload": lambda: self._uploads.abort(upload),
        }
        missing = tuple(right for right, call in tries.items() if is_forbidden(call))
        if "s3:AbortMultipartUpload" in missing:  # what is complete can be deleted
            with suppress(ClientError):
                self._uploads.finish(upload, 0, [{"PartNumber": 1, "ETag": put["ETag"]}])
                self._client.delete_object(**self._named)
        return missing
