"""
How a loader is gone through, so that a run goes on where it was: in our own order where we can make it, by the loader's own
state where it keeps one, else by skipping batches. Samples count when a step has consumed them, not when they were prefetched.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from vramfarm import rng
from vramfarm.epochs import GlobalBatches, Order, Position, Saved, World
from vramfarm.rng import mix
from vramfarm.typed import StateError

_T = TypeVar("_T")


class SeededBatches:
    """
    The batches of another batch sampler, for workers: whoever fetches one draws random numbers that depend on nothing but that batch.

    So a resumed run augments as the undisturbed one does, with any number of workers and whatever they fetched ahead.
    """

    def __init__(self, batches: Iterable[Any], seed: int) -> None:
        self._batches = batches
        self._seed = seed
        self._begin = (0, 0, 1)

    def seek(self, epoch: int, place: int, stride: int) -> None:
        """The next iteration begins at this rank's `place` in the epoch; each batch is `stride` places behind the one before."""
        self._begin = (epoch, place, stride)

    def seed(self, number: int) -> int:
        """Return the seed of the batch that comes as `number` of this iteration, from 0."""
        epoch, place, stride = self._begin
        return mix(self._seed, epoch, place + number * stride)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # where it has none, so have we

    def __iter__(self) -> Iterator[_Seeded]:
        batches = iter(self._batches)
        return (_StatefulSeeding if is_stateful(batches) else _Seeding)(batches, self)


class _Seeding(Iterator["_Seeded"]):
    def __init__(self, batches: Any, of: SeededBatches) -> None:  # noqa: ANN401  # the loader's
        self._batches, self._of, self._number = batches, of, 0

    def __next__(self) -> _Seeded:
        batch = _Seeded(next(self._batches), self._of.seed(self._number))
        self._number += 1
        return batch


class _StatefulSeeding(_Seeding):
    """The same where the batches know by themselves where they are, as torchdata's do."""

    _NUMBER: Final = "vramfarm.number"

    def state_dict(self) -> dict[str, Any]:
        return {**self._batches.state_dict(), self._NUMBER: self._number}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        rest = dict(saved)
        self._number = rest.pop(self._NUMBER, 0)  # a checkpoint of before has none
        self._batches.load_state_dict(rest)


class _Seeded:
    """A batch's indices on their way to a worker, which gets them as they were."""

    def __init__(self, indices: Any, seed: int) -> None:  # noqa: ANN401  # the sampler's
        self._indices, self._seed = indices, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._indices, self._seed)


def _arrive(indices: Any, seed: int) -> Any:  # noqa: ANN401  # the sampler's
    """In the worker, when it takes up the batch: the dataset, the transforms and collate_fn come next, and all draw from these."""
    rng.seed_host(seed)
    return indices


class Feed(Protocol):
    """A loader, as the Checkpointer drives it."""

    note: str  # for the resume report
    order: Order
    is_kept: bool  # it cannot be made anew where a loop was left, and is told when a step is finished

    def rest_of_epoch(self, position: Position) -> Iterator[Any]:
        """Yield this rank's batches from `position` to the end of its epoch."""
        ...

    def count(self, batch: Any, position: Position) -> int:  # noqa: ANN401  # the script's
        """Return how many samples all ranks consume with this batch."""
        ...

    def num_batches(self, position: Position, epochs: int) -> int:
        """Return how many batches are left until the end of `epochs` epochs; 0 if that is not known."""
        ...

    def mark(self) -> None:
        """All batches that were given out are in finished steps. What comes after is given out again where a loop is left before its step is made."""
        ...

    def state(self) -> Any:  # noqa: ANN401  # the loader's
        """Return what the loader itself wants saved, as of the last `mark`; None if the position is all."""
        ...


def feed(loader: Iterable[Any], world: World, seed: int, saved: Saved | None) -> Feed:
    """Return the best way to go on with this loader."""
    if is_stateful(loader):
        return StatefulFeed(loader, world, seed, saved)
    if isinstance(loader, DataLoader) and _is_plain(loader):
        found = GlobalFeed(loader, world, seed)
        if saved is not None and (changed := found.order.changed(saved.order, saved.position)):
            raise StateError(f"{changed}, or begin anew with resume='never'")
        return found
    if isinstance(loader, Iterator):
        return StreamFeed(loader, world, seed, saved)
    return SkippingFeed(loader, world, seed, saved)


def is_unshared(loader: object, world: World) -> bool:
    """Whether a loader that stays as it is has a sampler that knows nothing of the other ranks: nobody shares its samples out."""
    sampler = getattr(loader, "sampler", None)
    is_batched = type(getattr(loader, "batch_sampler", None)) is BatchSampler
    return world.size > 1 and is_batched and (type(sampler) is SequentialSampler or _draws_alone(loader))


def is_stateful(loader: object) -> bool:
    """Whether it keeps its own state; accelerate's loaders have the methods, and the state only where they were asked to."""
    has_methods = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return has_methods and bool(getattr(loader, "use_stateful_dataloader", True))


def state_of(loader: Any) -> Any:  # noqa: ANN401  # duck-typed
    """Return what a loader keeps; None if it keeps nothing, or has yet to begin: torchdata's would start its workers for the answer, without our seeds."""
    if not is_stateful(loader) or getattr(loader, "_iterator", loader) is None:
        return None
    return loader.state_dict()


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the order is one that we can make ourselves. What inherits from DataLoader and iterates its own way may do anything to batches: it stays as it is."""
    if type(loader).__iter__ is not DataLoader.__iter__ or type(loader)._get_iterator is not DataLoader._get_iterator:  # noqa: SLF001  # where batches are made
        return False
    if isinstance(loader.dataset, IterableDataset) or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler._num_samples is None  # noqa: SLF001  # told apart nowhere else
    return type(sampler) in {SequentialSampler, DistributedSampler}


class GlobalFeed:
    """A map-style DataLoader around our own order: exact for any number of ranks and workers."""

    note: str = "exact"
    is_kept: bool = False

    def __init__(self, loader: DataLoader[Any], world: World, seed: int) -> None:
        sampler = loader.sampler
        given, sampler_seed = seed, getattr(sampler, "seed", 0)
        # Without a seed of its own it changes nothing: scripts have one on several ranks, and on a single one they shuffle.
        if sampler_seed:
            seed = mix(seed, sampler_seed)
        shuffle = isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False))
        self.order = Order(given, len(loader.dataset), shuffle, sampler_seed)
        assert loader.batch_size is not None
        self._batches = GlobalBatches(
            len(loader.dataset),
            loader.batch_size,
            world,
            shuffle=shuffle,
            seed=seed,
            drop_last=loader.drop_last,
        )
        self._seed, self._rank = seed, world.rank
        self._generator = torch.Generator()  # ours: starting an epoch draws from it, and must not disturb the script's
        self._seeded = SeededBatches(self._batches, seed)
        self._loader = _rebuild(loader, self._seeded if loader.num_workers else self._batches, self._generator)
        if not getattr(loader, "in_order", True):
            self.note = "exact; in order, for a position that a resume can go on from"

    def rest_of_epoch(self, position: Position) -> Iterator[Any]:
        self._batches.seek(position.epoch, position.cursor)
        self._seeded.seek(position.epoch, position.cursor + self._rank, self._batches.global_batch)
        self._generator.manual_seed(
            mix(self._seed, position.epoch, position.cursor, self._rank)
        )  # seeds the workers, too
        set_epoch(self._loader.dataset, position.epoch)
        with torch.device(
            "cpu"
        ):  # as our generator is, which it draws from, wherever else the script makes its tensors
            return iter(self._loader)

    def count(self, batch: Any, position: Position) -> int:  # noqa: ANN401, ARG002  # the order knows
        return self._batches.samples_at(position.cursor)

    def num_batches(self, position: Position, epochs: int) -> int:
        self._batches.seek(position.epoch, position.cursor)
        rest = len(self._batches)
        self._batches.seek(position.epoch, 0)
        return max(0, rest + (epochs - position.epoch - 1) * len(self._batches)) if position.epoch < epochs else 0

    def mark(self) -> None:
        """The position is all."""

    def state(self) -> None:
        return None


_KEPT: Final = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
)


def _rebuild(
    loader: DataLoader[Any], batches: GlobalBatches | SeededBatches, generator: torch.Generator
) -> DataLoader[Any]:
    kept = {name: getattr(loader, name) for name in _KEPT}
    kept["persistent_workers"] = loader.persistent_workers and not _has_epochs(loader.dataset)
    return DataLoader(loader.dataset, batch_sampler=batches, generator=generator, **kept)


class SkippingFeed:
    """Anything else that can be iterated: gone through from the epoch's beginning, batch by batch."""

    is_kept: bool = False

    def __init__(self, loader: Iterable[Any], world: World, seed: int, saved: Saved | None) -> None:
        self.order = _order_of(_inner(loader), seed)
        self.note = "by skipping batches: the loader must give the same ones again" + _drawn_anew(loader, again=True)
        self._loader = loader
        self._batched = _fetched_by_workers(loader)
        self._seeded = SeededBatches(self._batched.batch_sampler, seed) if self._batched else None
        self._world = world
        self._seed = seed
        self._own = (world.rank,) if _draws_alone(loader) else ()
        self._saved = saved
        self.note += self._what_comes_again(saved)

    def rest_of_epoch(self, position: Position) -> Iterator[Any]:
        for thing in (self._loader, *(getattr(self._loader, n, None) for n in ("sampler", "batch_sampler", "dataset"))):
            set_epoch(thing, position.epoch)
        if isinstance(self._loader, DataLoader) and _has_epochs(self._loader.dataset):
            self._loader._iterator = None  # noqa: SLF001  # persistent workers have a copy that was told of another epoch
        skip, ahead = self._plan(position)
        with rng.others(mix(self._seed, position.epoch, *self._own)), self._seeding(position.epoch):
            _draw_as_a_start_does(_inner(self._loader))
            batches = iter(self._loader)
            first = list(itertools.islice(_take(batches, ahead), skip, None))  # one at a time: there may be many
        return itertools.chain(first, batches)

    @contextlib.contextmanager
    def _seeding(self, epoch: int) -> Iterator[None]:
        """Meanwhile an iteration of the loader begins, with batches that have seeds; for others who use it, it stays as it is."""
        if self._batched is None or self._seeded is None:
            yield
            return
        self._seeded.seek(epoch, self._world.rank, self._world.size)
        own = self._batched.batch_sampler
        object.__setattr__(self._batched, "batch_sampler", self._seeded)  # the loader itself refuses it
        try:
            yield
        finally:
            object.__setattr__(self._batched, "batch_sampler", own)

    def _plan(self, position: Position) -> tuple[int, int]:
        """
        Return how many batches to skip, and how many to take while other random numbers are drawn.

        That is the first, with which samplers draw the order of an epoch, and all that are skipped: later ones draw
        the script's own numbers, as if nothing had been skipped. The first epoch after a resume may have been begun by
        another number of ranks.
        """
        saved, self._saved = self._saved, None
        if saved is not None:
            begin = self._begin_at(position, saved)
            position.batches, position.cursor = begin.batches, begin.cursor
        return position.batches, max(position.batches, 1)

    def _begin_at(self, position: Position, saved: Saved) -> Position:
        """
        Return where this loader can go on: behind whole batches of all ranks that are here now.

        Where batches have another size now they are as many as the samples need. What they do not cover comes again; nothing is
        left out.
        """
        before, now = saved.order.batch_size or 1, self.order.batch_size or 1
        if self._is_over(position):
            return replace(position, batches=-(-position.cursor // (self._world.size * now)))
        if position.cursor != position.batches * before * saved.world_size:  # a batch has other parts
            before = now = 1
        behind, each = position.batches * saved.world_size * before, self._world.size * now
        batches = behind // each
        cursor = position.cursor * batches * each // behind if behind else position.cursor
        return replace(position, batches=batches, cursor=cursor)

    def _is_over(self, position: Position) -> bool:
        """Whether the epoch was gone through, where a sampler gives each sample of a dataset once."""
        size, sampler = self.order.size, getattr(_inner(self._loader), "sampler", None)
        if size is None or position.cursor < size or not isinstance(sampler, Sized):
            return False
        return len(sampler) == -(-size // self._world.size)

    def _what_comes_again(self, saved: Saved | None) -> str:
        """Say how many samples come again, because they fill no batch of all ranks that are here now."""
        again = 0 if saved is None else saved.position.cursor - self._begin_at(saved.position, saved).cursor
        return f"; {again} of them come again, which fill no batch on every rank here" if again else ""

    def count(self, batch: Any, position: Position) -> int:  # noqa: ANN401, ARG002  # the batch knows
        return batch_length(batch) * self._world.size

    def num_batches(self, position: Position, epochs: int) -> int:
        try:
            length = len(self._loader)  # type: ignore[arg-type]  # not all have one
        except TypeError:
            return 0
        return max(0, (epochs - position.epoch) * length - position.batches)

    def mark(self) -> None:
        """The position is all."""

    def state(self) -> Any:  # noqa: ANN401  # see Feed
        return None


class StreamFeed(SkippingFeed):
    """
    What cannot be begun anew in the middle: iterators, and loaders that would draw another order.

    Its iteration is kept where a loop is left, and so are the batches given out since the last `mark`, with their
    epochs: they come again before others do.
    """

    is_kept = True

    def __init__(self, loader: Iterable[Any], world: World, seed: int, saved: Saved | None) -> None:
        super().__init__(loader, world, seed, saved)
        self._given: list[tuple[int, Any]] = []
        self._again: list[tuple[int, Any]] = []
        self._rest: Iterator[Any] | None = None
        self._ended = -1  # the epoch that was gone through last

    def rest_of_epoch(self, position: Position) -> Iterator[Any]:
        epoch = position.epoch
        if self._given and self._given[0][0] == epoch:  # a loop was left; else their step goes on over the epoch's end
            self._again, self._given = self._given + self._again, []
        while self._again and self._again[0][0] == epoch:
            yield self._give(*self._again.pop(0))
        if self._again or self._ended == epoch:
            return
        if self._rest is None:
            self._rest = super().rest_of_epoch(position)  # without us in it: who holds us lets its workers go
        for batch in self._rest:
            yield self._give(epoch, batch)
        self._rest, self._ended = None, epoch

    def _give(self, epoch: int, batch: Any) -> Any:  # noqa: ANN401  # the script's
        self._given.append((epoch, batch))
        return batch

    def mark(self) -> None:
        self._given.clear()


_AGAIN: Final = "vramfarm.again"


class StatefulFeed(StreamFeed):
    """
    A loader that keeps its own state (torchdata's StatefulDataLoader): per rank, for the same number of ranks.

    It is asked for that in saves only. Where a loop was left it is ahead of the last step: batches that come again are saved with it.
    """

    def __init__(self, loader: Any, world: World, seed: int, saved: Saved | None) -> None:  # noqa: ANN401  # duck-typed
        super().__init__(loader, world, seed, saved)
        self._stateful = loader
        self.note = "by the loader's own state" + _drawn_anew(loader, again=False)
        self._has_begun = False
        self._restored = None if saved is None else saved.loader_state
        if saved is not None and self._restored is None:
            self.note = "by skipping batches: the checkpoint has no state of the loader's own, or one of another number of ranks"
            self.note += self._what_comes_again(saved)
        elif self._restored is not None:
            self.order = replace(self.order, seed=None)  # it is in the state
            inner, again, self._ended = _unwrapped(self._restored)
            self._again = [(epoch, batch) for epoch, batch in again]
            loader.load_state_dict(inner)

    def _plan(self, position: Position) -> tuple[int, int]:
        is_restored, self._has_begun = self._restored is not None and not self._has_begun, True
        cursor = position.cursor
        skip, ahead = super()._plan(position)
        if is_restored:
            position.cursor = cursor  # it knows by itself where it is
        return (0, int(skip == 0 or _draws_alone(self._loader))) if is_restored else (skip, ahead)

    def state(self) -> Any:  # noqa: ANN401  # see Feed
        if self._rest is None and not self._has_begun:
            live = state_of(self._stateful)
            return self._restored if live is None else live
        live, again = self._stateful.state_dict(), [[*pair] for pair in self._given + self._again]
        return {_AGAIN: again, "ended": self._ended, "state": live} if again else live


def _unwrapped(saved: Any) -> tuple[Any, list[Any], int]:  # noqa: ANN401  # the loader's
    """Return a loader's own state, the batches that come before it, and the epoch that had ended."""
    if isinstance(saved, dict) and _AGAIN in saved:
        return saved["state"], saved[_AGAIN], saved["ended"]
    return saved, [], -1


def without_again(saved: Any) -> Any:  # noqa: ANN401  # the loader's
    """Return a loader's own state alone, where the batches cannot be saved."""
    return _unwrapped(saved)[0]


def _order_of(loader: Any, seed: int) -> Order:  # noqa: ANN401  # duck-typed
    """Return what can be seen of an order that others make: samplers call their parts as torch's do."""
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    is_stream = isinstance(dataset, IterableDataset)
    of = (sampler, getattr(loader, "batch_sampler", None), *([dataset] if is_stream else []))
    shuffled = _first(bool, of, "shuffle")
    if shuffled is None and type(sampler) in {RandomSampler, SequentialSampler}:
        shuffled = type(sampler) is RandomSampler
    return Order(
        seed=seed if _draws_alone(loader) and getattr(sampler, "generator", None) is None else None,
        shuffled=shuffled,
        sampler_seed=_first(int, of, "seed", "initial_seed"),
        size=None if is_stream or not isinstance(dataset, Sized) else len(dataset),
        batch_size=_first(int, (loader, *of), "batch_size"),
    )


def _first(kind: type[_T], things: Iterable[object], *names: str) -> _T | None:
    found = (getattr(thing, name, None) for thing in things for name in names)
    return next((one for one in found if type(one) is kind), None)


def _inner(loader: Any) -> Any:  # noqa: ANN401  # duck-typed
    """Return the loader that does the work: accelerate has it in one of its own."""
    return getattr(loader, "base_dataloader", loader)


def _draw_as_a_start_does(loader: Any) -> None:  # noqa: ANN401  # duck-typed
    """Workers that stay get no new seed, for which a start draws a number. Without that their epochs would have other orders than a resume's."""
    if getattr(loader, "_iterator", None) is not None:
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=getattr(loader, "generator", None))


def _fetched_by_workers(loader: Any) -> DataLoader[Any] | None:  # noqa: ANN401  # duck-typed
    """Return the loader whose workers are told what to fetch, batch by batch; None where they find it by themselves, or there are none."""
    inner = _inner(loader)
    if not isinstance(inner, DataLoader) or not inner.num_workers or isinstance(inner.dataset, IterableDataset):
        return None
    return None if inner.batch_sampler is None or is_stateful(inner.batch_sampler) else inner


def _drawn_anew(loader: Any, *, again: bool) -> str:  # noqa: ANN401  # duck-typed
    """Say where workers that have no seed of ours draw other numbers after a resume: `again`, they begin with the epoch's first batch."""
    inner = _inner(loader)
    if inner is not loader and not inner.num_workers:
        return "; random numbers for the first batch are drawn anew"  # it is fetched one batch ahead
    if not isinstance(inner, DataLoader) or not inner.num_workers or _fetched_by_workers(loader):
        return ""
    same = again and not inner.persistent_workers and inner.generator is None
    return "" if same else "; random numbers drawn in its workers begin anew"


def _draws_alone(loader: Any) -> bool:  # noqa: ANN401  # duck-typed
    """Whether its sampler knows nothing of ranks: from the same numbers every rank would get the same samples."""
    sampler = getattr(loader, "sampler", None)
    return type(sampler) in {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}


def _take(batches: Iterator[Any], number: int) -> Iterator[Any]:
    for _, batch in zip(range(number), batches, strict=False):
        yield batch


def _has_epochs(dataset: object) -> bool:
    return callable(getattr(dataset, "set_epoch", None))


def set_epoch(thing: object, epoch: int) -> None:
    method = getattr(thing, "set_epoch", None)
    if callable(method):
        method(epoch)


def batch_length(batch: Any) -> int:  # noqa: ANN401  # the script's
    """Return the number of samples in a batch: the first tensor's first dimension, else the length of a list."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(parts, list | tuple):
        inner = [batch_length(part) for part in parts if isinstance(part, torch.Tensor | Mapping | list | tuple)]
        return inner[0] if inner else len(parts)
    return 1
