"""
The farm's memory: documents in sqlite, committed before anybody hears of them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from runner.simulator.model import STORED

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS document (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    owner TEXT NOT NULL DEFAULT '',
    body TEXT NOT NULL,
    UNIQUE (kind, id)
)
"""

Document = TypeVar("Document", bound=BaseModel)


class Store:
    """Documents by kind and id, listed in the order in which they were first put. One process, many threads."""

    def __init__(self, path: Path) -> None:
        self._lock = RLock()
        self._depth = 0
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(_SCHEMA)
        path.chmod(0o600)  # keys and secrets of servers are in it

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All puts inside become durable together, or none does. May be nested."""
        with self._lock:
            if self._depth == 0:
                self._db.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
            except BaseException:
                if self._depth == 1:
                    self._db.execute("ROLLBACK")
                raise
            else:
                if self._depth == 1:
                    self._db.execute("COMMIT")
            finally:
                self._depth -= 1

    def put(self, kind: str, id_: str, body: BaseModel | str, owner: str = "") -> None:
        text = body if isinstance(body, str) else body.model_dump_json()
        with self.transaction():
            self._db.execute(
                "INSERT INTO document (kind, id, owner, body) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (kind, id) DO UPDATE SET body = excluded.body",
                (kind, id_, owner, text),
            )

    def text(self, kind: str, id_: str) -> str | None:
        rows = self._rows("SELECT body FROM document WHERE kind = ? AND id = ?", kind, id_)
        return str(rows[0][0]) if rows else None

    def get(self, model: type[Document], id_: str) -> Document | None:
        body = self.text(model.__name__, id_)
        return None if body is None else model.model_validate_json(body, context=STORED)

    def all(self, model: type[Document], owner: str | None = None) -> list[Document]:
        """Oldest first."""
        query = "SELECT body FROM document WHERE kind = ? AND (? IS NULL OR owner = ?) ORDER BY number"
        return [
            model.model_validate_json(body, context=STORED)
            for (body,) in self._rows(query, model.__name__, owner, owner)
        ]

    def delete(self, model: type[BaseModel], id_: str) -> None:
        with self.transaction():
            self._db.execute("DELETE FROM document WHERE kind = ? AND id = ?", (model.__name__, id_))

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()
