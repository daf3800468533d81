"""
Where we are in each of the loaders that a training uses, one after the other or in turns.

Each has a position of its own, under the number by which it was first used. A resumed run that uses them in the
same order finds them again; where it is seen that it does not, it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from vramfarm.data import Feed
from vramfarm.epochs import UNKNOWN, Order, Position
from vramfarm.metadata import Own, Shared
from vramfarm.typed import StateError

_STREAM: Final = object()  # iterators are used up: one stands for all


@dataclass
class Place:
    """
    One loader's: the position of the last step that used it, and how many passes were asked for.

    `state` is what a checkpoint has of the loader's own. A `feed` that cannot be made anew is kept, with the `loader` that it is of.
    """

    number: int
    position: Position
    size: int | None  # samples of an epoch, where that is known
    data: Callable[[], object]
    is_new: bool = True
    has_begun: bool = False
    passes: int = 0
    state: Any = None
    ranks: int = 0  # that its batches are counted by, as the checkpoint has them: until it is gone through
    order: Order = UNKNOWN  # as the checkpoint has it, then as it is
    loader: object = None
    feed: Feed | None = None


class Places:
    """Of all loaders: those that this run has gone through, and those that a checkpoint knows. `now` is the number of the last one of then."""

    def __init__(self) -> None:
        self._found: list[Place] = []
        self._saved: list[tuple[Position, int | None]] = []
        self._ranks: list[int] = []
        self._states: dict[int, Any] = {}
        self._orders: dict[int, Order] = {}
        self.now = 0

    @classmethod
    def parse(cls, shared: Shared, own: Own) -> Places:
        """Return what a checkpoint says, `own` decoded; of a run with one loader it has only the position. `StateError` for what makes no sense."""
        places = cls()
        if shared.places is None:
            places._saved = [(Position.parse(shared.position), None)]
        else:
            places._saved, places.now = _parse(shared.places)
        places._ranks = _parse_ranks(shared.places, len(places._saved), shared.data_ranks)
        places._orders = {number: Order.parse(order) for number, order in _by_number(shared.orders)}
        places._states = dict(_by_number(own.loaders)) | ({} if own.loader is None else {places.now: own.loader})
        return places

    def of(self, loader: object) -> Place:
        """Return the place of this loader's data; of data that were not seen before, at their beginning, or where they were when the checkpoint was saved."""
        what = _data_of(loader)
        known = next((place for place in self._found if place.data() is what), None)
        if known is not None:
            return known
        number, size = len(self._found), _size_of(what)
        position, is_new = Position(), number >= len(self._saved)
        if not is_new:
            position, before = replace(self._saved[number][0]), self._saved[number][1]
            if before != size and before is not None:
                raise StateError(
                    f"steps: loader {number + 1} of this run has {size} samples, and had {before} when the checkpoint was saved: "
                    "use the loaders in the same order as then"
                )
        order = self._orders.get(number, UNKNOWN)
        if order.is_over(position) and order.samples != size:  # an epoch of more is the next one
            position.next_epoch()
        state = self._states.get(number)
        place = Place(number, position, size, _reference_to(what), is_new, state=state, order=order)
        place.ranks = 0 if is_new else self._ranks[number]
        self._found.append(place)
        return place

    def number(self, now: Place) -> int:
        """Return the number of the loader that is gone through, or was when the checkpoint was saved."""
        return now.number if now in self._found else self.now

    def states(self) -> dict[int, Any]:
        """Return what loaders keep by themselves, by their numbers."""
        states = dict(self._states)
        for place in self._found:
            if place.has_begun:
                states[place.number] = None if place.feed is None else place.feed.state()
        return {number: state for number, state in states.items() if state is not None}

    def orders(self) -> dict[str, Any]:
        """Return what orders are made from, by the loaders' numbers, where that is known."""
        orders = {**self._orders, **{place.number: place.order for place in self._found}}
        return {str(number): order.dump() for number, order in orders.items() if order != UNKNOWN}

    def dump(self, now: Place, position: Position, ranks: int) -> dict[str, Any] | None:
        """
        Return what a checkpoint of so many `ranks` keeps, None where one loader is all: its position is there anyway.

        The place `now` is at `position`. One that was not gone through since a resume counts by the ranks of then.
        """
        positions = [place.position if place is not now else position for place in self._found]
        all_of_them = [(one, place.size) for one, place in zip(positions, self._found, strict=True)]
        all_of_them += self._saved[len(all_of_them) :]
        if len(all_of_them) <= 1:
            return None
        by = [ranks if place.is_new or place.has_begun else place.ranks for place in self._found]
        by += self._ranks[len(by) :]
        kept = {"now": self.number(now), "all": [[one.dump(), size] for one, size in all_of_them]}
        return kept if set(by) == {ranks} else kept | {"ranks": by}


def _by_number(saved: Mapping[str, Any]) -> list[tuple[int, Any]]:
    if not all(number.isdecimal() for number in saved):
        raise StateError(f"the checkpoint's loaders make no sense: {str(saved)[:80]}")
    return [(int(number), one) for number, one in saved.items()]


def _parse(saved: Mapping[str, Any]) -> tuple[list[tuple[Position, int | None]], int]:
    match saved:
        case {"now": int(now), "all": list(several)} if 0 <= now < len(several):
            return [_parse_one(one) for one in several], now
    raise StateError(f"the checkpoint's places in the data make no sense: {str(saved)[:80]}")


def _parse_ranks(saved: Mapping[str, Any] | None, number: int, ranks: int) -> list[int]:
    told = [ranks] * number if saved is None else saved.get("ranks", [ranks] * number)
    if type(told) is not list or len(told) != number or not all(type(one) is int and one > 0 for one in told):
        raise StateError(f"the checkpoint's places in the data make no sense: ranks: {str(told)[:80]}")
    return told


def _parse_one(saved: object) -> tuple[Position, int | None]:
    match saved:
        case [dict(position), int() | None as size]:
            return Position.parse(position), size
    raise StateError(f"the checkpoint's place in the data makes no sense: {str(saved)[:80]}")


def _data_of(loader: object) -> object:
    """
    Return what a loader is known by: its dataset, or its sampler where that is of a kind of its own.

    So loaders that are made anew for each epoch are the same one, and so is what goes through one for a progress bar.
    """
    if isinstance(loader, Iterator):
        return _STREAM
    inner = getattr(loader, "iterable", None)  # tqdm's
    if inner is not None:
        return _data_of(inner)
    for of_its_own in (getattr(loader, name, None) for name in ("batch_sampler", "sampler")):
        if of_its_own is not None and type(of_its_own).__name__ not in _USUAL:
            return of_its_own
    dataset = getattr(loader, "dataset", None)
    return loader if dataset is None else dataset


_USUAL: Final = frozenset(
    {
        "BatchSampler",
        "BatchSamplerShard",
        "DistributedSampler",
        "RandomSampler",
        "SeedableRandomSampler",
        "SequentialSampler",
        "StatefulDistributedSampler",
        "_InfiniteConstantSampler",
    }
)


def _size_of(what: Any) -> int | None:  # noqa: ANN401  # duck-typed
    try:
        return len(what)
    except Exception:  # noqa: BLE001  # the script's own; most have none
        return None


def _reference_to(what: object) -> Callable[[], object]:
    """Not to keep large data alive; a list is kept, since another one could come to lie where it was."""
    try:
        return weakref.ref(what)
    except TypeError:
        return lambda: what
