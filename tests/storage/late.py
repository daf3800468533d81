"""A store that shows what it has taken, replaced and removed only after a while."""

import hashlib
import threading
import time
from datetime import UTC, datetime

from runner.storage.offsite.contract import BLOCK_BYTES, MAX_SMALL_BYTES, Entry, Head, OffsiteError, Version

ALWAYS = float("-inf")


class LateStore:
    """
    Everything that reads sees each object as it was `lag_s` ago. Conditions are looked at where
    the writes are, as in every store that has them. Objects are kept in memory: small ones only.
    """

    def __init__(self, inner, lag_s):
        self._inner, self.lag_s = inner, lag_s
        self._lock = threading.Lock()
        self._history = {}  # key: [(since when, content or None)]
        self.address, self.probe, self.abort = inner.address, inner.probe, inner.abort

    def _changed(self, key, change):
        with self._lock:
            self._history.setdefault(key, [(ALWAYS, self._inner.get(key))])
        result = change()
        with self._lock:
            self._history[key].append((time.monotonic(), self._inner.get(key)))
        return result

    def _seen(self, key):
        with self._lock:
            if key not in self._history:
                return self._inner.get(key)
            until = time.monotonic() - self.lag_s
            return [content for since, content in self._history[key] if since <= until][-1]

    def put_file(self, key, path, shard, sent):
        self._changed(key, lambda: self._inner.put_file(key, path, shard, sent))

    def put(self, key, content):
        self._changed(key, lambda: self._inner.put(key, content))

    def put_new(self, key, content):
        return self._changed(key, lambda: self._inner.put_new(key, content))

    def put_if(self, key, content, tag):
        return self._changed(key, lambda: self._inner.put_if(key, content, tag))

    def copy(self, source, key, shard):
        return self._changed(key, lambda: self._inner.copy(source, key, shard))

    def delete(self, key):
        self._changed(key, lambda: self._inner.delete(key))

    def get(self, key, limit_bytes=MAX_SMALL_BYTES):
        content = self._seen(key)
        if content is not None and len(content) > limit_bytes:
            return self._inner.get(key, limit_bytes)
        return content

    def get_version(self, key, limit_bytes=MAX_SMALL_BYTES):
        content = self.get(key, limit_bytes)
        return content if content is None else Version(content=content, tag=self._tag(key, content))

    def _tag(self, key, content):
        """Of the version that is shown: an older one has a tag that fits nothing any more."""
        now = self._inner.get_version(key)
        return now.tag if now and now.content == content else "older"

    def read(self, key, offset, num_bytes, tag=""):
        content = self._seen(key)
        if content is None:
            raise OffsiteError(f"{self.address}/{key}: there is no such object", final=False)
        if tag not in {"", self._etag(content)}:
            raise OffsiteError(f"{self.address}/{key}: got another one", final=False)
        return content[offset : offset + num_bytes]

    def stream(self, key, offset, num_bytes, tag=""):
        content = self.read(key, offset, num_bytes, tag)
        return (content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES))

    def head(self, key):
        content = self._seen(key)
        return None if content is None else Head(size_bytes=len(content), crc32=None, tag=self._etag(content))

    @staticmethod
    def _etag(content):
        return hashlib.sha256(content).hexdigest()

    def list(self, prefix, left_out=lambda _: None):
        there = {entry.key: entry for entry in self._inner.list(prefix, left_out)}
        for key in sorted(there.keys() | {key for key in self._history if key.startswith(prefix)}):
            content, entry = self._seen(key), there.get(key)
            if content is not None:
                modified_at = entry.modified_at if entry else datetime.now(UTC)
                yield Entry(key=key, size_bytes=len(content), modified_at=modified_at)
