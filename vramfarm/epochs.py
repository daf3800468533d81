"""
Where we are in the data, counted in samples that all ranks together have consumed, and what the order of an epoch is made from.

The order depends on (seed, epoch) only, and rank r of W takes every W-th sample from the common position. So a run that
goes on with another number of ranks, or of workers, repeats and skips nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from vramfarm.protocol import MAX_NUMBER
from vramfarm.rng import mix
from vramfarm.typed import StateError


@dataclass(frozen=True)
class World:
    rank: int
    size: int


@dataclass
class Position:
    """`cursor` samples of epoch `epoch` are behind us, and `batches` of each rank; `samples` since the beginning."""

    epoch: int = 0
    cursor: int = 0
    batches: int = 0
    samples: int = 0

    @classmethod
    def parse(cls, saved: Mapping[str, Any]) -> Position:
        """Return what `dump` gave; `StateError` for anything else."""
        if saved.keys() != cls().dump().keys() or not all(
            type(n) is int and 0 <= n < MAX_NUMBER for n in saved.values()
        ):
            raise StateError(f"the checkpoint's position in the data makes no sense: {str(saved)[:80]}")
        return cls(**saved)

    def advance(self, samples: int) -> None:
        self.cursor += samples
        self.batches += 1
        self.samples += samples

    def next_epoch(self) -> None:
        self.epoch, self.cursor, self.batches = self.epoch + 1, 0, 0

    def dump(self) -> dict[str, int]:
        return asdict(self)


def batch_indices(length: int, cursor: int, batch_size: int, world: World) -> range | list[int]:
    """
    Return this rank's indices into the epoch's order for the batch at `cursor`.

    The last batch of an epoch is shared evenly: all ranks get equally many, and where the epoch
    does not suffice for that its beginning is used once more.
    """
    samples = min(world.size * batch_size, length - cursor)
    last = cursor + -(-samples // world.size) * world.size
    indices = range(cursor + world.rank, last, world.size)
    return indices if last <= length else [index % length for index in indices]


class GlobalBatches:
    """
    A batch sampler that can begin anywhere.

    `drop_last`: samples that do not fill a batch on every rank are left out of their epoch.
    """

    def __init__(  # noqa: PLR0913  # what a loader knows
        self, length: int, batch_size: int, world: World, *, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.length = length
        self.global_batch = batch_size * world.size
        self._batch_size = batch_size
        self._world = world
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0
        self._cursor = 0

    def seek(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor

    def samples_at(self, cursor: int) -> int:
        """Return how many samples all ranks together consume at `cursor`; 0 at the epoch's end."""
        left = max(self.length - cursor, 0)
        if left < self.global_batch and self._drop_last:
            return 0
        return min(self.global_batch, left)

    def __len__(self) -> int:
        left = max(self.length - self._cursor, 0)
        return left // self.global_batch if self._drop_last else -(-left // self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        order, cursor = self._order(), self._cursor
        while samples := self.samples_at(cursor):
            indices = batch_indices(self.length, cursor, self._batch_size, self._world)
            yield [order[index] for index in indices] if isinstance(order, range) else order[list(indices)].tolist()
            cursor += samples

    def _order(self) -> Any:  # noqa: ANN401  # a range or a tensor: both are indexed alike
        if not self._shuffle:
            return range(self.length)
        generator = torch.Generator().manual_seed(mix(self._seed, self._epoch))
        return torch.randperm(self.length, generator=generator, device="cpu")


@dataclass(frozen=True)
class Order:
    """
    What an epoch's order is made from, besides the epoch; None where that is not known.

    `samples` are those of an epoch. Where the order is not ours only the `size` of the data is known, and of what batches consist.
    """

    seed: int | None = None
    samples: int | None = None
    shuffled: bool | None = None
    sampler_seed: int | None = None
    size: int | None = None
    batch_size: int | None = None

    @classmethod
    def parse(cls, saved: object) -> Order:
        """Return what `dump` gave. Earlier versions knew less."""
        known: dict[str, Any] = saved if isinstance(saved, dict) else {"": ""}
        if not all(type(value) in {bool if name == "shuffled" else int, type(None)} for name, value in known.items()):
            raise StateError(f"the checkpoint's order of the data makes no sense: {str(saved)[:80]}")
        return cls(**{name: value for name, value in known.items() if name in cls.__dataclass_fields__})

    def dump(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def is_over(self, position: Position) -> bool:
        """Whether nothing is left of the epoch."""
        return self.samples is not None and position.cursor >= self.samples

    def changed(self, before: Order, position: Position) -> str:
        """Say that the order is another one in the middle of an epoch: samples are repeated and left out, and nobody would see it."""
        found = next(self._differences(before), None)
        if found is None or not 0 < position.cursor < (before.samples or before.size or math.inf):
            return ""
        was, now, advice = found
        return (
            f"the loader: {was} when the checkpoint was saved, {position.cursor} samples into epoch {position.epoch}, and {now} now: "
            f"the rest of that epoch would repeat samples and leave others out; {advice}"
        )

    def _differences(self, before: Order) -> Iterator[tuple[str, str, str]]:
        size, now = before.samples or before.size, self.samples or self.size
        if size is not None and now is not None and size != now:
            more = "their first samples (torch.utils.data.Subset)" if now > size else "them all"
            yield f"{size} samples", str(now), f"give it {more} until the epoch's end"
        words = {True: "shuffled", False: "in order"}
        if before.shuffled not in {None, self.shuffled}:
            was = words[bool(before.shuffled)]
            yield was, words[bool(self.shuffled)], f"give it {was} until the epoch's end"
        if self.shuffled is not False:
            if before.seed not in {None, self.seed}:
                yield f"seed={before.seed}", f"seed={self.seed}", f"give seed={before.seed} until the epoch's end"
            if before.sampler_seed not in {None, self.sampler_seed}:
                was = f"seed={before.sampler_seed}"
                yield (
                    f"a sampler with {was}",
                    f"seed={self.sampler_seed}",
                    f"give the sampler {was} until the epoch's end",
                )


UNKNOWN: Final = Order()


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of the data: `loader_state` only where it is this rank's own."""

    position: Position
    world_size: int
    loader_state: Any = None
    order: Order = UNKNOWN
