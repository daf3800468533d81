"""
FSDP1: which part of which tensor lies in this rank's flat parameters. The one place that knows torch's private names.

A flat parameter is the tensors of a unit, one behind the other, cut into equal ranges. What a rank has of a tensor is a
range of its elements in the order of memory, and that is a handful of boxes: so it is staged and read where it lies.
The rule: nothing here asks another rank, and where torch is not as we know it a model is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vramfarm.typed import StateError

WRAPPED = "_fsdp_wrapped_module"
_FLAT = "_flat_param"


@dataclass(frozen=True, eq=False)
class Range:
    """
    A rank's elements of a tensor: those from `begin` on, in the order of `order`, the dimensions as they lie in memory.

    `holder` is what training has of it: a parameter, or a state of the same `extent`, in which the elements begin at `at`.
    `copy` of `copies` ranks of `group` hold the same.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    begin: int
    count: int
    holder: Tensor
    extent: tuple[int, ...]
    at: int
    group: tuple[int, ...]
    copy: int
    copies: int

    @property
    def dtype(self) -> torch.dtype:
        return self.holder.dtype

    @property
    def is_meta(self) -> bool:
        return bool(self.holder.is_meta)

    @property
    def has_first(self) -> bool:
        """Whether this rank speaks for what is kept once for the whole tensor: it has the first element."""
        return self.begin == 0 and (self.count > 0 or 0 in self.shape)

    @property
    def is_whole(self) -> bool:
        return self.count == math.prod(self.shape)

    def boxes(self, holder: Tensor | None = None) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return the boxes of the tensor that are here, the largest first: where each begins, and a view of its elements."""
        flat = self._elements(self.holder if holder is None else holder)
        lying = [self.shape[d] for d in self.order]
        back = tuple(self.order.index(d) for d in range(len(self.shape)))
        found, at = [], 0
        for offsets, shape in split(lying, self.begin, self.begin + self.count):
            size = math.prod(shape)
            view = flat[at : at + size].view(shape).permute(back)
            found.append((tuple(offsets[d] for d in back), view))
            at += size
        if not found:
            nothing = self.shape if 0 in self.shape else (0,) * len(self.shape)
            found = [((0,) * len(self.shape), flat[:0].view(nothing))]
        return sorted(found, key=lambda one: -one[1].numel())

    def _elements(self, holder: Tensor) -> Tensor:
        holder = holder.detach()
        if holder.dim() == len(self.order) > 1:
            holder = holder.permute(self.order)
        return holder.view(-1)[self.at : self.at + self.count]


def split(shape: Sequence[int], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut elements [begin, end) of a row-major tensor into boxes, each without holes: (offsets, shape), in order, at most 2 * dimensions - 1."""
    if begin >= end:
        return []
    if len(shape) == 1:
        return [((begin,), (end - begin,))]
    row = math.prod(shape[1:])
    (first, into), (last, rest) = divmod(begin, row), divmod(end, row)
    if first == last:
        return _in_row(shape, first, into, rest)
    head = _in_row(shape, first, into, row) if into else []
    whole = first + bool(into)
    rows = [((whole, *(0,) * (len(shape) - 1)), (last - whole, *shape[1:]))] if last > whole else []
    return head + rows + (_in_row(shape, last, 0, rest) if rest else [])


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((row, *offsets), (1, *inner)) for offsets, inner in split(shape[1:], begin, end)]


@dataclass(frozen=True, eq=False)
class Flat:
    """A flat parameter. `ranges` are its tensors by their raw names, tied ones under each; `holders` says which a parameter stands for."""

    parameter: Tensor
    ranges: dict[str, Range]
    holders: list[tuple[Tensor, tuple[str, ...]]]

    def guards(self) -> list[Tensor]:
        """Return what torch itself writes through, beside the parameters: a copy on its way is true if none of it changes."""
        shard = getattr(self.parameter, "_local_shard", None)
        return [self.parameter] if shard is None else [self.parameter, shard]


def is_unit(module: nn.Module) -> bool:
    """Told by name: a script without torch.distributed never imports it."""
    return type(module).__name__ == "FullyShardedDataParallel"


def flats(model: nn.Module) -> list[Flat]:
    """Return the flat parameters of a model, none if it has no FSDP1; `StateError` where torch is not as we know it."""
    units = [(name, one) for name, one in model.named_modules(remove_duplicate=False) if is_unit(one)]
    return [found for name, unit in units if (found := _flat(f"{name}." if name else "", unit)) is not None]


def cast_buffers(model: nn.Module) -> Iterator[str]:
    """Yield raw names of buffers that FSDP1 changes to another type when training begins."""
    for name, unit in model.named_modules():
        if is_unit(unit) and getattr(getattr(unit, "mixed_precision", None), "buffer_dtype", None) is not None:
            yield from (f"{name}.{inner}" if name else inner for inner, _ in unit.named_buffers())


def own_state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what state_dict() would, but for the flat parameters, whose hooks have all ranks talk to each other."""
    for name, module in model.named_modules(remove_duplicate=False):
        found: dict[str, Any] = {}
        module._save_to_state_dict(found, f"{name}." if name else "", keep_vars=False)  # noqa: SLF001  # state_dict() of one module, without its hooks
        yield from ((key, value) for key, value in found.items() if key.rpartition(".")[2] != _FLAT)


def _flat(prefix: str, unit: Any) -> Flat | None:  # noqa: ANN401  # torch's, and imported late
    try:
        handle = unit._handle  # noqa: SLF001  # there is no public way, here and below
        return None if handle is None else _read(f"{prefix}{WRAPPED}.", handle)
    except (AttributeError, TypeError, ValueError, AssertionError) as error:
        raise StateError(
            f"FullyShardedDataParallel of torch {torch.__version__} is not as we know it ({error!r}): "
            "use torch.distributed.fsdp.fully_shard"
        ) from None


def _read(prefix: str, handle: Any) -> Flat:  # noqa: ANN401  # as above
    flat = handle.flat_param
    if any(one is not None for one in flat._param_extensions):  # noqa: SLF001
        raise StateError("FullyShardedDataParallel around tensor parallel weights cannot be saved: use fully_shard")
    is_cut, ranks = bool(handle.uses_sharded_strategy), _ranks_of(handle.process_group)
    shard = getattr(flat, "_local_shard", flat)
    is_shown = flat.data_ptr() == shard.data_ptr() and flat.numel() == shard.numel()
    views = is_shown and handle._unsharded_flat_param_for_skipped_views is None  # noqa: SLF001
    originals = flat._params  # noqa: SLF001  # None: the optimizer has the flat parameter itself
    ranges: dict[str, Range] = {}
    infos = zip(flat._fqns, flat._shapes, flat._strides, flat._shard_param_infos, strict=True)  # noqa: SLF001
    for number, (name, shape, strides, info) in enumerate(infos):
        begin, end, at = (info.intra_param_start_idx, info.intra_param_end_idx + 1, info.offset_in_shard) if info.in_shard else (0, 0, 0)  # fmt: skip
        assert 0 <= begin <= end <= math.prod(shape), name
        assert at + end - begin <= shard.numel(), name
        holder = flat if is_shown else shard
        if originals is not None:
            holder, at = originals[number] if views else holder.detach()[at : at + end - begin], 0
            assert holder.numel() == end - begin, f"{name} has {holder.numel()} elements of {end - begin}"
        ranges[prefix + name] = Range(
            shape=tuple(shape),
            order=tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], d))),
            begin=begin,
            count=end - begin,
            holder=holder,
            extent=tuple(shard.shape) if originals is None else (end - begin,) if is_cut else tuple(shape),
            at=at,
            group=ranks,
            copy=0 if is_cut else handle.rank,
            copies=1 if is_cut else len(ranks),
        )
    names = list(ranges)
    holders: list[tuple[Tensor, tuple[str, ...]]] = [(flat, tuple(names))]
    if originals is not None:
        holders = [(parameter, (name,)) for parameter, name in zip(originals, names, strict=True)]
    return Flat(flat, ranges | _tied(prefix, flat, ranges), holders)


def _tied(prefix: str, flat: Any, ranges: dict[str, Range]) -> dict[str, Range]:  # noqa: ANN401  # as above
    found = {}
    for name, _, module, first_name, _, first_module in flat._shared_param_infos:  # noqa: SLF001
        found[prefix + _join(module, name)] = ranges[prefix + _join(first_module, first_name)]
    return found


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _ranks_of(group: Any) -> tuple[int, ...]:  # noqa: ANN401  # as above
    return tuple(torch.distributed.get_process_group_ranks(group))
