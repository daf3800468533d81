"""
What a manifest says of the state: tensors are in the shards, all else is here, as JSON. Its keys are written nowhere else.

Every rank says what is its own, and rank 0 what all ranks share. Writers dump what readers parse; a key that is not
known is of a later version and says nothing to this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

_KINDS: Final = ("models", "optimizers", "objects")
RESERVED: Final = frozenset({"model", "rng", "loader", "alike"})  # names of tensors begin with these; objects' do not
_FILES: Final = "files"  # the sizes of a rank's files, where it has several; the saver takes it out


@dataclass(frozen=True, kw_only=True)
class Shared:
    """
    What is the same on all ranks. `position` is that of the loader that was gone through last, `places` those of all where there
    are several, `orders` what their orders are made from, by their numbers. Batches are counted by `data_ranks`.
    """

    step: int
    position: Mapping[str, int]
    orders: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Any] | None = None
    data_ranks: int
    models: Mapping[str, Any]
    optimizers: Mapping[str, Any]
    objects: Mapping[str, Any]

    def names(self) -> set[str]:
        return {*self.models, *self.optimizers, *self.objects}

    def dump(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Own:
    """
    What one rank has for itself: random numbers, objects that differ, what optimizers keep in flat parameters, and the states of loaders:
    that of the one gone through last, and those of others by their numbers. `alike` is for the saver, which takes it out:
    by objects' names a sum of their JSON, and the keys of sums of their tensors.
    """

    rng: Any
    objects: Mapping[str, Any] = field(default_factory=dict)
    alike: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Mapping[str, Any] = field(default_factory=dict)
    loader: Any = None
    loaders: Mapping[str, Any] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        """What there is nothing of is not written."""
        nothing = vars(Own(rng=None))
        return {name: value for name, value in vars(self).items() if value != nothing[name]}


_T = TypeVar("_T", Own, Shared)


@dataclass(frozen=True)
class Metadata:
    """What all ranks said, in their order."""

    shared: Shared
    own: Sequence[Own]


def dump(own: Own, shared: Shared | None, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """Return what a rank stages beside its tensors; only one says what is shared, and what of it people know by `names`."""
    said: dict[str, Any] = {"own": own.dump()}
    said |= {} if shared is None else {"shared": shared.dump(), "contents": [*names]}
    return said | ({_FILES: [*sizes]} if len(sizes) > 1 else {})


def parse(state: Mapping[str, Any]) -> Metadata:
    """Return what ranks said. `ValueError`, `TypeError`, `LookupError` or `AttributeError` where no rank says such a thing."""
    ranks = state["ranks"]
    if ranks.keys() != {str(rank) for rank in range(len(ranks))}:
        raise ValueError(f"ranks: expected 0 to {len(ranks) - 1}, got {', '.join(ranks)[:80]}")
    owns = [_parse(Own, ranks[str(rank)]["own"]) for rank in range(len(ranks))]
    shared = _parse(Shared, ranks["0"]["shared"])
    parts = [*(part for own in owns for part in (own.objects, own.optimizers, own.loaders)), shared.orders]
    for part in [*parts, *(getattr(shared, kind) for kind in _KINDS)]:
        _expect_names(part)
    if type(shared.data_ranks) is not int or shared.data_ranks < 1:
        raise ValueError(f"data_ranks: expected a number of ranks, got {str(shared.data_ranks)[:80]!r}")
    return Metadata(shared, owns)


def _parse(kind: type[_T], said: object) -> _T:
    values = _expect_names(said)
    return kind(**{one.name: values[one.name] for one in fields(kind) if one.name in values})


def _expect_names(said: object) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise TypeError(f"expected values by name, got {str(said)[:80]}")
    return said


# ----------------------------------------------- for the saver, of one rank; what is staged may say less


def take_alike(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return and remove what is compared between ranks."""
    found: dict[str, Any] = said.get("own", {}).pop("alike", {})
    return found


def take_sizes(said: dict[str, Any], size: int) -> list[int]:
    """Return and remove the sizes of a rank's files; of only one it is `size`."""
    found: list[int] = said.pop(_FILES, [size])
    return found


def own_objects(said: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = said.get("own", {}).get("objects", {})
    return found


def contents(said: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(said.get("contents", ()))


def parts(state: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what ranks said, each part with the name of what it is of."""
    for said in state.get("ranks", {}).values():
        yield from said.get("own", {}).items()
        for kind in _KINDS:
            yield from said.get("shared", {}).get(kind, {}).items()
