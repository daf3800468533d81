"""Uploads in parts, as S3 has them: begun, found again, finished, forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from botocore.exceptions import ClientError

from runner.storage.offsite.contract import Checksums
from runner.storage.offsite.cures import code_of
from runner.storage.offsite.digests import Kind
from runner.storage.offsite.refusals import FORBIDDEN, UNABLE, is_forbidden

if TYPE_CHECKING:  # stubs only, not installed with the runner
    from mypy_boto3_s3 import S3Client


class Named(TypedDict):
    Bucket: str
    Key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    key: str
    id: str
    kind: Kind
    there: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class Uploads:
    """Those below one prefix of a bucket; `name` says how the server calls a key."""

    def __init__(self, client: S3Client, bucket: str, prefix: str, name: Callable[[str], Named]) -> None:
        self._client, self._bucket, self._prefix, self._named = client, bucket, prefix, name

    def begin(self, key: str, kind: Kind) -> Upload:
        begun = self._client.create_multipart_upload(**self._named(key), **kind.wish())
        return Upload(key=key, id=begun["UploadId"], kind=kind)

    def find(self, key: str, kind: Kind) -> Upload | None:
        """The upload of this key that a killed process left, with the parts that arrived."""
        begun = [u for u in self.unfinished(key) if u["Key"] == self._prefix + key]
        if not begun:
            return None
        upload_id = max(begun, key=lambda u: u["Initiated"])["UploadId"]
        try:
            there = self.parts_of(key, upload_id)
        except ClientError as error:
            if code_of(error) not in FORBIDDEN:
                raise
            return None
        return Upload(key=key, id=upload_id, kind=kind, there=there)

    def parts_of(self, key: str, upload_id: str) -> Mapping[int, Mapping[str, Any]]:
        pages = self._client.get_paginator("list_parts").paginate(**self._named(key), UploadId=upload_id)
        return {part["PartNumber"]: part for page in pages for part in page.get("Parts", [])}

    def unfinished(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        """None, where the server cannot list them, or lets us not: then a killed upload begins anew."""
        try:
            yield from self.list_unfinished(prefix)
        except ClientError as error:
            if code_of(error) not in UNABLE | FORBIDDEN:
                raise

    def list_unfinished(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        pages = self._client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
            yield from page.get("Uploads", [])

    def finish(self, upload: Upload, whole: int, parts: Any) -> None:  # noqa: ANN401  # the stubs' dicts
        of_all: dict[str, Any] = {}
        if upload.kind.of is Checksums.WHOLE:
            of_all = {**upload.kind.fields(whole), "ChecksumType": "FULL_OBJECT"}
        self._client.complete_multipart_upload(
            **self._named(upload.key), UploadId=upload.id, MultipartUpload={"Parts": parts}, **of_all
        )

    def abort(self, upload: Upload) -> None:
        self._client.abort_multipart_upload(**self._named(upload.key), UploadId=upload.id)

    def forget(self, prefix: str, before: datetime) -> None:
        """What was begun earlier and never finished, also what is there for no key of ours."""
        for upload in list(self.unfinished(prefix)):
            named = {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            if upload["Initiated"] < before and is_forbidden(partial(self._client.abort_multipart_upload, **named)):
                return  # the first look has said so, and what it costs
