"""
What is saved, and how it is put back: models, optimizers, anything with a state_dict, random numbers.

Tensors go to the shards under names that do not depend on wrappers (DDP, FSDP2, compile,
activation checkpointing); all else goes to the manifest as typed JSON. On a fresh start no
optimizer state is read: torch would make a fake step to have some.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfarm import flat, staging, typed
from vramfarm.flat import Range
from vramfarm.loading import Reader
from vramfarm.staging import Piece
from vramfarm.typed import StateError

MODEL: Final = "model"
_EXTRA: Final = "_extra_state"
Then = Callable[[], None]
"""What is left to do for a part of the state when its tensors are filled."""


@dataclass
class Snapshot:
    """The tensors of one rank at one step, each under a name of its own."""

    rank: int
    world_size: int
    meshes: staging.Meshes = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    _keys: set[str] = field(default_factory=set)

    def add(self, key: str, tensor: Tensor, *, spread: bool = False) -> str:
        """Add a tensor. Return its key. `StateError` if another one has its key, as those of {"a.b": one, "a": {"b": other}} have."""
        if key in self._keys:
            raise StateError(
                f"{key}: two tensors would have this name in the checkpoint; give them keys that differ as text, and without dots"
            )
        self._keys.add(key)
        piece = staging.piece_of(
            key, tensor, rank=self.rank, world_size=self.world_size, spread=spread, meshes=self.meshes
        )
        self.pieces.append(piece)
        return key

    def add_range(self, key: str, found: Range, holder: Tensor | None = None) -> None:
        self.pieces.append(
            staging.piece_of_range(key, found, world_size=self.world_size, meshes=self.meshes, holder=holder)
        )

    def add_beside(self, key: str, tensor: Tensor, found: Range) -> None:
        """Add what an optimizer keeps of a tensor in a flat parameter: laid out as that is, or once for the whole tensor."""
        if tuple(tensor.shape) == found.extent:
            self.add_range(key, found, tensor)
            return
        if tensor.numel() != 1 and not found.is_whole:
            raise StateError(
                f"{key}: cannot be saved: {tuple(tensor.shape)} for {found.extent} elements on this rank, which cannot be split "
                "for another number of ranks"
            )
        if found.has_first:
            copy, copies = staging.copy_of(key, found, self.world_size, self.meshes)
            alone = staging.piece_of(key, tensor, rank=copy, world_size=copies, spread=True)
            self.pieces.append(alone)

    def encode(self, value: object, path: str, *, spread: bool = False, beside: Range | None = None) -> Any:  # noqa: ANN401  # JSON
        """Return JSON for `value`; its tensors go to the shards, those `beside` a tensor as that is spread."""

        def leaf(where: str, inner: Any) -> Any:  # noqa: ANN401  # whatever a state_dict holds
            if type(inner).__name__ == "ndarray":  # the bytes of a large one
                inner = torch.from_numpy(inner if inner.flags.writeable else inner.copy())
            if isinstance(inner, Tensor):
                if beside is not None:
                    self.add_beside(where, inner, beside)
                else:
                    where = self.add(where, inner, spread=spread)
                return {typed.TAG: "tensor", "v": where}
            if isinstance(inner, torch.Size):
                return {typed.TAG: "size", "v": list(inner)}
            if isinstance(inner, torch.dtype):
                return {typed.TAG: "dtype", "v": staging.DTYPES.get(inner) or typed.refuse(where, inner)}
            return typed.refuse(where, inner)

        try:
            return typed.encode(value, path, leaf)
        except RecursionError:
            raise StateError(f"{path}: cannot be saved: it has itself in it, or is nested too deeply") from None

    def encode_own(self, value: object, path: str) -> Any:  # noqa: ANN401  # JSON
        """The same for state that differs from rank to rank: every rank writes its tensors itself, but for those that are spread."""
        alone = _Alone(rank=0, world_size=1, common=self, path=path)
        encoded = alone.encode(value, f"{path}.{self.rank}")
        self.pieces += alone.pieces
        return encoded


@dataclass
class _Alone(Snapshot):
    """What one rank has of an object. A DTensor in it is all ranks', under a name of all ranks."""

    common: Snapshot = field(kw_only=True)
    path: str = field(kw_only=True)

    def add(self, key: str, tensor: Tensor, *, spread: bool = False) -> str:
        if staging.is_dtensor(tensor):
            return self.common.add(self.path + key.removeprefix(f"{self.path}.{self.common.rank}"), tensor)
        return super().add(key, tensor, spread=spread)


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:  # noqa: ANN401  # JSON in, anything out
    """Return what `Snapshot.encode` was given; `tensor(key)` brings the tensors."""

    def leaf(kind: str, inner: Any) -> Any:  # noqa: ANN401  # see above
        match kind:
            case "tensor":
                return tensor(inner)
            case "size":
                return torch.Size(inner)
            case "dtype":
                return staging.TORCH_DTYPES[inner]
        raise StateError(f"the checkpoint holds a value of an unknown kind: {kind!r}")

    return typed.decode(value, leaf)


# ------------------------------------------------------------------------------- modules


def outline(models: Mapping[str, nn.Module]) -> list[Any]:
    """Return what all ranks' models must agree on, and the groups of ranks that this rank's tensors are spread over, as JSON."""
    tensors = [(f"{p}.{n}", v) for p, m in models.items() for n, v in named_state(m) if isinstance(v, Tensor | Range)]
    text = "\n".join(f"{key} {tuple(value.shape)} {value.dtype}" for key, value in tensors)
    spread = [value for _, value in tensors if isinstance(value, Range) or staging.is_dtensor(value)]
    groups = dict.fromkeys(map(staging.ranks_of, spread))
    return [len(tensors), zlib.crc32(text.encode()), list(groups)]


def compare(outlines: Sequence[Sequence[Any]], rank: int) -> staging.Meshes:
    """Return what a rank's share of each tensor depends on; `StateError` where ranks hold different models."""
    for other, (count, checksum, groups) in enumerate(outlines):
        if [count, checksum, len(groups)] != [*outlines[0][:2], len(outlines[0][2])]:
            how = (
                "with other names, shapes, types or placements"
                if count == outlines[0][0]
                else f"rank 0 has {outlines[0][0]}"
            )
            raise StateError(
                f"rank {other} holds another model than rank 0: {count} tensors, {how}; "
                "a model whose layers are on different ranks (pipeline parallel) cannot be saved"
            )
    return staging.arrange([groups for _, _, groups in outlines], rank)


def is_tensor_parallel(module: nn.Module) -> bool:
    """Whether weights are sharded by more than fully_shard: then some ranks must see the same data."""
    sharded = [
        sum(not placement.is_replicate() for placement in parameter.placements)
        for parameter in module.parameters()
        if staging.is_dtensor(parameter.data)
    ]
    fully_sharded = any(type(m).__name__.startswith("FSDP") for m in module.modules())
    return any(number > int(fully_sharded) for number in sharded)


def clean_name(module: nn.Module, name: str) -> str:
    """Return a parameter's name as it would be without wrappers around modules."""
    current: Any = module
    kept = []
    for part in name.split("."):
        while (wrapped := _wrapped(current)) is not None and wrapped != part:
            current = getattr(current, wrapped)  # the wrapper took itself out of the name
        if wrapped is None:
            kept.append(part)
        current = getattr(current, part, None)
    return ".".join(kept)


def _wrapped(module: object) -> str | None:
    """Return the attribute by which a wrapper holds its module; None if it is no wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    return _WRAPPERS.get(type(module).__name__)


_WRAPPERS: Final = {
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": flat.WRAPPED,
}


def named_state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """
    Yield what a module's state_dict holds, under clean names. Tensors share their memory with the module.

    What is in a flat parameter is a `Range`: what this rank has of the tensor.
    """
    ranges = ranges_of([module])
    raw_state = flat.own_state(module) if ranges else module.state_dict().items()
    for raw, value in raw_state:
        name = clean_name(module, raw)
        assert not any(wrapped in name for wrapped in _WRAPPERS.values()), name
        if name not in ranges:
            yield name, value
    yield from ranges.items()


def extra_state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what modules keep that is no tensor of theirs (`get_extra_state`), under clean names."""
    if any(_has_extra(one) for one in module.modules()):
        yield from ((name, value) for name, value in named_state(module) if name.endswith(_EXTRA))


def ranges_of(modules: Sequence[nn.Module]) -> dict[str, Range]:
    """Return what this rank has of the tensors in flat parameters, by clean names, of several modules the first's."""
    found: dict[str, Range] = {}
    for module in modules:
        for one in flat.flats(module):
            found = {clean_name(module, raw): part for raw, part in one.ranges.items()} | found
    return found


def named_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that training has, tied ones and flat ones once for each name, under clean names."""
    flats = flat.flats(module)
    held = [(clean_name(module, name), holder) for one in flats for holder, names in one.holders for name in names]
    known = {id(one.parameter) for one in flats} | {id(holder) for _, holder in held}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in known:
            yield clean_name(module, name), parameter
    yield from held


def parameter_names(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return the clean name of each parameter, by identity; of a tied one the first, of a flat one those of all that is in it."""
    flat_ones = {id(one.parameter) for one in flat.flats(module)}
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in named_parameters(module):
        if id(parameter) in flat_ones:
            names[id(parameter)] = (*names.get(id(parameter), ()), name)
        else:
            names.setdefault(id(parameter), (name,))
    return names


def collect_module(snapshot: Snapshot, prefix: str, module: nn.Module) -> Any:  # noqa: ANN401  # JSON
    """Weights are the same on all ranks and are spread; buffers may differ, and rank 0's count (as in DDP)."""
    weights = {name for name, _ in named_parameters(module)}
    extra = {}
    for name, value in named_state(module):
        if isinstance(value, Range):
            snapshot.add_range(f"{prefix}.{name}", value)
        elif name.endswith(_EXTRA):
            extra[name] = snapshot.encode(value, f"{prefix}.{name}")
        elif any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True)):
            raise StateError(
                f"{prefix}.{name}: an expanded tensor, into which nothing can be loaded: give it memory, by .contiguous()"
            )
        else:
            snapshot.add(f"{prefix}.{name}", value, spread=name in weights)
    return extra


def plan_module(reader: Reader, prefix: str, module: nn.Module, extra: Mapping[str, Any]) -> tuple[int, Then]:
    """Ask for what a module holds, to be filled in place; also return how many tensors that is. `StateError` lists what does not fit."""
    targets: dict[str, Any] = {f"{prefix}.{n}": v for n, v in named_state(module) if not n.endswith(_EXTRA)}
    extra_tensors = tuple(f"{prefix}.{name}" for name in extra)
    saved = {k for k in reader.keys if k.startswith(f"{prefix}.") and not k.startswith(extra_tensors or ("\0",))}
    cast = {f"{prefix}.{clean_name(module, raw)}" for raw in flat.cast_buffers(module)}
    _check_fit(reader, prefix, targets, saved, cast)
    for key, tensor in targets.items():
        if key not in cast:
            fill_from(reader, key, tensor)
    brought = {key: reader.whole(key) for key in targets.keys() & cast}
    owners = (
        [(raw, one) for raw, one in module.named_modules(remove_duplicate=False) if _has_extra(one)] if extra else []
    )
    names = [(clean_name(module, f"{raw}.{_EXTRA}" if raw else _EXTRA), one) for raw, one in owners]
    decoded = [(one, decode(extra[name], reader.whole)) for name, one in names if name in extra]

    def then() -> None:
        for key, value in brought.items():
            targets[key].copy_(value)
        for one, value in decoded:
            one.set_extra_state(value)
        _expect_filled(reader, prefix, module, targets)

    return len(targets), then


def _expect_filled(reader: Reader, prefix: str, module: nn.Module, targets: Mapping[str, Any]) -> None:
    """A state_dict may give tensors that are made for the occasion, as a quantized layer does: what they are filled with is lost."""
    there = {int(one.untyped_storage().data_ptr()) for one in _held(module)}
    made = {
        key: tensor
        for key, tensor in targets.items()
        if not isinstance(tensor, Range) and staging.local_of(tensor).untyped_storage().data_ptr() not in there
    }
    if not made:
        return
    now = {f"{prefix}.{name}": value for name, value in named_state(module)}
    lost = [key for key, tensor in made.items() if not torch.equal(_bytes_of(now[key]), _bytes_of(tensor))]
    if lost:
        raise StateError(
            f"{reader.manifest.ref.name}: {some(set(lost))}: the module makes them anew for its state_dict, so they cannot be put "
            "back; build it from what it was built from then"
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    return staging.local_of(tensor).contiguous().view(-1).view(torch.uint8)


def _held(module: nn.Module) -> Iterator[Tensor]:
    for one in module.modules():
        yield from (staging.local_of(p) for p in one._parameters.values() if p is not None)  # noqa: SLF001  # tensors of FSDP1 are no parameters now and then
        yield from (staging.local_of(b) for b in one._buffers.values() if b is not None)  # noqa: SLF001


def _has_extra(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def some(names: set[str]) -> str:
    """Name enough of them to recognise all."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""  # noqa: PLR2004  # a line
    return ", ".join(sorted(names)[:5]) + more or "none"


def _check_fit(
    reader: Reader, prefix: str, targets: Mapping[str, Tensor | Range], saved: set[str], cast: set[str]
) -> None:
    wrong = [f"{key}: not in the checkpoint" for key in sorted(targets.keys() - saved)]
    wrong += [f"{key}: in the checkpoint, not in the {prefix}" for key in sorted(saved - targets.keys())]
    for key in sorted(targets.keys() & saved):
        tensor, found = targets[key], (reader.shape(key), reader.dtype(key))
        if (tuple(tensor.shape), found[1] if key in cast else tensor.dtype) != found:
            wrong.append(
                f"{key}: expected {tuple(tensor.shape)} {tensor.dtype}, the checkpoint has {found[0]} {found[1]}"
            )
        elif tensor.is_meta:
            wrong.append(f"{key}: is on the meta device; call to_empty() first")
    if wrong:
        more = [f"and {len(wrong) - 20} more"] if len(wrong) > 20 else []  # noqa: PLR2004  # a screenful
        raise StateError("\n  ".join([f"{reader.manifest.ref.name} does not fit:", *wrong[:20], *more]))


def fill_from(reader: Reader, key: str, tensor: Tensor | Range, holder: Tensor | None = None) -> None:
    """Fill what this rank has of a tensor; of one in a flat parameter, or of a state that lies as that does: `holder`."""
    if isinstance(tensor, Range):
        for offsets, view in tensor.boxes(holder):
            reader.read_into(key, view, offsets)
        return
    reader.read_into(key, staging.local_of(tensor), staging.local_box(tensor)[1])


# ------------------------------------------------------------------------- other objects


def plan_object(reader: Reader, thing: Any, saved: Any, name: str, rank: int | None = None) -> Then:  # noqa: ANN401  # anything with load_state_dict
    """Ask for any object's state, or for what a `rank` had of it; tensors take the layout and place that they have in the object now."""
    present = tensors_by_path(thing)

    def tensor(key: str) -> Tensor:
        like = present.get(key.removeprefix(f"{name}.{rank}.").removeprefix(f"{name}."))
        if like is None or tuple(like.shape) != reader.shape(key):
            return reader.whole(key)
        made = torch.empty_like(like, dtype=reader.dtype(key), requires_grad=False)
        fill_from(reader, key, made)
        return made

    decoded = decode(saved, tensor)
    return lambda: thing.load_state_dict(decoded)


def tensors_by_path(thing: Any) -> dict[str, Tensor]:  # noqa: ANN401  # anything with state_dict
    found: dict[str, Tensor] = {}

    def leaf(path: str, value: Any) -> None:  # noqa: ANN401  # whatever it holds
        if isinstance(value, Tensor):
            found[path.removeprefix(".")] = value

    typed.encode(thing.state_dict(), "", leaf)
    return found
