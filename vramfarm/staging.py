"""
From tensors to the bytes of a shard: which box of which tensor this rank writes, and the copy.

Every tensor is written once. What is sharded is written where it lies; of what is replicated
the weights are spread over the ranks by size, and the rest is rank 0's.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from vramfarm import image
from vramfarm.flat import Range
from vramfarm.image import Box
from vramfarm.typed import StateError

DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ALONE: Final[Mapping[tuple[int, ...], tuple[int, int]]] = {}
_PLAIN: Final = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
TORCH_DTYPES: Final = {name: dtype for dtype, name in DTYPES.items()}


Meshes = Mapping[tuple[int, ...], tuple[int, int]]
"""Groups of ranks that tensors are spread over; several hold the same: which of them each is, and how many there are."""


@dataclass(frozen=True)
class Piece:
    """
    A rank's part of a tensor: `copy` of `copies` ranks hold the same bytes.

    A part that is no box is several: the largest of them, and `edges`. `source` is the tensor that they are parts of.
    """

    box: Box
    local: Tensor
    shape: tuple[int, ...]
    copy: int = 0
    copies: int = 1
    spread: bool = False
    source: Tensor | None = None
    edges: tuple[Piece, ...] = ()

    @property
    def address(self) -> int:
        """Where in memory the tensor is of which this is a part."""
        return int((self.local if self.source is None else self.source).data_ptr())


def piece_of(  # noqa: PLR0913  # a tensor and its place
    key: str, tensor: Tensor, *, rank: int, world_size: int, spread: bool = False, meshes: Meshes = _ALONE
) -> Piece:
    """Return this rank's part of a tensor; `StateError` for kinds whose bytes we do not know."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_meta:
        raise StateError(f"{key}: cannot be saved: a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")
    if is_dtensor(tensor):
        return _piece_of_dtensor(key, tensor, dtype, _group_of(key, ranks_of(tensor), world_size, meshes))
    _expect_plain(key, tensor)
    shape = tuple(tensor.shape)
    box = Box(key, dtype, shape, (0,) * len(shape))
    return Piece(box, tensor.detach(), shape, copy=rank, copies=world_size, spread=spread)


def _expect_plain(key: str, tensor: Tensor) -> None:
    """Another kind of tensor shows a type and a shape, and its bytes are elsewhere."""
    if type(tensor) not in _PLAIN:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise StateError(f"{key}: cannot be saved: a tensor of type {kind}, whose bytes only that type knows")


def piece_of_range(key: str, found: Range, *, world_size: int, meshes: Meshes, holder: Tensor | None = None) -> Piece:
    """The same of a tensor in a flat parameter, or of a state that lies as that does."""
    holder = found.holder if holder is None else holder
    _expect_plain(key, holder)
    dtype = DTYPES.get(holder.dtype)
    if dtype is None:
        raise StateError(f"{key}: cannot be saved: a tensor of {holder.dtype}")
    copy, copies = copy_of(key, found, world_size, meshes)
    whole, *edges = [
        Piece(
            Box(key, dtype, tuple(local.shape), offsets), local, found.shape, copy, copies, spread=True, source=holder
        )
        for offsets, local in found.boxes(holder)
    ]
    return replace(whole, edges=tuple(edges))


def copy_of(key: str, found: Range, world_size: int, meshes: Meshes) -> tuple[int, int]:
    """Return which of the ranks that hold the same this one is, and how many there are."""
    copy, copies = _group_of(key, found.group, world_size, meshes)
    return copy * found.copies + found.copy, copies * found.copies


def is_dtensor(tensor: object) -> bool:
    """Told by name: a script without torch.distributed never imports it."""
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "placements")


def ranks_of(tensor: Any) -> tuple[int, ...]:  # noqa: ANN401  # DTensor is imported late
    """Return the ranks over which a DTensor, or a flat parameter's tensor, is spread."""
    if isinstance(tensor, Range):
        return tensor.group
    return tuple(tensor.device_mesh.mesh.flatten().tolist())


def arrange(groups: Sequence[Sequence[Sequence[int]]], rank: int) -> dict[tuple[int, ...], tuple[int, int]]:
    """
    Return what a rank knows of the groups that all ranks named, each in the order of its model.

    A layer may be spread over a part of the ranks only; the other parts hold it, too, and one of them writes it.
    """
    known = {}
    for number, mine in enumerate(groups[rank]):
        alike = sorted({tuple(several[number]) for several in groups})
        if sorted(member for group in alike for member in group) != list(range(len(groups))):
            raise StateError(f"weights are spread over the ranks {alike}, and not all ranks have them")
        known[tuple(mine)] = (alike.index(tuple(mine)), len(alike))
    return known


def _group_of(key: str, ranks: tuple[int, ...], world_size: int, meshes: Meshes) -> tuple[int, int]:
    if len(ranks) == world_size:
        return 0, 1
    if ranks not in meshes:
        raise StateError(f"{key}: cannot be saved: spread over ranks {list(ranks)}, over which no weight is")
    return meshes[ranks]


def _piece_of_dtensor(key: str, tensor: Any, dtype: str, group: tuple[int, int]) -> Piece:  # noqa: ANN401  # as above
    mesh, placements = tensor.device_mesh, tensor.placements
    _expect_plain(key, tensor._local_tensor)  # noqa: SLF001  # to_local() may wait
    if any(p.is_partial() for p in placements):
        raise StateError(f"{key}: cannot be saved: a DTensor with a pending reduction")
    shape, offsets = local_box(tensor)
    copy, copies = group
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            copy, copies = copy * mesh.size(dim) + mesh.get_local_rank(dim), copies * mesh.size(dim)
    box = Box(key, dtype, shape, offsets)
    return Piece(box, local_of(tensor), tuple(tensor.shape), copy=copy, copies=copies, spread=True)


def local_of(tensor: Any) -> Tensor:  # noqa: ANN401  # DTensor is imported late
    """Return the memory behind a tensor on this rank."""
    return tensor._local_tensor.detach() if is_dtensor(tensor) else tensor.detach()  # noqa: SLF001  # to_local() may wait


def local_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:  # noqa: ANN401  # DTensor is imported late
    """Return shape and offsets of this rank's box."""
    if not is_dtensor(tensor):
        return tuple(tensor.shape), (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape) == tuple(local_of(tensor).shape)
    return tuple(shape), tuple(offsets)


def choose(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces that this rank writes, edges behind what they are edges of. All ranks choose alike, so each byte has one writer."""
    loads: dict[int, list[int]] = {}
    mine = []
    for piece in sorted(pieces, key=_largest_first):
        load = loads.setdefault(piece.copies, [0] * piece.copies)
        writer = load.index(min(load)) if piece.spread else 0
        load[writer] += whole_bytes(piece)
        if writer == piece.copy and not _is_elsewhere(piece):
            mine += [piece, *piece.edges]
    return mine


def _largest_first(piece: Piece) -> tuple[int, str]:
    return -whole_bytes(piece), piece.box.key


def whole_bytes(piece: Piece) -> int:
    """Return the size of the whole tensor."""
    return math.prod(piece.shape) * image.ITEM_BYTES[piece.box.dtype]


def _is_elsewhere(piece: Piece) -> bool:
    """An uneven split leaves some ranks with nothing of a tensor."""
    return piece.local.numel() == 0 and math.prod(piece.shape) > 0


def as_tensor(memory: Any) -> Tensor:  # noqa: ANN401  # anything with a buffer
    """Return the bytes of a buffer as a tensor, without a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a read-only buffer warns; nobody writes through it
        return torch.frombuffer(memory, dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """Return a copy of a tensor's bytes. Its own way to them goes through numpy, which need not be there."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())) if flat.numel() else b""
