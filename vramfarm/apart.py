"""
Objects whose state differs from rank to rank, as replay buffers do.

Nearly all are the same everywhere, and are saved once. So each rank only says in a save what its objects come to, in
numbers; the saver, which has all ranks' words, compares them. Where they differ it gives up that save, and from the next
one on every rank saves its own. Nobody waits for anybody.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from vramfarm import frozen
from vramfarm.checksum import crc32
from vramfarm.protocol import ControlPage, Word, apart_bits
from vramfarm.staging import Piece
from vramfarm.state import Snapshot


def names(page: ControlPage, objects: Iterable[str]) -> set[str]:
    """Return those of the objects, of all ranks, that each rank saves by itself."""
    given = list(objects)
    return {name for name in given if page[Word.APART] & apart_bits(given, {name})}


def keep(page: ControlPage, objects: Iterable[str], apart: Iterable[str]) -> None:
    """Go on with what a checkpoint has of each rank. On local rank 0, before there is a saver."""
    page[Word.APART] |= apart_bits(objects, set(apart))


def describe(snapshot: Snapshot, name: str, encoded: object, pieces: Sequence[Piece]) -> list[Any]:
    """Return what the saver compares: a sum of an object's JSON, and the keys of tensors with sums of what is in its own. Waits for no device."""
    whole = [piece.local for piece in pieces if not piece.spread]  # what is spread differs anyway
    own = Snapshot(rank=0, world_size=1)
    keys = [
        own.add(f"alike.{name}.{snapshot.rank}.{number}", several)
        for number, several in enumerate(frozen.sums(whole).values())
    ]
    snapshot.pieces += own.pieces
    return [crc32(json.dumps(encoded).encode(), 0), keys]
